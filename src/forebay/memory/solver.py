"""Chooses placements: the fastest within a budget, or by rules what the link carries, for a microbatch or a pipeline's step.

Input: a `Timeline`, which regions may be offloaded or recomputed, and a budget in bytes or a limit on waits. Output: a `Plan`,
or a `BudgetError` that names the smallest budget that can be reached. `Solver` makes candidates that do not depend on the budget;
docs/solver.md says which, and why a larger budget never makes a step longer. All its limits are numbers of simulated events, so
a plan is the same on any machine. `under_budget`, `fit_link` and `offload_all` plan steps in which all forwards come before all
backwards, `plan_interleaved` steps in which they alternate. No function keeps state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, islice, product
from math import inf, prod
from typing import NamedTuple, TypeVar

from forebay.memory.timeline import (
    Assignment,
    IndexedTimeline,
    InterleavedSchedule,
    PipelineTimeline,
    Plan,
    Timeline,
    TurnSchedule,
    simulate,
)
from forebay.policy import BudgetError, format_bytes

T = TypeVar("T")
Item = tuple[int, int]  # (index of a call, index of one of its items)

_FEW = 1000  # placements of whole regions up to which all of them are simulated
_RECOMPUTE_STEPS = 24  # parts of the regions that may be recomputed, the cheapest first
_OFFLOAD_STEPS = 4  # parts of what the link carries without waits, and of the rest
_FIT_STEPS = 16  # parts of what the link carries that `fit_link` simulates
# Events simulated to improve the candidates, and to look between two of them: 0.15 s of one core each.
_MAX_FRONT_EVENTS = 80_000
_MAX_NEAR_EVENTS = 80_000
_MANY_REGIONS = 12  # regions from which on equal ones are not all tried
# Windows that are simulated, as the divisor of what is offloaded. None: copies that fit the link; 0: an empty window.
_WINDOWS = (None, 2, 4, 8, 16, 0)
STALL_TOLERANCE = 1e-3  # share of the step; below it the measured figures cannot tell


def first_that_fits(ordered: Sequence[T], fits: Callable[[T], bool]) -> T | None:
    """Bisect for the first that fits, as if all after it fit too; None if none is found.

    If they do not, the result may not be the first. But where more fits, as under a larger budget, the result is never later.
    """
    found = bisect_left(range(len(ordered)), True, key=lambda index: fits(ordered[index]))
    return ordered[found] if found < len(ordered) else None


def front(candidates: Iterable[T], cost: Callable[[T], tuple[object, ...]], size: Callable[[T], int]) -> list[T]:
    """The candidates that are smaller than every cheaper one, the cheapest first."""
    found: list[T] = []
    for candidate in sorted(set(candidates), key=cost):  # type: ignore[arg-type]
        if not found or size(candidate) < size(found[-1]):
            found.append(candidate)
    return found


class Proposal(NamedTuple):
    """Regions that are recomputed, items that are offloaded, and the window as the divisor of these items' bytes."""

    recompute: frozenset[str]
    offload: frozenset[Item]
    window: int | None = None


class _Figures(NamedTuple):
    """What candidates are compared by."""

    step_seconds: float
    planned_bytes: int
    peak_bytes: int


class _Placement(NamedTuple):
    """A placement of a whole region."""

    offload: frozenset[Item]
    recompute: bool


