"""Cross entropy and log-probabilities of a linear head, without the logits of all tokens.

Input: hidden states [T, H], a weight [V, H] and targets [T]. Output: the scalar loss (`linear_cross_entropy`), or figures of each
token under a frozen head (`linear_log_probs`). They are computed chunk by chunk of tokens: the logits of a chunk become the loss
and then, in place, their own gradient, which is multiplied into the gradients of hidden, weight and bias. Autograd keeps these
gradients, and backward scales them. The caller owns all tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from forebay.kernels.cross_entropy import cross_entropy_, scale
from forebay.moe.routing import check_tensors

# Time and peak memory on an H200, T 16384, bf16, forward and backward, torch 2.11:
#     V 32768,  H 2048:  9.9 ms,  672 MiB (torch's linear and cross entropy: 14.9 ms, 6176 MiB)
#     V 151936, H 2048: 48.4 ms, 1975 MiB
#     V 201088, H 2880: 93.2 ms, 3585 MiB
# The GEMMs alone at 700 TFLOP/s are 9.4, 43.7 and 81.3 ms.
#
# Why not `F.linear_cross_entropy` (torch 2.13 and later): it returns the loss in hidden's dtype, in bf16 with eight bits,
# and breaks the graph of a compiled caller. In fp32 on one CPU core, 1024 tokens, it took 377 ms against 321 (H 512,
# V 8192) and 2410 against 781 (H 256, V 32768); with chunks of 256 for both, 304 against 306 and 705 against 764. In bf16
# on a CPU it is 3 to 4 times faster at such chunks. It has not been measured on a GPU.

# A quarter of a GiB of logits: 4096 tokens at V = 32768 in bf16, enough rows for full-speed GEMMs.
_CHUNK_BYTES = 256 * 2**20
# GEMM tiles are 128 or 256 rows: a chunk that is no multiple of it wastes part of its last tile.
_CHUNK_MULTIPLE = 256
_IGNORED = -100  # torch's own default


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = _IGNORED,
    reduction: str = "mean",
    chunk_tokens: int | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), targets)`, chunk by chunk.

    The gradients are computed in forward, as in Liger-Kernel's `fused_linear_cross_entropy`, and backward scales them.
    Loss arithmetic is fp32; logits are rounded to hidden's dtype as `F.linear` rounds them. If no gradient is needed, only
    the loss is computed. Under autocast the inputs are cast as `F.linear` would cast them. No host synchronization.

    Memory, with e bytes an element of hidden: forward holds the fp32 gradients, 4 T H + 4 V H bytes less what needs no
    gradient, and one chunk of logits, at most max(256 MiB, e V H). The gradients are kept until backward, which adds
    e T H + e V H for its results.

    Args:
        hidden: [T, H] bf16, fp16, fp32 or fp64. T may be 0.
        weight: [V, H], dtype of hidden.
        targets: [T] int64. One outside [0, V) other than `ignore_index` makes the loss NaN.
        bias: [V], dtype of hidden.
        ignore_index: targets that do not count.
        reduction: "mean" over the targets not ignored (NaN with zero gradients if there are none, as in torch), or "sum".
        chunk_tokens: tokens a chunk; by default chosen from V, H and the dtype.

    Returns:
        Scalar in fp32 (fp64 for fp64 inputs). `backward` may run more than once with `retain_graph=True`; with
        `create_graph=True` it raises RuntimeError.

    Raises:
        ValueError: shapes that do not fit, tensors on two devices, an unknown reduction, chunk_tokens below 1.
        TypeError: arguments that are no tensors or numbers, differing or integer dtypes, targets not int64.
        RuntimeError: called under a transform of torch.func.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "linear_cross_entropy does not run under transforms of torch.func (grad, vmap, jvp): use torch.autograd.grad, or "
            "F.cross_entropy(F.linear(hidden, weight), targets)"
        )
    check_tensors(hidden=hidden, weight=weight, targets=targets, **({} if bias is None else {"bias": bias}))
    for name, number in (("ignore_index", ignore_index), ("chunk_tokens", 1 if chunk_tokens is None else chunk_tokens)):
        if not isinstance(number, (int, torch.SymInt)):
            raise TypeError(f"{name} must be an integer, got {number!r}")
    hidden, weight, bias = _cast_for_autocast(hidden, weight, bias)
    _check(hidden, weight, targets, bias)
    if chunk_tokens is None:
        d_weight = weight.requires_grad and torch.is_grad_enabled()
        chunk_tokens = _pick_chunk(hidden, vocab=weight.shape[0], d_weight=d_weight)
    elif chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")

    needs_grad = any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    total: Tensor
    if torch.is_grad_enabled() and needs_grad:
        total = _LinearCrossEntropy.apply(hidden, weight, bias, targets, ignore_index, chunk_tokens)
    else:
        total = _sum_and_grads(hidden, weight, bias, targets, ignore_index, chunk_tokens, [False] * 3)[0]
    if reduction == "sum":
        return total
    # Counted on the device. NaN is added: so the gradient of a batch without targets is 0.
    count = (targets != ignore_index).sum()
    return total / count.clamp(min=1) + torch.where(count > 0, 0.0, float("nan")).to(total.dtype)


def _cast_for_autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments of `F.linear` in the dtypes that autocast gives them."""
    device_type = hidden.device.type
    if not torch.is_autocast_enabled(device_type):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device_type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def linear_cross_entropy_into(hidden: Tensor, weight: Tensor, targets: Tensor, weight_sum: Tensor) -> Tensor:
    """The summed loss, a scalar, whose gradient of the weight is added to `weight_sum` in forward.

    For gradient accumulation: autograd would hold a gradient [V, H] of each microbatch in fp32, and another one in the
    weight's dtype, before adding them. The gradient that is added is that of *this sum of losses*: a later factor (one over the
    number of targets) is the caller's to apply to `weight_sum`. The gradient of hidden is autograd's, factors included;
    the weight gets none.

    Args:
        hidden, weight, targets: as in `linear_cross_entropy`; targets of -100 do not count, and weight is a plain tensor.
        weight_sum: [V, H] fp32 (fp64 for fp64), contiguous; no graph.

    Raises:
        ValueError, TypeError: as in `linear_cross_entropy`, or a `weight_sum` of another shape or dtype.
    """
    _check(hidden, weight, targets, None)
    if weight_sum.shape != weight.shape or weight_sum.dtype != _accumulator_dtype(hidden.dtype):
        raise ValueError(
            f"weight_sum must be {tuple(weight.shape)} {_accumulator_dtype(hidden.dtype)}, "
            f"got {tuple(weight_sum.shape)} {weight_sum.dtype}"
        )
    return _SummingCrossEntropy.apply(hidden, weight.detach(), targets, weight_sum)


