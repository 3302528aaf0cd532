"""The memory and the copies of one step over time, simulated from measured or traced figures.

Input: a `Timeline` (the order in which region calls run forward and backward, their times and saved bytes) and which saved
storages are offloaded or which regions are recomputed. Output: a `Plan` with the events at which device memory is released
after copies to the host and copies back begin, the peak memory, and the time that the compute stream waits. `CopySchedule` is
the simulator: `simulate` uses it for steps in which all forwards come before all backwards, `InterleavedSchedule` for
pipelines. Nothing here needs a device or holds a tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

DUPLEX_RATE_SHARE = 0.9
"""Share of a `Timeline`'s rates that pipeline plans count on while copies go both ways: 50.6 of 55.3 GB/s (H200, PCIe gen 5;
benchmarks/results/host_link.md). Rates that were measured in a step include some of that already: then it is a margin."""
LIGHT_RECOMPUTE_SHARE = 0.6
"""Share of its forward that the experts' light recomputation takes: the gather and the first of two grouped GEMMs."""
_DUPLEX_RATE_SHARE_BACK = 0.92  # the same for copies back in `simulate`: 50.8 of 55.4 GB/s (H200, PCIe gen 5)
_COPY_SLACK = 2e-4  # s; launch latency between an event and the copy that it starts
_INTERLEAVED_COPY_SLACK = 3e-4  # s; the same, and what varies from step to step
# Share of the peak by which storages that are kept after all stay below it: how far memory rises within an event varies a
# little from step to step.
_PEAK_MARGIN = 0.01

Key = tuple[str, int]  # (region path, index of the region's call in the step)
EventName = tuple[str, Key]  # ("F" or "B", call)


@dataclass(frozen=True)
class CallFigures:
    """Saved bytes and seconds of one region call.

    Attributes:
        key: region and call.
        items: bytes of each saved storage that a store could take, in the order in which the call saves them.
        seconds: time of the region's forward.
        light_recompute: the region recomputes only one item, by itself (experts).
        made_again: index of that item; -1 if this call has none. Where an engine calls a MoE sublayer in stages, only the call of
            the experts' stage has one.
        input_bytes: bytes of the region's inputs, which a checkpoint keeps.
        again_seconds: time of recomputing the call; None: derived from `seconds`.
        shared_with: later calls that save one of the same storages: their backwards need it too.
    """

    key: Key
    items: tuple[int, ...]
    seconds: float
    light_recompute: bool = False
    input_bytes: int = 0
    again_seconds: float | None = None
    shared_with: tuple[Key, ...] = ()
    made_again: int = -1

    @property
    def recompute_frees(self) -> int:
        """Bytes that recomputing this call frees."""
        if self.light_recompute:
            return self.items[self.made_again] if self.made_again >= 0 else 0
        return max(sum(self.items) - self.input_bytes, 0)

    @property
    def recompute_rises(self) -> int:
        """Bytes by which recomputing raises memory in the call's backward, above that with what it saves: a checkpoint's tensors
        come on top of what backward takes; experts write a gradient over theirs in any case (`forebay.moe.experts_compute`)."""
        return 0 if self.light_recompute else self.recompute_frees

    @property
    def recompute_seconds(self) -> float:
        """Time of recomputing: `again_seconds`, or all of the forward, or `LIGHT_RECOMPUTE_SHARE` of it."""
        if self.again_seconds is not None:
            return self.again_seconds
        if self.light_recompute and self.made_again < 0:
            return 0.0
        return self.seconds * (LIGHT_RECOMPUTE_SHARE if self.light_recompute else 1.0)


