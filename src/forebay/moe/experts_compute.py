"""What the experts of an MoE layer compute, forward and backward, by grouped products and Forebay's kernels.

Input: tokens x [T, H], routing ids and weights [T, K], and stacked expert weights of one dtype; `forebay.moe.experts` checks and
casts them. Output: y [T, H] and what backward reads; then the gradients. Nothing is recorded for autograd: operations are made of
these functions (`forebay.moe.experts_op`), and where x and h are kept in pages they are called (`forebay.moe.experts`). Results
are deterministic. In bf16 on CUDA nothing synchronizes with the host, and everything can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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
    with _without_autocast(x):
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

    gate_up's gradient, x_rows.T @ dh for each expert, is `weight_gradient`: where it is computed later, the tensors of
    this function are gone, and d_down is in its sum.

    Each tensor of N = T*K rows is freed after its last use. Temporary memory in bf16, h or dh included: 2N(H + 3I) bytes and then
    d_down, 2N(H + 2I) while dx is computed, and the same beside gate_up's gradient. T=16384, K=8, H=2048, I=768, E=128: 1088 MiB
    forward; backward 1088 + 384 MiB, then 896 + 384, then 896 + 768. `fused` saves 2NH bytes of the first and of the last peak.

    Args:
        x: None where it was not saved; a callable loads it when it is needed.
        h: as `experts_forward` returned it, or its pages; None to recompute it, with the same kernel on the same operands:
            bitwise the same.
        fused: of the forward. There are neither x_rows nor dy_rows, one kernel makes dh from dy, and dh alternates like h.
        defer_down: return act [R, I] in place of down's gradient. It is an operand of `weight_gradient`, as dh is.
        over_h: write dh over h, unless it is in 8 bits; the dh that is returned is then h. A recomputed h is always written over.
    """
    order, inverse, offs = routing
    dx, d_down, d_gate_up_bias, d_a1, d_b1, d_a2, d_b2 = (dy.new_empty(0) for _ in range(7))
    with _without_autocast(dy):
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


def weight_gradient(
    tokens: Tensor, rows: Tensor, order: Tensor, offs: Tensor, slots_per_token: int, tokens_first: bool, fused: bool
) -> Tensor:
    """The gradient of gate_up, or that of down from what `experts_backward` returned with `defer_down`.

    Args:
        tokens, rows: x [T, H] and dh [R, 2I] for gate_up, dy [T, H] and act [R, I] for down.
        tokens_first: whether the parameter is [E, H, *] (gate_up if transposed, down if not) or [E, *, H].
        fused: of the forward: no tokens are gathered in memory, and dh alternates. No such stack is transposed.
    """
    with _without_autocast(tokens):
        if fused:
            gradient = hopper.down_gradient if tokens_first else hopper.gate_up_gradient
            return gradient(tokens, hopper.rows_of(order, offs, slots_per_token), rows)
        token_rows = gather_rows(tokens.contiguous(), order, offs, slots_per_token)
        return _weight_gradient(token_rows, rows, offs, tokens_first)


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
    """Add `weight_gradient` to `total` without storing it or rounding it to the operands' dtype.

    Also for `fused` operands this gathers the tokens and uses Forebay's own kernel, which puts alternating rows in their places.

    Args:
        total: fp32, or fp64 for fp64 operands; of the parameter's shape.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    token_rows = gather_rows(tokens.contiguous(), order, offs, slots_per_token)
    left, right = (token_rows, rows) if tokens_first else (rows, token_rows)
    with _without_autocast(tokens):
        add_rows_by_rows(total, left, right, offs, alternating=fused and not tokens_first)


def _without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context without autocast for operations on the device of `tensor`; autocast's own takes the host 8 microseconds."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def is_written_over(h: Tensor | None) -> bool:
    """Whether a backward with `over_h` writes dh over a saved h: not if it was not saved, or in 8 bits."""
    return h is not None and h.dtype is not torch.uint8


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
