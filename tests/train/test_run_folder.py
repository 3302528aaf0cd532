"""Which folder a run takes: another one than every other run, whether that is over, killed or starting at the same time."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.config import Config
from forebay.errors import RunError, UsageError
from forebay.train.durable import LOCK, FolderLock, holder
from forebay.train.loop import train
from forebay.train.run_folder import claim_start, where_to_start
from forebay.train.trainer import Trainer
from tests.train.common import quiet


def test_a_new_run_never_writes_into_an_old_ones_folder(tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny(train={"steps": 1})
    assert [train(config, quiet()).name for _ in range(3)] == ["run", "run-2", "run-3"]
    assert where_to_start(config, "").resumed == tmp_path / "run-3" / "checkpoints" / "step-00000001"


def test_resume_without_a_path_skips_runs_without_checkpoint(tiny: Callable[..., Config], tmp_path: Path) -> None:
    train(tiny(train={"steps": 1}), quiet())
    train(tiny(train={"steps": 1}, checkpoint={"last": False}), quiet())
    assert where_to_start(tiny(), "").folder == tmp_path / "run"


def test_nothing_to_resume(tiny: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint to resume; start without --resume"):
        where_to_start(tiny(), "")
    with pytest.raises(UsageError, match="holds no checkpoint; give"):
        where_to_start(tiny(), str(tmp_path))


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
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
        assert not (folder / LOCK).exists()


def test_a_run_that_is_going_on_is_not_resumed(tiny: Callable[..., Config], tmp_path: Path) -> None:
    folder = train(tiny(train={"steps": 1}), quiet())
    with FolderLock() as other:
        assert other.take(folder)
        for resume in ("", str(folder), str(folder / "checkpoints" / "step-00000001")):
            with pytest.raises(UsageError, match=rf"the run {folder} is going on in process {os.getpid()} on .*resume"):
                train(tiny(train={"steps": 2}), quiet(), resume=resume)
    train(tiny(train={"steps": 2}), quiet(), resume="")


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
