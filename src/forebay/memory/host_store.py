"""Saved tensors in host memory: tickets, the pinned pool, and the store that copies.

Input: the uint8 view of a device storage. Output: a `HostTicket`, which the autograd graph owns; when it dies, its
slot returns to the `HostPool`. On a GPU the host memory is pinned and copies run on two streams; on a CPU a copy is
complete when `send` returns. The store keeps no strong reference to a ticket.
"""

import enum
import resource
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any

import torch

from forebay.kernels.launch import memory_rate
from forebay.memory.streams import Copy, CopyLanes, Done, on_stream

# The store's contract and the ticket with its named states.
#
# A store takes the bytes of tensors (`hold`, `send`), brings them back ahead of time (`fetch`) and makes the compute stream
# wait for them (`wait`). What it hands out is a `Ticket`; the autograd graph owns it, and when the last reference goes,
# the ticket gives its memory back. No store keeps a strong reference to a ticket.


class TicketState(enum.Enum):
    """Where a ticket's bytes are. Arrows are the only legal steps:

    ``HELD`` -> ``LEAVING`` (copy out enqueued) -> ``ON_HOST`` (copied out, device memory dropped) -> ``RETURNING`` (fetch
    enqueued) -> ``ON_DEVICE``; ``HELD`` or ``LEAVING`` -> ``ON_DEVICE`` (backward came before the copy was enqueued, or over:
    nothing is moved back; or an engine emptied the storage, and fills it again).
    """

    HELD = "held"
    LEAVING = "leaving"
    ON_HOST = "on_host"
    RETURNING = "returning"
    ON_DEVICE = "on_device"

    __hash__ = object.__hash__  # each is one object; the enum's own hash is that of its name, by a call to Python


_NEXT = frozenset(
    {
        (TicketState.HELD, TicketState.LEAVING),
        (TicketState.HELD, TicketState.ON_DEVICE),
        (TicketState.LEAVING, TicketState.ON_HOST),
        (TicketState.LEAVING, TicketState.ON_DEVICE),
        (TicketState.ON_HOST, TicketState.RETURNING),
        (TicketState.RETURNING, TicketState.ON_DEVICE),
    }
)


class Ticket:
    """Bytes of one storage, held by a store.

    Attributes:
        nbytes: size of the storage.
        state: where the bytes are; changed only through `step`.
        device_bytes: the uint8 device tensor, while there is one; until the ticket leaves, a view of the storage that was held.
    """

    __slots__ = ("__weakref__", "device_bytes", "nbytes", "state")

    def __init__(self, nbytes: int, device_bytes: torch.Tensor | None, state: TicketState):
        self.nbytes = nbytes
        self.device_bytes = device_bytes
        self.state = state

    def step(self, to: TicketState) -> None:
        """Go to the next state.

        Raises:
            RuntimeError: the step is not one of the arrows; both states are named.
        """
        if (self.state, to) not in _NEXT:
            raise RuntimeError(f"a ticket cannot go from {self.state.value} to {to.value}")
        self.state = to


# The ledger: live bytes and tickets, by region and microbatch; what is held, and by whom.
#
# In: each ticket a region call creates. Out: counts, computed on demand from weak references. The ledger owns nothing:
# asking it never keeps memory alive, and a test that finds it empty has found that nothing leaked.

_SWEEP = 256  # entries of dead tickets that may gather, beside as many as are alive


class Ledger:
    """Weak record of the live tickets of one manager."""

    def __init__(self) -> None:
        # A list and no weak dictionary: that would hash a ticket and call back when it dies, thousands of times a step.
        self._entries: list[tuple[weakref.ref[Ticket], str, int]] = []
        self._sweep_at = _SWEEP

    def enter(self, ticket: Ticket, path: str, call: int) -> None:
        self._entries.append((weakref.ref(ticket), path, call))
        if len(self._entries) >= self._sweep_at:
            self._entries = [entry for entry in self._entries if entry[0]() is not None]
            self._sweep_at = 2 * len(self._entries) + _SWEEP

    @property
    def live_tickets(self) -> int:
        return sum(1 for _ in self._live())

    @property
    def live_bytes(self) -> int:
        """Bytes of the live tickets, wherever they are."""
        return sum(ticket.nbytes for ticket, _, _ in self._live())

    @property
    def device_bytes(self) -> int:
        """Bytes of the live tickets that have device memory now."""
        return sum(ticket.nbytes for ticket, _, _ in self._live() if ticket.device_bytes is not None)

    def by_region(self) -> dict[str, int]:
        """Live bytes by region path."""
        totals: Counter[str] = Counter()
        for ticket, path, _ in self._live():
            totals[path] += ticket.nbytes
        return dict(totals)

    def _live(self) -> Iterator[tuple[Ticket, str, int]]:
        for ref, path, call in self._entries:
            ticket = ref()
            if ticket is not None:
                yield ticket, path, call


