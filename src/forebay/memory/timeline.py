"""The memory and the copies of one step over time, from measured or traced figures. No device, no tensors.

Input: a `Timeline` (the order in which region calls run forward and backward, their times and saved bytes) and what
is offloaded or recomputed. Output: a plan with the moments at which copies out are settled and copies back begin, the
peak memory, and the time that the compute stream waits. `simulate` is for forwards that are followed by their
backwards; `LaneSchedule` is for pipelines.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

# One step's memory and copies over time, from measured or traced figures. No device, no tensors.
#
# In: a `Timeline` (the order in which region calls run forward and backward, how long each takes and what it saves) and
# an `Assignment` (which saved items leave for the host, which regions are recomputed). Out: a `Plan` with the moments
# at which copies out are settled and copies back begin, the peak memory, and the time the compute stream waits.
#
# A *moment* is the start of a region call's forward ("F") or backward ("B"); it lasts until the next moment, so the
# embedding, the loss and everything else between regions is part of the moment before it.
#
# Worked example, link of 1 byte a second, moments of 10 s: F0 F1 F2 | B2 B1 B0. Region 0 saves 12 bytes at t=10, its
# copy ends at t=22, so it is settled at B2 (t=30) at the latest and at F2 (t=20) not yet. Its backward is at t=50: a
# copy back of 12 s has to begin at t=38, and the last moment before that is B2 (t=30).

# Of a `Timeline`'s rates, what plans count on each way while copies go both ways: 50.6 of 55.3 GB/s (H200, PCIe gen 5;
# benchmarks/results/host_link.md). Rates that were measured in a step have some of that in them already: then it is a margin.
BOTH_WAYS = 0.9


Key = tuple[str, int]  # (region path, count of the region's calls since the last quiet moment)

# Copies both ways at once run at 50.8 of 55.4 GB/s (H200, PCIe gen 5); a plan that counts on less is late rarely.
_DUPLEX = 0.92
LIGHT = 0.6
"""Share of its forward that experts' light recomputation takes: the gather and first of two grouped GEMMs, 2 of 3 parts."""
_SLACK = 2e-4  # s; launch latencies between a moment and the copy it starts


@dataclass(frozen=True)
class CallFigures:
    """What one region call costs.

    Attributes:
        key: region and call.
        items: bytes of each storage the call saves and a store could take, in the order in which it saves them.
        seconds: time of the region's forward.
        light_recompute: the region recomputes only its largest item, by itself (experts).
        input_bytes: bytes of the region's own inputs, which a checkpoint keeps.
        again_seconds: time of recomputing the call, where it is known; None leaves it to `recompute_seconds`.
        shared_with: later calls that save one of its items too: their backwards need it as well.
    """

    key: Key
    items: tuple[int, ...]
    seconds: float
    light_recompute: bool = False
    input_bytes: int = 0
    again_seconds: float | None = None
    shared_with: tuple[Key, ...] = ()

    @property
    def largest(self) -> int:
        """Ordinal of the largest item, the one that a light recomputation makes again; -1 if there is none."""
        return max(range(len(self.items)), key=lambda i: self.items[i], default=-1)

    @property
    def recompute_frees(self) -> int:
        """Bytes that recomputing this call frees."""
        if self.light_recompute:
            return max(self.items, default=0)
        return max(sum(self.items) - self.input_bytes, 0)

    @property
    def recompute_rises(self) -> int:
        """Bytes by which memory rises at its backward because it is recomputed: what a checkpoint makes again is there beside all
        that backward takes. Experts write a gradient over what they made again (`forebay.moe.experts_op`)."""
        return 0 if self.light_recompute else self.recompute_frees

    @property
    def recompute_seconds(self) -> float:
        """Extra time of recomputing: all of the forward, or `LIGHT` of it."""
        if self.again_seconds is not None:
            return self.again_seconds
        return self.seconds * (LIGHT if self.light_recompute else 1.0)


