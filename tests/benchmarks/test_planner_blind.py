"""The estimator's blind test, on a CPU: draws, and the table of made-up measurements."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.estimate.fit import OFFLOAD_ERROR, least_budget

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("FOREBAY_RESULTS", str(tmp_path))
    return importlib.import_module("planner_blind")


def command(blind: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["planner_blind.py", *words])
    blind.main()


def rows_of(runs: list[dict[str, Any]], factor: float) -> list[dict[str, Any]]:
    """Measurements that are `factor` times what is planned."""
    found = []
    for run in runs:
        plan = run["planned"]
        rank = {
            "life_allocated": plan["allocated"] * factor,
            "life_reserved": plan["reserved"] * factor,
            "outside": 1,
            "seconds": [plan["seconds"] * factor] * 3,
            "keys": plan["keys"],
            "is_captured": plan["keys"]["graph"],
        }
        found.append({"name": run["name"], "gpus": run["gpus"], "ranks": [rank] * run["gpus"]})
    return found


def test_the_same_seed_draws_the_same_plans_and_their_errors_are_shown(blind, monkeypatch, tmp_path, capsys):
    file, measured = tmp_path / "planner_blind_7.json", tmp_path / "planner_blind_7_measured.jsonl"
    command(blind, monkeypatch, "draw", "--seed", "7", "--count", "3", "--tiny")
    first = json.loads(file.read_text())
    command(blind, monkeypatch, "draw", "--seed", "7", "--count", "3", "--tiny")
    assert json.loads(file.read_text())["runs"] == first["runs"]
    assert [run["gpus"] for run in first["runs"]] == [1, 1, 2]
    names = [run["name"] for run in first["runs"]]
    capsys.readouterr()

    good, high = rows_of(first["runs"], 1 / 1.01)[0], rows_of(first["runs"], 1.11)[1]  # one that offloads
    failed = {"name": names[2], "gpus": 2, "ranks": [None, None], "error": "CUDA out of memory", "oom": True}
    measured.write_text("".join(json.dumps(row) + "\n" for row in (good, high, failed)))
    command(blind, monkeypatch, "show", str(file))
    out = capsys.readouterr().out
    assert "| 1 |" in out and "| -9.91 |" in out
    wrong = [line for line in out.splitlines() if line.startswith("said to fit")]
    assert [line.split(": ")[1].split()[0] for line in wrong] == [names[1], names[1], names[2]]
    assert f"{least_budget(first['runs'][1]['planned']['reserved'], OFFLOAD_ERROR) / (1 << 30):.3f}" in wrong[0]
    assert "out of memory" in wrong[2]
    assert f"not measured: {names[2]}: CUDA out of memory" in out and "1 of 2 are within 3 %" in out
    command(blind, monkeypatch, "show", str(file), str(file))
    out = capsys.readouterr().out
    assert out.count("| 7/00 |") == out.count("| 7/01 |") == 2 and "2 of 4 are within 3 %" in out

    command(blind, monkeypatch, "draw", "--seed", "7", "--count", "3", "--tiny", "--mesh", "one")
    assert [run["gpus"] for run in json.loads(file.read_text())["runs"]] == [1, 1, 1]


def test_usual_draws_leave_the_fast_path_to_plan_and_run(blind):
    draws = {
        usual: blind.Draw(blind.random.Random("7007 1 0"), blind.GPU, "", "1f1b", usual) for usual in (True, False)
    }
    usual, other = (source.entry(1) for source in draws.values())
    config = blind.config_of(usual)
    assert {config.memory.graph, config.parallel.overlap, config.parallel.reshard} == {"auto"}
    assert not blind.fast_path_of(blind.config_of(other), 1).reasons  # nothing is left to choose
    keys = {"graph": True, "overlap": False, "reshard": False, "capacity_factor": 0.0}
    planned = blind.as_planned(usual, {"keys": keys})
    assert planned.sections["parallel"] == {"timeout": 60, **{k: v for k, v in keys.items() if k != "graph"}}
    assert blind.kind_of(planned) == "1 GPU, graph" and "graph" in blind.words_of(planned)
    assert blind.as_planned(other, {"keys": keys}) == other


def test_runs_that_are_not_what_was_planned_are_named(blind):
    keys = {"graph": True, "overlap": False, "reshard": False, "capacity_factor": 0.0}
    by_host = {**keys, "graph": False, "reshard": True}
    ranks = [
        {"outside": 1, "keys": found, "is_captured": is_captured, "graph": "why"}
        for found, is_captured in ((keys, True), (keys, False), (by_host, False))
    ]
    rows = [{"name": name, "ranks": [rank]} for name, rank in zip("abc", ranks, strict=True)]
    assert blind.otherwise({name: {"keys": keys} for name in "abc"}, rows) == [
        "b: why",
        f"c: {by_host}, planned {keys}",
    ]
    assert not blind.otherwise({name: {} for name in "abc"}, rows)  # draws of old


def test_only_what_has_no_result_runs(blind, monkeypatch, tmp_path):
    file, measured = tmp_path / "planner_blind_7.json", tmp_path / "planner_blind_7_measured.jsonl"
    sections = {"memory": {}, "parallel": {}}
    runs = [{"name": name, "gpus": 1, "sections": sections, "skew": None, "trace": False} for name in "abcd"]
    file.write_text(json.dumps({"runs": runs}))
    rows = [{"name": "a"}, {"name": "b", "error": "CUDA out of memory"}, {"name": "c", "error": blind.NO_TIME}]
    measured.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: list[str] = []
    monkeypatch.setattr(blind, "measure", lambda entries, *_, **__: asked.extend(e.name for e in entries))
    command(blind, monkeypatch, "run", str(file), "--jobs", "1")
    assert asked == ["c", "d"]
