"""The planner's benchmark, on a CPU: measured with real processes and gloo, compared with made-up measurements."""

import json
import os
import runpy
import sys
import tarfile
from pathlib import Path

import pytest

from tests.ranks import start

ROOT = Path(__file__).parents[2]


def planner(words: tuple[str, ...]) -> None:
    script = ROOT / "benchmarks" / "planner.py"
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *words]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    runpy.run_path(str(script), run_name="__main__")


def run(tmp_path: Path, *words: str) -> str:
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    process = start(planner, words, PYTHONPATH=paths, FOREBAY_RESULTS=str(tmp_path / "results"), OMP_NUM_THREADS="1")
    try:
        out, error = process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, out + error
    return out


def rows_of(path: Path) -> dict[str, dict]:
    return {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
def test_one_and_two_processes_are_measured_and_a_failure_ends_nothing_else(tmp_path):
    run(tmp_path, "measure", "--tiny", "--out", str(tmp_path), "--name", "m", "--seconds", "150")
    rows = rows_of(tmp_path / "m.jsonl")
    assert len(rows) == 5
    wrong = rows.pop("1g-tiny-2L-128x1-keep-wrong")
    assert "parallel.ep = 3 needs 3 processes" in wrong["error"] and not wrong["oom"]
    for row in rows.values():
        assert "error" not in row, row
        assert len(row["ranks"]) == row["gpus"]
        assert all(len(rank["seconds"]) == 7 and rank["settled"] >= 2 for rank in row["ranks"])
    shared = rows["2g-tiny-2L-64x1-keep-ep"]["ranks"]
    assert shared[0]["skew"][1] == pytest.approx(1.5, rel=0.1)  # 128 tokens are drawn a layer
    assert rows["1g-tiny-2L-64x1-offload.all"]["ranks"][0]["moved_bytes"] > 0
    assert rows["1g-tiny-2L-64x1-keep"]["ranks"][0]["moved_bytes"] == 0
    assert [rank["pp_rank"] for rank in rows["2g-tiny-2L-64x1-keep-1f1b"]["ranks"]] == [0, 1]
    with tarfile.open(tmp_path / "m.tar.gz") as archive:
        assert [name for name in archive.getnames() if name.endswith(".log")]


@pytest.mark.slow
def test_what_takes_too_long_is_ended_and_said(tmp_path):
    only = ("--only", "2g-tiny-2L-64x1-keep-1f1b", "--seconds", "0.01")
    run(tmp_path, "measure", "--tiny", "--out", str(tmp_path), "--name", "m", *only)
    (row,) = rows_of(tmp_path / "m.jsonl").values()
    assert "took longer than" in row["error"]


def test_errors_are_planned_less_measured_over_measured(tmp_path):
    rank = {"life_allocated": 1 << 30, "life_reserved": 1 << 31, "outside": 1 << 29, "seconds": [1.0, 3.0, 2.0]}
    row = {"name": "1g-tiny-2L-64x1-keep", "gpus": 1, "ranks": [rank]}
    measured, limits = tmp_path / "m.jsonl", tmp_path / "limits.json"
    failed = {"name": "1g-tiny-2L-64x1-offload.all", "gpus": 1, "ranks": [None], "error": "took longer", "oom": False}
    measured.write_text(json.dumps(failed) + "\n" + json.dumps(row) + "\n")
    ran = tmp_path / "tight.jsonl"
    ran.write_text(json.dumps({**row, "limit": 1 << 30, "error": "out of memory", "oom": True}) + "\n")
    files = ["--measured", str(measured), "--tight", str(limits), "--ran-tight", str(ran)]
    out = run(tmp_path, "compare", "--tiny", *files)
    assert "not measured: 1g-tiny-2L-64x1-offload.all: took longer" in out
    found = json.loads((tmp_path / "results" / "planner.json").read_text())
    (line,) = found["rows"]
    plan = line["allocated planned"] * (1 << 30)
    assert 0 < plan < 1 << 30
    assert line["allocated measured"] == 1.0 and line["reserved measured"] == 2.0
    assert line["allocated %"] == pytest.approx(100 * (plan / (1 << 30) - 1))
    assert line["step s measured"] == 2.0
    assert json.loads(limits.read_text()) == {row["name"]: round(line["reserved planned"] * (1 << 30))}
    assert [(v["says"], v["ran"], v["wrong"]) for v in found["tight"]] == [("fits", "out of memory", "yes")]
