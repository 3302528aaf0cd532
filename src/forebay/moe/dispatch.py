"""Token dispatchers: how rows travel between the ranks of an expert-parallel group.

P ranks hold E experts, rank p the experts [p * E/P, (p+1) * E/P). Input: each rank's tokens x [T, H] (T may differ, and be 0)
with ids and weights [T, K]. `dispatch` sends each token once to every rank that holds one of its experts, and `combine`
returns the sums. This module has the interface, the dispatcher of a single rank, the one over a process group's all-to-all,
the operations with their gradients, and `MoeStages`; `forebay.moe.symmetric`, `forebay.moe.hierarchical` and
`forebay.moe.deepep` have the other dispatchers, and `forebay.moe.backends` chooses one. A dispatcher owns what lasts: the process
group and buffers. The autograd graph and the caller's frame own a handle, so a forward without a backward, a checkpoint that
stops early and an exception all free it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library import opaque_object

from forebay.kernels.permute import combine_rows
from forebay.moe.routing import check_routed

try:  # its name from torch 2.14 on
    from torch._custom_class_base import CustomClassBase
except ImportError:
    from torch._opaque_base import OpaqueBase as CustomClassBase

Handle = list[Tensor]
"""Index tensors of a `dispatch`, which `spread` and `collect` read: an ordinary output of `forebay::dispatch`."""

ALIGNMENT = 256
"""Receiving buffers are rounded up to this many rows where the host knows their number, so that the caching allocator finds
blocks of the same sizes again instead of splitting others (H = 2048 in bf16: 1 MiB)."""


class TokenDispatcher(CustomClassBase):
    """The interface of the backends. An opaque argument of the operations: torch passes it on and never looks inside.

    All operations are collective: every rank of the group runs them in the same order, on streams that are ordered among
    themselves. `combine` is `collect`; the gradient of combine is `spread`, the gradient of dispatch is `collect`.

    Received rows are ordered by sending rank, then by token; over several nodes the backend may have another order. Ids of
    other ranks' experts become -1, and so do all ids of the unused rows at the end. The unused rows and their weights may be
    uninitialized memory, which nothing may read.

    A dispatcher with a *capacity* bounds what a rank receives. It drops the rows above it and sets a flag on the device; the
    caller of `lost_flag` can repeat the work within `exactly` (`forebay.train.capacity_retry`).

    Attributes:
        rank, size: this process in the group, and the group's P.
        num_experts: E, over all ranks.
        about: which dispatcher `make_dispatcher` made, and why.

    Raises:
        ValueError: E is no multiple of P, or not a number of 1 or more.
    """

    rank: int
    size: int
    num_experts: int
    about: str = ""

    def __init__(self, rank: int, size: int, num_experts: int):
        if not isinstance(num_experts, int) or num_experts < 1:
            raise ValueError(f"{num_experts!r} experts are no whole number of 1 or more")
        if num_experts % size:
            raise ValueError(
                f"{num_experts} experts cannot be divided evenly among {size} ranks; valid expert-parallel sizes are "
                f"{', '.join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)}"
            )
        self.rank, self.size, self.num_experts = rank, size, num_experts

    def __deepcopy__(self, _: Any) -> TokenDispatcher:
        """Not copied: torch.compile copies its graphs, and a process group exists once."""
        return self

    @property
    def local_experts(self) -> int:
        """E / P."""
        return self.num_experts // self.size

    @abstractmethod
    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """(rows [R, H], ids [R, K] int32 local to this rank, weights [R, K], handle); all new memory."""

    @abstractmethod
    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        """Send `values` [T, H] as `dispatch` sent the tokens: [n_rows, H]; unused rows are undefined."""

    @abstractmethod
    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Sum each token's rows over the ranks: (init + sum of rows [R, H], sum of narrow [R, K]), new [T, H] and [T, K].

        Sums run in the order of ranks, in fp32 (fp64 for fp64), and are rounded once.
        """

    @abstractmethod
    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int | None:
        """Bound on the (row, expert) pairs that this rank computes; None for every slot. Does not wait for the device."""

    @abstractmethod
    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int | None, Handle]:
        """R, or None if only the device knows it, and empty tensors with the shapes and dtypes of a handle."""

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Within, no row is dropped; the host waits once per dispatch instead. Enter it on all ranks.

        Run backward within it where forward was. Do not run a graph that was compiled or captured outside: it has the
        capacity's shapes.
        """
        yield

    def lost_flag(self) -> Tensor | None:
        """int64 [1] on the device, > 0 if rows were dropped since `clear_lost` on any rank, once the ranks have met in another
        operation. None if no row can be dropped. The host does not wait."""
        return None

    def late_flag(self) -> Tensor | None:
        """int64 [1] on the device, > 0 if another rank did not join an operation in time since `check` or `clear_lost`. None if
        that raises at once. The host does not wait."""
        return None

    def clear_lost(self) -> None:
        """Reset `lost_flag`, `suggested_factor`, and a rank that was late. The host does not wait.

        All ranks call it between the same two operations, after they know that the others have finished the first one.
        """

    def suggested_factor(self) -> float | None:
        """The smallest sufficient capacity factor since `clear_lost`, in hundredths, for all ranks known to this one. None
        without a capacity or a dispatch. Waits for the device."""
        return None

    def check(self) -> None:
        """Wait for the device; raise RuntimeError if the capacity was too small since the last call."""

    def close(self) -> None:
        """Release what the dispatcher owns. Operations after it are an error."""


# An object with identity, never specialized on. Since torch 2.14 the old names write a warning to stderr.
if hasattr(opaque_object, "register_custom_class"):
    opaque_object.register_custom_class(TokenDispatcher, typ="symbolic")
else:
    opaque_object.register_opaque_type(TokenDispatcher, typ="reference")


def host_int(number: Tensor) -> int:
    """The value of a one-element CPU tensor; in a trace a symbol, which `int` would reject."""
    found: Any = number.item()
    return found


def aligned(rows: int) -> int:
    """`rows` rounded up to `ALIGNMENT`."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


