"""The loss of causal language models without the logits of all tokens.

`linear_cross_entropy` takes hidden states [T, H], a weight [V, H] and targets [T], and returns the scalar loss, chunk by chunk of
tokens: the logits of a chunk become the loss and then, in place, their own gradient, which is multiplied into the gradients of
hidden, weight and bias. Autograd keeps these gradients, and backward scales them. `install_fused_loss` replaces the forward of a
transformers `*ForCausalLM` of a supported family and of its head, so that `model(labels=...)` computes its loss that way in
training mode, and returns what undoes it. `head_loss` is the loss of a model's hidden states alone.
"""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import can_return_tuple

from forebay.kernels.cross_entropy import cross_entropy_
from forebay.kernels.scale import scale
from forebay.memory.overrides import InnerForward, install, is_managed, is_outermost, is_patched
from forebay.models.families import transformers_base
from forebay.models.structure import called, expression, rewritten, source_of

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


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
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
        TypeError: differing or integer dtypes, targets not int64.
        RuntimeError: called under a transform of torch.func.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "linear_cross_entropy does not run under transforms of torch.func (grad, vmap, jvp): use torch.autograd.grad, or "
            "F.cross_entropy(F.linear(hidden, weight), targets)"
        )
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
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
    # Counted on the device. `where` keeps the gradient of a batch without targets 0, not NaN.
    count = (targets != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp(min=1), float("nan"))


def linear_cross_entropy_into(
    hidden: Tensor, weight: Tensor, targets: Tensor, weight_sum: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """The summed loss, a scalar, whose gradient of the weight is added to `weight_sum` in forward.

    For gradient accumulation: autograd would hold a gradient [V, H] of each microbatch in fp32, and another one in the
    weight's dtype, before adding them. The gradient that is added is that of *this sum of losses*: a later factor (one over the
    number of targets) is the caller's to apply to `weight_sum`. The gradient of hidden is autograd's, factors included;
    the weight gets none.

    Args:
        hidden, weight, targets, ignore_index: as in `linear_cross_entropy`; weight is a plain tensor.
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
    return _SummingCrossEntropy.apply(hidden, weight.detach(), targets, weight_sum, ignore_index)


class _SummingCrossEntropy(torch.autograd.Function):
    """`linear_cross_entropy_into`: the gradient of hidden is made in forward and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, weight_sum: Tensor, ignore_index: int
    ) -> Tensor:
        chunk = _pick_chunk(hidden, vocab=weight.shape[0], d_weight=True)
        needs = [True, True, False]
        total, d_hidden, *_ = _walk_chunks(hidden, weight, None, targets, ignore_index, chunk, needs, weight_sum)
        ctx.save_for_backward(d_hidden)
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (d_hidden,) = ctx.saved_tensors
        return scale(d_hidden, grad_output, ctx.dtype), None, None, None, None


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
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
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


def install_fused_loss(model: nn.Module, in_eval: bool = False) -> Callable[[], None]:
    """Make `model(labels=...)` compute its loss without logits in training mode, until the returned call undoes it.

    With labels (int64 [B, S]) the loss equals the original's up to rounding: `shift_labels`, `num_items_in_batch`,
    `ignore_index`, `logits_to_keep` and, under `output_router_logits`, the router's auxiliary loss work as they do there.
    The output has `logits=None`. The original forward runs without labels, in `eval()`, under transforms of torch.func,
    and, with a warning, if the head was changed since. A deep copy has the family's own loss.

    Args:
        model: a transformers model whose forward has the structure that `_fused` needs (FSDP2's subclasses included), with
            neither `forward` nor `lm_head.forward` replaced on the instance.
        in_eval: fuse the loss in `eval()` too.

    Returns:
        Removes both overrides, also under a forward installed on top. A second call does nothing.

    Raises:
        ValueError: a forward that does more with its logits than its loss, a custom loss function, a head that is not a plain
            linear layer, or a replaced forward.
    """
    fused = _check_model(model)
    head: nn.Module = model.lm_head  # type: ignore[assignment]
    undo = ExitStack()
    undo.callback(install(model, partial(_FusedForward, model, fused, head, in_eval)))
    undo.callback(install(head, lambda inner: _head_forward))
    return undo.close


