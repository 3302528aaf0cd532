"""Placements under a budget as a mixed-integer linear programme.

Input: a `Timeline`, a budget, and which regions may be offloaded or recomputed. Output: a `Solved`: a `Plan` whose
simulated peak is within the budget. `Programme` writes the programme row by row and solves it with HiGHS through
`scipy.optimize.milp`; scipy is imported when the first programme is solved. docs/solver.md has the mathematics.
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

from forebay.memory.timeline import Assignment, CallFigures, Plan, Timeline, simulate_levels

# A mixed-integer linear programme, written row by row and solved by HiGHS through `scipy.optimize.milp`.
#
# In: variables (cost, upper bound, whole numbers or not) and rows (a sum of variables between two limits). Out: an `Answer`: the
# values with the least cost that were found within the time limit, and by how much they may miss the least there is. scipy is
# imported when the first programme is solved: most of Forebay runs without it.

INFINITE = float("inf")


@dataclass(frozen=True)
class Answer:
    """Values by variable; `cost` is their sum of costs, and `gap` how far below it the least cost may be, as a share of it."""

    values: tuple[float, ...]
    cost: float
    gap: float

    def chosen(self, variable: int) -> bool:
        """Whether a variable of 0 or 1 is 1."""
        return self.values[variable] > 0.5


class Programme:
    """Minimise the sum of cost x variable. Every variable is at least 0."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._uppers: list[float] = []
        self._whole: list[int] = []
        self._limits: list[tuple[float, float]] = []
        self._entries: list[tuple[int, int, float]] = []  # row, variable, factor

    def variable(self, cost: float = 0.0, upper: float = INFINITE) -> int:
        """A number between 0 and `upper`."""
        self._costs.append(cost)
        self._uppers.append(upper)
        self._whole.append(0)
        return len(self._costs) - 1

    def choice(self, cost: float = 0.0) -> int:
        """0 or 1."""
        number = self.variable(cost, 1.0)
        self._whole[number] = 1
        return number

    def row(self, terms: Iterable[tuple[int, float]], low: float = -INFINITE, high: float = INFINITE) -> None:
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
        with _without_chatter():
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
def _without_chatter() -> Iterator[None]:
    """HiGHS (in scipy 1.17) now and then prints a line for its developers with C's printf, whatever it is told, and that would
    end up in the JSON of `forebay plan`. Standard output goes to a file meanwhile, and all other lines are printed afterwards."""
    try:
        flush = ctypes.CDLL(None).fflush
        before = os.dup(1)
    except (OSError, TypeError, AttributeError):  # no C library to ask (Windows), or no standard output
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


# Placements under a budget as a mixed-integer programme: what to recompute and send to the host, item by item.
#
# In: a `Timeline`, a budget, and which regions may be offloaded, recomputed. Out: a `Solved`: a `Plan` that the
# simulation has within the budget, and the time that the programme thought possible. docs/solver.md has the mathematics.
#
# The way of an answer:
#
#     propose   the programme, in which copies are a fluid: bytes leave and come back at the link's rate, in no particular
#               pieces
#     lay       `simulate` moves whole calls in order, with one lane each way: its peak and its time are what counts
#     tighten   moments that are over the budget then get a margin, or the link a lower rate, and the programme is asked again
#     polish    single regions, and pairs of them, are placed otherwise, as long as the simulated time falls
#
# Regions that save the same bytes in the same time are *equal*. Of many, the order is fixed (the earliest leave, then come
# those that are recomputed, the last are kept): else the programme would try all permutations of the same answer. And parts of
# their items may leave: as many whole ones as the parts make up are laid.

_ROUNDS = 4  # times that the programme is asked
_GAP = 2e-3  # of the programme's answer; what the simulation adds to it is larger
_SECONDS = 0.6  # for all rounds together
_MOVING = 1e-3  # cost of occupying the link, of that of waiting as long: of two plans as fast, that which moves less
_POLISH = 80_000  # moments simulated while polishing: 0.4 s of one core
_MANY = 12  # regions, from which on the order of equal ones is fixed, and parts of items may leave
_ROUNDING = 0.05  # of an item; less is the solver's tolerance
_SHARES = (
    None,
    2,
    4,
    8,
    16,
    0,
)  # of what leaves, this part may be on its way at once; None: see `simulate`, 0: nothing


@dataclass(frozen=True)
class Allowed:
    """Region paths by what may become of them; all may be kept."""

    offload: frozenset[str]
    recompute: frozenset[str]


@dataclass(frozen=True)
class Solved:
    """A plan within the budget.

    Attributes:
        aim: seconds of the step that the programme thought possible, copies being a fluid.
        gap: by how much the programme's answer may have missed its own best, as a share of the costs over the plain step.
    """

    plan: Plan
    aim: float
    gap: float