@dataclass(frozen=True)
class TimelineEvent:
    """``kind`` is "F" or "B"; ``call`` indexes `Timeline.calls`; ``seconds`` without waits for copies; ``other`` is the
    memory at its start that is no saved item, over the step's base; ``transient`` is how far it rises above its start; ``idle``
    are seconds behind it in which the device waits for another process."""

    kind: str
    call: int
    seconds: float
    other: int = 0
    transient: int = 0
    idle: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Of the link, bytes a second; None is not known. See `Timeline`."""

    out: float | None = None
    back: float | None = None
    opening: float | None = None
    closing: float | None = None


@dataclass(frozen=True)
class Timeline:
    """A step. ``out_rate`` and ``back_rate`` are bytes a second to and from the host; infinite on a CPU. ``opening_rate`` is that
    of copies out before the first backward, ``closing_rate`` that of copies back behind the last forward, where they are known
    apart: only one way is busy there. ``memory_rate`` is that of the device's own memory, which copies take from kernels."""

    calls: tuple[CallFigures, ...]
    events: tuple[TimelineEvent, ...]
    out_rate: float = float("inf")
    back_rate: float = float("inf")
    opening_rate: float | None = None
    closing_rate: float | None = None
    memory_rate: float = float("inf")

    def on_link(self, share: float) -> Timeline:
        """With this share of all rates."""
        opening, closing = (rate and rate * share for rate in (self.opening_rate, self.closing_rate))
        out, back = self.out_rate * share, self.back_rate * share
        return replace(self, out_rate=out, back_rate=back, opening_rate=opening, closing_rate=closing)

    @property
    def opening(self) -> int:
        """Number of moments before the first backward."""
        return next((i for i, m in enumerate(self.events) if m.kind == "B"), len(self.events))

    @property
    def closing(self) -> int:
        """The first moment behind the last forward."""
        return max((i + 1 for i, m in enumerate(self.events) if m.kind == "F"), default=0)


@dataclass(frozen=True)
class Assignment:
    """``offload``: for each call (by index) the ordinals of the items that leave; ``recompute``: region
    paths, of which nothing leaves but what a light recomputation does not free."""

    offload: Mapping[int, frozenset[int]] = field(default_factory=dict)
    recompute: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Plan:
    """What the manager carries out. Moments are named ("F" or "B", key) so that the plan outlives the timeline."""

    offload: Mapping[Key, frozenset[int]]
    recompute: frozenset[str]
    settle_at: Mapping[Key, tuple[str, Key]]
    fetch_at: Mapping[tuple[str, Key], tuple[Key, ...]]
    planned_bytes: int
    peak_bytes: int
    stall_seconds: float
    step_seconds: float


def simulate(timeline: Timeline, assignment: Assignment, window: int | None = None) -> Plan:
    """Lay an assignment on a timeline.

    Args:
        window: None for an assignment that should fit the link: copies are settled and begun where nobody waits if
            that is possible. A number of bytes for one that does not fit: at most so many bytes are on their way out
            (or back) at once, and the compute stream waits where that is exceeded.
    """
    return _Simulation(timeline, assignment, window).plan()


def simulate_levels(timeline: Timeline, assignment: Assignment, window: int | None = None) -> tuple[Plan, list[int]]:
    """`simulate`, and the highest memory (bytes) of each moment, of which the plan's peak is the largest."""
    run = _Simulation(timeline, assignment, window)
    plan = run.plan()
    return plan, run.levels()


