"""Which of many like cases run in `make test`, and which in `make test-all` alone: those are marked slow."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Values for `parametrize`, or rows of them: all after the first `count` are slow."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=() if n < count else pytest.mark.slow) for n, row in enumerate(rows)]


def pairwise(*options: Sequence[Any]) -> list[Any]:
    """Rows for `parametrize`: the whole product, of which a row is slow if faster ones have each pair of its values.

    Most defects need one option or two at once. Greedy: the row that brings the most new pairs comes next.
    """
    rows = list(product(*(range(len(values)) for values in options)))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = set()
    while missing:
        row = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(row)
        chosen.add(row)
    return _marked(options, chosen)


def cover(*options: Sequence[Any]) -> list[Any]:
    """Rows for `parametrize`: the whole product. Its diagonal, which has each value once or more, is fast; the rest is slow."""
    longest = max(map(len, options))
    diagonal = {tuple(n % len(values) for values in options) for n in range(longest)}
    return _marked(options, diagonal)


def _marked(options: Sequence[Sequence[Any]], chosen: set[tuple[int, ...]]) -> list[Any]:
    rows = []
    for row in product(*(range(len(values)) for values in options)):
        values = (option[i] for option, i in zip(options, row, strict=True))
        rows.append(pytest.param(*values, marks=() if row in chosen else pytest.mark.slow))
    return rows


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(row), min(2, len(row))))
