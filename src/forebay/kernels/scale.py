"""Multiplication of a tensor by a number on the device, into another dtype, with one rounding.

Input: x of any shape and a factor of one element. Output: a new tensor that the caller owns. From fp32 to bf16, `torch.mul(x,
factor, out=...)` moved 1.5 TB/s on an H200 (0.27 ms for [32768, 2048]; this kernel 0.10), `x.mul(factor)` with a conversion holds
one more fp32 copy, and `x.to(dtype) * factor` rounds twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import Backend, cdiv, on_device_of, use_triton

_BLOCK = 4096


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Elements [program_id(0) * BLOCK, + BLOCK) of n."""
    # A weight's gradient may hold more than 2**31 elements: 64-bit offsets.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, (x * factor).to(out_ptr.dtype.element_ty), mask=at < n)


def scale(x: Tensor, factor: Tensor, dtype: torch.dtype, *, backend: Backend = "auto") -> Tensor:
    """`(x * factor).to(dtype)` as a new tensor, the product in x's dtype, without a host synchronization.

    Args:
        x: contiguous, floating point, any shape.
        factor: one element, x's dtype and device.

    Raises:
        ValueError: x not contiguous; factor of another size or device.
        TypeError: x not floating point; factor of another dtype.
    """
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()} for {tuple(x.shape)}")
    if factor.numel() != 1 or factor.device != x.device:
        raise ValueError(f"factor must be one element on {x.device}, got {tuple(factor.shape)} on {factor.device}")
    if factor.dtype != x.dtype:
        raise TypeError(f"factor is {factor.dtype}, x is {x.dtype}")
    if torch.compiler.is_compiling():  # Inductor fuses this into one pass
        return (x * factor.reshape(())).to(dtype)
    if not use_triton(backend, x):
        # Like the kernel, no intermediate product in x's dtype: a memory trace counts it.
        return torch.mul(x, factor.reshape(()), out=torch.empty_like(x, dtype=dtype))
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        with on_device_of(x):
            grid = (cdiv(x.numel(), _BLOCK),)
            _scale_kernel[grid](x, factor, out, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return out