class LocalDispatcher(TokenDispatcher):
    """One rank with all E experts: its methods return their arguments, and its handles are empty.

    An operation of torch.library may not return its arguments, so `dispatch` and `combine` skip theirs for one rank.
    """

    def __init__(self, num_experts: int):
        super().__init__(0, 1, num_experts)

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        return x, ids, weights, []

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        return values

    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return rows if init is None else init + rows, narrow

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int | None:
        return None

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int | None, Handle]:
        return tokens, []


class NcclDispatcher(TokenDispatcher):
    """Dispatch by `all_to_all_single` with exact splits: NCCL on GPUs, gloo on CPUs.

    The collective takes the splits as integers, so `dispatch` copies them to the host: the only host synchronization of a
    layer, forward and backward together. A handle of S sent rows:

        sent [S] int32          token of each row sent, ordered by receiving rank, then by token
        places [T, P] int32     row in `sent` of token t for rank p; -1 if it does not go there
        splits [2P + 1] int64   on the CPU: rows sent to each rank, rows received from each, live slots received

    Bytes each way: 2H a row in bf16, and 4K + (2 or 4)K for its slots; 4096 + 64 at H = 2048, K = 8.

    Args:
        group: the expert-parallel process group.
        num_experts: E, a multiple of the group's size.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int):
        super().__init__(group.rank(), group.size(), num_experts)
        self._group: Any = group

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        sends, per_rank = _destinations(ids, self.num_experts, self.size)
        counts = torch.stack([sends.sum(0), per_rank], 1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        # The only host synchronization of the layer.
        splits = torch.cat([counts[:, 0], received[:, 0], received[:, 1].sum(0, keepdim=True)]).cpu()
        out, back = self._splits(splits)
        sent, places = _order_by_rank(sends, sum(out))
        handle = [sent, places, splits]
        rows = self.spread(x, handle, aligned(sum(back)))
        slots = torch.cat([ids.to(torch.int32), _as_int32(weights)], 1)
        row_slots = self.spread(slots, handle, rows.shape[0])
        k = ids.shape[1]
        local_ids = row_slots[:, :k] - self.rank * self.local_experts
        local_ids = local_ids.masked_fill((local_ids < 0) | (local_ids >= self.local_experts), -1)
        local_ids[sum(back) :] = -1
        row_weights = _from_int32(row_slots[:, k:], weights.dtype)
        return rows, local_ids, row_weights, handle

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        sent, _, splits = handle
        out, back = self._splits(splits)
        rows = values.new_empty((n_rows, values.shape[1]))
        dist.all_to_all_single(_without_graph(rows)[: sum(back)], values[sent], back, out, group=self._group)
        return rows

    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        wide = self._return(rows, handle, init)
        return wide, None if narrow is None else self._return(narrow, handle, None)

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int:
        """The number of live slots, rounded up to `ALIGNMENT`."""
        return aligned(host_int(handle[2][-1]))

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int | None, Handle]:
        """R and S are known only on the device."""
        sent = torch.empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int32, device=device)
        places = torch.empty((tokens, self.size), dtype=torch.int32, device=device)
        return None, [sent, places, torch.empty(2 * self.size + 1, dtype=torch.int64, device="cpu")]

    def _return(self, rows: Tensor, handle: Sequence[Tensor], init: Tensor | None) -> Tensor:
        _, places, splits = handle
        out, back = self._splits(splits)
        returned = rows.new_empty((sum(out), rows.shape[1]))
        dist.all_to_all_single(returned, _without_graph(rows)[: sum(back)].contiguous(), out, back, group=self._group)
        return combine_rows(returned, places, init=init)

    def _splits(self, splits: Tensor) -> tuple[list[int], list[int]]:
        """Rows sent to each rank, and rows received from each."""
        numbers = splits.tolist()
        return numbers[: self.size], numbers[self.size : 2 * self.size]


def _destinations(ids: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """(sends [T, P] bool, slots [P] int64): the ranks to which each token goes, and how many live slots each rank gets.

    K comparisons instead of a scatter: no atomics, no host synchronization. Ids outside [0, E) go nowhere.
    """
    owner = torch.where((ids >= 0) & (ids < num_experts), ids // (num_experts // ranks), -1)
    at = owner.unsqueeze(2) == torch.arange(ranks, device=ids.device)
    return at.any(1), at.sum((0, 1))


def _order_by_rank(sends: Tensor, n_sent: int) -> tuple[Tensor, Tensor]:
    """`sent` and `places` of an `NcclDispatcher` handle, computed on the device from sends [T, P] and the number S."""
    tokens, ranks = sends.shape
    flat = sends.t().reshape(-1)
    place = flat.cumsum(0, dtype=torch.int32) - 1
    token = torch.arange(tokens, device=sends.device, dtype=torch.int32).repeat(ranks)
    # Entries that go nowhere all write to one extra element at the end.
    sent = token.new_empty(n_sent + 1).scatter_(0, torch.where(flat, place, n_sent).long(), token)[:n_sent]
    return sent, place.masked_fill(~flat, -1).view(ranks, tokens).t().contiguous()


def _without_graph(rows: Tensor) -> Tensor:
    """`rows` for a collective, whose work may outlive it: gloo's thread drops it some time after the host has waited for it.

    Inside an operation of torch.library a slice still has its tensor as base, and with it the graph and the handles there.
    """
    return rows.detach()


def _as_int32(weights: Tensor) -> Tensor:
    """Weights [T, K] as int32 words beside the ids, bit for bit."""
    if weights.element_size() < 4:
        weights = weights.float()
    # Flat: a dimension of one element may have any stride, which a view to other words would refuse.
    words = weights.detach().reshape(-1).view(torch.int32)
    return words.view(weights.shape[0], weights.shape[1] * weights.element_size() // words.element_size())


def _from_int32(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_as_int32`: [R, K] in `dtype`, new memory."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # Not `contiguous`: no rows are contiguous wherever they begin, and an odd word is none of fp64's.
    return words.clone(memory_format=torch.contiguous_format).view(wide).to(dtype)


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
        TypeError: arguments of other types or dtypes.
    """
    check_routed(x, ids, weights)
    if not isinstance(dispatcher, TokenDispatcher):
        raise TypeError(f"dispatcher must be a TokenDispatcher, got {type(dispatcher).__name__}; see make_dispatcher")
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

    Raises:
        ValueError: with one rank, another number of rows than were dispatched.
        TypeError: a handle that is not of `dispatch`.
    """
    if not isinstance(handle, DispatchHandle):
        raise TypeError(f"handle must be the `handle` of what dispatch returned, got {type(handle).__name__}")
    if handle.dispatcher.size == 1:
        if rows.shape[0] != handle.n_tokens:
            raise ValueError(
                f"combine takes a row for each of the {handle.n_tokens} dispatched ones, got {rows.shape[0]}"
            )
        return rows if init is None else init + rows
    return combine_op(rows, init, handle.tensors, handle.n_tokens, handle.dispatcher)


# The operations have fake implementations and autograd: a checkpoint policy can name them, and a trace needs no device. The
# gradient of `forebay::dispatch` is `forebay::collect`, that of `forebay::combine` is `forebay::spread`.


@torch.library.custom_op("forebay::dispatch", mutates_args=())
def dispatch_op(
    x: Tensor, ids: Tensor, weights: Tensor, dispatcher: TokenDispatcher
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """See `TokenDispatcher.dispatch`."""
    return dispatcher.dispatch(x, ids, weights)


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

    residual: Tensor | None
    """[T, H], x plus the shared experts' output; the routed experts' output is added to it. None where a stage 5 follows."""
    rows: Tensor
    """[T, H], the normed hidden states."""
    ids: Tensor
    """[T, K] integer, in [0, E) over all ranks."""
    weights: Tensor
    """[T, K] floating."""
    logits: Tensor
    """[T, E], for losses on the router."""
    held: tuple[Tensor, ...] = ()
    """Tensors that stage 5 reads besides the experts' sums."""
    rest: Any = None
    """All else that it reads: in which structure the tensors are, and values such as shapes."""


