"""HostStore: saved bytes wait in host memory.

In: the uint8 view of a device storage. Out: a `HostTicket`. On a GPU the host memory is page-locked and the copies run
on two streams of their own; on a CPU it is ordinary memory and a copy is over when `put` returns.

Ordering, without ``record_stream``:

* copies out wait for the compute stream as of `send`, and for the last copies that read from their slots;
* `settle` makes the compute stream wait for the copy out, then drops the device tensor. Whatever compute allocates from
  that memory afterwards is ordered behind the copy, because it is enqueued behind the wait;
* `fetch` allocates on the compute stream, and the copy back waits for what compute was given until then;
* `wait` makes the compute stream wait for the copy back.

A ticket that dies early (a dropped graph, an exception) first makes the compute stream wait for its running copy: the
device block goes back to compute's allocator and could be overwritten under the copy otherwise.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch

from forebay.kernels.launch import memory_rate
from forebay.stores.base import State, Ticket
from forebay.stores.pinned import HostPool, Slot
from forebay.stores.streams import Copy, CopyLanes, Done, on_stream


class HostTicket(Ticket):
    """A ticket of `HostStore`. Frees its slot when it dies."""

    __slots__ = ("back", "compute", "out", "slot", "store")

    def __init__(self, store: "HostStore", device_bytes: torch.Tensor, compute: Any):
        super().__init__(device_bytes.numel(), device_bytes, State.HELD)
        self.store = store
        self.slot: Slot | None = None
        self.out: Done | None = None
        self.back: Done | None = None
        self.compute = compute

    def __del__(self) -> None:
        if self.state is State.LEAVING and self.out is not None:
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
        return self.nbytes, self.rate(slice(None))

    def rate(self, which: slice) -> float | None:
        """Bytes a second of these of the copies, in their order, as `measure` has it of all."""
        timed, milliseconds = 0, 0.0
        for size, done in list(self.copies)[which]:
            taken = done.milliseconds()
            if taken is not None:
                timed, milliseconds = timed + size, milliseconds + taken
        return timed / milliseconds * 1e3 if milliseconds else None


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
        self.live_tickets = 0  # that are alive, in any state
        self.live_bytes = 0  # of them

    @cached_property
    def memory_rate(self) -> float:
        """Bytes a second of the device's own memory, which copies read and write too."""
        return memory_rate(self.device)

    def hold(self, device_bytes: torch.Tensor, compute: Any) -> HostTicket:
        """See `Store.hold`."""
        ticket = HostTicket(self, device_bytes, compute)
        self.live_tickets += 1
        self.live_bytes += ticket.nbytes
        return ticket

    def send(self, tickets: Sequence[HostTicket]) -> None:
        """See `Store.send`. Raises MemoryError when the host has no room."""
        for compute, held in _by_stream(t for t in tickets if t.state is State.HELD):
            copies: list[Copy] = []
            after: list[Done] = []
            for ticket in held:
                assert ticket.device_bytes is not None
                ticket.slot = ticket.slot or self.pool.take(ticket.nbytes)
                copies.append((ticket.device_bytes, ticket.slot.bytes_))
                if ticket.slot.last_read is not None:
                    after.append(ticket.slot.last_read)
            out = self.lanes.copy_out(copies, compute, after)
            for ticket in held:
                ticket.out = out
                ticket.step(State.LEAVING)
            self.outbound.add(sum(ticket.nbytes for ticket in held), out)

    def put(self, device_bytes: torch.Tensor) -> HostTicket:
        """`hold` and `send` of one storage, on the current stream."""
        ticket = self.hold(device_bytes, self.lanes.compute_stream())
        self.send([ticket])
        return ticket

    def settle(self, ticket: HostTicket) -> None:
        """See `Store.settle`."""
        if ticket.state is State.LEAVING:
            assert ticket.out is not None
            ticket.out.block(ticket.compute)
            ticket.step(State.ON_HOST)
            ticket.device_bytes = None

    def fetch(self, *batches: Sequence[HostTicket]) -> None:
        """See `Store.fetch`. A ticket that is still leaving stays where it is: its bytes are on the device."""
        wanted: dict[Any, list[list[HostTicket]]] = {}
        met: set[int] = set()
        for batch in batches:
            own = [t for t in batch if t.state is State.ON_HOST and id(t) not in met]
            met.update(map(id, own))
            for compute, tickets in _by_stream(own):
                wanted.setdefault(compute, []).append(tickets)
        for compute, groups in wanted.items():
            with on_stream(compute):
                copies = [[self._way_back(ticket) for ticket in tickets] for tickets in groups]
            for tickets, back in zip(groups, self.lanes.copy_back(copies, compute), strict=True):
                for ticket in tickets:
                    assert ticket.slot is not None
                    ticket.slot.read_by(back)
                    ticket.back = back
                    ticket.step(State.RETURNING)
                self.inbound.add(sum(ticket.nbytes for ticket in tickets), back)

    def wait(self, ticket: HostTicket) -> torch.Tensor:
        """See `Store.wait`. May be called any number of times.

        A ticket that is still leaving is taken back. Its copy out runs on and may read memory that backward reuses:
        what it writes is a slot nobody reads any more, and the next writer of that slot is behind it on the same stream.
        """
        if ticket.state is State.ON_HOST:
            self.fetch((ticket,))
        if ticket.state is State.RETURNING:
            assert ticket.back is not None
            ticket.back.block(ticket.compute)
        if ticket.state is not State.ON_DEVICE:
            ticket.step(State.ON_DEVICE)
        assert ticket.device_bytes is not None
        return ticket.device_bytes

    def _way_back(self, ticket: HostTicket) -> Copy:
        assert ticket.slot is not None
        ticket.device_bytes = torch.empty(ticket.nbytes, dtype=torch.uint8, device=self.device)
        return ticket.slot.bytes_, ticket.device_bytes

    def restart(self) -> None:
        """Count from here: traffic, and what is used of the host memory."""
        self.outbound.restart()
        self.inbound.restart()
        self.pool.restart()

    def forget_copies(self) -> None:
        """Before and behind a captured step, with no ticket alive: all copies so far are over, and what a capture recorded cannot
        be waited for outside of it, nor the other way round."""
        self.lanes.synchronize()
        self.pool.forget_reads()

    def trim(self) -> None:
        """Free the host slabs that no ticket has used since `restart`."""
        self.lanes.synchronize()
        self.pool.trim(spare_used=True)

    def close(self) -> None:
        """Let go of the host memory. Tickets that a graph still owns stay valid and free theirs when they die."""
        self.lanes.synchronize()
        self.pool.close()

    def _release(self, ticket: HostTicket) -> None:
        self.live_tickets -= 1
        self.live_bytes -= ticket.nbytes
        if ticket.slot is not None:
            self.pool.give(ticket.slot)


def _by_stream(tickets: Iterable[HostTicket]) -> Iterable[tuple[Any, list[HostTicket]]]:
    """By compute stream: there is one, unless somebody runs regions on several."""
    groups: dict[Any, list[HostTicket]] = {}
    for ticket in tickets:
        groups.setdefault(ticket.compute, []).append(ticket)
    return groups.items()
