"""Rows in 8 bits against fp64: the error's bound, what comes back exactly, and that both forms write the same bytes."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forebay.kernels.launch import Backend
from forebay.kernels.row_fp8 import GROUP, decode_rows, encode_rows, encoded_width
from tests.kernels.common import DEVICE, backends, moved_on, strided, turned

SHAPES = [(0, 7), (3, 0), (1, 1), (0, 0), (1, 31), (1, 33), (5, 32), (7, 200), (1, 6001), (9, 64)]
INF, NAN = float("inf"), float("nan")
MOST, LEAST = torch.finfo(torch.bfloat16).max, 2.0**-133  # the smallest subnormal number
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def sample(shape: tuple[int, ...]) -> Tensor:
    """Numbers over 40 binades."""
    return (torch.randn(shape) * 2.0 ** torch.randint(-14, 14, shape)).to(DEVICE, torch.bfloat16)


def largest(x: Tensor) -> Tensor:
    """The largest finite magnitude of each element's group."""
    found, sizes = torch.zeros_like(x), x.abs().where(x.isfinite(), 0)
    for start in range(0, x.shape[1], GROUP):
        found[:, start : start + GROUP] = sizes[:, start : start + GROUP].amax(1, keepdim=True)
    return found


def check(x: Tensor, back: Tensor) -> None:
    """`back` is `x` within the bound where it is finite, and `x` where it is not."""
    finite = x.isfinite()
    assert torch.equal(finite, back.isfinite())
    assert torch.equal(x[~finite].nan_to_num(nan=0.0), back[~finite].nan_to_num(nan=0.0))
    assert torch.equal(x.isnan(), back.isnan())
    error, exact = (back.double() - x.double()).abs(), x.double().abs()
    # Below 2^-126, a GPU may flush to zero.
    bound = torch.maximum(exact * 2**-4, largest(x).double() * 2**-17).clamp(min=2.0**-126)
    assert bool((error <= bound)[finite].all())


def there_and_back(x: Tensor, backend: Backend) -> Tensor:
    return decode_rows(encode_rows(x, backend=backend), x.shape[1], backend=backend)


@backends
@shapes
def test_error_is_within_the_bound_and_coding_again_changes_nothing(backend: Backend, shape: tuple[int, int]) -> None:
    x = sample(shape)
    rows = encode_rows(x, backend=backend)
    assert rows.dtype == torch.uint8 and rows.shape == (shape[0], encoded_width(shape[1]))
    back = decode_rows(rows, shape[1], backend=backend)
    check(x, back)
    assert torch.equal(there_and_back(back, backend), back)


@shapes
def test_both_forms_write_the_same_bytes(shape: tuple[int, int]) -> None:
    x = sample(shape)
    x[:, ::5] = -INF
    rows = encode_rows(x, backend="triton")
    assert torch.equal(rows, encode_rows(x, backend="reference"))
    plain = decode_rows(rows, shape[1], backend="reference")
    assert torch.equal(decode_rows(rows, shape[1], backend="triton"), plain)


@backends
def test_every_number_of_e4m3_comes_back_and_ties_go_to_even(backend: Backend) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).bfloat16()
    numbers = numbers[numbers.abs() < 448]
    groups = torch.zeros(len(numbers), GROUP).bfloat16()
    groups[:, 0], groups[:, 1] = 416.0, numbers  # 416 sets the scale
    for scale in (1.0, 2.0**-60, 2.0**80):
        row = (groups * scale).view(1, -1).to(DEVICE)
        assert torch.equal(there_and_back(row, backend), row)
    # 1.0625 lies between 1 and 1.125, 1.1875 between 1.125 and 1.25; 2.5 units of 2^-9 between 2 and 3 of them.
    ties = torch.tensor([[416.0, 1.0625, 1.1875, -1.1875, 2.5 * 2**-9, 3.5 * 2**-9]], device=DEVICE).bfloat16()
    wanted = torch.tensor([[416.0, 1.0, 1.25, -1.25, 2 * 2**-9, 4 * 2**-9]], device=DEVICE).bfloat16()
    assert torch.equal(there_and_back(ties, backend), wanted)


EXACT = [
    [-INF],
    [INF, NAN],
    [0.0],
    [0.0, -INF],
    [0.0, -MOST],
    [0.0, MOST, INF, NAN, -MOST],
    [1.0, -1.5, INF],
    [1.0, NAN, -1.125],
    [416.0, -(2.0**-6), NAN],
]
ROUNDED = [
    [MOST, 1.875 * 2.0**127, 1.9453125 * 2.0**127],
    [LEAST],
    [LEAST, 3 * LEAST, -INF, 2.0**-126],
    [1.0, LEAST, NAN],
    [416.0, 431.0, -INF],
    [432.0, 1.0, NAN],
    [448.0, -449.0, 2.0**-20],
    [1.9921875, INF, -1.9921875],
]


@backends
@pytest.mark.parametrize("values", EXACT + ROUNDED, ids=str)
def test_what_is_not_finite_and_extreme_magnitudes_leave_their_neighbors_alone(
    backend: Backend, values: Sequence[float]
) -> None:
    x = torch.tensor(values)[torch.randint(len(values), (4, 70))].to(DEVICE, torch.bfloat16)
    x[1, 32:64] = 2.0**-100  # a group of its own
    back = there_and_back(x, backend)
    check(x, back)
    assert torch.equal(back[1, 32:64], x[1, 32:64])
    assert torch.equal(there_and_back(back, backend).nan_to_num(nan=7.0), back.nan_to_num(nan=7.0))
    if values in EXACT:
        assert torch.equal(back.nan_to_num(nan=7.0), x.nan_to_num(nan=7.0))


@backends
def test_every_number_of_bf16(backend: Backend) -> None:
    """In groups of their neighbors, and in groups with any others."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for x in (bits, bits[torch.randperm(1 << 16)]):
        x = x.view(torch.bfloat16).view(16, -1).to(DEVICE)
        check(x, there_and_back(x, backend))


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