def solve(timeline: Timeline, allowed: Allowed, budget: int, known: Iterable[Assignment] = ()) -> Solved | None:
    """The fastest plan found whose peak is at most `budget` bytes; None if there is none.

    Args:
        known: assignments to begin polishing from as well, such as a heuristic's.
    """
    search = _Search(timeline, allowed, budget)
    for assignment in known:
        search.lay(assignment)
    for _ in range(_ROUNDS):
        if not search.ask():
            break
    search.polish()
    return search.solved()


def lowest(timeline: Timeline, allowed: Allowed, known: Iterable[Assignment] = ()) -> Plan:
    """The plan with the lowest peak that was found, however long it takes; it begins at keeping everything, and at `known`."""
    search = _Search(timeline, allowed, 0)
    for assignment in (Assignment(), *known):
        search.lay(assignment)
    search.polish()
    return search.lowest()


def with_one_changed(timeline: Timeline, allowed: Allowed, assignment: Assignment, budget: int) -> list[Plan]:
    """Plans within the budget in which one region, as a whole, is placed otherwise than in `assignment`; the fastest first.

    Of many regions as many as polishing may simulate, taken evenly.
    """
    regions, found = _regions(timeline, allowed), []
    changes = [(path, state) for path, states in regions.items() for state in states]
    each = max(len(changes) * len(_SHARES) * len(timeline.events) // _POLISH, 1)
    for path, state in changes[::each]:
        changed = _with(assignment, path, regions, state)
        if changed == assignment:
            continue
        search = _Search(timeline, allowed, budget)
        search.lay(changed)
        if (solved := search.solved()) is not None:
            found.append(solved.plan)
    return sorted(found, key=lambda plan: plan.step_seconds)


class _Search:
    """The best so far, and what was learned about the programme's optimism; lives as long as `solve`."""

    def __init__(self, timeline: Timeline, allowed: Allowed, budget: int):
        self._timeline, self._allowed, self._budget = timeline, allowed, budget
        self._margins = [0] * len(timeline.events)
        self._slower = 1.0
        self._best: tuple[tuple[int, float, int], Plan, Assignment] | None = None  # bytes over the budget count first
        self._aim, self._gap = 0.0, 0.0
        self._work = 0
        self._seconds = _SECONDS

    def solved(self) -> Solved | None:
        """The best, if it is within the budget."""
        return None if self._best is None or self._best[0][0] else Solved(self._best[1], self._aim, self._gap)

    def lowest(self) -> Plan:
        """The best, if the budget is out of reach: that with the lowest peak."""
        assert self._best is not None
        return self._best[1]

    def ask(self) -> bool:
        """Ask the programme once more; False if that is of no use any more."""
        relaxed = _Relaxed(self._timeline, self._allowed, self._budget, self._margins, self._slower)
        begun = time.monotonic()
        answer = relaxed.solve(self._seconds)
        self._seconds -= time.monotonic() - begun
        if answer is None:
            return False
        aim = relaxed.seconds(answer)
        if not any(self._margins) and self._slower == 1.0:
            self._aim, self._gap = aim, answer.gap
        excess, seconds = self.lay(relaxed.assignment(answer))
        if seconds <= aim * (1 + _GAP) or self._seconds < _SECONDS / 10:
            return False
        if any(excess):
            self._margins = [m + e for m, e in zip(self._margins, excess, strict=True)]
        else:
            self._slower *= 0.85
        return True

    def lay(self, assignment: Assignment) -> tuple[list[int], float]:
        """Simulate with every window. Gives by how much each moment is over the budget where that is least (nowhere, if a plan is
        within it), and the seconds of the fastest plan within it."""
        least: list[int] | None = None
        seconds = float("inf")
        leaving = sum(self._timeline.calls[c].items[i] for c, chosen in assignment.offload.items() for i in chosen)
        for share in _SHARES if leaving else (None,):
            window = None if share is None else leaving // share if share else 0
            plan, levels = simulate_levels(self._timeline, assignment, window)
            self._work += len(levels)
            excess = [max(level - self._budget, 0) for level in levels]
            if least is None or max(excess, default=0) < max(least, default=0):
                least = excess
            self._note(plan, assignment, max(excess, default=0))
            if not any(excess):
                seconds = min(seconds, plan.step_seconds)
            if share is None and not any(excess) and plan.stall_seconds == 0.0:
                break  # nobody waits: no window is faster
        return least or [], seconds

    def _note(self, plan: Plan, assignment: Assignment, excess: int) -> None:
        rank = excess, float(f"{plan.step_seconds:.5e}"), plan.planned_bytes
        if self._best is None or rank < self._best[0]:
            self._best = rank, plan, assignment

    def polish(self) -> None:
        """Move to a neighbour of the best as long as one is better."""
        self._work = 0
        better = self._best is not None
        while better and self._best is not None:
            before = self._best[0]
            for assignment in self._neighbours(self._best[2]):
                if self._work > _POLISH:
                    return
                self.lay(assignment)
                if self._best[0] < before:
                    break
            better = self._best[0] < before

    def _neighbours(self, assignment: Assignment) -> Iterator[Assignment]:
        """One region placed otherwise; one item; two regions placed otherwise."""
        regions = _regions(self._timeline, self._allowed)
        for path, states in regions.items():
            for state in states:
                yield _with(assignment, path, regions, state)
        for path, (_, calls) in ((p, (s, s[0].calls)) for p, s in regions.items()):
            if path in self._allowed.offload and path not in assignment.recompute:
                for call in calls:
                    for ordinal, size in enumerate(self._timeline.calls[call].items):
                        if size:
                            yield _toggled(assignment, call, ordinal)
        for one, other in combinations(regions, 2):
            for first in regions[one]:
                for second in regions[other]:
                    yield _with(_with(assignment, one, regions, first), other, regions, second)


@dataclass(frozen=True)
class _State:
    """A region as a whole: which items leave, by call, and what is done with it besides."""

    calls: tuple[int, ...]
    offload: Mapping[int, frozenset[int]]
    recompute: bool = False


def _regions(timeline: Timeline, allowed: Allowed) -> dict[str, list[_State]]:
    """The states of every region about which there is something to decide."""
    calls: dict[str, list[int]] = {}
    for index, call in enumerate(timeline.calls):
        calls.setdefault(call.key[0], []).append(index)
    found = {}
    for path, own in calls.items():
        mine = tuple(own)
        states = [_State(mine, {})]
        everything = {c: frozenset(i for i, n in enumerate(timeline.calls[c].items) if n) for c in mine}
        if path in allowed.offload:
            states.append(_State(mine, everything))
        if path in allowed.recompute:
            states.append(_State(mine, {}, recompute=True))
            if path in allowed.offload and all(timeline.calls[c].light_recompute for c in mine):
                rest = {c: chosen - {timeline.calls[c].largest} for c, chosen in everything.items()}
                states.append(_State(mine, rest, recompute=True))
        if len(states) > 1:
            found[path] = states
    return found


def _with(assignment: Assignment, path: str, regions: Mapping[str, Sequence[_State]], state: _State) -> Assignment:
    offload = {c: chosen for c, chosen in assignment.offload.items() if c not in state.calls}
    return Assignment(
        {**offload, **{c: chosen for c, chosen in state.offload.items() if chosen}},
        assignment.recompute - {path} | ({path} if state.recompute else set()),
    )


def _toggled(assignment: Assignment, call: int, ordinal: int) -> Assignment:
    chosen = assignment.offload.get(call, frozenset()) ^ {ordinal}
    offload = {c: items for c, items in assignment.offload.items() if c != call}
    return replace(assignment, offload={**offload, call: chosen} if chosen else offload)


def _is_many(timeline: Timeline) -> bool:
    return len({c.key[0] for c in timeline.calls}) >= _MANY


class _Relaxed:
    """The programme for one timeline. Memory is in units of the highest level, time in units of the plain step."""

    def __init__(self, timeline: Timeline, allowed: Allowed, budget: int, margins: Sequence[int], slower: float):
        self._timeline, self._allowed = timeline, allowed
        self._calls, self._events = timeline.calls, timeline.events
        self._step = sum(m.seconds for m in self._events) or 1.0
        self._unit = float(max(budget, sum(sum(c.items) for c in self._calls), 1))
        self._rates = tuple(r * slower * self._step / self._unit for r in (timeline.out_rate, timeline.back_rate))
        self._limits = [
            (budget - m.other - m.transient - margin) / self._unit
            for m, margin in zip(self._events, margins, strict=True)
        ]
        self._forward = {m.call: i for i, m in enumerate(self._events) if m.kind == "F"}
        self._backward = {m.call: i for i, m in enumerate(self._events) if m.kind == "B"}
        self._turn = min(self._backward.values(), default=len(self._events))
        self._many = _is_many(timeline)
        self._programme = Programme()
        self._again: dict[str, int] = {}
        self._leaves: dict[tuple[int, int], int] = {}
        self._choices()
        self._symmetry()
        # In bytes that the link carries meanwhile: seconds would have factors of very different size.
        self._waits = [self._programme.variable(cost=1.0 / min(self._rates)) for _ in self._events]
        self._memory(self._freed(), self._away())

    def solve(self, seconds: float) -> Answer | None:
        """Of the programme."""
        return self._programme.solve(seconds, _GAP)

    def seconds(self, answer: Answer) -> float:
        """Of the step."""
        extra = sum(answer.values[v] for v in self._waits) / min(self._rates)
        plain = sum(m.seconds for m in self._events)
        for event in self._events:
            call = self._calls[event.call]
            if event.kind == "B":
                again = self._again.get(call.key[0])
                plain += call.recompute_seconds if again is not None and answer.chosen(again) else 0.0
        return plain + extra * self._step

    def assignment(self, answer: Answer) -> Assignment:
        """What was chosen."""
        offload: dict[int, set[int]] = {}
        for call, ordinal in self._whole(answer) if self._many else self._leaves:
            if self._many or answer.chosen(self._leaves[call, ordinal]):
                offload.setdefault(call, set()).add(ordinal)
        return Assignment(
            {c: frozenset(o) for c, o in offload.items()},
            frozenset(p for p, v in self._again.items() if answer.chosen(v)),
        )

    def _whole(self, answer: Answer) -> Iterator[tuple[int, int]]:
        """Items that leave, where parts of items did: of equal regions as many as their parts make up, the earliest."""
        for equal in self._equal():
            for ordinal in range(len(self._calls[equal[0]].items)):
                parts = [(c, self._leaves[c, ordinal]) for c in equal if (c, ordinal) in self._leaves]
                free = [c for c, _ in parts if not any(answer.chosen(v) for v in self._bars(c, ordinal))]
                count = math.ceil(sum(answer.values[v] for _, v in parts) - _ROUNDING)
                yield from ((c, ordinal) for c in free[:count])

    def _lives(self, call: int) -> bool:
        return call in self._forward and call in self._backward and self._forward[call] < self._backward[call]

    def _choices(self) -> None:
        """A variable for every region that may be recomputed, and for every item that may leave."""
        p = self._programme
        again: dict[str, float] = {}
        for number, call in enumerate(self._calls):
            path = call.key[0]
            if path in self._allowed.recompute and self._lives(number) and call.recompute_frees > 0:
                again[path] = again.get(path, 0.0) + call.recompute_seconds
        self._again = {path: p.choice(seconds / self._step) for path, seconds in again.items()}
        for number, call in enumerate(self._calls):
            if call.key[0] in self._allowed.offload and self._lives(number):
                for ordinal, size in enumerate(call.items):
                    if size:
                        moving = size / self._unit * sum(1.0 / r for r in self._rates)
                        self._leaves[number, ordinal] = (
                            p.variable(_MOVING * moving, 1.0) if self._many else p.choice(_MOVING * moving)
                        )
                        self._exclude(number, ordinal)

    def _exclude(self, number: int, ordinal: int) -> None:
        """What is recomputed does not leave."""
        for other in self._bars(number, ordinal):
            self._programme.row([(self._leaves[number, ordinal], 1.0), (other, 1.0)], high=1.0)

    def _bars(self, number: int, ordinal: int) -> list[int]:
        """The choices by which an item does not leave."""
        call = self._calls[number]
        if call.key[0] in self._again and (not call.light_recompute or ordinal == call.largest):
            return [self._again[call.key[0]]]
        return []

    def _symmetry(self) -> None:
        """Of equal regions the earlier one leaves if the later one does, and is not kept if the later one is not."""
        for equal in self._equal() if self._many else ():
            for one, other in pairwise(equal):
                for ordinal in range(len(self._calls[one].items)):
                    self._in_order(one, other, ordinal)

    def _equal(self) -> list[list[int]]:
        """Calls by kind, in the order of forward."""
        kinds: dict[object, list[int]] = {}
        for number in sorted(self._forward, key=lambda c: self._forward[c]):
            call = self._calls[number]
            if self._lives(number):
                kinds.setdefault(self._kind(call), []).append(number)
        return list(kinds.values())

    def _kind(self, call: CallFigures) -> object:
        times = float(f"{call.recompute_seconds:.0e}")  # of equal layers, measured ones differ by noise
        path = call.key[0]
        may = path in self._again, path in self._allowed.offload
        return call.key[1], call.items, call.light_recompute, call.input_bytes, times, may

    def _in_order(self, one: int, other: int, ordinal: int) -> None:
        first, second = self._leaves.get((one, ordinal)), self._leaves.get((other, ordinal))
        if first is None or second is None:
            return
        self._programme.row([(first, 1.0), (second, -1.0)], low=0.0)
        again = [self._again.get(self._calls[c].key[0]) for c in (one, other)]
        if again[0] is not None and again[1] is not None:
            self._programme.row([(first, 1.0), (again[0], 1.0), (second, -1.0), (again[1], -1.0)], low=0.0)

    def _freed(self) -> list[int]:
        """By moment, a variable: bytes that recomputing frees of what is held at its start."""
        p = self._programme
        found, last = [], None
        for index in range(len(self._events)):
            now = p.variable()
            terms = [(now, 1.0)] + ([(last, -1.0)] if last is not None else [])
            before = self._events[index - 1] if index else None
            if before is not None and self._lives(before.call):
                sign = -1.0 if before.kind == "F" else 1.0
                terms += [(v, sign * size / self._unit) for v, size in self._frees(before.call)]
            p.row(terms, 0.0, 0.0)
            found.append(now)
            last = now
        return found

    def _frees(self, number: int) -> Iterator[tuple[int, int]]:
        call = self._calls[number]
        if (again := self._again.get(call.key[0])) is not None:
            yield again, call.recompute_frees

    def _away(self) -> list[int]:
        """By moment, a variable: bytes on the host that do not come back during it."""
        p, last = self._programme, len(self._events) - 1
        away = [p.variable() for _ in self._events]
        p.row([(away[0], 1.0)], high=0.0)
        sent = p.variable(upper=0.0)  # what was saved by this moment's start, and leaves
        for index in range(1, min(self._turn, last) + 1):
            before = self._events[index - 1]
            ready, sent = sent, self._sum(sent, before.call) if before.kind == "F" else sent
            p.row([(away[index], 1.0), (sent, -1.0)], high=0.0)
            self._carry_out(away, index, ready)
        needed = p.variable(upper=0.0)  # what is needed behind the next moment's start
        for index in range(last, self._turn - 1, -1):
            if index + 2 <= last and self._events[index + 2].kind == "B":
                needed = self._sum(needed, self._events[index + 2].call)
            if index > self._turn:
                p.row([(away[index], 1.0), (needed, -1.0)], high=0.0)
                p.row([(away[index], 1.0), (away[index - 1], -1.0)], high=0.0)
                self._carry_back(away, index)
        return away

    def _sum(self, sum_: int, call: int) -> int:
        """A variable for a sum and what leaves of a call."""
        more = self._programme.variable()
        self._programme.row([(more, 1.0), (sum_, -1.0), *((v, -f) for v, f in self._items(call))], 0.0, 0.0)
        return more

    def _carry_out(self, away: list[int], index: int, ready: int) -> None:
        """Of what the last moment saves only what its forward leaves time for has gone by now, unless one waits."""
        p, rate, before = self._programme, self._rates[0], self._events[index - 1]
        if rate == float("inf"):
            return
        behind = max(before.seconds - self._calls[before.call].seconds, 0.0)
        carried = [(away[index], 1.0), (self._waits[index], -rate / min(self._rates))]
        p.row([*carried, (away[index - 1], -1.0)], high=before.seconds / self._step * rate)
        p.row([*carried, (ready, -1.0)], high=behind / self._step * rate)

    def _carry_back(self, away: list[int], index: int) -> None:
        """What comes back during a moment behind the turn; recomputing makes the moment longer."""
        rate, event = self._rates[1], self._events[index]
        if rate == float("inf"):
            return
        terms = [(away[index - 1], 1.0), (away[index], -1.0), (self._waits[index], -rate / min(self._rates))]
        call = self._calls[event.call]
        if event.kind == "B" and (again := self._again.get(call.key[0])) is not None:
            terms.append((again, -rate * call.recompute_seconds / self._step))
        self._programme.row(terms, high=event.seconds / self._step * rate)

    def _items(self, number: int) -> Iterator[tuple[int, float]]:
        for ordinal, size in enumerate(self._calls[number].items):
            if (number, ordinal) in self._leaves:
                yield self._leaves[number, ordinal], size / self._unit

    def _memory(self, freed: list[int], away: list[int]) -> None:
        """At every moment: saved - freed - away + what is made again <= what the budget leaves."""
        held = 0
        for index, event in enumerate(self._events):
            terms = [(freed[index], -1.0), (away[index], -1.0)]
            call = self._calls[event.call]
            if event.kind == "B" and (again := self._again.get(call.key[0])) is not None:
                terms.append((again, call.recompute_rises / self._unit))
            self._programme.row(terms, high=self._limits[index] - held / self._unit)
            if self._lives(event.call):
                held += sum(call.items) * (1 if event.kind == "F" else -1)
