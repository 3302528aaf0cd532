"""Trials on an invented machine, whose figures are not those of the timeline that the plans are made from.

`Machine` carries a plan out moment by moment, with its own seconds, link and peaks; it shares no code with the planner's
simulation. The best of an exhaustive search is over all placements of whole regions, each laid with eleven windows, as this
machine runs them.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import pytest
import torch
from torch import nn

from forebay.managed import manage
from forebay.memory.autotune import MOST, Trials
from forebay.memory.offload_plan import under_budget
from forebay.memory.timeline import Assignment, CallFigures, Plan, Timeline, TimelineEvent, simulate
from forebay.policy import BudgetError
from tests.products import first

WINDOWS = (None, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 0)
UNIT = 1 << 20


def timeline_of(chance: random.Random, regions: int) -> Timeline:
    """Two kinds of regions in turn, such as attention and experts; the link carries from too little of what they save to all."""
    calls = []
    for i in range(regions):
        light = bool(i % 2)
        items = tuple(chance.randint(20, 300) * UNIT for _ in range(chance.randint(1, 4)))
        calls.append(CallFigures((f"r{i}", 0), items, chance.uniform(2, 6) * 1e-3, light, 16 * UNIT))
    rise = [chance.randint(50, 400) * UNIT for _ in calls]
    events = [TimelineEvent("F", i, c.seconds * 1.1, 10 * UNIT, rise[i] // 2) for i, c in enumerate(calls)]
    events += [TimelineEvent("B", i, c.seconds * 2.2, 20 * UNIT, rise[i]) for i, c in reversed([*enumerate(calls)])]
    rate = sum(sum(c.items) for c in calls) / sum(m.seconds for m in events) * chance.uniform(0.4, 3.0)
    return Timeline(tuple(calls), tuple(events), rate, rate)


class Machine:
    """What is true: `timeline` with recomputing, link and everything else that many times as slow, and peaks that are off by up
    to `apart` bytes and `off` more. Every fifth cycle is half as long again, for an evaluation's sake."""

    def __init__(
        self,
        timeline: Timeline,
        *,
        again: float = 1.0,
        link: float = 1.0,
        work: float = 1.0,
        apart: int = 0,
        off: int = 0,
        noise: float = 0.0,
    ):
        self.calls = {c.key: c for c in timeline.calls}
        self.events = [(m.kind, timeline.calls[m.call].key, m.seconds * work) for m in timeline.events]
        self.again, self.apart, self.off, self.noise = again * work, apart, off, noise
        self.work, self.rate = work, timeline.out_rate / link
        self.chance, self.ran = random.Random(0), 0

    def seconds(self, plan: Plan) -> float:
        """How long a step takes. One lane each way; the compute stream waits where the plan has it wait."""
        now, out_free, back_free = 0.0, 0.0, 0.0
        left: dict[object, float] = {}
        came: dict[object, float] = {}
        for kind, key, seconds in self.events:
            for other, event in plan.settle_at.items():
                if event == (kind, key):
                    now = max(now, left[other])
            for other in plan.fetch_at.get((kind, key), ()):
                back_free = max(back_free, now) + self._leaves(plan, other) / self.rate
                came[other] = back_free
            if kind == "B":
                now = max(now, came.get(key, now))
                if key[0] in plan.recompute:
                    now += self.calls[key].recompute_seconds * self.again
            elif key in plan.offload:
                out_free = (
                    max(out_free, now + self.calls[key].seconds * self.work) + self._leaves(plan, key) / self.rate
                )
                left[key] = out_free
            now += seconds
        return now

    def peak(self, plan: Plan) -> int:
        """By which placements it has, a plan takes somewhat more or less than it says; always the same."""
        name = repr((sorted(plan.recompute), sorted((k, sorted(v)) for k, v in plan.offload.items())))
        return plan.peak_bytes + self.off + int(self.apart * (zlib.crc32(name.encode()) % 2001 - 1000) / 1000)

    def run(self, trials: Trials) -> None:
        """One cycle with the plan in force."""
        self.ran += 1
        ms = 1e3 * self.seconds(trials.plan) * (1 + abs(self.chance.gauss(0, self.noise)))
        taken = ms * (1.5 if self.ran % 5 == 0 else 1)
        trials.told(lambda: taken, self.peak(trials.plan))

    def _leaves(self, plan: Plan, key: object) -> int:
        return sum(self.calls[key].items[i] for i in plan.offload[key])  # type: ignore[index]


