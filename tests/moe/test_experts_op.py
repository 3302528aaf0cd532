"""The grouped products against a loop in fp64, and what experts without rows get."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from forebay.moe import experts_op
from forebay.moe.experts_op import rows_by_matrix, rows_by_rows

OFFS = [0, 3, 3, 8]  # experts 0 and 2 have no rows; rows 8 and 9 are sentinels
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# 7 and 9 columns are no multiple of 16 bytes in any dtype here: the loop.
WIDTHS = [(16, 24), (7, 9), (16, 9), (7, 16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), WIDTHS)
def test_products(m: int, n: int, dtype: torch.dtype) -> None:
    offs, spans = torch.tensor(OFFS, dtype=torch.int32), list(pairwise([0, *OFFS]))
    # Sums of up to 16 terms near 1, accumulated in fp32 at least and rounded once.
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 6e-2)

    def close(got: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)

    a, b = torch.randn(10, m).to(dtype), torch.randn(10, n).to(dtype)
    a[8:], b[8:] = torch.nan, torch.nan
    for w in (torch.randn(4, m, n).to(dtype), torch.randn(4, n, m).to(dtype).transpose(1, 2)):
        out = rows_by_matrix(a, w, offs)
        assert out.shape == (10, n) and out.dtype == dtype
        for e, (start, end) in enumerate(spans):
            close(out[start:end], a[start:end].double() @ w[e].double())
    grad = rows_by_rows(a, b, offs)
    assert grad.shape == (4, m, n) and grad.is_contiguous() and grad.dtype == dtype
    close(grad, torch.stack([a[start:end].double().t() @ b[start:end].double() for start, end in spans]))
    assert (grad[[0, 2]] == 0).all()


def test_the_loop_is_taken_only_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch.nn.functional.grouped_mm

    def spy(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(experts_op.F, "grouped_mm", spy)
    offs = torch.tensor(OFFS, dtype=torch.int32)
    for dtype, width, taken in [
        (torch.bfloat16, 8, True),
        (torch.bfloat16, 4, False),
        (torch.float32, 4, True),
        (torch.float64, 8, False),
    ]:
        calls.clear()
        rows = torch.randn(10, width).to(dtype)
        rows_by_matrix(rows, torch.randn(4, width, width).to(dtype), offs)
        rows_by_rows(rows, rows, offs)
        assert len(calls) == 2 * taken
    calls.clear()
    rows_by_matrix(torch.ones(1, 1).expand(10, 8), torch.randn(4, 8, 8), offs)
    rows_by_matrix(torch.randn(81)[1:].view(10, 8), torch.randn(4, 8, 8), offs)
    assert not calls


def test_no_rows_at_all() -> None:
    offs = torch.zeros(4, dtype=torch.int32)
    assert rows_by_matrix(torch.ones(0, 8), torch.ones(4, 8, 16), offs).shape == (0, 16)
    grad = rows_by_rows(torch.ones(0, 8), torch.ones(0, 16), offs)
    assert grad.shape == (4, 8, 16) and (grad == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256, 2048])
def test_experts_without_rows_get_zeros_out_of_poisoned_memory(rows: int) -> None:
    """F.grouped_mm leaves these outputs to a GEMM whose inner dimension is 0."""
    experts = 16
    counts = torch.full((experts,), rows // 4, dtype=torch.int32)
    counts[[0, 1, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15]] = 0
    offs = counts.cumsum(0).int().cuda()
    for sentinels in (0, 100):
        live = int(offs[-1])
        left = torch.randn(live + sentinels, 512, device="cuda", dtype=torch.bfloat16)
        right = torch.randn(live + sentinels, 1024, device="cuda", dtype=torch.bfloat16)
        left[live:], right[live:] = torch.nan, torch.nan
        poison = torch.full((experts, 512, 1024), torch.nan, device="cuda", dtype=torch.bfloat16)
        del poison
        grad = rows_by_rows(left, right, offs)
        assert (grad[counts == 0] == 0).all()
        assert not grad.isnan().any()
    poison = torch.full((experts, 512, 1024), torch.nan, device="cuda", dtype=torch.bfloat16)
    del poison
    assert (rows_by_rows(left, right, torch.zeros_like(offs)) == 0).all()
