"""Processes for tests: ranks of a gloo group, and programs that a test stops, kills or reads.

`run_ranks(fn, world, *args)` calls `fn(rank, world, *args)` in `world` processes and returns the results by rank.
`start(fn, *args)` and `start_ranks` start processes and return handles like `subprocess.Popen`, and `on_processes` waits for
their end. fn is a module-level function of a test file. Processes are forked from one warm parent per pytest-xdist worker, which
has imported torch, transformers and Forebay (tests/warm.py), runs no thread and holds no group. So a process starts in
milliseconds, where a new interpreter takes seconds to import the same, and no state passes from one test to the next. With a
GPU, processes are spawned: a CUDA context does not survive a fork.
"""

import functools
import io
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Seconds that the other ranks have to report after one has failed.
GRACE_SECONDS = 5.0


@functools.cache
def _context() -> Any:
    if torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    before = dict(os.environ)
    try:
        # The parent imports from PYTHONPATH, not from this process's sys.path.
        os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = "1"
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, seconds: float = 200, group: bool = True, **environment: str
) -> list[Any]:
    """Results of fn(rank, world, *args) by rank. They must be picklable without shared memory: floats, lists, dicts.

    `environment` is added to each process's variables; without `group` no process group is made.

    Raises:
        AssertionError: a rank raised, died, or did not answer within `seconds`. The message has each rank's traceback or end.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "WORLD_SIZE": str(world), **environment}
        pipes, processes = [], []
        try:
            for rank in range(world):
                ours, theirs = _context().Pipe(duplex=False)
                own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = _context().Process(
                    target=_rank, args=(fn, rank, world, folder if group else "", theirs, own, args)
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _collect(pipes, processes, seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Any], processes: list[Any], seconds: float) -> list[Any]:
    """What each process sent, read while they run: a rank whose results fill its pipe waits for a reader."""
    found: dict[int, Any] = {}
    failed: dict[int, str] = {}
    limit = time.monotonic() + seconds
    while waiting := {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found and rank not in failed}:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, limit - time.monotonic()))
        for pipe in ready:
            rank = waiting[pipe]
            try:
                ok, value = pipe.recv()
            except EOFError:
                processes[rank].join(GRACE_SECONDS)
                ok, value = False, f"died with exit code {processes[rank].exitcode}"
            if ok:
                found[rank] = value
            else:
                limit = min(limit, time.monotonic() + GRACE_SECONDS)
                failed[rank] = value
        if not ready:
            when = "after another had failed" if failed else f"in {seconds} s"
            failed.update({rank: f"did not answer {when}" for rank in waiting.values()})
            break
    if failed:
        raise AssertionError("\n".join(f"rank {rank}: {reason}" for rank, reason in sorted(failed.items())))
    for process in processes:
        process.join(GRACE_SECONDS)
    return [found[rank] for rank in range(len(pipes))]


def _prepare(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)


def _rank(
    fn: Callable[..., Any], rank: int, world: int, folder: str, pipe: Any, environment: dict[str, str], args: Any
) -> None:
    try:
        _prepare(environment)
        if folder:
            store = f"file://{folder}/store"
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
        try:
            pipe.send((True, fn(rank, world, *args)))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException:
        pipe.send((False, "\n" + traceback.format_exc()))


class Started:
    """A process of its own session that runs a function: its exit code is what the function returns.

    The names are those of `subprocess.Popen`. Output is text; `stdout` and `stderr` are read by `communicate` or by the test.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], environment: Mapping[str, str]) -> None:
        pairs = [_context().Pipe(duplex=False) for _ in range(2)]
        self._process = _context().Process(
            target=_program, args=(fn, args, *(theirs for _, theirs in pairs), dict(environment))
        )
        self._process.start()
        for _, theirs in pairs:
            theirs.close()
        self.stdout, self.stderr = (_text(os.dup(ours.fileno())) for ours, _ in pairs)
        for ours, _ in pairs:
            ours.close()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, if it still runs."""
        self._process.kill()
        self._process.join()

    def wait(self, timeout: float) -> int:
        """Wait for its exit code; raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """The rest of its output and of its error stream, after its end."""
        texts = ["", ""]

        def read(i: int, stream: TextIO) -> None:
            texts[i] = stream.read()

        threads = [
            threading.Thread(target=read, args=(i, s), daemon=True) for i, s in enumerate((self.stdout, self.stderr))
        ]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        return texts[0], texts[1]


def start(fn: Callable[..., Any], *args: Any, **environment: str) -> Started:
    """Start fn(*args) in a process with these environment variables added. The test calls `kill` on it at the end."""
    return Started(fn, args, {**os.environ, **environment})


def start_ranks(fn: Callable[..., Any], world: int, *args: Any) -> list[Started]:
    """Start fn(*args) in `world` processes, numbered as torchrun does."""
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [start(fn, *args, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(world)]


def on_processes(
    count: int, run: Callable[..., int], *arguments: Any, seconds: float = 120
) -> tuple[list[int | None], str, str]:
    """Exit codes of ``run(*arguments)`` in `count` processes, numbered as torchrun does if they are several, and what they wrote
    on their two streams."""
    processes = start_ranks(run, count, *arguments) if count > 1 else [start(run, *arguments)]
    try:
        written = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [p.returncode for p in processes], "".join(o for o, _ in written), "".join(e for _, e in written)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 120) -> None:
    """Wait for the condition; `what` is said if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _text(descriptor: int) -> TextIO:
    return io.TextIOWrapper(io.FileIO(descriptor, "r"), encoding="utf-8")


def _program(fn: Callable[..., Any], args: Any, out: Any, error: Any, environment: dict[str, str]) -> None:
    os.setsid()
    for pipe, descriptor in ((out, 1), (error, 2)):
        os.dup2(pipe.fileno(), descriptor)
        pipe.close()
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(d, "w", closefd=False), write_through=True) for d in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _prepare(environment)
    sys.exit(fn(*args))