@dataclass(frozen=True)
class TimelineEvent:
    """The start of a region call's forward or backward. It lasts until the next event, so whatever runs between two regions
    (the embedding, the loss) belongs to the event before.

    Attributes:
        kind: "F" or "B".
        call: index in `Timeline.calls`.
        seconds: duration, without waits for copies.
        other: bytes over the step's base at the start that are not saved items.
        transient: bytes by which memory rises above the start.
        idle: seconds after the event in which the device waits for another process.
    """

    kind: str
    call: int
    seconds: float
    other: int = 0
    transient: int = 0
    idle: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The events of one step, recorded or traced. All rates are bytes a second.

    Attributes:
        out_rate, back_rate: to and from the host; infinite on a CPU.
        opening_rate: of copies out before the first backward, closing_rate: of copies back after the last forward. Only one
            direction is busy there. None where unknown.
        memory_rate: of the device's own memory, which copies take from kernels.
    """

    calls: tuple[CallFigures, ...]
    events: tuple[TimelineEvent, ...]
    out_rate: float = inf
    back_rate: float = inf
    opening_rate: float | None = None
    closing_rate: float | None = None
    memory_rate: float = inf

    def on_link(self, share: float) -> Timeline:
        """The timeline with this share of all link rates."""
        opening, closing = (rate and rate * share for rate in (self.opening_rate, self.closing_rate))
        out, back = self.out_rate * share, self.back_rate * share
        return replace(self, out_rate=out, back_rate=back, opening_rate=opening, closing_rate=closing)

    @property
    def opening(self) -> int:
        """Number of events before the first backward."""
        return next((i for i, event in enumerate(self.events) if event.kind == "B"), len(self.events))

    @property
    def closing(self) -> int:
        """Index of the first event after the last forward."""
        return max((i + 1 for i, event in enumerate(self.events) if event.kind == "F"), default=0)


@dataclass(frozen=True)
class Assignment:
    """``offload``: index of a call to the indices of its items that are offloaded. ``recompute``: region paths; their items
    are not offloaded, except those that light recomputation still saves."""

    offload: Mapping[int, frozenset[int]] = field(default_factory=dict)
    recompute: frozenset[str] = frozenset()

    @classmethod
    def of(cls, items: Iterable[tuple[int, int]], recompute: frozenset[str] = frozenset()) -> Assignment:
        """`items`: (call, index of an item) to offload."""
        offload: dict[int, set[int]] = {}
        for call, item in items:
            offload.setdefault(call, set()).add(item)
        return cls({call: frozenset(chosen) for call, chosen in offload.items()}, recompute)


@dataclass(frozen=True)
class Plan:
    """The plan of a step, which the manager carries out. Events and calls are named by key, so that it outlives its timeline.

    Attributes:
        offload: region call to the indices of its saved storages that are offloaded.
        recompute: paths of the regions that are recomputed.
        release_at: region call to the event at which the device memory of its copies is released.
        fetch_at: event to the region calls whose copies back begin there.
        planned_bytes: bytes that are offloaded.
        peak_bytes: simulated peak of the step, over what is allocated before it.
        stall_seconds: simulated time for which the compute stream waits for copies.
        step_seconds: simulated time of the step, waits included.
        returns: bytes that the link brings back while a backward runs; empty where it is not known.
    """

    offload: Mapping[Key, frozenset[int]]
    recompute: frozenset[str]
    release_at: Mapping[Key, EventName]
    fetch_at: Mapping[EventName, tuple[Key, ...]]
    planned_bytes: int
    peak_bytes: int
    stall_seconds: float
    step_seconds: float
    returns: Mapping[EventName, float] = field(default_factory=dict)


class IndexedTimeline:
    """A timeline with what every schedule of it needs.

    Attributes:
        forward, backward: call to the index of its event. `turn`: index of the first backward.
        resident: bytes of saved items at the start of each event, and at the end of the step, if nothing is offloaded.
        kept: peak of each event, in bytes over the step's base, if everything is kept.
    """

    def __init__(self, timeline: Timeline):
        self.timeline, self.calls, self.events = timeline, timeline.calls, timeline.events
        self.forward = {event.call: i for i, event in enumerate(self.events) if event.kind == "F"}
        self.backward = {event.call: i for i, event in enumerate(self.events) if event.kind == "B"}
        self.turn = min(self.backward.values(), default=len(self.events))
        change = [0] * (len(self.events) + 1)
        for index, call in enumerate(self.calls):
            if self.lives(index):
                # The transient memory of its forward includes what a call saves; the start of its backward still holds it.
                change[self.forward[index] + 1] += sum(call.items)
                change[self.backward[index] + 1] -= sum(call.items)
        self.resident = list(accumulate(change))
        self.kept = [e.other + saved + e.transient for e, saved in zip(self.events, self.resident, strict=False)]

    def lives(self, call: int) -> bool:
        """Whether a call's forward and then its backward are part of the timeline."""
        return self.forward.get(call, len(self.events)) < self.backward.get(call, -1)

    def name(self, event: int) -> EventName:
        return self.events[event].kind, self.calls[self.events[event].call].key