@dataclass(frozen=True, eq=False)
class MoeStages:
    """The MoE sublayer of one decoder layer in stages, so that communication can overlap with other work.

        1  front      norm, router, and shared experts if the family calls them before its experts, else they are in stage 5
        2  dispatch   tokens to the ranks of their experts
        3  experts    this rank's experts on the received rows, weighted and summed per row
        4  combine    sums back to their tokens, added to the residual in the same pass
        5  back       only where the sums are not just added: they are scaled, normed or mixed with residual streams first

    Stages 1, 3 and 5 are plain functions of tensors, which may be compiled or run under saved-tensor hooks. Stages 2 and 4 save
    nothing but the handle. Calling this runs the stages in sequence; `forebay.pipeline.runtime` interleaves them with another
    microbatch's. The caller owns the dispatcher.

    Attributes:
        front: (x [B, S, H], what else the layer gives it) -> `Front`.
        experts: (rows [R, H], ids [R, K], weights [R, K], max_rows) -> [R, H]; see `forebay.moe.experts.experts`.
        dispatcher: moves tokens between ranks.
        back: (`Front.rest`, sums [T, H], *`Front.held`) -> hidden states; None where the sums are just added.
    """

    front: Callable[..., Front]
    experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
    dispatcher: TokenDispatcher
    back: Callable[..., Tensor] | None = None

    def __call__(self, x: Tensor, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden states like x, router logits [T, E], ids [T, K])."""
        residual, rows, ids, weights, logits, held, rest = self.front(x, **given)
        sent = dispatch(rows, ids, weights, self.dispatcher)
        y_rows = self.experts(sent.rows, sent.ids, sent.weights, sent.max_rows)
        y = combine(y_rows, sent.handle, residual)
        if self.back is not None:
            return self.back(rest, y, *held), logits, ids
        # Not a view for autograd, like the layer's own sum: FSDP2 hooks layers' outputs and warns about views.
        return torch.ops.aten._unsafe_view(y, x.shape), logits, ids
