"""`split_adamw` against torch's fused AdamW of the whole weight: the same bits on a GPU.

Triton's interpreter, which has no fused multiply-add, is compared with the same roundings in torch: torch's update on a CPU
rounds otherwise.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.kernels.split_adamw import adamw_numbers, split_adamw
from forebay.kernels.split_weights import join, split
from tests.kernels.common import DEVICE, backends, split_parts

SETTINGS: dict[str, Any] = {"lr": 3.1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def drawn(n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A weight, its gradient and moments, of sizes as they are in training and far from them."""
    sizes = 10 ** (4 * torch.rand(n, device=DEVICE) - 3)
    return {
        "weight": torch.randn(n, device=DEVICE) * sizes,
        "grad": (torch.randn(n, device=DEVICE) * sizes).to(dtype),
        "mean": torch.randn(n, device=DEVICE) * sizes,
        "square": torch.rand(n, device=DEVICE) * sizes * sizes,
    }


def updated(
    tensors: dict[str, Tensor], number: int, factor: Tensor | None, skip: Tensor | None, settings: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight and moments after torch's own update."""
    weight, mean, square = (tensors[name].clone() for name in ("weight", "mean", "square"))
    grad = tensors["grad"].float() if factor is None else tensors["grad"].float() * factor
    beta1, beta2 = settings["betas"]
    numbers = {"lr": settings["lr"], "beta1": beta1, "beta2": beta2, "eps": settings["eps"]}
    torch._fused_adamw_(
        [weight], [grad], [mean], [square], [], [torch.tensor(float(number), device=DEVICE)],
        weight_decay=settings["weight_decay"], amsgrad=False, maximize=False, found_inf=skip, **numbers,
    )  # fmt: skip
    return weight, mean, square


def rounded(
    tensors: dict[str, Tensor], number: int, factor: Tensor | None, skip: Tensor | None, settings: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight and moments, rounded as `updated` rounds them on a GPU, but without fused multiply-adds."""
    weight, mean, square = (tensors[name].clone() for name in ("weight", "mean", "square"))
    if skip is not None and skip == 1:
        return weight, mean, square
    grad = tensors["grad"].float() if factor is None else tensors["grad"].float() * factor
    lr, decay, eps = (torch.tensor(settings[name]) for name in ("lr", "weight_decay", "eps"))
    beta1, beta2 = torch.tensor(settings["betas"])
    weight = weight - (lr * decay) * weight
    mean = beta1 * mean + (grad - beta1 * grad)
    grad = grad * grad
    square = beta2 * square + (grad - beta2 * grad)
    size, root = lr / (1 - beta1 ** torch.tensor(number)), (1 - beta2 ** torch.tensor(number)).sqrt()
    # torch's root of many numbers in fp32 is not the nearest number on a CPU.
    denominator = square.double().sqrt().float() / root + eps
    return weight - (size * mean) / denominator, mean, square


def check(
    tensors: dict[str, Tensor],
    number: int,
    backend: str,
    factor: Tensor | None = None,
    skip: Tensor | None = None,
    settings: dict[str, Any] = SETTINGS,
) -> None:
    is_interpreted = DEVICE == "cpu" and backend == "triton"
    wanted = (rounded if is_interpreted else updated)(tensors, number, factor, skip, settings)
    n = tensors["weight"].numel()
    parts = split_parts(n)
    split(tensors["weight"], *parts)
    moments = tensors["mean"].clone(), tensors["square"].clone()
    # The second row is of another step: it is the first that counts.
    steps = [torch.tensor(float(k), device=DEVICE) for k in (number, number + 7)]
    numbers = adamw_numbers(steps, **settings)[0]
    split_adamw(parts, tensors["grad"], moments, numbers, factor, skip, backend=backend)  # type: ignore[arg-type]
    weight = torch.full_like(wanted[0], float("nan"))
    join(*parts, weight)
    assert torch.equal(parts[0], weight.bfloat16())
    for found, right in zip((weight, *moments), wanted, strict=True):
        assert torch.equal(found, right)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [0, 8, 1016, 1024, 1032])
def test_sizes(n: int, dtype: torch.dtype, backend: str) -> None:
    check(drawn(n, dtype), 3, backend)


@backends
@pytest.mark.parametrize("number", [1, 2, 1000, 123_456])
def test_steps_and_factors(number: int, backend: str) -> None:
    for factor in (None, torch.rand((), device=DEVICE)):
        check(drawn(4096, torch.bfloat16), number, backend, factor)


@backends
@pytest.mark.parametrize("change", [{"weight_decay": 0.0}, {"betas": (0.0, 0.999)}, {"eps": 1e-15, "lr": 1.0}], ids=str)
def test_settings(change: dict[str, Any], backend: str) -> None:
    check(drawn(4096, torch.float32), 5, backend, settings={**SETTINGS, **change})


@backends
@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_a_step_that_is_skipped_changes_nothing(skipped: float, backend: str) -> None:
    tensors, skip = drawn(2048, torch.bfloat16), torch.tensor(skipped, device=DEVICE)
    check(tensors, 4, backend, skip=skip)
    if skipped:
        assert torch.equal(updated(tensors, 4, None, skip, SETTINGS)[0], tensors["weight"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_weights_to_the_bit(dtype: torch.dtype) -> None:
    for number in (1, 17, 4000):
        check(drawn(1 << 27, dtype), number, "triton", torch.rand((), device=DEVICE))


@pytest.mark.gpu
def test_more_than_2_31_weights() -> None:
    n, last = 2**31 + 1024, 1 << 20
    tensors = drawn(last, torch.bfloat16)
    wanted = updated(tensors, 2, None, None, SETTINGS)
    large = {name: torch.zeros(n, device=DEVICE, dtype=t.dtype) for name, t in tensors.items()}
    for name, tensor in tensors.items():
        large[name][-last:] = tensor
    parts = split_parts(n)
    split(large["weight"], *parts)
    numbers = adamw_numbers([torch.tensor(2.0, device=DEVICE)], **SETTINGS)[0]
    split_adamw(parts, large["grad"], (large["mean"], large["square"]), numbers)
    join(*parts, large["weight"])
    for name, right in zip(("weight", "mean", "square"), wanted, strict=True):
        assert torch.equal(large[name][-last:], right)


def test_what_is_refused() -> None:
    parts, flat = split_parts(16), torch.zeros(16, device=DEVICE)
    numbers = adamw_numbers([torch.ones((), device=DEVICE)], **SETTINGS)[0]
    with pytest.raises(TypeError, match=r"grad must be torch\.float32, got torch\.float16"):
        split_adamw(parts, flat.half(), (flat, flat), numbers)
    with pytest.raises(ValueError, match=r"square must be \[16\] and contiguous, got \[8\]"):
        split_adamw(parts, flat, (flat, flat[:8]), numbers)
    with pytest.raises(ValueError, match=r"numbers must be \[9\] and contiguous, got \[8\]"):
        split_adamw(parts, flat, (flat, flat), numbers[:8])
