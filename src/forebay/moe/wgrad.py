"""Autograd functions of the experts: deferred weight gradients, and saved rows in pages.

Input: what `forebay.moe.experts` takes. Output: y, and gradients that are bitwise those of `forebay.moe.experts_op`.
With a `WeightGradients`, backward computes input gradients and appends one callable per call for the weight
gradients; with `Pages`, x and h wait in pages that hold only the rows that arrived. The autograd node owns what is
saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from forebay.kernels.paging import PagedRows, PageTable, restore, stash
from forebay.moe.experts_op import (
    add_weight_gradient,
    experts_backward,
    experts_backward_op,
    experts_forward,
    experts_op,
    experts_weight_backward_op,
    gradients,
    refuse_second_derivative,
    save_for_backward,
)
from forebay.moe.routing import Routing

# The experts' weight gradients, left for later: zero-bubble pipeline schedules fill their idle time with them.
#
#     store = WeightGradients()
#     y = experts(..., deferred=store)
#     with store.collecting() as pending:
#         y.backward(dy)              # all gradients but gate_up's and down's: the input half
#     ...
#     for make in pending:
#         make()                      # those two: the weight half
#
# Where it is known what sums the gradients (`WeightGradients.sums`), the weight half adds to that itself and no gradient is
# ever there (`forebay.moe.experts_op.add_weight_gradient`): autograd has nothing left to do, and no hook of the parameter runs.
#
# The input half makes dx and the gradients of the routing weights and of the biases, and appends one callable for each experts
# call whose gate_up or down is trained. Calling it makes what is missing and lets autograd take it from there: through views
# and `DTensor.to_local` to the parameter, into `.grad`, past the hooks that wait there. In the input half nothing of that runs.
# A callable is called once and holds nothing afterwards. Backward passes outside of `collecting` make all gradients at once.
# Either way each call's gradients are bitwise those of experts without a store, of the same kernels on the same operands; what
# is added to a known sum is of another kernel, and not rounded to the operands' dtype before.
#
# What waits between the halves, bytes in bf16, R rows of T tokens (R = T*K, or `max_rows`):
#
#     x [T, H], dh [R, 2I]         for gate_up    2TH + 4RI; x is the one that was saved, no copy
#     dy [T, H], act [R, I]        for down       2TH + 2RI; dy is the gradient that came in, no copy
#     order [R], offs [E] int32                   4R + 4E
#
# T=16384, K=8, H=2048, I=768, E=128: 448 + 256 MiB, and h's 384 MiB are free again. h is made again at most once, in the input
# half. The rows of x and dy are gathered in the weight half: 2RH bytes beside what waits and the gradients themselves. down's
# gradient comes first, and dy and act are free before gate_up's is made. The input half's peak is that of a whole backward.
# Parameters are not kept: FSDP2 may free them in between. x and dy must not be written to in between: a callable that finds
# them changed raises RuntimeError.
#
# Who owns what: the caller owns the list, a callable owns what waits for it. Dropping them frees it, and the gradients are
# never made. A `WeightGradients` holds the list while it collects, and what was given to it to find sums by; a copy of it has
# neither.
#
# How. Autograd runs every node behind one that ran, with "no gradient" if it got none: a parameter's hooks would run in the
# input half, and what leads from the parameter to the experts would free what it saved. So the experts' node has no edge to
# gate_up and down. A second node has them, and is run on its own: by the callable, or by the experts' node at once.
#
# That is what a store costs: `torch.autograd.grad` cannot be asked for gate_up's and down's gradients (they are "not used in
# the graph"), and asked for others it accumulates these into `.grad` all the same, or appends. A parameter that several calls
# of one graph share gets their gradients one by one and not as a sum. And it is for eager mode: `torch.compile` breaks its
# graph here.

Sum = Callable[[], Tensor | None]
"""Brings the sum that a weight's gradient is to be added to, of its shape; None: autograd is to take the gradient."""


def no_sums(weight: Tensor) -> Sum:
    """Autograd is to take every gradient."""
    return _nothing


def _nothing() -> None:
    return None


class WeightGradients:
    """Whether experts make their weight gradients at once or later, for all experts calls that were given this object.

    Attributes:
        sums: for gate_up or down as an experts call was given it, what brings its sum when the gradient is made later; `no_sums`.
    """

    def __init__(self) -> None:
        self.sums: Callable[[Tensor], Sum] = no_sums
        self._pending: list[Callable[[], None]] | None = None

    def __reduce__(self) -> tuple[type[WeightGradients], tuple[()]]:
        return WeightGradients, ()  # a copied model's weights have other sums, and nothing waits for it

    @contextmanager
    def collecting(self) -> Iterator[list[Callable[[], None]]]:
        """Backward passes within append to the list, in the order in which they come to the experts.

        Raises:
            RuntimeError: this store is collecting already.
        """
        if self._pending is not None:
            raise RuntimeError("these WeightGradients are collecting already; leave that `with` before the next one")
        pending: list[Callable[[], None]] = []
        self._pending = pending
        try:
            yield pending
        finally:
            self._pending = None

    @property
    def pending(self) -> list[Callable[[], None]] | None:
        """The list that is being collected, None outside of `collecting`."""
        return self._pending


