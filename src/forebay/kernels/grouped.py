"""Grouped GEMMs: the rows of each expert times a matrix of that expert, or times other rows.

Input: rows [R, *] sorted by expert, and `offs` [E], the end row of each expert. Output: new tensors, or a sum of weight gradients
that the caller owns: `add_rows_by_rows` is a kernel that adds to it in the epilogue of the product. Megatron-LM does the same for
one weight and calls it `gradient_accumulation_fusion`. Where `F.grouped_mm` takes the operands of the others, nothing waits for
the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import INDICES, Backend, cdiv, check_written, launch, packed, use_triton

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# `add_rows_by_rows` on an H200, swept over two models' gate_up and down. 8 warps: 1.25 times as long; 2 stages 1.1; tiles of
# 128 x 64, 256 x 64 or 64 x 256 elements 1.16 to 1.2. Also slower: loads by descriptors (TMA), a separate last round so that the
# others need no row mask, sums by `red` in memory. Gathering tokens in the loop instead of before it: 1.18.
_BLOCK_M = 128
_BLOCK_N = 128
_BLOCK_K_BYTES = 128
_WARPS = 4
_STAGES = 3


def rows_by_matrix(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix: `rows[rows of e] @ matrices[e]`, a new contiguous tensor [R, N].

    Uses `F.grouped_mm` where it accepts the operands (see `_accepted_by_grouped_mm`). Otherwise a loop over the experts reads
    `offs` on the host: correct, but slow and not capturable.

    Args:
        rows: [R, M], sorted by expert. Rows from offs[-1] on are not read, and are uninitialized in the result.
        matrices: [E, M, N], may be views.
        offs: [E] int32, the end row of each expert, on the rows' device.
    """
    if rows.shape[0] == 0:
        return rows.new_empty((0, matrices.shape[2]))
    if _accepted_by_grouped_mm(rows, matrices):
        # F.grouped_mm pads the rows of its result to 16 bytes, which `contiguous` copies away; without padding it copies nothing.
        return F.grouped_mm(rows, matrices, offs=offs.contiguous()).contiguous()
    out = rows.new_empty((rows.shape[0], matrices.shape[2]))
    start = 0
    for e, end in enumerate(offs.tolist()):
        torch.mm(rows[start:end], matrices[e], out=out[start:end])
        start = end
    return out


