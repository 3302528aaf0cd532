"""Chooses which saved storages are offloaded, by rules: for a forward and backward, and for a pipeline's step.

Input: a `Timeline` and a budget or a limit on waits. Output: a `Plan`, or a `BudgetError` that names the smallest budget that
can be reached. `fit_link`, `offload_all` and `under_budget` plan steps in which all forwards come before all backwards;
`plan_interleaved` plans steps in which they alternate. No function keeps state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from forebay.memory.solver import STALL_TOLERANCE, Allowed, Item, Solver, assign, by_wait, carried_items
from forebay.memory.timeline import (
    IndexedTimeline,
    InterleavedSchedule,
    PipelineTimeline,
    Plan,
    Timeline,
    simulate,
)
from forebay.policy import BudgetError, format_bytes

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


def fit_link(timeline: Timeline, paths: frozenset[str]) -> Plan:
    """Offload as much of the regions `paths` as the link carries without the compute stream waiting."""
    items = by_wait(timeline, paths)
    return simulate(timeline, assign(items[: carried_items(IndexedTimeline(timeline), items)]))


def offload_all(timeline: Timeline, paths: frozenset[str]) -> Plan:
    """Offload every item of the regions `paths`. Where the link is too slow, a quarter of the bytes may be on their way at once:
    fewer free memory sooner and wait longer."""
    assignment = assign(by_wait(timeline, paths))
    plan = simulate(timeline, assignment)
    if plan.stall_seconds <= STALL_TOLERANCE * sum(event.seconds for event in timeline.events):
        return plan
    return simulate(timeline, assignment, plan.planned_bytes // 4)


def under_budget(
    timeline: Timeline, paths: frozenset[str], budget: int, recomputable: frozenset[str], margin: float = 0.0
) -> Plan:
    """The fastest plan found whose peak is at most `budget` bytes over the step's base.

    Args:
        paths: regions that may be offloaded.
        recomputable: regions that may be recomputed.
        margin: share of the budget that is left free if some plan can do without it.

    Raises:
        BudgetError: no plan reaches the budget. The message names the smallest budget that can be reached.
    """
    solver = Solver(timeline, Allowed(paths, recomputable))
    found = solver.solve(int(budget * (1 - margin))) or solver.solve(budget)
    if found is None:
        lowest = solver.lowest().peak_bytes
        raise BudgetError(
            f"no placement brings the activations under {format_bytes(budget)} ({budget} bytes); the smallest budget that "
            f"can be reached with this model and batch is {format_bytes(lowest)} ({lowest} bytes)"
        )
    return found


# --- pipelines --------------------------------------------------------------------------------------------------------


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