class CopySchedule:
    """The simulator: the copies of an assignment over a timeline, with one lane for each direction.

    Copies out run in the order of forwards. One begins when its region's forward is over and the lane is free. Its device
    memory is *released* at the first event after its end, or earlier, where the compute stream has to wait for it.
    Copies back run in the order of backwards and hold device memory from the event at which they begin. Subclasses decide
    where the compute stream waits and when copies back begin.

    Attributes:
        offload: call to the items that are offloaded, `bytes`: call to their size.
        released, fetched: call to the index of the event at which its device memory is released, and its copy back begins.
        needed: call to the index of the first backward that reads its items.
        starts: time at which each event starts, as far as waits for copies out delay it.
        memory: peak of each event, in bytes over the step's base; `peak`: the largest.
    """

    needed: Mapping[int, int]
    memory: list[int]

    def __init__(self, step: IndexedTimeline, assignment: Assignment, slack: float):
        self.step, self.calls, self.events = step, step.calls, step.events
        self.recompute = assignment.recompute
        self.offload = {
            c: items
            for c, items in assignment.offload.items()
            if items
            and (self.calls[c].light_recompute or self.calls[c].key[0] not in self.recompute)
            and c in step.forward
            and c in step.backward
        }
        self.bytes = {c: sum(self.calls[c].items[i] for i in items) for c, items in self.offload.items()}
        self.slack = slack if step.timeline.out_rate < inf else 0.0
        # Event to the call that runs forward again in it.
        again = step.backward.items() if self.recompute else ()
        self._again = {event: self.calls[c] for c, event in again if self.calls[c].key[0] in self.recompute}
        self.seconds = [event.seconds for event in self.events]
        for index, call in self._again.items():
            self.seconds[index] += call.recompute_seconds
        self.released: dict[int, int] = {}
        self.fetched: dict[int, int] = {}

    @property
    def peak(self) -> int:
        return max(self.memory, default=0)

    @property
    def planned_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds) + self.stall()

    def stall(self) -> float:
        """Seconds for which the compute stream waits for copies."""
        raise NotImplementedError

    def plan(self) -> Plan:
        calls, name, stall = self.calls, self.step.name, self.stall()
        fetches: dict[EventName, list[Key]] = {}
        for call in self._in_backward_order():
            fetches.setdefault(name(self.fetched[call]), []).append(calls[call].key)
        return Plan(
            offload={calls[c].key: items for c, items in self.offload.items()},
            recompute=self.recompute,
            release_at={calls[c].key: name(event) for c, event in self.released.items()},
            fetch_at={event: tuple(keys) for event, keys in fetches.items()},
            planned_bytes=self.planned_bytes,
            peak_bytes=self.peak,
            stall_seconds=stall,
            step_seconds=sum(self.seconds) + stall,
        )

    def levels(self) -> list[int]:
        """`memory` of the copies scheduled so far. Items that are not fetched yet return when they are needed."""
        step, change = self.step, [0] * (len(self.events) + 1)
        for event, call in self._again.items():
            index = self.events[event].call
            if step.lives(index):
                change[step.forward[index] + 1] -= call.recompute_frees
                change[event + 1] += call.recompute_frees
        for index, released in self.released.items():
            change[released] -= self.bytes[index]
            change[self.fetched.get(index, self.needed[index])] += self.bytes[index]
        found = [kept + less for kept, less in zip(step.kept, accumulate(change), strict=False)]
        for event, call in self._again.items():
            found[event] += call.recompute_rises
        return found

    def _copy_out(self, durations: Sequence[float], earliest: Sequence[float]) -> tuple[list[float], float]:
        """Walk the events in time and release what was copied out. Returns `starts`, and the seconds waited.

        Args:
            durations: seconds of each event.
            earliest: the time before which an event does not start, and one entry more.
        """
        starts: list[float] = []
        now, waited, lane_free, pending_bytes, on_host = 0.0, 0.0, 0.0, 0, 0
        pending: deque[tuple[int, float]] = deque()  # call, end of its copy; one lane, so in the order of their ends
        for index, event in enumerate(self.events):
            own = event.call
            while pending and self._may_release(index, pending[0][0]):
                call, end = pending[0]
                if end + self.slack > now and not self._must_wait(index, pending_bytes, on_host):
                    break
                pending.popleft()
                pending_bytes -= self.bytes[call]
                if index < self.needed[call]:
                    waited += max(end - now, 0.0)
                    now = max(end, now)
                    self.released[call] = index
                    on_host += self.bytes[call]
            starts.append(now)
            if event.kind == "F" and own in self.bytes:
                lane_free = max(lane_free, now + self.calls[own].seconds) + self._seconds_out(own)
                pending.append((own, lane_free))
                pending_bytes += self.bytes[own]
            elif event.kind == "B" and own in self.released:
                on_host -= self.bytes[own]
            now = max(now + durations[index], earliest[index + 1])
        return starts, waited

    def _may_release(self, event: int, call: int) -> bool:
        """Whether the device memory of `call`, whose copy out is the oldest pending one, may be released at `event`."""
        raise NotImplementedError

    def _must_wait(self, event: int, pending_bytes: int, on_host: int) -> bool:
        """Whether the compute stream waits for the oldest copy out at `event`. `pending_bytes`: of the pending copies,
        `on_host`: bytes that were released and whose backward has not come."""
        raise NotImplementedError

    def _seconds_out(self, call: int) -> float:
        raise NotImplementedError

    def _in_backward_order(self) -> list[int]:
        return sorted(self.fetched, key=lambda c: self.needed[c])


