"""Token dispatchers: how rows travel between the ranks of an expert-parallel group.

P ranks hold E experts, rank p the experts [p * E/P, (p+1) * E/P). Input: each rank's tokens x [T, H] (T may differ, and be 0)
with ids and weights [T, K]. `dispatch` sends each token once to every rank that holds one of its experts, and `collect`
returns the sums. This module has the interface, the dispatcher of a single rank and the one over a process group's
all-to-all; `forebay.moe.symmetric` and `forebay.moe.deepep` have the others. The caller owns a handle, in training the
autograd graph. A dispatcher owns what lasts: the process group and buffers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase
from torch.multiprocessing.reductions import StorageWeakRef

from forebay.kernels.permute import combine_rows

Handle = list[Tensor]
"""What `spread` and `collect` need to know of a `dispatch`: an ordinary output of `forebay::dispatch`."""

ALIGNMENT = 256
"""Receiving buffers are rounded up to this many rows where the host knows their number, so that the caching allocator finds
blocks of the same sizes again instead of splitting others (H = 2048 in bf16: 1 MiB)."""


class TokenDispatcher(OpaqueBase):
    """The interface of the backends. An opaque argument of the operations: torch passes it on and never looks inside.

    All operations are collective: every rank of the group runs them in the same order, on streams that are ordered among
    themselves. `combine` is `collect`; the gradient of combine is `spread`, the gradient of dispatch is `collect`.

    Received rows are ordered by sending rank, then by token. Ids of other ranks' experts become -1, and so do all ids of the
    unused rows at the end. Those rows and their weights may be uninitialized memory, which nothing may read.

    A dispatcher with a *capacity* bounds what a rank receives. It drops the rows above it and sets a flag on the device; the
    caller of `lost_flag` can repeat the work within `exactly` (`forebay.train.capacity_retry`).

    Attributes:
        rank, size: this process in the group, and the group's P.
        num_experts: E, over all ranks.

    Raises:
        ValueError: E is no multiple of P.
    """

    rank: int
    size: int
    num_experts: int

    def __init__(self, rank: int, size: int, num_experts: int):
        if num_experts % size:
            raise ValueError(
                f"{num_experts} experts cannot be divided evenly among {size} ranks; valid expert-parallel sizes are "
                f"{', '.join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)}"
            )
        self.rank, self.size, self.num_experts = rank, size, num_experts
        self._handles: list[StorageWeakRef] = []

    def __deepcopy__(self, _: Any) -> TokenDispatcher:
        """Not copied: torch.compile copies its graphs, and a process group exists once."""
        return self

    @property
    def local_experts(self) -> int:
        """E / P."""
        return self.num_experts // self.size

    @property
    def live_handles(self) -> int:
        """Number of this dispatcher's handles that are alive anywhere."""
        self._handles = [h for h in self._handles if not h.expired()]
        return len(self._handles)

    def watch(self, handle: Handle) -> None:
        """Count `handle` as live until its memory is freed. Holds a weak reference."""
        if len(self._handles) >= 1024:
            self._handles = [h for h in self._handles if not h.expired()]
        self._handles.append(StorageWeakRef(handle[0].untyped_storage()))

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

    def clear_lost(self) -> None:
        """Reset `lost_flag` and `suggested_factor`. The host does not wait.

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


# `typ="reference"`: an object with identity, never specialized on.
register_opaque_type(TokenDispatcher, typ="reference")


def host_int(number: Tensor) -> int:
    """The value of a one-element CPU tensor; in a trace a symbol, which `int` would reject."""
    found: Any = number.item()
    return found


def aligned(rows: int) -> int:
    """`rows` rounded up to `ALIGNMENT`."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


class LocalDispatcher(TokenDispatcher):
    """One rank with all E experts: its methods return their arguments, and its handles are empty.

    An operation of torch.library may not return its arguments, so `forebay.moe.dispatch_op` skips its operations for one rank.
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

    def watch(self, handle: Handle) -> None:
        """A handle has no tensors."""


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
        sends, per_rank = destinations(ids, self.num_experts, self.size)
        counts = torch.stack([sends.sum(0), per_rank], 1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        # The only host synchronization of the layer.
        splits = torch.cat([counts[:, 0], received[:, 0], received[:, 1].sum(0, keepdim=True)]).cpu()
        out, back = self._splits(splits)
        sent, places = order_by_rank(sends, sum(out))
        handle = [sent, places, splits]
        rows = self.spread(x, handle, aligned(sum(back)))
        slots = torch.cat([ids.to(torch.int32), _as_int32(weights)], 1)
        row_slots = self.spread(slots, handle, rows.shape[0])
        k = ids.shape[1]
        local_ids = _local_ids(row_slots[:, :k], self.rank * self.local_experts, self.local_experts, sum(back))
        row_weights = _from_int32(row_slots[:, k:], weights.dtype)
        return rows, local_ids, row_weights, handle

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        sent, _, splits = handle
        out, back = self._splits(splits)
        rows = values.new_empty((n_rows, values.shape[1]))
        dist.all_to_all_single(rows[: sum(back)], values[sent], back, out, group=self._group)
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
        return None, [sent, places, torch.empty(2 * self.size + 1, dtype=torch.int64)]

    def _return(self, rows: Tensor, handle: Sequence[Tensor], init: Tensor | None) -> Tensor:
        _, places, splits = handle
        out, back = self._splits(splits)
        returned = rows.new_empty((sum(out), rows.shape[1]))
        dist.all_to_all_single(returned, rows[: sum(back)].contiguous(), out, back, group=self._group)
        return combine_rows(returned, places, init=init)

    def _splits(self, splits: Tensor) -> tuple[list[int], list[int]]:
        """Rows sent to each rank, and rows received from each."""
        numbers = splits.tolist()
        return numbers[: self.size], numbers[self.size : 2 * self.size]


def destinations(ids: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """(sends [T, P] bool, slots [P] int64): the ranks to which each token goes, and how many live slots each rank gets.

    K comparisons instead of a scatter: no atomics, no host synchronization. Ids outside [0, E) go nowhere.
    """
    owner = torch.where((ids >= 0) & (ids < num_experts), ids // (num_experts // ranks), -1)
    at = owner.unsqueeze(2) == torch.arange(ranks, device=ids.device)
    return at.any(1), at.sum((0, 1))


def order_by_rank(sends: Tensor, n_sent: int) -> tuple[Tensor, Tensor]:
    """`sent` and `places` of an `NcclDispatcher` handle, computed on the device from sends [T, P] and the number S."""
    tokens, ranks = sends.shape
    flat = sends.t().reshape(-1)
    place = flat.cumsum(0, dtype=torch.int32) - 1
    token = torch.arange(tokens, device=sends.device, dtype=torch.int32).repeat(ranks)
    # Entries that go nowhere all write to one extra element at the end.
    sent = token.new_empty(n_sent + 1).scatter_(0, torch.where(flat, place, n_sent).long(), token)[:n_sent]
    return sent, place.masked_fill(~flat, -1).view(ranks, tokens).t().contiguous()


def _local_ids(ids: Tensor, first: int, count: int, n_live: int) -> Tensor:
    local = ids - first
    local = local.masked_fill((local < 0) | (local >= count), -1)
    local[n_live:] = -1
    return local


def _as_int32(weights: Tensor) -> Tensor:
    """Weights [T, K] as int32 words beside the ids, bit for bit."""
    if weights.element_size() < 4:
        weights = weights.float()
    return weights.detach().contiguous().view(torch.int32)


def _from_int32(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_as_int32`: [R, K] in `dtype`, new memory."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return words.contiguous().view(wide).to(dtype)
