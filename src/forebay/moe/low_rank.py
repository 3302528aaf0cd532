"""Low-rank updates (LoRA) of stacked expert weights, which never make the updated weights.

Input: factors a [E, r, in] and b [E, out, r] for each expert's matrix W [out, in]. Output: the terms that the update adds to the
products of `forebay.moe.experts_op`, and the gradients of a and b. For N rows of an expert

    low  = rows @ a.T                          [N, r]
    y    = rows @ W.T + low @ (scale * b).T
    dlow = dy @ (scale * b)                    [N, r]
    dx   = dy @ W + dlow @ a,   da = dlow.T @ rows,   db = scale * dy.T @ low

Nothing of this is saved: backward computes `low` again from the rows that a's gradient needs. A row costs 2r(in + out) FLOPs in
forward, and in backward twice that and 2r * in for `low`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.moe.grouped import rows_by_matrix, rows_by_rows


class LowRank(NamedTuple):
    """Adds ``scale * b[e] @ a[e]`` to the matrix [out, in] of each expert.

    a: [E, r, in] and b: [E, out, r], any strides, one floating dtype, which may be another than the weights'. `r` may be any
    number from 1.
    """

    a: Tensor
    b: Tensor
    scale: float


class Adapter:
    """A `LowRank` in the dtype of the rows, its rank padded with zeros to the 16 bytes that grouped GEMMs need.

    It is made from the parameters in each forward and backward: 2r(in + out) bytes an expert that nobody saves.
    """

    def __init__(self, update: LowRank, dtype: torch.dtype):
        self._update = update
        missing = -update.a.shape[1] % (16 // dtype.itemsize)
        self._a = F.pad(update.a, (0, 0, 0, missing)).to(dtype).contiguous()
        self._b = F.pad(update.b * update.scale, (0, missing)).to(dtype).contiguous()

    def narrow(self, rows: Tensor, offs: Tensor) -> Tensor:
        """`low` [R, r] of rows [R, in]."""
        return rows_by_matrix(rows, self._a.transpose(1, 2), offs)

    def widen(self, low: Tensor, offs: Tensor) -> Tensor:
        """What the update adds to the product: [R, out]."""
        return rows_by_matrix(low, self._b.transpose(1, 2), offs)

    def narrow_gradient(self, dy: Tensor, offs: Tensor) -> Tensor:
        """`dlow` [R, r] of dy [R, out]."""
        return rows_by_matrix(dy, self._b, offs)

    def widen_gradient(self, dlow: Tensor, offs: Tensor) -> Tensor:
        """What the update adds to the gradient of the rows: [R, in]."""
        return rows_by_matrix(dlow, self._a, offs)

    def gradients(
        self, rows: Tensor, dy: Tensor, dlow: Tensor, offs: Tensor, need_a: bool, need_b: bool
    ) -> tuple[Tensor, Tensor]:
        """(da, db) in the shapes and dtypes of a and b, contiguous; empty where not needed."""
        a, b, scale = self._update
        rank, da, db = a.shape[1], a.new_empty(0), b.new_empty(0)
        if need_a:
            da = rows_by_rows(dlow, rows, offs)[:, :rank].to(a.dtype).contiguous()
        if need_b:
            db = rows_by_rows(dy, self.narrow(rows, offs), offs)[:, :, :rank].to(b.dtype).contiguous() * scale
        return da, db


def adapter_of(update: LowRank | None, dtype: torch.dtype) -> Adapter | None:
    return None if update is None else Adapter(update, dtype)