class _SummingCrossEntropy(torch.autograd.Function):
    """`linear_cross_entropy_into`: the gradient of hidden is made in forward and scaled in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, weight_sum: Tensor) -> Tensor:
        chunk = _pick_chunk(hidden, vocab=weight.shape[0], d_weight=True)
        needs = [True, True, False]
        total, d_hidden, *_ = _walk_chunks(hidden, weight, None, targets, _IGNORED, chunk, needs, weight_sum)
        ctx.save_for_backward(d_hidden)
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (d_hidden,) = ctx.saved_tensors
        return scale(d_hidden, grad_output, ctx.dtype), None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the losses; its gradients are made in forward and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        chunk_tokens: int,
    ) -> Tensor:
        needs = list(ctx.needs_input_grad[:3])
        total, *grads = _sum_and_grads(hidden, weight, bias, targets, ignore_index, chunk_tokens, needs)
        ctx.save_for_backward(*grads)
        ctx.set_materialize_grads(False)  # DDP's sink for unused parameters gives none to a loss that is not trained on
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 6
        # Autograd's own `once_differentiable` is silent when grad_output is a constant.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "linear_cross_entropy is differentiable once: create_graph=True would drop the second derivative; under "
                "forebay.manage, loss=None keeps the model's own loss (and experts=None its own experts)"
            )
        # Out of place: with retain_graph the saved gradients must survive this call.
        scaled = [
            scale(grad, grad_output, ctx.dtype) if needed else None
            for grad, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[:3], strict=True)
        ]
        return (*scaled, None, None, None)


@torch.library.custom_op("forebay::linear_cross_entropy", mutates_args=())
def _sum_and_grads(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    chunk_tokens: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_walk_chunks` as a custom op, so that compiled callers need no graph break."""
    return _walk_chunks(hidden, weight, bias, targets, ignore_index, chunk_tokens, needs)


@_sum_and_grads.register_fake
def _(hidden, weight, bias, targets, ignore_index, chunk_tokens, needs):
    return _empty_results(hidden, weight, needs)


