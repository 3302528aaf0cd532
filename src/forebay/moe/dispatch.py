"""Token dispatchers: how rows travel between the ranks of an expert-parallel group, and which one to use.

P ranks hold E experts, rank p the experts [p * E/P, (p+1) * E/P). `dispatch` sends each token once to every rank that
holds one of its experts, `collect` returns the sums. A handle is a list of tensors that the autograd graph owns; a
dispatcher keeps none. This module has the contract, the dispatcher of a single rank and the one over a process
group's all-to-all; `forebay.moe.symmetric` and `forebay.moe.deepep` have the others.
"""

from __future__ import annotations

import os
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

# The contract of an exchange: how rows of one expert-parallel group travel, and what a handle is.
#
# P ranks hold E experts, rank p the experts [p * E/P, (p+1) * E/P). Each rank has tokens of its own, T of them (T may differ
# from rank to rank, and be 0), with K chosen experts each. A token goes once to every rank that holds at least one of its
# experts, however many it holds there.
#
#     dispatch   x [T, H], ids, weights [T, K]   ->  rows [R, H], ids [R, K] of the receiving rank, weights [R, K], handle
#     collect    rows [R, H] (, narrow [R, K])   ->  the sum over ranks of each token's rows, [T, H] (, [T, K])
#     spread     values [T, H], handle           ->  rows [R, H], by the same way as in dispatch
#
# `combine` is collect; the gradient of combine is spread, the gradient of dispatch is collect. Sums run in the order of ranks,
# in fp32 (fp64 for fp64), and are rounded once.
#
# Received rows are ordered by sending rank, then by token. Slots that name another rank's experts, and all slots of the rows
# that only fill R up, carry the id -1; such rows may be uninitialised memory, their weights too. Nothing may read them.
#
# A *handle* is a list of tensors. It is an ordinary output of `forebay::dispatch` and owned by whoever holds it, in training
# the autograd graph. An exchange keeps none. `live_handles` counts those that are still alive anywhere, by weak references.
#
# An exchange owns what lasts: the group and, where a backend has them, buffers on all ranks. All of its operations are
# collective: every rank of the group runs them in the same order, on streams that are ordered among themselves.
#
# An exchange with a *capacity*, a bound on what a rank receives, leaves out what goes over it and says so in a flag on the
# device. Whoever reads the flag can do the same again without the bound (`forebay.train.capacity_retry` does so with a step):
#
#     lost_flag()     > 0: rows were left out
#     clear_lost()    forget it
#     exactly()       a context within which nothing is left out, and the host waits once a dispatch instead
#
# Those without one have no flag, and `exactly` changes nothing.

Handle = list[Tensor]
ALIGNMENT = 256
"""Rows of a receiving buffer are rounded up to this where their number is known on the host, so that the allocator meets the
same sizes again: a step's blocks are then found instead of split (H = 2048 in bf16: 1 MiB)."""


class TokenDispatcher(OpaqueBase):
    """What backends have in common. An opaque argument of the operations: torch passes it on and never looks inside.

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
        """Itself: torch.compile copies its graphs, and a process group exists once."""
        return self

    @property
    def local_experts(self) -> int:
        """E / P."""
        return self.num_experts // self.size

    @property
    def live_handles(self) -> int:
        """Handles of this exchange that something still holds."""
        self._handles = [h for h in self._handles if not h.expired()]
        return len(self._handles)

    def watch(self, handle: Handle) -> None:
        """Count `handle` among the live ones until its memory is gone."""
        if len(self._handles) >= 1024:
            self._handles = [h for h in self._handles if not h.expired()]
        self._handles.append(StorageWeakRef(handle[0].untyped_storage()))

    @abstractmethod
    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """(rows [R, H], ids [R, K] int32 local to this rank, weights [R, K], handle); all new memory."""

    @abstractmethod
    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        """[n_rows, H]: `values` [T, H] along the way of the handle; rows behind the last one received are undefined."""

    @abstractmethod
    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(init + sum over ranks of rows [R, H], the same of narrow [R, K]): new tensors [T, H] and [T, K]."""

    @abstractmethod
    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int | None:
        """How many (row, expert) pairs this rank computes at most; None for every slot. No host synchronisation."""

    @abstractmethod
    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int | None, Handle]:
        """R, or None if only the device knows it, and empty tensors with a handle's shapes and dtypes."""

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Within, nothing is left out. Enter it on all ranks, and run backward within too where forward was.

        A graph that was compiled or captured outside has the capacity's shapes: do not run it within.
        """
        yield

    def lost_flag(self) -> Tensor | None:
        """int64 [1] on the device, > 0 if rows were left out since `clear_lost`: on every rank of the group, if on any, as soon
        as the ranks have met in another operation. None where none ever are. The host does not wait."""
        return None

    def clear_lost(self) -> None:
        """Forget what was left out and what was needed. The host does not wait.

        All ranks do so between the same two operations, and after a rank has heard of the others that theirs are done.
        """

    def suggested_factor(self) -> float | None:
        """The smallest capacity factor, in hundredths, that would have been enough since `clear_lost`, for all ranks that this
        one knows of; None without a capacity, and if nothing was dispatched. Waits for the device."""
        return None

    def check(self) -> None:
        """Raise RuntimeError if rows went lost since the last call (a capacity was too small). Waits for the device."""

    def close(self) -> None:
        """Give back what the exchange owns. Operations after it are an error."""


# `typ="reference"`: an object with identity, never specialised on.
register_opaque_type(TokenDispatcher, typ="reference")


def host_int(number: Tensor) -> int:
    """The number of a CPU tensor of one element; in a trace a symbol, which `int` would refuse."""
    found: Any = number.item()
    return found


def aligned(rows: int) -> int:
    """`rows` rounded up to `ALIGNMENT`."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


