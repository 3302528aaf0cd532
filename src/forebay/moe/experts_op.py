"""Custom operations for the experts of an MoE layer: `forebay::experts`, its backward, and its deferred weight gradients.

Input: tokens x [T, H], routing ids and weights [T, K], and stacked expert weights of one dtype; `forebay.moe.experts` checks
and casts them. Output: y [T, H] and the tensors that backward reads (see `save_for_backward`), which the autograd graph owns.
`experts_forward` and `experts_backward` are the bodies of the operations, for callers that keep x and h in pages. Results are
deterministic. In bf16 on CUDA nothing synchronizes with the host, and everything can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import CustomOpDef
from torch.utils.flop_counter import register_flop_formula

from forebay.kernels import hopper
from forebay.kernels.grouped import add_rows_by_rows, rows_by_matrix, rows_by_rows
from forebay.kernels.low_rank import Gathered
from forebay.kernels.paging import PageTable
from forebay.kernels.permute import combine_rows, gather_rows
from forebay.kernels.row_fp8 import decode_rows, encoded_width
from forebay.kernels.swiglu import Glu, swiglu_backward, swiglu_forward
from forebay.moe.low_rank import Adapter, LowRank, adapter_of
from forebay.moe.routing import Routing, route, routing_map, row_experts, slot_experts


class ExpertParameters(NamedTuple):
    """Stacked weights of E experts; shapes as in `forebay.moe.experts.experts`."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    gate_up_update: LowRank | None = None
    down_update: LowRank | None = None


NO_UPDATES = (None, None, 1.0) * 2
"""Arguments of `experts_op` for experts without low-rank updates."""


class GateUpEdge(NamedTuple):
    """Tensors without memory whose *gradients* are the operands of gate_up's gradient; see `forebay.moe.wgrad.gate_up_edge`.

    Attributes:
        x: [T, H], in gate_up's dtype like `dh`.
        dh: [R, 2I].
        order, offs: [R] and [E] fp32, because autograd refuses gradients of integers; these have the bits of int32.
        fused: of the experts whose backward makes the operands; it says how dh's columns are ordered.
    """

    x: Tensor
    dh: Tensor
    order: Tensor
    offs: Tensor
    fused: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.dh, self.order, self.offs


NO_EDGE = (None,) * 4
"""`GateUpEdge.tensors` for experts whose node returns gate_up's gradient itself."""


class ExpertSettings(NamedTuple):
    """What the experts compute; see the arguments of `forebay.moe.experts.experts`."""

    activation: str
    interleaved: bool
    transposed: bool
    alpha: float
    limit: float

    @property
    def glu(self) -> Glu:
        return Glu(self.activation, self.interleaved, self.alpha, self.limit)


class NeededGradients(NamedTuple):
    """Which inputs require a gradient."""

    x: bool
    weights: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool
    gate_up_a: bool = False
    gate_up_b: bool = False
    down_a: bool = False
    down_b: bool = False

    @property
    def gate_up_update(self) -> bool:
        return self.gate_up_a or self.gate_up_b

    @property
    def down_update(self) -> bool:
        return self.down_a or self.down_b

    @property
    def dh(self) -> bool:
        return self.x or self.gate_up or self.gate_up_bias or self.gate_up_update

    @property
    def da(self) -> bool:
        return self.dh or self.weights

    @property
    def act(self) -> bool:
        return self.down or self.down_update


