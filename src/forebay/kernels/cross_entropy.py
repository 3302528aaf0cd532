"""Cross entropy over a block of logits, with the gradient written over the logits; and what backward scales gradients with.

Input of `cross_entropy_`: logits [C, V] and targets [C]. Output: the loss of each row [C], and optionally its entropy, whether
the target is the first of its largest logits, and the logits overwritten by `softmax(logits) - onehot(target)`. `scale`
multiplies a tensor by a number on the device, into another dtype, with one rounding. The caller owns all tensors. The
gradient-in-forward method and the in-place overwrite are those of Liger-Kernel's `fused_linear_cross_entropy` (BSD-2-Clause);
this code is written anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import Backend, cdiv, check_written, launch, next_power_of_2, packed, use_triton

# Columns that the program of a row reads at a time. Not below 1024 on 4 warps: with less than a 16-byte vector a thread, Triton
# gives one element to several threads, and in the second pass one would read what another has already overwritten.
_MIN_BLOCK = 1024
# On an H200 8192 columns on 8 warps took 0.175 ms for [4096, 32768] in bf16 (3.1 TB/s, the row's second read comes from the
# cache) and 0.478 ms for [2048, 151936]; next 8192 on 16 warps (0.182, 0.489); the worst of 19 shapes, 16384 on 32, 0.249, 0.579.
_MAX_BLOCK = 8192
_SCALE_BLOCK = 4096


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, targets_ptr, loss_ptr, entropy_ptr, top1_ptr,
    row_stride, ignore_index,
    V: tl.constexpr, WRITE_GRAD: tl.constexpr, STATS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row `program_id(0)` of logits [C, V]. First pass: running max and sum of exp(x - max). Second pass: the gradient.

    V is a constant: a model has one, and Triton's interpreter cannot loop to a runtime bound with NumPy 2.4 and later.
    """
    # C * V passes 2**31 for 16384 tokens of a vocabulary of 152k: row offsets are 64-bit.
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if STATS:
            tl.store(entropy_ptr + row, 0.0)
            tl.store(top1_ptr + row, False)
        if WRITE_GRAD:
            for start in range(0, V, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                zeros = tl.zeros((BLOCK,), dtype=logits_ptr.dtype.element_ty)
                tl.store(row_ptr + cols, zeros, mask=cols < V)
        return

    in_range = (target >= 0) & (target < V)
    # Read before the second pass overwrites it; NaN for a target that has no logit.
    x_target = tl.load(row_ptr + target, mask=in_range, other=float("nan")).to(tl.float32)

    m = tl.full((), float("-inf"), tl.float32)
    s = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)  # sum of exp(x - m) x
    before = tl.full((), float("-inf"), tl.float32)  # the largest logit before the target's
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, 0))
        # While all seen is -inf, subtract 0 instead: -inf - -inf is NaN, exp(-inf - 0) is 0.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        scale = tl.exp(m - m_safe)
        e = tl.exp(x - m_safe)
        s = s * scale + tl.sum(e, 0)
        if STATS:
            weighted = weighted * scale + tl.sum(tl.where(e > 0, e * x, 0.0), 0)
            before = tl.maximum(before, tl.max(tl.where(cols < target, x, float("-inf")), 0))
        m = m_new
    # Subtract m from the target's logit first: log(s) + m - x loses digits when m is large.
    tl.store(loss_ptr + row, tl.log(s) - (x_target - m))
    if STATS:
        tl.store(entropy_ptr + row, tl.log(s) + (m - weighted / s))
        tl.store(top1_ptr + row, (x_target >= m) & (x_target > before))

    if WRITE_GRAD:
        one_over_s = tl.where(in_range, 1.0 / s, float("nan"))
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
            grad = tl.exp(x - m) * one_over_s
            grad = tl.where(cols == target, grad - 1.0, grad)
            tl.store(row_ptr + cols, grad.to(logits_ptr.dtype.element_ty), mask=cols < V)


