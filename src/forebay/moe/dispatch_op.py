"""`forebay::dispatch` and `forebay::combine`, and the stages of an MoE sublayer that run between them.

Input: tokens [T, H], a router's choice (ids and weights [T, K]) and a token dispatcher. Output: a `Dispatched`, whose
handle goes to `combine`. Both are operations with fake implementations and autograd, so a checkpoint policy can name
them. `MoeStages` runs the sublayer stage by stage; it owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.moe.dispatch import TokenDispatcher

# `forebay::dispatch` and `forebay::combine`: what autograd sees of an exchange.
#
# In: tokens and a router's choice, and an `TokenDispatcher`. Out: a `Dispatched`, whose handle goes to `combine`. Both are
# operations with fake implementations and autograd, so a checkpoint policy can name them, and a trace without a device can run
# them.
#
#     dispatch(x, ids, weights, exchange) -> rows, ids, weights, handle      gradient: forebay::collect
#     experts(rows, ids, weights, ...)    -> y_rows
#     combine(y_rows, handle, init)       -> y                               gradient: forebay::spread
#
# Who owns a handle: whoever holds it, which is the autograd graph and the caller's frame. Forward only, a checkpoint that stops
# early, an exception in between: the handle goes when the frame or the graph goes. There is nothing to clear.
#
# With one rank nothing travels: `dispatch` returns x itself and `combine` its argument, with no operation and no copy.


@dataclass(frozen=True, eq=False)
class Handle:
    """The way back of dispatched rows: pass it to `combine`."""

    tensors: list[Tensor]
    dispatcher: TokenDispatcher
    n_tokens: int


@dataclass(frozen=True, eq=False)
class Dispatched:
    """What a rank received: R rows, each with K slots, of which those that name this rank's experts count.

    Attributes:
        rows: [R, H] in x's dtype; rows behind the last one received are undefined.
        ids: [R, K], the rank's own experts from 0 on; -1 elsewhere.
        weights: [R, K] in the weights' dtype.
        max_rows: bound on the number of live slots, for `forebay.moe.experts.experts`; None is R * K.
        handle: for `combine`.
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor
    max_rows: int | None
    handle: Handle


def dispatch(x: Tensor, ids: Tensor, weights: Tensor, dispatcher: TokenDispatcher) -> Dispatched:
    """Send each token to every rank that holds one of its experts, once.

    Args:
        x: [T, H], any floating dtype; T may differ between ranks.
        ids: [T, K], any integer dtype, in [0, E); -1 for a slot that chooses nobody.
        weights: [T, K], any floating dtype.

    Raises:
        ValueError: shapes that do not fit, or more tokens than the exchange was made for.
    """
    if x.dim() != 2 or ids.dim() != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"x [T, H], ids and weights [T, K] do not fit: {tuple(x.shape)}, {tuple(ids.shape)}, {tuple(weights.shape)}"
        )
    if dispatcher.size == 1:
        return Dispatched(x, ids, weights, None, Handle([], dispatcher, x.shape[0]))
    rows, local_ids, row_weights, handle = dispatch_op(x, ids, weights, dispatcher)
    max_rows = dispatcher.max_rows(handle, rows.shape[0], ids.shape[1])
    return Dispatched(rows, local_ids, row_weights, max_rows, Handle(handle, dispatcher, x.shape[0]))


def combine(rows: Tensor, handle: Handle, init: Tensor | None = None) -> Tensor:
    """[T, H] in rows' dtype: for each token, `init` plus the sum of its rows over all ranks, in the order of ranks.

    Args:
        rows: [R, H], one for each row that was dispatched.
        init: [T, H], such as the residual; added first, in the same pass.
    """
    if handle.dispatcher.size == 1:
        return rows if init is None else init + rows
    return combine_op(rows, init, handle.tensors, handle.n_tokens, handle.dispatcher)


