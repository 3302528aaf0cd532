"""`locked`: a decorator of methods that one thread at a time runs, since a model may run in several.

Input: a method of a class whose objects have a `_lock`. Output: the method under that lock.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def locked(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """`method`, which waits until no other thread runs a `locked` method of the same object."""

    @wraps(method)
    def call(self: Any, *args: Any) -> _Result:
        with self._lock:
            return method(self, *args)

    return call