def placements(timeline: Timeline) -> Iterator[Plan]:
    """Every way to place whole regions."""
    for choice in product("kro", repeat=len(timeline.calls)):
        again = frozenset(c.key[0] for c, q in zip(timeline.calls, choice, strict=True) if q == "r")
        offload = {i: frozenset(range(len(timeline.calls[i].items))) for i, q in enumerate(choice) if q == "o"}
        leaving = sum(sum(timeline.calls[i].items) for i in offload)
        for share in WINDOWS if leaving else (None,):
            window = None if share is None else int(leaving / share) if share else 0
            yield simulate(timeline, Assignment(offload, again), window)


def begin(timeline: Timeline, budget: int) -> Trials:
    paths = frozenset(c.key[0] for c in timeline.calls)
    return Trials(timeline, paths, paths, budget, under_budget(timeline, paths, budget, paths, 0.02))


def settle(trials: Trials, machine: Machine) -> Trials:
    while not trials.over:
        machine.run(trials)
        assert trials.steps <= MOST
    return trials


def random_machine(chance: random.Random, timeline: Timeline) -> Machine:
    keep = simulate(timeline, Assignment()).peak_bytes
    return Machine(
        timeline,
        again=chance.uniform(0.6, 1.5),
        link=chance.uniform(0.9, 2.0),
        work=chance.uniform(0.8, 1.0),
        apart=int(keep * chance.choice([0, 0.003, 0.01])),
        off=int(keep * chance.choice([-0.04, 0.0, 0.02])),
        noise=0.002,
    )


def contests(seed: int) -> Iterator[tuple[Trials, Machine, int, list[tuple[float, int]]]]:
    """Trials that are over, the machine, the budget, and (seconds, peak) of all placements; six budgets."""
    chance = random.Random(seed)
    timeline = timeline_of(chance, 4)
    machine = random_machine(chance, timeline)
    every = [(machine.seconds(plan), machine.peak(plan)) for plan in placements(timeline)]
    low, high = min(peak for _, peak in every), machine.peak(simulate(timeline, Assignment()))
    for k in range(6):
        budget = low + (high - low) * (2 * k + 1) // 12
        with suppress(BudgetError):
            yield settle(begin(timeline, budget), machine), machine, budget, every


@pytest.mark.parametrize("seed", first(2, range(8)))
def test_what_stays_is_within_the_budget_and_near_the_best_of_all_placements(seed: int) -> None:
    """Where a plan's peak is off by up to 1 % of its own, and the best placement is within what is left over for that, it may be
    missed: the best is taken of those that leave it free."""
    for trials, machine, budget, every in contests(seed):
        assert machine.peak(trials.plan) <= budget
        safe = [seconds for seconds, peak in every if peak + machine.apart <= 0.997 * budget]
        assert not safe or machine.seconds(trials.plan) <= 1.02 * min(safe)


@pytest.mark.parametrize("off", [0.02, 0.05, 0.10])
def test_a_peak_over_the_budget_is_corrected(off: float) -> None:
    """Every plan takes more than it says, by a part of what keeping everything takes."""
    timeline = timeline_of(random.Random(3), 4)
    keep = simulate(timeline, Assignment()).peak_bytes
    machine = Machine(timeline, off=int(off * keep))
    trials = begin(timeline, int(0.9 * keep))
    if off > 0.02:
        assert machine.peak(trials.plan) > 0.9 * keep, "the first plan must be over"
    settle(trials, machine)
    assert machine.peak(trials.plan) <= 0.9 * keep