def experts_forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    parameters: ExpertParameters,
    settings: ExpertSettings,
    max_rows: int | None,
    save_h: str,
    pages_of: Callable[[Routing], PageTable | None] | None = None,
    *,
    fused: bool,
) -> tuple[Tensor, Tensor, Routing]:
    """Compute (y, h, routing).

        x_rows = gather(x)
        h      = x_rows @ gate_up
        act    = w * glu(h + gate_up_bias)
        y      = combine(act @ down) + M @ down_bias        M [T, E]: token t's weight for expert e

    The routing weight is applied before the down projection, so its gradient does not need that projection's output. A low-rank
    update (`forebay.moe.low_rank`) adds its own term to h, and to the rows of y before they are combined.

    Peak of temporary memory, for N = T*K rows of bf16: 2N(H + 3I) bytes, of which 4NI are h.

    Args:
        save_h: "fp8" returns h in 8 bits an element: uint8 [R, encoded_width(2I)].
        pages_of: called once the routing is known. If it returns a table, the activation kernel also writes the live rows of h
            to those pages, in 8 bits if their rows are that wide.
        fused: compute by `forebay.kernels.hopper`, for experts that `forebay.moe.experts.fuses` accepts. There are no x_rows,
            the gate and up columns of h alternate, and the routing weight is applied by `combine`.
    """
    glu = settings.glu
    num_experts = parameters.gate_up.shape[0]
    # No autocast inside the operation: backward recomputes h outside of any autocast region.
    with torch.autocast(x.device.type, enabled=False):
        routing = route(ids, num_experts, max_rows)
        if fused:
            return *_fused_forward(x, weights, parameters, routing), routing
        order, inverse, offs = routing
        pages = pages_of(routing) if pages_of is not None else None
        row_expert = _row_experts(routing, parameters)
        h = _first_product(x, order, offs, ids.shape[1], parameters, settings.transposed)
        rows = h.new_empty((h.shape[0], encoded_width(h.shape[1])), dtype=torch.uint8) if save_h == "fp8" else None
        act = swiglu_forward(
            h, weights, order, offs, glu, bias=parameters.gate_up_bias, row_expert=row_expert,
            saved=rows if rows is not None else pages,
        )  # fmt: skip
        if rows is not None:
            h = rows
        elif pages is not None:
            h = x.new_empty(0)
        added = None
        if parameters.down_bias is not None and row_expert is not None:
            slot_expert = slot_experts(routing, row_expert, num_experts)
            weight_map = routing_map(weights, slot_expert, num_experts)
            added = weight_map.to(parameters.down_bias.dtype) @ parameters.down_bias
        second = adapter_of(parameters.down_update, x.dtype)
        low = None if second is None else second.narrow(act, offs)
        y_rows = rows_by_matrix(act, _matrix(parameters.down, settings.transposed), offs)
        del act
        if second is not None and low is not None:
            second.add(y_rows, low, offs)
        y = combine_rows(y_rows, inverse, init=added)
    return y, h, routing


def _fused_forward(x: Tensor, weights: Tensor, parameters: ExpertParameters, routing: Routing) -> tuple[Tensor, Tensor]:
    """(y, h) by the kernels for Hopper."""
    order, inverse, offs = routing
    rows = hopper.rows_of(order, offs, inverse.shape[1])
    h, glu = hopper.gated_product(x, rows, parameters.gate_up)
    y_rows = rows_by_matrix(glu, _matrix(parameters.down, False), offs)
    del glu
    return combine_rows(y_rows, inverse, weights=weights), h


