"""Measures a step: the order of region calls, and time and memory at each of them.

Input: the start of each region call's forward and backward. Output: a `Timeline` (`Recorder`), corrected times
(`Stopwatch`), or time and peak of a step that runs as planned (`Meter`). The manager owns the recorder of the current
step.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from forebay.memory.host_store import Ticket
from forebay.memory.timeline import CallFigures, Key, Plan, Rates, Timeline, TimelineEvent

# The order of region calls within a cycle, and what was measured at each moment of it.
#
# A *cycle* begins when a region is entered while no earlier call waits for its backward, and ends when the next begins. One
# forward and backward is a cycle; so are several forwards and then their backwards, and a pipeline's whole step. Nothing
# here assumes that a backward follows its forward: calls are numbered as they come and the backward order is what
# happens, or, before it has happened once, the reverse of forward.
#
# In: `Recorder.event` at each start of a region's forward or backward. Out: a `Timeline` for the planner.

_TICK = 0.05  # ms; two events with nothing between them are some microseconds apart, a thousand times a step


@dataclass(eq=False, slots=True, weakref_slot=True)
class RegionCall:
    """One forward of one region. Owned by the autograd graph (through packed tensors and gradient hooks).

    ``number`` counts the cycle's calls, ``forward`` the model's forwards in the cycle. ``tickets`` are weak: the graph owns
    them too. ``held`` are those of them that are sent when the forward is over, owned until then. ``leaving`` are the ordinals
    of the items that leave, None for all; ``compute`` is the stream that the call runs on, None on a CPU. ``given_up``: its
    forward failed, or a backward through its model's forward is over. ``hooks`` announce its backward.
    """

    key: Key
    cycle: "StepCalls"
    number: int = 0
    forward: int = 0
    items: list[int] = field(default_factory=list)
    tickets: list["weakref.ref[Ticket]"] = field(default_factory=list)
    held: list[Ticket] = field(default_factory=list)
    input_bytes: int = 0
    light_recompute: bool = False
    leaving: frozenset[int] | None = None
    compute: Any = None
    backward_started: bool = False
    given_up: bool = False
    hooks: list[Any] = field(default_factory=list)

    def remove_hooks(self) -> None:
        """Take the hooks off the outputs: an output may outlive the graph, and be another call's output too."""
        while self.hooks:
            self.hooks.pop().remove()

    def live_tickets(self) -> list[Ticket]:
        return [t for ref in self.tickets if (t := ref()) is not None]

    @property
    def over(self) -> bool:
        """Backward has run, or is not expected. A loss that the user keeps still holds the graph's nodes, but no saved
        tensors."""
        return self.given_up or (self.backward_started and not self.live_tickets())


class StepCalls:
    """The calls since the last quiet moment. Holds calls weakly: whether one is alive says whether its graph is."""

    def __init__(self) -> None:
        self._calls: list[weakref.ref[RegionCall]] = []
        self._by_key: dict[Key, weakref.ref[RegionCall]] = {}
        self._counts: dict[str, int] = {}
        self._forward = 0  # the model's forward that runs: another one begins where a region comes again
        self._in_forward: set[str] = set()
        self._over = 0  # calls before this one are over: a pipeline's step has thousands
        self._place = 0  # in the order of backwards: those before have begun

    def new_call(self, path: str) -> RegionCall:
        count = self._counts.get(path, 0)
        self._counts[path] = count + 1
        if path in self._in_forward:
            self._forward += 1
            self._in_forward.clear()
        self._in_forward.add(path)
        call = RegionCall((path, count), self, len(self._calls), self._forward)
        self._calls.append(weakref.ref(call))
        self._by_key[call.key] = self._calls[-1]
        return call

    def backward_is_over(self, forwards: Collection[int]) -> None:
        """A backward went through these forwards. No more is expected of them, nor of those before them: the caller may hold an
        output that the loss does not use, or the traceback of a forward that failed, for good. If a backward comes after all, it
        finds what it needs."""
        self._give_up(max(forwards, default=-1))

    def forward_failed(self) -> None:
        """No backward is expected of the forward that runs."""
        self._give_up(self._forward)

    def _give_up(self, newest: int) -> None:
        for ref in self._calls[self._over :]:
            call = ref()
            if call is not None and call.forward <= newest:
                call.given_up = True

    @property
    def quiet(self) -> bool:
        """Every call's graph was dropped, has run backward, or is not expected to."""
        while self._over < len(self._calls):
            call = self._calls[self._over]()
            if call is not None and not call.over:
                return False
            self._over += 1
        return True

    def find(self, key: Key) -> RegionCall | None:
        ref = self._by_key.get(key)
        return ref() if ref is not None else None

    def next_backward(self, order: Sequence[Key] = ()) -> RegionCall | None:
        """The call whose backward is expected next: by `order`, or, where nothing is known of a schedule, the latest not yet run.

        Args:
            order: of backwards in a cycle. Those that have begun are passed over. None comes after one whose forward is still
                to come: who fetched for later ones would fetch too early.
        """
        if order:
            while self._place < len(order):
                call = self.find(order[self._place])
                if call is None and not self._counts.get(order[self._place][0], 0) > order[self._place][1]:
                    return None
                if call is not None and not call.backward_started:
                    return call
                self._place += 1
            return None
        return next((c for ref in reversed(self._calls) if (c := ref()) is not None and not c.backward_started), None)


