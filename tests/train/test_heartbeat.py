"""A process that dies is named by the others, which end."""

import json
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from forebay.cli import main
from forebay.errors import PeerLost, RunError
from forebay.train.heartbeat import Heartbeat, ending_after
from forebay.train.loop import _naming_lost
from tests.ranks import Started, free_port, start, start_ranks, wait_until
from tests.train.common import config, config_file, train_command, write_text


def start_four(folder: Path, timeout: int) -> list[Started]:
    settings = config(
        write_text(folder, 200),
        train={"batch": 8, "steps": 100_000},
        parallel={"ep": 4, "timeout": timeout},
        checkpoint={"every": 5},
    )
    return start_ranks(main, 4, train_command(config_file(folder, settings)))


# A frozen process is named after 0.8 of the timeout, at which collectives end the others without a name: at 15 s, a busy machine
# ran into that.
@pytest.mark.parametrize(("how", "timeout"), [(signal.SIGKILL, 90), (signal.SIGSTOP, 40)])
def test_a_dead_or_frozen_process_is_named(tmp_path: Path, how: signal.Signals, timeout: int) -> None:
    processes = start_four(tmp_path, timeout)
    try:
        wait_until(lambda: list(tmp_path.glob("run/checkpoints/step-*")), "no checkpoint appeared")
        began = time.monotonic()
        processes[2].send_signal(how)
        others = [p for rank, p in enumerate(processes) if rank != 2]
        message = "".join("".join(p.communicate(timeout=90)) for p in others)
        assert all(p.returncode == PeerLost.exit_code for p in others), [p.returncode for p in others]
        if how == signal.SIGKILL:  # on the same machine a death is known at once
            assert time.monotonic() - began < 40
    finally:
        for p in processes:
            p.kill()
    fate = "died" if how == signal.SIGKILL else "has not answered for"
    assert re.search(rf"process 2 \(\S+, pid {processes[2].pid}\) {fate}", message), message
    assert re.search(r"checkpoint \S*step-\d+ is intact", message), message


def store_of_one() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", free_port(), 1, True, timeout=timedelta(seconds=10), wait_for_workers=False)


def a_beat(pid: int, **more: Any) -> str:
    return json.dumps({"name": f"elsewhere, pid {pid}", "place": "elsewhere", "pid": pid, "beat": 1, **more})


def test_no_process_is_blamed_while_it_beats_or_after_it_left() -> None:
    store = store_of_one()
    left: list[int] = []
    hearts = [Heartbeat(store, rank, 3, 1.0, str, period=0.05, leave=left.append) for rank in range(3)]
    with hearts[0]:
        with hearts[1], hearts[2]:
            time.sleep(0.5)
            assert hearts[0].find_lost() is None
        time.sleep(1.5)
        assert hearts[0].find_lost() is None
    assert left == []


def test_silence_ends_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    store = store_of_one()
    store.set("forebay/beat/1", a_beat(77))
    left: list[int] = []
    with Heartbeat(store, 0, 2, 1.0, lambda: "all is lost", period=0.05, leave=left.append) as heart:
        time.sleep(0.6)
        assert left == []
        assert re.fullmatch(r"process 1 \(elsewhere, pid 77\) has not answered for \d s", str(heart.find_lost()))
        time.sleep(1.0)
        assert set(left) == {5}
    message = capsys.readouterr().err
    assert (
        message.count("the run has ended; all is lost") == 1
        and "process 1 (elsewhere, pid 77) has not answered" in message
    )


def test_an_error_of_one_is_known_to_all(capsys: pytest.CaptureFixture[str]) -> None:
    """At once, and with its reason. A third process, which ends because of it, is not blamed."""
    store = store_of_one()
    left: list[int] = []
    with Heartbeat(store, 0, 3, 60.0, str, period=0.05, leave=left.append) as heart:
        with pytest.raises(ValueError), Heartbeat(store, 2, 3, 60.0, str, period=0.05) as third:
            with pytest.raises(MemoryError), Heartbeat(store, 1, 3, 60.0, str, period=0.05):
                time.sleep(0.3)
                raise MemoryError("too large\nby far")
            assert "failed: too large" in str(third.find_lost())
            raise ValueError("connection closed by somebody")
        lost = heart.find_lost()
        assert re.fullmatch(r"process 1 \(\S+, pid \d+\) failed: too large", str(lost))
        time.sleep(0.6)
        assert lost is not None and {lost.exit_code, *left} == {3}  # that of a MemoryError
    assert "failed: too large; the run has ended" in capsys.readouterr().err


