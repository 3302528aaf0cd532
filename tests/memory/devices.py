"""A simulated CUDA device: its clock and its allocator's figures."""

from __future__ import annotations

import pytest
import torch


class SimulatedEvent:
    """A CUDA event of a `SimulatedDevice`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.at, self.on = device, -1.0, -1

    def record(self, stream: int | None = None) -> None:
        self.at, self.on = self.device.clock, self.device.current if stream is None else stream

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: SimulatedEvent) -> float:
        assert self.on == other.on, "CUDA refuses events of two devices"
        return other.at - self.at


class SimulatedDevice:
    """Stands in for `torch.cuda`.

    Attributes:
        clock: milliseconds.
        current: number of the current device. A stream is the number of its device.
        now, top: bytes that tensors take, and the peak since its last reset.
        rounding: bytes that the allocator gives beyond what is requested.
        waiting: bytes that are freed, but not for another stream.
        counts_requests: the allocator counts requested bytes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.current, self.now, self.top, self.rounding, self.waiting = 0.0, 0, 0, 0, 0, 0
        self.counts_requests = True
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimulatedEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device.index)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: self.stats())
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.top)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(self, "top", self.now))

    def rises(self, to: int, now: int | None = None) -> None:
        self.top, self.now = max(self.top, to), self.now if now is None else now

    def mark(self, at: float | None = None) -> SimulatedEvent:
        """An event recorded now, or `at` a time to which the clock is set."""
        self.clock = self.clock if at is None else at
        event = SimulatedEvent(self)
        event.record()
        return event

    def stats(self) -> dict[str, int]:
        more = {"allocated": self.rounding, "active": self.rounding + self.waiting}
        if self.counts_requests:
            more["requested"] = self.waiting
        kinds = {"current": self.now, "peak": self.top}
        return {f"{name}_bytes.all.{kind}": size + m for name, m in more.items() for kind, size in kinds.items()}
