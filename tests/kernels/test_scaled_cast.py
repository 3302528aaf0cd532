"""`scaled_cast` against torch's product in fp32, to the bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forebay.kernels.scaled_cast import scaled_cast
from tests.kernels.common import DEVICE, backends, moved_on, strided, turned


def check(source: Tensor, backend: str) -> None:
    factor = torch.rand((), device=DEVICE) + 0.1
    found = scaled_cast(source, factor, backend=backend)  # type: ignore[arg-type]
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert torch.equal(found, source.float() * factor)


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (2047,), (2049,), (3, 5, 7)], ids=str)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    check((100 * torch.randn(shape, device=DEVICE)).to(dtype), backend)


@backends
@pytest.mark.parametrize("layout", [strided, turned, moved_on], ids=lambda f: f.__name__)
def test_layouts(layout: Callable[[Tensor], Tensor], backend: str) -> None:
    check(layout(torch.randn(33, 65, device=DEVICE).bfloat16()), backend)


@backends
def test_expanded(backend: str) -> None:
    check(torch.randn(1, 20, device=DEVICE).bfloat16().expand(9, -1), backend)


@pytest.mark.gpu
def test_more_than_2_31_elements() -> None:
    source = torch.randn(2**20, device=DEVICE).bfloat16().repeat(2**11 + 1)
    factor = torch.rand((), device=DEVICE)
    assert torch.equal(scaled_cast(source, factor)[-(2**20) :], source[-(2**20) :].float() * factor)


def test_what_is_refused() -> None:
    source, factor = torch.randn(4, device=DEVICE).bfloat16(), torch.rand((), device=DEVICE)
    with pytest.raises(TypeError, match=r"source must be bfloat16 or float16, got torch\.float32"):
        scaled_cast(source.float(), factor)
    with pytest.raises(TypeError, match=r"factor must be float32, got torch\.float64"):
        scaled_cast(source, factor.double())
    with pytest.raises(ValueError, match=r"factor must be one number on .*, got \[2\]"):
        scaled_cast(source, factor.repeat(2))
