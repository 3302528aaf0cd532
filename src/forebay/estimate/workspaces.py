"""The temporary buffers of operations that a trace sees as one: opaque operations, and kernels with workspaces.

Input: the name of an operation and its arguments, fake tensors. Output: `WorkspaceStep`s in the order of the real body,
without computing anything. A body that changes has to change here too: tests compare both on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from forebay.estimate.types import Mark
from forebay.kernels.masked_attention import bytes_of_lists, bytes_of_sums
from forebay.kernels.permute import CHUNK_SLOTS

WorkspaceStep = tuple[str | int, int]
"""(name, bytes) allocates a buffer, (name, 0) frees it, (number, 0) allocates that result of the operation."""
MARK = "mark"
"""The name of a step that allocates nothing: its number is a mark of `forebay.estimate.types`."""
_WARP, _FEW_TOKENS, _ROWS_A_THREAD = 32, 3072, 10  # of an embedding's backward


def workspace_steps(name: str, args: Any, kwargs: Any, deferred: bool) -> tuple[WorkspaceStep, ...]:
    """The steps of an operation; none if it allocates only its results.

    Args:
        deferred: down's gradient is made by another operation after the experts' backward; its steps are appended.
    """
    body = _BODIES.get(name)
    return () if body is None else tuple(body(*args, **kwargs, deferred=deferred))


def _experts_workspace(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *rest: Any, **_: Any
) -> list[WorkspaceStep]:
    """See `forebay.moe.experts_compute` and `forebay.kernels.permute`. Results: y, h, order, inverse, offs."""
    down_bias, transposed, save_h, max_rows = rest[1], rest[4], rest[7], rest[8]
    (tokens, slots), e = ids.shape, x.element_size()
    slots *= tokens
    rows = slots if max_rows is None else min(slots, max_rows)
    hidden, inner = x.shape[1], down.shape[1] if transposed else down.shape[2]
    counts = 4 * (gate_up.shape[0] + 1) * -(-slots // CHUNK_SLOTS)
    steps: list[WorkspaceStep] = [("counts", counts)]
    steps += [(2, 0)] if rows == slots else [("whole order", 4 * slots)]
    steps += [(3, 0), (4, 0), ("ends", counts), ("counts", 0), ("ends", 0)]
    steps += [] if rows == slots else [(2, 0), ("whole order", 0)]
    h: str | int = 1 if save_h == "exact" else "h"
    rounds = save_h == "fp8"
    steps += [("rows of x", e * rows * hidden), (h, 2 * e * rows * inner), ("rows of x", 0)]
    steps += [(1, 0), ("activation", e * rows * inner), ("h", 0)] if rounds else [("activation", e * rows * inner)]
    experts = gate_up.shape[0]
    if down_bias is not None:
        steps += [
            ("map", 4 * tokens * experts),
            *_using("cast map", e * tokens * experts, ("bias", e * tokens * hidden)),
        ]
    steps += [("rows of y", e * rows * hidden), ("activation", 0), (0, 0)]
    steps += [("bias", 0), ("map", 0)] if down_bias is not None else []
    steps += [("rows of y", 0)]
    return steps + ([] if save_h else [("h", 0)])


def _experts_backward_workspace(
    dy: Tensor, x: Any, h: Any, order: Tensor, inverse: Any, offs: Any, *rest: Any, deferred: bool
) -> list[WorkspaceStep]:
    """See `forebay.moe.experts_compute`. Results: dx, d_weights, dh, d_down and the biases'."""
    weights, down, settings = rest[0], rest[2], rest[5:]
    transposed = settings[2]
    need_x, need_weights, need_gate_up, need_down, need_bias, _ = settings[5:11]
    hidden, inner = dy.shape[1], down.shape[1] if transposed else down.shape[2]
    n, e = order.shape[0], dy.element_size()
    rows, act = e * n * hidden, e * n * inner
    need_dh = need_x or need_gate_up or need_bias or need_weights
    dh: str | int = 2 if need_gate_up else "dh"
    # dh is written over h, which is recomputed if it was not saved.
    steps: list[WorkspaceStep] = [] if h is not None else _using("rows of x", rows, (dh, 2 * act))
    steps.append(("rows of dy", rows))
    if need_dh or need_down:
        steps.append(("activation", act))
    if need_dh and h is not None:
        steps.append((MARK, Mark.DH) if h.dtype is not torch.uint8 else (dh, 2 * act))
    direct_weights = need_weights and weights.dtype == torch.float32
    steps += [(1, 0) if direct_weights else ("dw", 4 * weights.numel())] * need_dh
    down_steps: list[WorkspaceStep] = [(3, 0)] * bool(need_down)
    free_act: list[WorkspaceStep] = [("activation", 0)] if need_dh or need_down else []
    dx_steps = _using("rows of dx", rows, (0, 0)) * bool(need_x)
    if deferred:
        again = _using("rows of dy again", rows, *down_steps) if down_steps else []
        steps += [("rows of dy", 0), *dx_steps, (MARK, Mark.WEIGHT_GRADS), *again, *free_act]
    else:
        steps += [*down_steps, ("rows of dy", 0), *free_act, *dx_steps]
    return steps if direct_weights or not need_dh else [*steps, (1, 0), ("dw", 0)]


