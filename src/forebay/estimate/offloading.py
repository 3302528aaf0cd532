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
        held: see `Part.held`.
        offloaded: bytes of the storages that were offloaded.
        pages: without an arena, a block in place of its pages.
        calls: what each of its calls saves that a store would take, (storage, bytes); see `calls_of`.
        keys: of its calls in the manager's step.
    """

    part: Part
    blocks: dict[int, Block]
    x: Block | None
    offloaded: dict[int, int] = field(default_factory=dict)
    balance: Block | None = None
    shared: Block | None = None
    held: Sequence[Block] = ()
    pages: Block | None = None
    calls: tuple[list[tuple[int, int]], ...] = ()
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Link:
    """The link to the host, and what may use it.

    Attributes:
        rates: positional rates of a `Timeline`, bytes a second.
        seconds: of the forward and backward of each of a part's calls, recomputation included. A device that waits for its host
            is slower than its profile: the run then offloads more than is planned here.
        everything: `offload = "all"`: the device may wait for the link.
    """

    rates: tuple[float | None, ...]
    seconds: Callable[[Part], Sequence[tuple[float, float]]]
    everything: bool = False

    def plan(self, timeline: Timeline, paths: frozenset[str]) -> Plan:
        if is_interleaved(timeline):
            return plan_interleaved(timeline, paths, self.everything)
        return offload_all(timeline, paths) if self.everything else fit_link(timeline, paths)


class OffloadManager:
    """Offloads in the steps of a walk. A managed step is the whole step where microbatches are under way together, else a
    microbatch.

    Until it has a plan, a sublayer's tensors are on the device until the next one begins, and again from one before its
    backward. Without a link it never has one, and two sublayers are in transfer, unless it `measures`.

    Args:
        stream: of blocks that are fetched.
        hidden: bytes of a part's input.
        least: bytes below which nothing is offloaded.
        engine: whether MoE sublayers run as two calls.
        auto: the first steps are measured for `policy = "auto"`.

    Attributes:
        before: bytes in use before a forward, as a manager measures them in its second step, without moments.
        plan: None until the measured steps are over.
    """

    def __init__(
        self,
        allocator: CachingAllocator,
        stream: Any,
        link: Link | None,
        hidden: int,
        least: int,
        engine: bool,
        auto: bool,
    ):
        self._allocator, self._stream, self._link = allocator, stream, link
        self._hidden, self._least, self._engine, self._auto = hidden, least, engine, auto
        self.before = 0
        self.plan: Plan | None = None
        self._steps = 0
        self._record = _StepRecord()
        self._runs: dict[Key, PartRun] = {}
        self._calls: dict[str, int] = {}
        self._leaving: list[PartRun] = []
        self._released_at: dict[tuple[str, Key], list[Key]] = {}

    @property
    def measures(self) -> bool:
        """Whether the step is measured for `policy = "auto"`."""
        return self._auto and self._steps <= MEASURED_STEPS

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
        if self._link is not None:  # what a plan is made of
            path = run.part.path
            run.calls = calls_of(run.part, self._hidden, self._least, self._engine)
            before = self._calls.get(path, 0)
            self._calls[path] = before + len(run.calls)
            run.keys = tuple((path, before + n) for n in range(len(run.calls)))
            self._runs |= dict.fromkeys(run.keys, run)
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
            seconds = self._link.seconds(run.part)
            if run.part.path in ENDS:
                self._record.end(kind, run.part, *seconds)
                return
            calls = [*zip(run.keys, run.calls, seconds, strict=True)]
            for key, items, times in calls if kind == "F" else reversed(calls):
                self._record.add(kind, run.part, key, tuple(size for _, size in items), times)

    def end_forward(self, run: PartRun) -> None:
        if run.part.placement == "offload" and self.plan is None:
            self._leaving.append(run)

    def _transfer(self, kind: str, run: PartRun) -> None:
        """Release and fetch what is due when a sublayer's forward or backward begins. Embedding and head are no regions: nothing
        is due at theirs."""
        if run.part.path in ENDS:
            return
        if self.plan is None:
            staying = [run] if self._link is not None or self.measures else self._leaving[-1:]
            for other in [other for other in self._leaving if all(other is not mine for mine in staying)]:
                self._leaving.remove(other)
                self._release(other, None)
            return
        # The events of a part's second call count as those of its first: both are at its begin.
        for own in run.keys if kind == "F" else reversed(run.keys):
            for key in self._released_at.get((kind, own), ()):
                if key in self._runs:
                    self._release(self._runs[key], key)
            for key in self.plan.fetch_at.get((kind, own), ()):
                if key in self._runs:
                    self._fetch(self._runs[key], key)

    def _release(self, run: PartRun, key: Key | None) -> None:
        """Free what was offloaded: what the plan chose of a call, or all."""
        events, least = run.part.events, self._least
        if key is None:
            leaving = [*run.blocks, events.x]
        else:
            assert self.plan is not None
            chosen = self.plan.offload[key]
            leaving = [number for at, (number, _) in enumerate(_items_of(run, key)) if at in chosen]
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

    def _fetch(self, run: PartRun, key: Key | None = None) -> None:
        """Make what was offloaded of a call, or all."""
        if run in self._leaving:
            self._leaving.remove(run)
        wanted = {n for n, _ in _items_of(run, key)} if key is not None else set(run.offloaded)
        for n in [n for n in run.offloaded if n in wanted]:
            block = self._allocator.malloc(run.offloaded.pop(n), self._stream, ACTIVATIONS)
            if n == run.part.events.x:
                run.x = block
            else:
                run.blocks[n] = block


class _StepRecord:
    """The calls and events of a step. Embedding and head are not regions: their time belongs to the event before."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._calls: dict[Key, CallFigures] = {}
        self._events: list[tuple[str, Key]] = []
        self._seconds: list[float] = []

    def add(self, kind: str, part: Part, key: Key, items: tuple[int, ...], seconds: tuple[float, float]) -> None:
        """A call's forward or backward. `items`: bytes of what it saves that a store would take; `seconds`: of both."""
        forward, backward = seconds
        if kind == "F":
            self._calls[key] = CallFigures(key, items, forward)
        if part.placement == "offload":
            self.paths.add(part.path)
        self._events.append((kind, key))
        self._seconds.append(forward if kind == "F" else backward)

    def end(self, kind: str, part: Part, seconds: tuple[float, float]) -> None:
        """The embedding or the head, whose backward follows its forward at once."""
        if kind == "F" and self._seconds:
            self._seconds[-1] += seconds[0] + (seconds[1] if part.path == "head" else 0.0)

    def timeline(self, rates: Sequence[float | None]) -> Timeline:
        numbers = {key: number for number, key in enumerate(self._calls)}
        events = zip(self._events, self._seconds, strict=True)
        return Timeline(
            tuple(self._calls.values()),
            tuple(TimelineEvent(kind, numbers[key], seconds) for (kind, key), seconds in events),
            *rates,  # type: ignore[arg-type]
        )


