"""add_rows_by_rows: Triton against the plain form, and both against fp64. The layout of the others' results."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from forebay.kernels.grouped import add_rows_by_rows, rows_by_matrix, rows_by_rows
from tests.kernels.common import DEVICE, PRODUCT_DTYPES, offsets


def exact(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    starts = [0, *offs.tolist()]
    each = [left[a:b].double().T @ right[a:b].double() for a, b in pairwise(starts)]
    return torch.stack(each)


def check(total: Tensor, left: Tensor, right: Tensor, offs: Tensor, backend: str = "triton") -> None:
    """Compare with fp64. R products in fp32 and two sums: an error of as many last bits of their magnitudes, because tensor
    cores truncate where others round."""
    before = total.clone()
    add_rows_by_rows(total, left, right, offs, backend=backend)  # type: ignore[arg-type]
    want = before.double() + exact(left, right, offs)
    live = left[: int(offs[-1])]
    bound = before.double().abs() + exact(left.abs(), right.abs(), offs)
    assert ((total.double() - want).abs() <= (live.shape[0] + 2) * 2.0**-23 * bound).all()


ROWS = [(0,), (1,), (63,), (64, 1), (65, 0, 31), (0, 0, 33, 0), (127, 129, 5)]
SHAPES = [(1, 1), (100, 130), (128, 127), (129, 16), (256, 128)]
PRODUCT = [(*shape, rows, dtype) for shape in SHAPES for rows in ROWS for dtype in PRODUCT_DTYPES]
# Each of rows, shape and dtype at least once: tiles and ends of experts are masked independently.
SOME = [(*SHAPES[i % len(SHAPES)], rows, PRODUCT_DTYPES[i % len(PRODUCT_DTYPES)]) for i, rows in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("m", "n", "rows", "dtype"),
    [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in PRODUCT if case not in SOME)],
)
def test_triton_against_fp64(m: int, n: int, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    offs = offsets(rows)
    left, right = (torch.randn(sum(rows) + 3, width, device=DEVICE).to(dtype) for width in (m, n))
    left[sum(rows) :] = right[sum(rows) :] = torch.nan  # sentinels
    check(torch.randn(len(rows), m, n, device=DEVICE), left, right, offs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_plain_form_against_fp64(dtype: torch.dtype) -> None:
    left, right = torch.randn(19, 24, device=DEVICE).to(dtype), torch.randn(19, 40, device=DEVICE).to(dtype)
    left[17:] = torch.nan
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    check(torch.randn(3, 24, 40, device=DEVICE, dtype=wide), left, right, offsets((5, 0, 12)), "reference")


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("m", [2, 130, 256])
def test_columns_that_alternate_between_two_halves(m: int, backend: str) -> None:
    offs = offsets((33, 0, 70))
    left, right = torch.randn(103, m, device=DEVICE), torch.randn(103, 40, device=DEVICE)
    total = torch.randn(3, m, 40, device=DEVICE)
    alternating, halves = total.clone(), total
    add_rows_by_rows(alternating, left, right, offs, alternating=True, backend=backend)  # type: ignore[arg-type]
    left = torch.cat((left[:, ::2], left[:, 1::2]), 1)
    add_rows_by_rows(halves, left, right, offs, backend=backend)  # type: ignore[arg-type]
    if torch.device(DEVICE).type == "cuda" or backend == "reference":
        assert torch.equal(alternating, halves)
    else:  # Triton's interpreter multiplies with NumPy, whose sums depend on a row's place in its block on some CPUs
        torch.testing.assert_close(alternating, halves, rtol=1e-5, atol=1e-5)


def test_neighbors_rows_do_not_leak_in() -> None:
    """An expert's rows of NaN are its own: another one's last block reads no row of it."""
    offs = offsets((10, 20, 7))
    left, right = torch.randn(37, 20, device=DEVICE), torch.randn(37, 30, device=DEVICE)
    left[10:30] = torch.nan
    right[10:30] = torch.inf
    total = torch.zeros(3, 20, 30, device=DEVICE)
    add_rows_by_rows(total, left, right, offs, backend="triton")
    assert total[1].isnan().all() and not total[[0, 2]].isnan().any()


def test_views() -> None:
    offs = offsets((20, 13))
    left = torch.randn(33, 96, device=DEVICE)[:, 8:56]
    right = torch.randn(64, 33, device=DEVICE).t()
    total = torch.randn(2, 60, 80, device=DEVICE)
    untouched = total.clone()
    check(total[:, 4:52, :64], left, right, offs)
    untouched[:, 4:52, :64] = total[:, 4:52, :64]
    assert torch.equal(total, untouched)


def test_the_same_bits_every_time() -> None:
    offs = offsets((70, 50))
    left, right = torch.randn(120, 130, device=DEVICE), torch.randn(120, 140, device=DEVICE)
    totals = [torch.ones(2, 130, 140, device=DEVICE) for _ in range(3)]
    for total in totals:
        add_rows_by_rows(total, left, right, offs, backend="triton")
    assert torch.equal(totals[0], totals[1]) and torch.equal(totals[0], totals[2])


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 14), (torch.bfloat16, 12), (torch.bfloat16, 16)])
def test_results_are_contiguous(dtype: torch.dtype, width: int) -> None:
    """Also of rows that are no multiple of 16 bytes, which `F.grouped_mm` pads."""
    offs = offsets((5, 0, 6))
    rows, weights = torch.randn(11, 16, device=DEVICE).to(dtype), torch.randn(3, width, 16, device=DEVICE).to(dtype)
    right = torch.randn(11, 16, device=DEVICE).to(dtype)[:, :width]
    got = rows_by_matrix(rows, weights.transpose(1, 2), offs), rows_by_rows(rows, right, offs)
    assert all(t.is_contiguous() for t in got)
    products = [rows[a:b].double() @ weights[e].double().T for e, (a, b) in enumerate(((0, 5), (5, 5), (5, 11)))]
    for found, want in zip(got, (torch.cat(products), exact(rows, right, offs)), strict=True):
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(found.double(), want, **tolerance)


def test_refusals() -> None:
    offs = offsets((2, 2))
    left, right, total = (torch.randn(*shape, device=DEVICE) for shape in ((4, 3), (4, 5), (2, 3, 5)))
    for message, *arguments in (
        (r"do not make \(2, 3, 5\)", total, right, left),
        (r"do not make \(2, 3, 5\)", total, left, right[:3]),
        (r"right torch\.float16", total, left, right.half()),
        (r"total of torch\.float32", total.bfloat16(), left.bfloat16(), right.bfloat16()),
        ("contiguous last dimension", total.reshape(2, 5, 3).transpose(1, 2), left, right),
    ):
        with pytest.raises(ValueError, match=message):
            add_rows_by_rows(*arguments, offs)


@pytest.mark.gpu
def test_more_elements_than_int32_counts() -> None:
    """In the sums (40 experts of 7680 x 7168), and in the rows (more than 2**31 / 2048)."""
    total = torch.zeros(40, 7680, 7168, device="cuda")
    assert total.numel() > 2**31
    left, right = (torch.randn(64, width, device="cuda", dtype=torch.bfloat16) for width in (7680, 7168))
    offs = torch.tensor([0] * 38 + [32, 64], device="cuda", dtype=torch.int32)
    add_rows_by_rows(total, left, right, offs)
    assert not total[:38].any()
    torch.testing.assert_close(total[38:].double(), exact(left, right, offs[37:])[1:], rtol=1e-4, atol=1e-4)
    del total
    rows = 2**20 + 100
    left, right = (torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16) for width in (2048, 128))
    left[-50:].normal_()
    right[-50:].normal_()
    total = torch.zeros(2, 2048, 128, device="cuda")
    offs = torch.tensor([rows - 50, rows], device="cuda", dtype=torch.int32)
    assert left.numel() > 2**31
    add_rows_by_rows(total, left, right, offs)
    assert not total[0].any()
    torch.testing.assert_close(total[1].double(), left[-50:].double().T @ right[-50:].double(), rtol=1e-4, atol=1e-4)