def test_a_process_without_its_torchrun_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others learn why; a shell that ends is no torchrun."""
    store, left = store_of_one(), []

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    orphan = Heartbeat(store, 1, 2, 60.0, str, period=0.05, leave=lambda code: left.append(("orphan", code)))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    agent = os.getppid()
    with (
        orphan,
        Heartbeat(store, 0, 2, 60.0, str, period=0.05, leave=lambda code: left.append(("other", code))) as heart,
    ):
        time.sleep(0.3)
        assert left == []
        monkeypatch.setattr(os, "getppid", lambda: 1)
        time.sleep(0.3)
        assert str(heart.find_lost()).endswith(f"failed: the torchrun that started it (pid {agent}) is gone")
        time.sleep(0.5)
    assert set(left) == {("orphan", 5), ("other", 5)}
    assert "is gone; the run has ended" in capsys.readouterr().err


def hold_the_store(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=10), wait_for_workers=False)
    with Heartbeat(store, 0, 3, 60.0, str, period=0.05):
        time.sleep(100)


def test_the_store_dies_with_its_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Process 0 holds it, unless torchrun does. All beats end then, and no other process is blamed."""
    port = free_port()
    holder = start(hold_the_store, port)
    try:
        store = dist.TCPStore("127.0.0.1", port, 1, False, timeout=timedelta(seconds=60))
        left: list[int] = []
        first, second = (Heartbeat(store, r, 3, 60.0, str, period=0.05, leave=left.append) for r in (1, 2))
        with first, second:
            while not first._peers[0].beat:
                time.sleep(0.05)
            time.sleep(0.3)
            holder.kill()
            time.sleep(1.5)
            assert set(left) == {5}
            assert str(first.find_lost()).endswith(f"pid {holder.pid}) died")
    finally:
        holder.kill()
    assert f"pid {holder.pid}) died; the run has ended" in capsys.readouterr().err


def hold_the_store_for_a_moment(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=10), wait_for_workers=False)
    store.wait(["leave"], timedelta(seconds=60))
    os._exit(9)


def test_process_0_may_die_with_the_store_before_its_first_beat(capsys: pytest.CaptureFixture[str]) -> None:
    """The others do not wait as long as for a silent process."""
    port = free_port()
    holder = start(hold_the_store_for_a_moment, port)
    try:
        store = dist.TCPStore("127.0.0.1", port, 1, False, timeout=timedelta(seconds=60))
        left: list[int] = []
        with Heartbeat(store, 1, 3, 60.0, str, period=0.05, leave=left.append) as heart:
            time.sleep(0.5)
            assert left == [] and heart._lost(60.0) == []  # a slow start is no death
            store.set("leave", "")
            wait_until(lambda: left, "the loss was not noticed", seconds=5)
        assert set(left) == {5}
    finally:
        holder.kill()
    assert "process 0 (not heard of since the start) died; the run has ended" in capsys.readouterr().err


def wait_for_a_store(port: int) -> None:
    with ending_after(0.5, "no process is there"):
        dist.TCPStore("127.0.0.1", port, 2, False, timeout=timedelta(seconds=60))


def test_a_wait_inside_torch_is_ended() -> None:
    waiting = start(wait_for_a_store, free_port())
    try:
        assert (waiting.wait(timeout=30), waiting.stderr.read()) == (5, "forebay: no process is there\n")
    finally:
        waiting.kill()


def test_a_wait_that_is_over_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    left: list[int] = []
    with ending_after(0.2, "too late", left.append):
        pass
    time.sleep(0.4)
    assert (left, capsys.readouterr().err) == ([], "")


def test_a_process_that_died_before_its_first_beat_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    store, left = store_of_one(), []
    with Heartbeat(store, 0, 2, 0.5, lambda: "it had not begun", period=0.05, leave=left.append):
        time.sleep(1.2)
    assert set(left) == {5}
    assert "process 1 (not heard of since the start) has not answered" in capsys.readouterr().err


def raised(error: Exception, cause: Exception | None) -> tuple[str, int]:
    """The message of an error inside a run in which a process died, and how often the heartbeat was asked for a lost process."""
    heart = MagicMock()
    heart.find_lost.return_value = PeerLost("process 2 (here, pid 7) died", 3)
    with pytest.raises((RunError, OSError, RuntimeError)) as caught, _naming_lost(heart, lambda: "all is intact"):
        raise error from cause
    return str(caught.value), heart.find_lost.call_count


def test_the_dead_process_is_named_for_what_a_collective_raised() -> None:
    blamed = "process 2 (here, pid 7) died; all is intact"
    assert raised(RuntimeError("connection closed by peer"), None) == (blamed, 1)
    unwritten = RunError("checkpoint x could not be written: connection reset by peer")
    assert raised(unwritten, RuntimeError("connection reset by peer")) == (blamed, 1)


def test_no_process_is_blamed_for_a_full_disk_or_a_loss_that_is_not_finite() -> None:
    full = RunError("checkpoint x could not be written: no space left")
    assert raised(full, OSError(28, "no space left")) == (str(full), 0)
    assert raised(RunError("the loss is not finite"), None) == ("the loss is not finite", 0)