def simulate(timeline: Timeline, assignment: Assignment, window: int | None = None) -> Plan:
    """Simulate an assignment on a timeline in which all forwards come before all backwards.

    Example, a link of 1 byte/s and events of 10 s: F0 F1 F2 | B2 B1 B0. Region 0 saves 12 bytes at t=10 and its copy ends at
    t=22, so its memory can be released at B2 (t=30) but not at F2 (t=20). Its backward is at t=50. A copy back of 12 s begins at
    B1 (t=40), the first event at which nothing is copied out any more, and the step waits 2 s for it.

    Args:
        window: None for an assignment that should fit the link: the compute stream waits only where it has to. A number of
            bytes for one that does not fit: at most that many are on their way out (or back) at once, and the compute
            stream waits where that is exceeded.
    """
    return TurnSchedule(IndexedTimeline(timeline), assignment, window).plan()


class TurnSchedule(CopySchedule):
    """The schedule of a step with a *turn*, the first backward, by which every copy out is over. Arguments: see `simulate`."""

    def __init__(self, step: IndexedTimeline, assignment: Assignment, window: int | None):
        super().__init__(step, assignment, _COPY_SLACK)
        self.needed, self.window = self.step.backward, window
        self._out_rate, self._back_rate = step.timeline.out_rate, step.timeline.back_rate
        if self._out_rate < inf:
            # The backward at the turn reads at once what its forward saved: a copy of that frees nothing. Copies that are late by
            # chance are made: with rows in 8 bits, each run must round the same rows. On a CPU a copy takes no time.
            self.offload = {c: items for c, items in self.offload.items() if self.needed[c] > step.turn}
            self.bytes = {c: self.bytes[c] for c in self.offload}
        self.starts, self._stall = self._copy_out(self.seconds, [0.0] * (len(self.events) + 1))
        if window is None:
            self._fetch_just_in_time()
        else:
            self._fetch_in_window(window)
        self.memory = self.levels()

    def stall(self) -> float:
        return self._stall

    def plan(self) -> Plan:
        plan = super().plan()
        if not self.fetched or self._back_rate == inf:
            return plan
        backwards = range(self.step.turn, len(self.events))
        return replace(plan, returns={self.step.name(i): self.seconds[i] * self._back_rate for i in backwards})

    def _may_release(self, event: int, call: int) -> bool:
        # A call that is still leaving at the turn, where it or one before it is needed first, is taken back and not fetched.
        return event <= self.step.turn and call != self.events[event].call

    def _must_wait(self, event: int, pending_bytes: int, on_host: int) -> bool:
        if self.window is None:
            return event == self.step.turn
        return self.events[event].kind == "F" and pending_bytes > self.window

    def _seconds_out(self, call: int) -> float:
        return self.bytes[call] / self._out_rate

    def _fetch_just_in_time(self) -> None:
        """Begin each copy back at the last event from which it is in time, never before the turn is over."""
        starts, backward, deadline = self.starts, self.step.backward, inf
        earliest = min(self.step.turn + 1, len(self.events) - 1)
        for call in sorted(self.released, key=lambda c: -backward[c]):
            needed = min(deadline, starts[backward[call]])
            begin = needed - self.bytes[call] / (self._back_rate * _DUPLEX_RATE_SHARE_BACK) - self.slack
            chosen = min(bisect_right(starts, begin) - 1, backward[call])
            if chosen < earliest:
                chosen = min(earliest, backward[call])
                self._stall += max(starts[chosen] + self.bytes[call] / self._back_rate - needed, 0.0)
            self.fetched[call] = chosen
            deadline = min(begin, starts[chosen])

    def _fetch_in_window(self, window: int) -> None:
        """At each event after the turn begin copies back, next needed first, while at most `window` bytes are ahead."""
        backward = self.step.backward
        waiting = deque(sorted(self.released, key=lambda c: backward[c]))
        lane_free, delay, ahead = 0.0, 0.0, 0
        ends: dict[int, float] = {}
        for index in range(self.step.turn, len(self.events)):
            now, event = self.starts[index] + delay, self.events[index]
            own = event.call if event.kind == "B" else -1
            if own in ends:
                ahead -= self.bytes[own]
            while waiting and (backward[waiting[0]] <= index + 1 or ahead + self.bytes[waiting[0]] <= window):
                call = waiting.popleft()
                lane_free = max(lane_free, now) + self.bytes[call] / self._back_rate
                ends[call], self.fetched[call] = lane_free, index
                if backward[call] > index:
                    ahead += self.bytes[call]
            delay += max(ends.get(own, now) - now, 0.0)
        self._stall += delay