@register_flop_formula(torch.ops.forebay.linear_cross_entropy)
def _flop(hidden, weight, bias, targets, ignore_index, chunk_tokens, needs, out_shape=None, **kwargs) -> int:
    """One product for the logits, and one for each gradient of hidden and weight; tensors are given as their shapes."""
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + sum(needs[:2]))


def _empty_results(hidden: Tensor, weight: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialized (total, d_hidden, d_weight, d_bias); a gradient that is not needed is an empty tensor."""
    acc = _accumulator_dtype(hidden.dtype)
    shapes = [hidden.shape, weight.shape, weight.shape[:1]]
    d_hidden, d_weight, d_bias = (
        hidden.new_empty(shape if needed else (0,), dtype=acc) for shape, needed in zip(shapes, needs, strict=True)
    )
    return hidden.new_empty((), dtype=acc), d_hidden, d_weight, d_bias


def _walk_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    chunk_tokens: int,
    needs: list[bool],
    weight_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum of the losses and the gradients of (hidden, weight, bias) that `needs` asks for, in fp32 (fp64 for fp64).

    A gradient that is not needed is an empty tensor. With `weight_sum`, the gradient of the weight is added to it. ::

        for each chunk of C tokens:
            logits  = hidden[chunk] @ weight.T (+ bias)       [C, V], in hidden's dtype, one buffer
            loss   += sum of cross_entropy_(logits, targets)  logits now hold softmax - onehot
            d_hidden[chunk] = logits @ weight
            d_weight       += logits.T @ hidden[chunk]
            d_bias         += column sums of logits
    """
    need_hidden, need_weight, need_bias = needs
    results = needs if weight_sum is None else [need_hidden, False, need_bias]
    total, d_hidden, d_weight, d_bias = _empty_results(hidden, weight, results)
    if weight_sum is not None:
        d_weight = weight_sum
    total.zero_()
    if need_bias:
        d_bias.zero_()
    tokens = hidden.shape[0]
    if tokens == 0:
        if weight_sum is None:
            d_weight.zero_()
        return total, d_hidden, d_weight, d_bias

    buffer = hidden.new_empty(min(chunk_tokens, tokens), weight.shape[0])
    # The dtypes are settled by now: autocast must not touch the fp32 accumulation.
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, tokens, chunk_tokens):
            chunk = slice(start, min(start + chunk_tokens, tokens))
            x = hidden[chunk]
            logits = buffer[: x.shape[0]]
            if bias is None:
                torch.mm(x, weight.t(), out=logits)
            else:
                torch.addmm(bias, x, weight.t(), out=logits)
            losses = cross_entropy_(logits, targets[chunk], ignore_index=ignore_index, write_grad=any(needs))
            total += losses.sum()
            if need_hidden:
                _matmul_into(d_hidden[chunk], logits, weight, add=False)
            if need_weight:
                _matmul_into(d_weight, logits.t(), x, add=start > 0 or weight_sum is not None)
            if need_bias:
                d_bias += logits.sum(0, dtype=d_bias.dtype)
    return total, d_hidden, d_weight, d_bias


def _matmul_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """out = a @ b, or out += a @ b; `out` may be wider (fp32) than a and b, and is not rounded."""
    beta = int(add)  # with 0 the old content is not read, so `out` may be uninitialized
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    else:
        # The CPU has no GEMM of bf16 into fp32.
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, out=out)


def _accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    # bf16 would round d_weight once a chunk. Its error against fp64 (emulated on a CPU, 8192 tokens, H 128, V 2048, Zipf
    # targets; torch's whole-batch bf16 GEMM: 1.7e-3) was 2.7e-3 with 4 chunks, 3.6e-3 with 8, 5.4e-3 with 19, 8.9e-3 with
    # 64; in fp32 it is 1.7e-3 for any number of chunks. Gradients kept in fp32 are also rounded once only when
    # `grad_output` is no power of two, and fp16 under a gradient scaler does not underflow. It costs 5 % of the time.
    return torch.float64 if dtype == torch.float64 else torch.float32


