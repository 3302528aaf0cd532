"""Products of experts' rows, added to a sum where they are made: a weight's gradient is never there beside what sums it.

In: left [R, M] and right [R, N], rows sorted by expert, and `offs` [E] int32, the end row of each expert, on their device. Out:
nothing; `total` [E, M, N], the caller's, has

    total[e] += left[rows of e].T @ right[rows of e]

summed over an expert's rows in fp32 and added in `total`'s dtype, each element once: the same bits every time. Rows from offs[-1]
on are not read. The sum of an expert without rows is not touched.

Example, M = N = 1, two experts: left = [2, 3, 5], right = [1, 1, 2], offs = [1, 3]; total[0] grows by 2 and total[1] by 3 + 10.

Bytes: made in bf16 and then added to fp32, an element costs 12 (2 written; 2 and 4 read, 4 written), and 2 while it waits; here
8, and 0. FLOPs are the same, 2 R M N. A layer of 64 experts, M = 2816, N = 2048, with 24576 rows: 283 GFLOP and 2.95 GB, 0.45 ms
at 630 TFLOP/s and 0.70 ms at 4.2 TB/s. Adding to the sum in the product's epilogue is what Megatron-LM calls
`gradient_accumulation_fusion`, there for one weight.

Measured (H200, that layer): 1.32 to 1.37 ms, where `F.grouped_mm` takes 0.63 and adding its result 1.33; with 4 times the rows
2.72, and 1.64 and 1.34. Products and sums of different tiles hardly overlap.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import INDICES, Backend, check_written, on_device_of, packed, use_triton

# Swept on an H200 over two models' gate_up and down. 8 warps: 1.25 times as long; 2 stages 1.1; tiles of 128 x 64, 256 x 64 or
# 64 x 256 elements 1.16 to 1.2. Slower too: loads by descriptors (TMA), a last round of its own so that the others need no mask
# of rows, sums by `red` in memory. A gather of tokens by row number in the loop (in place of one before it): 1.18.
_BLOCK_M = 128
_BLOCK_N = 128
_BLOCK_K_BYTES = 128
_WARPS = 4
_STAGES = 3


@triton.jit
def _kernel(
    left_ptr,
    right_ptr,
    offs_ptr,
    total_ptr,
    m,
    n,
    left_stride,
    right_stride,
    expert_stride,
    m_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """total[one expert, BLOCK_M, BLOCK_N]; see the module docstring."""
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * tiles_n
    # All tiles of an expert run beside each other: its rows stay in the cache.
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
        at = total_ptr + expert.to(tl.int64) * expert_stride + ms.to(tl.int64)[:, None] * m_stride + ns[None, :]
        inside = (ms < m)[:, None] & inside_n
        # Added at the end, not summed on from: a tensor core cuts off what a large sum pushes out.
        tl.store(at, tl.load(at, mask=inside, other=0.0) + product, mask=inside)


def add_rows_by_rows(total: Tensor, left: Tensor, right: Tensor, offs: Tensor, *, backend: Backend = "auto") -> None:
    """Add left[rows of e].T @ right[rows of e] to total[e]; see the module docstring.

    Args:
        total: [E, M, N] of fp32, or fp64 for operands of that; its last dimension contiguous,
            no two elements in one place.
        left: [R, M]; a last dimension that is not contiguous is copied first.
        right: [R, N] of left's dtype; likewise.
        offs: [E] int32, any stride. The plain form, which fp64 takes, reads it on the host.

    Raises:
        ValueError: shapes, devices or dtypes that do not fit, a total that overlaps itself.
        TypeError: offs that are no integers of 32 or 64 bits.
    """
    if left.dim() != 2 or right.dim() != 2 or left.device != right.device or left.device != total.device:
        raise ValueError(
            f"left [R, M], right [R, N] and total must be on one device, got {list(left.shape)} on {left.device}, "
            f"{list(right.shape)} on {right.device}, total on {total.device}"
        )
    offs = packed("offs", offs, left, [None], INDICES)
    check_written("total", total)
    experts, m, n = offs.shape[0], left.shape[1], right.shape[1]
    if total.shape != (experts, m, n) or left.shape[0] != right.shape[0]:
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
        _reference(total, left, right, offs)
        return
    if total.numel() == 0 or left.shape[0] == 0:
        return
    left = left if left.stride(1) == 1 else left.contiguous()
    right = right if right.stride(1) == 1 else right.contiguous()
    with on_device_of(left):
        _kernel[(experts * triton.cdiv(m, _BLOCK_M) * triton.cdiv(n, _BLOCK_N),)](
            left,
            right,
            offs,
            total,
            m,
            n,
            left.stride(0),
            right.stride(0),
            total.stride(0),
            total.stride(1),
            BLOCK_M=_BLOCK_M,
            BLOCK_N=_BLOCK_N,
            BLOCK_K=_BLOCK_K_BYTES // left.element_size(),
            num_warps=_WARPS,
            num_stages=_STAGES,
        )


def _reference(total: Tensor, left: Tensor, right: Tensor, offs: Tensor) -> None:
    start = 0
    for e, end in enumerate(offs.tolist()):
        total[e] += left[start:end].to(total.dtype).T @ right[start:end].to(total.dtype)
        start = end
