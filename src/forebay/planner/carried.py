"""What a run's manager will offload, and when: its own plan, made from a trace instead of from measured cycles.

In: a rank's stages as they are placed (`Half`), what it computes in a step, and the link's rates. Out: the `Plan` that
`forebay.saved.manager` would make of them, whose calls are (half's path, number of its call in a cycle). Nothing is kept.

The manager plans with a `Timeline`: in which order regions begin forward and backward, how long that takes, and the bytes of each
storage that a region saves and a store could take. It measures the three; here the order is the schedule's, seconds are the
device profile's, and storages are the trace's. What is planned with is the same code: `forebay.planner.solve` for forwards that
are followed by their backwards, `forebay.planner.interleaved` for a pipeline.

A device that waits for its host takes longer than the profile says, and carries more meanwhile: more is away than is planned
here, and memory is lower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forebay.planner.events import PartEvents
from forebay.planner.interleaved import is_interleaved, plan_interleaved
from forebay.planner.simulate import CallFigures, Moment, Plan, Timeline
from forebay.planner.solve import fit_link, offload_all

CYCLES = 2
"""A GPU's manager measures so many cycles, in which everything that may leave does, and follows its plan from then on."""


@dataclass(frozen=True)
class Half:
    """A half of a layer in a run, or an end.

    Attributes:
        leaves: it is placed to be offloaded.
        forward, backward: seconds of a microbatch, what is made again in backward included.
    """

    path: str
    events: PartEvents
    leaves: bool
    forward: float
    backward: float

    @property
    def managed(self) -> bool:
        """Embedding and head are nobody's region: their time is a part of the moment before."""
        return self.path not in ("embedding", "head")


def may_leave(events: PartEvents, hidden: int, least: int) -> list[tuple[int, int]]:
    """(storage, bytes) of what a half saves that a store would take, in order. `hidden`: bytes of its input."""
    sizes = {n: size for n, size in events.forward if size and n >= 0}
    sizes[events.x] = hidden
    return [(n, sizes[n]) for n in events.saved if sizes.get(n, 0) >= least]


def plan_link(
    stages: Mapping[int, Sequence[Half]],
    actions: Iterable[Any],
    rates: tuple[float | None, ...],
    *,
    hidden: int,
    least: int,
    everything: bool,
) -> Plan:
    """What leaves in a cycle, where it is settled and where it is fetched.

    Args:
        stages: halves in forward order, ends included, by stage.
        actions: of a cycle: a pipeline's step; else a forward and its backward.
        rates: bytes a second, to the host and back, at a pipeline's two ends, and of the device's own memory; as a `Timeline` has
            them.
        hidden: bytes of a half's input.
        least: bytes below which a storage stays.
        everything: `offload = "all"`: wait for the link where that is needed.
    """
    cycle = _Cycle(hidden, least)
    for action in actions:
        cycle.add(stages, action)
    calls = tuple(cycle.calls)
    timeline = Timeline(calls, tuple(cycle.moments), *rates)  # type: ignore[arg-type]
    paths = frozenset(half.path for halves in stages.values() for half in halves if half.leaves)
    if is_interleaved(timeline):
        return plan_interleaved(timeline, paths, everything)
    return offload_all(timeline, paths) if everything else fit_link(timeline, paths)


def carried_by_path(plan: Plan, stages: Mapping[int, Sequence[Half]], hidden: int, least: int) -> dict[str, int]:
    """Bytes of each half that leave for one microbatch: the fewest of all calls."""
    events = {half.path: half.events for halves in stages.values() for half in halves if half.leaves}
    found: dict[str, int] = {}
    for path in events:
        items = may_leave(events[path], hidden, least)
        calls = [chosen for (name, _), chosen in plan.offload.items() if name == path]
        found[path] = min((sum(items[n][1] for n in chosen) for chosen in calls), default=0)
    return found


class _Cycle:
    """A timeline in the making."""

    def __init__(self, hidden: int, least: int):
        self._hidden, self._least = hidden, least
        self.calls: list[CallFigures] = []
        self.moments: list[Moment] = []
        self._numbers: dict[tuple[str, int], int] = {}  # of a half's call for a microbatch
        self._counts: dict[str, int] = {}

    def add(self, stages: Mapping[int, Sequence[Half]], action: Any) -> None:
        match action.kind:
            case "OVERLAP_F_B":
                forward, backward = action.parts
                there, back = list(stages[forward.stage]), list(reversed(stages[backward.stage]))
                for k in range(max(len(there), len(back))):
                    for half in there[k : k + 1]:
                        self._forward(half, forward.microbatch)
                    for half in back[k : k + 1]:
                        self._backward(half, backward.microbatch)
            case "F":
                for half in stages[action.stage]:
                    self._forward(half, action.microbatch)
            case "B" | "I":
                for half in reversed(stages[action.stage]):
                    self._backward(half, action.microbatch)

    def _forward(self, half: Half, microbatch: int) -> None:
        if not half.managed:
            # A head's backward follows its forward at once.
            self._longer(half.forward + (half.backward if half.path == "head" else 0.0))
            return
        count = self._counts.get(half.path, 0)
        self._counts[half.path] = count + 1
        self._numbers[half.path, microbatch] = number = len(self.calls)
        items = tuple(size for _, size in may_leave(half.events, self._hidden, self._least))
        self.calls.append(CallFigures((half.path, count), items, half.forward))
        self.moments.append(Moment("F", number, half.forward))

    def _backward(self, half: Half, microbatch: int) -> None:
        if half.managed:
            self.moments.append(Moment("B", self._numbers[half.path, microbatch], half.backward))

    def _longer(self, seconds: float) -> None:
        if self.moments:
            self.moments[-1] = replace(self.moments[-1], seconds=self.moments[-1].seconds + seconds)
