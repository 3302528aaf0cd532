"""Runs that are preempted leave a checkpoint and exit code 75 in time, and one command resumes them bitwise."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.cli import main
from forebay.errors import DoesNotFit, Preempted
from forebay.train import loop, restore
from forebay.train.stop import TimeLimit
from forebay.train.trainer import Trainer
from tests.ranks import Started, start, start_ranks
from tests.train.common import config, config_file, metrics, train_command, write_text

STEPS = 40


@pytest.mark.parametrize("seed", range(20))
def test_a_time_limit_leaves_room_for_a_save(seed: int) -> None:
    draw = random.Random(seed)
    now, limit, slowest_step, slowest_save = 0.0, draw.uniform(500, 2000), draw.uniform(0.1, 20), draw.uniform(0.1, 60)
    watch = TimeLimit(limit, lambda: now)
    now += draw.uniform(0, 100)  # building, compiling and the first step
    steps = 0
    while not watch.is_near:
        now += draw.uniform(slowest_step / 1.4, slowest_step)
        watch.stepped()
        steps += 1
        if is_saved := watch.needs_measured_save or draw.random() < 0.1:
            watch.save_began()
            now += (seconds := draw.uniform(slowest_save / 1.4, slowest_save))
            watch.saved(seconds)
    assert limit - 2.5 * (slowest_step + slowest_save) <= now <= limit - slowest_save * (not is_saved) and steps


@pytest.mark.parametrize("seed", range(20))
def test_a_time_limit_leaves_room_for_a_save_after_the_one_under_way(seed: int) -> None:
    """Saves run beside the steps. After the last step, the one under way ends first and another one follows."""
    draw = random.Random(seed)
    now, limit, slowest_step, slowest_save = 0.0, draw.uniform(500, 2000), draw.uniform(0.1, 20), draw.uniform(0.1, 60)
    watch = TimeLimit(limit, lambda: now)
    now += 1.0
    watch.stepped()
    watch.save_began()
    now += slowest_save
    watch.saved(slowest_save)
    end = seconds = -1.0  # of the save under way
    while True:
        now += draw.uniform(slowest_step / 1.4, slowest_step)
        watch.stepped()
        if 0 <= end <= now:
            watch.saved(seconds)
            end = -1.0
        if watch.is_near:
            now = max(now, end) + slowest_save
            break
        if end < 0 and draw.random() < 0.5:
            watch.save_began()
            seconds = draw.uniform(slowest_save / 1.4, slowest_save)
            end = now + seconds
            if watch.is_near:  # it is the last one
                now = end
                break
    assert limit - 2.5 * 2 * (slowest_step + slowest_save) <= now <= limit


def test_no_limit_is_never_near() -> None:
    now = 0.0
    watch = TimeLimit(clock=lambda: now)
    now = 1e12
    watch.stepped()
    assert not watch.is_near and not watch.needs_measured_save


def run(command: list[str], signals: dict[int, int], pause: float) -> int:
    """The command line, with a signal to this process in the middle of some steps, and a pause in each."""
    step = Trainer.step

    def signalled(self: Trainer, number: int) -> Any:
        time.sleep(pause)
        if number in signals:
            os.kill(os.getpid(), signals[number])
        return step(self, number)

    Trainer.step = signalled  # type: ignore[method-assign]  # this process ends with the run
    return main(command)


class Job:
    """The command that a batch system starts again and again, on `processes` processes."""

    def __init__(self, folder: Path, processes: int) -> None:
        folder.mkdir()
        parallel = {"ep": 2, "timeout": 60} if processes > 1 else {}
        settings = config(write_text(folder), train={"steps": STEPS}, parallel=parallel)
        config_file(folder, settings)
        self.folder, self.processes = folder, processes
        self.running: list[Started] = []

    def start(self, *overrides: str, signals: dict[int, int] | None = None, pause: float = 0.0) -> None:
        command = [*train_command(self.folder / "c.toml", *overrides), "--resume", "auto"]
        given = command, signals or {}, pause
        self.running = start_ranks(run, self.processes, *given) if self.processes > 1 else [start(run, *given)]

    def ended(self) -> tuple[list[Any], str, str]:
        """Exit codes, and what all processes wrote on their two streams."""
        written = [process.communicate(timeout=120) for process in self.running]
        return [p.returncode for p in self.running], "".join(o for o, _ in written), "".join(e for _, e in written)

    def losses(self) -> list[tuple[float, ...]]:
        names = ("step", "cross_entropy_loss", "load_balance_loss", "gradient_norm")
        records = (
            record for record in metrics(self.folder / "run") if "gradient_norm" in record
        )  # not those of health
        return [tuple(record[name] for name in names) for record in records]

    def saved_step(self) -> int:
        newest = restore.find(self.folder / "run")
        restore.verify(newest)
        return int(restore.read_about(newest)["step"])


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for process in (process for job in made for process in job.running):
        process.kill()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_preempted_run_is_resumed_bitwise_by_the_same_command(
    tmp_path: Path, jobs: list[Job], processes: int
) -> None:
    """By each signal in a random step, then by a time limit. All processes leave with one code."""
    whole, job = Job(tmp_path / "whole", processes), Job(tmp_path / "job", processes)
    jobs += [whole, job]
    whole.start()
    assert whole.ended()[0] == [0] * processes
    saved = 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        at = saved + random.randint(1, 9)
        job.start(signals={at: number})
        codes, out, error = job.ended()
        assert codes == [Preempted.exit_code] * processes == [75] * processes, error
        assert (
            error.count(f"stopped by {number.name} after step") == 1 == error.count("forebay:") and "--resume" in error
        )
        assert job.saved_step() == at
        saved = at
    job.start("train.time_limit=1s", pause=0.1)
    codes, out, error = job.ended()
    assert codes == [75] * processes and f"resumed after step {saved}" in out, out + error
    assert f"stopped by train.time_limit = 1s after step {job.saved_step()}" in error
    job.start()
    codes, _, error = job.ended()
    assert codes == [0] * processes, error
    assert job.losses() == whole.losses() and len(whole.losses()) == STEPS
    job.start()
    codes, out, _ = job.ended()
    assert codes == [0] * processes and out.count("nothing is left to do") == 1


def run_with_long_validation(command: list[str]) -> int:
    """Each validation batch takes 0.1 s, and the second one after step 2 gets SIGTERM on the last process."""
    forward, begun = Trainer._microbatches, 0

    def slow(self: Trainer, batch: Any) -> Any:
        nonlocal begun
        if not self.model.training:
            time.sleep(0.1)
            begun += 1
            if begun == 2 and self.mesh.rank == self.mesh.size - 1:
                signal.raise_signal(signal.SIGTERM)
        return forward(self, batch)

    Trainer._microbatches = slow  # type: ignore[method-assign]
    return main(command)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_ends_a_long_validation_with_a_checkpoint(tmp_path: Path, jobs: list[Job], processes: int) -> None:
    job = Job(tmp_path / "job", processes)
    jobs.append(job)
    long = ("train.eval_every=2", "train.eval_batches=100000")
    command = [*train_command(job.folder / "c.toml", *long), "--resume", "auto"]
    job.running = (
        start_ranks(run_with_long_validation, processes, command)
        if processes > 1
        else [start(run_with_long_validation, command)]
    )
    codes, out, error = job.ended()
    assert codes == [75] * processes, error
    assert "stopped by SIGTERM after step 2 of 40" in error and out.count("without a validation loss") == 1
    assert job.saved_step() == 2 and all("validation_loss" not in record for record in metrics(job.folder / "run"))
    job.start()
    assert job.ended()[0] == [0] * processes and len(job.losses()) == STEPS


def test_a_validation_leaves_the_time_of_a_save() -> None:
    now = 0.0
    watch = TimeLimit(100.0, lambda: now)
    now = 10.0
    watch.stepped()
    watch.save_began()
    now = 20.0
    watch.saved(10.0)
    now = 84.0
    assert watch.is_near and not watch.leaves_only_saves
    now = 86.0
    assert watch.leaves_only_saves


def run_out_of_memory(command: list[str], ranks: list[int]) -> int:
    def out(self: Trainer, number: int) -> Any:
        if int(os.environ["RANK"]) in ranks:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.mesh.max(0)  # waits for a process that does not come

    Trainer.step = out  # type: ignore[method-assign]
    loop.usable_bytes = lambda device: 1 << 40  # enough for the plan, so that its advice is quick
    return main(command)


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_all_processes_leave_with_the_code_of_the_one_that_is_out_of_memory(
    tmp_path: Path, jobs: list[Job], ranks: list[int]
) -> None:
    job = Job(tmp_path / "job", 2)
    jobs.append(job)
    job.running = start_ranks(run_out_of_memory, 2, train_command(job.folder / "c.toml"), ranks)
    codes, _, error = job.ended()
    assert codes == [DoesNotFit.exit_code] * 2 == [3, 3], error
    assert "forebay: CUDA out of memory; the planner expects" in error
