"""Tests of several processes name what failed, leave no process behind, and pass nothing from one call to the next."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks, start


def summed(rank: int, world: int) -> tuple[float, str, int, float]:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item(), os.environ["RANK"] + os.environ["OF_THE_TEST"], torch.get_num_threads(), torch.rand(1).item()


def fails(rank: int, world: int, how: str, folder: str) -> int:
    Path(folder, str(os.getpid())).touch()
    if rank == 1:
        while len(os.listdir(folder)) < world:  # a rank that is still connecting would fail too
            time.sleep(0.01)
        if how == "raises":
            raise ValueError("the gate is stuck")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))
    return rank


def leaves_things_behind(rank: int, world: int) -> tuple[bool, int, bool, str]:
    """Whether its parent was warm, that one's threads, and what an earlier call left in its process; then leaves the same."""
    warm = "forebay.train.trainer" in sys.modules
    found = warm, len(os.listdir(f"/proc/{os.getppid()}/task")), hasattr(torch, "left_behind")
    left = os.environ.get("LEFT_BEHIND", "")
    torch.left_behind = True  # type: ignore[attr-defined]
    os.environ["LEFT_BEHIND"] = "yes"
    return *found, left


def program(code: int) -> int:
    print("out", os.environ["OF_THE_TEST"])
    os.write(2, b"error\n")
    return code


def sleeps() -> None:
    print("asleep")
    time.sleep(1000)


def test_every_rank_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", "!")
    for world in (1, 3):
        found = run_ranks(summed, world)
        assert [f[:3] for f in found] == [(sum(range(world)), f"{rank}!", 1) for rank in range(world)]
        assert len({f[3] for f in found}) == 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", r"rank 0: .*rank 1: .*ValueError: the gate is stuck"),
        ("dies", r"rank 1: died with exit code -11"),
        ("hangs", r"rank 1: did not answer in 1\.5 s"),
    ],
)
def test_a_rank_that_fails_is_named_and_none_is_left(how: str, said: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=rf"(?s){said}"):
        run_ranks(fails, 2, how, str(tmp_path), seconds=1.5)
    assert time.monotonic() - began < 250  # the rank sleeps for 1000 s; a busy machine takes its time
    assert len(list(tmp_path.iterdir())) == 2
    assert not [p.name for p in tmp_path.iterdir() if Path("/proc", p.name).exists()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU processes are spawned, and have no warm parent")
def test_nothing_passes_from_one_call_to_the_next() -> None:
    """A parent with threads could not be forked safely: their locks would stay locked."""
    assert [run_ranks(leaves_things_behind, 1) for _ in range(2)] == [[(True, 1, False, "")]] * 2


def test_a_program_is_read_and_killed() -> None:
    done = start(program, 3, OF_THE_TEST="and more")
    assert done.communicate(timeout=60) == ("out and more\n", "error\n") and done.returncode == 3
    endless = start(sleeps)
    assert endless.stdout.readline() == "asleep\n" and endless.returncode is None
    endless.kill()
    assert endless.returncode == -signal.SIGKILL
