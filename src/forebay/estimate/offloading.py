"""What the run's manager does in a walk: it records its first step, plans what is offloaded, and carries that out.

Input: a `Link`, and the parts of a step as their forwards and backwards begin. Output: allocations and frees of offloaded
storages, and the `Plan`, which `forebay.memory.solver` makes of the recorded `Timeline` as it does in a run; only the
seconds are a device profile's. An `OffloadManager` lasts as long as a walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.estimate.allocator import ACTIVATIONS, OPTIMIZER, Block, CachingAllocator
from forebay.estimate.parts import Part
from forebay.estimate.types import PartEvents
from forebay.memory.solver import fit_link, is_interleaved, offload_all, plan_interleaved
from forebay.memory.timeline import CallFigures, Key, Plan, Timeline, TimelineEvent

ENDS = ("embedding", "head")
"""Paths of the parts that are not sublayers."""
MEASURED_STEPS = 2
"""Steps that a GPU's manager measures: everything that may leave does. It follows its plan from then on."""


@dataclass(eq=False)
class PartRun:
    """A part of a microbatch between forward and backward.

    Attributes:
        blocks: by storage.
        x: its input, while it is held.
        offloaded: bytes of the storages that were offloaded.
        pages: without an arena, a block in place of its pages.
        call: the number of its forwards before this one in the manager's step.
    """

    part: Part
    blocks: dict[int, Block]
    x: Block | None
    offloaded: dict[int, int] = field(default_factory=dict)
    balance: Block | None = None
    shared: Block | None = None
    pages: Block | None = None
    call: int = 0

    @property
    def key(self) -> Key:
        return self.part.path, self.call


@dataclass(frozen=True)
class Link:
    """The link to the host, and what may use it.

    Attributes:
        rates: positional rates of a `Timeline`, bytes a second.
        seconds: of a part's forward and backward, recomputation included. A device that waits for its host is slower than its
            profile: the run then offloads more than is planned here.
        everything: `offload = "all"`: the device may wait for the link.
    """

    rates: tuple[float | None, ...]
    seconds: Callable[[Part], tuple[float, float]]
    everything: bool = False

    def plan(self, timeline: Timeline, paths: frozenset[str]) -> Plan:
        if is_interleaved(timeline):
            return plan_interleaved(timeline, paths, self.everything)
        return offload_all(timeline, paths) if self.everything else fit_link(timeline, paths)


class OffloadManager:
    """Offloads in the steps of a walk. A managed step is the whole step where microbatches are under way together, else a
    microbatch.

    Until it has a plan, a sublayer's tensors are on the device until the next one begins, and again from one before its
    backward. Without a link it never has one, and two sublayers are in transfer.

    Args:
        stream: of blocks that are fetched.
        hidden: bytes of a part's input.
        least: bytes below which nothing is offloaded.

    Attributes:
        before: bytes in use before a forward, as a manager measures them in its second step, without moments.
        plan: None until the measured steps are over.
    """

    def __init__(self, allocator: CachingAllocator, stream: Any, link: Link | None, hidden: int, least: int):
        self._allocator, self._stream, self._link = allocator, stream, link
        self._hidden, self._least = hidden, least
        self.before = 0
        self.plan: Plan | None = None
        self._steps = 0
        self._record = _StepRecord()
        self._runs: dict[Key, PartRun] = {}
        self._calls: dict[str, int] = {}
        self._leaving: list[PartRun] = []
        self._released_at: dict[tuple[str, Key], list[Key]] = {}

    def begin_step(self) -> None:
        self._steps += 1
        self._runs, self._calls = {}, {}
        if self._steps == MEASURED_STEPS:
            self.before = self._allocator.allocated - self._allocator.by_role[OPTIMIZER]
        if self._steps > MEASURED_STEPS and self._link is not None and self.plan is None:
            self.plan = self._link.plan(self._record.timeline(self._link.rates), frozenset(self._record.paths))
            for key, event in self.plan.release_at.items():
                self._released_at.setdefault(event, []).append(key)

    def begin_forward(self, run: PartRun) -> None:
        path = run.part.path
        run.call = self._calls.get(path, 0)
        self._calls[path] = run.call + 1
        self._runs[run.key] = run
        self.record("F", run)
        self._transfer("F", run)

    def begin_backward(self, run: PartRun, following: PartRun | None) -> None:
        """`following`: the part whose backward is next."""
        self.record("B", run)
        self._transfer("B", run)
        self._fetch(run)
        if following is not None and self.plan is None and run.part.path not in ENDS:
            self._fetch(following)

    def record(self, kind: str, run: PartRun) -> None:
        """A forward or backward begins in the step that plans are made of. An engine's head is recorded only."""
        if self._link is not None and self._steps == 1:
            items = tuple(size for _, size in offloadable(run.part.events, self._hidden, self._least))
            self._record.add(kind, run, items, self._link.seconds(run.part))

    def end_forward(self, run: PartRun) -> None:
        if run.part.placement == "offload" and self.plan is None:
            self._leaving.append(run)

    def _transfer(self, kind: str, run: PartRun) -> None:
        """Release and fetch what is due when a sublayer's forward or backward begins. Embedding and head are no regions: nothing
        is due at theirs."""
        if run.part.path in ENDS:
            return
        if self.plan is None:
            staying = self._leaving[-1:] if self._link is None else [run]
            for other in [other for other in self._leaving if all(other is not mine for mine in staying)]:
                self._leaving.remove(other)
                self._release(other, None)
            return
        event = kind, run.key
        for key in self._released_at.get(event, ()):
            if key in self._runs:
                self._release(self._runs[key], self.plan.offload[key])
        for key in self.plan.fetch_at.get(event, ()):
            if key in self._runs:
                self._fetch(self._runs[key])

    def _release(self, run: PartRun, chosen: frozenset[int] | None) -> None:
        """Free what was offloaded: the chosen items, or all."""
        events, least = run.part.events, self._least
        if chosen is None:
            leaving = [*run.blocks, events.x]
        else:
            items = offloadable(events, self._hidden, least)
            leaving = [number for at, (number, _) in enumerate(items) if at in chosen]
        sizes = storage_sizes(events, self._hidden)  # a block may be larger than what it holds
        for n in leaving:
            if sizes.get(n, 0) < least:
                continue
            if n == events.x and run.x is not None:
                run.offloaded[n] = sizes[n]
                self._allocator.free(run.x)
                run.x = None
            elif n in run.blocks:
                run.offloaded[n] = sizes[n]
                self._allocator.free(run.blocks.pop(n))

    def _fetch(self, run: PartRun) -> None:
        if run in self._leaving:
            self._leaving.remove(run)
        for n, size in run.offloaded.items():
            block = self._allocator.malloc(size, self._stream, ACTIVATIONS)
            if n == run.part.events.x:
                run.x = block
            else:
                run.blocks[n] = block
        run.offloaded = {}