def _reference(
    logits: Tensor, targets: Tensor, ignore_index: int, write_grad: bool, stats: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Plain PyTorch form of `cross_entropy_`, with one more temporary [C, V] in fp32 (fp64 for fp64 logits)."""
    n_cols = logits.shape[1]
    compute = torch.float64 if logits.dtype == torch.float64 else torch.float32
    ignored = targets == ignore_index
    in_range = (targets >= 0) & (targets < n_cols)
    column = torch.where(in_range, targets, 0).unsqueeze(1)
    bad = ~(in_range | ignored)
    log_p = torch.log_softmax(logits, dim=-1, dtype=compute)
    loss = -log_p.gather(1, column).squeeze(1)
    loss.masked_fill_(bad, float("nan")).masked_fill_(ignored, 0.0)
    if stats is not None:
        entropy, top1 = stats
        entropy.copy_(torch.special.entr(log_p.exp()).sum(-1).masked_fill_(ignored, 0.0))
        top1.copy_((log_p.argmax(-1) == targets) & ~ignored)
    if write_grad:
        grad = log_p.exp_()
        grad.scatter_add_(1, column, grad.new_full((), -1.0).expand_as(column))
        grad.masked_fill_(bad.unsqueeze(1), float("nan"))
        grad.masked_fill_(ignored.unsqueeze(1), 0.0)
        logits.copy_(grad)
    return loss


def cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    write_grad: bool = True,
    stats: tuple[Tensor, Tensor] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Cross entropy of each row; overwrites `logits` by their gradient for an upstream gradient of one if `write_grad`.

    The gradient is not scaled by 1/count: fp16 would flush p / 16384 to zero for every p below 1e-3. The caller scales the
    results of its GEMMs in fp32. An ignored row has loss 0 and gradient 0, even if its logits are NaN. A target outside [0, V)
    that is not `ignore_index` gives a NaN loss and a NaN gradient row, without an out-of-bounds read or a host synchronization.
    As in torch, a logit of -inf has probability zero, and +inf or NaN in another row makes its loss NaN.

    Args:
        logits: [C, V], V >= 1, last dimension contiguous. Rows may be further apart than V; they must not overlap if
            `write_grad`.
        targets: [C] int64, on the same device, any stride.
        stats: two contiguous tensors [C] to write: the entropy of each row, in the dtype of the result, and (bool) whether the
            target is the first of the row's largest logits. 0 and False for an ignored row.
        backend: "auto" is Triton on a CUDA device (except for fp64), PyTorch elsewhere.

    Returns:
        [C] losses in fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: shapes or strides other than the above, or tensors on two devices.
        TypeError: targets not int64, logits not floating point, Triton asked for fp64.
    """
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits must be [C, V] with V >= 1, got {tuple(logits.shape)}")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits must be contiguous along V, got strides {logits.stride()}")
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    rows, n_cols = logits.shape
    targets = packed("targets", targets, logits, [rows], [torch.int64])
    if write_grad:
        check_written("logits", logits)
    if not use_triton(backend, logits):
        return _reference(logits, targets, ignore_index, write_grad, stats)
    loss = torch.empty(rows, device=logits.device, dtype=torch.float32)
    if rows == 0:
        return loss
    block = min(max(next_power_of_2(n_cols), _MIN_BLOCK), _MAX_BLOCK)
    launch(
        _cross_entropy_kernel, (rows,),
        logits, targets, loss, *(stats or (loss, loss)), logits.stride(0), ignore_index,
        V=n_cols, WRITE_GRAD=write_grad, STATS=stats is not None, BLOCK=block, num_warps=8 if block == _MAX_BLOCK else 4,
    )  # fmt: skip
    return loss


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Elements [program_id(0) * BLOCK, + BLOCK) of n."""
    # A weight's gradient may hold more than 2**31 elements: 64-bit offsets.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, (x * factor).to(out_ptr.dtype.element_ty), mask=at < n)


def scale(x: Tensor, factor: Tensor, dtype: torch.dtype, *, backend: Backend = "auto") -> Tensor:
    """`(x * factor).to(dtype)` as a new tensor, the product in x's dtype, without a host synchronization.

    From fp32 to bf16, `torch.mul(x, factor, out=...)` moved 1.5 TB/s on an H200 (0.27 ms for [32768, 2048]; this kernel 0.10),
    `x.mul(factor)` with a conversion holds one more fp32 copy, and `x.to(dtype) * factor` rounds twice.

    Args:
        x: contiguous, floating point, any shape.
        factor: one element, x's dtype and device.

    Raises:
        ValueError: x not contiguous; factor of another size or device.
        TypeError: x not floating point; factor of another dtype.
    """
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()} for {tuple(x.shape)}")
    if factor.numel() != 1 or factor.device != x.device:
        raise ValueError(f"factor must be one element on {x.device}, got {tuple(factor.shape)} on {factor.device}")
    if factor.dtype != x.dtype:
        raise TypeError(f"factor is {factor.dtype}, x is {x.dtype}")
    if torch.compiler.is_compiling():  # Inductor fuses this into one pass
        return (x * factor.reshape(())).to(dtype)
    if not use_triton(backend, x):
        # Like the kernel, no intermediate product in x's dtype: a memory trace counts it.
        return torch.mul(x, factor.reshape(()), out=torch.empty_like(x, dtype=dtype))
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        grid = (cdiv(x.numel(), _SCALE_BLOCK),)
        launch(_scale_kernel, grid, x, factor, out, x.numel(), BLOCK=_SCALE_BLOCK, num_warps=8)
    return out
