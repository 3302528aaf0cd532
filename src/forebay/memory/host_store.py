"""HostStore: saved tensors in host memory, the tickets that stand for them, and the streams that copy them.

Input: the uint8 view of a device storage. Output: a `Ticket`, which the autograd graph owns; when it dies, its block returns to
the `HostPool`. On a GPU the host memory is page-locked, copies run on two streams, and CUDA events order them: nothing calls
``record_stream``, which would release memory at an unknown time. On a CPU a copy is complete when `send` returns. The store keeps
no strong reference to a ticket. A ticket may die at any time and in any thread, also in a garbage collection
within a call of the store or the pool: its death only enqueues waits and appends to a deque. Bytes that may be rounded are
compressed on the device when they leave it and expanded there when they are read (`forebay.memory.storage.compress`).
"""

import enum
import resource
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any

import torch

from forebay.kernels.flags import Flag, Flags
from forebay.kernels.launch import memory_rate
from forebay.memory.storage import compress, expand

CudaEvents = tuple[torch.cuda.Event, torch.cuda.Event]
Copy = tuple[torch.Tensor, torch.Tensor]  # source, target


class _SyncEpoch:
    """The copies enqueued between two calls of `CopyLanes.synchronize`."""

    done = False  # the host has waited for all of them


@dataclass(eq=False, slots=True)
class CopyDone:
    """The end of copies that were enqueued together.

    Attributes:
        pair: (start, end) CUDA events; None on a CPU, where the copies are complete.
        epoch: of the copies. Once it is done, nothing waits for them.
        spare: the list that gets the CUDA events back when this object dies.
        clock: (start, end) CUDA events that time the copies; None: not timed.
        flag: set at the end of copies in a CUDA graph.
        waiting: streams that wait for the copies already.
    """

    pair: CudaEvents | None
    epoch: _SyncEpoch | None = None
    spare: list[CudaEvents] | None = None
    clock: CudaEvents | None = None
    flag: Flag | None = None
    waiting: list[Any] = field(default_factory=list)

    def __del__(self) -> None:
        # CUDA events may be recorded again while a stream has yet to reach its wait: a wait is for what was recorded when it
        # was enqueued.
        if self.pair is not None and self.spare is not None:
            self.spare.append(self.pair)

    def block(self, stream: Any) -> None:
        """Make `stream` (a CUDA stream, or None on a CPU) wait for the copies. The host does not wait."""
        if self.pair is not None and stream not in self.waiting and not self.is_done:
            if self.flag is not None:
                self.flag.block(stream)
            else:
                stream.wait_event(self.pair[1])
            self.waiting.append(stream)

    @property
    def is_done(self) -> bool:
        """Whether the host has waited for the copies; False where it does not know."""
        return self.pair is None or (self.epoch is not None and self.epoch.done)

    def synchronize(self) -> None:
        """Wait on the host for the copies."""
        if self.pair is not None and not self.is_done:
            self.pair[1].synchronize()

    def milliseconds(self) -> float | None:
        """Time the copies took; None if they were not timed. Waits for them on the host: call it outside a step."""
        if self.clock is None:
            return None
        self.clock[1].synchronize()
        return self.clock[0].elapsed_time(self.clock[1])