def rows_by_rows(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """`left[rows of e].T @ right[rows of e]` for each expert: [E, M, N] contiguous, of left [R, M] and right [R, N].

    An expert without rows gets exact zeros. See `rows_by_matrix` for the implementation.
    """
    if left.shape[0] == 0:
        return left.new_zeros((offs.shape[0], left.shape[1], right.shape[1]))
    if _accepted_by_grouped_mm(left, right):
        return F.grouped_mm(left.t(), right, offs=offs.contiguous()).contiguous()  # padded for views of wider rows
    out = left.new_empty((offs.shape[0], left.shape[1], right.shape[1]))
    start = 0
    for e, end in enumerate(offs.tolist()):
        torch.mm(left[start:end].t(), right[start:end], out=out[e])
        start = end
    return out


def _accepted_by_grouped_mm(a: Tensor, b: Tensor) -> bool:
    """`F.grouped_mm` needs strides and addresses that are multiples of 16 bytes, and has no fp64."""
    return a.dtype in _GROUPED_DTYPES and _aligned(a) and _aligned(b)


def _aligned(t: Tensor) -> bool:
    """One unit stride among the last two; every other stride and the address are multiples of 16 bytes."""
    units, size, last_two = 0, t.element_size(), t.dim() - 2
    for i, stride in enumerate(t.stride()):
        if stride == 1 and i >= last_two:
            units += 1
        elif stride <= 0 or stride * size % 16:
            return False
    return units == 1 and t.data_ptr() % 16 == 0


@triton.jit
def _kernel(
    left_ptr, right_ptr, offs_ptr, total_ptr,
    m, n, left_stride, right_stride, expert_stride, m_stride,
    ALTERNATING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """total[one expert, BLOCK_M, BLOCK_N]."""
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * tiles_n
    # The tiles of an expert run next to each other: its rows stay in the cache.
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    start = tl.load(offs_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs_ptr + expert)
    if start < end:
        ms = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
        ns = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_m, inside_n = (ms < m)[None, :], (ns < n)[None, :]
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(start, end, BLOCK_K):
            # R * M passes 2**31: offsets of rows are 64-bit.
            row = (k + tl.arange(0, BLOCK_K)).to(tl.int64)[:, None]
            live = row < end
            left = tl.load(left_ptr + row * left_stride + ms[None, :], mask=live & inside_m, other=0.0)
            right = tl.load(right_ptr + row * right_stride + ns[None, :], mask=live & inside_n, other=0.0)
            product = tl.dot(tl.trans(left), right, product, input_precision="ieee")
        to = ms // 2 + ms % 2 * (m // 2) if ALTERNATING else ms
        at = total_ptr + expert.to(tl.int64) * expert_stride + to.to(tl.int64)[:, None] * m_stride + ns[None, :]
        inside = (ms < m)[:, None] & inside_n
        # Added at the end, not used as the initial value: a tensor core truncates small terms against a large sum.
        tl.store(at, tl.load(at, mask=inside, other=0.0) + product, mask=inside)


def add_rows_by_rows(
    total: Tensor, left: Tensor, right: Tensor, offs: Tensor, *, alternating: bool = False, backend: Backend = "auto"
) -> None:
    """total[e] += left[rows of e].T @ right[rows of e], for each expert e.

    Products are summed over an expert's rows in fp32, and each element of `total` is updated once: the same bits every time. The
    sum of an expert without rows is not touched. An element moves 8 bytes; a bf16 gradient added to fp32 afterwards moves 12.
    Measured (H200, 64 experts, M = 2816, N = 2048, 24576 rows): 1.32 to 1.37 ms, where `F.grouped_mm` takes 0.63 and adding its
    result 1.33; with 4 times the rows 2.72, and 1.64 and 1.34.

    Args:
        total: [E, M, N] fp32, or fp64 for fp64 operands; last dimension contiguous, elements do not overlap.
        left, right: [R, M] and [R, N] of one dtype, any strides; rows from offs[-1] on are not read.
        offs: [E] int32, the end row of each expert. The plain form, which handles fp64, reads it on the host.
        alternating: the columns of `left` alternate between two halves of total's M: column 2i is row i, 2i + 1 is row M/2 + i.

    Raises:
        ValueError: shapes, devices or dtypes that do not fit, a total that overlaps itself, an odd M if `alternating`.
        TypeError: offs that are not int32 or int64.
    """
    if left.dim() != 2 or right.dim() != 2 or left.device != right.device or left.device != total.device:
        raise ValueError(
            f"left [R, M], right [R, N] and total must be on one device, got {list(left.shape)} on {left.device}, "
            f"{list(right.shape)} on {right.device}, total on {total.device}"
        )
    offs = packed("offs", offs, left, [None], INDICES)
    check_written("total", total)
    experts, m, n = offs.shape[0], left.shape[1], right.shape[1]
    if total.shape != (experts, m, n) or left.shape[0] != right.shape[0] or (alternating and m % 2):
        raise ValueError(
            f"left {tuple(left.shape)} and right {tuple(right.shape)} of {experts} experts do not make {tuple(total.shape)}"
        )
    exact = torch.float64 if left.dtype == torch.float64 else torch.float32
    if left.dtype != right.dtype or total.dtype != exact or total.stride(2) != 1:
        raise ValueError(
            f"left is {left.dtype}, right {right.dtype}: both need one dtype, and a total of {exact} with a contiguous last "
            f"dimension, not {total.dtype} with strides {total.stride()}"
        )
    if not use_triton(backend, left):
        halves = torch.cat((left[:, ::2], left[:, 1::2]), 1) if alternating else left
        _reference(total, halves, right, offs)
        return
    if total.numel() == 0 or left.shape[0] == 0:
        return
    left = left if left.stride(1) == 1 else left.contiguous()
    right = right if right.stride(1) == 1 else right.contiguous()
    launch(
        _kernel, (experts * cdiv(m, _BLOCK_M) * cdiv(n, _BLOCK_N),),
        left, right, offs, total, m, n, left.stride(0), right.stride(0), total.stride(0), total.stride(1),
        ALTERNATING=alternating, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K_BYTES // left.element_size(),
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip


def _reference(total: Tensor, left: Tensor, right: Tensor, offs: Tensor) -> None:
    start = 0
    for e, end in enumerate(offs.tolist()):
        total[e] += left[start:end].to(total.dtype).T @ right[start:end].to(total.dtype)
        start = end
