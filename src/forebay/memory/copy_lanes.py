"""CopyLanes: copies between host and device, on one stream for each direction.

Input: pairs of tensors (source, target). Output: a `CopyDone` for each batch of them, for which streams or the host can wait.
CUDA events order the streams: nothing calls ``record_stream``, which would release memory at an unknown time. In a CUDA graph
flags take their place (`forebay.kernels.flags`). The lanes own the streams, the flags and the spare events; the caller owns the
tensors, and keeps their memory until the copies are over. On a CPU a copy is complete when the call returns.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay.kernels.flags import Flag, Flags

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
    # Trap: without a driver, a CUDA build of torch raises when it is asked about a stream.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def on_stream(stream: Any) -> Any:
    """Context in which allocations and kernels belong to `stream`; does nothing for None (a CPU)."""
    return torch.cuda.stream(stream) if stream is not None else nullcontext()
