"""The kernels of low-rank updates: Triton and the plain form against fp64."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.kernels.low_rank import Gathered, add_widened, narrow_rows, sum_outer
from tests.kernels.common import DEVICE, PRODUCT_DTYPES, backends, offsets, strided

# Rows of each expert: none at all, tiles of 64 and 128 rows, their borders, experts without rows at both ends.
ROWS = [(0,), (1,), (63,), (64, 1), (65, 0, 31), (0, 0, 129, 0), (127, 128, 5), (0, 1, 1, 1, 300)]
# Width and rank: no vector, blocks of columns and their borders, ranks beyond a block of 16 and of 64.
SHAPES = [(1, 1), (100, 3), (128, 16), (129, 17), (24, 64), (256, 70)]
PRODUCT = [(*shape, rows, dtype) for shape in SHAPES for rows in ROWS for dtype in PRODUCT_DTYPES]
SOME = [(*SHAPES[i % len(SHAPES)], rows, PRODUCT_DTYPES[i % len(PRODUCT_DTYPES)]) for i, rows in enumerate(ROWS)]
cases = pytest.mark.parametrize(
    ("width", "rank", "rows", "dtype"),
    [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in PRODUCT if case not in SOME)],
)
SENTINELS, SLOTS = 3, 2


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def spans(offs: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *offs.tolist()]))


def gathered(rows: int, width: int, dtype: torch.dtype) -> tuple[Gathered, Tensor]:
    """Tokens of `SLOTS` rows each in a random order, and the rows; sentinels name a token of NaN."""
    tokens = randn(rows // SLOTS + 2, 2 * width, dtype=dtype)[:, width:]
    tokens[-1] = torch.nan
    order = torch.randperm(SLOTS * (rows // SLOTS + 1), device=DEVICE)[:rows]
    order = torch.cat([order, order.new_full((SENTINELS,), SLOTS * (tokens.shape[0] - 1))]).int()
    return Gathered(tokens, order, SLOTS), tokens[order.long() // SLOTS]


def assert_near(got: Tensor, want: Tensor, magnitude: Tensor, terms: int) -> None:
    """`terms` sums in fp32 and one rounding; tensor cores truncate where others round."""
    bound = (terms + 2) * 2.0**-23 * magnitude + torch.finfo(got.dtype).eps * want.abs()
    assert ((got.double() - want).abs() <= bound + torch.finfo(got.dtype).tiny).all()


@cases
@pytest.mark.parametrize("gather", [False, True])
def test_narrow(width: int, rank: int, rows: tuple[int, ...], dtype: torch.dtype, gather: bool, poisoned: None) -> None:
    offs, matrices = offsets(rows), randn(len(rows), rank, width, dtype=dtype)
    source: Any
    source, plain = gathered(sum(rows), width, dtype)
    low, kept = narrow_rows(source if gather else plain, matrices, offs, keep_rows=gather, backend="triton")
    assert low.shape == (sum(rows) + SENTINELS, rank) and low.dtype == dtype
    assert (kept is not None) == gather
    assert kept is None or torch.equal(kept[: sum(rows)], plain[: sum(rows)])
    for matrix, (start, end) in zip(matrices.double(), spans(offs), strict=True):
        exact = plain[start:end].double()
        assert_near(low[start:end], exact @ matrix.T, exact.abs() @ matrix.T.abs(), width)


@cases
def test_add(width: int, rank: int, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    offs, matrices = offsets(rows), randn(len(rows), rank, width, dtype=dtype)
    wide, low = (randn(sum(rows) + SENTINELS, n, dtype=dtype) for n in (width, rank))
    before = wide.double()
    add_widened(wide, low, matrices, offs, backend="triton")
    for matrix, (start, end) in zip(matrices.double(), spans(offs), strict=True):
        term, size = low[start:end].double() @ matrix, low[start:end].double().abs() @ matrix.abs()
        assert_near(wide[start:end], before[start:end] + term, before[start:end].abs() + size, rank)
    assert torch.equal(wide[sum(rows) :].double(), before[sum(rows) :])


@cases
@pytest.mark.parametrize("gather", [False, True])
def test_outer(width: int, rank: int, rows: tuple[int, ...], dtype: torch.dtype, gather: bool) -> None:
    offs, low = offsets(rows), randn(sum(rows) + SENTINELS, rank, dtype=dtype)
    low[sum(rows) :] = torch.nan
    source: Any
    source, plain = gathered(sum(rows), width, dtype)
    for out in (randn(len(rows), rank, width, dtype=torch.float32), randn(len(rows), width, rank, dtype=dtype).mT):
        sum_outer(source if gather else plain, low, offs, out, scale=0.75, backend="triton")
        for total, (start, end) in zip(out, spans(offs), strict=True):
            left, right = low[start:end].double().T, plain[start:end].double()
            assert_near(total, 0.75 * left @ right, left.abs() @ right.abs(), end - start)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_plain_forms_against_fp64(dtype: torch.dtype) -> None:
    offs, matrices = offsets((5, 0, 12)), randn(3, 4, 24, dtype=dtype)
    source, plain = gathered(17, 24, dtype)
    for rows in (source, plain):
        low, kept = narrow_rows(rows, matrices, offs, keep_rows=True, backend="reference")
        assert kept is not None and torch.equal(kept[:17], plain[:17])
        wide, outer = torch.ones_like(plain), torch.empty(3, 4, 24, device=DEVICE, dtype=dtype)
        add_widened(wide, low, matrices, offs, backend="reference")
        sum_outer(rows, low, offs, outer, backend="reference")
        assert (wide[17:] == 1).all()
        for e, (start, end) in enumerate(spans(offs)):
            exact, matrix, narrow = plain[start:end].double(), matrices[e].double(), low[start:end].double()
            for got, want in (
                (low[start:end], exact @ matrix.T),
                (wide[start:end], 1 + narrow @ matrix),
                (outer[e], narrow.T @ exact),
            ):
                bound = 4 * torch.finfo(dtype).eps * want.abs().max() if want.numel() else 0
                assert ((got.double() - want).abs() <= bound).all()


@backends
def test_views_and_neighbors(backend) -> None:
    """An expert's rows of NaN are its own: another one's tile reads no row of it."""
    offs, plain = offsets((10, 20, 7)), torch.randn(37, 20, device=DEVICE)
    plain[10:30] = torch.nan
    matrices = torch.randn(3, 5, 20, device=DEVICE)
    low = narrow_rows(strided(plain), strided(matrices), offs, backend=backend)[0]
    assert low[10:30].isnan().all() and not low[:10].isnan().any() and not low[30:].isnan().any()
    wide = torch.zeros(37, 20, device=DEVICE)
    add_widened(wide, low, strided(matrices), offs, backend=backend)
    assert wide[10:30].isnan().all() and not wide[:10].isnan().any() and not wide[30:].isnan().any()
    outer = torch.zeros(3, 5, 20, device=DEVICE)
    sum_outer(strided(plain), low, offs, outer, backend=backend)
    assert outer[1].isnan().all() and not outer[[0, 2]].isnan().any()


def test_refusals() -> None:
    offs = offsets((2, 2))
    rows, matrices, low, out = (torch.randn(*shape, device=DEVICE) for shape in ((4, 8), (2, 3, 8), (4, 3), (2, 3, 8)))
    for error, message, call in (
        (ValueError, r"matrices must be \[2, any, 8\]", lambda: narrow_rows(rows, matrices[:1], offs)),
        (TypeError, "matrices", lambda: narrow_rows(rows, matrices.half(), offs)),
        (ValueError, "have no 4 rows", lambda: narrow_rows(Gathered(rows[:1], offs.new_zeros(4), 2), matrices, offs)),
        (ValueError, r"low must be \[4, 3\]", lambda: add_widened(rows, low[:, :2], matrices, offs)),
        (ValueError, "contiguous", lambda: add_widened(strided(rows), low, matrices, offs)),
        (ValueError, "out must be", lambda: sum_outer(rows, low, offs, out[:, :2])),
        (ValueError, "overlap", lambda: sum_outer(rows, low, offs, out[:, :1].expand(2, 3, 8))),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.gpu
def test_more_elements_than_int32_counts() -> None:
    rows, width = 2**20 + 100, 2048
    wide = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
    assert wide.numel() > 2**31
    wide[-50:].normal_()
    offs = torch.tensor([rows - 50, rows], device="cuda", dtype=torch.int32)
    matrices = torch.randn(2, 16, width, device="cuda", dtype=torch.bfloat16)
    low, kept = narrow_rows(Gathered(wide, torch.arange(rows, device="cuda"), 1), matrices, offs, keep_rows=True)
    assert kept is not None and torch.equal(kept, wide)
    assert not low[:-50].any()
    torch.testing.assert_close(low[-50:], wide[-50:] @ matrices[1].T, rtol=1e-2, atol=0.5)
    outer = torch.empty(2, 16, width, device="cuda")
    sum_outer(wide, low, offs, outer)
    assert not outer[0].any()
    torch.testing.assert_close(outer[1].double(), low[-50:].double().T @ wide[-50:].double(), rtol=1e-4, atol=1e-2)
    add_widened(wide, low, matrices, offs)
    assert not wide[:-50].any()
    torch.testing.assert_close(wide[-50:], kept[-50:] + low[-50:] @ matrices[1], rtol=1e-2, atol=8.0)
