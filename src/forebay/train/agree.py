"""Work that several processes do together, and that has failed everywhere if it failed anywhere.

In: a function of this process. Out: every process's result, on every process; or the same exception on all of them, that of the
lowest rank that failed. Nobody is left waiting for a process that gave up.

There is nothing to agree on without a process group. All processes must call `gather` in the same order, and `call` must not
communicate: what fails in it would leave the others in the middle of its communication.
"""

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """This process's number among all; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(call: Callable[[], T]) -> list[T]:
    """What `call()` returned (picklable), by rank.

    Raises:
        BaseException: what `call()` raised on the lowest rank on which it failed.
    """
    if size() == 1:
        return [call()]
    result: T | None = None
    failure: BaseException | None = None
    try:
        result = call()
    except BaseException as error:  # a KeyboardInterrupt too: the others are about to wait for this process
        failure = error
    outcomes: list[tuple[T, BaseException | None]] = [None] * size()  # type: ignore[list-item]
    dist.all_gather_object(outcomes, (result, _portable(failure)))
    found = next((error for _, error in outcomes if error is not None), None)
    if found is not None:
        raise found from failure
    return [value for value, _ in outcomes]


def on_first(call: Callable[[], T]) -> T | None:
    """`call()` on rank 0 alone, the result there and None elsewhere.

    Raises:
        BaseException: what `call()` raised, on all processes.
    """
    return gather(lambda: call() if rank() == 0 else None)[0] if size() > 1 else call()


def _portable(error: BaseException | None) -> BaseException | None:
    """`error`, or, if it does not survive pickling, one with the same text that does."""
    if error is None:
        return None
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class's own pickling raises
        return RuntimeError(str(error))
    return copy if type(copy) is type(error) else RuntimeError(str(error))
