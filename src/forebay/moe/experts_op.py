"""Custom operations for the experts of an MoE layer: `forebay::experts`, its backward, and its deferred weight gradients.

Input: tokens x [T, H], routing ids and weights [T, K], and stacked expert weights of one dtype; `forebay.moe.experts` checks
and casts them. Output: y [T, H] and the tensors that backward reads (see `save_for_backward`), which the autograd graph owns.
The operations compute with `forebay.moe.experts_compute`; here are their shapes in a trace, their autograd and their FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.utils.flop_counter import register_flop_formula

from forebay.kernels.row_fp8 import encoded_width
from forebay.moe.experts_compute import (
    ExpertParameters,
    ExpertSettings,
    NeededGradients,
    experts_backward,
    experts_forward,
    is_written_over,
    weight_gradient,
)
from forebay.moe.low_rank import LowRank
from forebay.moe.routing import Routing

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
    """See `forebay.moe.experts_compute.weight_gradient`."""
    return weight_gradient(tokens, rows, order, offs, slots_per_token, tokens_first, fused)


@experts_weight_backward_op.register_fake
def _(tokens, rows, order, offs, slots_per_token, tokens_first, fused):
    sides = (tokens.shape[1], rows.shape[1]) if tokens_first else (rows.shape[1], tokens.shape[1])
    return rows.new_empty((offs.shape[0], *sides))


_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str})


def undispatched(operation: Callable[..., Any], *args: Any) -> Any:
    """`operation(*args)`, for callers whose gradients have nodes of their own.

    Calls the body of an operation if nothing records or watches it: torch's dispatcher takes the host 50 to 80 microseconds to
    get there, and 750 in torch 2.13 if the operation writes to an argument.
    """
    watched = torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling()
    if watched or not isinstance(operation, CustomOpDef):
        return operation(*args)
    others = {*map(type, args)} - _PLAIN
    if any(issubclass(kind, Tensor) for kind in others) or args[0].is_meta:
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
    check_backward(dy)
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


def consumable(h: Tensor | None) -> Tensor | None:
    """A saved h that its backward may write over: itself, or a copy if this backward keeps the graph for another one.

    Compiled code runs its backward once, or copies h by itself (`forebay.models.compile`).
    """
    if h is None or not is_written_over(h) or torch.compiler.is_compiling():
        return h
    return h.clone() if torch._C._autograd._get_current_graph_task_keep_graph() else h


def check_backward(dy: Tensor) -> None:
    """Check, in a backward of the gradient `dy`, that the experts have it.

    Raises:
        RuntimeError: it is to be differentiated itself (create_graph=True), or `dy` is a batch (is_grads_batched=True).
    """
    if torch.compiler.is_compiling():  # enables gradients in any case
        return
    own = (
        "leave the model on its own experts with forebay.manage(model, experts=None, loss=None), or "
        "experts_implementation='eager'"
    )
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"Forebay's experts are differentiable once, so create_graph=True cannot run through them: {own}"
        )
    if torch._C._functorch.is_legacy_batchedtensor(dy) or torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "Forebay's experts take one gradient at a time, so is_grads_batched=True (torch.func.vmap of a backward) cannot run "
            f"through them: call torch.autograd.grad once for each gradient, or {own}"
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