# Host memory for saved bytes: slabs, and exact-size slots cut from them.
#
# In: a size in bytes. Out: a `HostSlot`, a contiguous uint8 tensor of just that size. A slot comes back through `give` and goes
# out again as it is to who asks for its size; when nobody has, it becomes a hole and is merged with its neighbours, so a later
# step with other shapes can use the room. On a GPU machine slabs are page-locked.
#
# Why not ``torch.empty(pin_memory=True)``: the caching host allocator rounds every block up to a power of two (up to
# 2x the bytes). Here ordinary memory of the exact size is registered with ``cudaHostRegister`` instead. Registering
# costs about 0.32 s a GiB, so it happens while the first step runs and not again.
#
# A slot carries the end of the last copy that read from it, and so does a slab. Who writes into a slot waits for its own, or,
# if it was cut from a hole, for its slab's (readers are on one stream and so in order among themselves, and so are writers): a
# slot that is handed out when its copy was only enqueued is a race that others have shipped. A slab that dies waits for both on
# the host: page-locked memory that is unregistered under a copy is lost to it.
#
# A slot may come back at any moment, in any thread: the collector runs where it likes, within a call of this pool too. So
# `give` adds to a deque and changes nothing else; the next call looks there first.

_ALIGN = 512  # bytes; keeps every dtype's views aligned, and equals the device allocator's rounding
# Names of what cudaHostRegister returns: torch has the text alone, and 2 reads "out of memory" for a limit as well.
_CUDA_ERRORS: Mapping[int, str] = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    304: "cudaErrorOperatingSystem",
    712: "cudaErrorHostMemoryAlreadyRegistered",
    801: "cudaErrorNotSupported",
}
_SMALL_SLAB = 64 << 20  # slots below this share slabs of this size; larger ones get a slab of their own size


@dataclass(eq=False, slots=True)
class HostSlot:
    """A piece of a slab. ``bytes_`` is a uint8 tensor of exactly the size asked for; ``last_read`` is to be waited for by who
    writes there."""

    bytes_: torch.Tensor
    slab: "_Slab"
    start: int
    length: int
    last_read: Done | None = None

    def read_by(self, copy: Done) -> None:
        """Be told that `copy` reads from here; copies are told of in their order."""
        self.last_read = self.slab.last_read = copy

    def written_by(self, copy: Done) -> None:
        """Be told that `copy` writes here; copies are told of in their order."""
        self.slab.last_written = copy


@dataclass(eq=False)
class _Slab:
    memory: torch.Tensor
    pinned: bool
    holes: list[tuple[int, int]] = field(default_factory=list)  # (start, length), sorted, never adjacent
    last_read: Done | None = None
    last_written: Done | None = None
    in_pool: bool = True
    used: bool = True  # since the pool's `restart`

    @property
    def idle(self) -> bool:
        return self.holes == [(0, self.memory.numel())]

    def take(self, hole: int, length: int) -> int:
        start, room = self.holes[hole]
        if room == length:
            del self.holes[hole]
        else:
            self.holes[hole] = (start + length, room - length)
        return start

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        if not self.pinned or ending():
            return
        try:
            for copy in (self.last_read, self.last_written):
                if copy is not None:
                    copy.synchronize()
        finally:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())

    def give(self, start: int, length: int) -> None:
        self.holes.append((start, length))
        self.holes.sort()
        merged: list[tuple[int, int]] = []
        for begin, size in self.holes:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((begin, size))
        self.holes = merged