def test_room_that_a_peak_leaves_is_used() -> None:
    """A plan takes 15 % of the budget less than it says; the same budget, where plans say the truth, is 15 % more."""
    timeline = timeline_of(random.Random(2), 6)
    paths = frozenset(c.key[0] for c in timeline.calls)
    budget = int(0.6 * simulate(timeline, Assignment()).peak_bytes)
    machine = Machine(timeline, off=-int(0.15 * budget))
    trials = begin(timeline, budget)
    first = machine.seconds(trials.plan)
    settle(trials, machine)
    roomy = under_budget(timeline, paths, int(1.147 * budget), paths)
    assert machine.seconds(roomy) < first, "more room must be of use"
    assert machine.seconds(trials.plan) <= 1.002 * machine.seconds(roomy) and machine.peak(trials.plan) <= budget


def test_nothing_within_the_budget_is_the_least_over_it() -> None:
    timeline = timeline_of(random.Random(5), 4)
    keep = simulate(timeline, Assignment()).peak_bytes
    machine = Machine(timeline, off=2 * keep)
    trials = settle(begin(timeline, int(0.9 * keep)), machine)
    assert len(trials.tried) > 1 and machine.peak(trials.plan) == min(t.peak_bytes for t in trials.tried) > keep
    assert trials.plan.peak_bytes <= min(plan.peak_bytes for plan in placements(timeline))


def test_a_plan_over_the_budget_is_never_kept_if_one_was_within_it() -> None:
    """The slower of the plans are within: those that take less than the first one says they do."""
    timeline = timeline_of(random.Random(6), 4)
    budget = int(0.8 * simulate(timeline, Assignment()).peak_bytes)
    trials, first = begin(timeline, budget), None
    while not trials.over:
        first = first or trials.plan
        within = trials.plan is not first
        trials.told(lambda slow=within: 100.0 if slow else 1.0, budget if within else budget + 1)  # type: ignore[misc]
    assert trials.plan is not first


def test_a_first_plan_that_costs_nothing_is_not_tried_against_others() -> None:
    timeline = timeline_of(random.Random(7), 4)
    trials = begin(timeline, 1 << 50)
    for _ in range(4):
        assert not trials.over
        trials.told(lambda: 1.0, 5)
    assert trials.over and not trials.plan.planned_bytes and len(trials.tried) == 1


def test_the_first_cycle_of_a_plan_does_not_count() -> None:
    timeline = timeline_of(random.Random(8), 4)
    trials = begin(timeline, 1 << 50)
    trials.told(lambda: 0.5, 1 << 60)
    for ms in (3.0, 2.0, 4.0):
        trials.told(lambda ms=ms: ms, 5)  # type: ignore[misc]
    assert (trials.tried[0].milliseconds, trials.tried[0].peak_bytes) == (2.0, 5)


def test_cycles_that_are_no_measure_end_it_too() -> None:
    timeline = timeline_of(random.Random(9), 4)
    trials = begin(timeline, int(0.7 * simulate(timeline, Assignment()).peak_bytes))
    first = trials.plan
    for _ in range(MOST):
        assert not trials.over and trials.plan is first
        trials.skipped()
    assert trials.over and trials.plan is first


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_within_the_budget_and_no_bit_differs() -> None:
    """Blocks of matrix products, half of what keeping them takes."""
    device, width, rows = torch.device("cuda"), 2048, 8192

    def network() -> nn.Module:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(6))
        return nn.Sequential(*layers).to(device)

    def step(model: nn.Module) -> list[torch.Tensor]:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # before and behind a step alike: the base does not change
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        model(x).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated() - base)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    peaks: list[int] = []
    x = torch.randn(rows, width, device=device, generator=torch.Generator(device=device).manual_seed(1))
    model = network()
    step(model)
    truth = step(model)
    budget = int(0.6 * peaks[-1])
    with manage(model, policy="auto", budget=budget) as mem:
        for _ in range(MOST + 8):
            found = step(model)
            assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
            if mem.settled:
                break
        assert mem.settled and mem.trials
        step(model)
        assert peaks[-1] <= budget
        assert mem.plan is not None and any(trial.plan is mem.plan for trial in mem.trials)
