"""Splits fp32 weights into bf16 weights and what rounding took from them, and joins them again, to the bit.

Input of `split`: a weight [N] in fp32. Output: `high` [N], the weight rounded to bf16 as torch rounds it; `low` [N] int16, the
lower half of its bits; `ties` [N / 8] uint8. `join` is the inverse. High and low take the four bytes of the weight, so a
computation in bf16 reads its weights without a copy of them, and an optimizer has all of their bits.

Rounding up adds 1 to the upper half of the bits, and `low` tells of it: it is then above half of its range, or exactly half if
the upper half was odd. For the exact half, which is rounded to an even upper half from both sides, a bit of `ties` says whether
it was rounded up. A NaN stays one, with another payload.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import Backend, cdiv, launch, use_triton

BITS = 8
"""Weights to a byte of `ties`: N has to be a multiple of it."""
_BYTES_OF_TIES = 128  # of a program
_WARPS = 4


@triton.jit
def places(ROWS: tl.constexpr, BITS: tl.constexpr):
    """The places of the bytes of ties that this program takes, [ROWS], and those of its weights, [ROWS, BITS]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return rows, rows[:, None] * BITS + tl.arange(0, BITS)[None, :]


@triton.jit
def load_joined(high_ptr, low_ptr, ties_ptr, rows, at, n, BITS: tl.constexpr):
    """The bits of a split weight, int32, at `places`. All pointers are of integers as wide as their elements."""
    inside = at < n
    high = tl.load(high_ptr + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
    low = tl.load(low_ptr + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
    packed = tl.load(ties_ptr + rows, mask=rows * BITS < n, other=0).to(tl.int32)
    tie = ((packed[:, None] >> tl.arange(0, BITS)[None, :]) & 1) == 1
    is_nan = (high & 0x7FFF) > 0x7F80
    up = ((low > 0x8000) & (is_nan == 0)) | tie
    return ((high - up.to(tl.int32)) << 16) | low


@triton.jit
def store_split(bits, high_ptr, low_ptr, ties_ptr, rows, at, n, BITS: tl.constexpr):
    """The inverse of `load_joined`: stores the upper half, rounded, the lower half, and which ties were rounded up."""
    inside = at < n
    upper = (bits >> 16) & 0xFFFF
    low = bits & 0xFFFF
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    tie = (low == 0x8000) & ((upper & 1) == 1) & (is_nan == 0)
    up = ((low > 0x8000) & (is_nan == 0)) | tie
    high = tl.where(is_nan, upper | 0x40, upper + up.to(tl.int32))
    tl.store(high_ptr + at, high.to(tl.int16), mask=inside)
    tl.store(low_ptr + at, low.to(tl.int16), mask=inside)
    packed = tl.sum(tie.to(tl.int32) << tl.arange(0, BITS)[None, :], axis=1)
    tl.store(ties_ptr + rows, packed.to(tl.uint8), mask=rows * BITS < n)


@triton.jit
def _split_kernel(weight_ptr, high_ptr, low_ptr, ties_ptr, n, ROWS: tl.constexpr, BITS: tl.constexpr):
    rows, at = places(ROWS, BITS)
    bits = tl.load(weight_ptr + at, mask=at < n, other=0)
    store_split(bits, high_ptr, low_ptr, ties_ptr, rows, at, n, BITS)


@triton.jit
def _join_kernel(high_ptr, low_ptr, ties_ptr, weight_ptr, n, ROWS: tl.constexpr, BITS: tl.constexpr):
    rows, at = places(ROWS, BITS)
    tl.store(weight_ptr + at, load_joined(high_ptr, low_ptr, ties_ptr, rows, at, n, BITS), mask=at < n)


def split(weight: Tensor, high: Tensor, low: Tensor, ties: Tensor, *, backend: Backend = "auto") -> None:
    """Split `weight` into `high`, `low` and `ties`, which are written. None of them may share memory with another.

    Args:
        weight: [N] fp32, contiguous as all others; N is a multiple of 8.
        high: [N] bf16.
        low: [N] int16.
        ties: [N / 8] uint8.

    Raises:
        ValueError: a shape, device or layout that does not fit.
        TypeError: a dtype that does not fit.
    """
    _check(weight, high, low, ties)
    if not weight.numel():
        return
    if use_triton(backend, weight):
        integers = weight.view(torch.int32), high.view(torch.int16), low, ties
        _launch(_split_kernel, weight.numel(), *integers)
    else:
        _split_reference(weight, high, low, ties)


def join(high: Tensor, low: Tensor, ties: Tensor, weight: Tensor, *, backend: Backend = "auto") -> None:
    """Write what `split` split to `weight`. Arguments and errors as those of `split`."""
    _check(weight, high, low, ties)
    if not weight.numel():
        return
    if use_triton(backend, weight):
        integers = high.view(torch.int16), low, ties, weight.view(torch.int32)
        _launch(_join_kernel, weight.numel(), *integers)
    else:
        _join_reference(high, low, ties, weight)


def _launch(kernel: triton.JITFunction, n: int, *integers: Tensor) -> None:
    launch(kernel, (cdiv(n, _BYTES_OF_TIES * BITS),), *integers, n, ROWS=_BYTES_OF_TIES, BITS=BITS, num_warps=_WARPS)


def check_split(n: int, high: Tensor, low: Tensor, ties: Tensor) -> None:
    """Check the parts of a weight of `n` elements.

    Raises:
        ValueError, TypeError: as `split`.
    """
    if n % BITS:
        raise ValueError(f"weight must have a multiple of {BITS} elements, got {n}")
    wanted = {
        "high": (high, torch.bfloat16, n),
        "low": (low, torch.int16, n),
        "ties": (ties, torch.uint8, n // BITS),
    }
    for name, (tensor, dtype, length) in wanted.items():
        check_flat(name, tensor, dtype, length, high.device)


def check_flat(name: str, tensor: Tensor, dtype: torch.dtype, length: int, device: torch.device) -> None:
    """Check a contiguous tensor of one dimension.

    Raises:
        ValueError, TypeError: as `split`.
    """
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != (length,) or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be [{length}] and contiguous, got {list(tensor.shape)} with strides {tensor.stride()}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got a tensor on {tensor.device}")


def _check(weight: Tensor, high: Tensor, low: Tensor, ties: Tensor) -> None:
    check_split(weight.numel(), high, low, ties)
    check_flat("weight", weight, torch.float32, weight.numel(), high.device)


def _split_reference(weight: Tensor, high: Tensor, low: Tensor, ties: Tensor) -> None:
    high.copy_(weight)
    bits = weight.view(torch.int32)
    low.copy_(bits)  # a conversion to fewer bits keeps the lower ones
    tie = (bits & 0x1FFFF) == 0x18000
    tie &= ~weight.isnan()
    ties.copy_((tie.view(-1, BITS).int() << _places(ties)).sum(1))


def _join_reference(high: Tensor, low: Tensor, ties: Tensor, weight: Tensor) -> None:
    lower = low.int() & 0xFFFF
    tie = (ties[:, None].int() >> _places(ties)) & 1
    up = ((lower > 0x8000) & ~high.isnan()) | tie.view(-1).bool()
    weight.view(torch.int32).copy_(((high.view(torch.int16).int() - up.int()) << 16) | lower)


def _places(ties: Tensor) -> Tensor:
    return torch.arange(BITS, device=ties.device, dtype=torch.int32)
