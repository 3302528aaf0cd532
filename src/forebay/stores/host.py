"""HostStore: saved bytes wait in host memory.

In: the uint8 view of a device storage. Out: a `HostTicket`. On a GPU the host memory is page-locked and the copies run
on two streams of their own; on a CPU it is ordinary memory and a copy is over when `put` returns.

Ordering, without ``record_stream``:

* copy out waits for the compute stream as of `put`, and for the last copy that read from the slot's slab;
* `settle` makes the compute stream wait for the copy out, then drops the device tensor. Whatever compute allocates from
  that memory afterwards is ordered behind the copy, because it is enqueued behind the wait;
* `fetch` allocates on the compute stream, and the copy back waits for what compute was given until then;
* `wait` makes the compute stream wait for the copy back.

A ticket that dies early (a dropped graph, an exception) first makes the compute stream wait for its running copy: the
device block goes back to compute's allocator and could be overwritten under the copy otherwise.
"""

import weakref
from collections import deque
from typing import Any

import torch

from forebay.stores.base import State, Ticket
from forebay.stores.pinned import HostPool, Slot
from forebay.stores.streams import CopyLanes, Done, on_stream


class HostTicket(Ticket):
    """A ticket of `HostStore`. Frees its slot when it dies."""

    __slots__ = ("back", "compute", "out", "slot", "store")

    def __init__(self, store: "HostStore", device_bytes: torch.Tensor, slot: Slot, out: Done, compute: Any):
        super().__init__(device_bytes.numel(), device_bytes, State.LEAVING)
        self.store = store
        self.slot = slot
        self.out = out
        self.back: Done | None = None
        self.compute = compute

    def __del__(self) -> None:
        if self.state is State.LEAVING:
            self.out.block(self.compute)
        elif self.state is State.RETURNING and self.back is not None:
            self.back.block(self.compute)
        self.device_bytes = None
        self.store._release(self)


class Traffic:
    """Copies of one direction since the last `restart`: bytes and the ends of the copies, for bandwidth."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.copies: deque[tuple[int, Done]] = deque(maxlen=4096)

    def add(self, nbytes: int, done: Done) -> None:
        self.nbytes += nbytes
        self.copies.append((nbytes, done))

    def restart(self) -> None:
        """Count from here."""
        self.nbytes = 0
        self.copies.clear()

    def measure(self) -> tuple[int, float | None]:
        """(bytes, bytes a second while copying). The rate is None on a CPU or without copies. Waits for the copies."""
        timed, milliseconds = 0, 0.0
        for size, done in self.copies:
            taken = done.milliseconds()
            if taken is not None:
                timed, milliseconds = timed + size, milliseconds + taken
        return self.nbytes, (timed / milliseconds * 1e3 if milliseconds else None)


class HostStore:
    """Offloaded bytes of one device. Owns its streams, its pool and nothing else; tickets are owned by the graph.

    Args:
        device: the device whose tensors are taken.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.lanes = CopyLanes(device)
        self.pool = HostPool(pin=device.type == "cuda")
        self.outbound = Traffic()
        self.inbound = Traffic()
        self._tickets: weakref.WeakSet[HostTicket] = weakref.WeakSet()

    @property
    def live_tickets(self) -> int:
        """Tickets that are alive, in any state."""
        return len(self._tickets)

    @property
    def live_bytes(self) -> int:
        """Bytes of the live tickets."""
        return sum(ticket.nbytes for ticket in self._tickets)

    def put(self, device_bytes: torch.Tensor) -> HostTicket:
        """See `Store.put`. Raises MemoryError when the host has no room."""
        compute = self.lanes.compute_stream()
        slot = self.pool.take(device_bytes.numel())
        out = self.lanes.copy_out(device_bytes, slot.bytes_, compute, slot.slab.last_read)
        ticket = HostTicket(self, device_bytes, slot, out, compute)
        self._tickets.add(ticket)
        self.outbound.add(ticket.nbytes, out)
        return ticket

    def settle(self, ticket: HostTicket) -> None:
        """See `Store.settle`."""
        if ticket.state is State.LEAVING:
            ticket.out.block(ticket.compute)
            ticket.step(State.ON_HOST)
            ticket.device_bytes = None

    def fetch(self, ticket: HostTicket) -> None:
        """See `Store.fetch`. A ticket that is still leaving stays where it is: its bytes are on the device."""
        if ticket.state is not State.ON_HOST:
            return
        with on_stream(ticket.compute):
            ticket.device_bytes = torch.empty(ticket.nbytes, dtype=torch.uint8, device=self.device)
        ticket.back = self.lanes.copy_back(ticket.slot.bytes_, ticket.device_bytes, ticket.compute, ticket.out)
        ticket.slot.slab.last_read = ticket.back
        ticket.step(State.RETURNING)
        self.inbound.add(ticket.nbytes, ticket.back)

    def wait(self, ticket: HostTicket) -> torch.Tensor:
        """See `Store.wait`. May be called any number of times.

        A ticket that is still leaving is taken back. Its copy out runs on and may read memory that backward reuses:
        what it writes is a slot nobody reads any more, and the next writer of that slot is behind it on the same stream.
        """
        self.fetch(ticket)
        if ticket.state is State.RETURNING:
            assert ticket.back is not None
            ticket.back.block(ticket.compute)
            ticket.step(State.ON_DEVICE)
        elif ticket.state is State.LEAVING:
            ticket.step(State.ON_DEVICE)
        assert ticket.device_bytes is not None
        return ticket.device_bytes

    def trim(self) -> None:
        """Free host slabs that no ticket uses."""
        self.lanes.synchronize()
        self.pool.trim()

    def close(self) -> None:
        """Let go of the host memory. Tickets that a graph still owns stay valid and free theirs when they die."""
        self.lanes.synchronize()
        self.pool.close()

    def _release(self, ticket: HostTicket) -> None:
        self.pool.give(ticket.slot)
