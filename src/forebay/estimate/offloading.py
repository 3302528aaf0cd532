"""What the run's manager does in a walk: it records its first step, plans what is offloaded, and carries that out.

Input: a `RankRun`, and the parts of a step as their forwards and backwards begin. Output: allocations and frees of offloaded
storages, and the `Plan`, which `forebay.memory.solver` makes of the recorded `Timeline` as it does in a run; only the
seconds are a device profile's. An `OffloadManager` lasts as long as a walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.estimate.allocator import ACTIVATIONS, GRADIENTS, OPTIMIZER, Block, CachingAllocator
from forebay.estimate.parts import Part
from forebay.estimate.rank_run import RankRun
from forebay.estimate.types import PartEvents
from forebay.memory.solver import plan_offload
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
        following: in a backward, the part whose backward is next.
        in_last: whether the microbatch is the step's last.
    """

    part: Part
    blocks: dict[int, Block] = field(default_factory=dict)
    x: Block | None = None
    offloaded: dict[int, int] = field(default_factory=dict)
    balance: Block | None = None
    shared: Sequence[Block] = ()
    held: Sequence[Block] = ()
    pages: Block | None = None
    calls: tuple[list[tuple[int, int]], ...] = ()
    keys: tuple[Key, ...] = ()
    following: PartRun | None = None
    in_last: bool = False

    @property
    def last(self) -> int:
        """Index of its last call."""
        return max(len(self.calls) - 1, 0)


class OffloadManager:
    """Offloads in the steps of a walk. A managed step is the whole step where microbatches are under way together, else a
    microbatch.

    Until it has a plan, a sublayer's tensors are on the device until the next one begins, and again from one before its
    backward. Without a link it never has one, and two sublayers are in transfer, unless it `measures`.

    Attributes:
        measures: whether steps are measured for `policy = "auto"`.
        before: bytes in use before a forward, as a manager measures them in its second step, without moments.
        plan: None until the measured steps are over.
    """

    def __init__(self, allocator: CachingAllocator, stream: Any, run: RankRun):
        self._allocator, self._stream, self._run, self._link = allocator, stream, run, run.link
        self.measures = run.measured is not None
        self.before = 0
        self.plan: Plan | None = None
        self._steps = 0
        # What plans are made from, of one step. The time of embedding and head, which are no regions, is in the event before.
        self._figures: dict[Key, CallFigures] = {}
        self._events: list[tuple[str, Key, float]] = []
        self._paths: set[str] = set()  # of the regions that are offloaded
        self._runs: dict[Key, tuple[PartRun, int]] = {}  # a call, by its key
        self._calls: dict[str, int] = {}
        self._leaving: list[tuple[PartRun, int]] = []  # calls
        self._late: list[PartRun] = []  # their inputs leave at the next event
        self._released_at: dict[tuple[str, Key], list[Key]] = {}

    def end_measuring(self) -> bool:
        """Stop to measure for `policy = "auto"` if enough steps were; returns whether that is now. Called at the end of an
        engine's step and before each of the manager's."""
        over = self.measures and self._steps >= MEASURED_STEPS
        self.measures = self.measures and not over
        return over

    def begin_step(self, alone: bool, own: int = 0) -> None:
        """`alone`: the trainer's step has one microbatch, which makes the gradients; several find those of the first.
        `own`: bytes that the step has allocated already."""
        self._steps += 1
        self._runs, self._calls = {}, {}
        if self._steps == MEASURED_STEPS:
            not_before = [OPTIMIZER, GRADIENTS] if alone else [OPTIMIZER]
            self.before = self._allocator.allocated - own - sum(self._allocator.by_role[role] for role in not_before)
        if self._steps > MEASURED_STEPS and self._link is not None and self.plan is None:
            numbers = {key: number for number, key in enumerate(self._figures)}
            events = (TimelineEvent(kind, numbers[key], seconds) for kind, key, seconds in self._events)
            timeline = Timeline(tuple(self._figures.values()), tuple(events), *self._link.rates)  # type: ignore[arg-type]
            self.plan = plan_offload(timeline, frozenset(self._paths), self._link.everything)
            for key, event in self.plan.release_at.items():
                self._released_at.setdefault(event, []).append(key)

    def begin_forward(self, run: PartRun) -> None:
        if self._link is not None:  # what a plan is made of
            path = run.part.path
            run.calls = calls_of(run.part, self._run)
            before = self._calls.get(path, 0)
            self._calls[path] = before + len(run.calls)
            run.keys = tuple((path, before + n) for n in range(len(run.calls)))
            self._runs |= {key: (run, n) for n, key in enumerate(run.keys)}
        self.record("F", run)
        self._transfer("F", run, 0)

    def begin_second_call(self, run: PartRun, way: str) -> None:
        """A sublayer's other call begins, if it has two: in forward ("F") its experts, in backward ("B") what is before them."""
        if len(run.calls) < 2:
            return
        if way == "F":
            self._leave(run, 0)
            self._transfer("F", run, 1)
        elif way == "B":
            self._begin_backward(run, 0)

    def end_forward(self, run: PartRun) -> None:
        self._leave(run, run.last)

    def begin_backward(self, run: PartRun) -> None:
        self.record("B", run)
        self._begin_backward(run, run.last)

    def _begin_backward(self, run: PartRun, call: int) -> None:
        self._transfer("B", run, call)
        self._fetch(run, call)
        if self.plan is None and run.part.path not in ENDS:
            if call:
                self._fetch(run, call - 1)
            elif run.following is not None:
                self._fetch(run.following, run.following.last)

    def record(self, kind: str, run: PartRun) -> None:
        """A forward or backward begins in the step that plans are made of. An engine's head is recorded only."""
        if self._link is not None and self._steps == 1:
            seconds = self._link.seconds(run.part)
            if run.part.path in ENDS:
                if kind == "F" and self._events:
                    forward, backward = seconds[0]
                    name, key, own = self._events[-1]
                    # A head's backward follows its forward at once.
                    self._events[-1] = name, key, own + (forward + (backward if run.part.path == "head" else 0.0))
                return
            if run.part.placement == "offload":
                self._paths.add(run.part.path)
            calls = [*zip(run.keys, run.calls, seconds, strict=True)]
            for key, items, (forward, backward) in calls if kind == "F" else reversed(calls):
                if kind == "F":
                    self._figures[key] = CallFigures(key, tuple(size for _, size in items), forward)
                self._events.append((kind, key, forward if kind == "F" else backward))

    def _leave(self, run: PartRun, call: int) -> None:
        if run.part.placement == "offload" and self.plan is None:
            self._leaving.append((run, call))

    def _transfer(self, kind: str, run: PartRun, call: int) -> None:
        """Release and fetch what is due when a call's forward or backward begins. Embedding and head are no regions: nothing is
        due at theirs."""
        if run.part.path in ENDS:
            return
        for late in self._late:
            self._release(late, frozenset({late.part.events.x}))
        self._late = []
        # A sublayer's second call reads its input: until that forward is over, its caller holds it.
        inside = run if kind == "F" and call else None
        if self.plan is None:
            staying = [(run, call)] if self._link is not None or self.measures else self._leaving[-1:]
            for leaving in [leaving for leaving in self._leaving if leaving not in staying]:
                self._leaving.remove(leaving)
                self._release_call(*leaving, inside)
            return
        for key in self._released_at.get((kind, run.keys[call]), ()):
            if key in self._runs:
                self._release_call(*self._runs[key], inside)
        for key in self.plan.fetch_at.get((kind, run.keys[call]), ()):
            if key in self._runs:
                self._fetch(*self._runs[key])

    def _release_call(self, run: PartRun, call: int, inside: PartRun | None) -> None:
        """Free what was offloaded of a call: what the plan chose, or all; the input of `inside` when its forward is over."""
        if not run.calls:
            chosen = frozenset([*run.blocks, run.part.events.x])
        elif self.plan is None:
            chosen = frozenset(number for number, _ in run.calls[call])
        else:
            planned = self.plan.offload[run.keys[call]]
            chosen = frozenset(number for at, (number, _) in enumerate(run.calls[call]) if at in planned)
        if run is inside and run.part.events.x in chosen:
            chosen -= {run.part.events.x}
            self._late.append(run)
        self._release(run, chosen)

    def _release(self, run: PartRun, chosen: frozenset[int]) -> None:
        events, x = run.part.events, run.part.events.x
        sizes = storage_sizes(events, self._run.hidden)  # a block may be larger than what it holds
        held = dict.fromkeys((*events.saved, *run.blocks, x))  # what leaves is freed in the order in which it was saved
        for n in [n for n in held if n in chosen and sizes.get(n, 0) >= self._run.least]:
            if n == x and run.x is not None:
                run.offloaded[n] = sizes[n]
                self._allocator.free(run.x)
                run.x = None
            elif n in run.blocks:
                run.offloaded[n] = sizes[n]
                self._allocator.free(run.blocks.pop(n))

    def _fetch(self, run: PartRun, call: int) -> None:
        """Make what was offloaded of a call."""
        if (run, call) in self._leaving:
            self._leaving.remove((run, call))
        wanted = {n for n, _ in run.calls[call]} if run.calls else set(run.offloaded)
        for n in [n for n in run.offloaded if n in wanted]:
            block = self._allocator.malloc(run.offloaded.pop(n), self._stream, ACTIVATIONS)
            if n == run.part.events.x:
                run.x = block
            else:
                run.blocks[n] = block