def calls_of(part: Part, hidden: int, least: int, engine: bool) -> tuple[list[tuple[int, int]], ...]:
    """What each call of a sublayer saves that a store would take; see `offloadable`. An engine calls a MoE sublayer twice: up to
    the token dispatch, and its experts."""
    events = part.events
    items = offloadable(events, hidden, least)
    if not is_cut(part, engine):
        return (items,)
    # Experts may recompute h and not save it: what is made after it is of their call as well. Storages are numbered as made.
    ours = {events.experts_x} & events.transferred
    first = next((at for at, (n, _) in enumerate(items) if n in ours or n >= events.experts_h), len(items))
    return items[:first], items[first:]


def is_cut(part: Part, engine: bool) -> bool:
    return engine and part.events.experts_h >= 0


def _items_of(run: PartRun, key: Key) -> list[tuple[int, int]]:
    return run.calls[run.keys.index(key)]


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


def offloaded_bytes(plan: Plan, part: Part, hidden: int, least: int, engine: bool) -> int:
    """Bytes of an offloaded sublayer that leave for one microbatch: the fewest of all forwards."""
    calls = calls_of(part, hidden, least, engine)
    leaving: dict[int, int] = {}
    for (path, number), chosen in plan.offload.items():
        if path == part.path:
            forward, call = divmod(number, len(calls))
            leaving[forward] = leaving.get(forward, 0) + sum(calls[call][n][1] for n in chosen)
    return min(leaving.values(), default=0)
