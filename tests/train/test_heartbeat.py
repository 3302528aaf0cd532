"""A process that dies is named by the others, which end."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from forebay.train.heartbeat import Heartbeat

CONFIG = """
[model]
family = "qwen3_moe"
config = {{ hidden_size = 32, num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, head_dim = 8, \
num_experts = 8, num_experts_per_tok = 2, moe_intermediate_size = 16 }}
[data]
source = "text"
path = "{folder}/a.txt"
cache = "{folder}/cache"
[train]
batch = 8
sequence = 16
steps = 100000
[parallel]
ep = 4
timeout = {timeout}
[checkpoint]
every = 5
[log]
folder = "{folder}/run"
[device]
type = "cpu"
threads = 1
"""


def start(folder: Path, timeout: int) -> list[subprocess.Popen[str]]:
    (folder / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 200)
    (folder / "c.toml").write_text(CONFIG.format(folder=folder, timeout=timeout))
    port = free_port()
    common = {
        **os.environ,
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    common["PYTHONPATH"] = os.pathsep.join(sys.path)
    return [
        subprocess.Popen(
            [sys.executable, "-m", "forebay", "train", str(folder / "c.toml")],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for_checkpoint(folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not list(folder.glob("run/checkpoints/step-*")):
        assert time.monotonic() < deadline, "no checkpoint appeared"
        time.sleep(0.2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_process_is_named(tmp_path: Path, how: signal.Signals) -> None:
    processes = start(tmp_path, timeout=15)
    try:
        wait_for_checkpoint(tmp_path)
        processes[2].send_signal(how)
        others = [p for rank, p in enumerate(processes) if rank != 2]
        said = "".join(p.communicate(timeout=90)[0] for p in others)
        assert all(p.returncode == 1 for p in others), [p.returncode for p in others]
    finally:
        for p in processes:
            p.kill()
    assert re.search(rf"process 2 \(\S+, pid {processes[2].pid}\) has not answered", said), said
    assert re.search(r"checkpoint \S*step-\d+ is intact", said), said


def test_nobody_is_blamed_while_all_beat() -> None:
    store = dist.TCPStore("127.0.0.1", free_port(), 1, True, timeout=timedelta(seconds=10), wait_for_workers=False)
    left: list[int] = []
    hearts = [Heartbeat(store, rank, 2, 1.0, str, period=0.05, leave=left.append) for rank in range(2)]
    with hearts[0], hearts[1]:
        time.sleep(1.5)
        assert hearts[0].who_is_gone() == ""
    assert left == []


def test_silence_ends_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.TCPStore("127.0.0.1", free_port(), 1, True, timeout=timedelta(seconds=10), wait_for_workers=False)
    left: list[int] = []
    first = Heartbeat(store, 0, 2, 0.5, lambda: "all is lost", period=0.05, leave=left.append)
    with first:
        with Heartbeat(store, 1, 2, 60.0, str, period=0.05):
            time.sleep(0.5)
        assert left == []
        time.sleep(1.0)
        assert left and set(left) == {1}
        assert "process 1" in first.who_is_gone()
    assert "all is lost" in capsys.readouterr().err
