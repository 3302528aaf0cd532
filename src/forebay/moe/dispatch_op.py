"""`forebay::dispatch` and `forebay::combine`, and the stages of an MoE sublayer between them.

Input: tokens x [T, H], a router's choice (ids and weights [T, K]) and a token dispatcher. Output: a `Dispatched`, whose handle
goes to `combine`. The autograd graph and the caller's frame own the handle, so a forward without a backward, a checkpoint that
stops early and an exception all free it. The operations have fake implementations and autograd: a checkpoint policy can name
them, and a trace needs no device. The gradient of dispatch is `forebay::collect`, that of combine `forebay::spread`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.moe.dispatch import TokenDispatcher
from forebay.moe.routing import check_routed


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """The way back of dispatched rows, for `combine`."""

    tensors: list[Tensor]
    dispatcher: TokenDispatcher
    n_tokens: int


@dataclass(frozen=True, eq=False)
class Dispatched:
    """R received rows, each with K slots; a slot is live if it names an expert of this rank.

    Attributes:
        rows: [R, H] in x's dtype; unused rows at the end are undefined.
        ids: [R, K], this rank's experts counted from 0; -1 for others.
        weights: [R, K] in the weights' dtype.
        max_rows: bound on the number of live slots, for `forebay.moe.experts.experts`; None is R * K.
        handle: for `combine`.
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor
    max_rows: int | None
    handle: DispatchHandle


def dispatch(x: Tensor, ids: Tensor, weights: Tensor, dispatcher: TokenDispatcher) -> Dispatched:
    """Send each token once to every rank that holds one of its experts. With one rank, returns the arguments without a copy.

    Args:
        x: [T, H], any floating dtype; T may differ between ranks.
        ids: [T, K], any integer dtype, in [0, E); -1 for an empty slot.
        weights: [T, K], any floating dtype.

    Raises:
        ValueError: shapes that do not fit, or more tokens than the dispatcher was made for.
    """
    check_routed(x, ids, weights)
    if dispatcher.size == 1:
        return Dispatched(x, ids, weights, None, DispatchHandle([], dispatcher, x.shape[0]))
    rows, local_ids, row_weights, handle = dispatch_op(x, ids, weights, dispatcher)
    max_rows = dispatcher.max_rows(handle, rows.shape[0], ids.shape[1])
    return Dispatched(rows, local_ids, row_weights, max_rows, DispatchHandle(handle, dispatcher, x.shape[0]))


def combine(rows: Tensor, handle: DispatchHandle, init: Tensor | None = None) -> Tensor:
    """[T, H] in rows' dtype: `init` plus the sum of each token's rows over all ranks, in the order of ranks.

    Args:
        rows: [R, H], one for each dispatched row.
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
    # Every rank takes part in backward, so gradients are materialized: a rank whose rows got none sends zeros.
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
    # Not saved as tensors: a recomputation would then run combine again only to save them. They have no graph, so this makes no
    # cycle, and they are small.
    ctx.handle = list(handle)


def _combine_backward(ctx, dy):
    need_rows, need_init, *_ = ctx.needs_input_grad
    d_rows = spread_op(dy.contiguous(), ctx.handle, ctx.n_rows, ctx.dispatcher) if need_rows else None
    return d_rows, dy if need_init else None, [None] * len(ctx.handle), None, None


combine_op.register_autograd(_combine_backward, setup_context=_combine_setup)


class Front(NamedTuple):
    """Output of stage 1: T = B * S tokens of this rank."""

    residual: Tensor
    """[T, H], x plus the shared experts' output; the routed experts' output is added to it."""
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
    """The MoE sublayer of one decoder layer in stages, so that communication can overlap with other work.

        1  front      norm, router, shared experts
        2  dispatch   tokens to the ranks of their experts
        3  experts    this rank's experts on the received rows, weighted and summed per row
        4  combine    sums back to their tokens, added to the residual in the same pass

    Stages 1 and 3 are plain functions of tensors, which may be compiled or run under saved-tensor hooks. Stages 2 and 4 save
    nothing but the handle. Calling this runs the stages in sequence; `forebay.pipeline.runtime` interleaves them with another
    microbatch's. The caller owns the dispatcher.

    Attributes:
        front: x [B, S, H] -> `Front`.
        experts: (rows [R, H], ids [R, K], weights [R, K], max_rows) -> [R, H]; see `forebay.moe.experts.experts`.
        dispatcher: moves tokens between ranks.
    """

    front: Callable[[Tensor], Front]
    experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
    dispatcher: TokenDispatcher

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden states [B, S, H], router logits [T, E], ids [T, K])."""
        residual, rows, ids, weights, logits = self.front(x)
        sent = dispatch(rows, ids, weights, self.dispatcher)
        y_rows = self.experts(sent.rows, sent.ids, sent.weights, sent.max_rows)
        y = combine(y_rows, sent.handle, residual)
        # Not a view for autograd, like the layer's own sum: FSDP2 hooks layers' outputs and warns about views.
        return torch.ops.aten._unsafe_view(y, x.shape), logits, ids