class CopyLanes:
    """One stream for copies to the host and one for copies back; both None on a CPU.

    Attributes:
        time_captured: time the copies that a CUDA graph captures, at two nodes more a copy.
        flags: how streams within a CUDA graph wait for copies.
    """

    def __init__(self, device: torch.device):
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        on_gpu = device.type == "cuda"
        self.out_stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_gpu else None
        self.back_stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_gpu else None
        self._ready = torch.cuda.Event() if on_gpu else None
        self._spare: list[CudaEvents] = []
        self._epoch = _SyncEpoch()
        self.time_captured = False
        self.flags = Flags(device)
        self._captured_events: list[torch.cuda.Event] = []

    def compute_stream(self) -> Any:
        """The current stream of the device, or None on a CPU.

        Trap: inside ``with torch.cuda.stream(side)`` this is the side stream, and a copy that waits for it is not ordered after
        the computation. Ask once, when the region is entered, and pass the answer along.
        """
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def other_stream(self, compute: Any) -> Any:
        """The current stream if it is not `compute`; else None, as on a CPU."""
        # Raw handles: this runs for each saved tensor, and making a torch.cuda.Stream takes ten times as long.
        if self.device.type != "cuda" or torch._C._cuda_getCurrentRawStream(self.device.index) == compute.cuda_stream:
            return None
        return torch.cuda.current_stream(self.device)

    def copy_out(
        self, copies: Sequence[Copy], compute: Any, after: Iterable[CopyDone], others: Iterable[Any] = ()
    ) -> CopyDone:
        """Copy device bytes to the host, after the present work of `compute` and of the streams `others`, and after each of
        `after`."""
        if self.out_stream is not None:
            for other in others:
                self.out_stream.wait_stream(other)
        return self._copy(self.out_stream, (copies,), compute, after)[0]

    def copy_back(self, batches: Sequence[Sequence[Copy]], compute: Any) -> list[CopyDone]:
        """Copy host bytes to the device, one batch after the other; each has its own end.

        The copies wait for the present work of `compute`, on which the targets were allocated: earlier kernels may still use
        that memory. So they also wait for every copy out that `compute` waits for.
        """
        return self._copy(self.back_stream, batches, compute, ())

    def begin_capture(self, timed: bool) -> None:
        """A CUDA graph is about to be captured, and the last one is gone."""
        self.time_captured = timed
        self._captured_events.clear()
        self.flags.begin()  # those of this graph: they stay until the next one

    def captured_event(self) -> torch.cuda.Event:
        """A CUDA event that a graph records at each replay; between replays the host can ask for its time.

        Trap: an event that is dropped before its graph ends the process at the next replay, or lets it hang. A capture may hold
        several of the manager's steps, which forget theirs, so all are kept here until the next capture.
        """
        event = torch.cuda.Event(enable_timing=True, external=True)
        self._captured_events.append(event)
        return event

    def join(self) -> None:
        """Make the current stream wait for both lanes, if they are part of a capture. Every side stream must be joined before
        a capture ends."""
        current = self.compute_stream()
        for lane in (self.out_stream, self.back_stream):
            if lane is not None:
                with torch.cuda.stream(lane):
                    captured = _is_capturing()
                if captured:
                    current.wait_stream(lane)

    def synchronize(self) -> None:
        """Wait on the host for both lanes. From then on no stream waits for a copy that was enqueued before: a CUDA event of a
        capture cannot be waited for outside of it, nor one from outside within it."""
        for stream in (self.out_stream, self.back_stream):
            if stream is not None:
                stream.synchronize()
        self._epoch.done = True
        self._epoch = _SyncEpoch()

    def _copy(
        self, lane: Any, batches: Sequence[Sequence[Copy]], compute: Any, after: Iterable[CopyDone]
    ) -> list[CopyDone]:
        if lane is None:
            for copies in batches:
                for source, target in copies:
                    target.copy_(source)
            return [CopyDone(None) for _ in batches]
        assert self._ready is not None
        flags = self._flags_for(batches, compute)
        self._ready.record(compute)
        lane.wait_event(self._ready)
        for earlier in after:
            earlier.block(lane)
        with torch.cuda.stream(lane):
            captured = _is_capturing()
            return [self._enqueue(lane, copies, flag, captured) for copies, flag in zip(batches, flags, strict=True)]

    def _enqueue(self, lane: Any, copies: Sequence[Copy], flag: Flag | None, captured: bool) -> CopyDone:
        """One batch, on `lane`, which is the current stream."""
        pair = self._spare.pop() if self._spare else (_timed_event(), _timed_event())
        clock: CudaEvents | None = pair
        if captured:
            clock = (self.captured_event(), self.captured_event()) if self.time_captured else None
        start, end = clock or pair
        start.record(lane)
        for source, target in copies:
            target.copy_(source, non_blocking=True)
        end.record(lane)
        if end is not pair[1]:
            pair[1].record(lane)  # an external event tells the time and does not order anything within its graph
        if flag is not None:
            flag.set(lane)
        return CopyDone(pair, self._epoch, self._spare, clock, flag)

    def _flags_for(self, batches: Sequence[Any], compute: Any) -> Sequence[Flag | None]:
        if not _is_capturing():
            return [None] * len(batches)
        with torch.cuda.stream(compute):
            return [self.flags.take() for _ in batches]


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _is_capturing() -> bool:
    """Whether the current stream is part of a CUDA graph that is being captured."""
    return torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing()


