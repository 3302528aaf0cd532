"""The simulation against figures worked out by hand."""

import pytest

from forebay.memory.timeline import Assignment, CallFigures, Timeline, TimelineEvent, simulate


def timeline(saved: list[int], seconds: float, rate: float, transient: int = 0, other: int = 0) -> Timeline:
    """Regions that save one item each, all moments equally long, backward in reverse."""
    calls = tuple(CallFigures((f"r{i}", 0), (n,), seconds) for i, n in enumerate(saved))
    numbers = [*range(len(saved))]
    events = [TimelineEvent("F", i, seconds, other, transient) for i in numbers]
    events += [TimelineEvent("B", i, seconds, other, transient) for i in reversed(numbers)]
    return Timeline(calls, tuple(events), rate, rate)


def offload(*calls: int) -> Assignment:
    return Assignment({c: frozenset({0}) for c in calls})


def test_the_docstring_example() -> None:
    """12 bytes ready at t=10 over a link of 1 byte a second leave by t=22 and must start back by t=37 (12 / 0.92 s)."""
    plan = simulate(timeline([12, 7, 7], 10.0, 1.0), offload(0))
    assert plan.settle_at == {("r0", 0): ("B", ("r2", 0))}
    assert plan.fetch_at == {("B", ("r1", 0)): (("r0", 0),)} or plan.fetch_at == {("B", ("r2", 0)): (("r0", 0),)}
    assert plan.planned_bytes == 12


def test_keep_holds_everything_at_the_turn() -> None:
    plan = simulate(timeline([3, 4, 5], 1.0, 1.0, transient=2, other=10), Assignment())
    assert (plan.peak_bytes, plan.stall_seconds) == (10 + 12 + 2, 0.0)
    assert plan.step_seconds == 6.0


def test_a_fast_link_moves_for_nothing() -> None:
    plan = simulate(timeline([100] * 4, 1.0, 1e6), offload(0, 1))
    assert plan.stall_seconds == 0.0
    assert plan.step_seconds == 8.0


def test_a_link_that_is_too_slow_makes_compute_wait_at_the_turn() -> None:
    """Ready at 1, 4 s each: over at 5 and 9, the turn is at 3. Six seconds of waiting, at least."""
    plan = simulate(timeline([4, 4, 1], 1.0, 1.0), offload(0, 1))
    assert plan.stall_seconds >= 6.0


def test_a_window_trades_memory_for_time() -> None:
    slow = timeline([4] * 6, 1.0, 2.0)
    everything = offload(*range(5))
    wide, narrow = simulate(slow, everything, window=12), simulate(slow, everything, window=0)
    assert wide.stall_seconds < narrow.stall_seconds


def test_what_is_still_leaving_at_the_turn_is_taken_back_and_not_fetched() -> None:
    plan = simulate(timeline([4] * 6, 1.0, 2.0), offload(*range(5)), window=12)
    fetched = {key for keys in plan.fetch_at.values() for key in keys}
    assert fetched == set(plan.settle_at)
    assert ("r4", 0) not in fetched and ("r0", 0) in fetched


def test_recomputing_frees_all_but_the_input_and_costs_a_forward() -> None:
    base = timeline([10, 10], 1.0, 1.0)
    calls = tuple(CallFigures(c.key, (6, 4), 1.0, input_bytes=4) for c in base.calls)
    plan = simulate(Timeline(calls, base.events), Assignment(recompute=frozenset({"r0"})))
    assert plan.step_seconds == 5.0


def test_light_recomputation_frees_the_largest_item() -> None:
    base = timeline([10], 1.0, 1.0)
    calls = (CallFigures(("r0", 0), (3, 7), 1.0, light_recompute=True),)
    plan = simulate(Timeline(calls, base.events), Assignment(recompute=frozenset({"r0"})))
    assert plan.step_seconds == 2.6


def test_several_microbatches_in_flight() -> None:
    """F0 F0' B0 B0': two calls of one region live at once, each with its own item."""
    calls = (CallFigures(("r", 0), (5,), 1.0), CallFigures(("r", 1), (5,), 1.0))
    events = (
        TimelineEvent("F", 0, 1.0),
        TimelineEvent("F", 1, 1.0),
        TimelineEvent("B", 0, 1.0),
        TimelineEvent("B", 1, 1.0),
    )
    plan = simulate(Timeline(calls, events, 100.0, 100.0), Assignment())
    assert plan.peak_bytes == 10


@pytest.mark.parametrize(("light", "peak"), [(False, 100 + 10 + 40), (True, 100 + 10)])
def test_what_experts_make_again_adds_nothing_to_their_backward(light: bool, peak: int) -> None:
    """A checkpoint's is there beside all that backward takes; experts write a gradient over theirs."""
    calls = (CallFigures(("mlp", 0), (40, 10), 1.0, light_recompute=light, input_bytes=10),)
    events = (TimelineEvent("F", 0, 1.0, 0, 60), TimelineEvent("B", 0, 1.0, 0, 100))
    plan = simulate(Timeline(calls, events), Assignment(recompute=frozenset({"mlp"})))
    assert plan.peak_bytes == peak
