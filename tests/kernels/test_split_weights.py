"""`split` and `join` of weights: rounded as torch rounds, and joined to the bit."""

import pytest
import torch
from torch import Tensor

from forebay.kernels.split_weights import BITS, join, split
from tests.kernels.common import DEVICE, backends, split_parts

# Upper halves: zero, a denormal, odd, even, the largest finite numbers, infinity; of both signs.
UPPER = [sign | upper for sign in (0, 0x8000) for upper in (0, 1, 2, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80)]
LOWER = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]


def of_bits(bits: Tensor) -> Tensor:
    """fp32 [N] of int64 [N] in [0, 2^32), N a multiple of 8."""
    signed = torch.where(bits >= 2**31, bits - 2**32, bits)
    return signed.to(torch.int32).view(torch.float32).to(DEVICE)


def check(weight: Tensor, backend: str) -> None:
    high, low, ties = split_parts(weight.numel())
    split(weight, high, low, ties, backend=backend)  # type: ignore[arg-type]
    assert torch.equal(high, weight.bfloat16())
    joined = torch.full_like(weight, float("nan"))
    join(high, low, ties, joined, backend=backend)  # type: ignore[arg-type]
    assert torch.equal(joined.view(torch.int32), weight.view(torch.int32))


@backends
@pytest.mark.parametrize("n", [0, 8, 1016, 1024, 1032, 70_000])
def test_normal_weights(n: int, backend: str) -> None:
    check(torch.randn(n, device=DEVICE), backend)


@backends
def test_all_kinds_of_rounding(backend: str) -> None:
    """Each lower half that is one off a boundary below each upper half. An infinity has no other lower half than 0."""
    bits = [upper << 16 | lower for upper in UPPER for lower in LOWER if upper & 0x7FFF < 0x7F80 or not lower]
    bits += [0] * (-len(bits) % BITS)
    check(of_bits(torch.tensor(bits)), backend)


@backends
def test_random_bits(backend: str) -> None:
    bits = torch.randint(0, 2**32, (1 << 17,))
    bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000  # ties of even and odd weights beside each other
    weight = of_bits(bits)
    check(torch.where(weight.isnan(), 1.0, weight), backend)


@backends
def test_nan_stays_nan(backend: str) -> None:
    weight = of_bits(torch.tensor([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000, 0x7FC08000, 0xFF808000, 0, 0]))
    high, low, ties = split_parts(BITS)
    split(weight, high, low, ties, backend=backend)  # type: ignore[arg-type]
    joined = torch.empty_like(weight)
    join(high, low, ties, joined, backend=backend)  # type: ignore[arg-type]
    assert torch.equal(high.isnan(), weight.isnan())
    assert torch.equal(joined.isnan(), weight.isnan())


@backends
def test_parts_of_one_memory(backend: str) -> None:
    """High and low in the two halves of another weight's memory, at an offset."""
    weight, n = torch.randn(64, device=DEVICE), 64
    memory = torch.full((n + 8,), float("nan"), device=DEVICE)
    high, low = memory.view(torch.bfloat16)[8 : n + 8], memory.view(torch.int16)[n + 8 : 2 * n + 8]
    ties = torch.empty(n // BITS, device=DEVICE, dtype=torch.uint8)
    split(weight, high, low, ties, backend=backend)  # type: ignore[arg-type]
    joined = torch.empty_like(weight)
    join(high, low, ties, joined, backend=backend)  # type: ignore[arg-type]
    assert torch.equal(joined, weight)
    assert memory[:4].isnan().all() and memory[-4:].isnan().all()  # nothing else is written


@pytest.mark.gpu
def test_more_than_2_31_weights() -> None:
    n = 2**31 + 1024
    weight = torch.randn(n, device=DEVICE)
    high, low, ties = split_parts(n)
    split(weight, high, low, ties)
    last = slice(n - (1 << 20), n)
    assert torch.equal(high[last], weight[last].bfloat16())
    joined = torch.zeros_like(weight)
    join(high, low, ties, joined)
    assert torch.equal(joined, weight)


def test_what_is_refused() -> None:
    weight, (high, low, ties) = torch.randn(16, device=DEVICE), split_parts(16)
    with pytest.raises(ValueError, match="weight must have a multiple of 8 elements, got 15"):
        split(weight[1:], high, low, ties)
    with pytest.raises(ValueError, match=r"high must be \[16\] and contiguous, got \[8\]"):
        split(weight, high[:8], low, ties)
    with pytest.raises(ValueError, match=r"low must be \[8\] and contiguous, got \[8\] with strides \(2,\)"):
        join(high[:8], low[::2], ties[:1], weight[:8])
    with pytest.raises(TypeError, match=r"ties must be torch.uint8, got torch.int16"):
        split(weight, high, low, low[:2])