class Solver:
    """The plans of one timeline under any budget. All regions may be kept; `offload` and `recompute` are those that may be placed
    otherwise."""

    def __init__(self, timeline: Timeline, offload: frozenset[str], recompute: frozenset[str]):
        self._timeline, self._offload, self._recompute = timeline, offload, recompute
        self._step = IndexedTimeline(timeline)
        self._figures = cache(self._simulated)
        self._calls: dict[str, list[int]] = {}
        for index, call in enumerate(timeline.calls):
            if self._step.lives(index):
                self._calls.setdefault(call.key[0], []).append(index)
        self._placements = {path: found for path in self._calls if len(found := self._placements_of(path)) > 1}
        self._kinds = {path: self._kind(path) for path in self._placements}
        self._front = self._improved(self._pareto(chain(self._whole(), self._prefixes())))

    def solve(self, budget: int) -> Plan | None:
        """The fastest plan found whose peak is at most `budget` bytes over the step's base, or None."""
        best = first_that_fits(self._front, lambda c: self._peak(c) <= budget)
        if best is None:
            return None
        slower = self._front.index(best)
        if slower:  # nothing as fast as the next faster one: where that fits, so would have been found more
            near = self._between(self._front[slower - 1], best)
            best = min((c for c in near if self._peak(c) <= budget), key=self._cost, default=best)
        return self._plan(best)

    def lowest(self) -> Plan:
        """The plan with the lowest peak found, however long it takes. `solve` finds one for any budget from this peak on."""
        return self._plan(self._front[-1])

    def with_one_changed(self, plan: Plan, budget: int) -> list[Plan]:
        """Plans within the budget in which one region as a whole is placed differently; the fastest first. If there are
        many such changes, an even selection of as many as between two candidates is simulated."""
        numbers = {call.key: number for number, call in enumerate(self._timeline.calls)}
        offload = frozenset((numbers[key], item) for key, items in plan.offload.items() for item in items)
        start = Proposal(plan.recompute, offload)
        changes = [c for path in self._placements for c in self._changed(start, path)]
        each = max(len(changes) // max(self._few(_MAX_NEAR_EVENTS), 1), 1)
        found = []
        for change in changes[::each]:
            fitting = [c for c in self._windows(change) if self._peak(c) <= budget]
            if fitting:
                found.append(self._plan(min(fitting, key=self._cost)))
        return sorted(found, key=lambda plan: plan.step_seconds)

    # --- figures ------------------------------------------------------------------------------------------------------

    def _schedule(self, candidate: Proposal) -> TurnSchedule:
        size = sum(self._timeline.calls[call].items[item] for call, item in candidate.offload)
        window = candidate.window and size // candidate.window
        return TurnSchedule(self._step, Assignment.of(candidate.offload, candidate.recompute), window)

    def _plan(self, candidate: Proposal) -> Plan:
        return self._schedule(candidate).plan()

    def _simulated(self, candidate: Proposal) -> _Figures:
        schedule = self._schedule(candidate)
        return _Figures(schedule.step_seconds, schedule.planned_bytes, schedule.peak)

    def _cost(self, candidate: Proposal) -> tuple[object, ...]:
        """Sort key of candidates. Where nothing takes time, as on a CPU, it prefers little recomputation, then few copies."""
        figures = self._figures(candidate)
        return (
            float(f"{figures.step_seconds:.5e}"),
            len(candidate.recompute),
            figures.planned_bytes,
            figures.peak_bytes,
            sorted(candidate.offload),
            str(candidate.window),
        )

    def _peak(self, candidate: Proposal) -> int:
        return self._figures(candidate).peak_bytes

    def _pareto(self, candidates: Iterable[Proposal]) -> list[Proposal]:
        return front(candidates, self._cost, self._peak)

    # --- candidates ---------------------------------------------------------------------------------------------------

    def _whole(self) -> Iterator[Proposal]:
        """All placements of whole regions if they are few, or recomputing all experts."""
        several = [[one for one in found if not (one.recompute and one.offload)] for found in self._placements.values()]
        if prod(map(len, several)) <= _FEW:
            for chosen in product(*several):
                recompute = frozenset(p for p, one in zip(self._placements, chosen, strict=True) if one.recompute)
                yield from self._windows(Proposal(recompute, frozenset().union(*(one.offload for one in chosen))))
        calls = self._timeline.calls
        experts = {p for p in self._placements if all(calls[c].light_recompute for c in self._calls[p])}
        yield Proposal(frozenset(experts) & self._recompute, frozenset())

    def _prefixes(self) -> Iterator[Proposal]:
        """Recompute the cheapest regions per byte, and of the rest offload what waits longest: parts of both."""
        ranked = by_cost(self._timeline, self._recompute)
        for count in _parts(len(ranked), _RECOMPUTE_STEPS):
            recompute = frozenset(ranked[:count])
            items = by_wait(self._timeline, self._offload, recompute)
            carried = carried_items(self._step, items, recompute)
            parts = [
                *_parts(carried, _OFFLOAD_STEPS),
                *(carried + n for n in _parts(len(items) - carried, _OFFLOAD_STEPS)),
            ]
            for part in parts:
                candidate = Proposal(recompute, frozenset(items[:part]))
                yield from self._windows(candidate) if part > carried else (candidate,)

    def _improved(self, found: list[Proposal]) -> list[Proposal]:
        """Replace candidates by neighbors that are faster and no larger, or smaller and no slower."""
        done: set[Proposal] = set()
        left = self._few(_MAX_FRONT_EVENTS)
        while left > 0 and (todo := [c for c in found if c not in done]):
            tried = set(found)
            for candidate in todo:
                neighbors = list(islice(self._neighbors(candidate), left))
                left -= len(neighbors)
                tried.update(neighbors, (n._replace(window=None) for n in neighbors))
            done.update(todo)
            found = self._pareto(tried)
        return found

    def _between(self, faster: Proposal, slower: Proposal) -> list[Proposal]:
        """Candidates that take longer than `faster` and less than `slower`: on the way from one to the other, and around them."""
        around = chain.from_iterable(self._neighbors(one) for one in (faster, slower))
        twice = (n for one in (faster, slower) for near in self._neighbors(one) for n in self._neighbors(near))
        tried = islice(chain(self._path(faster, slower), around, twice), self._few(_MAX_NEAR_EVENTS))
        windows = None, faster.window, slower.window
        found = {candidate._replace(window=window) for candidate in tried for window in windows}
        return [c for c in found if self._cost(faster) < self._cost(c) < self._cost(slower)]

    def _few(self, events: int) -> int:
        """How many candidates take so many simulated events, with two windows each."""
        return events // (2 * max(len(self._step.events), 1))

    def _path(self, one: Proposal, other: Proposal) -> Iterator[Proposal]:
        """From `one` to `other`, one region after another."""
        for path, calls in self._calls.items():
            items = {item for item in other.offload if item[0] in calls}
            recompute = one.recompute - {path} | (other.recompute & {path})
            changed = Proposal(recompute, frozenset(i for i in one.offload if i[0] not in calls) | items)
            if changed[:2] != one[:2]:
                yield (one := changed)

    def _windows(self, candidate: Proposal) -> Iterator[Proposal]:
        for window in _WINDOWS if candidate.offload else (None,):
            yield candidate._replace(window=window)

    def _neighbors(self, candidate: Proposal) -> Iterator[Proposal]:
        """One region as a whole or one item placed differently; of many equal ones the first and the last."""
        groups: dict[object, list[str]] = {}
        for path, kind in self._kinds.items():
            now = frozenset((self._calls[path].index(c), i) for c, i in candidate.offload if c in self._calls[path])
            groups.setdefault((kind, path in candidate.recompute, now), []).append(path)
        for paths in groups.values():
            for path in dict.fromkeys((paths[0], paths[-1])):
                yield from self._changed(candidate, path)
                yield from self._toggled(candidate, path)

    def _changed(self, candidate: Proposal, path: str) -> Iterator[Proposal]:
        rest = frozenset(item for item in candidate.offload if item[0] not in self._calls[path])
        for placement in self._placements[path]:
            recompute = candidate.recompute - {path} | ({path} if placement.recompute else set())
            changed = Proposal(recompute, rest | placement.offload, candidate.window)
            if changed[:2] != candidate[:2]:
                yield changed

    def _toggled(self, candidate: Proposal, path: str) -> Iterator[Proposal]:
        here = path in candidate.recompute
        movable = frozenset().union(*(p.offload for p in self._placements[path] if p.recompute == here))
        for item in sorted(movable):
            yield candidate._replace(offload=candidate.offload ^ {item})

    def _placements_of(self, path: str) -> list[_Placement]:
        calls = self._timeline.calls
        found = [_Placement(frozenset(), False)]
        every = frozenset((c, i) for c in self._calls[path] for i, size in enumerate(calls[c].items) if size)
        if path in self._offload and every:
            found.append(_Placement(every, False))
        if path in self._recompute and any(calls[c].recompute_frees for c in self._calls[path]):
            found.append(_Placement(frozenset(), True))
            if path in self._offload and all(calls[c].light_recompute for c in self._calls[path]):
                rest = frozenset((c, i) for c, i in every if i != calls[c].made_again)
                found += [_Placement(rest, True)] if rest else []
        return found

    def _kind(self, path: str) -> object:
        """Equal for regions that are interchangeable; if there are few regions, different for each."""
        if len(self._placements) < _MANY_REGIONS:
            return path
        calls = [self._timeline.calls[c] for c in self._calls[path]]
        # Measured times of equal layers differ by noise.
        figures = tuple((c.items, c.light_recompute, c.input_bytes, f"{c.recompute_seconds:.0e}") for c in calls)
        return figures, len(self._placements[path]), path in self._offload


def _parts(count: int, steps: int) -> list[int]:
    return sorted({count * step // steps for step in range(steps + 1)})


def by_wait(timeline: Timeline, paths: frozenset[str], recompute: frozenset[str] = frozenset()) -> list[Item]:
    """The items that may be offloaded, longest wait first."""
    step, found = IndexedTimeline(timeline), []
    for index, call in enumerate(timeline.calls):
        recomputed = call.key[0] in recompute
        if call.key[0] in paths and step.lives(index) and (call.light_recompute or not recomputed):
            gone = call.made_again if recomputed else -1
            found += [(index, item) for item, size in enumerate(call.items) if size and item != gone]
    return sorted(found, key=lambda item: (step.forward[item[0]] - step.backward[item[0]], item))


def by_cost(timeline: Timeline, recomputable: frozenset[str]) -> list[str]:
    """Regions, the cheapest per freed byte first; among equals the latest in forward, which waits least."""
    seconds: dict[str, float] = {}
    frees: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, call in enumerate(timeline.calls):
        path = call.key[0]
        if path in recomputable:
            seconds[path] = seconds.get(path, 0.0) + call.recompute_seconds
            frees[path] = frees.get(path, 0) + call.recompute_frees
            last[path] = index
    worth = [p for p in seconds if frees[p] > 0]
    # Measured times of equal layers differ by noise; two digits make them equal again.
    return sorted(worth, key=lambda p: (float(f"{seconds[p] / frees[p]:.1e}"), -last[p]))


def carried_items(step: IndexedTimeline, items: Sequence[Item], recompute: frozenset[str] = frozenset()) -> int:
    """How many of `items`, in their order, the link carries: nothing waits, and all have left before the turn."""
    tolerance = STALL_TOLERANCE * sum(event.seconds for event in step.events)

    def waits(count: int) -> bool:
        schedule = TurnSchedule(step, Assignment.of(items[:count], recompute), None)
        return schedule.stall() > tolerance or len(schedule.released) < len(schedule.offload)

    return bisect_left(range(1, len(items) + 1), True, key=waits)


def plan_offload(timeline: Timeline, paths: frozenset[str], everything: bool) -> Plan:
    """Offload the regions `paths` where there is no budget: what the link carries, or `everything`, for which it may wait."""
    if is_interleaved(timeline):
        return plan_interleaved(timeline, paths, everything)
    return offload_all(timeline, paths) if everything else fit_link(timeline, paths)


# --- plans of a forward and backward ----------------------------------------------------------------------------------


def fit_link(timeline: Timeline, paths: frozenset[str]) -> Plan:
    """Offload of the regions `paths` what the link carries without the compute stream waiting, as far as that lowers the peak.

    Copies that end after the peak, in the head, lower nothing. A call's memory is released when the last of its items has left.
    """
    items, step = by_wait(timeline, paths), IndexedTimeline(timeline)
    counts = _parts(carried_items(step, items), _FIT_STEPS)
    plans = (TurnSchedule(step, Assignment.of(items[:count]), None).plan() for count in reversed(counts))
    return min(plans, key=lambda plan: plan.peak_bytes)


def offload_all(timeline: Timeline, paths: frozenset[str]) -> Plan:
    """Offload every item of the regions `paths`, but on a GPU those of the last call, which its backward reads at once. Where the
    link is too slow, a quarter of the bytes may be on their way at once: fewer free memory sooner and wait longer."""
    assignment = Assignment.of(by_wait(timeline, paths))
    plan = simulate(timeline, assignment)
    if plan.stall_seconds <= STALL_TOLERANCE * sum(event.seconds for event in timeline.events):
        return plan
    return simulate(timeline, assignment, plan.planned_bytes // 4)


def under_budget(
    timeline: Timeline, paths: frozenset[str], budget: int, recomputable: frozenset[str], margin: float = 0.0
) -> Plan:
    """The fastest plan found whose peak is at most `budget` bytes over the step's base. Regions `paths` may be offloaded.

    Args:
        margin: share of the budget that is left free if some plan can do without it.

    Raises:
        BudgetError: no plan reaches the budget. The message names the smallest budget that can be reached.
    """
    solver = Solver(timeline, paths, recomputable)
    found = solver.solve(int(budget * (1 - margin))) or solver.solve(budget)
    if found is None:
        lowest = solver.lowest().peak_bytes
        raise BudgetError(
            f"no placement brings the activations under {format_bytes(budget)} ({budget} bytes); the smallest budget that "
            f"can be reached with this model and batch is {format_bytes(lowest)} ({lowest} bytes)"
        )
    return found


# --- plans of a pipeline's step ---------------------------------------------------------------------------------------

_HEIGHT_POWER = 16  # `_height` is a mean of powers of memory: high memory counts
PIPELINE_WAIT_SHARE = 0.02
"""Share of a pipeline's step for which `plan_interleaved(everything=True)` may wait. Other ranks may wait at the same time, or
for this one."""
_WAIT_SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 0.0)  # of `PIPELINE_WAIT_SHARE`: the limits that are tried
# Share of a rank's compute time that copies may take from its device's memory bandwidth if nothing may wait. It is lost even on
# ranks that wait for others: on two H200s 9.9, 12.9, 20.5 and 27.0 GiB a step each way, both together, cost 0.25, 0.41, 0.52 and
# 0.84 %. The last of these bytes gain least: with 0.0025 peaks fell by 16 to 34 % more, for 43 % more bytes.
_MAX_BANDWIDTH_SHARE = 0.0018
# Share of the peak by which waiting for a share of the step's time has to lower it, as a factor. With PP 4 on H200s one rank's
# last 1.5 % of time lowered its peak by 1.4 %, another's first 0.7 % by 11 %.
_PEAK_PER_TIME = 2
_IDLE_SHARE = 0.8  # share of the time in which a process waits for another one that copies count on, with `everything`
# Prefixes that are tried of the list of kinds, those that wait longest first. With 4 peaks were up to 10 % higher (PP 2 and 4 of
# DeepSeek-V2-Lite's shapes); with 64 they are no lower.
_PREFIXES = 16
_PREFIX_STRIDE = 4  # one in so many prefixes is tried with the smaller shares
_LEVEL_PRECISION = 1 / 128  # share of a peak to which the lowest level is found


def is_interleaved(timeline: Timeline) -> bool:
    """Whether some forward follows a backward."""
    return timeline.opening < timeline.closing


def plan_interleaved(timeline: Timeline, paths: frozenset[str], everything: bool = False) -> Plan:
    """Offload the items of the regions `paths` that lower the peak, as far as the link carries them without waits.

    The link carries both ways all the time and memory is level for most of a step, so *kinds* of items are chosen: the same
    storage of the same region in all microbatches. The kinds that wait longest come first. A kind is accepted if memory falls
    where it is high, and if the copies leave the device's memory bandwidth to its kernels. At last items whose absence lowers
    no peak are kept.

    Args:
        paths: may be empty: then `peak_bytes` is that of keeping everything.
        everything: the compute stream may wait for `PIPELINE_WAIT_SHARE` of the step at most, if that lowers the peak further,
            and copies count on idle time. Without waits memory is highest in a pipeline's first forwards or last backwards.
    """
    step = PipelineTimeline(timeline, _IDLE_SHARE if everything else 0.0)
    most = inf if everything else _MAX_BANDWIDTH_SHARE * step.total * timeline.memory_rate / 2  # bytes each way
    chosen: list[Item] = []
    best = InterleavedSchedule(step, [])
    height = _height(best)
    kinds = _kinds(step, paths)
    for kind in kinds:
        schedule = InterleavedSchedule(step, [*chosen, *kind])
        high = _height(schedule)
        if high < height * (1 - 1e-9):
            schedule.keep_needless()
            if sum(schedule.bytes.values()) <= most:
                chosen.extend(kind)
                best, height = schedule, high
    found = [best, *_waiting(step, kinds, best)] if everything else [best]
    return min(found, key=_cost).plan()


def _waiting(
    step: PipelineTimeline, kinds: Sequence[list[Item]], best: InterleavedSchedule
) -> Iterator[InterleavedSchedule]:
    """For each limit on waits the schedule with the lowest peak, if it is lower than that of `best`."""
    # Few kinds have fewer prefixes.
    ends = sorted({-(-len(kinds) * part // _PREFIXES) for part in range(1, _PREFIXES + 1)})
    for share in _WAIT_SHARES:
        lowest = best
        for end in ends if share == 1 or len(ends) < _PREFIXES else ends[_PREFIX_STRIDE - 1 :: _PREFIX_STRIDE]:
            items = [item for kind in kinds[:end] for item in kind]
            lower = _lower(step, items, lowest.peak, share * PIPELINE_WAIT_SHARE * step.total)
            lowest = min([lowest, *lower], key=lambda schedule: schedule.peak)
        if lowest is not best:
            lowest.keep_needless()
            yield lowest


def _lower(step: PipelineTimeline, items: list[Item], peak: float, limit: float) -> Iterator[InterleavedSchedule]:
    """Schedules of `items` with lower and lower peaks, from `peak` on, whose waits take at most `limit` seconds."""
    low, high = 0.0, peak * (1 - _LEVEL_PRECISION)
    level = high  # first: these items may not lower the peak at all
    while high - low > _LEVEL_PRECISION * peak:
        schedule = InterleavedSchedule(step, items, level)
        if schedule.stall() > limit:
            low = level
        else:
            high = level
            yield schedule
        level = (low + high) / 2


def _cost(schedule: InterleavedSchedule) -> float:
    """Peak bytes, and what the waits are worth in bytes."""
    return schedule.peak * (1 + _PEAK_PER_TIME * schedule.stall() / schedule.pipeline.total)


def _height(schedule: InterleavedSchedule) -> float:
    step = schedule.pipeline
    top = step.saved or 1
    return sum(seconds * (m / top) ** _HEIGHT_POWER for seconds, m in zip(step.each, schedule.memory, strict=True))


def _kinds(step: PipelineTimeline, paths: frozenset[str]) -> list[list[Item]]:
    """Items by region, call within a microbatch and index; those that wait longest first."""
    counts: dict[str, int] = {}
    for call in step.calls:
        counts[call.key[0]] = counts.get(call.key[0], 0) + 1
    fewest = min(counts.values(), default=1)
    found: dict[tuple[str, int, int], list[Item]] = {}
    for index, call in enumerate(step.calls):
        path, count = call.key
        if path not in paths or not step.lives(index):
            continue
        times = max(counts[path] // fewest, 1)  # a sublayer in stages is called twice for a microbatch
        for item, size in enumerate(call.items):
            if size:
                found.setdefault((path, count % times, item), []).append((index, item))

    def wait(items: list[Item]) -> float:
        waits = [step.starts[step.backward[c]] - step.starts[step.forward[c]] for c, _ in items]
        return sum(waits) / len(waits)

    return sorted(found.values(), key=wait, reverse=True)
