"""Attention with sinks on the kernels of `forebay.kernels.masked_attention`, where transformers has no `flex_attention` for it.

Input: attention forwards as in `forebay.models.sinks`, whose mask is dense, [B or 1, 1, S, T], and added to the scores:
DeepSeek-V4 joins what its compressor chose to the model's mask, HY-V4 masks what its indexer did not choose, and heads of MiMo-V2
have two widths. Output: the same, without scores in memory. Autograd saves queries, keys, values, the mask, the output and lse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forebay.kernels.masked_attention import WIDEST, masked_attention, masked_attention_backward


def under_dense_mask(eager: Callable[..., Any]) -> Callable[..., Any]:
    """`masked_sink_attention`, with a family's own eager attention for what the kernels do not take."""
    return partial(masked_sink_attention, eager)


def masked_sink_attention(
    eager: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> Any:
    """An attention interface of transformers.

    Args:
        eager: another one, called for wider heads than `WIDEST`, a mask of another shape or dtype, or dropout.
        query: [B, Hq, S, Dk].
        key: [B, Hkv, T, Dk].
        value: [B, Hkv, T, Dv]; if it is `key`, one tensor is saved for both.
        attention_mask: [B or 1, 1, S, T], added to the scores.
        scaling: of the scores; None for 1 / sqrt(Dk).
        sliding_window: how many of the first S keys a query attends to at most: plans count by it.
        s_aux: the sinks, [Hq], or None.

    Returns:
        [B, S, Hq, Dv] in the dtype of `query` (under autocast, of autocast), and no weights; or what `eager` returns.
    """
    if dropout or not _fits(query, key, value, attention_mask):
        given = {"scaling": scaling, "sliding_window": sliding_window, "s_aux": s_aux, "dropout": dropout, **others}
        return eager(module, query, key, value, attention_mask, **given)
    dtype = query.dtype
    if torch.is_autocast_enabled(query.device.type):  # which casts projections only, see `sink_attention`
        dtype = torch.get_autocast_dtype(query.device.type)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    values = None if value is key else value.to(dtype)
    mask = attention_mask[:, 0]
    return attend(query.to(dtype), key.to(dtype), values, mask, s_aux, float(scale), sliding_window or 0)[0], None


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> bool:
    if not isinstance(mask, Tensor) or not mask.is_floating_point() or mask.requires_grad or mask.dim() != 4:
        return False
    batch, length = query.shape[0], query.shape[2]
    whole = mask.shape[0] in (1, batch) and tuple(mask.shape[1:]) == (1, length, key.shape[2])
    return whole and max(query.shape[-1], value.shape[-1]) <= WIDEST


@torch.library.custom_op("forebay::masked_attention", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor, sinks: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """`forebay.kernels.masked_attention.masked_attention` for autograd. The mask contains the window; `window` tells plans how
    long it is, 0 for none."""
    return masked_attention(q, k, v, mask, sinks, scale)


@attend.register_fake
def _(q, k, v, mask, sinks, scale, window):
    batch, heads, length, _ = q.shape
    lse = torch.promote_types(q.dtype, torch.float32)
    width = (k if v is None else v).shape[-1]
    return q.new_empty(batch, length, heads, width), q.new_empty(batch, length, heads, dtype=lse)


@torch.library.custom_op("forebay::masked_attention_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    mask: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
) -> list[Tensor]:
    """`masked_attention_backward`: the gradients of what is a tensor of q, k, v and sinks."""
    found = masked_attention_backward(dy, q, k, v, mask, sinks, out, lse, scale)
    return [t for t in found if t is not None]


@_backward_op.register_fake
def _(dy, q, k, v, mask, sinks, out, lse, scale, window):
    return [t.new_empty(t.shape) for t in (q, k, v, sinks) if t is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, sinks, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, mask, sinks, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, sinks, out, lse = ctx.saved_tensors
    left = iter(_backward_op(dy, q, k, v, mask, sinks, out, lse, ctx.scale, ctx.window))
    dq, dk, dv, dsinks = (None if t is None else next(left) for t in (q, k, v, sinks))
    return dq, dk, dv, None, dsinks, None, None


attend.register_autograd(_gradients, setup_context=_save)
