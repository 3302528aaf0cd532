"""A run that draws one of its steps: the files, whose records they hold, and what is said."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forebay.config import Config, from_mapping
from forebay.errors import RunError, UsageError
from forebay.pipeline.activity import ActionRecord
from forebay.train.run_outputs import watch_step, write_timeline
from tests.ranks import run_ranks
from tests.train.test_pipeline_profile import MODEL

RAN = [ActionRecord(0, "F", "0F0", 1.0, 2.0, 0), ActionRecord(1, "F", "1F0", 2.0, 3.0, 0)]


def config(folder: str, timeline: int) -> Config:
    return from_mapping(
        {
            "model": {"family": "qwen3_moe", "config": MODEL},
            "data": {"source": "text", "path": folder + "/a.txt", "cache": folder + "/cache"},
            "train": {"batch": 16, "microbatch": 1, "sequence": 16, "steps": 3},
            "parallel": {"pp": 2, "dispatch": "nccl"},
            "checkpoint": {"last": False},
            "device": {"type": "cpu", "threads": 1},
            "log": {"folder": folder + "/run", "progress": "off", "timeline": timeline},
        }
    )


def runs(rank: int, world: int, folder: str) -> tuple[str, str, list[str]]:
    """What two runs say, the second without matplotlib; and the actions of this rank's plan."""
    from forebay.train.distributed import Mesh
    from forebay.train.engines import plan_of
    from forebay.train.loop import train

    said = []
    for timeline in (2, 3):
        if timeline == 3:
            sys.modules["matplotlib.figure"] = None  # type: ignore[assignment]
        out = io.StringIO()
        train(config(folder, timeline), Console(file=out, width=200))
        said.append(out.getvalue())
    settings = config(folder, 0)
    with Mesh.open(settings) as mesh:
        return said[0], said[1], [str(a) for a in plan_of(settings, mesh).actions[mesh.pp_rank]]


def test_a_run_writes_the_timeline_of_a_step(tmp_path: Path) -> None:
    """On 2 x 2 processes: those of the first pipeline are shown."""
    (tmp_path / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 400)
    by_rank = run_ranks(runs, 4, str(tmp_path))
    first, second, _ = by_rank[0]
    plans = {0: by_rank[0][2], 1: by_rank[2][2]}
    for folder, step, said in ((tmp_path / "run", 2, first), (tmp_path / "run-2", 3, second)):
        events = json.loads((folder / "pipeline.json").read_text())["traceEvents"]
        for rank, plan in plans.items():
            assert [e["name"] for e in events if e["ph"] == "X" and e["pid"] == rank] == plan
        assert {e["pid"] for e in events} == {0, 1}
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
        (line,) = [line for line in said.splitlines() if line.startswith("timeline of")]
        assert line.startswith(f"timeline of dualpipev, step {step}: ") and str(folder / "pipeline.json") in line
        assert " of rank 0, " in line and " of rank 1" in line
        assert said.index(f"step {step:08d}/00000003") < said.index(line)
    assert "; a picture of the pipeline needs matplotlib, which is not installed" in second
    assert not (tmp_path / "run-2" / "pipeline.png").exists()
    assert not any(text for said in by_rank[1:] for text in said[:2])
    pytest.importorskip("matplotlib")
    assert (tmp_path / "run" / "pipeline.png").read_bytes()[:4] == b"\x89PNG" and "needs matplotlib" not in first


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be written into .*gone: No such file.*log\.timeline"):
        write_timeline(RAN, tmp_path / "gone", "a step")


def test_what_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, trace = tmp_path / "pipeline.png", tmp_path / "pipeline.json"
    assert (
        write_timeline(RAN, tmp_path, "a step")
        == f"timeline of a step: {png}, {trace}; idle 50.0% of rank 0, 50.0% of rank 1"
    )
    assert png.is_file() and trace.is_file()


def test_a_trainer_without_a_pipeline() -> None:
    class Alone:
        mesh, pipeline = None, None

    alone: Any = Alone()
    with pytest.raises(UsageError, match=r"parallel\.pp is 1: there is no pipeline whose timeline"):
        watch_step(alone, lambda: None)
