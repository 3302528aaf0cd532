"""Low-rank updates (LoRA) of stacked expert weights, which never make the updated weights.

Input: factors a [E, r, in] and b [E, out, r] for each expert's matrix W [out, in]. Output: the terms that the update adds to the
products of `forebay.moe.experts_compute`, and the gradients of a and b. For N rows of an expert

    low  = rows @ a.T                          [N, r]
    y    = rows @ W.T + low @ (scale * b).T
    dlow = dy @ (scale * b)                    [N, r]
    dx   = dy @ W + dlow @ a,   da = dlow.T @ rows,   db = scale * dy.T @ low

Nothing of this is saved: backward computes `low` again from the rows that a's gradient needs. A row costs 2r(in + out) FLOPs in
forward, and in backward twice that and 2r * in for `low`. The time goes into wide rows, so each product touches them once
(`forebay.kernels.low_rank`): `low` and `dlow` come with the gather where rows are gathered anyway, the terms of y and dx are
added in place, and the gradients read x and dy by token. Beside the experts' own traffic, updates of gate_up and down move in
bf16, in bytes a row,

    forward    h 8I (in place), low of act 2I, y 4H                                                4H + 10I
    backward   da 4I, dx 4H (in place), dlow of dh 4I, low of x 2H and of act 2I,
               gradients: x 2H, dh 4I, act 2I, dy 2H                                              10H + 16I

With H = 2048, I = 768 and 131072 rows that is 6.4 GB, 1.5 ms at 4.3 TB/s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forebay.kernels.low_rank import Gathered, add_widened, narrow_rows, sum_outer


class LowRank(NamedTuple):
    """Adds ``scale * b[e] @ a[e]`` to the matrix [out, in] of each expert.

    a: [E, r, in] and b: [E, out, r], any strides, one floating dtype, which may be another than the weights'. `r` may be any
    number from 1.
    """

    a: Tensor
    b: Tensor
    scale: float


class Adapter:
    """A `LowRank` in the dtype of the rows, both factors as [E, r, *].

    It is made from the parameters in each forward and backward: 2r(in + out) bytes an expert, which autograd does not save.
    """

    def __init__(self, update: LowRank, dtype: torch.dtype):
        self._update = update
        b = update.b.transpose(1, 2)
        self._a = update.a.to(dtype).contiguous()
        self._b = torch.empty(b.shape, dtype=dtype, device=b.device)
        torch.mul(b, update.scale, out=self._b)

    def narrow(self, rows: Tensor | Gathered, offs: Tensor) -> Tensor:
        """`low` [R, r] of rows [R, in]."""
        return narrow_rows(rows, self._a, offs)[0]

    def gather_and_narrow(self, rows: Gathered, offs: Tensor) -> tuple[Tensor, Tensor]:
        """The gathered rows [R, in], live ones only, and their `low`."""
        return _gather_and_narrow(rows, self._a, offs)

    def add(self, y: Tensor, low: Tensor, offs: Tensor) -> None:
        """Add the update's term to the product y [R, out], in place."""
        add_widened(y, low, self._b, offs)

    def narrow_gradient(self, dy: Tensor, offs: Tensor) -> Tensor:
        """`dlow` [R, r] of dy [R, out]."""
        return narrow_rows(dy, self._b, offs)[0]

    def gather_and_narrow_gradient(self, dy: Gathered, offs: Tensor) -> tuple[Tensor, Tensor]:
        """The gathered rows of dy [R, out], live ones only, and their `dlow`."""
        return _gather_and_narrow(dy, self._b, offs)

    def add_gradient(self, dx: Tensor, dlow: Tensor, offs: Tensor) -> None:
        """Add the update's term to the gradient of the rows dx [R, in], in place."""
        add_widened(dx, dlow, self._a, offs)

    def gradients(
        self, rows: Tensor | Gathered, dy: Tensor | Gathered, dlow: Tensor, offs: Tensor, need_a: bool, need_b: bool
    ) -> tuple[Tensor, Tensor]:
        """(da, db) in the shapes and dtypes of a and b, contiguous; empty where not needed."""
        a, b, scale = self._update
        da, db = a.new_empty(a.shape if need_a else 0), b.new_empty(b.shape if need_b else 0)
        if need_a:
            sum_outer(rows, dlow, offs, da)
        if need_b:
            sum_outer(dy, self.narrow(rows, offs), offs, db.transpose(1, 2), scale=scale)
        return da, db


def _gather_and_narrow(rows: Gathered, matrices: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    low, kept = narrow_rows(rows, matrices, offs, keep_rows=True)
    assert kept is not None
    return kept, low


def adapter_of(update: LowRank | None, dtype: torch.dtype) -> Adapter | None:
    return None if update is None else Adapter(update, dtype)