class PipelineTimeline(IndexedTimeline):
    """A timeline in which forwards and backwards of several microbatches alternate, with nominal times.

    Args:
        idle: share of the device's idle times in which copies go on.

    Attributes:
        needed: call to the first backward that reads one of its items.
        each: seconds of each event; 1 on a CPU, which has no times. `total`: their sum.
        starts: nominal start of each event, and the end of the step. Data from other ranks arrives at these times.
        saved: bytes that all calls save.
    """

    def __init__(self, timeline: Timeline, idle: float = 0.0):
        super().__init__(timeline)
        self.needed = self._first_readers()
        timed = [event.seconds for event in self.events]
        self.each = timed if any(timed) else [1.0] * len(timed)
        self.total = sum(self.each)
        spans = (seconds + idle * event.idle for seconds, event in zip(self.each, self.events, strict=True))
        self.starts = [0.0, *accumulate(spans)]
        self.saved = sum(sum(call.items) for call in self.calls)
        self.opening, self.closing = timeline.opening, timeline.closing
        self.out_rate, self.back_rate = timeline.out_rate * DUPLEX_RATE_SHARE, timeline.back_rate * DUPLEX_RATE_SHARE
        self.opening_rate = timeline.opening_rate or self.out_rate
        self.closing_rate = timeline.closing_rate or self.back_rate

    def _first_readers(self) -> dict[int, int]:
        numbers = {call.key: i for i, call in enumerate(self.calls)}
        readers = {c: [c, *(numbers[key] for key in self.calls[c].shared_with)] for c in self.backward}
        return {c: min(self.backward[r] for r in read if r in self.backward) for c, read in readers.items()}


