"""Grouped matrix products over rows sorted by expert: `F.grouped_mm`, and a loop where it refuses.

In: rows [R, *] sorted by expert and `offs` [E] int32, the end row of each expert, on their device.
Out: a new tensor that the caller owns. Rows from offs[-1] on are neither read nor written.

`F.grouped_mm` runs bf16 on CUDA without touching the host (fp16 and fp32 read the offsets back).
It wants operands whose strides and addresses are multiples of 16 bytes and knows no fp64; anything
else goes through a loop of products, one an expert, that reads the offsets on the host: correct,
slow, not capturable.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows_by_matrix(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """[R, N]: rows [R, M] of expert e times matrices[e], matrices [E, M, N] (views welcome).

    Rows from offs[-1] on are uninitialised.
    """
    if rows.shape[0] == 0:
        return rows.new_empty((0, matrices.shape[2]))
    if _grouped_mm_takes(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=offs.contiguous())
    out = rows.new_empty((rows.shape[0], matrices.shape[2]))
    start = 0
    for e, end in enumerate(offs.tolist()):
        torch.mm(rows[start:end], matrices[e], out=out[start:end])
        start = end
    return out


def rows_by_rows(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """[E, M, N] contiguous: left[rows of e].T @ right[rows of e], left [R, M], right [R, N].

    An expert without rows gets exact zeros.
    """
    if left.shape[0] == 0:
        return left.new_zeros((offs.shape[0], left.shape[1], right.shape[1]))
    if _grouped_mm_takes(left, right):
        return F.grouped_mm(left.t(), right, offs=offs.contiguous())
    out = left.new_empty((offs.shape[0], left.shape[1], right.shape[1]))
    start = 0
    for e, end in enumerate(offs.tolist()):
        torch.mm(left[start:end].t(), right[start:end], out=out[e])
        start = end
    return out


def _grouped_mm_takes(a: Tensor, b: Tensor) -> bool:
    return a.dtype in _GROUPED_DTYPES and _aligned(a) and _aligned(b)


def _aligned(t: Tensor) -> bool:
    """One unit stride among the last two, every other stride and the address 16-byte multiples."""
    unit = [s for s in t.stride()[-2:] if s == 1]
    others = [s for i, s in enumerate(t.stride()) if s != 1 or i < t.dim() - 2]
    multiples = all(s * t.element_size() % 16 == 0 and s > 0 for s in others)
    return len(unit) == 1 and multiples and t.data_ptr() % 16 == 0
