"""AdamW's update of a weight that is split (`forebay.kernels.split_weights`), in one pass over its memory.

Input: high, low and ties of a weight [N], its gradient [N] in fp32 or bf16, both moments [N] in fp32, and the number of the step.
Output: weight and moments, changed. A gradient in bf16 moves 26 bytes an element, one in fp32 28.

Every operation is in fp32, and rounded where torch 2.11's fused AdamW rounds it on a GPU, fused multiply-adds included: the
results are the same bits. Older versions multiplied by the betas in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import Backend, cdiv, launch, use_triton
from forebay.kernels.split_weights import BITS, check_flat, check_split, join, load_joined, places, split, store_split

_BYTES_OF_TIES = 128  # of a program
_WARPS = 8
_NUMBERS = 9  # of `adamw_numbers`, for each weight


@triton.jit
def _adamw_kernel(
    high_ptr, low_ptr, ties_ptr, grad_ptr, mean_ptr, square_ptr, factor_ptr, skip_ptr, numbers_ptr, n,
    HAS_FACTOR: tl.constexpr, MAY_SKIP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """`ROWS` bytes of ties and their weights. `numbers_ptr`: a row of `adamw_numbers`."""
    rows, at = places(ROWS, BITS)
    if MAY_SKIP:
        n = tl.where(tl.load(skip_ptr) == 1.0, 0, n)
    inside = at < n
    beta1 = tl.load(numbers_ptr).to(tl.float32)
    beta2 = tl.load(numbers_ptr + 1).to(tl.float32)
    decay = tl.load(numbers_ptr + 2).to(tl.float32)
    eps = tl.load(numbers_ptr + 3).to(tl.float32)
    step_size = tl.load(numbers_ptr + 4).to(tl.float32)
    root = tl.load(numbers_ptr + 5).to(tl.float32)

    weight = load_joined(high_ptr, low_ptr, ties_ptr, rows, at, n, BITS).to(tl.float32, bitcast=True)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        grad = grad * tl.load(factor_ptr)
    mean = tl.load(mean_ptr + at, mask=inside, other=0.0)
    square = tl.load(square_ptr + at, mask=inside, other=0.0)

    weight = tl.fma(-decay, weight, weight)
    mean = tl.fma(beta1, mean, tl.fma(-beta1, grad, grad))
    grad = grad * grad
    square = tl.fma(beta2, square, tl.fma(-beta2, grad, grad))
    denominator = tl.div_rn(tl.sqrt_rn(square), tl.zeros_like(square) + root) + eps
    weight = weight - tl.div_rn(step_size * mean, denominator)

    store_split(weight.to(tl.int32, bitcast=True), high_ptr, low_ptr, ties_ptr, rows, at, n, BITS)
    tl.store(mean_ptr + at, mean, mask=inside)
    tl.store(square_ptr + at, square, mask=inside)


def adamw_numbers(
    steps: Sequence[Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Tensor:
    """The numbers of an update, for `split_adamw`.

    Args:
        steps: of each of W weights, the number of this step, fp32 [], from 1.

    Returns:
        fp64 [W, 9], on the device. The kernel reads the first six columns, its reference all but the third, fifth and sixth:

        1, 2. the betas
        3. the share of a weight that decays
        4. eps
        5. the learning rate over the first moment's bias correction
        6. the root of the second moment's bias correction
        7, 8, 9. learning rate, weight decay, and the number of the step
    """
    numbers = torch.stack(list(steps))
    given = torch.tensor([*betas, eps, lr, weight_decay], dtype=torch.float64).to(numbers.device, non_blocking=True)
    # In fp32, as torch computes them.
    beta1, beta2, _, rate, decay = given.float()
    sizes, roots = rate / (1 - torch.pow(beta1, numbers)), (1 - torch.pow(beta2, numbers)).sqrt()
    columns = given[0], given[1], rate * decay, given[2], sizes, roots, given[3], given[4], numbers
    return torch.stack([column.double().expand(len(steps)) for column in columns], dim=1)


def split_adamw(
    parts: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    moments: tuple[Tensor, Tensor],
    numbers: Tensor,
    factor: Tensor | None = None,
    skip: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> None:
    """Update a split weight and its moments. All tensors are contiguous.

    Args:
        parts: high, low and ties, as `forebay.kernels.split_weights.split` has them.
        grad: [N] fp32 or bf16.
        moments: of first and second order, [N] fp32.
        numbers: a row of `adamw_numbers`.
        factor: fp32 [], by which the gradient is multiplied in fp32; None is 1.
        skip: fp32 []; where it is 1 nothing changes.

    Raises:
        ValueError: a shape, device or layout that does not fit.
        TypeError: a dtype that does not fit.
    """
    high, low, ties = parts
    n, device = high.numel(), high.device
    check_split(n, high, low, ties)
    check_flat("grad", grad, torch.bfloat16 if grad.dtype == torch.bfloat16 else torch.float32, n, device)
    for name, moment in zip(("mean", "square"), moments, strict=True):
        check_flat(name, moment, torch.float32, n, device)
    check_flat("numbers", numbers, torch.float64, _NUMBERS, device)
    for name, number in (("factor", factor), ("skip", skip)):
        if number is not None:
            check_flat(name, number.reshape(1), torch.float32, 1, device)
    if not n:
        return
    if not use_triton(backend, high):
        _split_adamw_reference(parts, grad, moments, numbers, factor, skip)
        return
    launch(
        _adamw_kernel, (cdiv(n, _BYTES_OF_TIES * BITS),), high.view(torch.int16), low, ties, grad, *moments, factor, skip,
        numbers, n, HAS_FACTOR=factor is not None, MAY_SKIP=skip is not None, ROWS=_BYTES_OF_TIES, BITS=BITS,
        num_warps=_WARPS,
    )  # fmt: skip


def _split_adamw_reference(
    parts: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    moments: tuple[Tensor, Tensor],
    numbers: Tensor,
    factor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """torch's own update of the joined weight."""
    beta1, beta2, _, eps, _, _, lr, decay, step = numbers.tolist()
    weight = torch.empty_like(moments[0])
    join(*parts, weight, backend="reference")
    scaled = grad.float() if factor is None else grad.float() * factor
    mean, square = moments
    steps = [torch.tensor(step, device=weight.device)]
    torch._fused_adamw_(
        [weight], [scaled], [mean], [square], [], steps, amsgrad=False, maximize=False, lr=lr, beta1=beta1, beta2=beta2,
        eps=eps, weight_decay=decay, found_inf=skip,
    )  # fmt: skip
    split(weight, *parts, backend="reference")
