"""Runs that are preempted leave a checkpoint and exit code 75 in time, and one command resumes them bitwise."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forebay import cli
from forebay.cli import main
from forebay.errors import DoesNotFit, Preempted
from forebay.train import loop, restore
from forebay.train.stop import TimeLimit
from forebay.train.trainer import Trainer
from tests.train.common import Job, losses, metrics

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


def signalled(command: list[str], at: int, number: int) -> int:
    """The command line, with a signal to this process in the middle of a step."""
    step = Trainer.step

    def interrupted(self: Trainer, now: int) -> Any:
        if now == at:
            os.kill(os.getpid(), number)
        return step(self, now)

    Trainer.step = interrupted  # type: ignore[method-assign]  # this process ends with the run
    return main(command)


def slowed(command: list[str]) -> int:
    step = Trainer.step
    Trainer.step = lambda self, number: (time.sleep(0.1), step(self, number))[1]  # type: ignore[method-assign]
    return main(command)


def saved_step(job: Job) -> int:
    newest = restore.find(job.folder / "run")
    restore.verify(newest)
    return int(restore.read_about(newest)["step"])


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``make(NAME, PROCESSES)``: a job, which is killed at the end."""
    made: list[Job] = []

    def job(name: str, processes: int) -> Job:
        made.append(Job(tmp_path / name, processes, train={"steps": STEPS}))
        return made[-1]

    yield job
    for started in made:
        started.kill()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_preempted_run_is_resumed_bitwise_by_the_same_command(make: Callable[..., Job], processes: int) -> None:
    """By each signal in a random step, then by a time limit. All processes leave with one code."""
    whole, job = make("whole", processes), make("job", processes)
    whole.start(main)
    assert whole.ended()[0] == [0] * processes
    saved = 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        at = saved + random.randint(1, 9)
        job.start(signalled, at, number)
        codes, out, error = job.ended()
        assert codes == [Preempted.exit_code] * processes == [75] * processes, error
        assert error.count(f"stopped by {number.name} after step") == 1 == error.count("forebay:")
        assert "--resume" in error and saved_step(job) == at
        saved = at
    job.start(slowed, overrides=("train.time_limit=1s",))
    codes, out, error = job.ended()
    assert codes == [75] * processes and f"resumed after step {saved}" in out, out + error
    assert f"stopped by train.time_limit = 1s after step {saved_step(job)}" in error
    job.start(main)
    codes, _, error = job.ended()
    assert codes == [0] * processes, error
    assert losses(job.folder / "run") == (wanted := losses(whole.folder / "run")) and len(wanted) == STEPS
    job.start(main)
    codes, out, _ = job.ended()
    assert codes == [0] * processes and out.count("nothing is left to do") == 1


def run_with_long_validation(command: list[str]) -> int:
    """Each validation batch takes 0.1 s, and the second one after step 2 gets SIGTERM on the last process."""
    forward, begun = Trainer._microbatches, 0

    def slow(self: Trainer, batch: Any, called: bool) -> Any:
        nonlocal begun
        if not self.model.training:
            time.sleep(0.1)
            begun += 1
            if begun == 2 and self.mesh.rank == self.mesh.size - 1:
                signal.raise_signal(signal.SIGTERM)
        return forward(self, batch, called)

    Trainer._microbatches = slow  # type: ignore[method-assign]
    return main(command)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_ends_a_long_validation_with_a_checkpoint(make: Callable[..., Job], processes: int) -> None:
    job = make("job", processes)
    job.start(run_with_long_validation, overrides=("train.eval_every=2", "train.eval_batches=100000"))
    codes, out, error = job.ended()
    assert codes == [75] * processes, error
    assert "stopped by SIGTERM after step 2 of 40" in error and out.count("without a validation loss") == 1
    assert saved_step(job) == 2 and all("validation_loss" not in record for record in metrics(job.folder / "run"))
    job.start(main)
    assert job.ended()[0] == [0] * processes and len(losses(job.folder / "run")) == STEPS


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


def run_out_of_memory(command: list[str], ranks: list[int], waits: bool, seconds: float = 0.5) -> int:
    def out(self: Trainer, number: int) -> Any:
        # As a dispatcher in symmetric memory closes: the process that goes on does not come.
        self.dispatcher.close = partial(dist.barrier, self.mesh.expert_group)  # type: ignore[union-attr, method-assign]
        if int(os.environ["RANK"]) in ranks:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.mesh.max(0)  # waits for a process that does not come

    Trainer.step = out  # type: ignore[method-assign]
    loop.usable_bytes = lambda device: 1 << 40  # enough for the plan, so that its advice is quick
    loop._SILENT = 60  # however slow this machine plans
    if waits:
        loop._SILENT = loop._PLANNING = seconds
        cli._what_fits = lambda *_: time.sleep(300)  # type: ignore[assignment, return-value]
    return main(command)


@pytest.mark.parametrize(
    ("ranks", "waits", "advice"),
    [
        ([1], False, "the planner expects"),
        ([0, 1], False, "the planner expects"),
        ([1], True, "the planner has no advice"),
    ],
)
def test_all_processes_leave_with_the_code_of_the_one_that_is_out_of_memory(
    make: Callable[..., Job], ranks: list[int], waits: bool, advice: str
) -> None:
    job = make("job", 2)
    job.start(run_out_of_memory, ranks, waits)
    codes, _, error = job.ended()
    assert codes == [DoesNotFit.exit_code] * 2 == [3, 3], error
    assert f"forebay: CUDA out of memory; {advice}" in error
    assert error.count("forebay: out of memory; the planner looks for what fits") == waits


def test_advice_comes_before_the_others_time_out(tmp_path: Path) -> None:
    """With a timeout that is shorter than the planner may take otherwise."""
    job = Job(tmp_path / "short", 2, timeout=20, train={"steps": STEPS})
    try:
        job.start(run_out_of_memory, [1], True, 60.0)
        codes, _, error = job.ended()
    finally:
        job.kill()
    assert codes == [3, 3] and "forebay: CUDA out of memory; the planner has no advice after 10 s" in error, error
