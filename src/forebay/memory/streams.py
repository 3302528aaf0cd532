"""The two copy streams of one device, and the few stream operations that stores need.

A `CopyLanes` object is owned by a store and dies with it. On a CPU there are no streams: every operation here is then
a no-op that is already ordered, so stores are written once for both.

Who waits for whom: a copy out waits for the compute stream at the moment the tensor was saved; the compute stream
waits for a copy only where a store says so. Nothing here calls ``record_stream``: its effect is that memory comes
back at an unknown time, which is what a memory library must not do.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from forebay.kernels.flags import Flag, Flags

Events = tuple[torch.cuda.Event, torch.cuda.Event]
Copy = tuple[torch.Tensor, torch.Tensor]  # from, to


class Era:
    """The copies between two times at which the host waited for all of them. ``over``: none of them is under way."""

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over = False


class Done:
    """The end of copies that were enqueued together. ``pair`` holds (start, end) CUDA events, or None on a CPU, where they are
    over at once.

    Args:
        era: of the copies. Nothing waits for them once it is over.
        spare: where the events go when nobody can ask for them any more. They may be recorded again although a stream has yet
            to reach its wait for them: that wait is for what was recorded when it was enqueued.
        clock: the events to ask for the time, where they are not `pair`; None for copies whose time nobody can ask for.
        flag: of copies in a CUDA graph, what is set at their end.
    """

    __slots__ = ("_behind", "_clock", "_era", "_flag", "_spare", "pair")

    def __init__(
        self,
        pair: Events | None,
        era: Era | None = None,
        spare: list[Events] | None = None,
        clock: Events | None = None,
        flag: Flag | None = None,
    ):
        self.pair = pair
        self._era = era
        self._spare = spare
        self._clock = clock
        self._flag = flag
        self._behind: list[Any] = []  # streams that wait for it already: what they are given from now on is behind it

    def __del__(self) -> None:
        if self.pair is not None and self._spare is not None:
            self._spare.append(self.pair)

    def block(self, stream: Any) -> None:
        """Make `stream` (a CUDA stream, or None on a CPU) wait until the copies are over. The host does not wait."""
        if self.pair is not None and stream not in self._behind and not self.is_over:
            if self._flag is not None:
                self._flag.block(stream)
            else:
                stream.wait_event(self.pair[1])
            self._behind.append(stream)

    @property
    def is_over(self) -> bool:
        """Whether the host has waited for the copies; False where it does not know."""
        return self.pair is None or (self._era is not None and self._era.over)

    def synchronize(self) -> None:
        """Wait on the host for the copies."""
        if self.pair is not None and not self.is_over:
            self.pair[1].synchronize()

    def milliseconds(self) -> float | None:
        """Time the copies took, or None on a CPU, and in a CUDA graph that is not timed. Waits for them on the host: call it
        outside a step."""
        if self._clock is None:
            return None
        self._clock[1].synchronize()
        return self._clock[0].elapsed_time(self._clock[1])


class CopyLanes:
    """One stream for copies to the host, one for copies back; both None on a CPU.

    Attributes:
        time_captured: copies that a CUDA graph captures can be asked for their time, when it has run. Two nodes more a copy.
        flags: by which streams of a graph wait for copies.
    """

    def __init__(self, device: torch.device):
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        on_gpu = device.type == "cuda"
        self.out_stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_gpu else None
        self.back_stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_gpu else None
        self._ready = torch.cuda.Event() if on_gpu else None
        self._spare: list[Events] = []
        self._era = Era()
        self.time_captured = False
        self.flags = Flags(device)

    def compute_stream(self) -> Any:
        """The current stream of the device, or None on a CPU.

        Trap: inside ``with torch.cuda.stream(side)`` this is the side stream, and a copy that waits for it is not
        ordered after the computation. Ask once, at the region's entry, and pass the answer along.
        """
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def other_stream(self, compute: Any) -> Any:
        """The current stream if it is another than `compute`; else, and on a CPU, None.

        Asked for each saved tensor: the raw handles are compared, at a tenth of the time that makes a ``torch.cuda.Stream``.
        """
        if self.device.type != "cuda" or torch._C._cuda_getCurrentRawStream(self.device.index) == compute.cuda_stream:
            return None
        return torch.cuda.current_stream(self.device)

    def copy_out(self, copies: Sequence[Copy], compute: Any, after: Iterable[Done], others: Iterable[Any] = ()) -> Done:
        """Copy device bytes to the host, after what `compute` and the streams `others` have been given so far and after each of
        `after`."""
        if self.out_stream is not None:
            for other in others:
                self.out_stream.wait_stream(other)
        return self._copy(self.out_stream, (copies,), compute, after)[0]

    def copy_back(self, batches: Sequence[Sequence[Copy]], compute: Any) -> list[Done]:
        """Copy host bytes to the device, one batch after the other; each has its own end.

        Targets were allocated on `compute`, whose earlier kernels may still be using that memory for something else: the copies
        wait for them, and so for every copy out that `compute` was made to wait for.
        """
        return self._copy(self.back_stream, batches, compute, ())

    def join(self) -> None:
        """At the end of a capture: make the current stream wait for what each stream was given in it."""
        current = self.compute_stream()
        for lane in (self.out_stream, self.back_stream):
            if lane is not None:
                with torch.cuda.stream(lane):
                    captured = _is_capturing()
                if captured:
                    current.wait_stream(lane)

    def synchronize(self) -> None:
        """Wait on the host for both streams. Nothing waits again for a copy that was enqueued before: an event of a capture
        cannot be waited for outside of it, nor one from outside within it."""
        for stream in (self.out_stream, self.back_stream):
            if stream is not None:
                stream.synchronize()
        self._era.over, self._era = True, Era()

    def _copy(self, lane: Any, batches: Sequence[Sequence[Copy]], compute: Any, after: Iterable[Done]) -> list[Done]:
        if lane is None:
            for copies in batches:
                for source, target in copies:
                    target.copy_(source)
            return [Done(None) for _ in batches]
        assert self._ready is not None
        flags = self._flags_for(batches, compute)
        self._ready.record(compute)
        lane.wait_event(self._ready)
        for earlier in after:
            earlier.block(lane)
        ends = []
        with torch.cuda.stream(lane):
            captured = _is_capturing()
            for copies, flag in zip(batches, flags, strict=True):
                pair = self._pair()
                clock = (external_event(), external_event()) if captured and self.time_captured else None
                start, end = clock or pair
                start.record(lane)
                for source, target in copies:
                    target.copy_(source, non_blocking=True)
                end.record(lane)
                if clock is not None:
                    pair[1].record(lane)  # an external event is a time and no order within its graph
                if flag is not None:
                    flag.set(lane)
                ends.append(Done(pair, self._era, self._spare, clock if captured else pair, flag))
        return ends

    def _flags_for(self, batches: Sequence[Any], compute: Any) -> Sequence[Flag | None]:
        if not _is_capturing():
            return [None] * len(batches)
        with torch.cuda.stream(compute):
            return [self.flags.take() for _ in batches]

    def _pair(self) -> Events:
        if self._spare:
            return self._spare.pop()
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def external_event() -> torch.cuda.Event:
    """An event that a graph records each time it is replayed; between replays the host can ask for its time."""
    return torch.cuda.Event(enable_timing=True, external=True)


def timing_event() -> torch.cuda.Event:
    """An event that tells the time, of a graph's replay if the current stream is part of one that is being captured."""
    return external_event() if _is_capturing() else torch.cuda.Event(enable_timing=True)


def _is_capturing() -> bool:
    """Whether the current stream is part of a CUDA graph that is being captured."""
    return torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing()


def on_stream(stream: Any) -> Any:
    """Context in which allocations and kernels belong to `stream`; does nothing for None (a CPU)."""
    return torch.cuda.stream(stream) if stream is not None else nullcontext()