class HostPool:
    """Slabs of host memory, owned by one store.

    Args:
        pin: page-lock the slabs (needs CUDA).
        small_slab: page-locked slots below as many bytes share slabs of this size; 0: each slab is as large as its first slot.
    """

    def __init__(self, pin: bool, small_slab: int = _SMALL_SLAB):
        self._pin = pin
        self._small_slab = small_slab if pin else 0
        self._slabs: list[_Slab] = []
        # Slots as they came back, by length. A step asks for the same sizes again and again, a pipeline's for thousands: to look
        # through all holes each time, or to keep them merged, would take the host longer than the device computes.
        self._returned: dict[int, list[HostSlot]] = {}
        self._given: deque[HostSlot] = deque()  # what came back since the last call

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    def take(self, nbytes: int) -> HostSlot:
        """A slot of `nbytes`: one that came back, else from the tightest hole, else from a new slab.

        Raises:
            MemoryError: the host cannot give or page-lock that much; the message says how much the pool holds.
        """
        self._sort_given()
        length = -(-nbytes // _ALIGN) * _ALIGN
        returned = self._returned.get(length)
        if returned:
            slot = returned.pop()
            slot.slab.used = True
            if slot.bytes_.numel() == nbytes:
                return slot
            return self._cut(slot.slab, slot.start, length, nbytes, slot.last_read)
        self._merge()
        best = min(
            ((room, slab, i) for slab in self._slabs for i, (_, room) in enumerate(slab.holes) if room >= length),
            key=lambda found: found[0],
            default=None,
        )
        if best is None:
            slab, hole = self._grow(max(length, self._small_slab)), 0
        else:
            _, slab, hole = best
        slab.used = True
        return self._cut(slab, slab.take(hole, length), length, nbytes, slab.last_read)

    def give(self, slot: HostSlot) -> None:
        """Take a slot back, from any thread and in the middle of any other call. A copy from it may still run: the next to write
        there waits for `last_read`."""
        if slot.slab.in_pool:  # else it dies here, and its slab with the last of them
            self._given.append(slot)

    def restart(self) -> None:
        """Count from here which slabs are used."""
        for slab in self._slabs:
            slab.used = False

    def trim(self, spare_used: bool = False) -> None:
        """Let go of the slabs of which no slot is out. The host waits for copies that are not over.

        Args:
            spare_used: not of those of which one was out since `restart`.
        """
        self._merge()
        for slab in self._slabs:
            slab.in_pool = not slab.idle or (spare_used and slab.used)
        self._slabs = [slab for slab in self._slabs if slab.in_pool]

    def close(self) -> None:
        """Let go of every slab; one of which slots are out lives on until the last of them dies."""
        for slab in self._slabs:
            slab.in_pool = False
        self._slabs.clear()
        self._returned.clear()
        self._given.clear()

    def _cut(self, slab: _Slab, start: int, length: int, nbytes: int, last_read: Done | None) -> HostSlot:
        return HostSlot(slab.memory[start : start + nbytes], slab, start, length, last_read)

    def _sort_given(self) -> None:
        """Put what came back where `take` looks for it."""
        while self._given:
            slot = self._given.popleft()
            if slot.slab.in_pool:
                self._returned.setdefault(slot.length, []).append(slot)

    def _merge(self) -> None:
        """Make holes of the slots that came back."""
        self._sort_given()
        for slots in self._returned.values():
            for slot in slots:
                slot.slab.give(slot.start, slot.length)
        self._returned.clear()

    def _grow(self, size: int) -> _Slab:
        try:
            memory = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(
                f"the host has no {size} bytes for offloaded activations; this pool already holds {self.reserved_bytes}. "
                "Offload less: fewer regions, or a larger device budget"
            ) from error
        if self._pin:
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
            if code != 0:
                _clear_error()
                raise MemoryError(
                    f"the system did not page-lock {size} bytes of host memory for offloaded activations: cudaHostRegister "
                    f"returned {_CUDA_ERRORS.get(code, 'error')} ({code}). This pool already holds {self.reserved_bytes} bytes; "
                    f"{_locked_limit()}. Raise the limit (`ulimit -l unlimited`; for a container `--ulimit memlock=-1`, and "
                    "enough memory), or offload less: fewer regions, or a larger device budget"
                )
        slab = _Slab(memory, self._pin, [(0, size)])
        self._slabs.append(slab)
        return slab


def _locked_limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return "`ulimit -l` sets no limit here, so it is the container's or the machine's"
    return f"`ulimit -l` limits locked memory to {limit} bytes"


def _clear_error() -> None:
    """Take the error that a refused call left in CUDA: the next kernel's launch would report it as its own."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")


# HostStore: saved bytes wait in host memory.
#
# In: the uint8 view of a device storage. Out: a `HostTicket`. On a GPU the host memory is page-locked and the copies run
# on two streams of their own; on a CPU it is ordinary memory and a copy is over when `put` returns.
#
# Ordering, without ``record_stream``:
#
# * copies out wait for the compute stream as of `send`, and for the last copies that read from their slots;
# * `settle` makes the compute stream wait for the copy out, then drops the device tensor. Whatever compute allocates from
#   that memory afterwards is ordered behind the copy, because it is enqueued behind the wait;
# * `fetch` allocates on the compute stream, and the copy back waits for what compute was given until then;
# * `wait` makes the compute stream wait for the copy back.
#
# Before a ticket's device block goes back to its allocator, at `settle` or when the ticket dies, the compute stream waits for
# each copy that reads or writes the block (`_guard`). That includes the copy out of a ticket that was taken back while it was
# leaving: its bytes are worth nothing, but the memory it reads may be unmapped (expandable segments,
# ``torch.cuda.empty_cache()``).
#
# Several streams. A ticket has one compute stream: where its block is allocated on the way back. Streams that meet it elsewhere
# (a storage saved or unpacked within ``with torch.cuda.stream(side)``) are kept in `others`: copies out wait for them too, they
# wait for copies back, and compute waits for them before the block is reused.
#
# A ticket may die at any moment, in any thread: the collector runs where it likes, within a call of this store too. Its death
# enqueues waits and adds to deques, and changes nothing that a call is in the middle of.


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
        super().__init__(device_bytes.numel(), device_bytes, TicketState.HELD)
        self.store = store
        self.slot: HostSlot | None = None
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
        """Take the bytes of a storage (uint8, on the device), which stay there until `send`. `compute` is the stream
        that made them and reads them again; None on a CPU."""
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
        """Enqueue the copies out. Tickets that are not held stay as they are. A closed store sends nothing: tickets
        stay held. A ticket whose storage was emptied (by an engine
        that gathers weights again before backward) goes to ``ON_DEVICE``: it keeps the storage, as autograd would.

        Raises:
            MemoryError: the host has no room.
        """
        if self._closed:
            return
        for ticket in tickets:
            if ticket.state is TicketState.HELD and _is_emptied(ticket):
                ticket.step(TicketState.ON_DEVICE)
        for compute, held in _by_stream(t for t in tickets if t.state is TicketState.HELD):
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
                ticket.step(TicketState.LEAVING)
            self.outbound.add(sum(ticket.nbytes for ticket in held), out)

    def put(self, device_bytes: torch.Tensor) -> HostTicket:
        """`hold` and `send` of one storage, on the current stream."""
        ticket = self.hold(device_bytes, self.lanes.compute_stream())
        self.send([ticket])
        return ticket

    @_locked
    def settle(self, ticket: HostTicket) -> None:
        """Make the compute stream wait for the copy out and drop the device memory. No-op unless leaving. A storage
        that was emptied or moved since `send` stays where it is: the copy may have read other bytes."""
        if ticket.state is TicketState.LEAVING:
            assert ticket.device_bytes is not None
            if _is_emptied(ticket) or ticket.device_bytes.data_ptr() != ticket.address:
                ticket.step(TicketState.ON_DEVICE)
                return
            _guard(ticket)
            ticket.step(TicketState.ON_HOST)
            ticket.device_bytes, ticket.others = None, ()

    @_locked
    def fetch(self, *batches: Sequence[HostTicket]) -> None:
        """Enqueue the copies back; a batch is there when all of it is. Tickets that are not on the host stay as they
        are; one that is in two batches comes back with the first. A ticket that is still leaving stays where it is: its bytes
        are on the device."""
        wanted: dict[Any, list[list[HostTicket]]] = {}
        met: set[int] = set()
        for batch in batches:
            own = [t for t in batch if t.state is TicketState.ON_HOST and id(t) not in met]
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
                    ticket.step(TicketState.RETURNING)
                self.inbound.add(sum(ticket.nbytes for ticket in tickets), back)

    def wait(self, ticket: HostTicket) -> torch.Tensor:
        """The uint8 device tensor, safe to use on the compute stream; fetched first if it was not. May be called any
        number of times, on any stream: the current one waits too.

        Raises:
            RuntimeError: the storage was emptied by somebody else while autograd had it saved, and was not filled again.
        """
        if ticket.state is not TicketState.ON_DEVICE or self.lanes.other_stream(ticket.compute) is not None:
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
        if ticket.state is not TicketState.ON_DEVICE:
            if ticket.state is TicketState.ON_HOST:
                self.fetch((ticket,))
            if ticket.state is TicketState.RETURNING:
                assert ticket.back is not None
                ticket.back.block(ticket.compute)
            ticket.step(TicketState.ON_DEVICE)
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

    def synchronize(self) -> None:
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
