"""What operations allocate that a trace sees as one: their bodies' tensors, in the order in which they come and go.

In: the name of an operation and its arguments, fake tensors. Out: steps (name, bytes), bytes 0 where it is freed; a number
instead of a name is one of the results, whose bytes are the result's own. Nothing is computed or kept.

    forebay::experts, its backward     as `forebay.moe.experts_op` has them, with `forebay.kernels.sort_slots`
    forebay::linear_cross_entropy      one chunk of logits beside the results: `forebay.loss`
    attention's backward               what flash attention 2 allocates in torch (`flash_api.cpp`, mha_bwd), by size: the sum of
                                       dO*O and dq in fp32, sequence rounded up to 128 and the head's width to 32, and for grouped
                                       queries dk and dv of all query heads. In one piece: cuDNN's, which torch 2.11 takes on an
                                       H200 (seen in recorded histories of three models, equal to the byte)
    softmax's backward                 the product of gradient and output, as large as the result, on a GPU (`SoftMax.cu`): of
                                       eager attention, a whole tensor of scores
    embedding's backward               of more than 3072 tokens on a GPU (`EmbeddingBackwardKernel.cu`): a row in fp32 for each
                                       tenth token and for each different one, of which there may be as many as tokens
    sums                               of many values to few on a GPU (`Reduce.cuh`): where a thread would add up 256 and more,
                                       several blocks share an output, and each leaves its part in memory. A bias's gradient
                                       of 2048 tokens and 2880 columns takes 45 MiB so, equal to a recorded history's

A body that changes has to change here: tests compare with the real body's storages on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Step = tuple[str | int, int]
GIVEN = "argument "
"""With an argument's number behind it, and 0 bytes: nobody needs it from here on."""
_CHUNK = 512  # slots that a program of sort_slots counts
_THREADS, _WARP, _MOST_VALUES = 512, 32, 256  # of a reduction's block, of a warp, and values that a thread adds up
_FEW_TOKENS, _ROWS_A_THREAD = 3072, 10  # of an embedding's backward
_MULTIPROCESSORS, _RESIDENT = 132, 2048  # of an H100 or H200, and threads of each


def steps_of(name: str, args: Any, kwargs: Any, later: bool) -> tuple[Step, ...]:
    """The steps of an operation; none for one that allocates its results alone. `later`: the experts' weight gradients are made
    by an operation of their own behind this one, and here are its steps as well."""
    body = _BODIES.get(name)
    return () if body is None else tuple(body(*args, **kwargs, later=later))


def _experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *rest: Any, later: bool
) -> list[Step]:
    """Results: y, h, order, inverse, offs."""
    down_bias, transposed, save_h, max_rows = rest[1], rest[4], rest[7], rest[8]
    (tokens, slots), e = ids.shape, x.element_size()
    slots *= tokens
    rows = slots if max_rows is None else min(slots, max_rows)
    hidden, inner = x.shape[1], down.shape[1] if transposed else down.shape[2]
    counts = 4 * (gate_up.shape[0] + 1) * -(-slots // _CHUNK)
    steps: list[Step] = [("counts", counts)]
    steps += [(2, 0)] if rows == slots else [("whole order", 4 * slots)]
    steps += [(3, 0), (4, 0), ("ends", counts), ("counts", 0), ("ends", 0)]
    steps += [] if rows == slots else [(2, 0), ("whole order", 0)]
    h: str | int = 1 if save_h else "h"
    steps += [("rows of x", e * rows * hidden), (h, 2 * e * rows * inner), ("rows of x", 0)]
    steps += [("activation", e * rows * inner), ("rows of y", e * rows * hidden), ("activation", 0)]
    if down_bias is not None:
        steps += [("map", 4 * tokens * gate_up.shape[0]), ("bias", e * tokens * hidden)]
    steps += [(0, 0), ("rows of y", 0)]
    steps += [("bias", 0), ("map", 0)] if down_bias is not None else []
    return steps + ([] if save_h else [("h", 0)])


def _experts_backward(
    dy: Tensor, x: Any, h: Any, order: Tensor, inverse: Any, offs: Any, *rest: Any, later: bool
) -> list[Step]:
    """Results: dx, d_weights, d_gate_up, d_down and the biases'."""
    weights, down, settings = rest[0], rest[2], rest[5:]
    transposed = settings[2]
    need_x, need_weights, need_gate_up, need_down, need_bias, _ = settings[5:11]
    hidden, inner = dy.shape[1], down.shape[1] if transposed else down.shape[2]
    n, e = order.shape[0], dy.element_size()
    rows, act, dh = e * n * hidden, e * n * inner, "dh"
    steps: list[Step] = []
    if h is None:  # dh is written over it
        steps += [("rows of x", rows), (dh, 2 * act), ("rows of x", 0)]
    steps += [("rows of dy", rows)]
    need_dh = need_x or need_gate_up or need_bias
    if need_dh or need_weights:
        steps += [("activation", act)]
        steps += [(dh, 2 * act)] if h is not None else []
        steps += [(1, 0)] if need_weights and weights.dtype == torch.float32 else [("dw", 4 * weights.numel())]
    elif need_down:
        steps += [("activation", act)]
    making_down: list[Step] = [(3, 0)] if need_down else []
    making_gate_up: list[Step] = [("rows of x again", rows), (2, 0), ("rows of x again", 0)] if need_gate_up else []
    steps += making_down if not later else []
    steps += [("rows of dy", 0)]
    made = {key for key, size in steps if size}
    free: list[Step] = [("activation", 0)] if "activation" in made else []
    steps += free if not later else []
    steps += [("rows of dx", rows), (0, 0), ("rows of dx", 0)] if need_x else []
    steps += making_gate_up if not later else []
    if later:
        gathered: list[Step] = [("rows of dy again", rows), *making_down, ("rows of dy again", 0)]
        # Its node is done with h before the weights' gradients are made.
        steps += [(f"{GIVEN}2", 0)] if h is not None else []
        steps += (gathered if need_down else []) + free + making_gate_up
    steps += [(dh, 0)] if dh in made else []
    steps += [(1, 0), ("dw", 0)] if "dw" in made else []
    return steps


def _cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, ignore: int, chunk: int, needs: Any, *, later: bool
) -> list[Step]:
    """Results: the loss, and the gradients of hidden, weight and bias, in fp32 (fp64)."""
    rows = min(chunk, hidden.shape[0])
    logits = rows * weight.shape[0] * hidden.element_size()
    return [(0, 0), (1, 0), (2, 0), (3, 0), ("logits", logits), ("losses", 4 * rows), ("losses", 0), ("logits", 0)]