class InterleavedSchedule(CopySchedule):
    """The schedule of a step in which forwards and backwards alternate, as in a pipeline.

    A copy back begins at the last event from which it is in time for the first backward that reads it. A call for which no time
    is left between its two copies keeps its items: those at the beginning and the end of a step, where little is in flight.

    With a `level`, memory should not rise above it, and the compute stream waits instead. A pipeline's first forwards follow
    each other with no backward between them, faster than the link takes what they save: there a forward waits for copies out.
    Its last backwards follow each other faster than the link returns what they need: there copies back begin later, when there
    is room, and a backward waits for its own.

    Example, a link of 1 byte/s and events of 10 s: F0 F1 B0 F2 B1 B2. Each call saves 5 bytes at the end of its forward. Call 1,
    forward at t=10: saved at t=20, copied by t=25, released at F2 (t=30). Its backward is at t=40, so the copy back has to begin
    at t=35, and the last event before that is F2 itself: nothing is gained, and the items stay.

    Args:
        items: (call, index of an item) to offload.
        level: bytes over the step's base.
    """

    def __init__(self, step: PipelineTimeline, items: Iterable[tuple[int, int]], level: float = inf):
        super().__init__(step, Assignment.of(items), _INTERLEAVED_COPY_SLACK)
        self.pipeline, self.needed, self.level = step, step.needed, level
        count = len(self.bytes)
        self._simulate()
        if level < inf and len(self.bytes) < count:  # without waits for calls that keep their items after all
            self.released, self.fetched = {}, {}
            self._simulate()
        self.memory = self.levels()

    def keep_needless(self) -> None:
        """Keep the items whose offloading lowers only memory that is below the peak already, shortest absence first."""
        limit = int(self.peak * (1 - _PEAK_MARGIN))
        starts = self.pipeline.starts

        def absence(call: int) -> tuple[float, int]:
            return starts[self.fetched[call]] - starts[self.released[call]], call

        for call in sorted(self.bytes, key=absence):
            absent = slice(self.released[call], self.fetched[call])
            items, kept = self.calls[call].items, set[int]()
            room = limit - max(self.memory[absent])
            for item in sorted(self.offload[call], key=lambda i: -items[i]):
                if items[item] <= room:
                    room -= items[item]
                    kept.add(item)
            size = sum(items[i] for i in kept)
            self.memory[absent] = [level + size for level in self.memory[absent]]
            self._offload_only(call, self.offload[call] - kept)

    def stall(self) -> float:
        """Carry the schedule out: the compute stream waits at events that release device memory and at backwards."""
        step, now, out, back, waited = self.pipeline, 0.0, 0.0, 0.0, 0.0
        ends: dict[int, float] = {}
        releases, fetches, reads = (self._calls_at(where) for where in (self.released, self.fetched, self.needed))
        for index, event in enumerate(self.events):
            ready = now
            for call in releases.get(index, ()):
                ready = max(ready, ends.pop(call))
            for call in fetches.get(index, ()):
                back = max(back, ready) + self._seconds_back(call)
                ends[call] = back
            for call in reads.get(index, ()):
                ready = max(ready, ends.pop(call))
            waited += ready - now
            if event.kind == "F" and event.call in self.bytes:
                out = max(out, ready + self.calls[event.call].seconds) + self._seconds_out(event.call)
                ends[event.call] = out
            now = max(ready + step.each[index], step.starts[index + 1])
        return waited

    def _simulate(self) -> None:
        step = self.pipeline
        self.starts, _ = self._copy_out(step.each, step.starts)
        self._copy_back()

    def _may_release(self, event: int, call: int) -> bool:
        return True

    def _must_wait(self, event: int, pending_bytes: int, on_host: int) -> bool:
        # Fetched bytes count from their backward on: when the copy begins is not known yet.
        return self.events[event].kind == "F" and self.step.kept[event] - on_host > self.level

    def _copy_back(self) -> None:
        deadline, memory = inf, self.levels()
        for call in sorted(self.released, key=lambda c: -self.needed[c]):
            needed, size = self.needed[call], self.bytes[call]
            begin = min(deadline, self.starts[needed]) - self._seconds_back(call) - self.slack
            event = min(bisect_right(self.starts, begin), needed) - 1
            if event <= self.released[call]:
                continue
            full = (i for i in range(needed - 2, event - 1, -1) if memory[i] + size > self.level)
            event = next(full, event - 1) + 1  # after the last event without room
            memory[event:needed] = [m + size for m in memory[event:needed]]
            self.fetched[call] = event
            deadline = min(deadline, max(begin, self.starts[event]))
        for call in [c for c in self.bytes if c not in self.fetched]:
            self._offload_only(call, frozenset())

    def _offload_only(self, call: int, items: frozenset[int]) -> None:
        self.offload[call] = items
        self.bytes[call] = sum(self.calls[call].items[i] for i in items)
        if not items:
            for known in (self.offload, self.bytes, self.released, self.fetched):
                known.pop(call, None)

    def _calls_at(self, events: Mapping[int, int]) -> dict[int, list[int]]:
        """Event to the offloaded calls that `events` puts there, in the order of their backwards."""
        found: dict[int, list[int]] = {}
        for call in self._in_backward_order():
            found.setdefault(events[call], []).append(call)
        return found

    def _seconds_out(self, call: int) -> float:
        step = self.pipeline
        return self.bytes[call] / (step.opening_rate if step.forward[call] < step.opening else step.out_rate)

    def _seconds_back(self, call: int) -> float:
        step = self.pipeline
        return self.bytes[call] / (step.closing_rate if self.needed[call] >= step.closing else step.back_rate)