class _StepRecord:
    """The calls and events of a step. Embedding and head are not regions: their time belongs to the event before."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._calls: dict[Key, CallFigures] = {}
        self._events: list[tuple[str, Key]] = []
        self._seconds: list[float] = []

    def add(self, kind: str, run: PartRun, items: tuple[int, ...], seconds: tuple[float, float]) -> None:
        """`items`: bytes of what its sublayer saves that a store would take; `seconds`: of its forward and backward."""
        part, (forward, backward) = run.part, seconds
        if part.path in ENDS:
            # A head's backward follows its forward at once.
            if kind == "F" and self._seconds:
                self._seconds[-1] += forward + (backward if part.path == "head" else 0.0)
            return
        if kind == "F":
            self._calls[run.key] = CallFigures(run.key, items, forward)
        if part.placement == "offload":
            self.paths.add(part.path)
        self._events.append((kind, run.key))
        self._seconds.append(forward if kind == "F" else backward)

    def timeline(self, rates: Sequence[float | None]) -> Timeline:
        numbers = {key: number for number, key in enumerate(self._calls)}
        events = zip(self._events, self._seconds, strict=True)
        return Timeline(
            tuple(self._calls.values()),
            tuple(TimelineEvent(kind, numbers[key], seconds) for (kind, key), seconds in events),
            *rates,  # type: ignore[arg-type]
        )


def offloadable(events: PartEvents, hidden: int, least: int) -> list[tuple[int, int]]:
    """(storage, bytes) of what a sublayer saves that a store would take, in order.

    Args:
        hidden: bytes of its input.
        least: bytes below which a storage stays on the device.
    """
    sizes = storage_sizes(events, hidden)
    return [(n, sizes[n]) for n in events.saved if sizes.get(n, 0) >= least]


def storage_sizes(events: PartEvents, hidden: int) -> dict[int, int]:
    """Bytes of the storages that a part's forward makes, and of its input."""
    return {n: size for n, size in events.forward if size and n >= 0} | {events.x: hidden}


def offloaded_bytes(plan: Plan, part: Part, hidden: int, least: int) -> int:
    """Bytes of an offloaded sublayer that leave for one microbatch: the fewest of all calls."""
    items = offloadable(part.events, hidden, least)
    calls = [chosen for (path, _), chosen in plan.offload.items() if path == part.path]
    return min((sum(items[n][1] for n in chosen) for chosen in calls), default=0)
