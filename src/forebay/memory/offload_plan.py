"""Which saved tensors are offloaded: rules for a single forward and backward, and for a pipeline's step.

Input: a `Timeline` and a budget or a bound on waits. Output: a `Plan`, or a `BudgetError` that names the smallest
budget that can be reached. `fit_link` and `under_budget` plan steps in which the backwards follow all forwards;
`plan_interleaved` plans steps in which they alternate. Nothing is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf

from forebay.memory.solver import Allowed, lowest, solve
from forebay.memory.timeline import Assignment, LaneSchedule, Plan, TimedTimeline, Timeline, simulate
from forebay.policy import BudgetError, format_bytes

# Choosing placements: which items leave for the host, which regions are recomputed, what stays.
#
# In: a `Timeline` and a budget. Out: a `Plan`, or a `BudgetError` that names the smallest budget that can be reached.
#
# Rules first: offload what waits longest (the first forward calls, whose backward comes last) as far as the link carries
# it without the compute stream waiting; then recompute what is cheapest per byte; and only when that is not enough, offload
# more than the link carries and wait. Where that costs time, `forebay.memory.solver` looks for a faster plan.

_STALL_TOLERANCE = 1e-3  # share of the step; below it the measured figures cannot tell


def fit_link(timeline: Timeline, paths: frozenset[str]) -> Plan:
    """Offload as much of the regions `paths` as the link carries without the compute stream waiting."""
    items = _by_wait(timeline, paths)
    return _longest_prefix(timeline, items, frozenset(), lambda plan: _fits(timeline, plan))


def offload_all(timeline: Timeline, paths: frozenset[str], in_flight: int | None = None) -> Plan:
    """Offload every item of the regions `paths`, waiting where the link is too slow.

    Args:
        in_flight: bytes that may be on their way at once. Default: a quarter of all; less frees memory sooner and waits
            longer.
    """
    items = _by_wait(timeline, paths)
    plan = simulate(timeline, _assign(items, len(items), frozenset()))
    if plan.stall_seconds <= _tolerance(timeline):
        return plan
    window = in_flight if in_flight is not None else plan.planned_bytes // 4
    return simulate(timeline, _assign(items, len(items), frozenset()), window)


def under_budget(
    timeline: Timeline, paths: frozenset[str], budget: int, recomputable: frozenset[str], margin: float = 0.0
) -> Plan:
    """The fastest plan found whose peak is at most `budget` bytes over the step's base.

    Args:
        paths: regions that may be offloaded.
        recomputable: regions that may be recomputed.
        margin: share of the budget that is left over where some plan can do without it.

    Raises:
        BudgetError: no plan reaches the budget; names the smallest one that does.
    """
    if margin:
        with suppress(BudgetError):
            return under_budget(timeline, paths, int(budget * (1 - margin)), recomputable)
    kept = simulate(timeline, Assignment())
    if kept.peak_bytes <= budget:
        return kept
    allowed = Allowed(paths, recomputable)
    found = _heuristic(timeline, paths, budget, recomputable)
    plain = sum(m.seconds for m in timeline.events)  # 0 on a CPU: there is nothing to minimise then
    if found is None or found.step_seconds > plain:
        solved = solve(timeline, allowed, budget, [assignment_of(timeline, found)] if found else [])
        if solved is not None and (found is None or solved.plan.step_seconds < found.step_seconds):
            found = solved.plan
    if found is None:
        tightest = _tightest(timeline, paths, frozenset(_by_cost(timeline, recomputable)))
        found = lowest(timeline, allowed, [assignment_of(timeline, p) for p in tightest])
    if found.peak_bytes > budget:
        raise BudgetError(
            f"no placement brings the activations under {format_bytes(budget)} ({budget} bytes); the smallest budget that "
            f"can be reached with this model and batch is {format_bytes(found.peak_bytes)} ({found.peak_bytes} bytes)"
        )
    return found


def _heuristic(timeline: Timeline, paths: frozenset[str], budget: int, recomputable: frozenset[str]) -> Plan | None:
    """By rules alone: offload what the link carries, then recompute what is cheapest a byte, then wait for the link."""
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


def _meets(timeline: Timeline, paths: frozenset[str], recompute: list[str], budget: int) -> bool:
    """Whether nobody has to wait for the link with these regions recomputed."""
    again = frozenset(recompute)
    items = _by_wait(timeline, paths, again)
    return _longest_prefix(timeline, items, again, lambda p: _fits(timeline, p)).peak_bytes <= budget


def assignment_of(timeline: Timeline, plan: Plan) -> Assignment:
    """What a plan carries out."""
    numbers = {call.key: number for number, call in enumerate(timeline.calls)}
    return Assignment({numbers[key]: items for key, items in plan.offload.items()}, plan.recompute)


def _fits(timeline: Timeline, plan: Plan) -> bool:
    """Nobody waits, and everything that leaves is gone before the turn."""
    return plan.stall_seconds <= _tolerance(timeline) and len(plan.settle_at) == len(plan.offload)


def _tolerance(timeline: Timeline) -> float:
    return _STALL_TOLERANCE * sum(m.seconds for m in timeline.events)


def _by_wait(
    timeline: Timeline, paths: frozenset[str], recompute: frozenset[str] = frozenset()
) -> list[tuple[int, int]]:
    """(call, ordinal) of the items that may leave, longest wait first."""
    forward = {m.call: i for i, m in enumerate(timeline.events) if m.kind == "F"}
    backward = {m.call: i for i, m in enumerate(timeline.events) if m.kind == "B"}
    found = []
    for index, call in enumerate(timeline.calls):
        if call.key[0] not in paths or index not in forward or index not in backward:
            continue
        if call.key[0] in recompute and not call.light_recompute:
            continue
        for ordinal in range(len(call.items)):
            if call.items[ordinal] and not (call.key[0] in recompute and ordinal == call.largest):
                found.append((index, ordinal))
    return sorted(found, key=lambda item: (forward[item[0]] - backward[item[0]], item))


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


def _assign(items: list[tuple[int, int]], count: int, recompute: frozenset[str]) -> Assignment:
    offload: dict[int, set[int]] = {}
    for call, ordinal in items[:count]:
        offload.setdefault(call, set()).add(ordinal)
    return Assignment({c: frozenset(o) for c, o in offload.items()}, recompute)


def _longest_prefix(timeline: Timeline, items: list[tuple[int, int]], recompute: frozenset[str], accept) -> Plan:  # type: ignore[no-untyped-def]
    """The plan with the most items that `accept`s, by bisection; with no item every plan is accepted."""
    low, high = 0, len(items)
    best = simulate(timeline, _assign(items, 0, recompute))
    while low < high:
        middle = (low + high + 1) // 2
        plan = simulate(timeline, _assign(items, middle, recompute))
        if accept(plan):
            low, best = middle, plan
        else:
            high = middle - 1
    return best


def _least_offload(
    timeline: Timeline, items: list[tuple[int, int]], recompute: frozenset[str], budget: int
) -> Plan | None:
    """The plan with the fewest items that meets the budget without waiting, or None."""
    most = _longest_prefix(timeline, items, recompute, lambda p: _fits(timeline, p))
    if most.peak_bytes > budget:
        return None
    low, high, best = 0, sum(len(chosen) for chosen in most.offload.values()), most
    while low < high:  # the peak falls with each item, nearly always: what is returned was simulated
        middle = (low + high) // 2
        plan = simulate(timeline, _assign(items, middle, recompute))
        if plan.peak_bytes <= budget and _fits(timeline, plan):
            high, best = middle, plan
        else:
            low = middle + 1
    return best


def _tightest(timeline: Timeline, paths: frozenset[str], recompute: frozenset[str]) -> list[Plan]:
    plans = []
    for again in (recompute, frozenset[str]()):
        items = _by_wait(timeline, paths, again)
        plans += [simulate(timeline, _assign(items, count, again), window=0) for count in {0, len(items)}]
    return plans


def _overcommitted(timeline: Timeline, paths: frozenset[str], recompute: frozenset[str], budget: int) -> Plan | None:
    """The fastest plan that meets the budget by waiting for the link, or None."""
    found = []
    for again in (frozenset[str](), recompute):
        items = _by_wait(timeline, paths, again)
        for count in {len(items) * part // 8 for part in range(1, 9)}:
            fitted = _assign(items, count, again)
            for share in (4, 8, 0):
                plan = simulate(timeline, fitted)
                window = plan.planned_bytes // share if share else 0
                found.append(simulate(timeline, fitted, window))
    found += _tightest(timeline, paths, recompute)
    return min((p for p in found if p.peak_bytes <= budget), key=lambda p: p.step_seconds, default=None)


# What leaves for the host where forwards and backwards of several microbatches alternate, as in a pipeline.
#
# In: a `Timeline` in which a forward follows some backward. Out: a `Plan` by which nobody waits, or not for long.
#
# There is no turn here, before which everything leaves and after which it comes back (`forebay.memory.offload_plan` plans for
# that): the link carries both ways all the time, and memory is level for most of a step. So what is chosen is a *kind* of item,
# the same storage of the same region in all microbatches, and a peak falls by what of it is away at any one time:
#
#     kind      (region, which of its calls in a microbatch, ordinal); those that wait longest first
#     accepted  if memory becomes lower where it is high: the mean of (memory)^16 over moments falls; and, unless there may be
#               waits, if the copies take no more than a small share of the step from the device's own memory
#
# Calls of accepted kinds are laid on the link (`forebay.memory.timeline`). At last what leaves and need not stays after all,
# those first that are away for the shortest time: memory may be as high at any moment as it is where nothing can be done about
# it, and each byte that travels takes time from the device's own memory.
#
# By a plan for which nobody waits, memory is highest in a pipeline's first forwards, or in its last backwards: they follow each
# other faster than the link carries. With `everything` they wait, rather than raise memory above a level: the lowest for which
# all waits are a small share of the step, or a higher one for which they are so much shorter that the rest would have bought
# little. Copies then also go on for most of the time in which the device waits for other processes (`Moment.idle`).

_POWER = 16
WAITS = 0.02
"""Share of the step, with `everything`; a pipeline's other ranks may wait at the same time, or for this one."""
# Share of what a rank computes in a step that copies may take of its device's own memory if nobody is to wait. What they take
# is lost, even on ranks that wait for others: of two H200s 9.9, 12.9, 20.5 and 27.0 GiB a step each way, of both together, cost
# 0.25, 0.41, 0.52 and 0.84 %. The last of these bytes buy least: with 0.0025 peaks fell by 16 to 34 % more, for 43 % more bytes.
_TAKEN = 0.0018
_SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 0.0)  # of `WAITS`, that are tried
# Share of a peak that a share of the step's time has to buy, at least: of PP 4 on H200s a rank's last 1.5 % of time bought 1.4 %
# of its peak, and another's first 0.7 % bought 11 %.
_WORTH = 2
_IDLE = 0.8  # of the time in which a process waits for another one, with `everything`, that the link is counted on
# Of the kinds, those that wait longest first, that are tried to leave. With 4 peaks were up to 10 % higher (PP 2 and 4 of
# DeepSeek-V2-Lite's shapes); with 64 they are no lower.
_PARTS = 16
_EVERY = 4  # of these parts are tried with smaller shares
_FINE = 1 / 128  # of a peak, within which its level is the lowest

