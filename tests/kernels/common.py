"""The device of the kernels' tests, their two forms, rows of experts, and views of a tensor in another layout."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forebay.kernels.split_weights import BITS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies the bits of bf16 as if they were integers: those products run on a GPU only.
PRODUCT_DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
backends = pytest.mark.parametrize("backend", ["triton", "reference"])


def offsets(rows: Sequence[int]) -> Tensor:
    """The end row of each expert, from its number of rows."""
    return torch.tensor(rows, device=DEVICE).cumsum(0).to(torch.int32)


def strided(t: Tensor) -> Tensor:
    """Every second element of each dimension of a tensor of other values."""
    wide = torch.full([2 * n for n in t.shape], 77, device=t.device).to(t.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in t.shape)]
    return view.copy_(t)


def turned(t: Tensor) -> Tensor:
    """The dimensions in the other order in memory."""
    return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


def moved_on(t: Tensor) -> Tensor:
    """Contiguous, after an odd number of other values."""
    wide = torch.full((t.numel() + 3,), 77, device=t.device).to(t.dtype)
    return wide[3:].view(t.shape).copy_(t)


def split_parts(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """High, low and ties of a split weight of `n` elements, poisoned."""
    high = torch.full((n,), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    low = torch.full((n,), 0x5A5A, device=DEVICE, dtype=torch.int16)
    return high, low, torch.full((n // BITS,), 0xA5, device=DEVICE, dtype=torch.uint8)
