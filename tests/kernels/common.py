"""The device of the kernels' tests, their two forms, rows of experts, and views of a tensor in another layout."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

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
