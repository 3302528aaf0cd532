"""The scaling kernel against fp64; in the interpreter where there is no GPU."""

import pytest
import torch

from forebay.kernels.launch import Backend
from forebay.kernels.scale import scale
from tests.kernels.common import DEVICE, backends

# One rounding to nearest; Triton's interpreter truncates fp32 to bf16, which errs twice as far.
ROUNDING = {torch.float32: 2**-23, torch.float16: 2**-11, torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7}


@backends
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 5), (4095,), (4096,), (4097,)], ids=str)
def test_one_rounding(backend: Backend, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, factor = torch.randn(shape, device=DEVICE), torch.tensor([1 / 3], device=DEVICE)
    before = x.clone()
    out = scale(x, factor, dtype, backend=backend)
    assert out.dtype == dtype and out.shape == x.shape and torch.equal(x, before)
    want = x.double() * factor.double().reshape(())
    torch.testing.assert_close(out.double(), want, rtol=ROUNDING[dtype], atol=1e-7)
    assert torch.equal(scale(x, torch.ones_like(factor), x.dtype, backend=backend), x)


@backends
def test_nan_and_infinity_pass(backend: Backend) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], device=DEVICE)
    out = scale(x, torch.full((1,), 2.0, device=DEVICE), torch.bfloat16, backend=backend)
    torch.testing.assert_close(out.float(), 2 * x, equal_nan=True)


def test_fp64_takes_the_plain_form() -> None:
    x, factor = torch.randn(5, device=DEVICE).double(), torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    assert torch.equal(scale(x, factor, torch.float64), x * 0.3)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_on_a_gpu() -> None:
    n = 2**31 + 5
    x = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    x[-1] = 3.0
    out = scale(x, torch.full((1,), 2.0, device="cuda", dtype=torch.bfloat16), torch.bfloat16)
    assert out[-1] == 6.0 and out[5] == 0.0