def _attention_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, later: bool, **_: Any) -> list[Step]:
    """Results: dq, dk, dv."""
    batch, heads, length, width = q.shape
    length = -(-length // 128) * 128
    size = 4 * batch * heads * length * (1 + -(-width // 32) * 32)
    if k.shape[1] != heads:
        size += sum(t.numel() // t.shape[1] * heads * t.element_size() for t in (k, v))
    return [(0, 0), (1, 0), (2, 0), ("workspace", size), ("workspace", 0)]


def _softmax_backward(grad: Tensor, output: Tensor, *rest: Any, later: bool, **_: Any) -> list[Step]:
    """Result: the gradient."""
    size = output.numel() * max(output.element_size(), grad.element_size())
    return [(0, 0), ("gradient times output", size), ("gradient times output", 0)]


def _sum(x: Tensor, dims: Any = None, *rest: Any, later: bool, **_: Any) -> list[Step]:
    """Result: the sums."""
    reduced = {d % x.dim() for d in dims} if dims else set(range(x.dim()))
    kept = [(x.stride(d), x.shape[d]) for d in range(x.dim()) if d not in reduced and x.shape[d] > 1]
    summed = [x.stride(d) for d in reduced if x.shape[d] > 1]
    outputs = math.prod(n for _, n in kept)
    if not summed or not outputs:
        return []
    across = bool(kept) and min(summed) > min(kept)[0]
    size = _split_sum(outputs, x.numel() // outputs, across, max(4, x.element_size()))
    return [(0, 0), ("parts", size), ("parts", 0)] if size else []


def _embedding_backward(grad: Tensor, ids: Tensor, rows: int, *rest: Any, later: bool, **_: Any) -> list[Step]:
    """Result: the weight's gradient."""
    tokens = ids.numel()
    if tokens <= _FEW_TOKENS:
        return []
    width = -(-grad.shape[-1] // _WARP) * _WARP
    parts = 4 * width * (tokens // _ROWS_A_THREAD + min(tokens, rows))
    return [(0, 0), ("parts", parts), ("parts", 0)]


def _split_sum(outputs: int, inputs: int, across: bool, width: int) -> int:
    """Bytes that a reduction leaves between its blocks, of `width` bytes a value. `across`: what is summed does not lie side by
    side. The names are those of `Reduce.cuh`, `setReduceConfig`."""
    vector = next(v for v in (4, 2, 1) if outputs % v == 0) if across else 1
    threads = _THREADS // vector
    dim0, dim1 = (outputs // vector, inputs) if across else (inputs, outputs)
    dim0, dim1 = (min(1 << (n.bit_length() - 1), threads) for n in (dim0, dim1))
    block_width = min(dim0, _WARP)
    block_height = min(dim1, threads // block_width)
    block_width = min(dim0, threads // block_height)
    values = inputs if across else -(-inputs // block_width)
    step_output = block_width if across else 1
    if values < min(16 * block_height, _MOST_VALUES):
        return 0  # blocks are split between outputs
    values = -(-values // block_height)
    grid = -(-(outputs // vector) // step_output)
    target = _MULTIPROCESSORS * (_RESIDENT // (block_width * block_height))
    if values < _MOST_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // _MOST_VALUES))
    return width * outputs * blocks * (block_width * vector if across else 1) if blocks > 1 else 0


_BODIES: Mapping[str, Callable[..., list[Step]]] = {
    "forebay.experts.default": _experts,
    "forebay.experts_backward.default": _experts_backward,
    "forebay.linear_cross_entropy.default": _cross_entropy,
    "aten._scaled_dot_product_flash_attention_backward.default": _attention_backward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _attention_backward,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.sum.default": _sum,
    "aten.sum.dim_IntList": _sum,
}

EAGER = frozenset(name for name in _BODIES if name.startswith(("aten._softmax", "aten.sum", "aten.embedding")))
"""Of these, what a GPU's kernels alone allocate, and compiled code does not call."""
