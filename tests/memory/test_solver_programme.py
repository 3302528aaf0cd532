"""A programme against all of its values, and what HiGHS prints."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from forebay.memory import solver
from forebay.memory.solver import Programme


@pytest.mark.parametrize("seed", range(10))
def test_choices_are_the_cheapest_of_all(seed: int) -> None:
    chance = random.Random(seed)
    costs = [chance.randint(1, 9) for _ in range(7)]
    sizes = [chance.randint(1, 9) for _ in range(7)]
    p = Programme()
    choices = [p.choice(c) for c in costs]
    p.row(list(zip(choices, sizes, strict=True)), low=15)
    p.row([(choices[0], 1.0), (choices[1], 1.0)], high=1)
    answer = p.solve(10.0, 0.0)
    assert answer is not None and answer.gap == 0
    every = [v for v in product((0, 1), repeat=7) if v[0] + v[1] <= 1 and _dot(v, sizes) >= 15]
    assert answer.cost == pytest.approx(min(_dot(v, costs) for v in every))
    assert _dot([answer.chosen(c) for c in choices], costs) == pytest.approx(answer.cost)


def _dot(values: Any, factors: list[int]) -> int:
    return sum(f for v, f in zip(values, factors, strict=True) if v)


def test_rows_that_contradict_each_other_have_no_answer() -> None:
    p = Programme()
    one = p.choice(1.0)
    p.row([(one, 1.0)], low=2.0)
    assert p.solve(1.0, 0.0) is None


def test_a_variable_is_no_less_than_nothing_and_at_most_its_upper_bound() -> None:
    p = Programme()
    up, down = p.variable(-1.0, 2.5), p.variable(1.0)
    answer = p.solve(1.0, 0.0)
    assert answer is not None
    assert answer.values[up] == pytest.approx(2.5) and answer.values[down] == pytest.approx(0.0)


def test_the_solvers_own_lines_are_left_out_and_no_others(capfd: Any) -> None:
    import ctypes

    with solver._without_debug_output():
        ctypes.CDLL(None).puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
        print("another line")
        ctypes.CDLL(None).puts(b"a third")
    print("behind")
    ctypes.CDLL(None).fflush(None)
    out = capfd.readouterr().out
    assert "Highs" not in out and all(line in out for line in ("another line", "a third", "behind"))
