"""Chooses placements under a budget by mixed-integer linear programming and local search.

Input: a `Timeline`, a budget in bytes, and which regions may be offloaded or recomputed. Output: a `Plan` whose simulated
peak is within the budget, or None. `Program` writes a program row by row and solves it with HiGHS through
`scipy.optimize.milp`; scipy is imported when the first program is solved. docs/solver.md has the mathematics.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from forebay.memory.timeline import Assignment, CallFigures, IndexedTimeline, Plan, Timeline, TurnSchedule

_ROUNDS = 4  # times that the program is solved
_MIP_GAP = 2e-3  # of the program's answer; what the simulation adds to it is larger
_SOLVE_SECONDS = 0.6  # for all rounds together
# Cost of a second of the link in seconds of waiting: of two plans as fast, the one that moves less is chosen.
_LINK_COST = 1e-3
_MAX_POLISH_EVENTS = 80_000  # events simulated while polishing: 0.4 s of one core
_MANY_REGIONS = 12  # regions from which on equal ones are ordered, and parts of items may be offloaded
_PART_TOLERANCE = 0.05  # of an item; less is the solver's tolerance
# Windows that are simulated, as the divisor of what is offloaded. None: copies that fit the link; 0: an empty window.
_WINDOWS = (None, 2, 4, 8, 16, 0)


@dataclass(frozen=True)
class Answer:
    """Values by variable; `cost` is their sum of costs, and `gap` how far below it the least cost may be, as a share of it."""

    values: tuple[float, ...]
    cost: float
    gap: float

    def chosen(self, variable: int) -> bool:
        """Whether a variable of 0 or 1 is 1."""
        return self.values[variable] > 0.5


class Program:
    """Minimize the sum of cost x variable. Every variable is at least 0."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._uppers: list[float] = []
        self._whole: list[int] = []
        self._limits: list[tuple[float, float]] = []
        self._entries: list[tuple[int, int, float]] = []  # row, variable, factor

    def variable(self, cost: float = 0.0, upper: float = math.inf) -> int:
        """A number between 0 and `upper`."""
        self._costs.append(cost)
        self._uppers.append(upper)
        self._whole.append(0)
        return len(self._costs) - 1

    def choice(self, cost: float = 0.0) -> int:
        """A variable of 0 or 1."""
        number = self.variable(cost, 1.0)
        self._whole[number] = 1
        return number

    def row(self, terms: Iterable[tuple[int, float]], low: float = -math.inf, high: float = math.inf) -> None:
        """low <= sum of factor x variable <= high. A variable may be named more than once."""
        number = len(self._limits)
        self._limits.append((low, high))
        self._entries.extend((number, variable, factor) for variable, factor in terms)

    def solve(self, seconds: float, gap: float) -> Answer | None:
        """The best values found.

        Args:
            seconds: time limit.
            gap: share of the cost by which the answer may miss the least one.

        Returns:
            None if no values meet all rows, or none were found in time.
        """
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        rows, columns, factors = zip(*self._entries, strict=True) if self._entries else ((), (), ())
        matrix = csr_array((factors, (rows, columns)), shape=(len(self._limits), len(self._costs)))
        lows, highs = zip(*self._limits, strict=True) if self._limits else ((), ())
        with _without_debug_output():
            found = milp(
                np.array(self._costs),
                integrality=np.array(self._whole),
                bounds=Bounds(np.zeros(len(self._uppers)), np.array(self._uppers)),
                constraints=LinearConstraint(matrix, np.array(lows, float), np.array(highs, float)) if lows else (),
                options={"time_limit": seconds, "mip_rel_gap": gap},
            )
        if found.x is None:
            return None
        return Answer(tuple(map(float, found.x)), float(found.fun), float(found.mip_gap or 0.0))