class _Simulation:
    """The state of one simulation; lives as long as `simulate`."""

    def __init__(self, timeline: Timeline, assignment: Assignment, window: int | None):
        self.calls, self.events = timeline.calls, timeline.events
        self.timeline, self.assignment, self.window = timeline, assignment, window
        self.leaves = {
            c: sum(self.calls[c].items[i] for i in chosen)
            for c, chosen in assignment.offload.items()
            if chosen and (self._light(c) or self.calls[c].key[0] not in assignment.recompute)
        }
        self.forward = {m.call: i for i, m in enumerate(self.events) if m.kind == "F"}
        self.backward = {m.call: i for i, m in enumerate(self.events) if m.kind == "B"}
        self.leaves = {c: n for c, n in self.leaves.items() if c in self.forward and c in self.backward}
        self.turn = min(self.backward.values(), default=len(self.events))
        self.slack = _SLACK if timeline.out_rate < float("inf") else 0.0
        self.seconds = [m.seconds + self._extra(m) for m in self.events]
        self.settled: dict[int, int] = {}
        self.fetched: dict[int, int] = {}
        self.stall = 0.0

    def plan(self) -> Plan:
        starts = self._settle_copies()
        if self.window is None:
            self._fetch_just_in_time(starts)
        else:
            self._fetch_in_window(starts)
        fetches: dict[tuple[str, Key], list[Key]] = {}
        for call in sorted(self.fetched, key=lambda c: self.backward[c]):
            fetches.setdefault(self._name(self.fetched[call]), []).append(self.calls[call].key)
        return Plan(
            offload={self.calls[c].key: self.assignment.offload[c] for c in self.leaves},
            recompute=self.assignment.recompute,
            settle_at={self.calls[c].key: self._name(m) for c, m in self.settled.items()},
            fetch_at={name: tuple(keys) for name, keys in fetches.items()},
            planned_bytes=sum(self.leaves.values()),
            peak_bytes=max(self.levels(), default=0),
            stall_seconds=self.stall,
            step_seconds=sum(self.seconds) + self.stall,
        )

    def _light(self, call: int) -> bool:
        return self.calls[call].light_recompute

    def _extra(self, event: TimelineEvent) -> float:
        call = self.calls[event.call]
        if event.kind != "B":
            return 0.0
        return call.recompute_seconds if call.key[0] in self.assignment.recompute else 0.0

    def _name(self, event: int) -> tuple[str, Key]:
        return self.events[event].kind, self.calls[self.events[event].call].key

    def _settle_copies(self) -> list[float]:
        """Walk the moments in time: settle what has been copied, wait where the window is full. Gives each start."""
        now, lane_free, on_the_way = 0.0, 0.0, 0
        pending: deque[tuple[int, float]] = deque()  # call, end of its copy; one lane, so in the order of their ends
        starts = []
        for index, event in enumerate(self.events):
            # What is still leaving behind the turn is needed first in backward: it is taken back, not fetched.
            while pending and index <= self.turn and pending[0][0] != event.call:
                call, end = pending[0]
                over = self.window is not None and event.kind == "F" and on_the_way > self.window
                must = over or (self.window is None and index == self.turn)
                if end + self.slack > now:
                    if not must:
                        break
                    self.stall += max(end - now, 0.0)
                    now = max(end, now)
                self.settled[call] = index
                on_the_way -= self.leaves[call]
                pending.popleft()
            starts.append(now)
            if event.kind == "F" and event.call in self.leaves:
                ready = now + self.calls[event.call].seconds
                lane_free = max(lane_free, ready) + self.leaves[event.call] / self.timeline.out_rate
                pending.append((event.call, lane_free))
                on_the_way += self.leaves[event.call]
            now += self.seconds[index]
        return starts

    def _fetch_just_in_time(self, starts: list[float]) -> None:
        """Begin each copy back at the last moment from which it is in time, never before the turn has passed."""
        deadline = float("inf")
        earliest = min(self.turn + 1, len(self.events) - 1)
        for call in sorted(self.settled, key=lambda c: -self.backward[c]):
            needed = starts[self.backward[call]]
            begin = min(deadline, needed) - self.leaves[call] / (self.timeline.back_rate * _DUPLEX) - self.slack
            chosen = min(bisect_right(starts, begin) - 1, self.backward[call])
            if chosen < earliest:
                chosen = min(earliest, self.backward[call])
                late = starts[chosen] + self.leaves[call] / self.timeline.back_rate - min(deadline, needed)
                self.stall += max(late, 0.0)
            self.fetched[call] = chosen
            deadline = min(begin, starts[chosen]) if begin >= starts[chosen] else begin

    def _fetch_in_window(self, starts: list[float]) -> None:
        """At each backward moment begin copies back, next needed first, while at most a window of bytes is ahead."""
        assert self.window is not None
        waiting = deque(sorted(self.settled, key=lambda c: self.backward[c]))
        lane_free, delay, ahead = 0.0, 0.0, 0
        ends: dict[int, float] = {}
        for index in range(self.turn, len(self.events)):
            now = starts[index] + delay
            own = self.events[index].call
            if own in ends and self.events[index].kind == "B":
                ahead -= self.leaves[own]
            while waiting and (
                self.backward[waiting[0]] <= index + 1 or ahead + self.leaves[waiting[0]] <= self.window
            ):
                call = waiting.popleft()
                lane_free = max(lane_free, now) + self.leaves[call] / self.timeline.back_rate
                ends[call], self.fetched[call] = lane_free, index
                if self.backward[call] > index:
                    ahead += self.leaves[call]
            if self.events[index].kind == "B" and ends.get(own, now) > now:
                delay += ends[own] - now
        self.stall += delay

    def _held(self) -> list[int]:
        """Bytes of saved items on the device at the start of each moment, and behind the last."""
        end = len(self.events)
        change = [0] * (end + 2)
        for call, figures in enumerate(self.calls):
            # From behind its forward to its backward. A call whose forward came before the timeline is not held.
            first, behind = self.forward.get(call, end) + 1, self.backward.get(call, -1) + 1
            if first >= behind:
                continue
            change[first] += sum(figures.items) - self._freed(figures)
            change[behind] -= sum(figures.items) - self._freed(figures)
            away = self.settled.get(call, end)
            back = min(self.fetched.get(call, end), behind)
            if away < back:
                change[away] -= self.leaves[call]
                change[back] += self.leaves[call]
        return list(accumulate(change))[: end + 1]

    def _freed(self, figures: CallFigures) -> int:
        return figures.recompute_frees if figures.key[0] in self.assignment.recompute else 0

    def levels(self) -> list[int]:
        """The highest memory of each moment."""
        held = self._held()
        found = []
        for index, event in enumerate(self.events):
            figures = self.calls[event.call]
            again = figures.key[0] in self.assignment.recompute
            extra = figures.recompute_rises if event.kind == "B" and again else 0
            found.append(event.other + held[index] + event.transient + extra)
        return found