@torch.compiler.disable(reason="experts with deferred weight gradients run in eager mode")
def deferring_experts(store: WeightGradients, inputs: tuple[Any, ...]) -> Tensor:
    """y of `experts_op(*inputs)`, whose backward asks the store when to make the weight gradients."""
    x, ids, weights, gate_up, down, *rest = inputs
    if not (torch.is_grad_enabled() and (gate_up.requires_grad or down.requires_grad)):
        return experts_op(*inputs)[0]
    needs = tuple(t is not None and t.requires_grad for t in inputs[:7])
    end = End(gate_up, down, store.sums(gate_up), store.sums(down))
    # The anchor makes y require a gradient where gate_up and down alone do.
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    y, *_ = _Experts.apply(x, ids, weights, gate_up.detach(), down.detach(), *rest, anchor, needs, end, store)
    return y


class _Experts(torch.autograd.Function):
    """The autograd of `forebay::experts` without edges to gate_up and down; `End` has those."""

    @staticmethod
    def forward(ctx, *args):
        *inputs, _, needs, ctx.end, ctx.store = args
        output = experts_op(*inputs)
        save_for_backward(ctx, inputs, output, needs)
        return output

    @staticmethod
    def backward(ctx, dy, *_):
        if dy is None:
            return (None,) * 18
        refuse_second_derivative()
        run = _all_at_once if ctx.store.pending is None else _input_half
        dx, d_weights, *d_biases = run(ctx, dy)
        return dx, None, d_weights, None, None, *d_biases, *(None,) * 11


