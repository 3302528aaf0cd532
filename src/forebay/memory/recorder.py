"""Measures a step: the order of its events, and time and memory at each of them.

Input: the manager tells one `Recorder` of each region call and of the start of its forward and backward. Output depends on what
the step is measured for: a `Timeline` to plan from (`TimelineRecorder`), the times and memory of a step that follows a plan,
which correct the timeline (`TimingRecorder`), or that step's time and peak (`TrialRecorder`). The autotuner owns the recorder
of the current step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from forebay.memory.host_store import HostStore
from forebay.memory.timeline import CallFigures, IndexedTimeline, Key, Plan, Timeline, TimelineEvent

Marks = tuple[Any, Any]  # CUDA events before and after the waits for copies; None on a CPU

_MIN_WAIT_MS = 0.05  # two marks with nothing between them are some microseconds apart, a thousand times a step
_INPUT_TOLERANCE = 0.01  # share by which a call's inputs may differ from the measured ones


class Peaks:
    """Peak memory across calls to `torch.cuda.reset_peak_memory_stats`."""

    def __init__(self) -> None:
        self.highest = 0  # bytes, before the last reset

    def reset(self, device: torch.device) -> None:
        """Reset the allocator's peak."""
        self.highest = max(self.highest, torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)

    def take(self) -> int:
        """Return `highest` and start over."""
        highest, self.highest = self.highest, 0
        return highest


def requested(device: torch.device) -> tuple[int, int]:
    """Bytes that tensors requested from a CUDA device's allocator: now, and the peak since it was reset.

    Allocated bytes are more: a block is given out whole if less than 1 MiB of it would be left, and how many such blocks there
    are at an event differs by several MiB from step to step. Plans count tensors, so that is noise to them.

    Trap: torch's count of requested bytes includes freed tensors that another stream may still read (`record_stream`), as its
    count of active bytes does; the count of allocated bytes does not. The current figure is corrected by the difference. For the
    peak the smaller count is taken: neither is too low.
    """
    stats = torch.cuda.memory_stats(device)
    allocated, most = (stats.get(f"allocated_bytes.all.{kind}", 0) for kind in ("current", "peak"))
    asked, active = (stats.get(f"{kind}_bytes.all.current", 0) for kind in ("requested", "active"))
    if not stats.get("requested_bytes.all.peak"):  # cudaMallocAsync does not count them
        return allocated, most
    return allocated - (active - asked), min(most, stats["requested_bytes.all.peak"])


class Recorder:
    """Measures one step. The manager calls these methods, which do nothing by default.

    Attributes:
        reads_inputs: whether `entered` is to be called.
        times_events: whether `after_waits` needs the marks of every event.
    """

    reads_inputs = True
    times_events = False

    def __init__(self, device: torch.device, peaks: Peaks):
        self._device, self._peaks, self._gpu = device, peaks, device.type == "cuda"

    def entered(self, key: Key, input_bytes: int) -> None:
        """A region call begins."""

    def before_waits(self) -> None:
        """An event begins. Nothing was released or fetched for it yet."""

    def after_waits(self, kind: str, key: Key, marks: Marks | None) -> None:
        """The releases and fetches that are due at the event are done.

        Args:
            kind: "F" or "B" of the call `key`.
            marks: None if the plan moves nothing.
        """

    def idle(self, mark: Callable[[], Any]) -> None:
        """The device waits for another process until the next event. `mark` records a CUDA event."""


@dataclass
class _Sample:
    kind: str
    key: Key
    marks: Marks
    start_bytes: int = 0
    top_bytes: int | None = None
    tickets: int = 0  # bytes, see `_EventRecorder._ticket_bytes`
    region_end: Any = None  # CUDA event: the region's forward is over
    idle_from: Any = None  # CUDA event: the device waits for other processes from here on

    def seconds_to(self, following: Any) -> float:
        """From the end of the waits to the CUDA event `following`."""
        after = self.marks[1]
        return after.elapsed_time(following) / 1e3 if after is not None and following is not None else 0.0


