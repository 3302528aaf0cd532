"""Work that all processes do and whose failure in one is everyone's failure, at the same place and with the same message.

In: a callable. Out: what it returned in each process, or the error of the first process in which it raised, raised in all. So
nobody waits in the next collective for a process that is not coming. Alone, the callable is simply called. Nothing is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from forebay.train.errors import ForebayError, RunError

T = TypeVar("T")


def processes() -> tuple[int, int]:
    """(rank, size) in the default process group; (0, 1) without one."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def together(call: Callable[[], T]) -> list[T]:
    """Results of `call()` (picklable) of all processes, by rank.

    Raises:
        Exception: what it raised in the first process that it raised in; OSErrors keep their number and text.
    """
    rank, size = processes()
    if size == 1:
        return [call()]
    outcome: tuple[bool, Any]
    own: BaseException | None = None
    try:
        outcome = True, call()
    except Exception as error:
        own, outcome = error, (False, _portable(error, rank))
    found: list[Any] = [None] * size
    dist.all_gather_object(found, outcome)
    for sender, (fine, value) in enumerate(found):
        if not fine:
            raise value from (own if sender == rank else None)
    return [value for _, value in found]


def on_main(call: Callable[[], T]) -> T:
    """What `call()` returned in process 0, which alone calls it, in all."""
    rank, _ = processes()
    return together(lambda: call() if rank == 0 else None)[0]  # type: ignore[return-value]


def _portable(error: Exception, rank: int) -> Exception:
    """An error that survives pickling and says where it came from."""
    if isinstance(error, ForebayError):
        return error
    if isinstance(error, OSError):
        return OSError(error.errno, f"{error.strerror or error} (process {rank} on {os.uname().nodename})")
    return RunError(str(error))
