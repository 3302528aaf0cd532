"""What leaves in a pipeline, laid on the two lanes of the link: when each copy begins and ends, and who waits for it.

In: a `Timeline`, and the items of each call that leave (`forebay.planner.interleaved` chooses them). Out: a `Laid`: the moments
at which copies out are settled and copies back begin, memory at each moment, the seconds waited, and the `Plan` of all that.

    copies out    in the order of forwards; one begins when its region's forward is over and the lane is free, and is settled at
                  the first moment behind its end
    copies back   in the order of backwards; one begins at the last moment from which it is in time for its backward, or for that
                  of a call that saved one of its items too
    stays         a call for which no time is left between the two: those at the beginning and the end of a step, where little is
                  in flight

With a `level`, memory is not to rise above it, and somebody waits instead. A pipeline's first forwards follow each other with no
backward between them, faster than the link carries what they save: there a forward waits until copies out are over. Its last
backwards follow each other with no forward between them, faster than the link brings what they need: there copies back begin
later, when there is room, and a backward waits until its own is over.

Worked example, link of 1 byte a second, moments of 10 s: F0 F1 B0 F2 B1 B2. Each call saves 5 bytes at the end of its forward and
waits for a moment. Call 1, forward at 10 s: saved and copied by t=25, settled at F2 (t=30); its backward is at t=40, the copy
back has to begin at t=35, and the last moment before is F2 (t=30) itself: there is nothing to win, so it stays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from math import inf

from forebay.planner.device import BOTH_WAYS
from forebay.planner.simulate import Key, Plan, Timeline

_SLACK = 3e-4  # s; launch latencies between a moment and the copy it starts, and what varies from step to step
# Of the peak, between it and what stays after all: how memory rises within a moment varies a little from step to step.
_APART = 0.01


class Step:
    """A timeline with its times. `idle`: share of its idle times in which copies go on."""

    def __init__(self, timeline: Timeline, idle: float = 0.0):
        self.timeline, self.calls, self.moments = timeline, timeline.calls, timeline.moments
        self.forward = {m.call: i for i, m in enumerate(self.moments) if m.kind == "F"}
        self.backward = {m.call: i for i, m in enumerate(self.moments) if m.kind == "B"}
        self.needed = self._needed()
        timed = [m.seconds for m in self.moments]
        self.each = timed if any(timed) else [1.0] * len(timed)  # a CPU has no times
        self.seconds = sum(self.each)
        spans = [seconds + idle * m.idle for seconds, m in zip(self.each, self.moments, strict=True)]
        self.starts = [0.0, *accumulate(spans)][:-1]
        self.sizes = [sum(c.items) for c in self.calls]
        self.slack = _SLACK if timeline.out_rate < inf else 0.0
        self.opening, self.closing = timeline.opening, timeline.closing
        self.out_rate, self.back_rate = timeline.out_rate * BOTH_WAYS, timeline.back_rate * BOTH_WAYS
        self.opening_rate = timeline.opening_rate or self.out_rate
        self.closing_rate = timeline.closing_rate or self.back_rate

    def _needed(self) -> dict[int, int]:
        """Call to the first moment whose backward reads an item of it."""
        numbers = {call.key: i for i, call in enumerate(self.calls)}
        readers = {c: [c, *(numbers[key] for key in self.calls[c].shared_with)] for c in self.backward}
        return {c: min(self.backward[r] for r in read if r in self.backward) for c, read in readers.items()}

    def lay(self, items: Iterable[tuple[int, int]], level: float = inf) -> Laid:
        """Lay (call, ordinal of an item) on the link. `level`: bytes; somebody waits rather than raise memory above it."""
        chosen: dict[int, set[int]] = {}
        for call, ordinal in items:
            chosen.setdefault(call, set()).add(ordinal)
        return Laid(self, chosen, level)

    def next_start(self, index: int, now: float) -> float:
        """When the moment behind `index` starts, which ends `now`: what others send comes at a time of its own."""
        return max(now, self.starts[index + 1]) if index + 1 < len(self.starts) else now

    def name(self, moment: int) -> tuple[str, Key]:
        """As plans name it."""
        return self.moments[moment].kind, self.calls[self.moments[moment].call].key


class Laid:
    """An assignment on the link, and what follows from it.

    Attributes:
        bytes: of each call of which something leaves.
        settled, fetched: call to the moment at which its copy out is settled, and to that at which its copy back begins.
        memory: bytes at each moment, with what rises during it; `peak`, the most of it.
    """

    def __init__(self, step: Step, chosen: dict[int, set[int]], level: float):
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
            after_forward_bytes=self.peak,
            stall_seconds=stall,
            step_seconds=sum(m.seconds for m in step.moments) + stall,
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
        for index, moment in enumerate(step.moments):
            while under_way:
                call, end = under_way[0]
                # What comes back is counted from its backward on: when its copy begins is not known yet.
                above = moment.kind == "F" and held + moment.other + moment.transient > level
                if end + step.slack > now and not above:
                    break
                under_way.popleft()
                if index < step.needed[call]:
                    now = max(end, now)
                    self.settled[call] = index
                    held -= self.bytes[call]
            self._starts.append(now)
            call = moment.call
            if moment.kind == "F" and call in step.backward:
                held += step.sizes[call]
                if call in self.bytes:
                    lane = max(lane, now + step.calls[call].seconds) + self._out(call)
                    under_way.append((call, lane))
            elif moment.kind == "B" and call in step.forward:
                held -= step.sizes[call] - (self.bytes[call] if call in self.settled else 0)
            now = step.next_start(index, now + step.each[index])

    def _copy_back(self, level: float) -> None:
        step, deadline, memory = self.step, inf, self._memory()
        for call in sorted(self.settled, key=lambda c: -step.needed[c]):
            needed, settled, size = step.needed[call], self.settled[call], self.bytes[call]
            begin = min(deadline, self._starts[needed]) - self._back(call) - step.slack
            moment = min(bisect_right(self._starts, begin), needed) - 1
            if moment <= settled:
                continue
            full = (i for i in range(needed - 2, moment - 1, -1) if memory[i] + size > level)
            moment = next(full, moment - 1) + 1  # behind the last moment without room
            memory[moment:needed] = [m + size for m in memory[moment:needed]]
            self.fetched[call] = moment
            deadline = min(deadline, max(begin, self._starts[moment]))
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
        change = [0] * (len(step.moments) + 1)

        def add(first: int, behind: int, size: int) -> None:
            change[first] += size
            change[behind] -= size

        for call, forward in step.forward.items():
            if call in step.backward:
                # Its forward's own rise has it already, and so has its backward's start.
                add(forward + 1, step.backward[call] + 1, step.sizes[call])
        for call, settled in self.settled.items():
            add(settled, self.fetched.get(call, step.needed[call]), -self.bytes[call])
        return [m.other + m.transient + held for m, held in zip(step.moments, accumulate(change), strict=False)]

    def stall(self) -> float:
        """Carry it out: seconds for which the compute stream waits, at moments that settle and at backwards."""
        step, now, out, back, waited = self.step, 0.0, 0.0, 0.0, 0.0
        ends: dict[int, float] = {}
        settles, fetches, reads = self._at(self.settled), self._at(self.fetched), self._at(step.needed)
        for index, moment in enumerate(step.moments):
            ready = max([now, *(ends.pop(c) for c in settles.get(index, ()))])
            for call in fetches.get(index, ()):
                back = max(back, ready) + self._back(call)
                ends[call] = back
            ready = max([ready, *(ends.pop(c) for c in reads.get(index, ()))])
            waited += ready - now
            if moment.kind == "F" and moment.call in self.bytes:
                out = max(out, ready + step.calls[moment.call].seconds) + self._out(moment.call)
                ends[moment.call] = out
            now = step.next_start(index, ready + step.each[index])
        return waited

    def _at(self, moments: dict[int, int]) -> dict[int, list[int]]:
        """Moment to those calls of which something leaves, in the order of their backwards."""
        found: dict[int, list[int]] = {}
        for call in self._in_order():
            found.setdefault(moments[call], []).append(call)
        return found

    def _in_order(self) -> list[int]:
        return sorted(self.fetched, key=lambda c: self.step.needed[c])

    def _out(self, call: int) -> float:
        step = self.step
        return self.bytes[call] / (step.opening_rate if step.forward[call] < step.opening else step.out_rate)

    def _back(self, call: int) -> float:
        step = self.step
        return self.bytes[call] / (step.closing_rate if step.needed[call] >= step.closing else step.back_rate)