class _EventRecorder(Recorder):
    """Samples time and memory at each event. Reads the allocator's peak there, and resets it.

    Args:
        store: has the tickets of the step.
    """

    times_events = True

    def __init__(self, device: torch.device, store: HostStore, peaks: Peaks):
        super().__init__(device, peaks)
        self._store = store
        self._samples: list[_Sample] = []

    def before_waits(self) -> None:
        if self._gpu and self._samples:
            self._samples[-1].top_bytes = self._peak_bytes()

    def after_waits(self, kind: str, key: Key, marks: Marks | None) -> None:
        if marks is None:
            return
        sample = _Sample(kind, key, marks)
        if self._gpu:
            self._peaks.reset(self._device)
            sample.start_bytes, sample.tickets = self._current_bytes(), self._ticket_bytes()
        self._samples.append(sample)

    def idle(self, mark: Callable[[], Any]) -> None:
        # A CUDA graph keeps the events that are recorded in it: none is recorded to be dropped.
        if self._samples and self._samples[-1].idle_from is None:
            self._samples[-1].idle_from = mark()

    def _current_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def _ticket_bytes(self) -> int:
        """Bytes of tickets on the device."""
        return self._store.device_bytes


class TimelineRecorder(_EventRecorder):
    """Records a `Timeline`. On a CPU there are no times and no memory: the timeline then has sizes and order only.

    Args:
        base: bytes allocated before the step. None: those allocated when its first region is entered,
            an embedding's output included.
    """

    def __init__(self, device: torch.device, store: HostStore, base: int | None, peaks: Peaks):
        super().__init__(device, store, peaks)
        self._base = base
        self._figures: dict[Key, CallFigures] = {}
        self._inputs: dict[Key, int] = {}
        self._shared: dict[Key, list[Key]] = {}

    def entered(self, key: Key, input_bytes: int) -> None:
        self._inputs[key] = input_bytes

    def before_waits(self) -> None:
        super().before_waits()
        if self._gpu and self._base is None:
            self._base = torch.cuda.memory_allocated(self._device)

    def region_left(
        self, key: Key, items: list[int], light_recompute: bool, made_again: int, mark: Callable[[], Any]
    ) -> None:
        """The forward of a call is over. `items`: bytes of the storages that it saved first. See `CallFigures`."""
        last = next((s for s in reversed(self._samples) if s.key == key and s.kind == "F"), None)
        if last is None:
            return  # another thread has begun a step since the call began
        self._figures[key] = CallFigures(
            key, tuple(items), 0.0, light_recompute, self._inputs.get(key, 0), made_again=made_again
        )
        last.region_end = mark()

    def exclude(self, key: Key, item: int) -> None:
        """An item that is not to be offloaded: it counts as no bytes."""
        figures = self._figures.get(key)
        if figures is not None:  # else the call raised, or is of a step that another thread ended
            self._figures[key] = replace(figures, items=(*figures.items[:item], 0, *figures.items[item + 1 :]))

    def share(self, key: Key, later: Key) -> None:
        """The call `later` saves an item that `key` saved before it."""
        known = self._shared.setdefault(key, [])
        if later not in known:
            known.append(later)

    @property
    def complete(self) -> bool:
        """A backward ran. Ask when the step is over: no backward is expected then of calls that only ran forward."""
        return any(sample.kind == "B" for sample in self._samples)

    def reached(self, key: Key) -> bool:
        """Whether a call ran backward."""
        return any(sample.kind == "B" and sample.key == key for sample in self._samples)

    @property
    def unreached(self) -> dict[Key, tuple[int, ...]]:
        """Bytes of the items of calls that ran no backward, such as those whose outputs the loss does not use. They are not in
        the timeline; what they saved counts as other memory."""
        reached = {sample.key for sample in self._samples if sample.kind == "B"}
        # A copy: another thread may still leave a region of this step.
        return {key: figures.items for key, figures in self._figures.copy().items() if key not in reached}

    def timeline(self, out_rate: float | None, back_rate: float | None, mark: Callable[[], Any]) -> Timeline:
        """The recorded step. Waits for the device.

        Args:
            out_rate, back_rate: bytes a second; None: copies take no time.
        """
        self.before_waits()
        end = mark()
        if self._gpu:
            torch.cuda.synchronize(self._device)
        figures, unreached = self._figures.copy(), self.unreached
        numbers = {key: i for i, key in enumerate(key for key in figures if key not in unreached)}
        events: list[TimelineEvent] = []
        forward_seconds: dict[Key, float] = {}
        unreached_bytes = 0
        for index, sample in enumerate(self._samples):
            if sample.key not in numbers:
                unreached_bytes += sum(unreached.get(sample.key, ()))
                continue
            following = self._samples[index + 1].marks[0] if index + 1 < len(self._samples) else end
            forward_seconds.setdefault(sample.key, sample.seconds_to(sample.region_end))
            other, transient = unreached_bytes, 0
            if self._gpu:
                other += max(sample.start_bytes - (self._base or 0) - sample.tickets, 0)
                transient = max((sample.top_bytes or 0) - sample.start_bytes, 0)
            seconds = sample.seconds_to(sample.idle_from or following)
            events.append(TimelineEvent(sample.kind, numbers[sample.key], seconds, other, transient))
        calls = tuple(
            replace(
                figures[key],
                seconds=forward_seconds.get(key, 0.0),
                shared_with=tuple(other for other in self._shared.get(key, ()) if other in numbers),
            )
            for key in numbers
        )
        return Timeline(calls, _without_epilogue(events), out_rate or float("inf"), back_rate or float("inf"))


