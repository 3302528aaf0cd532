"""Times of a cycle that runs as planned take the place of those of the measuring ones."""

from dataclasses import replace

import pytest
import torch

from forebay.planner.simulate import CallFigures, Moment, Timeline
from forebay.saved.order import Cycle, Stopwatch


class Event:
    """Stands for a CUDA event that was recorded at a time, in ms."""

    def __init__(self, at: float):
        self.at = at

    def elapsed_time(self, other: "Event") -> float:
        return other.at - self.at


CALLS = (CallFigures(("a", 0), (8,), 4e-3), CallFigures(("b", 0), (8,), 4e-3))
TIMELINE = Timeline(
    CALLS, (Moment("F", 0, 0.010), Moment("F", 1, 0.010), Moment("B", 1, 0.010), Moment("B", 0, 0.010)), 1e9, 1e9
)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def run(watch: Stopwatch, starts: list[float], wait: float = 0.0) -> None:
    for (kind, call), start in zip((("F", 0), ("F", 1), ("B", 1), ("B", 0)), starts, strict=True):
        watch.moment(kind, CALLS[call].key, Event(start), Event(start + wait))


def test_shorter_times_count_and_waits_do_not() -> None:
    watch = Stopwatch()
    run(watch, [0, 5, 11, 31], wait=1)
    timeline = watch.retimed(TIMELINE)
    assert timeline is not None
    # 5 - 1, 6 - 1, and 19 is longer than what was measured; the last moment has no end.
    assert [m.seconds for m in timeline.moments] == pytest.approx([0.004, 0.005, 0.010, 0.010])
    assert timeline.calls[0].seconds == pytest.approx(4e-3 * 29 / 40)


def test_time_without_work_does_not_count() -> None:
    watch = Stopwatch()
    watch.moment("F", CALLS[0].key, Event(0), Event(0))
    watch.idle(Event(2))
    watch.idle(Event(3))  # the second wait of the same pause
    for (kind, call), start in zip((("F", 1), ("B", 1), ("B", 0)), (8.0, 12.0, 16.0), strict=True):
        watch.moment(kind, CALLS[call].key, Event(start), Event(start))
    timeline = watch.retimed(TIMELINE)
    assert timeline is not None and timeline.moments[0].seconds == pytest.approx(0.002)


def test_another_cycle_has_other_times() -> None:
    watch = Stopwatch()
    run(watch, [0, 1, 2, 3])
    assert watch.retimed(replace(TIMELINE, moments=TIMELINE.moments[:3])) is None


def test_the_next_backward_is_the_schedule_s() -> None:
    cycle = Cycle()
    first, second = cycle.new_call("a"), cycle.new_call("a")
    order = [("a", 0), ("a", 1), ("a", 2)]
    assert cycle.next_backward(order) is first and cycle.next_backward() is second
    first.backward_started = True
    assert cycle.next_backward(order) is second
    second.backward_started = True
    assert cycle.next_backward(order) is None  # its forward is still to come
    third = cycle.new_call("a")
    assert cycle.next_backward(order) is third