def on_stream(stream: Any) -> Any:
    """Context in which allocations and kernels belong to `stream`; does nothing for None (a CPU)."""
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


class TicketState(enum.Enum):
    """Where a ticket's bytes are. These are the only transitions:

    ``UNSENT`` -> ``LEAVING`` (copy out enqueued) -> ``ON_HOST`` (device memory dropped) -> ``RETURNING`` (copy back enqueued) ->
    ``ON_DEVICE``; and ``UNSENT`` or ``LEAVING`` -> ``ON_DEVICE``, where the bytes never left: backward came first, or another
    engine (FSDP) emptied the storage and fills it again itself.
    """

    UNSENT = "unsent"
    LEAVING = "leaving"
    ON_HOST = "on_host"
    RETURNING = "returning"
    ON_DEVICE = "on_device"

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is a slow call to Python


_TRANSITIONS = frozenset(
    {
        (TicketState.UNSENT, TicketState.LEAVING),
        (TicketState.UNSENT, TicketState.ON_DEVICE),
        (TicketState.LEAVING, TicketState.ON_HOST),
        (TicketState.LEAVING, TicketState.ON_DEVICE),
        (TicketState.ON_HOST, TicketState.RETURNING),
        (TicketState.RETURNING, TicketState.ON_DEVICE),
    }
)


class Ticket:
    """The bytes of one storage, in the care of a `HostStore`. The autograd graph owns it; its death frees the bytes.

    Attributes:
        nbytes: size of the storage.
        rounds: the bytes may be compressed on their way out; then a view in another dtype does not come back.
        compressed: they were, and are not expanded yet.
        state: where the bytes are; changed only through `advance`.
        device_bytes: the uint8 device tensor, compressed or not, or None; until the ticket leaves, a view of the saved storage.
        compute: the stream that made the bytes and reads them again; None on a CPU.
        others: further streams that saved the storage or read it.
        out, back: the last copy out and the last copy back.
        address: data pointer of the bytes when they were sent.
    """

    __slots__ = (
        *("__weakref__", "address", "back", "compressed", "compute", "device_bytes", "nbytes"),
        *("others", "out", "host_block", "rounds", "state", "store"),
    )

    def __init__(self, store: "HostStore", device_bytes: torch.Tensor, compute: Any, rounds: bool):
        self.store = store
        self.nbytes = device_bytes.numel()
        self.rounds, self.compressed = rounds, False
        self.device_bytes: torch.Tensor | None = device_bytes
        self.state = TicketState.UNSENT
        self.host_block: HostBlock | None = None
        self.out: CopyDone | None = None
        self.back: CopyDone | None = None
        self.compute = compute
        self.others: tuple[Any, ...] = ()
        self.address = 0

    @property
    def host_bytes(self) -> int:
        """Bytes that were copied to the host, or would be uncompressed."""
        return self.host_block.bytes_.numel() if self.host_block is not None else self.nbytes

    def advance(self, to: TicketState) -> None:
        """Go to another state.

        Raises:
            RuntimeError: there is no such transition.
        """
        if (self.state, to) not in _TRANSITIONS:
            raise RuntimeError(f"a ticket cannot go from {self.state.value} to {to.value}")
        self.state = to

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        if not ending():
            self.store._ticket_died(self)


_ALIGN = 512  # bytes; keeps views of every dtype aligned, and is the device allocator's rounding
_SMALL_SLAB = 64 << 20  # bytes; smaller page-locked blocks share slabs of this size
# What cudaHostRegister returns. torch knows only the texts, and that of 2 is "out of memory" for a limit as well.
_CUDA_ERRORS: Mapping[int, str] = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    304: "cudaErrorOperatingSystem",
    712: "cudaErrorHostMemoryAlreadyRegistered",
    801: "cudaErrorNotSupported",
}


