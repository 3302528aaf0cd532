"""Choosing placements: which items leave for the host, which regions are recomputed, what stays.

In: a `Timeline` and a budget. Out: a `Plan`, or a `BudgetError` that names the smallest budget that can be reached.

Rules first: offload what waits longest (the first forward calls, whose backward comes last) as far as the link carries
it without the compute stream waiting; then recompute what is cheapest per byte; and only when that is not enough, offload
more than the link carries and wait. Where that costs time, `forebay.planner.milp` looks for a faster plan.
"""

from bisect import bisect_left
from contextlib import suppress

from forebay.planner.milp import Allowed, lowest, solve
from forebay.planner.simulate import Assignment, Plan, Timeline, simulate
from forebay.policy import BudgetError, format_bytes

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
    plain = sum(m.seconds for m in timeline.moments)  # 0 on a CPU: there is nothing to minimise then
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
    return _STALL_TOLERANCE * sum(m.seconds for m in timeline.moments)


def _by_wait(
    timeline: Timeline, paths: frozenset[str], recompute: frozenset[str] = frozenset()
) -> list[tuple[int, int]]:
    """(call, ordinal) of the items that may leave, longest wait first."""
    forward = {m.call: i for i, m in enumerate(timeline.moments) if m.kind == "F"}
    backward = {m.call: i for i, m in enumerate(timeline.moments) if m.kind == "B"}
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
