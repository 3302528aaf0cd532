"""Which of many like cases run in `make test`, and which in `make test-all` alone: those are marked slow."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Values for `parametrize`, or rows of them: all after the first `count` are slow."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=() if n < count else pytest.mark.slow) for n, row in enumerate(rows)]


def cover(*options: Sequence[Any]) -> list[Any]:
    """Rows for `parametrize`: the whole product. Its diagonal, which has each value once or more, is fast; the rest is slow."""
    longest = max(map(len, options))
    fast = {tuple(n % len(values) for values in options) for n in range(longest)}
    return [
        pytest.param(*(o[i] for o, i in zip(options, row, strict=True)), marks=() if row in fast else pytest.mark.slow)
        for row in product(*(range(len(values)) for values in options))
    ]
