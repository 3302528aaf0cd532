"""Learning-rate shapes, against values worked out by hand."""

import pytest

from forebay.config import Schedule
from forebay.train.trainer import lr_factor


def values(schedule: Schedule, steps: int) -> list[float]:
    return [round(lr_factor(schedule, s, steps), 6) for s in range(1, steps + 1)]


def test_cosine() -> None:
    # Warm-up over 2, then cos over 4: 1/2 + cos(pi k/4)/2 for k = 1..4, scaled onto [0.1, 1].
    expected = [0.5, 1.0, 0.868198, 0.55, 0.231802, 0.1]
    assert values(Schedule(kind="cosine", warmup=2, minimum=0.1), 6) == expected


def test_wsd() -> None:
    assert values(Schedule(kind="wsd", warmup=2, decay=4, minimum=0.0), 8) == [0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0.0]


def test_wsd_keeps_its_minimum() -> None:
    assert values(Schedule(kind="wsd", decay=2, minimum=0.2), 4) == [1, 1, 0.6, 0.2]


def test_constant() -> None:
    assert values(Schedule(kind="constant", warmup=4, minimum=0.0), 6) == [0.25, 0.5, 0.75, 1, 1, 1]


@pytest.mark.parametrize("kind", ["cosine", "constant"])
def test_one_step_without_warm_up(kind: str) -> None:
    assert lr_factor(Schedule(kind=kind, minimum=0.1), 1, 1) == (0.1 if kind == "cosine" else 1.0)