# What leaves in a pipeline, laid on the two lanes of the link: when each copy begins and ends, and who waits for it.
#
# In: a `Timeline`, and the items of each call that leave (`forebay.memory.offload_plan` chooses them). Out: a `LaneSchedule`: the
# moments at which copies out are settled and copies back begin, memory at each moment, the seconds waited, and the `Plan` of
# all that.
#
#     copies out    in the order of forwards; one begins when its region's forward is over and the lane is free, and is settled
#                   at the first moment behind its end
#     copies back   in the order of backwards; one begins at the last moment from which it is in time for its backward, or for
#                   that of a call that saved one of its items too
#     stays         a call for which no time is left between the two: those at the beginning and the end of a step, where
#                   little is in flight
#
# With a `level`, memory is not to rise above it, and somebody waits instead. A pipeline's first forwards follow each other with
# no backward between them, faster than the link carries what they save: there a forward waits until copies out are over. Its
# last backwards follow each other with no forward between them, faster than the link brings what they need: there copies back
# begin later, when there is room, and a backward waits until its own is over.
#
# Worked example, link of 1 byte a second, moments of 10 s: F0 F1 B0 F2 B1 B2. Each call saves 5 bytes at the end of its forward
# and waits for a moment. Call 1, forward at 10 s: saved and copied by t=25, settled at F2 (t=30); its backward is at t=40, the
# copy back has to begin at t=35, and the last moment before is F2 (t=30) itself: there is nothing to win, so it stays.

_LANE_SLACK = 3e-4  # s; launch latencies between a moment and the copy it starts, and what varies from step to step
# Of the peak, between it and what stays after all: how memory rises within a moment varies a little from step to step.
_APART = 0.01


class TimedTimeline:
    """A timeline with its times. `idle`: share of its idle times in which copies go on."""

    def __init__(self, timeline: Timeline, idle: float = 0.0):
        self.timeline, self.calls, self.events = timeline, timeline.calls, timeline.events
        self.forward = {m.call: i for i, m in enumerate(self.events) if m.kind == "F"}
        self.backward = {m.call: i for i, m in enumerate(self.events) if m.kind == "B"}
        self.needed = self._needed()
        timed = [m.seconds for m in self.events]
        self.each = timed if any(timed) else [1.0] * len(timed)  # a CPU has no times
        self.seconds = sum(self.each)
        spans = [seconds + idle * m.idle for seconds, m in zip(self.each, self.events, strict=True)]
        self.starts = [0.0, *accumulate(spans)][:-1]
        self.sizes = [sum(c.items) for c in self.calls]
        self.slack = _LANE_SLACK if timeline.out_rate < inf else 0.0
        self.opening, self.closing = timeline.opening, timeline.closing
        self.out_rate, self.back_rate = timeline.out_rate * BOTH_WAYS, timeline.back_rate * BOTH_WAYS
        self.opening_rate = timeline.opening_rate or self.out_rate
        self.closing_rate = timeline.closing_rate or self.back_rate

    def _needed(self) -> dict[int, int]:
        """Call to the first moment whose backward reads an item of it."""
        numbers = {call.key: i for i, call in enumerate(self.calls)}
        readers = {c: [c, *(numbers[key] for key in self.calls[c].shared_with)] for c in self.backward}
        return {c: min(self.backward[r] for r in read if r in self.backward) for c, read in readers.items()}

    def lay(self, items: Iterable[tuple[int, int]], level: float = inf) -> LaneSchedule:
        """Lay (call, ordinal of an item) on the link. `level`: bytes; somebody waits rather than raise memory above it."""
        chosen: dict[int, set[int]] = {}
        for call, ordinal in items:
            chosen.setdefault(call, set()).add(ordinal)
        return LaneSchedule(self, chosen, level)

    def next_start(self, index: int, now: float) -> float:
        """When the moment behind `index` starts, which ends `now`: what others send comes at a time of its own."""
        return max(now, self.starts[index + 1]) if index + 1 < len(self.starts) else now

    def name(self, event: int) -> tuple[str, Key]:
        """As plans name it."""
        return self.events[event].kind, self.calls[self.events[event].call].key


