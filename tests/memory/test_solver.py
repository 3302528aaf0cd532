"""The solver against every placement there is: random timelines, and those of real models with invented rates. What it promises
of any two budgets.

`placements` lays all 3^n assignments of a timeline with n regions, each with eleven windows: more than the solver tries. Its best
within a budget is what the solver has to reach, to 2 %.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.managed import manage
from forebay.memory.offload_plan import under_budget
from forebay.memory.solver import Allowed, Solver
from forebay.memory.timeline import Assignment, CallFigures, Timeline, TimelineEvent, simulate
from forebay.policy import BudgetError
from tests.memory.timelines import paths_of, placements, random_timeline
from tests.models.conftest import VOCABULARY, build_tiny
from tests.products import cover, first

TOLERANCE = 0.02
BUDGETS = 6


def check(timeline: Timeline) -> list[float]:
    """By how much `under_budget` misses the best placement, for budgets from the lowest peak there is to where all is kept."""
    every = [(plan.step_seconds, plan.peak_bytes) for plan in placements(timeline)]
    low, high = min(peak for _, peak in every), simulate(timeline, Assignment()).peak_bytes
    paths, gaps = paths_of(timeline), []
    for budget in (low + (high - low) * k // BUDGETS for k in range(BUDGETS)):
        best = min(seconds for seconds, peak in every if peak <= budget)
        plan = under_budget(timeline, paths, budget, paths)
        assert plan.peak_bytes <= budget
        gaps.append(plan.step_seconds / best - 1)
    return gaps


@pytest.mark.parametrize("seed", first(5, range(16)))
def test_no_placement_of_a_random_timeline_is_faster(seed: int) -> None:
    chance = random.Random(seed)
    timeline = random_timeline(chance, chance.randint(2, 5))
    assert max(check(timeline)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("regions", [7, 8])
def test_no_placement_of_a_longer_one_is_faster(regions: int) -> None:
    assert max(check(random_timeline(random.Random(regions), regions))) <= TOLERANCE


@pytest.mark.parametrize(("family", "rate"), cover(["qwen3_moe", "mixtral", "llama"], [4e9, 25e9, 100e9]))
def test_no_placement_of_a_real_model_is_faster(family: str, rate: float) -> None:
    """What a model saved on this CPU, item by item, as if its bytes were a thousand times as many; each MoE sublayer takes twice
    the time of attention, and each event rises by its own region's bytes."""
    model: Any = build_tiny(family, num_hidden_layers=3)
    ids = torch.randint(0, VOCABULARY, (2, 32))
    with manage(model, policy="offload") as mem:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
        measured = mem.manager.tuner.timeline
    assert measured is not None and len(measured.calls) == 6
    assert max(check(_timed(measured, rate))) <= TOLERANCE


def _timed(measured: Timeline, rate: float) -> Timeline:
    calls = tuple(
        replace(
            c,
            items=tuple(1000 * n for n in c.items),
            input_bytes=1000 * c.input_bytes,
            seconds=0.01 if c.key[0].endswith("mlp") else 0.005,
        )
        for c in measured.calls
    )
    events = tuple(
        replace(
            m,
            seconds=calls[m.call].seconds * (1.0 if m.kind == "F" else 2.0),
            transient=sum(calls[m.call].items),
        )
        for m in measured.events
    )
    return Timeline(calls, events, rate, rate)