class TimingRecorder(_EventRecorder):
    """Corrects a timeline's times and memory from a step that follows a plan, on a CUDA device.

    The recorded steps are slow: they copy one call at a time and keep the host so busy that the device may wait for it. Their
    sizes and order are right, their times too long, and their memory is that of copying one call at a time. If the step is
    captured in a CUDA graph, its marks tell the times of the last replay, and memory is that of the capture. Memory is what
    tensors `requested`.
    """

    reads_inputs = False

    def waited(self) -> float:
        """Share of the step for which the compute stream waited for copies. Waits for the device."""
        torch.cuda.synchronize(self._device)
        if not self._samples:
            return 0.0
        waits = [sample.marks[0].elapsed_time(sample.marks[1]) for sample in self._samples]
        step = self._samples[0].marks[0].elapsed_time(self._samples[-1].marks[1])
        return float(sum(ms for ms in waits if ms > _MIN_WAIT_MS) / (step or 1.0))

    def retimed(self, timeline: Timeline) -> Timeline | None:
        """`timeline` with the times and memory of this step; None if the step had other events. Waits for the device."""
        names = [(event.kind, timeline.calls[event.call].key) for event in timeline.events]
        if names != [(sample.kind, sample.key) for sample in self._samples]:
            return None
        torch.cuda.synchronize(self._device)
        events = self._with_memory(timeline)
        for index in range(len(events) - 1):
            sample, begins = self._samples[index], self._samples[index + 1].marks[0]
            seconds = sample.seconds_to(sample.idle_from or begins)
            idle = sample.idle_from.elapsed_time(begins) / 1e3 if sample.idle_from is not None else 0.0
            events[index] = replace(events[index], seconds=min(seconds, events[index].seconds), idle=idle)
        # A forward is shorter by what its event is: in a measured step, the first one's may be waits for the host mostly.
        calls = list(timeline.calls)
        for before, now in zip(timeline.events, events, strict=True):
            if now.kind == "F" and before.seconds:
                call = calls[now.call]
                calls[now.call] = replace(call, seconds=call.seconds * now.seconds / before.seconds)
        return replace(timeline, calls=tuple(calls), events=tuple(events))

    def _with_memory(self, timeline: Timeline) -> list[TimelineEvent]:
        """`other` of an event is the memory at its start less the saved items that a plan counts there: those of each call, from
        the event after its forward to its backward, unless they are on the host."""
        found, resident = [], IndexedTimeline(timeline).resident
        for event, sample, saved in zip(timeline.events, self._samples, resident, strict=False):
            other = sample.start_bytes - self._samples[0].start_bytes - (saved - sample.tickets)
            transient = event.transient  # stays that of the last event, which has no end
            if sample.top_bytes is not None:
                transient = max(sample.top_bytes - sample.start_bytes, 0)
            found.append(replace(event, other=other, transient=transient))
        return found

    def _current_bytes(self) -> int:
        return requested(self._device)[0]

    def _peak_bytes(self) -> int:
        return requested(self._device)[1]

    def _ticket_bytes(self) -> int:
        """Bytes of tickets that are not on the device."""
        return self._store.live_bytes - self._store.device_bytes


