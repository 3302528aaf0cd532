"""Multiplies a tensor in half precision by a number on its device, in fp32.

Input: `source` [N] in bf16 or fp16, and `factor`, fp32 of one element. Output: [N] fp32, the bits of
`source.float() * factor`. torch casts and multiplies in two kernels that move 14 bytes an element; its one product of two dtypes
takes as long. This moves 6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import Backend, cdiv, launch, use_triton

_BLOCK = 2048
_WARPS = 8


@triton.jit
def _scaled_cast_kernel(source_ptr, factor_ptr, result_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(result_ptr + at, values * tl.load(factor_ptr), mask=at < n)


def scaled_cast(source: Tensor, factor: Tensor, *, backend: Backend = "auto") -> Tensor:
    """`source.float() * factor`, of the same shape, contiguous.

    Args:
        source: any shape, bf16 or fp16.
        factor: one element, fp32, on the same device.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or device of `factor`.
    """
    if source.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"source must be bfloat16 or float16, got {source.dtype}")
    if factor.dtype != torch.float32:
        raise TypeError(f"factor must be float32, got {factor.dtype}")
    if factor.numel() != 1 or factor.device != source.device:
        raise ValueError(f"factor must be one number on {source.device}, got {list(factor.shape)} on {factor.device}")
    if not use_triton(backend, source) or not source.numel():
        return source.float().mul_(factor.reshape(())).contiguous()
    source = source.contiguous()
    result = torch.empty_like(source, dtype=torch.float32)
    n = source.numel()
    launch(_scaled_cast_kernel, (cdiv(n, _BLOCK),), source, factor, result, n, BLOCK=_BLOCK, num_warps=_WARPS)
    return result