# The exchange of one rank: nothing travels, and nothing is copied.
#
# Rows are the tokens themselves: what the methods return are their arguments. An operation of torch.library may not do that, so
# `forebay.moe.dispatch_op` goes around its operations for one rank; callers need not ask how many ranks there are.


class LocalDispatcher(TokenDispatcher):
    """One rank with all E experts. Its handles are empty lists."""

    def __init__(self, num_experts: int):
        super().__init__(0, 1, num_experts)

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """The arguments."""
        return x, ids, weights, []

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        """The values."""
        return values

    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The rows, on top of `init`."""
        return rows if init is None else init + rows, narrow

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int | None:
        """None: every slot is this rank's."""
        return None

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int | None, Handle]:
        """As many rows as tokens."""
        return tokens, []

    def watch(self, handle: Handle) -> None:
        """There is nothing to watch."""


# The exchange over a process group's all-to-all: NCCL on GPUs, gloo on CPUs.
#
#     ids -> who goes where (on the device) -> counts to all ranks -> ONE copy to the host -> rows, and slots beside them
#
# The host has to know the splits, because the collective takes them as integers: that copy is the one host synchronisation of a
# layer, forward and backward together. The handle carries the splits on, as a tensor on the CPU.
#
# Handle, with S rows sent:
#
#     sent [S] int32          token of each row sent, ordered by receiving rank, then by token
#     places [T, P] int32     row in `sent` of token t for rank p; -1 if it does not go there
#     splits [2P + 1] int64   on the CPU: rows sent to each rank, rows received from each, live slots received
#
# Bytes on the wire, each way: 2H a row in bf16, and 4K + (2 or 4)K for its slots; at H = 2048, K = 8 that is 4096 + 64.


class NcclDispatcher(TokenDispatcher):
    """Dispatch by `all_to_all_single` with exact splits.

    Args:
        group: the expert-parallel process group; NCCL or gloo. Ids of its ranks are group ranks.
        num_experts: E, a multiple of the group's size.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int):
        super().__init__(group.rank(), group.size(), num_experts)
        self._group: Any = group

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """See `TokenDispatcher.dispatch`."""
        goes, per_rank = who_goes(ids, self.num_experts, self.size)
        counts = torch.stack([goes.sum(0), per_rank], 1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        # The one host synchronisation of the layer.
        splits = torch.cat([counts[:, 0], received[:, 0], received[:, 1].sum(0, keepdim=True)]).cpu()
        out, back = self._splits(splits)
        sent, places = order_by_rank(goes, sum(out))
        handle = [sent, places, splits]
        rows = self.spread(x, handle, aligned(sum(back)))
        slots = torch.cat([ids.to(torch.int32), _as_int32(weights)], 1)
        row_slots = self.spread(slots, handle, rows.shape[0])
        k = ids.shape[1]
        local_ids = _local_ids(row_slots[:, :k], self.rank * self.local_experts, self.local_experts, sum(back))
        row_weights = _from_int32(row_slots[:, k:], weights.dtype)
        return rows, local_ids, row_weights, handle

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        """See `TokenDispatcher.spread`."""
        sent, _, splits = handle
        out, back = self._splits(splits)
        rows = values.new_empty((n_rows, values.shape[1]))
        dist.all_to_all_single(rows[: sum(back)], values[sent], back, out, group=self._group)
        return rows

    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `TokenDispatcher.collect`."""
        wide = self._return(rows, handle, init)
        return wide, None if narrow is None else self._return(narrow, handle, None)

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int:
        """The exact number of live slots, rounded up to `ALIGNMENT`."""
        return aligned(host_int(handle[2][-1]))

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int | None, Handle]:
        """See `TokenDispatcher.fake_handle`; R and S are known on the device only."""
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