class TrialRecorder(Recorder):
    """Measures the time and the peak of a step that follows a plan, on a CUDA device; the step begins now. Reads the allocator's
    peak only at the last event and at the end.

    The last event runs on into the optimizer step and the next batch, which are not part of a plan. So memory counts as rising in
    it no higher than the plan has it rise in any backward event.

    Args:
        base: bytes allocated before the step; None: those allocated now.
    """

    def __init__(self, device: torch.device, timeline: Timeline, plan: Plan, base: int | None, peaks: Peaks):
        super().__init__(device, peaks)
        self._inputs = {call.key: call.input_bytes for call in timeline.calls}
        last = timeline.events[-1]
        self._last = last.kind, timeline.calls[last.call].key
        self._rise = highest_rise(timeline, plan)
        self._base = base if base is not None else torch.cuda.memory_allocated(device)
        self._peak_and_last: tuple[int, int] | None = None  # bytes: peak before the last event, and at its start
        self._same_inputs = True
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record(torch.cuda.current_stream(device))  # of this device, which need not be the current one
        self._peaks.reset(device)

    def entered(self, key: Key, input_bytes: int) -> None:
        # A plan is not faster because a batch is shorter.
        then = self._inputs.get(key, -1)
        self._same_inputs = self._same_inputs and abs(input_bytes - then) <= _INPUT_TOLERANCE * then

    def after_waits(self, kind: str, key: Key, marks: Marks | None) -> None:
        if (kind, key) == self._last:
            current, peak = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
            self._peak_and_last = peak(self._device), current(self._device)
            self._peaks.reset(self._device)

    def result(self) -> tuple[Callable[[], float], int] | None:
        """Call when the next step begins.

        Returns:
            A function that returns the step's milliseconds, which waits for the device, and the peak in bytes over the base. None
            if the step had other inputs or did not reach its last backward.
        """
        if self._peak_and_last is None or not self._same_inputs:
            return None
        begin, end = self._begin, torch.cuda.Event(enable_timing=True)
        end.record(torch.cuda.current_stream(self._device))
        peak, start = self._peak_and_last
        rise = min(torch.cuda.max_memory_allocated(self._device) - start, self._rise)

        def milliseconds() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return milliseconds, max(peak, start + rise) - self._base


def highest_rise(timeline: Timeline, plan: Plan) -> int:
    """Bytes by which a backward event rises above its start at most, recomputation included."""
    rises = [0]
    for event in timeline.events:
        if event.kind == "B":
            call = timeline.calls[event.call]
            rises.append(event.transient + (call.recompute_frees if call.key[0] in plan.recompute else 0))
    return max(rises)


def _without_epilogue(events: list[TimelineEvent]) -> tuple[TimelineEvent, ...]:
    """Cut the last event, which runs on into the optimizer step and the next batch, to the longest and highest of the other
    backward events."""
    others = [event for event in events[:-1] if event.kind == "B"]
    if not others:
        return tuple(events)
    last = replace(
        events[-1],
        seconds=min(events[-1].seconds, max(event.seconds for event in others)),
        transient=min(events[-1].transient, max(event.transient for event in others)),
    )
    return (*events[:-1], last)