@torch.library.custom_op("forebay::experts", mutates_args=())
def experts_op(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
    alpha: float,
    limit: float,
    save_h: str,
    max_rows: int | None,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    gate_up_scale: float,
    down_a: Tensor | None,
    down_b: Tensor | None,
    down_scale: float,
    edge_x: Tensor | None,
    edge_dh: Tensor | None,
    edge_order: Tensor | None,
    edge_offs: Tensor | None,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(y, h, order, inverse, offs). All that backward reads is an output, so that a checkpoint policy can keep it.

    h is empty if save_h is "", and as `experts_forward` returns it if that is "exact" or "fp8". A projection without a low-rank
    update has None for a and b. A `GateUpEdge` is not read: it has the gradients from which its node computes gate_up's. `fused`
    is as in `experts_forward`; the operations that read h or dh must be given the same value.
    """
    updates = _update(gate_up_a, gate_up_b, gate_up_scale), _update(down_a, down_b, down_scale)
    parameters = ExpertParameters(gate_up, down, gate_up_bias, down_bias, *updates)
    settings = ExpertSettings(activation, interleaved, transposed, alpha, limit)
    y, h, routing = experts_forward(x, ids, weights, parameters, settings, max_rows, save_h, fused=fused)
    return y, h if save_h else x.new_empty(0), *routing


@experts_op.register_fake
def _(
    x, ids, weights, gate_up, down, gate_up_bias, down_bias,
    activation, interleaved, transposed, alpha, limit, save_h, max_rows, *updates,
):  # fmt: skip
    slots = ids.shape[0] * ids.shape[1]
    slots = slots if max_rows is None else torch.sym_min(slots, max_rows)
    width = gate_up.shape[2] if transposed else gate_up.shape[1]
    h = x.new_empty((slots, width) if save_h == "exact" else 0)
    if save_h == "fp8":
        h = x.new_empty((slots, encoded_width(width)), dtype=torch.uint8)
    order = ids.new_empty(slots, dtype=torch.int32)
    inverse = ids.new_empty(ids.shape, dtype=torch.int32)
    offs = ids.new_empty(gate_up.shape[0], dtype=torch.int32)
    return torch.empty_like(x), h, order, inverse, offs


def experts_backward(
    dy: Tensor,
    x: Tensor | Callable[[], Tensor] | None,
    h: Tensor | PageTable | None,
    routing: Routing,
    weights: Tensor,
    parameters: ExpertParameters,
    settings: ExpertSettings,
    needs: NeededGradients,
    defer_down: bool,
    over_h: bool = False,
    *,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients in the order of `NeededGradients`, with dh in the place of gate_up's; those not needed are empty.

        dy_rows      = gather(dy)
        da           = dy_rows @ down.T
        dh, act, dw  = swiglu_backward(h, da)
        d_down[e]    = dy_rows.T @ act
        dx           = combine(dh @ gate_up.T)

    and the terms of low-rank updates (`forebay.moe.low_rank`), whose `low` is recomputed from act and x_rows.

    gate_up's gradient, x_rows.T @ dh for each expert, is `experts_weight_backward_op`: where it is computed later, the tensors of
    this function are gone, and d_down is in its sum.

    Each tensor of N = T*K rows is freed after its last use. Temporary memory in bf16, h or dh included: 2N(H + 3I) bytes and then
    d_down, 2N(H + 2I) while dx is computed, and the same beside gate_up's gradient. T=16384, K=8, H=2048, I=768, E=128: 1088 MiB
    forward; backward 1088 + 384 MiB, then 896 + 384, then 896 + 768. `fused` saves 2NH bytes of the first and of the last peak.

    Args:
        x: None where it was not saved; a callable loads it when it is needed.
        h: as `experts_forward` returned it, or its pages; None to recompute it, with the same kernel on the same operands:
            bitwise the same.
        fused: of the forward. There are neither x_rows nor dy_rows, one kernel makes dh from dy, and dh alternates like h.
        defer_down: return act [R, I] in place of down's gradient. It is an operand of `experts_weight_backward_op`, as dh is.
        over_h: write dh over h, unless it is in 8 bits; the dh that is returned is then h. A recomputed h is always written over.
    """
    order, inverse, offs = routing
    dx, d_down, d_gate_up_bias, d_a1, d_b1, d_a2, d_b2 = (dy.new_empty(0) for _ in range(7))
    with torch.autocast(dy.device.type, enabled=False):
        dy = dy.contiguous()
        row_expert = _row_experts(routing, parameters)
        first, second = (adapter_of(p, dy.dtype) for p in (parameters.gate_up_update, parameters.down_update))
        dy_rows = dlow = rows = None
        if fused:
            assert not isinstance(h, PageTable), "rows in pages are not fused"
            rows = hopper.rows_of(order, offs, inverse.shape[1], weights)
            dh, act, dw = _fused_through_activation(dy, x, h, routing, rows, weights, parameters, needs)
        else:
            dh, act, dw, dy_rows, dlow = _through_activation(
                dy, x, h, routing, weights, parameters, settings, row_expert, needs, second, over_h
            )
        del h
        if needs.down:
            assert act is not None
            d_down = act if defer_down else _down_gradient(dy, dy_rows, act, offs, rows, not settings.transposed)
        del dy_rows
        if needs.down_update:
            assert second is not None and act is not None and dlow is not None
            tokens = Gathered(dy, order, inverse.shape[1])
            d_a2, d_b2 = second.gradients(act, tokens, dlow, offs, needs.down_a, needs.down_b)
        del act
        dlow = None if first is None or dh is None else first.narrow_gradient(dh, offs)
        if needs.x:
            assert dh is not None
            if rows is not None:
                dx = combine_rows(hopper.input_gradient(dh, rows, parameters.gate_up), inverse)
            else:
                dx = _input_gradient(dh, routing, _matrix(parameters.gate_up, not settings.transposed), first, dlow)
        if needs.gate_up_bias:
            assert dh is not None
            d_gate_up_bias = _sum_by_expert(dh, offs)
        if needs.gate_up_update:
            assert first is not None and dh is not None and dlow is not None
            assert x is not None, "x is saved wherever gate_up's update is trained"
            tokens = Gathered(_loaded(x), order, inverse.shape[1])
            d_a1, d_b1 = first.gradients(tokens, dh, dlow, offs, needs.gate_up_a, needs.gate_up_b)
        if dh is None or not needs.gate_up:
            dh = dy.new_empty(0)
        d_weights, d_down_bias = _routing_and_down_bias_gradients(
            dy, dw, routing, row_expert, weights, parameters, needs
        )
    return dx, d_weights, dh, d_down, d_gate_up_bias, d_down_bias, d_a1, d_b1, d_a2, d_b2


@torch.library.custom_op("forebay::experts_backward", mutates_args=("h",))
def experts_backward_op(
    dy: Tensor,
    x: Tensor | None,
    h: Tensor | None,
    order: Tensor,
    inverse: Tensor,
    offs: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
    alpha: float,
    limit: float,
    need_x: bool,
    need_weights: bool,
    need_gate_up: bool,
    need_down: bool,
    need_gate_up_bias: bool,
    need_down_bias: bool,
    # Trap: no default. torch's compile cache on disk has calls by the names of defaulted parameters, but not the names in its
    # key: after a renaming, another version's compiled code would be run.
    defer_down: bool,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    gate_up_scale: float,
    down_a: Tensor | None,
    down_b: Tensor | None,
    down_scale: float,
    need_gate_up_a: bool,
    need_gate_up_b: bool,
    need_down_a: bool,
    need_down_b: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`experts_backward` of saved tensors. Returns dh only where it is not `is_written_over` h."""
    updates = _update(gate_up_a, gate_up_b, gate_up_scale), _update(down_a, down_b, down_scale)
    grads = experts_backward(
        dy, x, h, Routing(order, inverse, offs), weights,
        ExpertParameters(gate_up, down, gate_up_bias, down_bias, *updates),
        ExpertSettings(activation, interleaved, transposed, alpha, limit),
        NeededGradients(
            need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias,
            need_gate_up_a, need_gate_up_b, need_down_a, need_down_b,
        ),
        defer_down,
        over_h=True,
        fused=fused,
    )  # fmt: skip
    return grads if not is_written_over(h) else (*grads[:2], dy.new_empty(0), *grads[3:])


def _update(a: Tensor | None, b: Tensor | None, scale: float) -> LowRank | None:
    return None if a is None or b is None else LowRank(a, b, scale)


@experts_backward_op.register_fake
def _(
    dy, x, h, order, inverse, offs, weights, gate_up, down, gate_up_bias, down_bias,
    activation, interleaved, transposed, alpha, limit,
    need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias, defer_down,
    gate_up_a, gate_up_b, gate_up_scale, down_a, down_b, down_scale,
    need_gate_up_a, need_gate_up_b, need_down_a, need_down_b, fused,
):  # fmt: skip
    def like(t, need):
        return t.new_empty(t.shape) if need else dy.new_empty(0)

    rows, inner = order.shape[0], down.shape[1] if transposed else down.shape[2]
    return (
        like(dy, need_x),
        like(weights, need_weights),
        dy.new_empty((rows, 2 * inner) if need_gate_up and not is_written_over(h) else 0),
        dy.new_empty((rows, inner)) if need_down and defer_down else like(down, need_down),
        like(gate_up_bias, need_gate_up_bias),
        like(down_bias, need_down_bias),
        like(gate_up_a, need_gate_up_a),
        like(gate_up_b, need_gate_up_b),
        like(down_a, need_down_a),
        like(down_b, need_down_b),
    )


@torch.library.custom_op("forebay::experts_weight_backward", mutates_args=())
def experts_weight_backward_op(
    tokens: Tensor, rows: Tensor, order: Tensor, offs: Tensor, slots_per_token: int, tokens_first: bool, fused: bool
) -> Tensor:
    """The gradient of gate_up, or that of down from what `experts_backward` returned with `defer_down`.

    Args:
        tokens, rows: x [T, H] and dh [R, 2I] for gate_up, dy [T, H] and act [R, I] for down.
        tokens_first: whether the parameter is [E, H, *] (gate_up if transposed, down if not) or [E, *, H].
        fused: of the forward: no tokens are gathered in memory, and dh alternates. No such stack is transposed.
    """
    with torch.autocast(tokens.device.type, enabled=False):
        if fused:
            gradient = hopper.down_gradient if tokens_first else hopper.gate_up_gradient
            return gradient(tokens, hopper.rows_of(order, offs, slots_per_token), rows)
        token_rows = gather_rows(tokens.contiguous(), order, offs, slots_per_token)
        return _weight_gradient(token_rows, rows, offs, tokens_first)


@experts_weight_backward_op.register_fake
def _(tokens, rows, order, offs, slots_per_token, tokens_first, fused):
    sides = (tokens.shape[1], rows.shape[1]) if tokens_first else (rows.shape[1], tokens.shape[1])
    return rows.new_empty((offs.shape[0], *sides))


def add_weight_gradient(
    total: Tensor,
    tokens: Tensor,
    rows: Tensor,
    order: Tensor,
    offs: Tensor,
    slots_per_token: int,
    tokens_first: bool,
    fused: bool,
) -> None:
    """Add the gradient of `experts_weight_backward_op` to `total` without storing it or rounding it to the operands' dtype.

    Also for `fused` operands this gathers the tokens and uses Forebay's own kernel, which puts alternating rows in their places.

    Args:
        total: fp32, or fp64 for fp64 operands; of the parameter's shape.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    token_rows = gather_rows(tokens.contiguous(), order, offs, slots_per_token)
    left, right = (token_rows, rows) if tokens_first else (rows, token_rows)
    with torch.autocast(tokens.device.type, enabled=False):
        add_rows_by_rows(total, left, right, offs, alternating=fused and not tokens_first)


def undispatched(operation: Callable[..., Any], *args: Any) -> Any:
    """`operation(*args)`, for callers whose gradients have nodes of their own.

    Calls the body of an operation if nothing records or watches it: torch's dispatcher takes the host 50 to 80 microseconds to
    get there, and 750 in torch 2.13 if the operation writes to an argument.
    """
    watched = torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling()
    if watched or not isinstance(operation, CustomOpDef):
        return operation(*args)
    kinds = {type(arg) for arg in args if isinstance(arg, Tensor)}
    if kinds - {Tensor, torch.nn.Parameter} or args[0].is_meta:
        return operation(*args)
    if operation is experts_backward_op and args[2] is not None:  # h is written to
        torch.autograd.graph.increment_version(args[2])
    return operation._init_fn(*args)


def saved_for_backward(needs: NeededGradients, save_h: str) -> tuple[bool, bool]:
    """Whether x and h are saved."""
    reads_h = needs.da or needs.act
    return needs.gate_up or needs.gate_up_update or (reads_h and not save_h), reads_h and save_h != ""


def save_for_backward(ctx, inputs, output) -> None:
    """Save on an autograd context what backward reads; R is T*K, or `max_rows`.

    x [T, H]       once per token, for the gradient of gate_up or of its low-rank update, or to recompute h
                                                                                2H bytes a token in bf16
    h [R, 2I]      the first grouped GEMM's output, before its bias              4KI, or 2.06KI in 8 bits
    routing        order [R], inverse [T, K], offs [E], all int32                8K
    weights [T, K], and the parameters
    """
    x, _, weights, gate_up, down, gate_up_bias, down_bias, *settings, save_h, _ = inputs[:14]
    gate_up_a, gate_up_b, gate_up_scale, down_a, down_b, down_scale = inputs[14:20]
    ctx.fused = inputs[24]
    _, h, order, inverse, offs = output
    ctx.set_materialize_grads(False)
    # Callers cannot train through the outputs that exist to be saved.
    ctx.mark_non_differentiable(h, order, inverse, offs)
    given = ctx.needs_input_grad
    ctx.has_edge = given[20]
    needs = given[2], given[3] or ctx.has_edge, *given[4:7]
    ctx.needs = NeededGradients(given[0], *needs, *(given[i] for i in (14, 15, 17, 18)))
    ctx.settings, ctx.scales = settings, (gate_up_scale, down_scale)
    saves_x, saves_h = saved_for_backward(ctx.needs, save_h)
    ctx.save_for_backward(
        x if saves_x else None,
        h if saves_h else None,
        order, inverse, offs, weights, gate_up, down, gate_up_bias, down_bias,
        gate_up_a, gate_up_b, down_a, down_b,
    )  # fmt: skip


def _gradients(ctx, dy: Tensor | None, *_):
    """The gradients of all arguments of `experts_op`."""
    if dy is None:
        return (None,) * 25
    refuse_second_derivative()
    x, h, order, inverse, offs, *saved, gate_up_a, gate_up_b, down_a, down_b = ctx.saved_tensors
    updates = gate_up_a, gate_up_b, ctx.scales[0], down_a, down_b, ctx.scales[1]
    h = consumable(h)
    grads = experts_backward_op(
        dy,
        x,
        h,
        order,
        inverse,
        offs,
        *saved,
        *ctx.settings,
        *ctx.needs[:6],
        False,
        *updates,
        *ctx.needs[6:],
        ctx.fused,
    )
    dx, d_weights, dh, *rest = (g if need else None for g, need in zip(grads, ctx.needs, strict=True))
    dh = h if is_written_over(h) and ctx.needs.gate_up else dh
    parameters, (d_gate_up_a, d_gate_up_b, d_down_a, d_down_b) = rest[:3], rest[3:]
    d_gate_up, edge = None, tuple[Tensor | None, ...](NO_EDGE)
    if ctx.has_edge:
        edge = x, dh, order.view(torch.float32), offs.view(torch.float32)
    elif ctx.needs.gate_up:
        d_gate_up = experts_weight_backward_op(x, dh, order, offs, inverse.shape[1], ctx.settings[2], ctx.fused)
    updates = d_gate_up_a, d_gate_up_b, None, d_down_a, d_down_b, None
    return (dx, None, d_weights, d_gate_up, *parameters, *(None,) * 7, *updates, *edge, None)


def is_written_over(h: Tensor | None) -> bool:
    """Whether `experts_backward_op` writes dh over a saved h: not if it was not saved, or in 8 bits."""
    return h is not None and h.dtype is not torch.uint8


def consumable(h: Tensor | None) -> Tensor | None:
    """A saved h that its backward may write over: itself, or a copy if this backward keeps the graph for another one.

    Compiled code runs its backward once, or copies h by itself (`forebay.models.compile`).
    """
    if h is None or not is_written_over(h) or torch.compiler.is_compiling():
        return h
    return h.clone() if torch._C._autograd._get_current_graph_task_keep_graph() else h


def refuse_second_derivative() -> None:
    """Check, in a backward, that it is not to be differentiated itself.

    Raises:
        RuntimeError: it is (create_graph=True).
    """
    # Tracing a backward enables gradients in any case.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "Forebay's experts are differentiable once, so create_graph=True cannot run through them: leave the model on its own "
            "experts with forebay.manage(model, experts=None, loss=None), or experts_implementation='eager'"
        )


experts_op.register_autograd(_gradients, setup_context=save_for_backward)


@register_flop_formula(torch.ops.forebay.experts)
def _experts_flop(
    x, ids, weights, gate_up, down, gate_up_bias, down_bias,
    activation, interleaved, transposed, alpha, limit, save_h, max_rows,
    gate_up_a, gate_up_b, gate_up_scale, down_a, down_b, down_scale,
    edge_x, edge_dh, edge_order, edge_offs, fused, out_shape=None, **kwargs,
) -> int:  # fmt: skip
    """2 * R * 3IH, and 2 * R * r(in + out) for an update. All rows count, sentinels included: only shapes are known."""
    slots = ids[0] * ids[1]
    rows = slots if max_rows is None else min(slots, max_rows)
    updates = sum(_elements(t) for t in (gate_up_a, gate_up_b, down_a, down_b))
    return 2 * rows * (gate_up[1] * gate_up[2] + down[1] * down[2] + updates)


def _elements(stack: Sequence[int] | None) -> int:
    """Elements of one expert's matrix, from the shape of the stack."""
    return 0 if stack is None else stack[1] * stack[2]


@register_flop_formula(torch.ops.forebay.experts_backward)
def _experts_backward_flop(
    dy, x, h, order, inverse, offs, weights, gate_up, down, gate_up_bias, down_bias,
    activation, interleaved, transposed, alpha, limit,
    need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias,
    defer_down, gate_up_a, gate_up_b, gate_up_scale, down_a, down_b, down_scale,
    need_gate_up_a, need_gate_up_b, need_down_a, need_down_b, fused, out_shape=None, **kwargs,
) -> int:  # fmt: skip
    """One product of a projection for each gradient that is computed here, and one to recompute h. An update has besides `low`,
    for b's gradient, and `dlow`."""
    needs = NeededGradients(
        need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias,
        need_gate_up_a, need_gate_up_b, need_down_a, need_down_b,
    )  # fmt: skip
    recompute = h is None and (needs.da or needs.act)
    first = recompute + need_x
    second = needs.da + (need_down and not defer_down)
    low_rank = (
        _elements(gate_up_a) * (recompute + need_x + need_gate_up_a + need_gate_up_b)
        + _elements(gate_up_b) * (recompute + needs.dh + need_gate_up_b)
        + _elements(down_a) * (needs.da + need_down_a + need_down_b)
        + _elements(down_b) * (needs.da or needs.act) + _elements(down_b) * need_down_b
    )  # fmt: skip
    return 2 * order[0] * (gate_up[1] * gate_up[2] * first + down[1] * down[2] * second + low_rank)


@register_flop_formula(torch.ops.forebay.experts_weight_backward)
def _experts_weight_backward_flop(
    tokens, rows, order, offs, slots_per_token, tokens_first, fused, out_shape=None, **kwargs
) -> int:
    """One product."""
    return 2 * rows[0] * rows[1] * tokens[1]


def _loaded(x: Tensor | Callable[[], Tensor]) -> Tensor:
    return x if isinstance(x, Tensor) else x()


def _through_activation(
    dy: Tensor,
    x: Tensor | Callable[[], Tensor] | None,
    h: Tensor | PageTable | None,
    routing: Routing,
    weights: Tensor,
    parameters: ExpertParameters,
    settings: ExpertSettings,
    row_expert: Tensor | None,
    needs: NeededGradients,
    second: Adapter | None,
    over_h: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dh, act, dw, dy_rows, dlow), None where not needed; dy_rows and act give down's gradient, act and dlow its update's."""
    order, inverse, offs = routing
    transposed, bias = settings.transposed, parameters.gate_up_bias
    if not (needs.da or needs.act):
        return None, None, None, None, None
    if h is None:
        over_h = True
        assert x is not None, "x is saved wherever h is not"
        h = _first_product(_loaded(x), order, offs, inverse.shape[1], parameters, transposed)
    dlow = None
    if second is None:
        dy_rows = gather_rows(dy, order, offs, inverse.shape[1])
    else:
        dy_rows, dlow = second.gather_and_narrow_gradient(Gathered(dy, order, inverse.shape[1]), offs)
    if not needs.da:
        assert isinstance(h, Tensor), "without a gradient through the activation h is not in pages"
        h = decode_rows(h, 2 * parameters.down.shape[1 if transposed else 2]) if h.dtype is torch.uint8 else h
        activation = swiglu_forward(h, weights, order, offs, settings.glu, bias=bias, row_expert=row_expert)
        return None, activation, None, dy_rows, dlow
    da = rows_by_matrix(dy_rows, _matrix(parameters.down, not transposed), offs)
    if second is not None and dlow is not None:
        second.add_gradient(da, dlow, offs)
    kept = dy_rows if needs.down else None
    del dy_rows
    dh, act, dw = swiglu_backward(
        h, da, weights, order, offs, settings.glu, bias=bias, row_expert=row_expert,
        need_dh=needs.dh, need_act=needs.act, need_dw=needs.weights,
        over_h=over_h and isinstance(h, Tensor) and is_written_over(h),
    )  # fmt: skip
    return dh, act, dw, kept, dlow


def _fused_through_activation(
    dy: Tensor,
    x: Tensor | Callable[[], Tensor] | None,
    h: Tensor | None,
    routing: Routing,
    rows: hopper.Rows,
    weights: Tensor,
    parameters: ExpertParameters,
    needs: NeededGradients,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dh, act, dw) by the kernels for Hopper, None where not needed; dh is written over h."""
    if not (needs.da or needs.act):
        return None, None, None
    if h is None:
        assert x is not None, "x is saved wherever h is not"
        h, glu = hopper.gated_product(_loaded(x), rows, parameters.gate_up)
        del glu
    if not needs.da:
        return None, swiglu_forward(h, weights, routing.order, routing.offs, Glu(interleaved=True)), None
    act, partial = hopper.activation_gradient(dy, rows, parameters.down, h)
    dw = hopper.slot_sums(partial, routing.inverse) if needs.weights else None
    return h if needs.dh else None, act if needs.act else None, dw


def _down_gradient(
    dy: Tensor, dy_rows: Tensor | None, act: Tensor, offs: Tensor, rows: hopper.Rows | None, tokens_first: bool
) -> Tensor:
    """down's gradient: from the gathered dy_rows, or, if `rows` is given, from dy by a kernel for Hopper."""
    if rows is not None:
        return hopper.down_gradient(dy, rows, act)
    assert dy_rows is not None
    return _weight_gradient(dy_rows, act, offs, tokens_first)


def _input_gradient(
    dh: Tensor, routing: Routing, matrices: Tensor, first: Adapter | None, dlow: Tensor | None
) -> Tensor:
    """dx [T, H]."""
    dx_rows = rows_by_matrix(dh, matrices, routing.offs)
    if first is not None and dlow is not None:
        first.add_gradient(dx_rows, dlow, routing.offs)
    return combine_rows(dx_rows, routing.inverse)


def _first_product(
    x: Tensor, order: Tensor, offs: Tensor, slots_per_token: int, parameters: ExpertParameters, transposed: bool
) -> Tensor:
    """h [R, 2I] before its bias; backward recomputes it with this function, bitwise the same."""
    first = adapter_of(parameters.gate_up_update, x.dtype)
    matrices = _matrix(parameters.gate_up, transposed)
    if first is None:
        return rows_by_matrix(gather_rows(x, order, offs, slots_per_token), matrices, offs)
    x_rows, low = first.gather_and_narrow(Gathered(x, order, slots_per_token), offs)
    h = rows_by_matrix(x_rows, matrices, offs)
    first.add(h, low, offs)
    return h


def _weight_gradient(token_rows: Tensor, rows: Tensor, offs: Tensor, tokens_first: bool) -> Tensor:
    """In the parameter's layout: the order of the operands gives it without a transpose."""
    left, right = (token_rows, rows) if tokens_first else (rows, token_rows)
    return rows_by_rows(left, right, offs)


def _routing_and_down_bias_gradients(
    dy: Tensor,
    dw: Tensor | None,
    routing: Routing,
    row_expert: Tensor | None,
    weights: Tensor,
    parameters: ExpertParameters,
    needs: NeededGradients,
) -> tuple[Tensor, Tensor]:
    """(d_weights, d_down_bias), empty where not needed; dw is the part of d_weights that comes through the activation."""
    num_experts, down_bias = parameters.gate_up.shape[0], parameters.down_bias
    d_weights, d_down_bias = dy.new_empty(0), dy.new_empty(0)
    if down_bias is not None and (needs.weights or needs.down_bias):
        assert row_expert is not None
        slot_expert = slot_experts(routing, row_expert, num_experts)
        if needs.down_bias:
            weight_map = routing_map(weights, slot_expert, num_experts)
            # Unused rows of a dispatcher's buffer may hold NaN, which a weight of 0 does not remove.
            unread = (slot_expert == num_experts).all(1, keepdim=True)
            d_down_bias = weight_map.to(dy.dtype).t() @ dy.masked_fill(unread, 0)
        if needs.weights:
            assert dw is not None
            # Sentinels pick the extra last column.
            by_expert = F.pad(dy @ down_bias.t(), (0, 1))
            dw = dw + by_expert.gather(1, slot_expert).view(-1)
    if needs.weights:
        assert dw is not None
        d_weights = dw.view(weights.shape).to(weights.dtype)
    return d_weights, d_down_bias


def _matrix(weight: Tensor, transposed: bool) -> Tensor:
    """A view [E, in, out] of stacked weights; `not transposed` gives the view for the gradient."""
    return weight if transposed else weight.transpose(-2, -1)


def _row_experts(routing: Routing, parameters: ExpertParameters) -> Tensor | None:
    """The expert of each row, which only biases need."""
    if parameters.gate_up_bias is None and parameters.down_bias is None:
        return None
    return row_experts(routing.offs, routing.order.shape[0])


def _sum_by_expert(rows: Tensor, offs: Tensor) -> Tensor:
    """[E, N]: the sum of each expert's rows [R, N], in the accumulators of a grouped GEMM."""
    # 16 bytes of ones a row: the narrowest matrix whose stride F.grouped_mm accepts.
    ones = rows.new_ones((rows.shape[0], 16 // rows.element_size()))
    return rows_by_rows(rows, ones, offs)[:, :, 0].contiguous()