def _weight_backward_workspace(
    tokens: Tensor, rows: Tensor, order: Tensor, offs: Any, *rest: Any, **_: Any
) -> list[WorkspaceStep]:
    """The gathered tokens. Result: the gradient."""
    size = order.shape[0] * tokens.shape[1] * tokens.element_size()
    return [(MARK, Mark.GATE_UP_GRAD), *_using("rows of tokens", size, (0, 0))]


def _using(name: str, size: int, *steps: WorkspaceStep) -> list[WorkspaceStep]:
    return [(name, size), *steps, (name, 0)]


def _cross_entropy_workspace(
    hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, ignore: int, chunk: int, needs: Any, **_: Any
) -> list[WorkspaceStep]:
    """One chunk of logits (`forebay.models.linear_cross_entropy`). Results: the loss, and the gradients of hidden,
    weight and bias, in fp32 (fp64)."""
    rows = min(chunk, hidden.shape[0])
    logits = rows * weight.shape[0] * hidden.element_size()
    return [(0, 0), (1, 0), (2, 0), (3, 0), ("logits", logits), ("losses", 4 * rows), ("losses", 0), ("logits", 0)]


def _attention_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> list[WorkspaceStep]:
    """The buffers of flash attention 2 (torch's `flash_api.cpp`, mha_bwd) by size: the sum of dO*O, and dq in fp32, with the
    sequence rounded up to 64 and the head's width to 32; for grouped queries dk and dv of all query heads. They are
    one block, as in the cuDNN kernel that torch 2.11 uses on an H200: equal to the byte to the recorded histories of
    three models. Results: dq, dk, dv."""
    batch, heads, length, width = q.shape
    length = -(-length // 64) * 64
    size = 4 * batch * heads * length * (1 + -(-width // 32) * 32)
    if k.shape[1] != heads:
        size += sum(t.numel() // t.shape[1] * heads * t.element_size() for t in (k, v))
    return [(0, 0), (1, 0), (2, 0), ("workspace", size), ("workspace", 0)]


def _masked_attention_workspace(
    q: Tensor, k: Tensor, v: Any, mask: Tensor, *rest: Any, **_: Any
) -> list[WorkspaceStep]:
    """Lists of the tiles that leave a score (`forebay.kernels.masked_attention`). Results: the output and lse."""
    return [(0, 0), (1, 0), *_using("lists", bytes_of_lists(q, k, v, mask)[0])]


def _masked_attention_backward_workspace(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    mask: Tensor,
    sinks: Any,
    out: Any,
    lse: Tensor,
    *rest: Any,
    **_: Any,
) -> list[WorkspaceStep]:
    """Lists of tiles, for queries and for keys, and sums of the gradients of keys and values in fp32. Results: those of q, k, v
    and sinks."""
    keys, values = bytes_of_sums(q, k, v, mask)
    of_queries, of_keys = bytes_of_lists(q, k, v, mask)[1:]
    made: list[WorkspaceStep] = [("of queries", of_queries), ("of keys", of_keys), ("keys", keys), ("values", values)]
    freed: list[WorkspaceStep] = [(name, 0) for name, _ in made]
    return [*_using("delta", 4 * lse.numel(), (0, 0), *made, (1, 0), *[(2, 0)] * (v is not None), *freed)]


def _softmax_backward(grad: Tensor, output: Tensor, *rest: Any, **_: Any) -> list[WorkspaceStep]:
    """The product of gradient and output, which a GPU's kernel allocates (`SoftMax.cu`): in eager attention a whole tensor of
    scores. Result: the gradient."""
    size = output.numel() * max(output.element_size(), grad.element_size())
    return [(0, 0), ("gradient times output", size), ("gradient times output", 0)]


def _embedding_backward(grad: Tensor, ids: Tensor, rows: int, *rest: Any, **_: Any) -> list[WorkspaceStep]:
    """Of more than 3072 tokens on a GPU (`EmbeddingBackwardKernel.cu`): a row in fp32 for each tenth token and for each distinct
    one, of which there may be as many as tokens. Result: the weight's gradient."""
    tokens = ids.numel()
    if tokens <= _FEW_TOKENS:
        return []
    width = -(-grad.shape[-1] // _WARP) * _WARP
    parts = 4 * width * (tokens // _ROWS_A_THREAD + min(tokens, rows))
    return [(0, 0), ("parts", parts), ("parts", 0)]


_BODIES: Mapping[str, Callable[..., list[WorkspaceStep]]] = {
    "forebay.experts.default": _experts_workspace,
    "forebay.experts_backward.default": _experts_backward_workspace,
    "forebay.experts_weight_backward.default": _weight_backward_workspace,
    "forebay.masked_attention.default": _masked_attention_workspace,
    "forebay.masked_attention_backward.default": _masked_attention_backward_workspace,
    "forebay.linear_cross_entropy.default": _cross_entropy_workspace,
    "aten._scaled_dot_product_flash_attention_backward.default": _attention_backward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _attention_backward,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten.embedding_dense_backward.default": _embedding_backward,
}

EAGER_ONLY = frozenset({"aten._softmax_backward_data.default"})
"""Workspaces of kernels that compiled code does not call. The embedding is outside of what is compiled."""
GPU_ONLY = EAGER_ONLY | {"aten.embedding_dense_backward.default"}
"""Workspaces that the same operations do not have on a CPU."""
