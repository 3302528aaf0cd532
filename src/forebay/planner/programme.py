"""A mixed-integer linear programme, written row by row and solved by HiGHS through `scipy.optimize.milp`.

In: variables (cost, upper bound, whole numbers or not) and rows (a sum of variables between two limits). Out: an `Answer`: the
values with the least cost that were found within the time limit, and by how much they may miss the least there is. scipy is
imported when the first programme is solved: most of Forebay runs without it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INFINITE = float("inf")


@dataclass(frozen=True)
class Answer:
    """Values by variable; `cost` is their sum of costs, and `gap` how far below it the least cost may be, as a share of it."""

    values: tuple[float, ...]
    cost: float
    gap: float

    def chosen(self, variable: int) -> bool:
        """Whether a variable of 0 or 1 is 1."""
        return self.values[variable] > 0.5


class Programme:
    """Minimise the sum of cost x variable. Every variable is at least 0."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._uppers: list[float] = []
        self._whole: list[int] = []
        self._limits: list[tuple[float, float]] = []
        self._entries: list[tuple[int, int, float]] = []  # row, variable, factor

    def variable(self, cost: float = 0.0, upper: float = INFINITE) -> int:
        """A number between 0 and `upper`."""
        self._costs.append(cost)
        self._uppers.append(upper)
        self._whole.append(0)
        return len(self._costs) - 1

    def choice(self, cost: float = 0.0) -> int:
        """0 or 1."""
        number = self.variable(cost, 1.0)
        self._whole[number] = 1
        return number

    def row(self, terms: Iterable[tuple[int, float]], low: float = -INFINITE, high: float = INFINITE) -> None:
        """low <= sum of factor x variable <= high. A variable may be named more than once."""
        number = len(self._limits)
        self._limits.append((low, high))
        self._entries.extend((number, variable, factor) for variable, factor in terms)

    def solve(self, seconds: float, gap: float) -> Answer | None:
        """The best values found.

        Args:
            seconds: time limit.
            gap: share of the cost by which the answer may miss the least one.

        Returns:
            None if no values meet all rows, or none were found in time.
        """
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        rows, columns, factors = zip(*self._entries, strict=True) if self._entries else ((), (), ())
        matrix = csr_array((factors, (rows, columns)), shape=(len(self._limits), len(self._costs)))
        lows, highs = zip(*self._limits, strict=True) if self._limits else ((), ())
        with _without_chatter():
            found = milp(
                np.array(self._costs),
                integrality=np.array(self._whole),
                bounds=Bounds(np.zeros(len(self._uppers)), np.array(self._uppers)),
                constraints=LinearConstraint(matrix, np.array(lows, float), np.array(highs, float)) if lows else (),
                options={"time_limit": seconds, "mip_rel_gap": gap},
            )
        if found.x is None:
            return None
        return Answer(tuple(map(float, found.x)), float(found.fun), float(found.mip_gap or 0.0))


@contextmanager
def _without_chatter() -> Iterator[None]:
    """HiGHS (in scipy 1.17) now and then prints a line for its developers with C's printf, whatever it is told, and that would
    end up in the JSON of `forebay plan`. Standard output goes to a file meanwhile, and all other lines are printed afterwards."""
    try:
        flush = ctypes.CDLL(None).fflush
        before = os.dup(1)
    except (OSError, TypeError, AttributeError):  # no C library to ask (Windows), or no standard output
        yield
        return
    with tempfile.TemporaryFile() as aside:
        if sys.stdout is not None:
            sys.stdout.flush()
        flush(None)
        os.dup2(aside.fileno(), 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(before, 1)
            os.close(before)
            aside.seek(0)
            others = [line for line in aside if not line.startswith(b"HighsMipSolverData::")]
            if others:
                os.write(1, b"".join(others))
