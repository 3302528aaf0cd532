"""HostStore: moves saved tensors to host memory and back, and measures the traffic.

Input: the uint8 view of a device storage. Output: a `Ticket`, which the autograd graph owns; when it dies, its block returns to
the `HostPool`. The store owns the streams (`CopyLanes`) and the pool, and no ticket: it has weak references only, and a ticket
may die at any time and in any thread, also within a call of the store. On a CPU a copy is complete when `send` returns.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from forebay.kernels.launch import memory_rate
from forebay.memory.copy_lanes import Copy, CopyDone, CopyLanes, on_stream
from forebay.memory.host_pool import HostPool
from forebay.memory.host_ticket import Ticket, TicketState
from forebay.memory.locked import locked

_KEPT_COPIES = 4096  # the last copies of each direction, whose rate is measured
_SWEEP_TICKETS = 256  # references to dead tickets that a store may keep, beside as many as are alive


@dataclass(eq=False)
class Traffic:
    """Copies in one direction since `reset_stats`.

    Attributes:
        nbytes: of the storages that were copied; `copied`: the bytes that this took, fewer if they are compressed.
        copies: the storages' bytes, and the end of their copy.
    """

    nbytes: int = 0
    copied: int = 0
    copies: deque[tuple[int, CopyDone]] = field(default_factory=lambda: deque(maxlen=_KEPT_COPIES))

    def add(self, nbytes: int, copied: int, done: CopyDone) -> None:
        self.nbytes += nbytes
        self.copied += copied
        self.copies.append((nbytes, done))

    def reset_stats(self) -> None:
        self.nbytes = self.copied = 0
        self.copies.clear()

    def measure(self) -> tuple[int, float | None]:
        """(bytes copied, bytes a second while copying). Waits for the copies."""
        rate = self.rate(slice(None))
        return self.copied, rate and rate * self.copied / self.nbytes

    def rate(self, which: slice) -> float | None:
        """Bytes of storages a second of a part of the copies, in their order; None on a CPU, or if none was timed.

        Plans count the bytes of storages: compressed, they fit on the link at a higher rate.
        """
        timed, milliseconds = 0, 0.0
        for size, done in list(self.copies)[which]:
            taken = done.milliseconds()
            if taken is not None:
                timed, milliseconds = timed + size, milliseconds + taken
        return timed / milliseconds * 1e3 if milliseconds else None


class HostStore:
    """Offloaded bytes of one device. Owns its streams and its pool; the graph owns the tickets, which the store knows weakly.

    Streams are ordered by CUDA events, without ``record_stream``:

    * A copy out waits for the compute stream as of `send`, for the other streams that use the storage, and for the last copies
      that read from its blocks.
    * `release` makes the compute stream wait for the copy out and drops the device memory. What compute allocates there
      afterwards is enqueued after that wait.
    * `fetch` allocates on the compute stream, and the copy back waits for the compute stream as of then.
    * `wait` makes the compute stream, and the current one if it is another, wait for the copy back.
    * Before a device block returns to its allocator, the streams that may get it next wait for each copy that uses it
      (`guard_block` of its held bytes).
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.lanes = CopyLanes(device)
        self.pool = HostPool(pin=device.type == "cuda")
        self.outbound = Traffic()
        self.inbound = Traffic()
        self._closed = False
        self._lock = threading.RLock()  # of states of tickets and the pool; a ticket's death does not take it
        # Not a WeakSet: it hashes each ticket and calls back when it dies, thousands of times a step.
        self._tickets: list[weakref.ref[Ticket]] = []
        self._sweep_at = _SWEEP_TICKETS

    @cached_property
    def memory_rate(self) -> float:
        """Bytes a second of the device's own memory, which copies read and write too."""
        return memory_rate(self.device)

    def new_ticket(self, device_bytes: torch.Tensor, compute: Any, rounds: bool = False) -> Ticket:
        """A ticket for the bytes of a storage (uint8, on the device), which stay there until `send`.

        Args:
            compute: the stream that made the bytes and reads them again; None on a CPU.
            rounds: compress them on their way; see `forebay.memory.storage.holds_rows`.
        """
        other = self.lanes.other_stream(compute)
        others = () if other is None else (other,)
        ticket = Ticket(self.pool, device_bytes.numel(), device_bytes, compute, rounds, others)
        self._tickets.append(weakref.ref(ticket))
        if len(self._tickets) >= self._sweep_at:
            self._tickets = [ref for ref in self._tickets if ref() is not None]
            self._sweep_at = 2 * len(self._tickets) + _SWEEP_TICKETS
        return ticket

    @property
    def live_tickets(self) -> int:
        return len(self._live())

    @property
    def live_bytes(self) -> int:
        """Bytes of the live tickets' storages, wherever they are."""
        return sum(ticket.nbytes for ticket in self._live())

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that live tickets have now."""
        return sum(held.numel() for ticket in self._live() if (held := ticket.device_bytes) is not None)

    def _live(self) -> list[Ticket]:
        return [ticket for ref in self._tickets if (ticket := ref()) is not None]

    def may_stand_for(self, ticket: Ticket, storage: torch.UntypedStorage) -> bool:
        """Whether the ticket of a storage that is saved once more, on the current stream, can be that one's ticket too.

        Another stream than the ticket's may still compute with the storage when the caller drops it. The ticket holds it until
        `release`, which waits for that stream; later, nothing would.
        """
        with self._lock:
            if self._note_current_stream(ticket) is None:
                return True
            return ticket.device_bytes is not None and ticket.device_bytes.data_ptr() == storage.data_ptr()

    def _note_current_stream(self, ticket: Ticket) -> Any:
        """The current stream if it is not the ticket's: compute waits for it before it is given the ticket's memory."""
        other = self.lanes.other_stream(ticket.compute)
        if other is not None and other not in ticket.others:
            ticket.others = (*ticket.others, other)
        return other

    @locked
    def send(self, tickets: Sequence[Ticket]) -> None:
        """Enqueue the copies out of the tickets that are unsent. A closed store sends nothing.

        Raises:
            MemoryError: the host has no room.
        """
        if self._closed:
            return
        for ticket in tickets:
            # An engine that gathers weights again before backward emptied the storage: the ticket keeps it, as autograd would.
            if ticket.state is TicketState.UNSENT and ticket.is_emptied:
                ticket.advance(TicketState.ON_DEVICE)
        for compute, unsent in _by_stream(t for t in tickets if t.state is TicketState.UNSENT):
            self._copy_out(unsent, compute)

    def _copy_out(self, unsent: Sequence[Ticket], compute: Any) -> None:
        copies: list[Copy] = []
        after: list[CopyDone] = []
        for ticket in unsent:
            if ticket.rounds:
                ticket.compress()
            assert ticket.device_bytes is not None
            ticket.host_block = ticket.host_block or self.pool.take(ticket.device_bytes.numel())
            copies.append((ticket.device_bytes, ticket.host_block.bytes_))
            if ticket.host_block.last_read is not None:
                after.append(ticket.host_block.last_read)
        others = {other for ticket in unsent for other in ticket.others}
        out = self.lanes.copy_out(copies, compute, after, others)
        for ticket in unsent:
            assert ticket.host_block is not None and ticket.device_bytes is not None
            ticket.host_block.slab.last_written = out
            ticket.out, ticket.address = out, ticket.device_bytes.data_ptr()
            ticket.advance(TicketState.LEAVING)
        self.outbound.add(*_sizes(unsent), out)

    @locked
    def release(self, ticket: Ticket) -> None:
        """Make the compute stream wait for the copy out and drop the device memory. No-op unless leaving."""
        if ticket.state is TicketState.LEAVING:
            assert ticket.device_bytes is not None
            # Trap: a storage that was emptied or moved since `send` stays: the copy may have read other bytes.
            if ticket.is_emptied or ticket.device_bytes.data_ptr() != ticket.address:
                ticket.advance(TicketState.ON_DEVICE)
                return
            ticket.held.guard_block()
            ticket.advance(TicketState.ON_HOST)
            ticket.device_bytes, ticket.others = None, ()

    @locked
    def fetch(self, *batches: Sequence[Ticket]) -> None:
        """Enqueue the copies back of the tickets that are on the host. Each batch has one end of its own; a ticket in two batches
        comes back with the first."""
        wanted: dict[Any, list[list[Ticket]]] = {}
        met: set[int] = set()
        for batch in batches:
            # One that is still leaving has its bytes on the device: fetched, it would overtake its own copy out.
            own = [t for t in batch if t.state is TicketState.ON_HOST and id(t) not in met]
            met.update(map(id, own))
            for compute, tickets in _by_stream(own):
                wanted.setdefault(compute, []).append(tickets)
        for compute, groups in wanted.items():
            self._copy_back(groups, compute)

    def _copy_back(self, groups: Sequence[Sequence[Ticket]], compute: Any) -> None:
        with on_stream(compute):
            copies = [[self._allocate_target(ticket) for ticket in tickets] for tickets in groups]
        for tickets, back in zip(groups, self.lanes.copy_back(copies, compute), strict=True):
            for ticket in tickets:
                block = ticket.host_block
                assert block is not None
                ticket.back = block.last_read = block.slab.last_read = back
                ticket.advance(TicketState.RETURNING)
            self.inbound.add(*_sizes(tickets), back)

    def _allocate_target(self, ticket: Ticket) -> Copy:
        assert ticket.host_block is not None
        ticket.device_bytes = torch.empty(ticket.host_bytes, dtype=torch.uint8, device=self.device)
        return ticket.host_block.bytes_, ticket.device_bytes

    def wait(self, ticket: Ticket) -> torch.Tensor:
        """The uint8 device tensor, safe to use on the compute stream and the current one; fetched now if it was not before. May
        be called any number of times.

        Raises:
            RuntimeError: the storage was emptied while autograd had it saved, and was not filled again.
        """
        if ticket.state is not TicketState.ON_DEVICE or self.lanes.other_stream(ticket.compute) is not None:
            self.recall(ticket)
        if ticket.rounds:
            self._expand(ticket)
        assert ticket.device_bytes is not None
        if ticket.back is None and ticket.is_emptied:
            raise RuntimeError(
                f"a saved storage of {ticket.nbytes} bytes now has {ticket.device_bytes.untyped_storage().nbytes()}: it was "
                "resized after the forward pass and not filled again before its backward. An engine that frees weights "
                "(FSDP) must gather them before backward reads them; keep the region instead of offloading it"
            )
        return ticket.device_bytes

    @locked
    def recall(self, ticket: Ticket) -> None:
        """Do what `wait` does, ahead of the time at which the bytes are needed: the storage may still be empty."""
        if ticket.state is not TicketState.ON_DEVICE:
            if ticket.state is TicketState.ON_HOST:
                self.fetch((ticket,))
            if ticket.state is TicketState.RETURNING:
                assert ticket.back is not None
                ticket.back.block(ticket.compute)
            # From LEAVING too: its copy out goes on and writes a block that is never read; the block's next writer comes after it
            # on the same stream.
            ticket.advance(TicketState.ON_DEVICE)
        other = self._note_current_stream(ticket)
        if other is not None and ticket.back is not None:
            ticket.back.block(other)

    @locked
    def _expand(self, ticket: Ticket) -> None:
        """Expand a compressed ticket on its compute stream, for the current one."""
        if ticket.compressed:
            ticket.expand()
        other = self.lanes.other_stream(ticket.compute)
        if other is not None:
            other.wait_stream(ticket.compute)

    @locked
    def reset_stats(self) -> None:
        """Start anew to count traffic, and which slabs of host memory are used."""
        self.outbound.reset_stats()
        self.inbound.reset_stats()
        self.pool.reset_stats()

    @locked
    def synchronize(self) -> None:
        """Wait on the host for all copies. Call it before and after the capture of a CUDA graph: no stream waits any more for a
        copy from before this call, and a CUDA event must not pass between inside and outside."""
        self.lanes.synchronize()

    @locked
    def trim(self) -> None:
        """Free the host slabs that no ticket has used since `reset_stats`."""
        self.lanes.synchronize()
        self.pool.trim()

    @locked
    def close(self) -> None:
        """Free the host memory. Tickets that a graph still owns stay valid and free theirs when they die."""
        self._closed = True
        self.lanes.synchronize()
        self.pool.close()


def _sizes(tickets: Sequence[Ticket]) -> tuple[int, int]:
    """Bytes of the tickets' storages, and on the host."""
    return sum(ticket.nbytes for ticket in tickets), sum(ticket.host_bytes for ticket in tickets)


def _by_stream(tickets: Iterable[Ticket]) -> Iterable[tuple[Any, list[Ticket]]]:
    """Tickets by compute stream: one, unless regions run on several."""
    groups: dict[Any, list[Ticket]] = {}
    for ticket in tickets:
        groups.setdefault(ticket.compute, []).append(ticket)
    return groups.items()