def _pick_chunk(hidden: Tensor, *, vocab: int, d_weight: bool) -> int:
    """Tokens a chunk: chunks of nearly equal size, with logits of at most max(256 MiB, size of the weight).

    Each chunk reads and writes the fp32 d_weight [V, H] once. Where the vocabulary is so large that 256 MiB holds fewer
    tokens than H, the chunk grows to H tokens, and its logits to the size of the weight: with V 151936 and H 2048 chunks of
    768 tokens took 60.7 ms, 1024 55.6, 2048 51.4 and 4096 50.7 (H200). Without d_weight there is no such traffic.
    """
    tokens, width = hidden.shape
    limit = max(1, _CHUNK_BYTES // (vocab * hidden.element_size()))
    if d_weight:
        limit = max(limit, width)
    if limit >= tokens:
        return max(tokens, 1)
    chunks = -(-tokens // limit)
    even = -(-tokens // chunks)
    if limit < _CHUNK_MULTIPLE:
        return even
    return min(-(-even // _CHUNK_MULTIPLE), limit // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() != 2:
        raise ValueError(f"hidden must be [T, H], got {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or weight.shape[0] < 1:
        raise ValueError(
            f"weight must be [V, {hidden.shape[1]}] for hidden {tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be [{hidden.shape[0]}], got {tuple(targets.shape)}")
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64, got {targets.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden must be floating point, got {hidden.dtype}")
    given = [(name, other) for name, other in (("weight", weight), ("bias", bias)) if other is not None]
    for name, other in given:
        if other.dtype != hidden.dtype:
            raise TypeError(f"{name} is {other.dtype}, hidden is {hidden.dtype}")
    for name, other in (*given, ("targets", targets)):
        if other.device != hidden.device:
            raise ValueError(f"{name} is on {other.device}, hidden on {hidden.device}")


# --- log-probabilities of tokens --------------------------------------------------------------------------------------


class TokenLogProbs(NamedTuple):
    """Figures of T tokens, [T] each: fp32 (fp64 for fp64 inputs), and bool. `entropy` cannot be differentiated."""

    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor


def linear_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None) -> TokenLogProbs:
    """`F.log_softmax(F.linear(hidden, weight, bias), -1)` at `targets`, in chunks of tokens: two GEMMs in forward, none in
    backward. Under autocast the inputs are cast as `F.linear` would cast them.

    The gradient of hidden is made in forward; that of a token's log-probability only scales its row. (A gradient of the weight is
    a sum over tokens, and cannot be made before theirs are known.) Memory: one chunk of logits, and until backward a gradient
    [T, H] in hidden's dtype.

    Args:
        hidden: [T, H] floating point; T may be 0.
        weight, bias: [V, H] and [V], in the dtype of hidden (before autocast), without gradient.
        targets: [T] int64 in [0, V).

    Raises:
        ValueError: a weight or bias that needs a gradient.
        RuntimeError: (in backward) `create_graph=True`, or a gradient of the entropy.
    """
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise ValueError("linear_log_probs makes no gradient of the weight and bias, and one of them needs it")
    hidden, weight, bias = _cast_for_autocast(hidden, weight, bias)
    return TokenLogProbs(*_LogProbs.apply(hidden, weight, bias, targets))


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, needed = hidden.shape[0], ctx.needs_input_grad[0]
        log_probs, entropy = (hidden.new_empty(tokens, dtype=_accumulator_dtype(hidden.dtype)) for _ in range(2))
        is_top1 = hidden.new_empty(tokens, dtype=torch.bool)
        d_hidden = torch.empty_like(hidden) if needed else hidden.new_empty(0)
        chunk = max(1, _CHUNK_BYTES // (weight.shape[0] * hidden.element_size()))
        buffer = hidden.new_empty(min(chunk, tokens), weight.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):  # the dtypes are settled
            for start in range(0, tokens, chunk):
                part = slice(start, start + chunk)
                x = hidden[part]
                logits = torch.mm(x, weight.t(), out=buffer[: x.shape[0]])
                if bias is not None:
                    logits += bias
                stats = (entropy[part], is_top1[part])
                log_probs[part] = -cross_entropy_(logits, targets[part], write_grad=needed, stats=stats)
                if needed:
                    torch.mm(logits, weight, out=d_hidden[part])
        ctx.save_for_backward(d_hidden)
        ctx.mark_non_differentiable(is_top1)
        ctx.set_materialize_grads(False)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx: Any, d_log_probs: Tensor | None, d_entropy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_log_probs is differentiable once; create_graph=True would drop the second derivative"
            )
        if d_entropy is not None:
            raise RuntimeError("linear_log_probs has no gradient of the entropy; under forebay.manage pass loss=None")
        (d_hidden,) = ctx.saved_tensors
        if d_log_probs is None or not ctx.needs_input_grad[0]:
            return None, None, None, None
        # The saved gradient is that of the losses, which are the negative log-probabilities.
        return (d_hidden * -d_log_probs.unsqueeze(1)).to(d_hidden.dtype), None, None, None
