"""The benchmark of `auto`: what it compares, on figures made up here; and that a model takes each of its policies."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.memory.autotune import Trials
from forebay.memory.timeline import Assignment, CallFigures, Timeline, TimelineEvent, simulate
from forebay.policy import BudgetError
from tests.models.conftest import VOCABULARY, build_tiny


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("auto")


def made_up(auto: Any) -> Any:
    """Offloading costs 1 ms a region and frees 3 bytes, recomputing 2 ms and 2 bytes; auto takes 1 % more than the best."""

    def figure(arm: Any) -> Any:
        if arm.policy == "auto":
            if arm.budget < 3:
                raise BudgetError("too little")
            return auto.Figure(1.01 * (10 + -(-(12 - arm.budget) // 3)), arm.budget)
        letters = arm.name.split()[0]
        away, again = letters.count("o"), letters.count("r")
        return auto.Figure(10.0 + away + 2 * again, 12 - 3 * away - 2 * again)

    return figure


def test_every_policy_is_an_arm(auto: Any) -> None:
    arms = list(auto.arms(["a", "b", "c", "d"]))
    assert len({tuple(a.policy.items()) for a in arms}) == 81
    assert len(arms) == len(set(a.name for a in arms)) == 16 + 2 * 65


def test_a_sweep_runs_each_arm_once_and_stops_in_time(auto: Any) -> None:
    every = [auto.Arm(str(n), str(n)) for n in range(146)]
    ran: list[Any] = []

    def run(arm: Any) -> Any:
        ran.append(arm)
        return auto.Figure(1.0, 1)

    assert len(auto.sweep(every, run, 60.0)) == len(ran) == 146
    ran.clear()
    assert not auto.sweep(every, run, -1.0) and not ran


def test_auto_is_compared_with_the_best_within_the_budget(auto: Any) -> None:
    run = made_up(auto)
    arms = [a for a in auto.arms(["a", "b", "c", "d"]) if a.offload == "all" or "o" not in a.name]
    figures = {arm: run(arm) for arm in arms}
    assert auto.budgets(figures) == [1, 3, 5, 7, 9, 11]
    autos: list[dict[str, Any]] = []
    row = auto.contest(figures, 6, run, autos)
    assert row["best ms"] == 12.0 and row["best"].count("o") == 2 and row["within"]
    assert row["ratio"] == pytest.approx(1.01)
    assert [(a["budget"], a["round"], a["peak"]) for a in autos] == [(6, n, 6) for n in range(3)]
    assert "error" in auto.contest(figures, 2, run, autos)


def test_what_auto_went_by_is_written_down_whole(auto: Any) -> None:
    calls = tuple(CallFigures((name, 0), (8, 4), 1.0) for name in "ab")
    moments = tuple(TimelineEvent(*event) for event in (("F", 0, 1.0), ("F", 1, 1.0), ("B", 1, 2.0), ("B", 0, 2.0)))
    timeline = Timeline(calls, moments, 100.0, 100.0)
    trials = Trials(timeline, frozenset("ab"), frozenset("ab"), 20, simulate(timeline, Assignment({0: frozenset({0})})))
    while not trials.finished:
        trials.record(lambda: 5.0, 19)
    chosen = [auto.tried(trial, trials.plan) for trial in trials.tried]
    found = json.loads(json.dumps({"timeline": auto.told(timeline), "trials": chosen}))
    again = found["timeline"]
    assert [c["items"] for c in again["calls"]] == [[8, 4], [8, 4]] and again["out_rate"] == 100.0
    assert [(m["kind"], m["call"], m["seconds"]) for m in again["moments"]] == [
        (m.kind, m.call, m.seconds) for m in moments
    ]
    first = found["trials"][0]
    assert first["offload"] == [[["a", 0], [0]]] and first["measured ms"] == 5.0 and first["measured peak"] == 19
    assert [t["stays"] for t in found["trials"]].count(True) == 1
    assert auto.outcome(found["trials"])["tried"] == len(trials.tried)


def test_a_model_takes_every_policy(auto: Any) -> None:
    model = build_tiny("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
    ids = torch.randint(1, VOCABULARY, (1, 8))
    losses = set()
    arms = list(auto.arms(auto.regions(model)))
    for arm in (*arms, auto.Arm("auto", "auto", budget=1 << 30)):
        with forebay.manage(model, policy=arm.policy, budget=arm.budget, offload=arm.offload) as mem:
            for _ in range(3):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            losses.add(loss.item())
            if isinstance(arm.policy, dict):
                for path, placement in arm.policy.items():  # the last region is needed again at once: "fit" keeps it
                    assert mem.placements[path] in (placement, "keep" if arm.offload == "fit" else placement)
    assert len(arms) == 4 + 2 * 5 and len(losses) == 1
