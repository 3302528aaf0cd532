"""Chosen placements against all combinations, and the link by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from forebay.estimate.levels import fit_rank
from forebay.estimate.placement import Choice, Machine, Option, by_kind, choose, rank_options, sentences
from forebay.estimate.state import RankState
from forebay.estimate.types import LayerTrace, ModelTrace, PartTrace, StageLayers
from forebay.estimate.walk import local_actions
from forebay.pipeline.schedule import make_plan

FAST = 1e30  # a link that carries everything at once
EVERY = frozenset({"recompute", "offload", "stash"})
STATE = RankState(1000, 2000, 0, (30, 40, 35, 45), 10, 20, False, 0, 100, 0, 7)


def machine(rate: float = FAST) -> Machine:
    return Machine(lambda part: (part.forward_flops / 100, part.backward_flops / 100), rate, rate, 1e3)


def part(chance: random.Random, moe: bool) -> PartTrace:
    saved = chance.randint(50, 200)
    plain = PartTrace(
        saved,
        chance.randint(5, 20),
        chance.randint(20, 80),
        chance.randint(20, 80),
        chance.randint(100, 300),
        chance.randint(200, 600),
    )
    if not moe:
        return plain
    return replace(
        plain, light=(saved // 2, plain.backward + 9), stash=(saved // 3, saved // 5), deferred=(chance.randint(0, 9),)
    )


def model(chance: random.Random, layers: int) -> ModelTrace:
    return ModelTrace(
        embedding=PartTrace(2, 0, 10, 12, 1, 2),
        layers=tuple(LayerTrace(part(chance, False), part(chance, i > 0), i > 0) for i in range(layers)),
        head=PartTrace(30, 8, 40, 25, 50, 100),
        shared=5,
        balance=3,
        kinds=2,
        head_gradient=10,
    )


class Case:
    """The arguments of `choose` and of a walk."""

    def __init__(self, seed: int, pipeline: bool):
        chance = random.Random(seed)
        self.trace = model(chance, 4 if pipeline else 3)
        if pipeline:  # the first rank of a V: stages 0 and 3
            plan = make_plan("zbv" if seed % 2 else "dualpipev", 2, 6)
            self.stages = {0: StageLayers((0,), (0,), True, False), 3: StageLayers((3,), (1,), False, True)}
            self.actions: Any = [a for a in plan.actions[0] if a.computes]
        else:
            self.stages = {0: StageLayers((0, 1, 2), (0, 1, 2), True, True)}
            self.actions = local_actions(3, overlap=bool(seed % 2))
        engine = pipeline or bool(seed % 2)
        self.keywords: dict[str, Any] = {"prefix": "m", "recompute": "light", "engine": engine, "summed": False}

    def choose(self, budget: int, machine: Machine, waits: bool = False, allowed: frozenset[str] = EVERY) -> Choice:
        options, times = rank_options(self.trace, self.stages, allowed, machine, **self.keywords)
        return choose(0, STATE, options, times, self.actions, 11, budget, machine, waits)

    def every(self, machine: Machine) -> list[tuple[float, int]]:
        """(seconds, peak) of all placements with a link that carries everything."""
        options, _ = rank_options(self.trace, self.stages, EVERY, machine, **self.keywords)
        forwards = {s: sum(_does(a, s) for a in self.actions) for s in self.stages}
        flat: list[tuple[int, list[Option]]] = [(s, o) for s, sublayers in options.items() for o in sublayers]
        found = []
        for picked in product(*(o for _, o in flat)):
            stages: dict[int, list[Any]] = {s: [] for s in self.stages}
            for (s, _), option in zip(flat, picked, strict=True):
                stages[s].append(option.memory)
            fit = fit_rank(0, STATE, stages, self.actions, 11)
            seconds = sum(forwards[s] * option.seconds for (s, _), option in zip(flat, picked, strict=True))
            found.append((seconds, fit.total))
        return found


def _does(action: Any, stage: int) -> bool:
    if action.kind == "OVERLAP_F_B":
        return action.parts[0].stage == stage
    return action.kind == "F" and action.stage == stage


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_no_placement_within_the_budget_costs_less(seed: int, pipeline: bool) -> None:
    case = Case(seed, pipeline)
    every = case.every(machine())
    low, high = min(p for _, p in every), max(p for _, p in every)
    for k in range(6):
        budget = low + (high - low) * k // 6
        best = min(s for s, p in every if p <= budget)
        choice = case.choose(budget, machine())
        assert choice.fit.total <= budget
        assert choice.seconds <= best * (1 + 5e-3) + 1e-6
    assert case.choose(low - 1, machine()).fit.total == low  # does not fit: the lowest peak


def test_a_budget_with_room_changes_nothing() -> None:
    choice = Case(0, False).choose(10**6, machine())
    assert not choice.placements and choice.seconds == 0 and not by_kind([choice])


def test_what_is_placed_is_what_the_walk_holds_less() -> None:
    case = Case(2, False)
    kept = case.choose(10**6, machine()).fit
    choice = case.choose(kept.total - 60, machine())
    rows = by_kind([choice])
    assert {p.path: p.placement for p in choice.placed} == dict(choice.placements)
    assert len(sentences([choice])) == len(rows) + 1


def test_a_link_without_time_carries_nothing() -> None:
    case = Case(1, False)
    kept = case.choose(10**6, machine()).fit.total
    slow = case.choose(kept - 40, machine(1e-3))
    assert "offload" not in slow.placements.values() and slow.fit.total <= kept - 40
    alone = frozenset({"offload"})
    stuck = case.choose(kept - 40, machine(1e-3), allowed=alone)
    assert not stuck.placements and stuck.fit.total == kept
    waiting = case.choose(kept - 40, machine(10.0), waits=True, allowed=alone)
    assert waiting.waits > 0 and waiting.fit.total <= kept - 40


def test_the_link_by_hand() -> None:
    """Twelve sublayers that save 100 bytes each and take 1 s forward, 2 s backward; the head takes 1 s.

    At 100 bytes a second a copy takes as long as the next sublayer's forward: all leave. At 50 it takes 2 s: every second one
    leaves, and the last copy ends at 13 s, with the head. At 20 it takes 5 s, longer than two more sublayers: none
    leave. The peak is the head's, so that each sublayer that leaves lowers it."""
    sublayer = PartTrace(100, 1, 1, 1, 100, 200)
    trace = replace(
        model(random.Random(0), 2),
        layers=(LayerTrace(sublayer, sublayer, False),) * 6,
        head=PartTrace(1, 1, 1, 5000, 100, 200),
        shared=0,
    )
    case = Case(0, False)
    case.trace, case.stages, case.actions = (
        trace,
        {0: StageLayers(tuple(range(6)), tuple(range(6)), True, True)},
        local_actions(1, False),
    )
    state = replace(STATE, layer_gradients=(0,) * 6)
    left = {}
    for rate in (100.0, 50.0, 20.0):
        options, times = rank_options(case.trace, case.stages, frozenset({"offload"}), machine(rate), **case.keywords)
        choice = choose(0, state, options, times, case.actions, 11, 1, machine(rate), False)
        left[rate] = len(choice.placements)
    assert left == {100.0: 12, 50.0: 6, 20.0: 0}


def test_a_long_model_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """61 layers on one process: equal sublayers are offloaded from the first on, and the peak is within the budget."""
    monkeypatch.setattr("forebay.estimate.placement._SECONDS", 60.0)  # takes 0.1; a busy machine must not cut it short
    sublayer, moe = part(random.Random(0), False), part(random.Random(1), True)
    case = Case(0, False)
    case.trace = replace(case.trace, layers=(LayerTrace(sublayer, moe, True),) * 61)
    case.stages = {0: StageLayers(tuple(range(61)), tuple(range(61)), True, True)}
    state = replace(STATE, layer_gradients=(1,) * 61)
    options, times = rank_options(case.trace, case.stages, EVERY, machine(30.0), **case.keywords)

    def run(budget: int) -> Choice:
        return choose(0, state, options, times, local_actions(2, False), 11, budget, machine(30.0), False)

    kept = run(10**9).fit
    choice = run(kept.total - kept.activations // 3)
    assert choice.fit.total <= kept.total - kept.activations // 3
    assert set(choice.placements.values()) >= {"offload"}