StorageKind = list[tuple[int, int]]  # (call, ordinal) of each


def is_interleaved(timeline: Timeline) -> bool:
    """Whether some forward follows a backward."""
    kinds = "".join(m.kind for m in timeline.events)
    return "F" in kinds.lstrip("F")


def plan_interleaved(timeline: Timeline, paths: frozenset[str], everything: bool = False) -> Plan:
    """Offload of the regions `paths` what lowers the peak, as far as the link carries it without anybody waiting, and its copies
    take little of the device's own memory.

    `peak_bytes` of a plan for no paths is that of keeping everything.

    Args:
        everything: the compute stream may wait for the link, 2 % of the step at most, if that lowers the peak further, and copies
            count on idle time.
    """
    step = TimedTimeline(timeline, _IDLE if everything else 0.0)
    most = inf if everything else _TAKEN * step.seconds * timeline.memory_rate / 2  # copies out, and back
    chosen: StorageKind = []
    best = step.lay([])
    height = _height(best)
    kinds = _kinds(step, paths)
    for kind in kinds:
        laid = step.lay([*chosen, *kind])
        high = _height(laid)
        if high < height * (1 - 1e-9):
            laid.keep_what_may_stay()
            if sum(laid.bytes.values()) <= most:
                chosen.extend(kind)
                best, height = laid, high
    found = [best, *_waiting(step, kinds, best)] if everything else [best]
    return min(found, key=_cost).plan()


