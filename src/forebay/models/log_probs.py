"""Log-probabilities of targets under a frozen head, without the logits of all tokens.

Input: hidden states [T, H], a weight [V, H] that needs no gradient, and targets [T]. Output: for each token the log-probability
of its target, the entropy, and whether the target is the most likely token. As in `forebay.models.linear_cross_entropy`, the
gradient of hidden is made in forward, chunk by chunk; the gradient of a token's log-probability only scales its row. (The
gradient of a weight is a sum over tokens, and cannot be made before theirs are known.) The caller owns all tensors.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from forebay.kernels.cross_entropy import cross_entropy_
from forebay.models.linear_cross_entropy import CHUNK_BYTES, cast_for_autocast


class TokenLogProbs(NamedTuple):
    """Figures of T tokens, [T] each: fp32 (fp64 for fp64 inputs), and bool. `entropy` cannot be differentiated."""

    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor


def linear_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None) -> TokenLogProbs:
    """`F.log_softmax(F.linear(hidden, weight, bias), -1)` at `targets`, in chunks of tokens: two GEMMs in forward, none in
    backward. Under autocast the inputs are cast as `F.linear` would cast them.

    Memory: one chunk of logits, and until backward a gradient [T, H] in hidden's dtype.

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
    hidden, weight, bias = cast_for_autocast(hidden, weight, bias)
    return TokenLogProbs(*_LogProbs.apply(hidden, weight, bias, targets))


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, needed = hidden.shape[0], ctx.needs_input_grad[0]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        log_probs, entropy = (hidden.new_empty(tokens, dtype=wide) for _ in range(2))
        is_top1 = hidden.new_empty(tokens, dtype=torch.bool)
        d_hidden = torch.empty_like(hidden) if needed else hidden.new_empty(0)
        chunk = max(1, CHUNK_BYTES // (weight.shape[0] * hidden.element_size()))
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
