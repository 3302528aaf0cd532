"""The two copy streams of one device, and the few stream operations that stores need.

A `CopyLanes` object is owned by a store and dies with it. On a CPU there are no streams: every operation here is then
a no-op that is already ordered, so stores are written once for both.

Who waits for whom: a copy out waits for the compute stream at the moment the tensor was saved; the compute stream
waits for a copy only where a store says so. Nothing here calls ``record_stream``: its effect is that memory comes
back at an unknown time, which is what a memory library must not do.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class Done:
    """The end of one copy. ``pair`` holds (start, end) CUDA events, or None on a CPU, where it is over at once."""

    __slots__ = ("pair",)

    def __init__(self, pair: tuple[torch.cuda.Event, torch.cuda.Event] | None):
        self.pair = pair

    def block(self, stream: Any) -> None:
        """Make `stream` (a CUDA stream, or None on a CPU) wait until the copy is over. The host does not wait."""
        if self.pair is not None:
            stream.wait_event(self.pair[1])

    def milliseconds(self) -> float | None:
        """Time the copy took, or None on a CPU. Waits for the copy on the host: call it outside a step."""
        if self.pair is None:
            return None
        self.pair[1].synchronize()
        return self.pair[0].elapsed_time(self.pair[1])


class CopyLanes:
    """One stream for copies to the host, one for copies back; both None on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        on_gpu = device.type == "cuda"
        self.out_stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_gpu else None
        self.back_stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_gpu else None

    def compute_stream(self) -> Any:
        """The current stream of the device, or None on a CPU.

        Trap: inside ``with torch.cuda.stream(side)`` this is the side stream, and a copy that waits for it is not
        ordered after the computation. Ask once, at the region's entry, and pass the answer along.
        """
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, compute: Any, after: Done | None) -> Done:
        """Copy device bytes to the host, after what `compute` has been given so far and after `after`."""
        return self._copy(self.out_stream, source, target, compute, after)

    def copy_back(self, source: torch.Tensor, target: torch.Tensor, compute: Any, after: Done | None) -> Done:
        """Copy host bytes to the device. `target` was allocated on `compute`, whose earlier kernels may still be using
        that memory for something else: the copy waits for them."""
        return self._copy(self.back_stream, source, target, compute, after)

    def synchronize(self) -> None:
        """Wait on the host for both streams (closing a store, tests)."""
        for stream in (self.out_stream, self.back_stream):
            if stream is not None:
                stream.synchronize()

    def _copy(self, lane: Any, source: torch.Tensor, target: torch.Tensor, compute: Any, after: Done | None) -> Done:
        if lane is None:
            target.copy_(source)
            return Done(None)
        ready = torch.cuda.Event()
        ready.record(compute)
        lane.wait_event(ready)
        if after is not None:
            after.block(lane)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(lane):
            start.record(lane)
            target.copy_(source, non_blocking=True)
            end.record(lane)
        return Done((start, end))


def on_stream(stream: Any) -> Any:
    """Context in which allocations and kernels belong to `stream`; does nothing for None (a CPU)."""
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def delayed(lane: Any, cycles: int) -> Callable[[], None]:
    """A function that keeps `lane` busy for `cycles` GPU clock ticks: tests use it to provoke races."""

    def sleep() -> None:
        if lane is not None:
            with torch.cuda.stream(lane):
                torch.cuda._sleep(cycles)

    return sleep