@dataclass(eq=False, slots=True)
class HostBlock:
    """A piece of a slab.

    Attributes:
        bytes_: uint8, of exactly the size asked for.
        length: bytes it takes of the slab, rounded up.
        last_read: the last copy from here. Trap: a copy that writes here must wait for it, because a block comes back while
            copies from it are only enqueued.
    """

    bytes_: torch.Tensor
    slab: "_Slab"
    start: int
    length: int
    last_read: CopyDone | None = None


@dataclass(eq=False)
class _Slab:
    """One registered piece of host memory. All readers share one stream and all writers another, so the last copy of each kind
    ends after all others of its kind."""

    memory: torch.Tensor
    pinned: bool
    holes: list[tuple[int, int]] = field(default_factory=list)  # (start, length), sorted, never adjacent
    last_read: CopyDone | None = None
    last_written: CopyDone | None = None
    in_pool: bool = True
    used: bool = True  # since the pool's `reset_stats`

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

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        if not self.pinned or ending():
            return
        try:
            # Trap: memory that is unregistered while a copy uses it is lost to that copy.
            for copy in (self.last_read, self.last_written):
                if copy is not None:
                    copy.synchronize()
        finally:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())


class HostPool:
    """Slabs of host memory, and blocks of exact size cut from them.

    ``torch.empty(pin_memory=True)`` is not used: the caching host allocator rounds each block up to a power of two, up to twice
    the bytes. Here ordinary memory is registered with ``cudaHostRegister``. That takes about 0.32 s a GiB, so it happens in the
    first step only: blocks go out again as they came back, and become holes for other sizes only if none fits.

    Args:
        pin: page-lock the slabs (needs CUDA).
        small_slab: page-locked blocks smaller than this share slabs of this many bytes; 0: a slab for each new block.
    """

    def __init__(self, pin: bool, small_slab: int = _SMALL_SLAB):
        self._pin = pin
        self._small_slab = small_slab if pin else 0
        self._slabs: list[_Slab] = []
        # Blocks that are free, by length. A step asks for the same sizes again, thousands of them in a pipeline: searching all
        # holes each time, or keeping them merged, would take the host longer than the device computes.
        self._free: dict[int, list[HostBlock]] = {}
        self._returned: deque[HostBlock] = deque()  # since the last call: `give` may run in the middle of any other

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    def take(self, nbytes: int) -> HostBlock:
        """A block of `nbytes`: a free one of that length, else from the smallest hole that fits, else from a new slab.

        Raises:
            MemoryError: the host cannot allocate or page-lock that much.
        """
        self._collect_returned()
        length = -(-nbytes // _ALIGN) * _ALIGN
        free = self._free.get(length)
        if free:
            block = free.pop()
            block.slab.used = True
            if block.bytes_.numel() == nbytes:
                return block
            return self._cut(block.slab, block.start, length, nbytes, block.last_read)
        self._merge_free()
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

    def give(self, block: HostBlock) -> None:
        """Return a block, from any thread and in the middle of any other call. A copy from it may still run."""
        if block.slab.in_pool:  # else the block dies here, and the last one takes its slab along
            self._returned.append(block)

    def reset_stats(self) -> None:
        """Start anew to note which slabs are used, for `trim`."""
        for slab in self._slabs:
            slab.used = False

    def trim(self) -> None:
        """Free the slabs without a block that is out, now or since `reset_stats`. The host waits for their copies."""
        self._merge_free()
        for slab in self._slabs:
            slab.in_pool = not slab.idle or slab.used
        self._slabs = [slab for slab in self._slabs if slab.in_pool]

    def close(self) -> None:
        """Free every slab; one that has blocks out lives on until the last of them dies."""
        for slab in self._slabs:
            slab.in_pool = False
        self._slabs.clear()
        self._free.clear()
        self._returned.clear()

    def _cut(self, slab: _Slab, start: int, length: int, nbytes: int, last_read: CopyDone | None) -> HostBlock:
        return HostBlock(slab.memory[start : start + nbytes], slab, start, length, last_read)

    def _collect_returned(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if block.slab.in_pool:
                self._free.setdefault(block.length, []).append(block)

    def _merge_free(self) -> None:
        """Turn the free blocks into holes."""
        self._collect_returned()
        for blocks in self._free.values():
            for block in blocks:
                block.slab.give(block.start, block.length)
        self._free.clear()

    def _grow(self, size: int) -> _Slab:
        try:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default device is
        except RuntimeError as error:
            raise MemoryError(
                f"cannot allocate {size} bytes of host memory for offloaded activations; this pool already holds "
                f"{self.reserved_bytes} bytes. Offload less: fewer regions, or a larger device budget"
            ) from error
        if self._pin:
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
            if code != 0:
                _clear_cuda_error()
                raise MemoryError(
                    f"cannot page-lock {size} bytes of host memory for offloaded activations: cudaHostRegister "
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


def _clear_cuda_error() -> None:
    """Clear the error of a refused call; the next kernel launch would report it as its own."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")


class Traffic:
    """Copies in one direction since `reset_stats`.

    Attributes:
        nbytes: of the storages that were copied; `copied`: the bytes that this took, fewer if they are compressed.
        copies: the storages' bytes, and the end of their copy.
    """

    def __init__(self) -> None:
        self.nbytes = self.copied = 0
        self.copies: deque[tuple[int, CopyDone]] = deque(maxlen=4096)

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


def _locked(method: Callable[..., None]) -> Callable[..., None]:
    """One thread at a time changes states of tickets: a model may run in several. A ticket's death takes no lock."""

    @wraps(method)
    def call(self: "HostStore", *args: Any) -> None:
        with self._lock:
            method(self, *args)

    return call


_SWEEP_TICKETS = 256  # references to dead tickets that a store may keep, beside as many as are alive


class HostStore:
    """Offloaded bytes of one device. Owns its streams and its pool; the graph owns the tickets, which it knows weakly.

    Streams are ordered by CUDA events, without ``record_stream``:

    * A copy out waits for the compute stream as of `send`, for the other streams that use the storage, and for the last copies
      that read from its blocks.
    * `release` makes the compute stream wait for the copy out and drops the device memory. What compute allocates there
      afterwards is enqueued after that wait.
    * `fetch` allocates on the compute stream, and the copy back waits for the compute stream as of then.
    * `wait` makes the compute stream, and the current one if it is another, wait for the copy back.
    * Before a device block returns to its allocator, the streams that may get it next wait for each copy that uses it
      (`_guard_block`).
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.lanes = CopyLanes(device)
        self.pool = HostPool(pin=device.type == "cuda")
        self.outbound = Traffic()
        self.inbound = Traffic()
        self._closed = False
        self._lock = threading.RLock()
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
        ticket = Ticket(self, device_bytes, compute, rounds)
        other = self.lanes.other_stream(compute)
        if other is not None:
            ticket.others = (other,)
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

    @_locked
    def send(self, tickets: Sequence[Ticket]) -> None:
        """Enqueue the copies out of the tickets that are unsent. A closed store sends nothing.

        Raises:
            MemoryError: the host has no room.
        """
        if self._closed:
            return
        for ticket in tickets:
            # An engine that gathers weights again before backward emptied the storage: the ticket keeps it, as autograd would.
            if ticket.state is TicketState.UNSENT and _is_emptied(ticket):
                ticket.advance(TicketState.ON_DEVICE)
        for compute, unsent in _by_stream(t for t in tickets if t.state is TicketState.UNSENT):
            self._copy_out(unsent, compute)

    def _copy_out(self, unsent: Sequence[Ticket], compute: Any) -> None:
        copies: list[Copy] = []
        after: list[CopyDone] = []
        for ticket in unsent:
            if ticket.rounds:
                _compress(ticket)
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

    @_locked
    def release(self, ticket: Ticket) -> None:
        """Make the compute stream wait for the copy out and drop the device memory. No-op unless leaving."""
        if ticket.state is TicketState.LEAVING:
            assert ticket.device_bytes is not None
            # Trap: a storage that was emptied or moved since `send` stays: the copy may have read other bytes.
            if _is_emptied(ticket) or ticket.device_bytes.data_ptr() != ticket.address:
                ticket.advance(TicketState.ON_DEVICE)
                return
            _guard_block(ticket)
            ticket.advance(TicketState.ON_HOST)
            ticket.device_bytes, ticket.others = None, ()

    @_locked
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
        if ticket.back is None and _is_emptied(ticket):
            raise RuntimeError(
                f"a saved storage of {ticket.nbytes} bytes now has {ticket.device_bytes.untyped_storage().nbytes()}: it was "
                "resized after the forward pass and not filled again before its backward. An engine that frees weights "
                "(FSDP) must gather them before backward reads them; keep the region instead of offloading it"
            )
        return ticket.device_bytes

    @_locked
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
        other = self.lanes.other_stream(ticket.compute)
        if other is not None:
            if ticket.back is not None:
                ticket.back.block(other)
            if other not in ticket.others:
                ticket.others = (*ticket.others, other)

    @_locked
    def _expand(self, ticket: Ticket) -> None:
        """Expand a compressed ticket on its compute stream, for the current one."""
        if ticket.compressed:
            assert ticket.device_bytes is not None
            with on_stream(ticket.compute):
                expanded = expand(ticket.device_bytes, ticket.nbytes)
            _guard_block(ticket)  # the compressed block's
            ticket.device_bytes, ticket.compressed = expanded, False
        other = self.lanes.other_stream(ticket.compute)
        if other is not None:
            other.wait_stream(ticket.compute)

    def reset_stats(self) -> None:
        """Start anew to count traffic, and which slabs of host memory are used."""
        self.outbound.reset_stats()
        self.inbound.reset_stats()
        self.pool.reset_stats()

    def synchronize(self) -> None:
        """Wait on the host for all copies. Call it before and after the capture of a CUDA graph: no stream waits any more for a
        copy from before this call, and a CUDA event must not pass between inside and outside."""
        self.lanes.synchronize()

    def trim(self) -> None:
        """Free the host slabs that no ticket has used since `reset_stats`."""
        self.lanes.synchronize()
        self.pool.trim()

    def close(self) -> None:
        """Free the host memory. Tickets that a graph still owns stay valid and free theirs when they die."""
        self._closed = True
        self.lanes.synchronize()
        self.pool.close()

    def _ticket_died(self, ticket: Ticket) -> None:
        # Trap: this runs at any time, in any thread, within any call of this store. It must not change what a call works on.
        if ticket.host_block is not None:
            self.pool.give(ticket.host_block)
        if ticket.device_bytes is not None:
            _guard_block(ticket)
            ticket.device_bytes = None


def _compress(ticket: Ticket) -> None:
    """Give up the ticket's storage for a compressed copy. Streams that used it may get its block next: they wait for that."""
    assert ticket.device_bytes is not None
    for other in ticket.others:
        ticket.compute.wait_stream(other)
    with on_stream(ticket.compute):
        ticket.device_bytes, ticket.compressed = compress(ticket.device_bytes), True
    for other in ticket.others:
        other.wait_stream(ticket.compute)


def _guard_block(ticket: Ticket) -> None:
    """Before a ticket's device block returns to its allocator: the streams that may get it next wait for all that uses it.

    Trap: that includes the copy out of a ticket that was taken back while leaving. Its bytes are not needed, but the memory that
    it reads may be unmapped (expandable segments, ``torch.cuda.empty_cache()``).
    """
    last = ticket.back or ticket.out  # a copy back comes after `release`, which waited for the copy out
    if last is not None:
        last.block(ticket.compute)
        for other in ticket.others:  # the block may belong to the allocator of any of them
            last.block(other)
    for other in ticket.others:
        ticket.compute.wait_stream(other)


def _is_emptied(ticket: Ticket) -> bool:
    """Whether the ticket's storage was resized to less than it held."""
    held = ticket.device_bytes
    return held is not None and held.untyped_storage().nbytes() < held.numel()


def _sizes(tickets: Sequence[Ticket]) -> tuple[int, int]:
    """Bytes of the tickets' storages, and on the host."""
    return sum(ticket.nbytes for ticket in tickets), sum(ticket.host_bytes for ticket in tickets)


def _by_stream(tickets: Iterable[Ticket]) -> Iterable[tuple[Any, list[Ticket]]]:
    """Tickets by compute stream: one, unless regions run on several."""
    groups: dict[Any, list[Ticket]] = {}
    for ticket in tickets:
        groups.setdefault(ticket.compute, []).append(ticket)
    return groups.items()