class _FusedForward:
    """The forward of a `*ForCausalLM`, with the loss computed inside a call of its head.

    FSDP2's hooks on the head unshard the weight before and reduce its gradient after that call.
    """

    def __init__(
        self, model: nn.Module, fused: Callable[..., Any], head: nn.Module, in_eval: bool, inner: InnerForward
    ):
        self._name, self._fused = type(model).__name__, fused
        self._head, self._in_eval, self._inner = head, in_eval, inner
        self._names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self._warned_head = self._warned_eval = False

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels", dict(zip(self._names, args, strict=False)).get("labels"))
        if labels is None or torch._C._are_functorch_transforms_active():
            return self._inner(*args, **kwargs)
        if not (model.training or self._in_eval):
            return self._warn_in_backward(self._inner(*args, **kwargs))
        change = _change_of(model, self._head)
        if change is not None:
            if not self._warned_head:
                self._warned_head = True
                warnings.warn(
                    f"{change} since forebay.manage, which the fused loss leaves out: the model's own loss runs, and "
                    "holds logits [tokens, vocabulary]; undo that, call manage() again, or pass loss=None to silence this",
                    stacklevel=2,
                )
            return self._inner(*args, **kwargs)
        return self._fused(model, _loss_of_hidden, *args, **kwargs)

    def _warn_in_backward(self, output: Any) -> Any:
        """Warn once if an output of `eval()` is trained on: `from_pretrained` returns a model in `eval()`."""
        loss = output[0] if isinstance(output, tuple) else output.loss

        def warn(_: Tensor) -> None:
            if not self._warned_eval:
                self._warned_eval = True
                warnings.warn(
                    f"backward through a {self._name} in eval(): the fused loss is for training mode, so the model's own loss "
                    "ran and held logits [tokens, vocabulary]; call model.train() before training, or pass "
                    "loss='fused-always' to forebay.manage",
                    stacklevel=2,
                )

        if loss.requires_grad and not self._warned_eval:
            loss.register_hook(warn)
        return output


def _change_of(model: Any, head: nn.Module) -> str | None:
    """Why the model's loss or head no longer equals a call of `head` with targets, for a message; None if it does."""
    if model.loss_function is not ForCausalLMLoss:
        return f"loss_function has become {model.loss_function!r}"
    if model.lm_head is not head:
        return f"lm_head has become a {type(model.lm_head).__name__} (an adapter or a new head)"
    if not is_outermost(head):
        return "lm_head got another forward"
    # A hook would get the loss where it expects logits. FSDP's hooks, which unshard the weight, look at neither.
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    for hook in (h for kind in hooks for h in kind.values()):
        if not str(getattr(hook, "__module__", None)).startswith(("torch.distributed.", "forebay.")):
            return f"lm_head got the module hook {hook!r}"
    return None


def _loss_of_hidden(head: Any, logits: Tensor, labels: Tensor, vocab_size: Any = None, **options: Any) -> Tensor:
    """Takes the place of a family's ``loss_function`` where `logits` are the hidden states before the head."""
    return head_loss(head, logits, labels, **options)


def _head_forward(self: nn.Linear, hidden: Tensor, targets: Tensor | None = None, **options: Any) -> Tensor:
    """Logits, or with targets the loss (`options` as in `linear_cross_entropy`)."""
    if targets is None:
        return nn.Linear.forward(self, hidden)
    if isinstance(self.weight, DTensor):
        raise ValueError(
            "fused loss: lm_head.weight is a DTensor inside the head's own call (tensor parallelism), which is not supported"
        )
    return linear_cross_entropy(hidden, self.weight, targets, bias=self.bias, **options)