@dataclass
class _Sample:
    """A moment as recorded. Events are (before Forebay's waits, after them)."""

    kind: str
    key: Key
    events: tuple[Any, Any] | None
    start_bytes: int = 0
    top_bytes: int = 0
    ours: int = 0
    region_end: Any = None
    idle_from: Any = None  # event: from here on the device waits for other ranks


class Peaks:
    """The allocator's highest, for who asks behind those who measure moments and reset it.

    Attributes:
        highest: bytes, of the times before the last reset.
    """

    def __init__(self) -> None:
        self.highest = 0

    def reset(self, device: torch.device) -> None:
        """Reset the allocator's peak."""
        self.highest = max(self.highest, torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)

    def take(self) -> int:
        """`highest`, which begins anew."""
        highest, self.highest = self.highest, 0
        return highest


def requested(device: torch.device) -> tuple[int, int]:
    """Bytes that the tensors of a CUDA device asked its allocator for: now, and at most since its peaks were reset.

    What is allocated is more: a block of which less than 1 MiB would be left is given out whole, and how many of them there are
    at a moment differs from step to step by several MiB. A plan says what tensors take; beside that, this is noise.

    Trap: torch's own count of requested bytes also has those of tensors that are gone while another stream may still read them
    (`record_stream`); that of active bytes has them too, that of allocated ones has not. Of now the difference is taken off. Of a
    peak the smaller count is taken: neither is too low.
    """
    stats = torch.cuda.memory_stats(device)
    allocated, most = (stats.get(f"allocated_bytes.all.{kind}", 0) for kind in ("current", "peak"))
    asked, active = (stats.get(f"{kind}_bytes.all.current", 0) for kind in ("requested", "active"))
    if not stats.get("requested_bytes.all.peak"):  # cudaMallocAsync does not count them
        return allocated, most
    return allocated - (active - asked), min(most, stats["requested_bytes.all.peak"])


