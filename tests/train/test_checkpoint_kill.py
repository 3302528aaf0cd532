"""Kill -9 at random moments of a run that always saves in the background: nothing is lost, and no process hangs.

A life of the run ends when one of its processes is killed: in most lives after some steps, in some while it starts. The newest
checkpoint is whole then, and no older than the last one that the run took for written. All lives together leave the losses
of a run that was never killed.
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from forebay.cli import main
from forebay.errors import PeerLost, UsageError
from forebay.train import distributed, loop, restore
from forebay.train.checkpoint import Checkpoints
from forebay.train.heartbeat import Heartbeat
from tests.products import cover
from tests.ranks import start_ranks
from tests.train.common import Job, config, config_file, losses, train_command, write_text

TIMEOUT = 30  # parallel.timeout: the others end within this many seconds
LATE = 1.5  # times TIMEOUT, for others that start: theirs begins when they look for each other, which a busy machine delays


def run(command: list[str], noted: str) -> int:
    """The command line, which notes each checkpoint that the run takes for written."""
    wait = Checkpoints.wait

    def noting(self: Checkpoints) -> Any:
        saved = wait(self)
        if saved is not None and os.environ.get("RANK", "0") == "0":
            with open(noted, "a") as stream:
                stream.write(f"{saved.path.name}\n")
        return saved

    Checkpoints.wait = noting  # type: ignore[method-assign]  # this process ends with the run
    return main(command)


class Run(Job):
    """A run that saves after each step, and its lives."""

    def __init__(self, folder: Path, processes: int) -> None:
        sections = {"schedule": {"kind": "constant"}, "checkpoint": {"every": 1}, "train": {"steps": 1_000_000}}
        super().__init__(folder, processes, TIMEOUT, **sections)
        self.noted = folder / "noted"
        self.noted.touch()

    def begin(self, *overrides: str) -> None:
        self.start(run, str(self.noted), overrides=overrides)

    def written(self) -> list[str]:
        return self.noted.read_text().split()

    def live(self, draw: random.Random) -> tuple[bool, float]:
        """One life; returns whether it came to train, and the seconds in which the other processes ended."""
        before, limit = len(self.written()), time.monotonic() + 120
        self.begin()
        # A run that has no checkpoint yet does not go on: the next one begins in another folder.
        if trains := draw.random() < 0.9 or not before:
            while len(self.written()) == before:
                assert time.monotonic() < limit and self.running[0].returncode is None, "the run does not start"
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.3))
        else:
            time.sleep(draw.uniform(0, 2))
        victim = draw.choice(self.running)
        victim.kill()
        killed = time.monotonic()
        for other in self.running:
            code = other.wait(timeout=TIMEOUT if trains else LATE * TIMEOUT)
            expected = -signal.SIGKILL if other is victim else PeerLost.exit_code
            assert code == expected, other.stderr.read()
        self.running.clear()
        return trains, time.monotonic() - killed

    def check(self) -> None:
        """The newest checkpoint is whole, and no older than the last one noted."""
        noted = self.written()
        try:
            newest = restore.find(self.folder / "run")
        except UsageError:
            assert not noted
            return
        restore.verify(newest)
        assert newest.name >= (noted[-1] if noted else "")

    def finish(self) -> list[tuple[float, ...]]:
        """Losses of all steps, after three more."""
        done = restore.read_about(restore.find(self.folder / "run"))["step"]
        self.begin(f"train.steps={done + 3}")
        for process in self.running:
            _, error = process.communicate(timeout=120)
            assert process.returncode == 0, error
        names = {entry.name for entry in (self.folder / "run" / "checkpoints").iterdir()}
        assert names == {f"step-{done + 2:08d}", f"step-{done + 3:08d}"}
        return losses(self.folder / "run")


def survive(folder: Path, processes: int, kills: int, seed: int) -> None:
    draw, lives = random.Random(seed), Run(folder, processes)
    try:
        ends: dict[bool, list[float]] = {True: [0.0], False: [0.0]}
        for _ in range(kills):
            trained, seconds = lives.live(draw)
            ends[trained].append(seconds)
            lives.check()
        found = lives.finish()
        saved, steps = len(lives.written()), len(found)
        print(
            f"{processes} processes, {kills} kills: {saved} checkpoints noted, none lost; others ended in "
            f"{max(ends[True]):.1f} s, in {max(ends[False]):.1f} s of {len(ends[False]) - 1} that were killed at the start"
        )
        lives.begin(f"train.steps={steps}", "checkpoint.every=0", f"log.folder={folder}/whole")
        for process in lives.running:
            _, error = process.communicate(timeout=600)  # not `wait`: with many steps, its output fills the pipe
            assert process.returncode == 0, error
        assert losses(folder / "whole") == found
    finally:
        lives.kill()


# Where a process that starts is killed: before it looks for the others, before the process group, before the first collective,
# before its first beat, and before the model is built.
MOMENTS = {
    "alone": (dist, "rendezvous"),
    "met": (dist, "init_process_group"),
    "joined": (distributed, "_check_alike"),
    "grouped": (Heartbeat, "__enter__"),
    "building": (loop, "Trainer"),
}


def run_or_die(command: list[str], victim: int, moment: str) -> int:
    def die(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)  # the other process waits by now
        os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == victim:
        setattr(*MOMENTS[moment], die)
    return main(command)


@pytest.mark.parametrize(("moment", "victim"), cover(list(MOMENTS), [0, 1]))
def test_killed_while_starting(tmp_path: Path, moment: str, victim: int) -> None:
    settings = config(write_text(tmp_path), parallel={"ep": 2, "timeout": (timeout := 5)})
    processes = start_ranks(run_or_die, 2, train_command(config_file(tmp_path, settings)), victim, moment)
    try:
        assert processes[victim].wait(timeout=60) == -signal.SIGKILL
        died = time.monotonic()
        _, error = processes[1 - victim].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
    assert processes[1 - victim].returncode == PeerLost.exit_code, error
    reasons = ["could not find each other"] if moment in ("alone", "met", "joined") else [f"process {victim} "]
    if victim == 0:  # it held the store, and may have died before its beat was read
        reasons.append("the process that the others found each other through is gone")
    assert any(reason in error for reason in reasons), error
    assert error.count("forebay: ") == 1 and "Traceback" not in error
    assert time.monotonic() - died < LATE * timeout + 5, "a busy machine takes a few seconds to start both"


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_two_moments(tmp_path: Path, processes: int) -> None:
    survive(tmp_path, processes, 2, seed=random.randrange(1 << 30))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_a_hundred_moments(tmp_path: Path, processes: int) -> None:
    survive(tmp_path, processes, 100, seed=processes)