def _all_at_once(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, _, d_weights, d_gate_up, d_down, *d_biases = gradients(ctx, dy)[:7]
    given_away = [None if d is None else [d].pop for d in (d_gate_up, d_down)]
    del d_gate_up, d_down
    ctx.end.run(*given_away)
    return dx, d_weights, *d_biases


def _input_half(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    made = experts_backward_op(dy, *saved, *ctx.settings, *ctx.needs, defer_weight_gradients=True)
    dx, d_weights, dh, act, *d_biases = (g if need else None for g, need in zip(made, ctx.needs, strict=True))
    x, _, order, inverse, offs, *_ = saved
    transposed, routing = ctx.settings[2], (order, offs, inverse.shape[1])
    d_gate_up = None if dh is None else WeightGradientOperands("tokens", x.detach(), dh, *routing, transposed)
    # dy itself, not an alias: whoever else is handed dy as a gradient sees that it is not theirs alone to add to.
    d_down = None if act is None else WeightGradientOperands("gradient", dy, act, *routing, not transposed)
    ctx.store.pending.append(DeferredWeightGradient(ctx.end, d_gate_up, d_down))
    return dx, d_weights, *d_biases


class WeightGradientOperands:
    """Operands of `experts_weight_backward_op`, given up when the gradient is made. `name` says what the first one is, which may
    also be something that brings it."""

    def __init__(self, name: str, tokens: Tensor | Callable[[], Tensor], *others: Any):
        self._name, self._operands = name, (tokens, *others)
        self._version = tokens._version if isinstance(tokens, Tensor) else None

    def __call__(self) -> Tensor:
        return experts_weight_backward_op(*self._take())

    def add_to(self, total: Tensor) -> None:
        """Make the gradient where it is summed."""
        add_weight_gradient(total, *self._take())

    def _take(self) -> tuple[Any, ...]:
        (tokens, *others), self._operands = self._operands, ()
        if not isinstance(tokens, Tensor):
            return tokens(), *others
        # A leaf's `.grad` may be a view of dy, to which the next microbatch's is added in place.
        if tokens._version != self._version:
            raise RuntimeError(
                f"the {self._name} that came into the experts changed before their weight gradients were made; "
                "write to that memory afterwards, or to a copy"
            )
        return tokens, *others


class DeferredWeightGradient:
    """What is appended: adds one experts call's weight gradients to their sums, or hands them over to autograd."""

    def __init__(self, end: End, d_gate_up: WeightGradientOperands | None, d_down: WeightGradientOperands | None):
        self._waiting: tuple[End, WeightGradientOperands | None, WeightGradientOperands | None] | None = (
            end,
            d_gate_up,
            d_down,
        )

    def __call__(self) -> None:
        if self._waiting is None:
            raise RuntimeError("these weight gradients have been made already; each callable is called once")
        (end, *makers), self._waiting = self._waiting, None
        end.sum_or_run(*makers)


class End:
    """Edges to the weights' gradients, as autograd found them in forward: of the parameters' graph, not of their memory."""

    def __init__(self, gate_up: Tensor, down: Tensor, *sums: Sum):
        self._makers: list[Callable[[], Tensor] | None] = []
        self._sums = sums
        self._root = _Weights.apply(self._makers, gate_up, down)

    def sum_or_run(self, *left: WeightGradientOperands | None) -> None:
        """Add gate_up's and down's gradients to their sums, down's first; backward from here on for those that have none."""
        makers = list(left)
        for place in (1, 0):
            maker = makers[place]
            total = self._sums[place]() if maker is not None else None
            if maker is not None and total is not None:
                maker.add_to(total)
                makers[place] = None
        if any(maker is not None for maker in makers):
            self.run(*makers)

    def run(self, d_gate_up: Callable[[], Tensor] | None, d_down: Callable[[], Tensor] | None) -> None:
        """Backward from here on, with what the two make; None for a frozen one."""
        self._makers[:] = d_gate_up, d_down
        torch.autograd.backward(self._root, self._root.detach())


class _Weights(torch.autograd.Function):
    """The node with the edges.

    Gradients that were handed to `torch.autograd.backward` would be held from outside, and a parameter's first one be copied
    into `.grad`. Made in a node they become it.
    """

    @staticmethod
    def forward(ctx, makers, gate_up, down):
        ctx.makers = makers
        return torch.empty(0, device=gate_up.device)

    @staticmethod
    def backward(ctx, _):
        d_gate_up, d_down = ctx.makers
        ctx.makers.clear()
        # In the order of a whole backward.
        second = None if d_down is None else d_down()
        return None, None if d_gate_up is None else d_gate_up(), second


# Experts that save the rows they really had: x and h in pages, whatever the capacity of the buffers they were computed in.
#
# In: what `forebay.moe.experts` takes, on rows that came from other ranks, and `Pages`, which hands out room for them. Out: y,
# bitwise that of experts that keep x and h, as are all gradients.
#
# Without a host synchronisation nobody but the device knows how many rows arrived: x is [C, H] and h [S, 2I] for capacities C and
# S, and autograd would save all of that. Here
#
#     h    the activation's kernel writes its live rows into pages while it reads them, and h is dropped. Its backward reads
#          them from there. One more write: 4I bytes a row in bf16.
#     x    its live rows are copied into pages (4H bytes a row), and out of them again for gate_up's gradient alone
#
# and order, inverse, offs and the routing weights are saved as ever (bytes a slot, not rows). With `save_h` False only x is.
#
# Who owns what: the autograd node owns the ticket that `Pages.take` returned, and a dropped graph takes it with it. Weight
# gradients that wait for a later slot (`forebay.moe.wgrad`) hold it until they are made, so x stays in its pages.


class RowsTicket(Protocol):
    """Room in pages, for as long as it is held."""

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """One for each tensor that was asked for."""


class Pages(Protocol):
    """Where rows wait; `forebay.memory.page_store.PageStore` is one."""

    def take(self, wanted: Sequence[PagedRows]) -> RowsTicket:
        """Room for the live rows of each. The host does not wait."""


@torch.compiler.disable(reason="experts that stash run in eager mode")
def stashing_experts(pages: Pages, deferred: WeightGradients | None, inputs: tuple[Any, ...]) -> Tensor:
    """y of `experts_op(*inputs)`. `deferred` as in `forebay.moe.wgrad.deferring_experts`."""
    x, ids, weights, gate_up, down, gate_up_bias, down_bias, *settings, save_h, max_rows = inputs
    needs = tuple(t is not None and t.requires_grad for t in inputs[:7])
    need_x, _, need_weights, need_gate_up, _, need_gate_up_bias, _ = needs
    # Trained through nothing but down, h is read by a forward kernel, and there is nothing else to stash.
    if not (torch.is_grad_enabled() and (need_x or need_weights or need_gate_up or need_gate_up_bias)):
        return experts_op(*inputs)[0]
    # The anchor makes y require a gradient where gate_up and down alone do.
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    store = deferred if deferred is not None else WeightGradients()
    trained = gate_up.requires_grad or down.requires_grad
    end = End(gate_up, down, store.sums(gate_up), store.sums(down)) if trained else None
    y: Tensor = _Stashed.apply(
        x, ids, weights, gate_up.detach(), down.detach(), gate_up_bias, down_bias, anchor,
        tuple(settings), save_h, max_rows, needs, end, store, pages,
    )  # fmt: skip
    return y


class _Stashed(torch.autograd.Function):
    """The autograd of experts without edges to gate_up and down, like `forebay.moe.wgrad` has it; `End` has those."""

    @staticmethod
    def forward(
        ctx, x, ids, weights, gate_up, down, gate_up_bias, down_bias, _, settings, save_h, max_rows, needs, *owners
    ):
        ctx.end, ctx.store, pages = owners
        need_x, _, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias = needs
        ctx.needs = (need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias)
        ctx.settings = settings
        saves_x = need_gate_up or not save_h
        # Rows of this rank's own tokens are saved elsewhere too: to move them would free nothing.
        rows = _RowsInPages(
            pages, x if saves_x and max_rows is not None else None, ids, save_h, width_of(gate_up, settings[2])
        )
        inputs = [x, ids, weights, gate_up, down, gate_up_bias, down_bias, *settings, max_rows, rows.take]
        y, _, routing = experts_forward(*inputs)
        ctx.ticket, ctx.h, ctx.x = rows.ticket, rows.h, rows.x
        kept = x if saves_x and rows.x is None else None
        ctx.save_for_backward(kept, *routing, weights, gate_up, down, gate_up_bias, down_bias)
        return y

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 15
        refuse_second_derivative()
        x, order, inverse, offs, *rest = ctx.saved_tensors
        bring = x if x is not None else ctx.x
        deferred_gradients = ctx.store.pending is not None
        inputs = [dy, bring, ctx.h, order, inverse, offs, *rest, *ctx.settings, *ctx.needs, deferred_gradients]
        made = experts_backward(*inputs)
        del inputs, rest, x
        grads = [g if need else None for g, need in zip(made, ctx.needs, strict=True)]
        del made
        dx, d_weights, *d_biases = grads[0], grads[1], *grads[4:]
        # Given away: a gradient that something else holds is copied into `.grad`.
        of_weights, grads[2:4] = grads[2:4], []
        if ctx.end is not None:
            _hand_over(ctx, bring, dy, of_weights, (order, offs, inverse.shape[1]))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # As autograd frees what it saved: whoever holds the loss holds this node.
            ctx.ticket = ctx.h = ctx.x = None
        return dx, None, d_weights, None, None, *d_biases, *(None,) * 8


def _hand_over(
    ctx: Any,
    x: Tensor | Callable[[], Tensor],
    dy: Tensor,
    made: list[Tensor | None],
    routing: tuple[Tensor, Tensor, int],
) -> None:
    """gate_up's and down's gradients to autograd, or what they are made of to whoever makes them later; empties the list."""
    deferred_gradients = ctx.store.pending
    if deferred_gradients is None:
        second, first = (None if d is None else [d].pop for d in (made.pop(), made.pop()))
        ctx.end.run(first, second)
        return
    transposed = ctx.settings[2]
    act, dh = made.pop(), made.pop()
    gate_up = None if dh is None else WeightGradientOperands("tokens", x, dh, *routing, transposed)
    down = None if act is None else WeightGradientOperands("gradient", dy, act, *routing, not transposed)
    deferred_gradients.append(DeferredWeightGradient(ctx.end, gate_up, down))


class _RowsInPages:
    """Asks for pages once the device knows how many rows there are, h's and x's in one go.

    Attributes:
        ticket: None if nothing is stashed.
        h: where h lies; None if it is made again.
        x: brings x back; None if it is not stashed.
    """

    def __init__(self, pages: Pages, x: Tensor | None, ids: Tensor, save_h: bool, h_row_bytes: int):
        self._pages, self._source, self._ids, self._save_h, self._h_row_bytes = pages, x, ids, save_h, h_row_bytes
        self.ticket: RowsTicket | None = None
        self.h: PageTable | None = None
        self.x: Callable[[], Tensor] | None = None

    def take(self, routing: Routing) -> PageTable | None:
        """The pages that h is to be written to, if it is. x is written here."""
        wanted = []
        x, self._source = self._source, None
        if self._save_h:
            wanted.append(PagedRows(routing.offs[-1:], routing.order.shape[0], self._h_row_bytes))
        if x is not None:
            # Rows that only fill x up come last, and none of their slots is live.
            live = (self._ids >= 0).any(1).sum(dtype=torch.int32).view(1)
            wanted.append(PagedRows(live, x.shape[0], x.shape[1] * x.element_size()))
        if wanted:
            self.ticket = self._pages.take(wanted)
            if x is not None:
                stash([x], self.ticket.tables[-1:])
                self.x = partial(_bring, self.ticket, x.shape, x.dtype, x.device)
            if self._save_h:
                self.h = self.ticket.tables[0]
        return self.h


def width_of(gate_up: Tensor, transposed: bool) -> int:
    """Bytes of a row of h."""
    return gate_up.shape[2 if transposed else 1] * gate_up.element_size()


def _bring(ticket: RowsTicket, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """x again, its live rows; the others are uninitialised memory."""
    x = torch.empty(shape, dtype=dtype, device=device)
    restore(ticket.tables[-1:], [x])
    return x
