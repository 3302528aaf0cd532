"""The solver keeps its promises on random timelines."""

import random

import pytest

from forebay.memory.offload_plan import fit_link, offload_all, under_budget
from forebay.memory.timeline import CallFigures, Timeline, TimelineEvent
from forebay.policy import BudgetError
from tests.products import first


def random_timeline(chance: random.Random) -> Timeline:
    count = chance.randint(1, 10)
    calls = tuple(
        CallFigures(
            (f"r{i}", 0),
            tuple(chance.randint(1, 1000) for _ in range(chance.randint(1, 4))),
            chance.uniform(0.5, 2.0),
            light_recompute=chance.random() < 0.5,
        )
        for i in range(count)
    )
    events = [TimelineEvent("F", i, c.seconds * 1.1, 0, chance.randint(0, 500)) for i, c in enumerate(calls)]
    events += [
        TimelineEvent("B", i, 2 * c.seconds, 0, chance.randint(0, 900)) for i, c in reversed([*enumerate(calls)])
    ]
    rate = chance.choice([50.0, 500.0, 5000.0])
    return Timeline(calls, tuple(events), rate, rate)


@pytest.mark.parametrize("seed", first(8, range(25)))
def test_fit_never_waits_and_a_budget_is_never_exceeded(seed: int) -> None:
    chance = random.Random(seed)
    timeline = random_timeline(chance)
    paths = frozenset(c.key[0] for c in timeline.calls)
    fit = fit_link(timeline, paths)
    step = sum(m.seconds for m in timeline.events)
    assert fit.stall_seconds <= 1e-3 * step
    every = offload_all(timeline, paths)
    assert every.planned_bytes == sum(sum(c.items) for c in timeline.calls) >= fit.planned_bytes
    keep_peak = under_budget(timeline, paths, 1 << 40, paths).peak_bytes
    for share in (1.0, 0.8, 0.6, 0.4, 0.2):
        budget = int(keep_peak * share)
        try:
            plan = under_budget(timeline, paths, budget, paths)
        except BudgetError as error:
            smallest = int(str(error).rsplit("(", 1)[1].split()[0])
            assert smallest > budget
            assert under_budget(timeline, paths, smallest, paths).peak_bytes <= smallest
        else:
            assert plan.peak_bytes <= budget


@pytest.mark.parametrize("seed", first(4, range(10)))
def test_a_margin_is_left_over_where_it_can_be(seed: int) -> None:
    timeline = random_timeline(random.Random(seed))
    paths = frozenset(c.key[0] for c in timeline.calls)
    with pytest.raises(BudgetError) as caught:
        under_budget(timeline, paths, 0, paths)
    smallest = int(str(caught.value).rsplit("(", 1)[1].split()[0])
    roomy = int(smallest / 0.9) + 1
    assert under_budget(timeline, paths, roomy, paths, margin=0.1).peak_bytes <= 0.9 * roomy
    assert under_budget(timeline, paths, smallest, paths, margin=0.1).peak_bytes <= smallest
    with pytest.raises(BudgetError, match=str(smallest)):
        under_budget(timeline, paths, smallest - 1, paths, margin=0.1)


def test_a_generous_budget_moves_and_recomputes_nothing() -> None:
    timeline = random_timeline(random.Random(1))
    paths = frozenset(c.key[0] for c in timeline.calls)
    plan = under_budget(timeline, paths, 1 << 40, paths)
    assert plan.planned_bytes == 0 and not plan.recompute


def test_offload_comes_before_recompute_while_the_link_is_free() -> None:
    calls = tuple(CallFigures((f"r{i}", 0), (100,), 1.0) for i in range(6))
    order = [("F", i) for i in range(6)] + [("B", i) for i in reversed(range(6))]
    timeline = Timeline(calls, tuple(TimelineEvent(k, i, 1.0) for k, i in order), 1e4, 1e4)
    paths = frozenset(c.key[0] for c in calls)
    plan = under_budget(timeline, paths, 400, paths)
    assert not plan.recompute and plan.stall_seconds == 0.0
    assert set(plan.offload) >= {("r0", 0), ("r1", 0)}
