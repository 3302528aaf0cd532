"""Products of the rows of each expert with a matrix of its own, or with other rows.

Input: rows [R, *] sorted by expert, and `offs` [E], the end row of each expert. Output: new tensors. Where `F.grouped_mm` takes
the operands, nothing waits for the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows_by_matrix(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix: `rows[rows of e] @ matrices[e]`, a new tensor [R, N].

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
        return F.grouped_mm(rows, matrices, offs=offs.contiguous())
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
        return F.grouped_mm(left.t(), right, offs=offs.contiguous())
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