class Recorder:
    """Times and memory of one cycle. On a CPU there is neither; the timeline then has sizes and order only.

    Reads the allocator's peak and resets it at each moment, so it is used for the measuring cycles only.

    Args:
        base: bytes that were held before the cycle. None: those held when its first region is entered, with whatever came before
            (an embedding's output) among them.
        peaks: are told of what is reset.
    """

    def __init__(self, device: torch.device, base: int | None = None, peaks: Peaks | None = None):
        self._device = device
        self._peaks = peaks or Peaks()
        self._gpu = device.type == "cuda"
        self._samples: list[_Sample] = []
        self._figures: dict[Key, CallFigures] = {}
        self._shared: dict[Key, list[Key]] = {}
        self._base = base

    @property
    def complete(self) -> bool:
        """A backward ran. Ask when the cycle is over: calls that ran forward only are not expected to run backward then."""
        return any(sample.kind == "B" for sample in self._samples)

    @property
    def unreached(self) -> dict[Key, tuple[int, ...]]:
        """Bytes of the items of the calls that ran forward only, such as those whose outputs the loss does not use. They are no
        part of the timeline; what they saved counts as other memory."""
        reached = {sample.key for sample in self._samples if sample.kind == "B"}
        return {key: figures.items for key, figures in self._figures.items() if key not in reached}

    def before_waits(self, kind: str, key: Key) -> None:
        self._close_last()
        self._samples.append(_Sample(kind, key, self._pair()))
        if self._gpu and self._base is None:
            self._base = torch.cuda.memory_allocated(self._device)

    def after_waits(self, ours: int) -> None:
        """`ours`: bytes of saved items on the device now."""
        sample = self._samples[-1]
        sample.ours = ours
        if self._gpu:
            assert sample.events is not None
            sample.events[1].record()
            self._peaks.reset(self._device)
            sample.start_bytes = torch.cuda.memory_allocated(self._device)

    def idle(self) -> None:
        """What comes until the next moment is no work of this process: it waits for another one."""
        if self._gpu and self._samples and self._samples[-1].idle_from is None:
            self._samples[-1].idle_from = torch.cuda.Event(enable_timing=True)
            self._samples[-1].idle_from.record()

    def region_left(self, call: RegionCall) -> None:
        """The forward of `call` is over; what it saved is known."""
        self._figures[call.key] = CallFigures(call.key, tuple(call.items), 0.0, call.light_recompute, call.input_bytes)
        if self._gpu:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            last = next(s for s in reversed(self._samples) if s.key == call.key and s.kind == "F")
            last.region_end = end

    def exclude(self, key: Key, ordinal: int) -> None:
        """An item that is not to leave: it counts as no bytes."""
        figures = self._figures[key]
        items = (*figures.items[:ordinal], 0, *figures.items[ordinal + 1 :])
        self._figures[key] = replace(figures, items=items)

    def share(self, key: Key, later: Key) -> None:
        """The call `later` saves an item too that `key` saved before it."""
        known = self._shared.setdefault(key, [])
        if later not in known:
            known.append(later)

    def timeline(self, out_rate: float | None, back_rate: float | None) -> Timeline:
        """The cycle as figures. Waits for the device. Rates in bytes a second; None means no copies to wait for."""
        self._close_last()
        closing = self._pair()
        if self._gpu:
            torch.cuda.synchronize(self._device)
        unreached = self.unreached
        keys = [key for key in self._figures if key not in unreached]
        numbers = {key: i for i, key in enumerate(keys)}
        events, forward_seconds, stays = [], {}, 0
        for index, sample in enumerate(self._samples):
            if sample.key not in numbers:
                stays += sum(unreached.get(sample.key, ()))
                continue
            following = self._samples[index + 1].events if index + 1 < len(self._samples) else closing
            seconds = self._seconds(sample.events, following, sample.idle_from)
            if sample.region_end is not None and sample.events is not None:
                forward_seconds[sample.key] = sample.events[1].elapsed_time(sample.region_end) / 1e3
            events.append(
                TimelineEvent(
                    sample.kind,
                    numbers[sample.key],
                    seconds,
                    stays + (max(sample.start_bytes - (self._base or 0) - sample.ours, 0) if self._gpu else 0),
                    max(sample.top_bytes - sample.start_bytes, 0),
                )
            )
        calls = tuple(
            replace(
                self._figures[key],
                seconds=forward_seconds.get(key, 0.0),
                shared_with=tuple(other for other in self._shared.get(key, ()) if other not in unreached),
            )
            for key in keys
        )
        return Timeline(calls, _without_epilogue(events), out_rate or float("inf"), back_rate or float("inf"))

    def _pair(self) -> tuple[Any, Any] | None:
        if not self._gpu:
            return None
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        return pair

    def _close_last(self) -> None:
        if self._samples and self._gpu and not self._samples[-1].top_bytes:
            self._samples[-1].top_bytes = torch.cuda.max_memory_allocated(self._device)

    def _seconds(self, this: tuple[Any, Any] | None, following: tuple[Any, Any] | None, idle_from: Any) -> float:
        if this is None or following is None:
            return 0.0
        return this[1].elapsed_time(idle_from or following[0]) / 1e3


