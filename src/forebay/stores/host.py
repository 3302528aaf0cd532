"""HostStore: saved bytes wait in host memory.

In: the uint8 view of a device storage. Out: a `HostTicket`. On a GPU the host memory is page-locked and the copies run
on two streams of their own; on a CPU it is ordinary memory and a copy is over when `put` returns.

Ordering, without ``record_stream``:

* copies out wait for the compute stream as of `send`, and for the last copies that read from their slots;
* `settle` makes the compute stream wait for the copy out, then drops the device tensor. Whatever compute allocates from
  that memory afterwards is ordered behind the copy, because it is enqueued behind the wait;
* `fetch` allocates on the compute stream, and the copy back waits for what compute was given until then;
* `wait` makes the compute stream wait for the copy back.

Before a ticket's device block goes back to its allocator, at `settle` or when the ticket dies, the compute stream waits for each
copy that reads or writes the block (`_guard`). That includes the copy out of a ticket that was taken back while it was leaving:
its bytes are worth nothing, but the memory it reads may be unmapped (expandable segments, ``torch.cuda.empty_cache()``).

Several streams. A ticket has one compute stream: where its block is allocated on the way back. Streams that meet it elsewhere
(a storage saved or unpacked within ``with torch.cuda.stream(side)``) are kept in `others`: copies out wait for them too, they
wait for copies back, and compute waits for them before the block is reused.

A ticket may die at any moment, in any thread: the collector runs where it likes, within a call of this store too. Its death
enqueues waits and adds to deques, and changes nothing that a call is in the middle of.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, wraps
from typing import Any

import torch

from forebay.kernels.launch import memory_rate
from forebay.stores.base import State, Ticket
from forebay.stores.pinned import HostPool, Slot
from forebay.stores.streams import Copy, CopyLanes, Done, on_stream


class HostTicket(Ticket):
    """A ticket of `HostStore`. Frees its slot when it dies.

    Attributes:
        compute: the stream that made the bytes and is to read them again; None on a CPU.
        others: further streams that saved the storage or read it.
        out, back: the last copy out and back.
        address: of the bytes, when they were sent.
    """

    __slots__ = ("address", "back", "compute", "others", "out", "slot", "store")

    def __init__(self, store: "HostStore", device_bytes: torch.Tensor, compute: Any):
        super().__init__(device_bytes.numel(), device_bytes, State.HELD)
        self.store = store
        self.slot: Slot | None = None
        self.out: Done | None = None
        self.back: Done | None = None
        self.compute = compute
        self.others: tuple[Any, ...] = ()
        self.address = 0

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        if not ending():
            self.store._released(self)


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


def _locked(method: Callable[..., None]) -> Callable[..., None]:
    """One thread at a time; a ticket's death takes no lock."""

    @wraps(method)
    def call(self: "HostStore", *args: Any) -> None:
        with self._lock:
            method(self, *args)

    return call


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
        self._closed = False
        self._lock = threading.RLock()  # a ticket's states: a model may run in several threads
        self._alive = 0
        self._alive_bytes = 0
        self._dead: deque[int] = deque()  # bytes of tickets that died since they were counted

    @property
    def live_tickets(self) -> int:
        """Tickets that are alive, in any state."""
        self._count_dead()
        return self._alive

    @property
    def live_bytes(self) -> int:
        """Bytes of the tickets that are alive."""
        self._count_dead()
        return self._alive_bytes

    @cached_property
    def memory_rate(self) -> float:
        """Bytes a second of the device's own memory, which copies read and write too."""
        return memory_rate(self.device)

    def hold(self, device_bytes: torch.Tensor, compute: Any) -> HostTicket:
        """See `Store.hold`."""
        self._count_dead()
        ticket = HostTicket(self, device_bytes, compute)
        self._alive += 1
        self._alive_bytes += ticket.nbytes
        other = self.lanes.other_stream(compute)
        if other is not None:
            ticket.others = (other,)
        return ticket

    @_locked
    def send(self, tickets: Sequence[HostTicket]) -> None:
        """See `Store.send`. A closed store sends nothing: tickets stay held. A ticket whose storage was emptied (by an engine
        that gathers weights again before backward) goes to ``ON_DEVICE``: it keeps the storage, as autograd would.

        Raises:
            MemoryError: the host has no room.
        """
        if self._closed:
            return
        for ticket in tickets:
            if ticket.state is State.HELD and _is_emptied(ticket):
                ticket.step(State.ON_DEVICE)
        for compute, held in _by_stream(t for t in tickets if t.state is State.HELD):
            copies: list[Copy] = []
            after: list[Done] = []
            for ticket in held:
                assert ticket.device_bytes is not None
                ticket.slot = ticket.slot or self.pool.take(ticket.nbytes)
                copies.append((ticket.device_bytes, ticket.slot.bytes_))
                if ticket.slot.last_read is not None:
                    after.append(ticket.slot.last_read)
            others = {other for ticket in held for other in ticket.others}
            out = self.lanes.copy_out(copies, compute, after, others)
            for ticket in held:
                assert ticket.slot is not None and ticket.device_bytes is not None
                ticket.slot.written_by(out)
                ticket.out, ticket.address = out, ticket.device_bytes.data_ptr()
                ticket.step(State.LEAVING)
            self.outbound.add(sum(ticket.nbytes for ticket in held), out)

    def put(self, device_bytes: torch.Tensor) -> HostTicket:
        """`hold` and `send` of one storage, on the current stream."""
        ticket = self.hold(device_bytes, self.lanes.compute_stream())
        self.send([ticket])
        return ticket

    @_locked
    def settle(self, ticket: HostTicket) -> None:
        """See `Store.settle`. A storage that was emptied or moved since `send` stays where it is: the copy may have read other
        bytes."""
        if ticket.state is State.LEAVING:
            assert ticket.device_bytes is not None
            if _is_emptied(ticket) or ticket.device_bytes.data_ptr() != ticket.address:
                ticket.step(State.ON_DEVICE)
                return
            _guard(ticket)
            ticket.step(State.ON_HOST)
            ticket.device_bytes, ticket.others = None, ()

    @_locked
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
        """See `Store.wait`. May be called any number of times, on any stream: the current one waits too.

        Raises:
            RuntimeError: the storage was emptied by somebody else while autograd had it saved, and was not filled again.
        """
        if ticket.state is not State.ON_DEVICE or self.lanes.other_stream(ticket.compute) is not None:
            self.recall(ticket)
        assert ticket.device_bytes is not None
        if ticket.back is None and _is_emptied(ticket):
            raise RuntimeError(
                f"a saved storage of {ticket.nbytes} bytes now has {ticket.device_bytes.untyped_storage().nbytes()}: it was "
                "resized after the forward pass and not filled again before its backward. An engine that frees weights "
                "(FSDP) must gather them before backward reads them; keep the region instead of offloading it"
            )
        return ticket.device_bytes

    @_locked
    def recall(self, ticket: HostTicket) -> None:
        """What `wait` does, ahead of the moment at which the bytes are needed: a storage may still be empty.

        A ticket that is still leaving is taken back. Its copy out runs on: what it writes is a slot nobody reads any more, and
        the next writer of that slot is behind it on the same stream.
        """
        if ticket.state is not State.ON_DEVICE:
            if ticket.state is State.ON_HOST:
                self.fetch((ticket,))
            if ticket.state is State.RETURNING:
                assert ticket.back is not None
                ticket.back.block(ticket.compute)
            ticket.step(State.ON_DEVICE)
        other = self.lanes.other_stream(ticket.compute)
        if other is not None:
            if ticket.back is not None:
                ticket.back.block(other)
            if other not in ticket.others:
                ticket.others = (*ticket.others, other)

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
        """Before and after a captured step: no event passes between inside and outside, because nothing waits for a copy from
        before this call any more."""
        self.lanes.synchronize()

    def trim(self) -> None:
        """Free the host slabs that no ticket has used since `restart`."""
        self.lanes.synchronize()
        self.pool.trim(spare_used=True)

    def close(self) -> None:
        """Let go of the host memory. Tickets that a graph still owns stay valid and free theirs when they die."""
        self._closed = True
        self.lanes.synchronize()
        self.pool.close()

    def _released(self, ticket: HostTicket) -> None:
        """A ticket dies. See the module docstring for what this may do."""
        self._dead.append(ticket.nbytes)
        if ticket.slot is not None:
            self.pool.give(ticket.slot)
        if ticket.device_bytes is not None:
            _guard(ticket)
            ticket.device_bytes = None

    def _count_dead(self) -> None:
        while self._dead:
            self._alive_bytes -= self._dead.popleft()
            self._alive -= 1


def _guard(ticket: HostTicket) -> None:
    """Before a ticket's device block goes back to its allocator: the streams that may be given it next wait for all that reads
    or writes it. Those that have waited already do not wait again."""
    last = ticket.back or ticket.out  # `settle` came between the two
    if last is not None:
        last.block(ticket.compute)
        for other in ticket.others:  # whose allocator it may be: that of the stream that made it
            last.block(other)
    for other in ticket.others:
        ticket.compute.wait_stream(other)


def _is_emptied(ticket: HostTicket) -> bool:
    """Whether the ticket's storage has become too small: somebody resized it."""
    return ticket.device_bytes is not None and ticket.device_bytes.untyped_storage().nbytes() < ticket.nbytes


def _by_stream(tickets: Iterable[HostTicket]) -> Iterable[tuple[Any, list[HostTicket]]]:
    """By compute stream: there is one, unless somebody runs regions on several."""
    groups: dict[Any, list[HostTicket]] = {}
    for ticket in tickets:
        groups.setdefault(ticket.compute, []).append(ticket)
    return groups.items()