def layers(count: int, noise: float = 0.03) -> Timeline:
    """An MoE model's sublayers with times that vary as measured ones do; a link of 40 GB/s."""
    chance = random.Random(0)
    mib = 1 << 20
    calls = []
    for i in range(count):
        vary = [chance.uniform(1 - noise, 1 + noise) for _ in range(2)]
        calls.append(
            CallFigures((f"{i}.attn", 0), tuple(n * mib for n in (64, 64, 16, 64)), 0.004 * vary[0], False, 64 * mib)
        )
        calls.append(CallFigures((f"{i}.mlp", 0), tuple(n * mib for n in (64, 64, 384, 8)), 0.010 * vary[1], True))
    events = [TimelineEvent("F", i, c.seconds, 0, 300 * mib) for i, c in enumerate(calls)]
    events += [TimelineEvent("B", i, 2 * c.seconds, 0, 600 * mib) for i, c in reversed([*enumerate(calls)])]
    return Timeline(tuple(calls), tuple(events), 40e9, 40e9)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_a_hundred_regions_take_a_second(share: float) -> None:
    """Of this process's time: others may have the machine. No slower than any count of regions recomputed, the cheapest first,
    with any part of the rest offloaded, the longest wait first."""
    timeline = layers(50)
    paths = paths_of(timeline)
    budget = int(simulate(timeline, Assignment()).peak_bytes * share)
    begun = time.process_time()
    plan = under_budget(timeline, paths, budget, paths)
    assert time.process_time() - begun < 2.0  # 0.8 s where it was written
    assert plan.peak_bytes <= budget
    rivals = [
        simulate(timeline, _prefix(timeline, again, gone)) for again in range(0, 51, 5) for gone in range(0, 101, 10)
    ]
    assert plan.step_seconds <= 1.001 * min((p.step_seconds for p in rivals if p.peak_bytes <= budget), default=1e9)


def _prefix(timeline: Timeline, again: int, gone: int) -> Assignment:
    last = [c.key[0] for c in reversed(timeline.calls) if c.light_recompute][:again]
    offload = {i: frozenset(range(len(c.items))) for i, c in enumerate(timeline.calls[:gone]) if c.key[0] not in last}
    return Assignment(offload, frozenset(last))


def test_the_lowest_peak_is_that_of_all_placements() -> None:
    """At most: parts of regions may leave, too. And the smallest budget that an error names can be met."""
    for seed in range(12):
        chance = random.Random(1000 + seed)
        timeline = random_timeline(chance, chance.randint(2, 4))
        paths = paths_of(timeline)
        least = min(plan.peak_bytes for plan in placements(timeline))
        lowest = Solver(timeline, Allowed(paths, paths)).lowest().peak_bytes
        assert lowest <= 1.02 * least
        with pytest.raises(BudgetError, match=rf"\({lowest} bytes\)$"):
            under_budget(timeline, paths, lowest - 1, paths)
        assert under_budget(timeline, paths, lowest, paths).peak_bytes <= lowest


@given(st.integers(0, 10**6), st.integers(1, 14), st.lists(st.floats(0, 1.1), min_size=2, max_size=6), st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_larger_budget_never_makes_a_longer_step(seed: int, regions: int, shares: list[float], timed: bool) -> None:
    """Any budget from the lowest peak on can be met, whatever was asked before, and no plan is slower than keeping, recomputing
    or offloading everything, or recomputing what is light."""
    timeline = random_timeline(random.Random(seed), regions)
    if not timed:  # as on a CPU
        calls = tuple(replace(c, seconds=0.0) for c in timeline.calls)
        timeline = Timeline(calls, tuple(replace(e, seconds=0.0) for e in timeline.events))
    paths = paths_of(timeline)
    solver = Solver(timeline, Allowed(paths, paths))
    least, most = solver.lowest().peak_bytes, simulate(timeline, Assignment()).peak_bytes
    every = {i: frozenset(range(len(c.items))) for i, c in enumerate(timeline.calls)}
    light = frozenset(c.key[0] for c in timeline.calls if c.light_recompute)
    corners = [simulate(timeline, Assignment(recompute=chosen)) for chosen in (frozenset[str](), paths, light)]
    corners += [simulate(timeline, Assignment(every), window) for window in (None, 0)]
    plans = {}
    for share in shares:
        budget = least + int(share * max(most - least, 0))
        plan = solver.solve(budget)
        assert plan is not None and plan.peak_bytes <= budget
        assert all(plan.step_seconds <= 1.00001 * c.step_seconds for c in corners if c.peak_bytes <= budget)
        plans[budget] = plan.step_seconds
    for small, large in pairwise(sorted(plans)):
        assert plans[large] <= 1.00001 * plans[small]  # times are compared by five digits
    assert solver.solve(least - 1) is None
    again = Solver(timeline, Allowed(paths, paths))
    assert all(again.solve(budget).step_seconds == seconds for budget, seconds in plans.items())  # type: ignore[union-attr]