def calls_of(part: Part, run: RankRun) -> tuple[list[tuple[int, int]], ...]:
    """What each call of a sublayer saves that a store would take; see `offloadable`. An engine calls a MoE sublayer twice: up to
    the token dispatch, and its experts."""
    events = part.events
    items = offloadable(events, run.hidden, run.least)
    if not is_cut(part, run.engine):
        return (items,)
    # Experts may recompute h and not save it: what is made after it is of their call as well. Storages are numbered as made.
    ours = {events.experts_x} & events.transferred
    first = next((at for at, (n, _) in enumerate(items) if n in ours or n >= events.experts_h), len(items))
    return items[:first], items[first:]


def is_cut(part: Part, engine: bool) -> bool:
    return engine and part.events.experts_h >= 0


def offloadable(events: PartEvents, hidden: int, least: int) -> list[tuple[int, int]]:
    """(storage, bytes) of what a sublayer with an input of `hidden` bytes saves that a store would take, in order."""
    sizes = storage_sizes(events, hidden)
    return [(n, sizes[n]) for n in events.saved if sizes.get(n, 0) >= least]


def storage_sizes(events: PartEvents, hidden: int) -> dict[int, int]:
    """Bytes of the storages that a part's forward makes, and of its input."""
    return {n: size for n, size in events.forward if size and n >= 0} | {events.x: hidden}


def offloaded_bytes(plan: Plan, part: Part, run: RankRun) -> int:
    """Bytes of an offloaded sublayer that leave for one microbatch: the fewest of all forwards."""
    calls = calls_of(part, run)
    leaving: dict[int, int] = {}
    for (path, number), chosen in plan.offload.items():
        if path == part.path:
            forward, call = divmod(number, len(calls))
            leaving[forward] = leaving.get(forward, 0) + sum(calls[call][n][1] for n in chosen)
    return min(leaving.values(), default=0)
