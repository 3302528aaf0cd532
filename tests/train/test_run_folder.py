"""Which folder a run takes (another one than every other run, over, killed or starting at the same time), and its files there."""

import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from forebay.config import Config
from forebay.errors import RunError, UsageError
from forebay.pipeline.activity import ActionRecord
from forebay.train import restore
from forebay.train.distributed import Mesh
from forebay.train.durable import LOCK, FolderLock, digest_of, holder
from forebay.train.engines import plan_of
from forebay.train.loop import train
from forebay.train.run_folder import RESULT, claim_start, watch_step, where_to_resume, write_result, write_timeline
from forebay.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.common import WIDE, config, local, metrics, quiet, write_text

PIPELINE = {**WIDE, "num_hidden_layers": 5}
RAN = [ActionRecord(0, "F", "0F0", 1.0, 2.0, 0), ActionRecord(1, "F", "1F0", 2.0, 3.0, 0)]


def test_a_new_run_never_writes_into_an_old_ones_folder(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """Nor into that of a run that was stopped. To resume without a path skips runs without a checkpoint."""
    config = tiny(train={"steps": 1})
    assert [train(config, quiet()).name for _ in range(2)] == ["run", "run-2"]
    third = train(tiny(train={"steps": 1}, checkpoint={"last": False}), quiet())
    (third / RESULT).unlink()
    assert (third.name, train(config, quiet()).name) == ("run-3", "run-4")
    shutil.rmtree(tmp_path / "run-4" / "checkpoints")
    assert where_to_resume(config, "").resumed == tmp_path / "run-2" / "checkpoints" / "step-00000001"


def test_nothing_to_resume(tiny: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint to resume; start without --resume"):
        where_to_resume(tiny(), "")
    with pytest.raises(UsageError, match="holds no checkpoint; give"):
        where_to_resume(tiny(), str(tmp_path))


def test_a_copy_of_a_checkpoint_begins_a_run_of_its_own(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written beside the copy. A path within a run's folder is of that run, from wherever it is given."""
    run = train(tiny(train={"steps": 1}), quiet())
    copy = Path(shutil.copytree(run / "checkpoints" / "step-00000001", tmp_path / "kept" / "here" / "step-00000001"))
    before = sorted(tmp_path.rglob("kept/**"))
    assert train(tiny(train={"steps": 2}), quiet(), str(copy)) == tmp_path / "run-2"
    assert sorted(tmp_path.rglob("kept/**")) == before and [m["step"] for m in metrics(tmp_path / "run-2")] == [2]
    monkeypatch.chdir(run / "checkpoints")
    for given in (".", "step-00000001", "../../run"):
        assert where_to_resume(tiny(), given).folder == run
    assert train(tiny(train={"steps": 2}), quiet(), "step-00000001") == run


def test_two_runs_at_once_have_two_folders(tiny: Callable[..., Config], tmp_path: Path, monkeypatch: Any) -> None:
    """The second starts before the first has written anything: in the place of its trainer."""
    config = tiny(train={"steps": 1})
    build = Trainer._build
    second: list[Path] = []

    def nested(self: Trainer, *arguments: Any) -> None:
        if not second:
            second.append(Path())
            second[0] = train(config, quiet())
        build(self, *arguments)

    monkeypatch.setattr(Trainer, "_build", nested)
    first = train(config, quiet())
    assert (first.name, second[0].name) == ("run", "run-2")
    for folder in (first, second[0]):
        assert len(metrics(folder)) == 1
        assert not (folder / LOCK).exists()


def test_a_run_that_is_going_on_is_not_resumed(tiny: Callable[..., Config], tmp_path: Path) -> None:
    folder = train(tiny(train={"steps": 1}), quiet())
    with FolderLock() as other:
        assert other.take(folder)
        for resume in ("", "auto", str(folder), str(folder / "checkpoints" / "step-00000001")):
            with pytest.raises(UsageError, match=rf"the run {folder} is going on in process {os.getpid()} on .*resume"):
                train(tiny(train={"steps": 2}), quiet(), resume=resume)
    train(tiny(train={"steps": 2}), quiet(), resume="")


def test_auto_starts_or_resumes_and_passes_over_damage(tiny: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with FolderLock() as other:  # of this run in another job, which has no checkpoint yet
        assert other.take(tmp_path / "run")
        with pytest.raises(UsageError, match="is going on"):
            train(tiny(), quiet(), resume="auto")
    config = tiny(train={"steps": 3}, checkpoint={"every": 1})
    folder = train(config, quiet(), resume="auto")
    assert folder == tmp_path / "run" and len(whole := metrics(folder)) == 3
    damaged = folder / "checkpoints" / "step-00000003" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    out = io.StringIO()
    assert train(config, Console(file=out, width=200), resume="auto") == folder
    said, before = " ".join(out.getvalue().split()), folder / "checkpoints" / "step-00000002"
    assert "step-00000003 is damaged" in said and f"resume from an earlier one: --resume {before}" in said
    assert f"resumed after step 2 from {before}" in said
    again = metrics(folder)
    assert [r["cross_entropy_loss"] for r in again] == [r["cross_entropy_loss"] for r in whole]


def test_auto_passes_over_what_cannot_be_read(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(train={"steps": 2}, checkpoint={"every": 1})
    train(config, quiet())

    def digest(file: Path) -> str:
        if file.match("step-00000002/*.distcp"):
            raise OSError(errno.EIO, "Input/output error", str(file))  # a bad block of the disk
        return digest_of(file)

    monkeypatch.setattr(restore, "digest_of", digest)
    out = io.StringIO()
    train(config, Console(file=out, width=200), resume="auto")
    said = " ".join(out.getvalue().split())
    assert "step-00000002 is damaged: __0_0.distcp cannot be read: Input/output error" in said
    assert "resumed after step 1" in said


def test_auto_starts_again_where_a_run_was_stopped_before_its_first_checkpoint(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    config = tiny(train={"steps": 2}, checkpoint={"last": False})
    for name in ("run", "run-2"):
        assert train(config, quiet(), resume="auto").name == name, "the one before came to its end"
    (tmp_path / "run-2" / RESULT).unlink()  # as a run that was killed
    assert train(config, quiet(), resume="auto").name == "run-2"
    assert [line["step"] for line in metrics(tmp_path / "run-2")] == [1, 2]
    (tmp_path / "run-2" / RESULT).unlink()
    assert train(tiny(train={"steps": 1}), quiet(), resume="auto").name == "run-3", (
        "another configuration is another run"
    )


def test_what_a_killed_run_left_is_taken_again(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """The kernel drops its lock; its file may stay."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).write_text("process 1 on elsewhere\n")
    with FolderLock() as lock:
        assert claim_start(tiny(), None, lock).folder == tmp_path / "run"
        assert str(os.getpid()) in holder(tmp_path / "run")
        with FolderLock() as second:
            assert claim_start(tiny(), None, second).folder == tmp_path / "run-2"
    assert not (tmp_path / "run").exists() and not (tmp_path / "run-2").exists(), "nothing was written there"


def test_a_run_folder_that_cannot_be_written(tiny: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"run's folder .* cannot be written: Not a directory; set log\.folder"):
        train(tiny(log={"folder": str(tmp_path / "file" / "run")}), quiet())
    folder = train(tiny(train={"steps": 1}), quiet())
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"run's folder .* cannot be written: Is a directory"):
        train(tiny(train={"steps": 2}), quiet(), resume="")


def test_of_one_process(tiny: Callable[..., Config]) -> None:
    config = tiny(
        train={"steps": 2},
        memory={"policy": {"model.layers.0.*attn": "recompute"}},
        log={"profile": True, "tensorboard": True},
    )
    with Trainer(config) as trainer:
        parameters = list(trainer.model.parameters())
        profile = trainer.memory.profile(trainer.forward)
    folder = train(config, quiet())
    (rank,) = json.loads((folder / "result.json").read_text())["ranks"]
    elements = sum(p.numel() for p in parameters)
    assert rank["parameter_bytes"] == 4 * elements
    assert rank["optimizer_bytes"] == 8 * elements + 4 * len(parameters)  # two moments, and a step's number each
    assert rank["placements"]["model.layers.0.self_attn"] == "recompute"
    assert json.loads((folder / "profile.json").read_text()) == json.loads(profile.to_json())
    machine = json.loads((folder / "run.json").read_text())["machine"]
    assert machine == {"processes": 1, "device": "CPU", "device_bytes": None}
    steps = metrics(folder)
    assert all(step["peak_bytes_by_rank"] == [step["peak_bytes"]] for step in steps)
    assert not any("reserved_bytes_by_rank" in step for step in steps)  # a CPU has no caching allocator


def test_a_resumed_run_does_not_show_what_it_was(tiny: Callable[..., Config]) -> None:
    folder = train(tiny(train={"steps": 2}, checkpoint={"every": 1}), quiet())
    assert (folder / "result.json").is_file() and not (folder / "profile.json").exists()
    with mock.patch.object(Trainer, "step", side_effect=ArithmeticError), pytest.raises(ArithmeticError):
        train(tiny(train={"steps": 2}), quiet(), resume=str(folder / "checkpoints" / "step-00000001"))
    assert not (folder / "result.json").exists()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"gone.*result\.json cannot be written: No such file.*the run itself is done"):
        write_result(tmp_path / "gone" / "result.json", "{}")


def runs(rank: int, world: int, folder: str) -> tuple[str, str, list[str], tuple[int, int]]:
    """Output of two runs; actions of this rank's plan; bytes and number of its parameters."""
    printed = []
    changes = {
        "train": {"batch": 16, "microbatch": 1, "steps": 3},
        "checkpoint": {"last": False},
        "parallel": {"pp": 2},
    }
    for timeline in (2, 3):
        out = io.StringIO()
        settings = config(folder, PIPELINE, log={"timeline": timeline, "profile": timeline == 2}, **changes)
        train(settings, Console(file=out, width=200))
        printed.append(out.getvalue())
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        own = [local(p) for p in trainer.model.parameters()]
        plan = [str(a) for a in plan_of(settings, mesh).actions[mesh.pp_rank]]
        return printed[0], printed[1], plan, (sum(p.nbytes for p in own), len(own))


def test_of_a_pipeline(tmp_path: Path) -> None:
    """On 2 x 2 processes: those of the first pipeline are shown."""
    by_rank = run_ranks(runs, 4, write_text(tmp_path))
    first, second, *_ = by_rank[0]
    shown = {0: by_rank[0], 1: by_rank[2]}
    for folder, step, printed in ((tmp_path / "run", 2, first), (tmp_path / "run-2", 3, second)):
        events = json.loads((folder / "pipeline.json").read_text())["traceEvents"]
        for rank, (_, _, plan, _) in shown.items():
            assert [e["name"] for e in events if e["ph"] == "X" and e["pid"] == rank] == plan
        assert {e["pid"] for e in events} == {0, 1}
        (line,) = [line for line in printed.splitlines() if line.startswith("timeline of")]
        assert line.startswith(f"timeline of dualpipev, step {step}: ") and str(folder / "pipeline.json") in line
        assert " of rank 0, " in line and " of rank 1" in line
        assert printed.index(f"step {step:08d}/00000003") < printed.index(line)
        steps = metrics(folder)
        assert len(steps) == 3
        assert all(len(s["peak_bytes_by_rank"]) == 2 and max(s["peak_bytes_by_rank"]) == s["peak_bytes"] for s in steps)
    assert not any(text for printed in by_rank[1:] for text in printed[:2])
    ranks = json.loads((tmp_path / "run" / "result.json").read_text())["ranks"]
    assert [r["rank"] for r in ranks] == [0, 1]
    for found, (*_, (size, count)) in zip(ranks, shown.values(), strict=True):
        assert found["parameter_bytes"] == size and found["optimizer_bytes"] == 2 * size + 4 * count
    layers = [{path.split(".")[2] for path in r["placements"]} for r in ranks]
    assert layers[0].isdisjoint(layers[1]) and len(layers[0] | layers[1]) == 5
    profiles = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert [p["rank"] for p in profiles] == [0, 1] and all(p["peak_bytes"] > 0 for p in profiles)


def test_a_timeline_of_no_pipeline_or_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be written into .*gone: No such file.*log\.timeline"):
        write_timeline(RAN, tmp_path / "gone", "a step")
    trainer: Any = SimpleNamespace(mesh=None, pipeline=None)
    with pytest.raises(UsageError, match=r"parallel\.pp is 1: there is no pipeline whose timeline"):
        watch_step(trainer, lambda: None)


def test_the_line_of_a_timeline(tmp_path: Path) -> None:
    trace = tmp_path / "pipeline.json"
    line = f"timeline of a step: {trace}, which forebay report {tmp_path} draws; idle 50.0% of rank 0, 50.0% of rank 1"
    assert write_timeline(RAN, tmp_path, "a step") == line
    assert trace.is_file()