@torch.library.custom_op("forebay::dispatch", mutates_args=())
def dispatch_op(
    x: Tensor, ids: Tensor, weights: Tensor, dispatcher: TokenDispatcher
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """See `TokenDispatcher.dispatch`."""
    rows, local_ids, row_weights, handle = dispatcher.dispatch(x, ids, weights)
    dispatcher.watch(handle)
    return rows, local_ids, row_weights, handle


@dispatch_op.register_fake
def _(x, ids, weights, dispatcher):
    n_rows, handle = dispatcher.fake_handle(x.shape[0], ids.shape[1], x.device)
    if n_rows is None:
        n_rows = torch.library.get_ctx().new_dynamic_size()
    slots = (n_rows, ids.shape[1])
    local_ids = ids.new_empty(slots, dtype=torch.int32)
    return x.new_empty((n_rows, x.shape[1])), local_ids, weights.new_empty(slots), handle


@torch.library.custom_op("forebay::combine", mutates_args=())
def combine_op(
    rows: Tensor, init: Tensor | None, handle: list[Tensor], n_tokens: int, dispatcher: TokenDispatcher
) -> Tensor:
    """See `TokenDispatcher.collect`."""
    return dispatcher.collect(rows, None, handle, n_tokens, init)[0]


@combine_op.register_fake
def _(rows, init, handle, n_tokens, dispatcher):
    return rows.new_empty((n_tokens, rows.shape[1]))


@torch.library.custom_op("forebay::spread", mutates_args=())
def spread_op(values: Tensor, handle: list[Tensor], n_rows: int, dispatcher: TokenDispatcher) -> Tensor:
    """See `TokenDispatcher.spread`. Gradient of combine."""
    return dispatcher.spread(values, handle, n_rows)


@spread_op.register_fake
def _(values, handle, n_rows, dispatcher):
    return values.new_empty((n_rows, values.shape[1]))


@torch.library.custom_op("forebay::collect", mutates_args=())
def collect_op(
    rows: Tensor, narrow: Tensor, handle: list[Tensor], n_tokens: int, dispatcher: TokenDispatcher
) -> tuple[Tensor, Tensor]:
    """See `TokenDispatcher.collect`. Gradient of dispatch."""
    wide, thin = dispatcher.collect(rows, narrow, handle, n_tokens, None)
    assert thin is not None
    return wide, thin


@collect_op.register_fake
def _(rows, narrow, handle, n_tokens, dispatcher):
    return rows.new_empty((n_tokens, rows.shape[1])), narrow.new_empty((n_tokens, narrow.shape[1]))


def _dispatch_setup(ctx, inputs, output) -> None:
    x, _, _, dispatcher = inputs
    _, local_ids, _, handle = output
    ctx.mark_non_differentiable(local_ids, *handle)
    # Every rank has to take part in backward, also one whose rows got no gradient: zeros are made for it.
    ctx.dispatcher, ctx.n_tokens = dispatcher, x.shape[0]
    ctx.save_for_backward(*handle)


def _dispatch_backward(ctx, d_rows, _, d_weights, __):
    dx, dw = collect_op(
        d_rows.contiguous(), d_weights.contiguous(), list(ctx.saved_tensors), ctx.n_tokens, ctx.dispatcher
    )
    need_x, _, need_weights, _ = ctx.needs_input_grad
    return dx if need_x else None, None, dw if need_weights else None, None


dispatch_op.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)


def _combine_setup(ctx, inputs, output) -> None:
    rows, _, handle, _, dispatcher = inputs
    ctx.dispatcher, ctx.n_rows = dispatcher, rows.shape[0]
    # Not saved as tensors: a recomputation would then have to run combine again only to save them. They have no graph of their
    # own, so holding them here makes no cycle, and they are small.
    ctx.handle = list(handle)


def _combine_backward(ctx, dy):
    need_rows, need_init, *_ = ctx.needs_input_grad
    d_rows = spread_op(dy.contiguous(), ctx.handle, ctx.n_rows, ctx.dispatcher) if need_rows else None
    return d_rows, dy if need_init else None, [None] * len(ctx.handle), None, None


combine_op.register_autograd(_combine_backward, setup_context=_combine_setup)


# The MoE half of a decoder layer in stages, so that tokens can travel between ranks and behind other work.
#
# In: hidden states x [B, S, H] after attention. Out: hidden states after the experts, and what the router said.
#
#     1  front      norm, router, shared experts       x -> residual [T, H], rows [T, H], ids, weights [T, K], logits [T, E]
#     2  dispatch   tokens to the ranks of their experts                                   see `forebay.moe.dispatch`
#     3  experts    this rank's experts on the R rows received, weighted and summed a row
#     4  combine    the sums back to their tokens, 5 added to the residual in the same pass
#
# (Attention belongs to stage 1 too; it comes before x.) Stages 1 and 3 are plain functions of tensors, which may be compiled or
# run under saved-tensor hooks; stages 2 and 4 keep no tensors of their own, only the handle. Run one after the other by calling
# a `MoeStages`, or interleaved with another microbatch's by `forebay.pipeline.runtime`.
#
# `MoeStages` owns nothing: the exchange belongs to whoever made it.


class Front(NamedTuple):
    """What stage 1 hands on: T = B * S tokens of this rank."""

    residual: Tensor
    """[T, H], x plus the shared experts' output: what the routed experts' output is added to."""
    rows: Tensor
    """[T, H], the normed hidden states."""
    ids: Tensor
    """[T, K] integer, in [0, E) over all ranks."""
    weights: Tensor
    """[T, K] floating."""
    logits: Tensor
    """[T, E], for losses on the router."""


@dataclass(frozen=True, eq=False)
class MoeStages:
    """The stages of one layer.

    Attributes:
        front: x [B, S, H] -> `Front`.
        experts: (rows [R, H], ids [R, K], weights [R, K], max_rows) -> [R, H]; see `forebay.moe.experts.experts`.
        dispatcher: how tokens travel.
    """

    front: Callable[[Tensor], Front]
    experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
    dispatcher: TokenDispatcher

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden states [B, S, H], router logits [T, E], ids [T, K]): all stages in sequence."""
        residual, rows, ids, weights, logits = self.front(x)
        sent = dispatch(rows, ids, weights, self.dispatcher)
        y_rows = self.experts(sent.rows, sent.ids, sent.weights, sent.max_rows)
        y = combine(y_rows, sent.handle, residual)
        # No view to autograd, as the layer's own sum would be none: FSDP2 hooks layers' outputs, and warns of views.
        return torch.ops.aten._unsafe_view(y, x.shape), logits, ids