@contextmanager
def _without_debug_output() -> Iterator[None]:
    """HiGHS (in scipy 1.17) sometimes prints a debug line with C's printf, which would end up in the JSON of `forebay plan`.
    Standard output goes to a file meanwhile, and all other lines are printed afterwards."""
    try:
        flush = ctypes.CDLL(None).fflush
        before = os.dup(1)
    except (OSError, TypeError, AttributeError):  # no C library (Windows), or no standard output
        yield
        return
    with tempfile.TemporaryFile() as aside:
        if sys.stdout is not None:
            sys.stdout.flush()
        flush(None)
        os.dup2(aside.fileno(), 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(before, 1)
            os.close(before)
            aside.seek(0)
            others = [line for line in aside if not line.startswith(b"HighsMipSolverData::")]
            if others:
                os.write(1, b"".join(others))


@dataclass(frozen=True)
class Allowed:
    """Region paths that may be offloaded, and that may be recomputed; all may be kept."""

    offload: frozenset[str]
    recompute: frozenset[str]


def solve(timeline: Timeline, allowed: Allowed, budget: int, known: Iterable[Assignment] = ()) -> Plan | None:
    """The fastest plan found whose peak is at most `budget` bytes, or None.

    Args:
        known: further assignments to begin the local search from, such as a heuristic's.
    """
    search = _Search(timeline, allowed, budget)
    for assignment in known:
        search.simulate(assignment)
    for _ in range(_ROUNDS):
        if not search.propose():
            break
    search.polish()
    return search.solved()


def lowest(timeline: Timeline, allowed: Allowed, known: Iterable[Assignment] = ()) -> Plan:
    """The plan with the lowest peak found, however long it takes. The search begins at keeping everything and at `known`."""
    search = _Search(timeline, allowed, 0)
    for assignment in (Assignment(), *known):
        search.simulate(assignment)
    search.polish()
    return search.lowest()


def with_one_changed(timeline: Timeline, allowed: Allowed, assignment: Assignment, budget: int) -> list[Plan]:
    """Plans within the budget in which one region as a whole is placed differently from `assignment`; the fastest first.

    Of many such changes as many are simulated as polishing may, taken evenly.
    """
    regions, found = _region_states(timeline, allowed), []
    changes = [(path, state) for path, states in regions.items() for state in states]
    each = max(len(changes) * len(_WINDOWS) * len(timeline.events) // _MAX_POLISH_EVENTS, 1)
    for path, state in changes[::each]:
        changed = _with(assignment, path, state)
        if changed == assignment:
            continue
        search = _Search(timeline, allowed, budget)
        search.simulate(changed)
        if (plan := search.solved()) is not None:
            found.append(plan)
    return sorted(found, key=lambda plan: plan.step_seconds)


class _Search:
    """The best plan so far, and how far the program was too optimistic.

    `propose` solves the program, in which copies are a fluid, and `simulate` simulates the answer: its peak and its time count.
    Where the simulation exceeds the budget, the next program gets a margin; where it is slower, a slower link. `polish` then
    places single regions, items and pairs of regions differently as long as the simulated time falls.
    """

    def __init__(self, timeline: Timeline, allowed: Allowed, budget: int):
        self._timeline, self._allowed, self._budget = timeline, allowed, budget
        self._step = IndexedTimeline(timeline)
        self._margins = [0] * len(timeline.events)
        self._link = 1.0  # share of the link's rates that the next program counts on
        # The rank compares the bytes over the budget first, then the seconds, then the bytes moved.
        self._best: tuple[tuple[int, float, int], Plan, Assignment] | None = None
        self._simulated = 0  # events
        self._seconds = _SOLVE_SECONDS

    def solved(self) -> Plan | None:
        """The best plan, if it is within the budget."""
        return None if self._best is None or self._best[0][0] else self._best[1]

    def lowest(self) -> Plan:
        """The best plan of a search whose budget is out of reach: that with the lowest peak."""
        assert self._best is not None
        return self._best[1]

    def propose(self) -> bool:
        """Solve the program once more. False if another round is of no use."""
        relaxation = _Relaxation(self._timeline, self._allowed, self._budget, self._margins, self._link)
        begun = time.monotonic()
        answer = relaxation.program.solve(self._seconds, _MIP_GAP)
        self._seconds -= time.monotonic() - begun
        if answer is None:
            return False
        aim = relaxation.seconds(answer)
        excess, seconds = self.simulate(relaxation.assignment(answer))
        if seconds <= aim * (1 + _MIP_GAP) or self._seconds < _SOLVE_SECONDS / 10:
            return False
        if any(excess):
            self._margins = [m + e for m, e in zip(self._margins, excess, strict=True)]
        else:
            self._link *= 0.85
        return True

    def simulate(self, assignment: Assignment) -> tuple[list[int], float]:
        """Simulate with every window.

        Returns:
            By how much each event exceeds the budget where that is least (0 if some plan is within it), and the seconds of the
            fastest plan within the budget.
        """
        least: list[int] | None = None
        seconds = math.inf
        offloaded = sum(self._timeline.calls[c].items[i] for c, chosen in assignment.offload.items() for i in chosen)
        for share in _WINDOWS if offloaded else (None,):
            window = None if share is None else offloaded // share if share else 0
            schedule = TurnSchedule(self._step, assignment, window)
            self._simulated += len(schedule.memory)
            excess = [max(level - self._budget, 0) for level in schedule.memory]
            most = max(excess, default=0)
            if least is None or most < max(least, default=0):
                least = excess
            plan = schedule.plan()
            rank = most, float(f"{plan.step_seconds:.5e}"), plan.planned_bytes
            if self._best is None or rank < self._best[0]:
                self._best = rank, plan, assignment
            if not most:
                seconds = min(seconds, plan.step_seconds)
                if share is None and plan.stall_seconds == 0.0:
                    break  # nothing waits: no window is faster
        return least or [], seconds

    def polish(self) -> None:
        """Move to a better neighbor of the best assignment as long as there is one."""
        self._simulated = 0
        better = self._best is not None
        while better and self._best is not None:
            before = self._best[0]
            for assignment in self._neighbors(self._best[2]):
                if self._simulated > _MAX_POLISH_EVENTS:
                    return
                self.simulate(assignment)
                if self._best[0] < before:
                    break
            better = self._best[0] < before

    def _neighbors(self, assignment: Assignment) -> Iterator[Assignment]:
        """One region placed differently; one item; two regions placed differently."""
        regions = _region_states(self._timeline, self._allowed)
        for path, states in regions.items():
            for state in states:
                yield _with(assignment, path, state)
        for path, states in regions.items():
            if path in self._allowed.offload and path not in assignment.recompute:
                for call in states[0].calls:
                    for item, size in enumerate(self._timeline.calls[call].items):
                        if size:
                            yield _toggled(assignment, call, item)
        for one, other in combinations(regions, 2):
            for first in regions[one]:
                for second in regions[other]:
                    yield _with(_with(assignment, one, first), other, second)


@dataclass(frozen=True)
class _RegionState:
    """A placement of a whole region: the items that are offloaded, by call, and whether it is recomputed."""

    calls: tuple[int, ...]
    offload: Mapping[int, frozenset[int]]
    recompute: bool = False


def _region_states(timeline: Timeline, allowed: Allowed) -> dict[str, list[_RegionState]]:
    """The placements of every region that has more than one."""
    calls: dict[str, list[int]] = {}
    for index, call in enumerate(timeline.calls):
        calls.setdefault(call.key[0], []).append(index)
    found = {}
    for path, own in calls.items():
        mine = tuple(own)
        states = [_RegionState(mine, {})]
        everything = {c: frozenset(i for i, n in enumerate(timeline.calls[c].items) if n) for c in mine}
        if path in allowed.offload:
            states.append(_RegionState(mine, everything))
        if path in allowed.recompute:
            states.append(_RegionState(mine, {}, recompute=True))
            if path in allowed.offload and all(timeline.calls[c].light_recompute for c in mine):
                rest = {c: chosen - {timeline.calls[c].largest} for c, chosen in everything.items()}
                states.append(_RegionState(mine, rest, recompute=True))
        if len(states) > 1:
            found[path] = states
    return found


def _with(assignment: Assignment, path: str, state: _RegionState) -> Assignment:
    offload = {c: chosen for c, chosen in assignment.offload.items() if c not in state.calls}
    return Assignment(
        {**offload, **{c: chosen for c, chosen in state.offload.items() if chosen}},
        assignment.recompute - {path} | ({path} if state.recompute else set()),
    )


def _toggled(assignment: Assignment, call: int, item: int) -> Assignment:
    chosen = assignment.offload.get(call, frozenset()) ^ {item}
    offload = {c: items for c, items in assignment.offload.items() if c != call}
    return replace(assignment, offload={**offload, call: chosen} if chosen else offload)


class _Relaxation:
    """The program of one timeline, with copies as a fluid: bytes leave and return at the link's rate, in no particular pieces.

    Memory is in units of the highest level, time in units of the plain step. Regions that save the same bytes in the same time
    are *equal*. Of many regions the order of equal ones is fixed (the earliest are offloaded, then come those that are
    recomputed, the last are kept), or the program would try all permutations of one answer. Parts of their items may be
    offloaded then; `assignment` takes as many whole ones as the parts add up to.

    Args:
        margins: bytes of each event by which the budget is lowered.
        link: share of the link's rates to count on.
    """

    def __init__(self, timeline: Timeline, allowed: Allowed, budget: int, margins: Sequence[int], link: float):
        self._allowed, self._calls, self._events = allowed, timeline.calls, timeline.events
        self._plain = sum(event.seconds for event in self._events)
        self._step = self._plain or 1.0
        self._unit = float(max(budget, sum(sum(c.items) for c in self._calls), 1))
        self._rates = tuple(r * link * self._step / self._unit for r in (timeline.out_rate, timeline.back_rate))
        self._limits = [
            (budget - event.other - event.transient - margin) / self._unit
            for event, margin in zip(self._events, margins, strict=True)
        ]
        self._timeline = IndexedTimeline(timeline)
        self._many = len({c.key[0] for c in timeline.calls}) >= _MANY_REGIONS
        self.program = Program()
        self._recompute = self._recompute_choices()
        self._offload: dict[tuple[int, int], int] = {}  # (call, item) -> variable
        self._offload_choices()
        self._equal = self._equal_calls()
        if self._many:
            self._order_equal_calls()
        # In bytes that the link carries meanwhile: seconds would have factors of very different size.
        self._waits = [self.program.variable(cost=1.0 / min(self._rates)) for _ in self._events]
        self._memory_rows(self._freed(), self._on_host())

    def seconds(self, answer: Answer) -> float:
        """Seconds of the step."""
        waits = sum(answer.values[v] for v in self._waits) / min(self._rates)
        seconds = self._plain
        for event in self._events:
            choice = self._recomputed_in(event.kind, event.call)
            if choice is not None and answer.chosen(choice):
                seconds += self._calls[event.call].recompute_seconds
        return seconds + waits * self._step

    def assignment(self, answer: Answer) -> Assignment:
        offload: dict[int, set[int]] = {}
        for call, item in self._whole_items(answer) if self._many else self._offload:
            if self._many or answer.chosen(self._offload[call, item]):
                offload.setdefault(call, set()).add(item)
        return Assignment(
            {c: frozenset(items) for c, items in offload.items()},
            frozenset(path for path, choice in self._recompute.items() if answer.chosen(choice)),
        )

    def _whole_items(self, answer: Answer) -> Iterator[tuple[int, int]]:
        """Of equal calls the earliest, as many as the parts of an item add up to."""
        for equal in self._equal:
            for item in range(len(self._calls[equal[0]].items)):
                parts = [(c, self._offload[c, item]) for c in equal if (c, item) in self._offload]
                free = [c for c, _ in parts if (bar := self._bar(c, item)) is None or not answer.chosen(bar)]
                count = math.ceil(sum(answer.values[v] for _, v in parts) - _PART_TOLERANCE)
                yield from ((c, item) for c in free[:count])

    # --- variables ----------------------------------------------------------------------------------------------------

    def _recompute_choices(self) -> dict[str, int]:
        seconds: dict[str, float] = {}
        for number, call in enumerate(self._calls):
            path = call.key[0]
            if path in self._allowed.recompute and self._timeline.lives(number) and call.recompute_frees > 0:
                seconds[path] = seconds.get(path, 0.0) + call.recompute_seconds
        return {path: self.program.choice(cost / self._step) for path, cost in seconds.items()}

    def _offload_choices(self) -> None:
        p = self.program
        for number, call in enumerate(self._calls):
            if call.key[0] not in self._allowed.offload or not self._timeline.lives(number):
                continue
            for item, size in enumerate(call.items):
                if size:
                    cost = _LINK_COST * (size / self._unit * sum(1.0 / r for r in self._rates))
                    variable = p.variable(cost, 1.0) if self._many else p.choice(cost)
                    self._offload[number, item] = variable
                    bar = self._bar(number, item)
                    if bar is not None:
                        p.row([(variable, 1.0), (bar, 1.0)], high=1.0)

    def _bar(self, number: int, item: int) -> int | None:
        """The choice that excludes offloading an item: its region is recomputed, and the item with it."""
        call = self._calls[number]
        recomputed = not call.light_recompute or item == call.largest
        return self._recompute.get(call.key[0]) if recomputed else None

    def _recomputed_in(self, kind: str, call: int) -> int | None:
        """The choice by which an event recomputes its call."""
        return self._recompute.get(self._calls[call].key[0]) if kind == "B" else None

    # --- equal regions ------------------------------------------------------------------------------------------------

    def _equal_calls(self) -> list[list[int]]:
        """Calls by kind, in the order of forward."""
        kinds: dict[object, list[int]] = {}
        for number in sorted(self._timeline.forward, key=lambda c: self._timeline.forward[c]):
            if self._timeline.lives(number):
                kinds.setdefault(self._kind(self._calls[number]), []).append(number)
        return list(kinds.values())

    def _kind(self, call: CallFigures) -> object:
        seconds = float(f"{call.recompute_seconds:.0e}")  # measured times of equal layers differ by noise
        may = call.key[0] in self._recompute, call.key[0] in self._allowed.offload
        return call.key[1], call.items, call.light_recompute, call.input_bytes, seconds, may

    def _order_equal_calls(self) -> None:
        """Of equal regions the earlier one is offloaded if the later one is, and is not kept if the later one is not."""
        for equal in self._equal:
            for one, other in pairwise(equal):
                recompute = [self._recompute.get(self._calls[c].key[0]) for c in (one, other)]
                for item in range(len(self._calls[one].items)):
                    first, second = self._offload.get((one, item)), self._offload.get((other, item))
                    if first is None or second is None:
                        continue
                    self.program.row([(first, 1.0), (second, -1.0)], low=0.0)
                    if recompute[0] is not None and recompute[1] is not None:
                        terms = [(first, 1.0), (recompute[0], 1.0), (second, -1.0), (recompute[1], -1.0)]
                        self.program.row(terms, low=0.0)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _memory_rows(self, freed: list[int], on_host: list[int]) -> None:
        """At every event: saved - freed - on_host + what is recomputed there <= what the budget leaves."""
        resident = 0
        for index, event in enumerate(self._events):
            terms = [(freed[index], -1.0), (on_host[index], -1.0)]
            call = self._calls[event.call]
            choice = self._recomputed_in(event.kind, event.call)
            if choice is not None:
                terms.append((choice, call.recompute_rises / self._unit))
            self.program.row(terms, high=self._limits[index] - resident / self._unit)
            if self._timeline.lives(event.call):
                resident += sum(call.items) * (1 if event.kind == "F" else -1)

    def _freed(self) -> list[int]:
        """A variable for each event: resident bytes at its start that recomputing frees."""
        p = self.program
        found: list[int] = []
        for index in range(len(self._events)):
            now = p.variable()
            terms = [(now, 1.0)]
            if index:
                before = self._events[index - 1]
                terms.append((found[-1], -1.0))
                choice = self._recompute.get(self._calls[before.call].key[0])
                if choice is not None and self._timeline.lives(before.call):
                    sign = -1.0 if before.kind == "F" else 1.0
                    terms.append((choice, sign * self._calls[before.call].recompute_frees / self._unit))
            p.row(terms, 0.0, 0.0)
            found.append(now)
        return found

    def _on_host(self) -> list[int]:
        """A variable for each event: bytes on the host that do not return during it."""
        p, last, turn = self.program, len(self._events) - 1, self._timeline.turn
        on_host = [p.variable() for _ in self._events]
        p.row([(on_host[0], 1.0)], high=0.0)
        sent = p.variable(upper=0.0)  # saved and offloaded by the start of the event
        for index in range(1, min(turn, last) + 1):
            before = self._events[index - 1]
            ready, sent = sent, self._sum(sent, before.call) if before.kind == "F" else sent
            p.row([(on_host[index], 1.0), (sent, -1.0)], high=0.0)
            self._rows_out(on_host, index, ready)
        needed = p.variable(upper=0.0)  # needed after the start of the next event
        for index in range(last, turn - 1, -1):
            if index + 2 <= last and self._events[index + 2].kind == "B":
                needed = self._sum(needed, self._events[index + 2].call)
            if index > turn:
                p.row([(on_host[index], 1.0), (needed, -1.0)], high=0.0)
                p.row([(on_host[index], 1.0), (on_host[index - 1], -1.0)], high=0.0)
                self._rows_back(on_host, index)
        return on_host

    def _sum(self, sum_: int, call: int) -> int:
        """A variable for a sum plus the offloaded bytes of a call."""
        more = self.program.variable()
        terms = [(more, 1.0), (sum_, -1.0)]
        for item, size in enumerate(self._calls[call].items):
            if (call, item) in self._offload:
                terms.append((self._offload[call, item], -size / self._unit))
        self.program.row(terms, 0.0, 0.0)
        return more

    def _rows_out(self, on_host: list[int], index: int, ready: int) -> None:
        """The link carries out what it can before `index`, and of the last call's items what its forward leaves time for, unless
        the compute stream waits."""
        rate, before = self._rates[0], self._events[index - 1]
        if rate == math.inf:
            return
        after = max(before.seconds - self._calls[before.call].seconds, 0.0)
        terms = [(on_host[index], 1.0), (self._waits[index], -rate / min(self._rates))]
        self.program.row([*terms, (on_host[index - 1], -1.0)], high=before.seconds / self._step * rate)
        self.program.row([*terms, (ready, -1.0)], high=after / self._step * rate)

    def _rows_back(self, on_host: list[int], index: int) -> None:
        """The link carries back what it can during an event after the turn; recomputing makes the event longer."""
        rate, event = self._rates[1], self._events[index]
        if rate == math.inf:
            return
        terms = [(on_host[index - 1], 1.0), (on_host[index], -1.0), (self._waits[index], -rate / min(self._rates))]
        choice = self._recomputed_in(event.kind, event.call)
        if choice is not None:
            terms.append((choice, -rate * self._calls[event.call].recompute_seconds / self._step))
        self.program.row(terms, high=event.seconds / self._step * rate)
