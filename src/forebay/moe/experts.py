"""The routed experts of an MoE layer.

Input: tokens x [T, H], the router's ids and weights [T, K], and stacked expert weights. Output: y [T, H]. This module checks and
casts; `forebay.moe.experts_op` computes and saves for backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.swiglu import Glu
from forebay.moe.experts_autograd import Pages, eager_experts
from forebay.moe.experts_op import experts_op
from forebay.moe.routing import check_routed
from forebay.moe.wgrad import WeightGradients


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
    max_rows: int | None = None,
    deferred: WeightGradients | None = None,
    pages: Pages | None = None,
) -> Tensor:
    """y [T, H] in x's dtype: each token's chosen experts, weighted and summed.

    Args:
        x: [T, H]. Computed in the weights' dtype, whatever its own (autocast passes fp32 tokens to bf16 weights).
        ids: [T, K], any integer dtype. Ids outside [0, E) are sentinels: their slots add nothing, and their weights get a zero
            gradient.
        weights: [T, K], any floating dtype; their gradient has it too.
        gate_up: [E, 2I, H], or [E, H, 2I] if `transposed`.
        down: [E, H, I], or [E, I, H] if `transposed`.
        gate_up_bias, down_bias: [E, 2I] and [E, H].
        activation: "swiglu" (silu) or "clamped_swiglu" (GPT-OSS; reads alpha and limit).
        interleaved: gate and up columns alternate instead of forming two halves.
        save_h: save h for backward (4KI bytes a token in bf16), or recompute it there.
        max_rows: bound on the live rows, where most ids are sentinels; see `forebay.moe.dispatch`. Live rows beyond it are left
            out. The default is T*K.
        deferred: defers the gradients of gate_up and down. Breaks the graph of `torch.compile`.
        pages: where x and h wait for backward, live rows only. Breaks the graph of `torch.compile`.

    Raises:
        ValueError: shapes that do not fit, or an unknown activation.
        TypeError: weights of several dtypes.
        RuntimeError: called under a transform of torch.func.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "Forebay's experts do not run under transforms of torch.func (grad, vmap, jvp): use torch.autograd.grad, or leave "
            "the model on its own experts (experts=None, or experts_implementation='eager')"
        )
    _check(x, ids, weights, gate_up, down, gate_up_bias, down_bias, transposed)
    Glu(activation, interleaved, alpha, limit)
    trained = (x, weights, gate_up, down, gate_up_bias, down_bias)
    has_backward = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trained)
    # Under autocast, autograd's own casts return the gradients in the caller's dtypes.
    inputs = (
        x.to(gate_up.dtype).contiguous(), ids, weights, gate_up, down, gate_up_bias, down_bias,
        activation, interleaved, transposed, alpha, limit, save_h and has_backward, max_rows,
    )  # fmt: skip
    if deferred is None and (pages is None or not has_backward):
        y = experts_op(*inputs)[0]
    else:
        y = eager_experts(inputs, deferred, pages)
    return y.to(x.dtype)


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
    for name, bias, width in (
        ("gate_up_bias", gate_up_bias, 2 * inner),
        ("down_bias", down_bias, hidden),
    ):
        if bias is not None and tuple(bias.shape) != (num_experts, width):
            raise ValueError(f"{name} must be {(num_experts, width)}, got {tuple(bias.shape)}")
    dtypes = {t.dtype for t in (gate_up, down, gate_up_bias, down_bias) if t is not None}
    if len(dtypes) > 1:
        raise TypeError(f"expert weights and biases must share a dtype, got {dtypes}")
