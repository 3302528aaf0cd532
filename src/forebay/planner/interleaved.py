"""What leaves for the host where forwards and backwards of several microbatches alternate, as in a pipeline.

In: a `Timeline` in which a forward follows some backward. Out: a `Plan` by which nobody waits, or not for long.

There is no turn here, before which everything leaves and after which it comes back (`forebay.planner.solve` plans for that): the
link carries both ways all the time, and memory is level for most of a step. So what is chosen is a *kind* of item, the same
storage of the same region in all microbatches, and a peak falls by what of it is away at any one time:

    kind      (region, which of its calls in a microbatch, ordinal); those that wait longest first
    accepted  if memory becomes lower where it is high: the mean of (memory)^16 over moments falls

Of an accepted kind each call is laid on the two lanes of the link. Its copy out begins when the region's forward is over and the
lane is free, and is settled at the first moment behind its end; its copy back begins at the last moment from which it is in time
for its backward, or for that of a call that saved one of its items too. A call for which no time is left between the two stays,
as do those at the beginning and the end of a step, where little is in flight. At last what leaves and need not stays after all,
those first that are away for the shortest time: memory may be as high at any moment as it is where nothing can be done about it,
and each byte that travels takes time from the device's own memory.

A pipeline's first forwards follow each other with no backward between them, faster than the link carries what they save: by a
plan for which nobody waits, memory is highest there. With `everything`, a forward that would raise memory above a level waits for
copies out; the level is the lowest for which the waits are a small share of the step. Copies then also go on for most of the time
in which the device waits for other processes (`Moment.idle`).

Worked example, link of 1 byte a second, moments of 10 s: F0 F1 B0 F2 B1 B2. Each call saves 5 bytes at the end of its forward and
waits for a moment. Call 1, forward at 10 s: saved and copied by t=25, settled at F2 (t=30); its backward is at t=40, the copy
back has to begin at t=35, and the last moment before is F2 (t=30) itself: there is nothing to win, so it stays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from forebay.planner.simulate import Key, Plan, Timeline

# Copies both ways at once run at 50.8 of 55.4 GB/s (H200, PCIe gen 5), and 4 GPUs of a host at once at 41 out, 54 back.
_SHARED = 0.9
_SLACK = 3e-4  # s; launch latencies between a moment and the copy it starts, and what varies from step to step
_POWER = 16
# Share of the step, with `everything`; a pipeline's other ranks may wait at the same time, or for this one.
_WAITS = 0.02
_HALVINGS = 10  # of the range of levels
_IDLE = 0.8  # of the time in which a process waits for another one, with `everything`, that the link is counted on
# Of the kinds, those that wait longest first, that are tried to leave. With 4 peaks were up to 10 % higher (PP 2 and 4 of
# DeepSeek-V2-Lite's shapes); with 64 they are no lower.
_PARTS = 16
# Of the peak, between it and what stays after all: how memory rises within a moment varies a little from step to step.
_APART = 0.01


Kind = list[tuple[int, int]]  # (call, ordinal) of each


def is_interleaved(timeline: Timeline) -> bool:
    """Whether some forward follows a backward."""
    kinds = "".join(m.kind for m in timeline.moments)
    return "F" in kinds.lstrip("F")


def plan_interleaved(timeline: Timeline, paths: frozenset[str], everything: bool = False) -> Plan:
    """Offload of the regions `paths` what lowers the peak, as far as the link carries it without anybody waiting.

    `peak_bytes` of a plan for no paths is that of keeping everything.

    Args:
        everything: the compute stream may wait for the link, 2 % of the step at most, if that lowers the peak further, and copies
            count on idle time.
    """
    step = _Step(timeline, _IDLE if everything else 0.0)
    chosen: Kind = []
    kept = best = step.lay([])
    kinds = step.kinds(paths)
    for kind in kinds:
        laid = step.lay([*chosen, *kind])
        if laid.height < best.height * (1 - 1e-9):
            chosen.extend(kind)
            best = laid
    laid = _waiting(step, kinds, kept.peak, best) if everything else best
    laid.keep_what_may_stay()
    return laid.plan()


def _waiting(step: _Step, kinds: Sequence[Kind], top: int, best: _Laid) -> _Laid:
    """What has a lower peak than `best`, if there is something, and waits no longer than it may. `top`: the peak if all stays."""
    limit = _WAITS * step.seconds
    ends = sorted({-(-len(kinds) * part // _PARTS) for part in range(1, _PARTS + 1)})  # few kinds have fewer parts
    for end in ends:
        items = [item for kind in kinds[:end] for item in kind]
        low, high = 0, top
        for _ in range(_HALVINGS):
            level = (low + high) // 2
            laid = step.lay(items, level)
            if laid.stall > limit:
                low = level
                continue
            high = level
            if laid.peak < best.peak:
                best = laid
    return best


class _Step:
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
        self.slack = _SLACK if timeline.out_rate < float("inf") else 0.0
        self._top = sum(self.sizes) or 1

    def _needed(self) -> dict[int, int]:
        """Call to the first moment whose backward reads an item of it."""
        numbers = {call.key: i for i, call in enumerate(self.calls)}
        readers = {c: [c, *(numbers[key] for key in self.calls[c].shared_with)] for c in self.backward}
        return {c: min(self.backward[r] for r in read if r in self.backward) for c, read in readers.items()}

    def height(self, memory: list[int]) -> float:
        """How high memory is where it is high."""
        return sum(w * (m / self._top) ** _POWER for w, m in zip(self.each, memory, strict=True))

    def kinds(self, paths: frozenset[str]) -> list[Kind]:
        """Those that wait longest first."""
        counts: dict[str, int] = {}
        for call in self.calls:
            counts[call.key[0]] = counts.get(call.key[0], 0) + 1
        fewest = min(counts.values(), default=1)
        found: dict[tuple[str, int, int], Kind] = {}
        for index, call in enumerate(self.calls):
            path, count = call.key
            if path not in paths or index not in self.forward or index not in self.backward:
                continue
            times = max(counts[path] // fewest, 1)  # a half in stages is called twice for a microbatch
            for ordinal, size in enumerate(call.items):
                if size:
                    found.setdefault((path, count % times, ordinal), []).append((index, ordinal))
        return sorted(found.values(), key=self._wait, reverse=True)

    def lay(self, items: Iterable[tuple[int, int]], level: float = inf) -> _Laid:
        """Lay items on the link; a forward waits rather than raise memory above `level`."""
        chosen: dict[int, set[int]] = {}
        for call, ordinal in items:
            chosen.setdefault(call, set()).add(ordinal)
        return _Laid(self, chosen, level)

    def _wait(self, items: Kind) -> float:
        waits = [self.starts[self.backward[c]] - self.starts[self.forward[c]] for c, _ in items]
        return sum(waits) / len(waits)


class _Laid:
    """An assignment on the link, and what follows from it: `memory` at each moment, its `peak`, its `height` (how high it is
    where it is high), and `stall`, the seconds for which the compute stream waits."""

    def __init__(self, step: _Step, chosen: dict[int, set[int]], level: float):
        self.step = step
        self.chosen = {c: frozenset(o) for c, o in chosen.items()}
        self.bytes = {c: sum(step.calls[c].items[i] for i in o) for c, o in self.chosen.items()}
        self._lay(level)
        if self.stall and len(self.bytes) < len(chosen):  # none waits for what stays after all
            self._lay(level)
        self.memory = self._memory()
        self.peak = max(self.memory, default=0)
        self.height = step.height(self.memory)

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

    def _leave(self, call: int, ordinals: frozenset[int]) -> None:
        """Of `call` no more than these."""
        self.chosen[call] = ordinals
        self.bytes[call] = sum(self.step.calls[call].items[i] for i in ordinals)
        if not ordinals:
            for known in (self.chosen, self.bytes, self.settled, self.fetched):
                known.pop(call, None)

    def _lay(self, level: float) -> None:
        self.settled: dict[int, int] = {}
        self.fetched: dict[int, int] = {}
        self.stall = 0.0
        self._starts: list[float] = []
        self._copy_out(level)
        self._copy_back()

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
                    self.stall += max(end - now, 0.0)
                    now = max(end, now)
                    self.settled[call] = index
                    held -= self.bytes[call]
            self._starts.append(now)
            call = moment.call
            if moment.kind == "F" and call in step.backward:
                held += step.sizes[call]
                if call in self.bytes:
                    ready = now + step.calls[call].seconds
                    lane = max(lane, ready) + self.bytes[call] / (step.timeline.out_rate * _SHARED)
                    under_way.append((call, lane))
            elif moment.kind == "B" and call in step.forward:
                held -= step.sizes[call] - (self.bytes[call] if call in self.settled else 0)
            now += step.each[index]
            if index + 1 < len(step.moments):
                now = max(now, step.starts[index + 1])  # idle until others have sent

    def _copy_back(self) -> None:
        step, deadline = self.step, float("inf")
        for call in sorted(self.settled, key=lambda c: -step.needed[c]):
            seconds = self.bytes[call] / (step.timeline.back_rate * _SHARED)
            begin = min(deadline, self._starts[step.needed[call]]) - seconds - step.slack
            moment = min(bisect_right(self._starts, begin), step.needed[call]) - 1
            if moment > self.settled[call]:
                self.fetched[call] = moment
                deadline = begin
        for call in [c for c in self.bytes if c not in self.fetched]:
            self._leave(call, frozenset())

    def _memory(self) -> list[int]:
        """At each moment, with what rises during it."""
        step = self.step
        change = [0] * (len(step.moments) + 1)

        def add(first: int, behind: int, size: int) -> None:
            change[first] += size
            change[behind] -= size

        for call in range(len(step.calls)):
            if call in step.forward and call in step.backward:
                # Its forward's own rise has it already, and so has its backward's start.
                add(step.forward[call] + 1, step.backward[call] + 1, step.sizes[call])
        for call, size in self.bytes.items():
            add(self.settled[call], self.fetched[call], -size)
        held = list(accumulate(change))
        return [m.other + held[i] + m.transient for i, m in enumerate(step.moments)]

    def plan(self) -> Plan:
        step = self.step
        fetches: dict[tuple[str, Key], list[Key]] = {}
        for call in sorted(self.fetched, key=lambda c: step.needed[c]):
            fetches.setdefault(self._name(self.fetched[call]), []).append(step.calls[call].key)
        return Plan(
            offload={step.calls[c].key: o for c, o in self.chosen.items()},
            recompute=frozenset(),
            settle_at={step.calls[c].key: self._name(m) for c, m in self.settled.items()},
            fetch_at={name: tuple(keys) for name, keys in fetches.items()},
            planned_bytes=sum(self.bytes.values()),
            peak_bytes=self.peak,
            after_forward_bytes=self.peak,
            stall_seconds=self.stall,
            step_seconds=sum(m.seconds for m in step.moments) + self.stall,
        )

    def _name(self, moment: int) -> tuple[str, Key]:
        moments, calls = self.step.moments, self.step.calls
        return moments[moment].kind, calls[moments[moment].call].key
