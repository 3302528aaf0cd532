"""The contract of an exchange: how rows of one expert-parallel group travel, and what a handle is.

P ranks hold E experts, rank p the experts [p * E/P, (p+1) * E/P). Each rank has tokens of its own, T of them (T may differ
from rank to rank, and be 0), with K chosen experts each. A token goes once to every rank that holds at least one of its
experts, however many it holds there.

    dispatch   x [T, H], ids, weights [T, K]   ->  rows [R, H], ids [R, K] of the receiving rank, weights [R, K], handle
    collect    rows [R, H] (, narrow [R, K])   ->  the sum over ranks of each token's rows, [T, H] (, [T, K])
    spread     values [T, H], handle           ->  rows [R, H], by the same way as in dispatch

`combine` is collect; the gradient of combine is spread, the gradient of dispatch is collect. Sums run in the order of ranks,
in fp32 (fp64 for fp64), and are rounded once.

Received rows are ordered by sending rank, then by token. Slots that name another rank's experts, and all slots of the rows
that only fill R up, carry the id -1; such rows may be uninitialised memory, their weights too. Nothing may read them.

A *handle* is a list of tensors. It is an ordinary output of `forebay::dispatch` and owned by whoever holds it, in training
the autograd graph. An exchange keeps none. `live_handles` counts those that are still alive anywhere, by weak references.

An exchange owns what lasts: the group and, where a backend has them, buffers on all ranks. All of its operations are
collective: every rank of the group runs them in the same order, on streams that are ordered among themselves.

An exchange with a *capacity*, a bound on what a rank receives, leaves out what goes over it and says so in a flag on the
device. Whoever reads the flag can do the same again without the bound (`forebay.train.rerun` does so with a step):

    lost_flag()     > 0: rows were left out
    clear_lost()    forget it
    exactly()       a context within which nothing is left out, and the host waits once a dispatch instead

Those without one have no flag, and `exactly` changes nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase
from torch.multiprocessing.reductions import StorageWeakRef

Handle = list[Tensor]
ALIGNMENT = 256
"""Rows of a receiving buffer are rounded up to this where their number is known on the host, so that the allocator meets the
same sizes again: a step's blocks are then found instead of split (H = 2048 in bf16: 1 MiB)."""


class Exchange(OpaqueBase):
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

    def __deepcopy__(self, _: Any) -> Exchange:
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
register_opaque_type(Exchange, typ="reference")


def host_int(number: Tensor) -> int:
    """The number of a CPU tensor of one element; in a trace a symbol, which `int` would refuse."""
    found: Any = number.item()
    return found


def aligned(rows: int) -> int:
    """`rows` rounded up to `ALIGNMENT`."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


def check_ids(ids: Tensor, num_experts: int) -> None:
    """Raise ValueError, naming the first, for ids outside [0, E) other than -1. Reads the device: for tests and doubt."""
    bad = (ids < -1) | (ids >= num_experts)
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"ids[{where[0]}, {where[1]}] is {int(ids[tuple(where)])}; valid are 0 to {num_experts - 1}, and -1 for none"
        )