def head_loss(
    head: Callable[..., Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """`transformers.loss.loss_utils.ForCausalLMLoss` on normed hidden states [B, S, H], through a head with the fused loss.

    Args:
        head: the head, or its forward.
        labels: [B, S] int64; not read if `shift_labels` [B, S] is given.
        num_items_in_batch: what the sum is divided by; None for the mean.
    """
    if shift_labels is None:
        # Token n predicts label n + 1; the last one predicts nothing.
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(hidden.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = head(hidden.reshape(-1, hidden.shape[-1]), targets, ignore_index=ignore_index, reduction=reduction)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def _check_model(model: nn.Module) -> Callable[..., Any]:
    """The model's forward with a fused loss, see `_fused`. Raises ValueError if its loss cannot be fused."""
    name = type(model).__name__
    family = transformers_base(model)
    if family is None:
        raise ValueError(f"fused loss: {name} is not a model of transformers")
    if inspect.getattr_static(type(model), "forward") is not family.forward:
        raise ValueError(f"fused loss: {name} overrides the forward of {family.__name__}, whose loss it would replace")
    fused, scales = _fused(family)
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"fused loss: {name} has a custom loss_function ({model.loss_function!r}); only transformers' ForCausalLMLoss can "
            "be fused"
        )
    head: nn.Module = model.lm_head  # type: ignore[assignment]
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"fused loss: lm_head is a {type(head).__name__}, not a plain torch.nn.Linear (an adapter or a quantized layer "
            "cannot be fused)"
        )
    if scales and head.bias is not None:
        raise ValueError(
            f"fused loss: {name} scales the logits of a head with a bias; only those of a head without one can be fused"
        )
    for path, owner in (("forward", model), ("lm_head.forward", head)):
        if is_managed(owner) or is_patched(owner):
            raise ValueError(
                f"fused loss: {path} of this {name} is already replaced on the instance (by a fused loss, Accelerate or a "
                "hook); install the fused loss before that"
            )
    return fused


def _fused(family: type[nn.Module]) -> tuple[Callable[..., Any], bool]:
    """The forward of a `*ForCausalLM` without logits: ``f(model, loss, *args, **kwargs)``; and whether it scales its logits.

    What the forward has as ``logits`` are the hidden states before the head, ``loss(lm_head, logits, labels, ...)`` takes
    the place of ``self.loss_function``, and the output has no logits. All else, such as the router's auxiliary loss, is the
    family's own code.

    Raises:
        ValueError: a forward in which the head's output is used otherwise. It may be multiplied or divided by a number, which is
            done to the hidden states then.
    """
    source = source_of(family.forward)
    if source is None or set(source.decorators) - {"can_return_tuple"}:
        raise ValueError(
            f"fused loss: the source of {family.__name__}.forward cannot be read, or it has unknown decorators"
        )
    calls = [name for name, _ in called(source.tree.body)]
    if calls.count("lm_head") != 1 or calls.count("loss_function") != 1:
        raise ValueError(
            f"fused loss: {family.__name__} does not compute its loss by one call of lm_head and one of loss_function"
        )
    body = rewritten(source.tree.body, {"loss_function": _loss_call})
    at = next(i for i, statement in enumerate(body) if any(name == "lm_head" for name, _ in called([statement])))
    body[at] = _hidden_for_logits(body[at])
    scales = any(_scales_logits(statement) for statement in body[at:])
    for statement in body[at:]:
        if not _spares_logits(statement):
            raise ValueError(
                f"fused loss: {family.__name__} does more with its logits than its loss, which is not supported: "
                f"{ast.unparse(statement).splitlines()[0]}"
            )
    made = source.make(body, "_loss", own=True)
    return (can_return_tuple(made) if source.decorators else made), scales


def _loss_call(call: ast.Call) -> str:
    return f"_loss(self.lm_head, {ast.unparse(call).partition('(')[2]}"


def _hidden_for_logits(statement: ast.stmt) -> ast.stmt:
    """``logits = self.lm_head(hidden)`` without the head, and without a cast of its output: the loss is computed in fp32."""
    match statement:
        case ast.Assign([ast.Name("logits")], ast.Call(ast.Attribute(ast.Call(_, [hidden], []), "float"), [], [])):
            statement.value = hidden
        case ast.Assign([ast.Name("logits")], ast.Call(ast.Attribute(ast.Name("self"), "lm_head"), [hidden], [])):
            statement.value = hidden
    return statement


def _scales_logits(statement: ast.stmt) -> bool:
    """Whether it is ``logits = logits * self.config.factor``, or a division."""
    match statement:
        case ast.Assign([ast.Name("logits")], ast.BinOp(ast.Name("logits"), ast.Mult() | ast.Div(), ast.Attribute())):
            return True
    return False


def _spares_logits(statement: ast.stmt) -> bool:
    """Whether a statement of the head or after it uses logits for the loss alone. Takes them out of what is returned."""
    if _scales_logits(statement):
        return True
    match statement:
        case ast.Return(ast.Call(keywords=keywords)):
            for keyword in keywords:
                if keyword.arg == "logits":
                    keyword.value = expression("None", keyword.value)
    loss = {
        n
        for c in ast.walk(statement)
        if isinstance(c, ast.Call) and ast.unparse(c.func) == "_loss"
        for n in ast.walk(c)
    }
    uses = [
        n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == "logits" and isinstance(n.ctx, ast.Load)
    ]
    return not any(name == "lm_head" for name, _ in called([statement])) and loss.issuperset(uses)