def _waiting(step: TimedTimeline, kinds: Sequence[StorageKind], best: LaneSchedule) -> Iterator[LaneSchedule]:
    """What has the lowest peak, and a lower one than `best`, of those for which nobody waits longer than each of some limits."""
    ends = sorted({-(-len(kinds) * part // _PARTS) for part in range(1, _PARTS + 1)})  # few kinds have fewer parts
    for share in _SHARES:
        lowest = best
        for end in ends if share == 1 or len(ends) < _PARTS else ends[_EVERY - 1 :: _EVERY]:
            items = [item for kind in kinds[:end] for item in kind]
            lowest = min(
                [lowest, *_lower(step, items, lowest.peak, share * WAITS * step.seconds)], key=lambda laid: laid.peak
            )
        if lowest is not best:
            lowest.keep_what_may_stay()
            yield lowest


def _cost(laid: LaneSchedule) -> float:
    """In bytes."""
    return laid.peak * (1 + _WORTH * laid.stall() / laid.step.seconds)


def _lower(step: TimedTimeline, items: StorageKind, peak: float, limit: float) -> Iterator[LaneSchedule]:
    """`items` laid lower and lower, from `peak` on, as long as all waits take no longer than `limit` seconds."""
    low, high = 0.0, peak * (1 - _FINE)
    level = high  # first: these items may not lower the peak at all
    while high - low > _FINE * peak:
        laid = step.lay(items, level)
        if laid.stall() > limit:
            low = level
        else:
            high = level
            yield laid
        level = (low + high) / 2


def _height(laid: LaneSchedule) -> float:
    """How high memory is where it is high."""
    top = sum(laid.step.sizes) or 1
    return sum(w * (m / top) ** _POWER for w, m in zip(laid.step.each, laid.memory, strict=True))


def _kinds(step: TimedTimeline, paths: frozenset[str]) -> list[StorageKind]:
    """Those that wait longest first."""
    counts: dict[str, int] = {}
    for call in step.calls:
        counts[call.key[0]] = counts.get(call.key[0], 0) + 1
    fewest = min(counts.values(), default=1)
    found: dict[tuple[str, int, int], StorageKind] = {}
    for index, call in enumerate(step.calls):
        path, count = call.key
        if path not in paths or index not in step.forward or index not in step.backward:
            continue
        times = max(counts[path] // fewest, 1)  # a half in stages is called twice for a microbatch
        for ordinal, size in enumerate(call.items):
            if size:
                found.setdefault((path, count % times, ordinal), []).append((index, ordinal))

    def wait(items: StorageKind) -> float:
        waits = [step.starts[step.backward[c]] - step.starts[step.forward[c]] for c, _ in items]
        return sum(waits) / len(waits)

    return sorted(found.values(), key=wait, reverse=True)
