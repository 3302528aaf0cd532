"""The device of the kernels' tests, their two forms, and views of a tensor with the same values in another layout."""

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
backends = pytest.mark.parametrize("backend", ["triton", "reference"])


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
