"""gather_rows and combine_rows: Triton against the plain form, and each as the other's gradient."""

from collections.abc import Iterator

import pytest
import torch

from forebay.kernels.permute import combine_rows, gather_rows
from forebay.moe.routing import Routing, route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch.empty hands out NaN: an element that a kernel leaves out shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


def routing(tokens: int, k: int, sentinels: bool) -> Routing:
    return route(torch.randint(0, 6 if sentinels else 5, (tokens, k), device=DEVICE), 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sentinels", [False, True])
@pytest.mark.parametrize(
    ("tokens", "k", "width"),
    # Tiles: gather 2048 elements, at most 512 columns; combine 1024, all in columns if there are.
    [(0, 2, 16), (1, 1, 16), (3, 8, 1024), (5, 2, 1025), (5, 4, 1023), (31, 1, 64), (33, 1, 64), (2, 2, 513),
     (7, 3, 100), (33, 2, 1)],
)  # fmt: skip
def test_triton_is_the_reference(tokens, k, width, sentinels, dtype, poisoned: None) -> None:
    order, inverse, offs = routing(tokens, k, sentinels)
    live = int(offs[-1])
    x = torch.randn(tokens, width, device=DEVICE).to(dtype)
    got = gather_rows(x, order, offs, k, backend="triton")
    assert torch.equal(got, gather_rows(x, order, offs, k, backend="reference"))
    assert torch.equal(got[:live], x[order[:live].long() // k])
    assert (got[live:] == 0).all()

    rows = torch.randn(tokens * k, width, device=DEVICE).to(dtype)
    rows[live:] = torch.nan
    for init in (None, torch.randn(tokens, width, device=DEVICE).to(dtype)):
        got = combine_rows(rows, inverse, init=init, backend="triton")
        wanted = combine_rows(rows, inverse, init=init, backend="reference")
        assert got.dtype == dtype and not got.isnan().any()
        # The same fp32 additions in the same order, then one rounding: the same bits. Triton's
        # interpreter cuts bf16 off where the GPU and torch round: one ulp, there alone.
        ulp = 2**-7 if dtype is torch.bfloat16 and DEVICE == "cpu" else 0.0
        torch.testing.assert_close(got, wanted, atol=0.0, rtol=ulp)


def test_combine_adds_in_fp32() -> None:
    """256 + 1 + ... + 1 in bf16 stays 256 if it is rounded on the way."""
    rows = torch.ones(9, 16, dtype=torch.bfloat16, device=DEVICE)
    rows[0] = 256
    inverse = torch.arange(9, dtype=torch.int32, device=DEVICE).view(1, 9)
    for backend in ("triton", "reference"):
        assert (combine_rows(rows, inverse, backend=backend) == 264).all()


def test_rows_of_a_wider_tensor_and_columns_that_are_not_contiguous(poisoned: None) -> None:
    order, inverse, offs = routing(9, 2, True)
    wide = torch.randn(9, 96, device=DEVICE)
    for x in (wide[:, 8:40], wide.t().contiguous().t()):
        got = gather_rows(x, order, offs, 2, backend="triton")
        assert torch.equal(got, gather_rows(x.contiguous(), order, offs, 2, backend="reference"))
    rows = torch.randn(18, 64, device=DEVICE)[:, ::2]
    got = combine_rows(rows, inverse, backend="triton")
    assert torch.equal(got, combine_rows(rows.contiguous(), inverse, backend="reference"))


def test_each_is_the_gradient_of_the_other() -> None:
    order, inverse, offs = routing(7, 3, True)
    x = torch.randn(7, 6, dtype=torch.float64, device=DEVICE, requires_grad=True)
    rows = gather_rows(x, order, offs, 3, backend="reference")
    grad = torch.randn_like(rows)
    (dx,) = torch.autograd.grad(rows, x, grad)
    torch.testing.assert_close(dx, combine_rows(grad, inverse, backend="reference"))


def test_refusals() -> None:
    order, inverse, offs = routing(4, 2, False)
    x = torch.randn(4, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"R <= 4, got \(8,\)"):
        gather_rows(x, order, offs, 1)
    with pytest.raises(ValueError, match="needs order"):
        gather_rows(x, order.view(4, 2), offs, 2)
    with pytest.raises(ValueError, match="init"):
        combine_rows(x, inverse, init=x[:2])
    with pytest.raises(ValueError, match="backend"):
        gather_rows(x, order, offs, 2, backend="cuda")


@pytest.mark.gpu
def test_more_elements_than_int32_counts() -> None:
    tokens, k, width = 2**19 + 2**9, 2, 2048
    x = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
    x[-8:].normal_()
    ids = torch.arange(k, device="cuda").expand(tokens, k)
    order, inverse, offs = route(ids, k)
    rows = gather_rows(x, order, offs, k)
    assert rows.numel() > 2**31
    assert torch.equal(rows[-8:], x[-8:])
    y = combine_rows(rows, inverse)
    assert torch.equal(y[-8:], 2 * x[-8:])
    assert (y[:8] == 0).all()
