"""Times of a cycle that runs as planned take the place of those of the measuring ones."""

from dataclasses import replace

import pytest
import torch

from forebay.memory.recorder import StepCalls, Stopwatch
from forebay.memory.timeline import CallFigures, Rates, Timeline, TimelineEvent


class Event:
    """Stands for a CUDA event that was recorded at a time, in ms."""

    def __init__(self, at: float):
        self.at = at

    def elapsed_time(self, other: "Event") -> float:
        return other.at - self.at


CALLS = (CallFigures(("a", 0), (8,), 4e-3), CallFigures(("b", 0), (8,), 4e-3))
TIMELINE = Timeline(
    CALLS,
    (
        TimelineEvent("F", 0, 0.010),
        TimelineEvent("F", 1, 0.010),
        TimelineEvent("B", 1, 0.010),
        TimelineEvent("B", 0, 0.010),
    ),
    1e9,
    1e9,
)


class Allocator:
    """What stands for the device's memory: bytes now, and at most since it was last asked to begin anew. `rounding`: by so much
    what is allocated is more than what was asked for; `waiting`: bytes that are gone, but not for another stream; `counts`: it
    knows what was asked for."""

    def __init__(self) -> None:
        self.now = self.top = self.rounding = self.waiting = 0
        self.counts = True

    def stats(self) -> dict[str, int]:
        more = {"allocated": self.rounding, "active": self.rounding + self.waiting}
        if self.counts:
            more["requested"] = self.waiting
        kinds = {"current": self.now, "peak": self.top}
        return {f"{name}_bytes.all.{kind}": size + m for name, m in more.items() for kind, size in kinds.items()}


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: allocator.stats())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: allocator.top)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(allocator, "top", allocator.now))
    return allocator


def watching() -> Stopwatch:
    return Stopwatch(torch.device("cuda", 0))


MOMENTS = (("F", 0), ("F", 1), ("B", 1), ("B", 0))


def run(watch: Stopwatch, starts: list[float], wait: float = 0.0) -> None:
    for (kind, call), start in zip(MOMENTS, starts, strict=True):
        watch.before_event()
        watch.event(kind, CALLS[call].key, Event(start), Event(start + wait), 0)


def test_memory_is_that_of_the_cycle_without_what_the_planner_counts(memory: Allocator) -> None:
    """Two calls save 8 bytes each; call 0's are on the host at B1; 100 bytes were there before, 5 more come at F1 and stay."""
    watch = watching()
    levels = ((100, 120, 0), (113, 140, 0), (113, 125, 8), (113, 130, 0))  # at the start, at most, away
    for (kind, call), (start, most, away) in zip(MOMENTS, levels, strict=True):
        watch.before_event()
        memory.now = start
        watch.event(kind, CALLS[call].key, Event(0), Event(0), away)
        memory.top = most
    timeline = watch.retimed(TIMELINE, Rates())
    assert timeline is not None
    # By hand: at F1 100 + 8 + 5; at B1 those 8 more less 8 away; at B0 call 1's are gone and call 0's are back.
    assert [m.other for m in timeline.events] == [0, 5, 5, 5]
    assert [m.transient for m in timeline.events] == [20, 27, 12, 0]


def test_what_waits_for_another_stream_does_not_count(memory: Allocator) -> None:
    """0, 70, 70 and 0 bytes of it; of a peak what is allocated is nearer then."""
    watch = watching()
    for (kind, call), start, most, waiting in zip(
        MOMENTS, (100, 113, 121, 113), (120, 140, 133, 130), (0, 70, 70, 0), strict=True
    ):
        watch.before_event()
        memory.now, memory.rounding, memory.waiting = start, 2, waiting
        watch.event(kind, CALLS[call].key, Event(0), Event(0), 0)
        memory.top = most
    timeline = watch.retimed(TIMELINE, Rates())
    assert timeline is not None
    assert [m.other for m in timeline.events] == [0, 5, 5, 5]
    assert [m.transient for m in timeline.events] == [20, 27 + 2, 12 + 2, 0]