def who_goes(ids: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """(goes [T, P] bool, slots [P] int64): which ranks each token goes to, and how many live slots each rank gets.

    K comparisons instead of a scatter: no atomics, no host synchronisation. Ids outside [0, E) go nowhere.
    """
    owner = torch.where((ids >= 0) & (ids < num_experts), ids // (num_experts // ranks), -1)
    at = owner.unsqueeze(2) == torch.arange(ranks, device=ids.device)
    return at.any(1), at.sum((0, 1))


def order_by_rank(goes: Tensor, n_sent: int) -> tuple[Tensor, Tensor]:
    """(sent [S] int32, places [T, P] int32) of the module docstring, on the device; S is known to the caller."""
    tokens, ranks = goes.shape
    flat = goes.t().reshape(-1)
    place = flat.cumsum(0, dtype=torch.int32) - 1
    token = torch.arange(tokens, device=goes.device, dtype=torch.int32).repeat(ranks)
    # Entries that go nowhere all write into one spare element behind the last.
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


# An exchange by name, or the fastest one that works here.
#
# In: a backend's name, the expert-parallel process group and the shapes of a layer. Out: an `TokenDispatcher`, which the caller
# closes. Backends are imported when they are chosen: none of them is needed for another one.

BACKENDS = ("auto", "nccl", "symmetric", "deepep")
_SYMMETRIC_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def make_dispatcher(
    backend: str,
    group: dist.ProcessGroup | None,
    num_experts: int,
    *,
    tokens: int,
    hidden: int,
    slots_per_token: int,
    dtype: torch.dtype,
    capacity_factor: float | None = None,
    programs: int | None = None,
) -> TokenDispatcher:
    """The exchange of a group. Collective: all ranks of the group call it with the same arguments.

    Args:
        backend: "nccl" (gloo on CPUs), "symmetric", "deepep", or "auto": symmetric where the group's GPUs can read each other's
            memory, else nccl.
        group: None, or a group of one rank, gives the exchange in which nothing travels.
        num_experts: E, over all ranks.
        tokens: T, the most that a rank sends at once.
        hidden, slots_per_token, dtype: H, K, and the rows' dtype.
        capacity_factor: for "symmetric": receive up to this times the even load, without any host synchronisation; None for
            exact sizes, with one a layer.
        programs: for "symmetric": see `forebay.moe.symmetric.SymmetricDispatcher`.

    Raises:
        ValueError: an unknown backend, a capacity factor below 1, experts that the ranks do not divide, shapes that the
            backend cannot take.
        RuntimeError: the backend is not to be had here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"dispatch backend {backend!r} is unknown; valid are {', '.join(BACKENDS)}")
    if capacity_factor is not None and not capacity_factor >= 1:
        raise ValueError(
            f"capacity_factor must be at least 1 (an even load), or None for exact sizes; got {capacity_factor}"
        )
    if group is None or group.size() == 1:
        return LocalDispatcher(num_experts)
    if backend == "auto":
        fits = dtype in _SYMMETRIC_DTYPES and hidden * dtype.itemsize % 16 == 0
        backend = "symmetric" if fits and _peers_are_reachable(group) else "nccl"
    if backend == "symmetric":
        from forebay.moe.symmetric import SymmetricDispatcher

        return SymmetricDispatcher(
            group,
            num_experts,
            tokens=tokens,
            hidden=hidden,
            slots_per_token=slots_per_token,
            dtype=dtype,
            capacity_factor=capacity_factor or 1.0,
            exact=capacity_factor is None,
        )
    if backend == "deepep":
        from forebay.moe.deepep import DeepEpDispatcher

        return DeepEpDispatcher(group, num_experts, hidden=hidden, dtype=dtype)
    pass

    return NcclDispatcher(group, num_experts)


def _peers_are_reachable(group: dist.ProcessGroup) -> bool:
    """Whether all ranks have a GPU each in one machine, and each can read the others'. Collective."""
    if not torch.cuda.is_available() or "cuda:nccl" not in dist.get_backend_config(group):
        return False
    own = torch.cuda.current_device()
    seen: list[tuple[str, int] | None] = [None] * group.size()
    dist.all_gather_object(seen, (os.uname().nodename, own), group=group)
    hosts, devices = {s[0] for s in seen if s}, [s[1] for s in seen if s]
    fine = len(hosts) == 1 and len(set(devices)) == len(devices)
    fine = fine and all(d == own or torch.cuda.can_device_access_peer(own, d) for d in devices)
    answers: list[bool] = [False] * group.size()
    dist.all_gather_object(answers, fine, group=group)
    return all(answers)
