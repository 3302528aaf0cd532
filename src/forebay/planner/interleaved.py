"""What leaves for the host where forwards and backwards of several microbatches alternate, as in a pipeline.

In: a `Timeline` in which a forward follows some backward. Out: a `Plan` by which nobody waits.

There is no turn here, before which everything leaves and after which it comes back (`forebay.planner.solve` plans for that): the
link carries both ways all the time, and memory is level for most of a step. So what is chosen is a *kind* of item, the same
storage of the same region in all microbatches, and a peak falls by what of it is away at any one time:

    kind      (region, which of its calls in a microbatch, ordinal); those that wait longest first
    accepted  if memory becomes lower where it is high: the mean of (memory)^16 over moments falls

Of an accepted kind each call is laid on the two lanes of the link. Its copy out begins when the region's forward is over and the
lane is free, and is settled at the first moment behind its end; its copy back begins at the last moment from which it is in time
for its backward. A call for which no time is left between the two stays, as do those at the beginning and the end of a step,
where little is in flight.

Worked example, link of 1 byte a second, moments of 10 s: F0 F1 B0 F2 B1 B2. Each call saves 5 bytes at the end of its forward and
waits for a moment. Call 1, forward at 10 s: saved and copied by t=25, settled at F2 (t=30); its backward is at t=40, the copy
back has to begin at t=35, and the last moment before is F2 (t=30) itself: there is nothing to win, so it stays.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate

from forebay.planner.simulate import Key, Plan, Timeline

# Copies both ways at once run at 50.8 of 55.4 GB/s (H200, PCIe gen 5), and 4 GPUs of a host at once at 41 out, 54 back.
_SHARED = 0.9
_SLACK = 3e-4  # s; launch latencies between a moment and the copy it starts, and what varies from step to step
_POWER = 16


def is_interleaved(timeline: Timeline) -> bool:
    """Whether some forward follows a backward."""
    kinds = "".join(m.kind for m in timeline.moments)
    return "F" in kinds.lstrip("F")


def plan_interleaved(timeline: Timeline, paths: frozenset[str]) -> Plan:
    """Offload of the regions `paths` what lowers the peak, as far as the link carries it without anybody waiting.

    `peak_bytes` of a plan for no paths is that of keeping everything.
    """
    step = _Step(timeline)
    chosen: list[tuple[int, int]] = []
    best = step.lay([])
    for kind in step.kinds(paths):
        laid = step.lay([*chosen, *kind])
        if laid.height < best.height * (1 - 1e-9):
            chosen.extend(kind)
            best = laid
    return best.plan()


class _Step:
    """A timeline with its times."""

    def __init__(self, timeline: Timeline):
        self.timeline, self.calls, self.moments = timeline, timeline.calls, timeline.moments
        self.forward = {m.call: i for i, m in enumerate(self.moments) if m.kind == "F"}
        self.backward = {m.call: i for i, m in enumerate(self.moments) if m.kind == "B"}
        timed = [m.seconds for m in self.moments]
        self._seconds = timed if any(timed) else [1.0] * len(timed)  # a CPU has no times
        self.starts = [0.0, *accumulate(self._seconds)][:-1]
        self.slack = _SLACK if timeline.out_rate < float("inf") else 0.0
        self._top = sum(sum(c.items) for c in self.calls) or 1

    def height(self, memory: list[int]) -> float:
        """How high memory is where it is high."""
        return sum(w * (m / self._top) ** _POWER for w, m in zip(self._seconds, memory, strict=True))

    def kinds(self, paths: frozenset[str]) -> list[list[tuple[int, int]]]:
        """(call, ordinal) of each kind, those that wait longest first."""
        counts: dict[str, int] = {}
        for call in self.calls:
            counts[call.key[0]] = counts.get(call.key[0], 0) + 1
        fewest = min(counts.values(), default=1)
        found: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
        for index, call in enumerate(self.calls):
            path, count = call.key
            if path not in paths or index not in self.forward or index not in self.backward:
                continue
            times = max(counts[path] // fewest, 1)  # a half in stages is called twice for a microbatch
            for ordinal, size in enumerate(call.items):
                if size:
                    found.setdefault((path, count % times, ordinal), []).append((index, ordinal))
        return sorted(found.values(), key=self._wait, reverse=True)

    def lay(self, items: Iterable[tuple[int, int]]) -> _Laid:
        """Lay items on the link."""
        chosen: dict[int, set[int]] = {}
        for call, ordinal in items:
            chosen.setdefault(call, set()).add(ordinal)
        return _Laid(self, chosen)

    def _wait(self, items: list[tuple[int, int]]) -> float:
        waits = [self.starts[self.backward[c]] - self.starts[self.forward[c]] for c, _ in items]
        return sum(waits) / len(waits)


class _Laid:
    """An assignment on the link, and the memory that follows from it. `height` says how high memory is where it is high."""

    def __init__(self, step: _Step, chosen: dict[int, set[int]]):
        self.step = step
        self.chosen = {c: frozenset(o) for c, o in chosen.items()}
        self.bytes = {c: sum(step.calls[c].items[i] for i in o) for c, o in self.chosen.items()}
        self.settled: dict[int, int] = {}
        self.fetched: dict[int, int] = {}
        self._copy_out()
        self._copy_back()
        self.memory = self._memory()
        self.height = step.height(self.memory)

    def _copy_out(self) -> None:
        step, lane = self.step, 0.0
        for call in sorted(self.bytes, key=lambda c: step.forward[c]):
            ready = step.starts[step.forward[call]] + step.calls[call].seconds
            lane = max(lane, ready) + self.bytes[call] / (step.timeline.out_rate * _SHARED)
            # Not at its own forward: what it saves is not there yet.
            moment = max(bisect_left(step.starts, lane + step.slack), step.forward[call] + 1)
            if moment < step.backward[call]:
                self.settled[call] = moment

    def _copy_back(self) -> None:
        step, deadline = self.step, float("inf")
        for call in sorted(self.settled, key=lambda c: -step.backward[c]):
            seconds = self.bytes[call] / (step.timeline.back_rate * _SHARED)
            begin = min(deadline, step.starts[step.backward[call]]) - seconds - step.slack
            moment = min(bisect_right(step.starts, begin), step.backward[call]) - 1
            if moment > self.settled[call]:
                self.fetched[call] = moment
                deadline = begin
        for call in [c for c in self.bytes if c not in self.fetched]:
            del self.bytes[call], self.chosen[call]
            self.settled.pop(call, None)

    def _memory(self) -> list[int]:
        """At each moment, with what rises during it."""
        step = self.step
        change = [0] * (len(step.moments) + 1)

        def add(first: int, behind: int, size: int) -> None:
            change[first] += size
            change[behind] -= size

        for call, figures in enumerate(step.calls):
            if call in step.forward and call in step.backward:
                # Its forward's own rise has it already, and so has its backward's start.
                add(step.forward[call] + 1, step.backward[call] + 1, sum(figures.items))
        for call, size in self.bytes.items():
            add(self.settled[call], self.fetched[call], -size)
        held = list(accumulate(change))
        return [m.other + held[i] + m.transient for i, m in enumerate(step.moments)]

    def plan(self) -> Plan:
        step = self.step
        fetches: dict[tuple[str, Key], list[Key]] = {}
        for call in sorted(self.fetched, key=lambda c: step.backward[c]):
            fetches.setdefault(self._name(self.fetched[call]), []).append(step.calls[call].key)
        return Plan(
            offload={step.calls[c].key: o for c, o in self.chosen.items()},
            recompute=frozenset(),
            settle_at={step.calls[c].key: self._name(m) for c, m in self.settled.items()},
            fetch_at={name: tuple(keys) for name, keys in fetches.items()},
            planned_bytes=sum(self.bytes.values()),
            peak_bytes=max(self.memory, default=0),
            after_forward_bytes=max(self.memory, default=0),
            stall_seconds=0.0,
            step_seconds=sum(m.seconds for m in step.moments),
        )

    def _name(self, moment: int) -> tuple[str, Key]:
        moments, calls = self.step.moments, self.step.calls
        return moments[moment].kind, calls[moments[moment].call].key
