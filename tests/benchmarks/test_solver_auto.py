"""The benchmark of `forebay plan --auto` runs, and what it says of a few pairs."""

import json
from pathlib import Path

import pytest

from benchmarks import solver_auto


def test_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "auto.json"
    monkeypatch.setattr("sys.argv", ["solver_auto.py", "--pairs", "5", "--seed", "1", "--out", str(out)])
    solver_auto.main()
    summary = json.loads(out.read_text())["summary"]
    assert summary["pairs"] == 5
    assert summary["runs of which all placements were walked"] == 1  # of two layers
    assert summary["infeasible though recomputing everything fits"] == summary["a larger budget costs more"] == 0
    assert summary["worst step time over the best of all"] <= 1.02
