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
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from forebay.errors import RunError

T = TypeVar("T")
R = TypeVar("R")


def usable() -> int:
    """Processes that can work at the same time. 1 outside of Linux: macOS' own libraries do not survive a fork."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def forked_map(function: Callable[[T], R], arguments: Sequence[T], processes: int) -> Iterator[R]:
    """`map(function, arguments)`. This process computes its share when it is asked for it.

    Args:
        processes: this one included. Use 1 where CUDA or a process group is initialized: neither survives a fork.

    Raises:
        RunError: a process ended without an answer. What `function` raises is raised here.
    """
    count = min(processes, len(arguments))
    if count < 2:
        yield from map(function, arguments)
        return
    context = multiprocessing.get_context("fork")
    receivers, workers = [], []
    try:
        for first in range(1, count):
            receiver, sender = context.Pipe(duplex=False)
            receivers.append(receiver)
            share = function, arguments[first::count], sender, tuple(receivers)
            workers.append(context.Process(target=_answer, args=share, daemon=True))
            workers[-1].start()
            sender.close()
        for number, argument in enumerate(arguments):
            yield function(argument) if number % count == 0 else _received(receivers[number % count - 1])
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _received(receiver: Connection) -> Any:
    try:
        found, error = receiver.recv()
    except EOFError:
        raise RunError("a process that plans ended without an answer; this machine may be out of memory") from None
    if error is not None:
        raise error
    return found


def _answer(
    function: Callable[[T], R], arguments: Sequence[T], sender: Connection, inherited: Sequence[Connection]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process answers Ctrl-C, and kills this one
    for receiver in inherited:  # while any process holds a pipe's other end, a write to it waits
        receiver.close()
    for argument in arguments:
        try:
            sender.send((function(argument), None))
        except BrokenPipeError:  # the first process was killed
            return
        except Exception as error:
            sender.send((None, error))
            return
