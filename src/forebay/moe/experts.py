"""The routed experts of an MoE layer.

Input: tokens x [T, H], the router's ids and weights [T, K], and stacked expert weights. Output: y [T, H]. `experts` checks,
casts and calls the operation of `forebay.moe.experts_op`. Experts that keep rows in pages or defer their weight gradients run in
an autograd function of their own, in eager mode only, with bitwise the same results. Without a host synchronization only the
device knows how many rows arrived, and autograd would save x and h in buffers of their capacity; pages hold the live rows alone.
The autograd node owns the pages' ticket, and so do deferred weight gradients that read x.

On a Hopper GPU with the package `quack-kernels`, the experts that `fuses` accepts run on `forebay.kernels.hopper`: faster, with a
lower peak, and with other roundings. The decision is made once a call, and all operations of the call are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from forebay.kernels import hopper
from forebay.kernels.paging import PagedRows, PageTable, restore, stash
from forebay.kernels.row_fp8 import decode_rows, encode_rows, encoded_width
from forebay.kernels.swiglu import Glu, compresses
from forebay.moe.experts_compute import (
    ExpertParameters,
    ExpertSettings,
    NeededGradients,
    experts_backward,
    experts_forward,
    is_written_over,
)
from forebay.moe.experts_op import (
    NO_EDGE,
    NO_UPDATES,
    GateUpEdge,
    check_backward,
    consumable,
    experts_backward_op,
    experts_op,
    saved_for_backward,
    undispatched,
)
from forebay.moe.low_rank import LowRank
from forebay.moe.routing import Routing, check_routed, check_tensors
from forebay.moe.wgrad import DeferredWeightGradient, WeightEdges, WeightGradientOperands, WeightGradients, gate_up_edge


class RowsTicket(Protocol):
    """Pages, for as long as the ticket is alive."""

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """One for each requested tensor."""


class Pages(Protocol):
    """Allocates pages for saved rows; `forebay.memory.page_store.PageStore` is one."""

    def take(self, wanted: Sequence[PagedRows]) -> RowsTicket:
        """Allocate pages for the live rows of each tensor, without waiting for the device."""


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "swiglu",
    interleaved: bool = False,
    transposed: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    save_h: bool = True,
    precision: str = "exact",
    max_rows: int | None = None,
    deferred: WeightGradients | None = None,
    pages: Pages | None = None,
    gate_up_update: LowRank | None = None,
    down_update: LowRank | None = None,
    edge: GateUpEdge | None = None,
) -> Tensor:
    """y [T, H] in x's dtype: for each of T tokens, the outputs of its K chosen experts, weighted and summed.

    There are E experts of inner width I. h is the first product, [T*K, 2I]: the gate and up projections of each token for each
    of its experts.

    Args:
        x: [T, H], any floating dtype. Computed in the weights' dtype (autocast passes fp32 tokens to bf16 weights).
        ids: [T, K], any integer dtype: the router's choices. Ids outside [0, E) are sentinels: their slots add nothing, and
            their weights get a zero gradient.
        weights: [T, K], any floating dtype; their gradient has it too.
        gate_up: [E, 2I, H], or [E, H, 2I] if `transposed`.
        down: [E, H, I], or [E, I, H] if `transposed`.
        gate_up_bias, down_bias: [E, 2I] and [E, H].
        activation: "swiglu" (silu), "limited_swiglu" (DeepSeek-V4; reads limit) or "clamped_swiglu" (GPT-OSS; reads alpha and
            limit); see `forebay.kernels.swiglu.Glu`.
        interleaved: gate and up columns alternate instead of forming two halves.
        save_h: save h for backward (4KI bytes a token in bf16), or recompute it there.
        precision: "fp8" saves h in 8 bits an element (`forebay.kernels.row_fp8`), and x too where it waits in pages: gradients
            then come from rounded values. Experts that are not bf16, or whose I is no multiple of 32, are saved as they are.
        max_rows: bound on the live rows, where most ids are sentinels; see `forebay.moe.dispatch`. Live rows beyond it are left
            out. The default is T*K.
        deferred: defers the gradients of gate_up and down, for pipelines. Breaks the graph of `torch.compile`.
        pages: where x and h wait for backward, live rows only; `forebay.memory.page_store.PageStore` is one. Breaks the graph of
            `torch.compile`. With `max_rows`, tokens without a slot of these experts come last in x, as a dispatcher returns them:
            nothing is saved of the last ones.
        gate_up_update, down_update: low-rank updates (LoRA) of the two stacks, as matrices from inputs to outputs whatever
            `transposed` says: a [E, r, H] and b [E, 2I, r] for gate_up, a [E, r, I] and b [E, H, r] for down. The updated weights
            are never made. Training gate_up's update saves x (2H bytes a token in bf16); down's saves nothing besides h.
        edge: of this gate_up, for these numbers of tokens and slots (`forebay.moe.wgrad.gate_up_edge`), for one call. In eager
            mode the default makes one. A caller that compiles makes it outside of the compiled code; without, or if it does not
            fit, the compiled backward returns gate_up's gradient together with down's.

    Raises:
        ValueError: shapes that do not fit, several devices, an unknown activation or precision, a negative `max_rows`, or
            updates of experts with pages or deferred gradients.
        TypeError: arguments that are no tensors, weights of several dtypes, ids that are no integers, or other tensors that are
            not floating point.
        RuntimeError: called under a transform of torch.func.
    """
    _refuse_transforms()
    _check(x, ids, weights, gate_up, down, gate_up_bias, down_bias, transposed)
    inner = down.shape[1] if transposed else down.shape[2]
    _check_update("gate_up_update", gate_up_update, gate_up.shape[0], x.shape[1], 2 * inner)
    _check_update("down_update", down_update, gate_up.shape[0], inner, x.shape[1])
    Glu(activation, interleaved, alpha, limit)
    if precision not in ("exact", "fp8"):
        raise ValueError(f"precision must be 'exact' or 'fp8', got {precision!r}")
    _check_max_rows(max_rows)
    defers = deferred is not None and (gate_up.requires_grad or down.requires_grad)
    _refuse_with_updates(gate_up_update or down_update, pages is not None or defers)
    a1, b1, s1 = gate_up_update or (None, None, 1.0)
    a2, b2, s2 = down_update or (None, None, 1.0)
    trained = (x, weights, gate_up, down, gate_up_bias, down_bias, a1, b1, a2, b2)
    has_backward = _has_backward(trained)
    at_once = deferred is None and (pages is None or not has_backward)
    saved_h = "fp8" if precision == "fp8" and compresses(gate_up.dtype, inner) else "exact"
    plain = pages is None and saved_h == "exact" and gate_up_update is None and down_update is None
    biased = gate_up_bias is not None or down_bias is not None
    fused = plain and fuses(
        gate_up, down, activation=activation, interleaved=interleaved, transposed=transposed, biased=biased
    )
    edge = (
        _edge_for(edge, x, ids, gate_up, max_rows, transposed, fused)
        if deferred is None and has_backward and gate_up.requires_grad
        else None
    )
    # Under autocast, autograd's own casts return the gradients in the caller's dtypes.
    inputs = (
        x.to(gate_up.dtype).contiguous(), ids, weights, gate_up.detach() if edge else gate_up, down,
        gate_up_bias, down_bias, activation, interleaved, transposed, float(alpha), float(limit),
        saved_h if save_h and has_backward else "", max_rows, a1, b1, s1, a2, b2, s2,
        *(NO_EDGE if edge is None else edge.tensors), fused,
    )  # fmt: skip
    y: Tensor = experts_op(*inputs)[0] if at_once else _eager_experts(inputs, deferred, pages, precision == "fp8")
    return y.to(x.dtype)


def fuses(gate_up: Tensor, down: Tensor, *, activation: str, interleaved: bool, transposed: bool, biased: bool) -> bool:
    """Whether experts with these weights can run on `forebay.kernels.hopper`.

    They also need an exact h, saved or recomputed, and neither low-rank updates nor pages. Deferred weight gradients and rows
    that a dispatcher sent (`max_rows`) are supported.
    """
    layout = activation == "swiglu" and not (interleaved or transposed or biased)
    return layout and hopper.handles(gate_up, down)


def _edge_for(
    given: GateUpEdge | None,
    x: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    max_rows: int | None,
    transposed: bool,
    fused: bool,
) -> GateUpEdge | None:
    """The edge of a call: `given` if it fits; in eager mode else a new one."""
    rows = ids.numel() if max_rows is None else torch.sym_min(ids.numel(), max_rows)
    if given is not None and given.fused != fused:
        given = None  # it would take dh's columns for others
    if not torch.compiler.is_compiling():
        return given or gate_up_edge(gate_up, x.shape[0], rows, ids.shape[1], transposed, fused)
    fits = given is not None and given.x.shape == x.shape and given.dh.shape[0] == rows
    return given if fits else None


def _check(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    transposed: bool,
) -> None:
    check_routed(x, ids, weights)
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    check_tensors(gate_up=gate_up, down=down, **{name: bias for name, bias in biases.items() if bias is not None})
    if gate_up.dim() != 3 or down.dim() != 3:
        raise ValueError(f"expert weights must be stacks, got {tuple(gate_up.shape)}, {tuple(down.shape)}")
    num_experts, hidden = gate_up.shape[0], x.shape[1]
    inner = down.shape[1] if transposed else down.shape[2]
    first, second = (2 * inner, hidden), (hidden, inner)
    if transposed:
        first, second = first[::-1], second[::-1]
    if tuple(gate_up.shape[1:]) != first or tuple(down.shape) != (num_experts, *second):
        raise ValueError(
            f"for x {tuple(x.shape)} and transposed={transposed}, gate_up {tuple(gate_up.shape)} "
            f"and down {tuple(down.shape)} must be [E, {first[0]}, {first[1]}] and "
            f"[E, {second[0]}, {second[1]}]"
        )
    for name, bias, width in (("gate_up_bias", gate_up_bias, 2 * inner), ("down_bias", down_bias, hidden)):
        if bias is not None and tuple(bias.shape) != (num_experts, width):
            raise ValueError(f"{name} must be {(num_experts, width)}, got {tuple(bias.shape)}")
    stacks = [t for t in (gate_up, down, gate_up_bias, down_bias) if t is not None]
    dtypes = {t.dtype for t in stacks}
    if len(dtypes) > 1:
        raise TypeError(f"expert weights and biases must share a dtype, got {dtypes}")
    if not gate_up.is_floating_point():
        raise TypeError(f"expert weights must be floating point, got {gate_up.dtype}")
    devices = {t.device for t in (x, ids, weights, *stacks)}
    if len(devices) > 1:
        raise ValueError(f"tokens, ids and expert weights must be on one device, got {sorted(map(str, devices))}")


def _check_max_rows(max_rows: int | None) -> None:
    # A number is checked, a SymInt is not: the comparison would become a guard.
    if max_rows is None or isinstance(max_rows, torch.SymInt) or torch.compiler.is_compiling():
        return
    if not isinstance(max_rows, int) or max_rows < 0:
        error = ValueError if isinstance(max_rows, int) else TypeError
        raise error(f"max_rows must be an integer of at least 0, or None for T*K, got {max_rows!r}")


def _refuse_transforms() -> None:
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "Forebay's experts do not run under transforms of torch.func (grad, vmap, jvp): use torch.autograd.grad, or leave "
            "the model on its own experts (experts=None, or experts_implementation='eager')"
        )


def _has_backward(trained: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trained)


def _refuse_with_updates(update: LowRank | None, refused: bool) -> None:
    if update is not None and refused:
        raise ValueError(
            "experts with low-rank updates (LoRA) can neither be stashed in pages nor defer their weights' gradients: "
            "choose another placement than 'stash', or freeze the experts' own weights"
        )


def _check_update(name: str, update: LowRank | None, num_experts: int, inputs: int, outputs: int) -> None:
    if update is None:
        return
    a, b, _ = update
    rank = a.shape[1] if a.dim() == 3 else 0
    if rank < 1 or tuple(a.shape) != (num_experts, rank, inputs) or tuple(b.shape) != (num_experts, outputs, rank):
        raise ValueError(
            f"{name} must be a [{num_experts}, r, {inputs}] and b [{num_experts}, {outputs}, r] with r of 1 or more for these "
            f"weights, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if not a.is_floating_point() or a.dtype != b.dtype:
        raise TypeError(f"{name}: a and b must share a floating dtype, got {a.dtype} and {b.dtype}")


@torch.compiler.disable(reason="experts with pages or deferred weight gradients run in eager mode")
def _eager_experts(inputs: tuple[Any, ...], store: WeightGradients | None, pages: Pages | None, rounds: bool) -> Tensor:
    """y of `experts_op(*inputs)`."""
    x, ids, weights, gate_up, down, gate_up_bias, down_bias, *settings, save_h, max_rows = inputs[:14]
    edge, fused = inputs[20:24], inputs[-1]
    trained = (x, weights, gate_up if edge[0] is None else edge[0], down, gate_up_bias, down_bias)
    needs = NeededGradients(*(t is not None and t.requires_grad for t in trained))
    if not needs.da:
        pages = None  # at most down's gradient reads h, through a kernel that reads no pages
    trains_stacks = needs.gate_up or needs.down
    if not torch.is_grad_enabled() or (pages is None and (store is None or not trains_stacks)):
        return experts_op(*inputs)[0]
    edges = None
    if store is not None and trains_stacks:
        edges = WeightEdges(gate_up, down, store.sums)
        gate_up, down = gate_up.detach(), down.detach()
    anchor = None
    given = (x, weights, gate_up, down, gate_up_bias, down_bias, *edge)
    if not any(t is not None and t.requires_grad for t in given):
        # It makes y require a gradient where only gate_up and down do.
        anchor = torch.empty(0, device=x.device, requires_grad=True)
    call = _ExpertsCall(ExpertSettings(*settings), save_h, max_rows, needs, edges, store, rounds, fused)
    y: Tensor = _Experts.apply(x, ids, weights, gate_up, down, gate_up_bias, down_bias, *edge, anchor, call, pages)
    return y


@dataclass(frozen=True, eq=False)
class _ExpertsCall:
    """The arguments of `_Experts` that are no tensors; `edges` is None where gate_up and down are frozen or not deferred.
    `rounds`: x waits in pages in 8 bits an element, if it is bf16; `save_h` says it of h. `fused`: as in `experts_forward`."""

    settings: ExpertSettings
    save_h: str
    max_rows: int | None
    needs: NeededGradients
    edges: WeightEdges | None
    store: WeightGradients | None
    rounds: bool
    fused: bool


class _Experts(torch.autograd.Function):
    """`experts_op` with pages, or without edges to gate_up and down, which `WeightEdges` has."""

    @staticmethod
    def forward(
        ctx, x, ids, weights, gate_up, down, gate_up_bias, down_bias, edge_x, _dh, _order, _offs, _, call, pages
    ):
        # Trap: `pages` must not stay on ctx. A held y or loss would keep the whole arena alive after backward.
        ctx.set_materialize_grads(False)
        ctx.call, ctx.paged, ctx.has_edge = call, None, edge_x is not None
        saves_x, saves_h = saved_for_backward(call.needs, call.save_h)
        parameters = ExpertParameters(gate_up, down, gate_up_bias, down_bias)
        if pages is None:
            settings = *call.settings, call.save_h, call.max_rows, *NO_UPDATES, *NO_EDGE, call.fused
            y, h, *routing = undispatched(experts_op, x, ids, weights, *parameters[:4], *settings)
        else:
            # Without a bound, x holds this rank's own tokens, which other modules save as well: moving them frees nothing.
            moves_x = saves_x and call.max_rows is not None
            width = gate_up.shape[2 if call.settings.transposed else 1]
            h_bytes = encoded_width(width) if call.save_h == "fp8" else width * gate_up.element_size()
            ctx.paged = _PagedInputs(pages, x if moves_x else None, ids, h_bytes if saves_h else 0, call.rounds)
            y, h, routing = experts_forward(
                x, ids, weights, parameters, call.settings, call.max_rows, "", ctx.paged.allocate, fused=call.fused
            )
            saves_x, saves_h = saves_x and not moves_x, False
        ctx.save_for_backward(x if saves_x else None, h if saves_h else None, *routing, weights, *parameters[:4])
        return y

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            _free_pages(ctx)
            return (None,) * 14
        check_backward(dy)
        pending = None if ctx.call.store is None else ctx.call.store.pending
        (dx, d_weights, *d_biases), weight_gradients = _backward(ctx, dy, pending is not None)
        d_gate_up, d_down, edge = None, None, NO_EDGE
        if ctx.call.store is None:
            of_gate_up, of_down = weight_gradients
            d_down = None if of_down is None else of_down()
            if ctx.has_edge:
                edge = of_gate_up.of_edge()
            elif of_gate_up is not None:
                d_gate_up = of_gate_up()
        elif ctx.call.edges is not None:
            keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
            if pending is None:
                ctx.call.edges.run(*weight_gradients, keep_graph=keep_graph)
            else:
                pending.append(DeferredWeightGradient(ctx.call.edges, weight_gradients, keep_graph))
        _free_pages(ctx)
        return dx, None, d_weights, d_gate_up, d_down, *d_biases, *edge, None, None, None


def _free_pages(ctx: Any) -> None:
    """Free pages when autograd frees saved tensors: a held y or loss keeps the node alive after backward."""
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.paged = None


def _backward(ctx: Any, dy: Tensor, defer: bool) -> tuple[list[Tensor | None], list[Any]]:
    """Gradients of x, weights and biases, and callables that return those of gate_up and down (None for a frozen one)."""
    call, paged = ctx.call, ctx.paged
    x, h, *routing, weights, gate_up, down, gate_up_bias, down_bias = ctx.saved_tensors
    parameters = ExpertParameters(gate_up, down, gate_up_bias, down_bias)
    if paged is None:
        h = consumable(h)
        settings = (*parameters[:4], *call.settings, *call.needs[:6], defer, *NO_UPDATES, *call.needs[6:], call.fused)
        computed = undispatched(experts_backward_op, dy, x, h, *routing, weights, *settings)
    else:
        x = paged.load_x if x is None else x
        computed = experts_backward(
            dy, x, paged.h, Routing(*routing), weights, parameters, call.settings, call.needs, defer, fused=call.fused
        )
    dx, d_weights, dh, second, *d_biases = (
        gradient if need else None for gradient, need in zip(computed[:6], call.needs[:6], strict=True)
    )
    if is_written_over(h) and call.needs.gate_up:
        dh = h
    del computed, h
    order, inverse, offs = routing
    shared, transposed = (order, offs, inverse.shape[1]), call.settings.transposed
    x = x.detach() if isinstance(x, Tensor) else x
    weight_gradients: list[Any] = [
        None if dh is None else WeightGradientOperands("tokens", x, dh, *shared, transposed, call.fused), None
    ]  # fmt: skip
    if second is not None:
        # dy itself, not an alias: autograd then sees that it is held, and accumulates it nowhere in place. A gradient is given
        # away: autograd copies one that is held elsewhere into `.grad`.
        operands = second, *shared, not transposed, call.fused
        weight_gradients[1] = WeightGradientOperands("gradient", dy, *operands) if defer else [second].pop
    return [dx, d_weights, *d_biases], weight_gradients


class _PagedInputs:
    """x and h in pages, which are requested together once the device knows how many rows there are.

    Args:
        h_row_bytes: of a row of h as it is saved; 0 if it is recomputed.
        rounds: save x in 8 bits an element, if it is bf16.

    Attributes:
        h: None if it is recomputed.
    """

    def __init__(self, pages: Pages, x: Tensor | None, ids: Tensor, h_row_bytes: int, rounds: bool):
        self._pages: Pages | None = pages
        self._x, self._ids, self._h_row_bytes = x, ids, h_row_bytes
        self._rounds = rounds and x is not None and x.dtype is torch.bfloat16
        self._ticket: RowsTicket | None = None
        self.h: PageTable | None = None

    def allocate(self, routing: Routing) -> PageTable | None:
        """Take pages, copy x to its own, and return those to which h is to be written, if any."""
        wanted = []
        pages, self._pages = self._pages, None
        x, self._x, ids, self._ids = self._x, None, self._ids, None  # type: ignore[assignment]
        assert pages is not None, "allocated once"
        if self._h_row_bytes:
            wanted.append(PagedRows(routing.offs[-1:], routing.order.shape[0], self._h_row_bytes))
        if x is not None:
            # Unused rows of x come last, and none of their slots is live.
            live = (ids >= 0).any(1).sum(dtype=torch.int32).view(1)
            self._width = x.shape[1]
            x = encode_rows(x) if self._rounds else x
            wanted.append(PagedRows(live, x.shape[0], x.shape[1] * x.element_size()))
        if wanted:
            self._ticket = pages.take(wanted)
            if x is not None:
                stash([x], self._ticket.tables[-1:])
                self._shape, self._dtype, self._device = x.shape, x.dtype, x.device
            if self._h_row_bytes:
                self.h = self._ticket.tables[0]
        return self.h

    def load_x(self) -> Tensor:
        """The live rows of x; the others are uninitialized."""
        assert self._ticket is not None
        x = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        restore(self._ticket.tables[-1:], [x])
        return decode_rows(x, self._width) if self._rounds else x
