"""Runs independent parts of a plan or search, such as pipeline ranks or meshes, in several processes of this machine.

Input: a function and its arguments. Output: the results, in order, as if this process had called the function. Processes are
forked, so that they have what was imported and traced already; they end with the iterator.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from forebay.errors import RunError

T = TypeVar("T")
R = TypeVar("R")


def usable() -> int:
    """Processes that can work at the same time. 1 outside of Linux: macOS' own libraries do not survive a fork."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def forked_map(function: Callable[[T], R], arguments: Sequence[T], processes: int) -> Iterator[R]:
    """`map(function, arguments)`. Each process takes the next argument as it ends one, while this one waits for the results.

    Args:
        processes: use 1 where CUDA or a process group is initialized: neither survives a fork.

    Raises:
        RunError: a process ended without an answer. What `function` raises is raised here.
    """
    count = min(processes, len(arguments))
    if count < 2:
        yield from map(function, arguments)
        return
    context = multiprocessing.get_context("fork")
    taken = context.Value("q", count)  # arguments that a process has taken; the first ones are dealt out
    receivers: list[Connection] = []
    workers = []
    try:
        for first in range(count):
            receiver, sender = context.Pipe(duplex=False)
            receivers.append(receiver)
            share = function, arguments, first, taken, sender, tuple(receivers)
            workers.append(context.Process(target=_answer, args=share, daemon=True))
            workers[-1].start()
            sender.close()
        found: dict[int, R] = {}
        for number in range(len(arguments)):
            while number not in found:
                _receive(receivers, found)
            yield found.pop(number)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _receive(receivers: list[Connection], found: dict[int, Any]) -> None:
    """Wait for answers, add them to `found`, and drop the processes that have ended."""
    if not receivers:
        raise RunError("a process that plans ended without an answer; this machine may be out of memory")
    for receiver in connection.wait(receivers):
        assert isinstance(receiver, Connection)
        try:
            place, answer, error = receiver.recv()
        except EOFError:
            receivers.remove(receiver)
            continue
        if error is not None:
            raise error
        found[place] = answer


def _answer(
    function: Callable[[T], R],
    arguments: Sequence[T],
    place: int,
    taken: Any,
    sender: Connection,
    inherited: Sequence[Connection],
) -> None:
    """Call `function` with the argument at `place`, then each time with the next that no process has taken."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process answers Ctrl-C, and kills this one
    for receiver in inherited:  # while any process holds a pipe's other end, a write to it waits
        receiver.close()
    while place < len(arguments):
        try:
            sender.send((place, function(arguments[place]), None))
        except BrokenPipeError:  # the first process was killed
            return
        except Exception as error:
            sender.send((place, None, error))
            return
        with taken.get_lock():
            place, taken.value = taken.value, taken.value + 1
