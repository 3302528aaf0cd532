"""Experts that save the rows they really had: x and h in pages, whatever the capacity of the buffers they were computed in.

In: what `forebay.moe.experts` takes, on rows that came from other ranks, and `Pages`, which hands out room for them. Out: y,
bitwise that of experts that keep x and h, as are all gradients.

Without a host synchronisation nobody but the device knows how many rows arrived: x is [C, H] and h [S, 2I] for capacities C and
S, and autograd would save all of that. Here

    h    the activation's kernel writes its live rows into pages while it reads them, and h is dropped. Its backward reads
         them from there. One more write: 4I bytes a row in bf16.
    x    its live rows are copied into pages (4H bytes a row), and out of them again for gate_up's gradient alone

and order, inverse, offs and the routing weights are saved as ever (bytes a slot, not rows). With `save_h` False only x is.

Who owns what: the autograd node owns the ticket that `Pages.take` returned, and a dropped graph takes it with it. Weight
gradients that wait for a later slot (`forebay.moe.weight_gradients`) hold it until they are made, so x stays in its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from forebay.kernels.pages import PageTable, Rows, restore, stash
from forebay.moe.experts_op import experts_backward, experts_forward, experts_op, refuse_second_derivative
from forebay.moe.routing import Routing
from forebay.moe.weight_gradients import End, Later, Left, WeightGradients


class Ticket(Protocol):
    """Room in pages, for as long as it is held."""

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """One for each tensor that was asked for."""


class Pages(Protocol):
    """Where rows wait; `forebay.stores.pages.PageStore` is one."""

    def take(self, wanted: Sequence[Rows]) -> Ticket:
        """Room for the live rows of each. The host does not wait."""


@torch.compiler.disable(reason="experts that stash run in eager mode")
def stashing_experts(pages: Pages, deferred: WeightGradients | None, inputs: tuple[Any, ...]) -> Tensor:
    """y of `experts_op(*inputs)`. `deferred` as in `forebay.moe.weight_gradients.deferring_experts`."""
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
    """The autograd of experts without edges to gate_up and down, like `forebay.moe.weight_gradients` has it; `End` has those."""

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
        rows = _Rows(
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
        later = ctx.store.pending is not None
        inputs = [dy, bring, ctx.h, order, inverse, offs, *rest, *ctx.settings, *ctx.needs, later]
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
    later = ctx.store.pending
    if later is None:
        second, first = (None if d is None else [d].pop for d in (made.pop(), made.pop()))
        ctx.end.run(first, second)
        return
    transposed = ctx.settings[2]
    act, dh = made.pop(), made.pop()
    gate_up = None if dh is None else Left("tokens", x, dh, *routing, transposed)
    down = None if act is None else Left("gradient", dy, act, *routing, not transposed)
    later.append(Later(ctx.end, gate_up, down))


class _Rows:
    """Asks for pages once the device knows how many rows there are, h's and x's in one go.

    Attributes:
        ticket: None if nothing is stashed.
        h: where h lies; None if it is made again.
        x: brings x back; None if it is not stashed.
    """

    def __init__(self, pages: Pages, x: Tensor | None, ids: Tensor, save_h: bool, h_row_bytes: int):
        self._pages, self._source, self._ids, self._save_h, self._h_row_bytes = pages, x, ids, save_h, h_row_bytes
        self.ticket: Ticket | None = None
        self.h: PageTable | None = None
        self.x: Callable[[], Tensor] | None = None

    def take(self, routing: Routing) -> PageTable | None:
        """The pages that h is to be written to, if it is. x is written here."""
        wanted = []
        x, self._source = self._source, None
        if self._save_h:
            wanted.append(Rows(routing.offs[-1:], routing.order.shape[0], self._h_row_bytes))
        if x is not None:
            # Rows that only fill x up come last, and none of their slots is live.
            live = (self._ids >= 0).any(1).sum(dtype=torch.int32).view(1)
            wanted.append(Rows(live, x.shape[0], x.shape[1] * x.element_size()))
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


def _bring(ticket: Ticket, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """x again, its live rows; the others are uninitialised memory."""
    x = torch.empty(shape, dtype=dtype, device=device)
    restore(ticket.tables[-1:], [x])
    return x