class Stopwatch:
    """How long each moment of a cycle takes, and what memory there is at it, when nothing is recorded but that; on a CUDA device.

    The measuring cycles are slow: they copy one call at a time, and keep the host so busy that the device may wait for it. Their
    sizes and order are right, their times too long, and their memory is that of copying one at a time. This takes both from a
    cycle that runs as planned. Of one that is captured in a CUDA graph, events tell the times of its last replay, and memory is
    that of the capture. Memory is what tensors `requested`.

    Reads the allocator's peak and resets it at each moment.

    Args:
        peaks: are told of what is reset.
    """

    def __init__(self, device: torch.device, peaks: Peaks | None = None) -> None:
        self._device = device
        self._peaks = peaks or Peaks()
        self._events: list[tuple[str, Key, Any, Any]] = []
        self._idle: dict[int, Any] = {}
        self._memory: list[tuple[int, int]] = []  # at a moment: requested, and bytes of saved items on the host
        self._tops: list[int] = []  # of the moments before

    def before_event(self) -> None:
        """Before anything is fetched or settled at the moment that comes."""
        if self._events:
            self._tops.append(requested(self._device)[1])

    def event(self, kind: str, key: Key, before: Any, after: Any, away: int) -> None:
        """A region's forward or backward starts. The events are from before and behind Forebay's waits; `away` bytes of saved
        items are on the host."""
        self._peaks.reset(self._device)
        self._events.append((kind, key, before, after))
        self._memory.append((requested(self._device)[0], away))

    def idle(self, mark: Callable[[], Any]) -> None:
        """From here until the next moment the device waits for another process. `mark` records an event."""
        index = len(self._events) - 1
        if index not in self._idle:  # a graph may hold the event: none is made to be dropped
            self._idle[index] = mark()

    def waited(self) -> float:
        """Share of the cycle in which the compute stream waited for copies. Waits for the device."""
        torch.cuda.synchronize()
        apart = [before.elapsed_time(after) for _, _, before, after in self._events]
        waits = sum(ms for ms in apart if ms > _TICK)
        return waits / (self._events[0][2].elapsed_time(self._events[-1][3]) or 1.0) if self._events else 0.0

    def retimed(self, timeline: Timeline, rates: Rates) -> Timeline | None:
        """`timeline` with these times, memory, and rates; its own `out_rate` and `back_rate` where none is known. None if another
        cycle was run. Waits for the device."""
        names = [(m.kind, timeline.calls[m.call].key) for m in timeline.events]
        if names != [(kind, key) for kind, key, _, _ in self._events]:
            return None
        torch.cuda.synchronize()
        events = self._with_memory(timeline)
        for index in range(len(events) - 1):
            begins = self._events[index + 1][2]
            end = self._idle.get(index, begins)
            seconds = self._events[index][3].elapsed_time(end) / 1e3
            idle = end.elapsed_time(begins) / 1e3 if index in self._idle else 0.0
            events[index] = replace(events[index], seconds=min(seconds, events[index].seconds), idle=idle)
        ratio = sum(m.seconds for m in events) / (sum(m.seconds for m in timeline.events) or 1.0)
        calls = tuple(replace(call, seconds=call.seconds * min(ratio, 1.0)) for call in timeline.calls)
        out, back = rates.out or timeline.out_rate, rates.back or timeline.back_rate
        return Timeline(calls, tuple(events), out, back, rates.opening, rates.closing, timeline.memory_rate)

    def _with_memory(self, timeline: Timeline) -> list[TimelineEvent]:
        """`other` of a moment is what is there less the items that the planner counts as there: of each call all but those on the
        host, from the moment behind its forward up to its backward."""
        change = [0] * (len(timeline.events) + 1)
        backward = {m.call: i for i, m in enumerate(timeline.events) if m.kind == "B"}
        for index, event in enumerate(timeline.events):
            if event.kind == "F" and event.call in backward:
                size = sum(timeline.calls[event.call].items)
                change[index + 1] += size
                change[backward[event.call] + 1] -= size
        base, found = self._memory[0][0], []
        for event, (held, away), saved, top in zip(
            timeline.events, self._memory, accumulate(change), [*self._tops, None], strict=False
        ):
            transient = event.transient if top is None else max(top - held, 0)
            found.append(replace(event, other=held - base - (saved - away), transient=transient))
        return found