@pytest.mark.parametrize("counts", [True, False])
def test_what_the_allocator_gives_beside_what_is_asked_for_does_not_count(memory: Allocator, counts: bool) -> None:
    """By 0, 3, 1 and 2 bytes it is more; an allocator that counts nothing else is believed."""
    watch = watching()
    memory.counts = counts
    for (kind, call), start, most, more in zip(
        MOMENTS, (100, 113, 121, 113), (120, 140, 133, 130), (0, 3, 1, 2), strict=True
    ):
        watch.before_event()
        memory.now, memory.rounding = start, more
        watch.event(kind, CALLS[call].key, Event(0), Event(0), 0)
        memory.top = most
    timeline = watch.retimed(TIMELINE, Rates())
    assert timeline is not None
    assert [m.other for m in timeline.events] == ([0, 5, 5, 5] if counts else [0, 8, 6, 7])
    assert [m.transient for m in timeline.events] == [20, 27, 12, 0]


def test_rates_are_the_cycle_s_where_it_copied() -> None:
    watch = watching()
    run(watch, [0, 5, 11, 31])
    timeline = watch.retimed(TIMELINE, Rates(out=4e8, opening=5e8))
    assert timeline is not None and (timeline.out_rate, timeline.back_rate) == (4e8, 1e9)
    assert (timeline.opening_rate, timeline.closing_rate) == (5e8, None)
    timeline = watch.retimed(replace(TIMELINE, memory_rate=4e12), Rates())
    assert timeline is not None and timeline.memory_rate == 4e12


def test_shorter_times_count_and_waits_do_not() -> None:
    watch = watching()
    run(watch, [0, 5, 11, 31], wait=1)
    timeline = watch.retimed(TIMELINE, Rates())
    assert timeline is not None
    # 5 - 1, 6 - 1, and 19 is longer than what was measured; the last moment has no end.
    assert [m.seconds for m in timeline.events] == pytest.approx([0.004, 0.005, 0.010, 0.010])
    assert timeline.calls[0].seconds == pytest.approx(4e-3 * 29 / 40)


def test_idle_times_are_told_apart() -> None:
    watch = watching()
    for (kind, call), start, idle in zip(MOMENTS, [0, 5, 11, 31], [2, None, 15, None], strict=True):
        watch.before_event()
        watch.event(kind, CALLS[call].key, Event(start), Event(start), 0)
        if idle is not None:
            watch.idle(lambda at=idle: Event(at))  # type: ignore[misc]
    timeline = watch.retimed(TIMELINE, Rates())
    assert timeline is not None
    assert [m.idle for m in timeline.events] == pytest.approx([0.003, 0.0, 0.016, 0.0])
    assert [m.seconds for m in timeline.events] == pytest.approx([0.002, 0.006, 0.004, 0.010])


def test_the_share_of_waits() -> None:
    watch = watching()
    assert watch.waited() == 0.0
    run(watch, [0, 5, 11, 31], wait=2)
    assert watch.waited() == pytest.approx(8 / 33)


def test_time_without_work_does_not_count() -> None:
    watch = watching()
    watch.before_event()
    watch.event("F", CALLS[0].key, Event(0), Event(0), 0)
    watch.idle(lambda: Event(2))
    watch.idle(lambda: Event(3))  # the second wait of the same pause
    for (kind, call), start in zip((("F", 1), ("B", 1), ("B", 0)), (8.0, 12.0, 16.0), strict=True):
        watch.before_event()
        watch.event(kind, CALLS[call].key, Event(start), Event(start), 0)
    timeline = watch.retimed(TIMELINE, Rates())
    assert timeline is not None and timeline.events[0].seconds == pytest.approx(0.002)


def test_another_cycle_has_other_times() -> None:
    watch = watching()
    run(watch, [0, 1, 2, 3])
    assert watch.retimed(replace(TIMELINE, events=TIMELINE.events[:3]), Rates()) is None


def test_the_next_backward_is_the_schedule_s() -> None:
    cycle = StepCalls()
    first, second = cycle.new_call("a"), cycle.new_call("a")
    order = [("a", 0), ("a", 1), ("a", 2)]
    assert cycle.next_backward(order) is first and cycle.next_backward() is second
    first.backward_started = True
    assert cycle.next_backward(order) is second
    second.backward_started = True
    assert cycle.next_backward(order) is None  # its forward is still to come
    third = cycle.new_call("a")
    assert cycle.next_backward(order) is third
