"""Rows in 8 bits against fp64: the error's bound, what comes back exactly, and that both forms write the same bytes."""

import pytest
import torch
from torch import Tensor

from forebay.kernels.launch import Backend
from forebay.kernels.row_fp8 import GROUP, decode_rows, encode_rows, encoded_width
from tests.kernels.common import DEVICE, backends, moved_on, strided, turned

SHAPES = [(0, 7), (3, 0), (1, 1), (0, 0), (1, 31), (1, 33), (5, 32), (7, 200), (1, 6001), (130, 64)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def sample(shape: tuple[int, ...]) -> Tensor:
    """Numbers over 40 binades."""
    return (torch.randn(shape) * 2.0 ** torch.randint(-14, 14, shape)).to(DEVICE, torch.bfloat16)


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of each element's group."""
    found = torch.zeros_like(x)
    for start in range(0, x.shape[1], GROUP):
        group = x[:, start : start + GROUP].abs()
        found[:, start : start + GROUP] = group.amax(1, keepdim=True)
    return found


def there_and_back(x: Tensor, backend: Backend) -> Tensor:
    return decode_rows(encode_rows(x, backend=backend), x.shape[1], backend=backend)


@backends
@shapes
def test_error_is_within_the_bound_and_coding_again_changes_nothing(backend: Backend, shape: tuple[int, int]) -> None:
    x = sample(shape)
    rows = encode_rows(x, backend=backend)
    assert rows.dtype == torch.uint8 and rows.shape == (shape[0], encoded_width(shape[1]))
    back = decode_rows(rows, shape[1], backend=backend)
    error, exact = (back.double() - x.double()).abs(), x.double()
    assert bool((error <= torch.maximum(exact.abs() * 2**-4, largest(exact) * 2**-17)).all())
    assert torch.equal(there_and_back(back, backend), back)


@shapes
def test_both_forms_write_the_same_bytes(shape: tuple[int, int]) -> None:
    x = sample(shape)
    rows = encode_rows(x, backend="triton")
    assert torch.equal(rows, encode_rows(x, backend="reference"))
    plain = decode_rows(rows, shape[1], backend="reference")
    assert torch.equal(decode_rows(rows, shape[1], backend="triton"), plain)


@backends
def test_every_number_of_e4m3_comes_back_and_ties_go_to_even(backend: Backend) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).bfloat16()
    numbers = numbers[numbers.isfinite()].view(2, -1).to(DEVICE)
    for scale in (1.0, 2.0**-60, 2.0**80):
        groups = numbers.unsqueeze(2)  # each number in a group of its own, whose scale 448 sets
        rows = torch.cat((torch.full_like(groups, 448.0), groups), 2).view(-1, 2) * scale
        assert torch.equal(there_and_back(rows, backend), rows)
    # 1.0625 lies between 1 and 1.125, 1.1875 between 1.125 and 1.25; 2.5 units of 2^-9 between 2 and 3 of them.
    ties = torch.tensor([[448.0, 1.0625, 1.1875, -1.1875, 2.5 * 2**-9, 3.5 * 2**-9]], device=DEVICE).bfloat16()
    wanted = torch.tensor([[448.0, 1.0, 1.25, -1.25, 2 * 2**-9, 4 * 2**-9]], device=DEVICE).bfloat16()
    assert torch.equal(there_and_back(ties, backend), wanted)


@backends
def test_groups_do_not_meet(backend: Backend) -> None:
    """Of rows, nor of one row: an infinity or a NaN spoils the 32 elements of its group alone."""
    x = torch.ones(3, 70, device=DEVICE, dtype=torch.bfloat16)
    x[0, 40], x[1, 69], x[2, 0] = float("inf"), float("nan"), float("-inf")
    x[2, 32:64] = 2.0**-100
    x[0, :32] = 0.0
    back = there_and_back(x, backend)
    spoilt = torch.zeros_like(x, dtype=torch.bool)
    spoilt[0, 32:64] = spoilt[1, 64:] = spoilt[2, :32] = True
    assert torch.equal(back.isnan(), spoilt) and torch.equal(back[~spoilt], x[~spoilt])


@backends
@pytest.mark.parametrize("extreme", [1.875 * 2.0**127, 2.0**-126, 2.0**-133, 449.0, 1.9921875])
def test_extreme_magnitudes(backend: Backend, extreme: float) -> None:
    x = (torch.tensor([[1.0, -0.5, 0.01, 0.0]]) * extreme).to(DEVICE, torch.bfloat16)
    back, x = there_and_back(x, backend).double(), x.double()
    assert back[0, 3] == 0 and bool(((back - x).abs() <= torch.clamp(x.abs() * 2**-4, min=2.0**-126)).all())


@backends
@pytest.mark.parametrize("layout", [strided, turned, moved_on])
def test_layouts(backend: Backend, layout: object) -> None:
    x = sample((6, 50))
    assert torch.equal(there_and_back(layout(x), backend), there_and_back(x, backend))  # type: ignore[operator]
    rows = encode_rows(x, backend=backend)
    assert torch.equal(decode_rows(layout(rows), 50, backend=backend), there_and_back(x, backend))  # type: ignore[operator]


def test_refusals() -> None:
    with pytest.raises(TypeError, match="x must be"):
        encode_rows(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="x must be"):
        encode_rows(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="rows must be"):
        decode_rows(torch.zeros(2, 3, dtype=torch.uint8), 3)
    with pytest.raises(TypeError, match="rows must be"):
        decode_rows(torch.zeros(2, 4), 3)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_on_a_gpu() -> None:
    n = 2**31 + 32 + 5
    x = torch.zeros(1, n, device="cuda", dtype=torch.bfloat16)
    x[0, -1], x[0, 7] = 3.0, -1.5
    rows = encode_rows(x)
    del x
    back = decode_rows(rows, n)
    assert back[0, -1] == 3.0 and back[0, 7] == -1.5 and int(torch.count_nonzero(back)) == 2