def _without_epilogue(events: list[TimelineEvent]) -> tuple[TimelineEvent, ...]:
    """The last backward moment runs on into the optimizer step and the next batch, which are no part of the cycle: it is
    cut to the longest and highest of the other backward moments."""
    others = [m for m in events[:-1] if m.kind == "B"]
    if not others:
        return tuple(events)
    last = replace(
        events[-1],
        seconds=min(events[-1].seconds, max(m.seconds for m in others)),
        transient=min(events[-1].transient, max(m.transient for m in others)),
    )
    return (*events[:-1], last)


# The time and the peak of one cycle that runs as planned, on a CUDA device.
#
# In: the cycle's begin (a `Meter` is made), each region call as it is entered, and each moment. Out, when the next cycle
# begins: its time and by how much memory rose over its base, or None if the cycle is no measure.
#
# The last backward moment runs on into the optimizer's step and the next batch, which are no part of a plan. So its rise is cut
# to the highest that the plan has for a backward moment, as the timeline's is (`forebay.memory.recorder`).

_ALIKE = 0.01  # by so much a call's inputs may differ from the measured ones'


class Meter:
    """Of one cycle, from now on. Reads the allocator's peak twice in it and resets it as often.

    Args:
        base: bytes that were held before the cycle; None: those that are held now.
        peaks: are told of what is reset.
    """

    def __init__(
        self, device: torch.device, timeline: Timeline, plan: Plan, base: int | None, peaks: Peaks | None = None
    ):
        self._device, self._peaks = device, peaks or Peaks()
        self._inputs = {call.key: call.input_bytes for call in timeline.calls}
        last = timeline.events[-1]
        self._last = last.kind, timeline.calls[last.call].key
        self._rise = highest_rise(timeline, plan)
        self._base = base if base is not None else torch.cuda.memory_allocated(device)
        self._tops: tuple[int, int] | None = None  # at most before the last moment, and at its start
        self._alike = True
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()
        self._peaks.reset(device)

    def entered(self, key: Key, input_bytes: int) -> None:
        """A region call begins, with so many bytes of inputs: a shorter batch is faster by no merit of the plan."""
        then = self._inputs.get(key, -1)
        self._alike = self._alike and abs(input_bytes - then) <= _ALIKE * then

    def event(self, kind: str, key: Key) -> None:
        """A region's forward or backward starts; what is due has been fetched and settled."""
        if (kind, key) == self._last:
            self._tops = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
            self._peaks.reset(self._device)

    def over(self) -> tuple[Callable[[], float], int] | None:
        """The next cycle begins.

        Returns:
            (milliseconds, to be asked for later, since that waits for the device; peak in bytes over the base), or None if this
            cycle had other inputs or did not come to its last backward.
        """
        if self._tops is None or not self._alike:
            return None
        begin, end = self._begin, torch.cuda.Event(enable_timing=True)
        end.record()
        top, start = self._tops
        rise = min(torch.cuda.max_memory_allocated(self._device) - start, self._rise)

        def milliseconds() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return milliseconds, max(top, start + rise) - self._base


def highest_rise(timeline: Timeline, plan: Plan) -> int:
    """Bytes that a backward moment rises above its start at most, what is recomputed in it included."""
    rises = [0]
    for event in timeline.events:
        if event.kind == "B":
            call = timeline.calls[event.call]
            rises.append(event.transient + (call.recompute_rises if call.key[0] in plan.recompute else 0))
    return max(rises)
