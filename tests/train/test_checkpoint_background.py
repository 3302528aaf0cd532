"""Saves in the background hold the state of the step that began them, one at a time, and a failed one reaches all processes."""

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from forebay.cli import main
from forebay.config import Config
from forebay.errors import Interrupted, Preempted
from forebay.train import checkpoint, restore, staging
from forebay.train.checkpoint import Checkpoints, SavedCheckpoint
from forebay.train.distributed import ALONE, Mesh
from forebay.train.trainer import Trainer
from tests.ranks import on_processes, run_ranks
from tests.train.common import config, config_file, differing, pair, state_of, train_command, write_text


class Gate:
    """Holds the thread of a save until it is opened, before it writes tensors."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.entered, self._open = threading.Event(), threading.Event()
        write = dcp.FileSystemWriter.write_data

        def gated(*arguments: Any) -> Any:
            self.entered.set()
            assert self._open.wait(60)
            return write(*arguments)

        patch.setattr(dcp.FileSystemWriter, "write_data", gated)

    def open(self) -> None:
        self._open.set()


def saved_while_training(world: int, settings: Config) -> list[str]:
    """What differs between the state at the start of a save and its checkpoint, when two steps ran meanwhile; twice."""
    differ = []
    with Mesh.open(settings, ALONE if world == 1 else None) as mesh, Trainer(settings, mesh) as trainer:
        store = Checkpoints(Path(settings.log.folder) / "checkpoints", keep=1)
        for first in (1, 4):
            trainer.step(first)
            before, draws = state_of(trainer), torch.get_rng_state()
            with pytest.MonkeyPatch.context() as patch:
                gate = Gate(patch)
                assert store.start(first, trainer.model, trainer.optimizer, {}, background=True)
                trainer.step(first + 1)
                trainer.step(first + 2)
                torch.rand(3)
                assert store.is_writing and not store.has_failed
                gate.open()
                saved = store.wait()
            assert isinstance(saved, SavedCheckpoint) and not store.under_way and saved.path.name == f"step-{first:08d}"
            assert len(differing(before, state_of(trainer))) > 5
            restore.load(saved.path, trainer.model, trainer.optimizer)
            differ += differing(before, state_of(trainer))
            if not torch.equal(draws, torch.get_rng_state()):
                differ.append("random generator")
        assert [path.name for path in store.all()] == ["step-00000004"]
        assert store.close() is None
    return differ


def test_a_checkpoint_is_the_state_at_its_start(tmp_path: Path) -> None:
    assert saved_while_training(1, config(write_text(tmp_path), train={"microbatch": 2})) == []


def saved_by_a_pipeline(rank: int, world: int, folder: str) -> list[str]:
    return saved_while_training(world, config(folder, train={"microbatch": 2}, parallel={"pp": 2, "schedule": "1f1b"}))


def saved_by_experts(rank: int, world: int, folder: str) -> list[str]:
    return saved_while_training(world, config(folder, train={"microbatch": 2}, parallel={"ep": 2}))


@pytest.mark.parametrize("of_rank", [saved_by_experts, saved_by_a_pipeline])
def test_of_two_processes(tmp_path: Path, of_rank: Callable[..., list[str]]) -> None:
    assert run_ranks(of_rank, 2, write_text(tmp_path)) == [[], []]


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Checkpoints(tmp_path)
    assert store.wait() is None and not store.under_way
    gate = Gate(monkeypatch)
    assert store.start(1, *pair(), {}, background=True)
    with pytest.raises(RuntimeError, match="under way"):
        store.start(2, *pair(), {}, background=True)
    gate.open()
    assert store.close() is None and not store.under_way
    assert [path.name for path in store.all()] == ["step-00000001"]


def test_without_room_for_a_copy_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "available_bytes", lambda: 20)
    store = Checkpoints(tmp_path)
    assert not store.start(1, *pair(), {}, background=True)
    assert not store.is_writing and store.under_way
    saved = store.wait()
    assert saved is not None and "no room" in saved.waited
    restore.verify(saved.path)


def without_gloo(rank: int, world: int, folder: str) -> tuple[bool, str]:
    def no_group(**_: Any) -> Any:
        if rank:
            raise RuntimeError("no interface")
        return torch.distributed.group.WORLD

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "new_group", no_group)
        store = Checkpoints(Path(folder))
        started = store.start(1, *pair(), {}, background=True)
        saved = store.wait()
    assert saved is not None
    restore.verify(saved.path)
    return started, saved.waited


def test_without_a_group_for_the_thread_training_waits(tmp_path: Path) -> None:
    waited = "the processes cannot reach each other with gloo as well: no interface"
    assert run_ranks(without_gloo, 2, str(tmp_path)) == [(False, waited)] * 2


def test_available_memory_is_the_containers(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:       2000 kB\nMemAvailable:    1000 kB\n",
        "sys/fs/cgroup/memory.max": "500000\n",
        "sys/fs/cgroup/memory.current": "450000\n",
        "sys/fs/cgroup/memory.stat": "anon 50000\nactive_file 100000\ninactive_file 300000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert staging.available_bytes(tmp_path) == 450_000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert staging.available_bytes(tmp_path) == 1000 << 10
    assert staging.available_bytes() > 0


def run_and(command: list[str], before_digest: Callable[[Path], None]) -> int:
    """The command line, with a call before each file of a save is read again for its digest."""
    digest = checkpoint.digest_of

    def watched(file: Path) -> str:
        before_digest(file)
        return digest(file)

    checkpoint.digest_of = watched
    return main(command)


def fill_the_disk_at_step_4(file: Path) -> None:
    if "step-00000004" in str(file):
        raise OSError(errno.ENOSPC, "No space left on device")


def run_on_a_full_disk(command: list[str]) -> int:
    """On process 1, which asks late whether it is the first to fail: process 0 may end before, and the store with it."""
    first_to_fail = Mesh.first_to_fail
    if os.environ["RANK"] == "0":
        return main(command)
    Mesh.first_to_fail = lambda mesh: (time.sleep(0.5), first_to_fail(mesh))[1]  # type: ignore[method-assign]
    return run_and(command, fill_the_disk_at_step_4)


def test_all_processes_end_at_the_same_step_when_one_cannot_write(tmp_path: Path) -> None:
    settings = config(write_text(tmp_path), train={"steps": 10000}, checkpoint={"every": 2}, parallel={"ep": 2})
    codes, _, error = on_processes(2, run_on_a_full_disk, train_command(config_file(tmp_path, settings)), seconds=60)
    assert codes == [1, 1], error
    assert error.count("forebay:") == 1 == error.count("step-00000004 could not be written: No space left on device")
    assert "step-00000002 is intact" in error
    restore.verify(restore.find(tmp_path / "run"))


def stop_at_step_20(file: Path) -> None:
    """SIGTERM while the checkpoint is written, which then takes two seconds more."""
    if "step-00000020" in str(file) and file.name == "trainer.json":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2)


def test_a_signal_does_not_begin_another_save_after_the_one_under_way(tmp_path: Path) -> None:
    settings = config(write_text(tmp_path), train={"steps": 10000}, checkpoint={"every": 20})
    command = train_command(config_file(tmp_path, settings))
    codes, _, error = on_processes(1, run_and, command, stop_at_step_20, seconds=60)
    assert codes == [Preempted.exit_code], error
    said = r"SIGTERM after step \d+ of 10000; the checkpoint of step 20, written in \S+ s, is safe"
    assert re.search(said, error), error
    newest = restore.find(tmp_path / "run")
    restore.verify(newest)
    assert [path.name for path in newest.parent.glob("step-*")] == ["step-00000020"]


def stop_twice_at_step_4(file: Path) -> None:
    """Ctrl-C twice in a save that takes a minute."""
    if "step-00000004" in str(file):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def test_a_second_ctrl_c_does_not_wait_for_the_save_under_way(tmp_path: Path) -> None:
    settings = config(write_text(tmp_path), train={"steps": 10000}, checkpoint={"every": 2})
    command = train_command(config_file(tmp_path, settings))
    codes, _, error = on_processes(1, run_and, command, stop_twice_at_step_4, seconds=40)
    assert codes == [Interrupted.exit_code], error
    newest = restore.find(tmp_path / "run")
    assert newest.name == "step-00000002"
    restore.verify(newest)