class LaneSchedule:
    """An assignment on the link, and what follows from it.

    Attributes:
        bytes: of each call of which something leaves.
        settled, fetched: call to the moment at which its copy out is settled, and to that at which its copy back begins.
        memory: bytes at each moment, with what rises during it; `peak`, the most of it.
    """

    def __init__(self, step: TimedTimeline, chosen: dict[int, set[int]], level: float):
        self.step = step
        self.chosen = {c: frozenset(o) for c, o in chosen.items()}
        self.bytes = {c: sum(step.calls[c].items[i] for i in o) for c, o in self.chosen.items()}
        self._lay(level)
        if level < inf and len(self.bytes) < len(chosen):  # none waits for what stays after all
            self._lay(level)
        self.memory = self._memory()
        self.peak = max(self.memory, default=0)

    def keep_what_may_stay(self) -> None:
        """Take out what lowers nothing but memory that is lower than its peak already."""
        step, limit = self.step, int(self.peak * (1 - _APART))

        def away(call: int) -> float:
            return step.starts[self.fetched[call]] - step.starts[self.settled[call]]

        for call in sorted(self.bytes, key=lambda c: (away(c), c)):
            first, behind, items = self.settled[call], self.fetched[call], step.calls[call].items
            stays: set[int] = set()
            room = limit - max(self.memory[first:behind])
            for ordinal in sorted(self.chosen[call], key=lambda i: -items[i]):
                if items[ordinal] <= room:
                    room -= items[ordinal]
                    stays.add(ordinal)
            size = sum(items[i] for i in stays)
            self.memory[first:behind] = [m + size for m in self.memory[first:behind]]
            self._leave(call, self.chosen[call] - stays)

    def plan(self) -> Plan:
        """What the manager carries out."""
        step, stall = self.step, self.stall()
        fetches: dict[tuple[str, Key], list[Key]] = {}
        for call in self._in_order():
            fetches.setdefault(step.name(self.fetched[call]), []).append(step.calls[call].key)
        return Plan(
            offload={step.calls[c].key: o for c, o in self.chosen.items()},
            recompute=frozenset(),
            settle_at={step.calls[c].key: step.name(m) for c, m in self.settled.items()},
            fetch_at={name: tuple(keys) for name, keys in fetches.items()},
            planned_bytes=sum(self.bytes.values()),
            peak_bytes=self.peak,
            stall_seconds=stall,
            step_seconds=sum(m.seconds for m in step.events) + stall,
        )

    # --- laying -------------------------------------------------------------------------------------------------------

    def _lay(self, level: float) -> None:
        self.settled: dict[int, int] = {}
        self.fetched: dict[int, int] = {}
        self._starts: list[float] = []  # of the moments, if only forwards wait
        self._copy_out(level)
        self._copy_back(level)

    def _copy_out(self, level: float) -> None:
        step, now, lane, held = self.step, 0.0, 0.0, 0
        under_way: deque[tuple[int, float]] = deque()  # call, end of its copy; one lane, so in the order of their ends
        for index, event in enumerate(step.events):
            while under_way:
                call, end = under_way[0]
                # What comes back is counted from its backward on: when its copy begins is not known yet.
                above = event.kind == "F" and held + event.other + event.transient > level
                if end + step.slack > now and not above:
                    break
                under_way.popleft()
                if index < step.needed[call]:
                    now = max(end, now)
                    self.settled[call] = index
                    held -= self.bytes[call]
            self._starts.append(now)
            call = event.call
            if event.kind == "F" and call in step.backward:
                held += step.sizes[call]
                if call in self.bytes:
                    lane = max(lane, now + step.calls[call].seconds) + self._out(call)
                    under_way.append((call, lane))
            elif event.kind == "B" and call in step.forward:
                held -= step.sizes[call] - (self.bytes[call] if call in self.settled else 0)
            now = step.next_start(index, now + step.each[index])

    def _copy_back(self, level: float) -> None:
        step, deadline, memory = self.step, inf, self._memory()
        for call in sorted(self.settled, key=lambda c: -step.needed[c]):
            needed, settled, size = step.needed[call], self.settled[call], self.bytes[call]
            begin = min(deadline, self._starts[needed]) - self._back(call) - step.slack
            event = min(bisect_right(self._starts, begin), needed) - 1
            if event <= settled:
                continue
            full = (i for i in range(needed - 2, event - 1, -1) if memory[i] + size > level)
            event = next(full, event - 1) + 1  # behind the last moment without room
            memory[event:needed] = [m + size for m in memory[event:needed]]
            self.fetched[call] = event
            deadline = min(deadline, max(begin, self._starts[event]))
        for call in [c for c in self.bytes if c not in self.fetched]:
            self._leave(call, frozenset())

    def _leave(self, call: int, ordinals: frozenset[int]) -> None:
        """Of `call` no more than these."""
        self.chosen[call] = ordinals
        self.bytes[call] = sum(self.step.calls[call].items[i] for i in ordinals)
        if not ordinals:
            for known in (self.chosen, self.bytes, self.settled, self.fetched):
                known.pop(call, None)

    # --- what follows -------------------------------------------------------------------------------------------------

    def _memory(self) -> list[int]:
        """At each moment, with what rises during it. What nothing fetches yet is back at its backward."""
        step = self.step
        change = [0] * (len(step.events) + 1)

        def add(first: int, behind: int, size: int) -> None:
            change[first] += size
            change[behind] -= size

        for call, forward in step.forward.items():
            if call in step.backward:
                # Its forward's own rise has it already, and so has its backward's start.
                add(forward + 1, step.backward[call] + 1, step.sizes[call])
        for call, settled in self.settled.items():
            add(settled, self.fetched.get(call, step.needed[call]), -self.bytes[call])
        return [m.other + m.transient + held for m, held in zip(step.events, accumulate(change), strict=False)]

    def stall(self) -> float:
        """Carry it out: seconds for which the compute stream waits, at moments that settle and at backwards."""
        step, now, out, back, waited = self.step, 0.0, 0.0, 0.0, 0.0
        ends: dict[int, float] = {}
        settles, fetches, reads = self._at(self.settled), self._at(self.fetched), self._at(step.needed)
        for index, event in enumerate(step.events):
            ready = max([now, *(ends.pop(c) for c in settles.get(index, ()))])
            for call in fetches.get(index, ()):
                back = max(back, ready) + self._back(call)
                ends[call] = back
            ready = max([ready, *(ends.pop(c) for c in reads.get(index, ()))])
            waited += ready - now
            if event.kind == "F" and event.call in self.bytes:
                out = max(out, ready + step.calls[event.call].seconds) + self._out(event.call)
                ends[event.call] = out
            now = step.next_start(index, ready + step.each[index])
        return waited

    def _at(self, events: dict[int, int]) -> dict[int, list[int]]:
        """Moment to those calls of which something leaves, in the order of their backwards."""
        found: dict[int, list[int]] = {}
        for call in self._in_order():
            found.setdefault(events[call], []).append(call)
        return found

    def _in_order(self) -> list[int]:
        return sorted(self.fetched, key=lambda c: self.step.needed[c])

    def _out(self, call: int) -> float:
        step = self.step
        return self.bytes[call] / (step.opening_rate if step.forward[call] < step.opening else step.out_rate)

    def _back(self, call: int) -> float:
        step = self.step
        return self.bytes[call] / (step.closing_rate if step.needed[call] >= step.closing else step.back_rate)
