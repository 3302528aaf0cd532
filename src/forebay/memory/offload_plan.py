"""Chooses which saved storages are offloaded, by rules: for a forward and backward, and for a pipeline's step.

Input: a `Timeline` and a budget or a limit on waits. Output: a `Plan`, or a `BudgetError` that names the smallest budget that
can be reached. `fit_link`, `offload_all` and `under_budget` plan steps in which all forwards come before all backwards;
`plan_interleaved` plans steps in which they alternate. No function keeps state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf

from forebay.memory.solver import Allowed, lowest, solve
from forebay.memory.timeline import (
    Assignment,
    IndexedTimeline,
    InterleavedSchedule,
    PipelineTimeline,
    Plan,
    Timeline,
    simulate,
)
from forebay.policy import BudgetError, format_bytes

Item = tuple[int, int]  # (index of a call, index of one of its items)

_STALL_TOLERANCE = 1e-3  # share of the step; below it the measured figures cannot tell

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
    return _longest_prefix(timeline, _by_wait(timeline, paths), frozenset())


def offload_all(timeline: Timeline, paths: frozenset[str]) -> Plan:
    """Offload every item of the regions `paths`. Where the link is too slow, a quarter of the bytes may be on their way at once:
    fewer free memory sooner and wait longer."""
    items = _by_wait(timeline, paths)
    assignment = _assign(items, len(items), frozenset())
    plan = simulate(timeline, assignment)
    if plan.stall_seconds <= _tolerance(timeline):
        return plan
    return simulate(timeline, assignment, plan.planned_bytes // 4)


def under_budget(
    timeline: Timeline, paths: frozenset[str], budget: int, recomputable: frozenset[str], margin: float = 0.0
) -> Plan:
    """The fastest plan found whose peak is at most `budget` bytes over the step's base.

    Rules come first: offload what waits longest as far as the link carries it, then recompute what is cheapest per byte, then
    wait for the link. If their plan costs time, `forebay.memory.solver` looks for a faster one.

    Args:
        paths: regions that may be offloaded.
        recomputable: regions that may be recomputed.
        margin: share of the budget that is left free if some plan can do without it.

    Raises:
        BudgetError: no plan reaches the budget. The message names the smallest budget that can be reached.
    """
    if margin:
        with suppress(BudgetError):
            return under_budget(timeline, paths, int(budget * (1 - margin)), recomputable)
    kept = simulate(timeline, Assignment())
    if kept.peak_bytes <= budget:
        return kept
    allowed = Allowed(paths, recomputable)
    found = _by_rules(timeline, paths, budget, recomputable)
    plain = sum(event.seconds for event in timeline.events)  # 0 on a CPU: there is nothing to minimize
    if found is None or found.step_seconds > plain:
        solved = solve(timeline, allowed, budget, [assignment_of(timeline, found)] if found else [])
        if solved is not None and (found is None or solved.step_seconds < found.step_seconds):
            found = solved
    if found is None:
        tightest = _tightest(timeline, paths, frozenset(_by_cost(timeline, recomputable)))
        found = lowest(timeline, allowed, [assignment_of(timeline, p) for p in tightest])
    if found.peak_bytes > budget:
        raise BudgetError(
            f"no placement brings the activations under {format_bytes(budget)} ({budget} bytes); the smallest budget that "
            f"can be reached with this model and batch is {format_bytes(found.peak_bytes)} ({found.peak_bytes} bytes)"
        )
    return found


def assignment_of(timeline: Timeline, plan: Plan) -> Assignment:
    """The assignment that a plan carries out."""
    numbers = {call.key: number for number, call in enumerate(timeline.calls)}
    return Assignment({numbers[key]: items for key, items in plan.offload.items()}, plan.recompute)


def _by_rules(timeline: Timeline, paths: frozenset[str], budget: int, recomputable: frozenset[str]) -> Plan | None:
    ranked = _by_cost(timeline, recomputable)
    best: Plan | None = None
    least = bisect_left(range(len(ranked)), True, key=lambda count: _meets(timeline, paths, ranked[:count], budget))
    for count in range(least, len(ranked) + 1):
        recompute = frozenset(ranked[:count])
        plan = _least_offload(timeline, _by_wait(timeline, paths, recompute), recompute, budget)
        if plan is not None and (best is None or plan.step_seconds < best.step_seconds):
            best = plan
        if best is not None and (plan is None or plan.step_seconds > (1 + _STALL_TOLERANCE) * best.step_seconds):
            break
    return best or _overcommitted(timeline, paths, frozenset(ranked), budget)


def _meets(timeline: Timeline, paths: frozenset[str], recomputed: list[str], budget: int) -> bool:
    """Whether offloading without waits meets the budget if these regions are recomputed."""
    recompute = frozenset(recomputed)
    return _longest_prefix(timeline, _by_wait(timeline, paths, recompute), recompute).peak_bytes <= budget


def _fits(timeline: Timeline, plan: Plan) -> bool:
    """Nothing waits, and everything that is offloaded has left before the turn."""
    return plan.stall_seconds <= _tolerance(timeline) and len(plan.release_at) == len(plan.offload)


def _tolerance(timeline: Timeline) -> float:
    return _STALL_TOLERANCE * sum(event.seconds for event in timeline.events)


def _by_wait(timeline: Timeline, paths: frozenset[str], recompute: frozenset[str] = frozenset()) -> list[Item]:
    """The items that may be offloaded, longest wait first."""
    step, found = IndexedTimeline(timeline), []
    for index, call in enumerate(timeline.calls):
        recomputed = call.key[0] in recompute
        if call.key[0] in paths and step.lives(index) and (call.light_recompute or not recomputed):
            gone = call.largest if recomputed else -1
            found += [(index, item) for item, size in enumerate(call.items) if size and item != gone]
    return sorted(found, key=lambda item: (step.forward[item[0]] - step.backward[item[0]], item))


def _by_cost(timeline: Timeline, recomputable: frozenset[str]) -> list[str]:
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


def _assign(items: list[Item], count: int, recompute: frozenset[str]) -> Assignment:
    offload: dict[int, set[int]] = {}
    for call, item in items[:count]:
        offload.setdefault(call, set()).add(item)
    return Assignment({c: frozenset(i) for c, i in offload.items()}, recompute)


def _longest_prefix(timeline: Timeline, items: list[Item], recompute: frozenset[str]) -> Plan:
    """The plan that offloads the most of `items`, in their order, and fits; that without any if none does."""
    low, high = 0, len(items)
    best = simulate(timeline, _assign(items, 0, recompute))
    while low < high:
        middle = (low + high + 1) // 2
        plan = simulate(timeline, _assign(items, middle, recompute))
        if _fits(timeline, plan):
            low, best = middle, plan
        else:
            high = middle - 1
    return best


def _least_offload(timeline: Timeline, items: list[Item], recompute: frozenset[str], budget: int) -> Plan | None:
    """The plan with the fewest items that meets the budget without waiting, or None."""
    best = _longest_prefix(timeline, items, recompute)
    if best.peak_bytes > budget:
        return None
    low, high = 0, sum(len(chosen) for chosen in best.offload.values())
    while low < high:  # the peak falls with each item, nearly always: the plan that is returned was simulated
        middle = (low + high) // 2
        plan = simulate(timeline, _assign(items, middle, recompute))
        if plan.peak_bytes <= budget and _fits(timeline, plan):
            high, best = middle, plan
        else:
            low = middle + 1
    return best


def _tightest(timeline: Timeline, paths: frozenset[str], recompute: frozenset[str]) -> list[Plan]:
    plans = []
    for recomputed in (recompute, frozenset[str]()):
        items = _by_wait(timeline, paths, recomputed)
        plans += [simulate(timeline, _assign(items, count, recomputed), window=0) for count in {0, len(items)}]
    return plans


def _overcommitted(timeline: Timeline, paths: frozenset[str], recompute: frozenset[str], budget: int) -> Plan | None:
    """The fastest plan that meets the budget by waiting for the link, or None."""
    found = []
    for recomputed in (frozenset[str](), recompute):
        items = _by_wait(timeline, paths, recomputed)
        for count in {len(items) * part // 8 for part in range(1, 9)}:
            assignment = _assign(items, count, recomputed)
            offloaded = simulate(timeline, assignment).planned_bytes
            found += [simulate(timeline, assignment, window) for window in (offloaded // 4, offloaded // 8, 0)]
    found += _tightest(timeline, paths, recompute)
    return min((p for p in found if p.peak_bytes <= budget), key=lambda p: p.step_seconds, default=None)


# --- pipelines --------------------------------------------------------------------------------------------------------


def is_interleaved(timeline: Timeline) -> bool:
    """Whether some forward follows a backward."""
    return timeline.opening < timeline.closing


def plan_interleaved(timeline: Timeline, paths: frozenset[str], everything: bool = False) -> Plan:
    """Offload the items of the regions `paths` that lower the peak, as far as the link carries them without waits.

    The link carries both ways all the time and memory is level for most of a step, so *kinds* of items are chosen: the same
    storage of the same region in all microbatches. Those that wait longest come first. A kind is accepted if memory falls
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
