"""What plans are made with: the rates of the last cycle's copies, and when."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from forebay.memory.autotune import Planning
from forebay.memory.host_store import HostStore, Traffic
from forebay.memory.timeline import CallFigures, Key, Rates, Timeline, TimelineEvent

MB = 1_000_000


class Copied:
    """Stands for a copy that took a known time."""

    def __init__(self, milliseconds: float | None):
        self._milliseconds = milliseconds

    def milliseconds(self) -> float | None:
        return self._milliseconds


class Replayed:
    """Stands for a captured cycle's stopwatch: the share it waited, and a timeline with the rates that it is given."""

    def __init__(self, waited: float):
        self._waited = waited

    def waited(self) -> float:
        return self._waited

    def retimed(self, timeline: Timeline, rates: Rates) -> Timeline:
        return replace(timeline, out_rate=10e9, back_rate=10e9, opening_rate=rates.opening, closing_rate=rates.closing)


def timeline(microbatches: int = 12, ahead: int = 4) -> Timeline:
    """1F1B of one region."""
    order = ["F"] * ahead + ["B", "F"] * (microbatches - ahead) + ["B"] * ahead
    counts = {"F": 0, "B": 0}
    events = []
    for kind in order:
        events.append(TimelineEvent(kind, counts[kind], 1e-3))
        counts[kind] += 1
    calls = tuple(CallFigures(("a", m), (4 * MB, MB), 1e-3) for m in range(microbatches))
    return Timeline(calls, tuple(events), 20e9, 20e9)


def planning() -> Planning:
    found = Planning(HostStore(torch.device("cpu")), {"a": "offload"}, None, "fit", lambda paths, on: None)
    found.timeline = timeline()
    found._follow_plan(found._plan_pipeline(found.timeline))
    return found


class Recorded:
    """A measured cycle."""

    unreached: dict[Key, tuple[int, ...]] = {}  # noqa: RUF012

    def timeline(self, out_rate: float | None, back_rate: float | None) -> Timeline:
        return timeline()


def test_plans_know_the_rate_of_the_devices_own_memory() -> None:
    found = planning()
    found._store.memory_rate = 4e12
    found._make_plan(Recorded())  # type: ignore[arg-type]
    assert found.timeline is not None and found.timeline.memory_rate == 4e12


def copies(traffic: Traffic, milliseconds: list[float]) -> None:
    for taken in milliseconds:
        traffic.add(MB, Copied(taken))  # type: ignore[arg-type]


def test_rates_of_all_copies_and_of_some() -> None:
    traffic = Traffic()
    assert traffic.measure() == (0, None)
    copies(traffic, [1.0, 2.0, 5.0])
    assert traffic.measure() == (3 * MB, pytest.approx(3 * MB / 8e-3))
    assert traffic.rate(slice(2)) == pytest.approx(2 * MB / 3e-3)
    assert traffic.rate(slice(2, None)) == pytest.approx(MB / 5e-3)
    assert traffic.rate(slice(0)) is None


def test_a_steps_ends_have_rates_of_their_own_if_each_call_has_one_copy() -> None:
    plans = planning()
    assert plans.plan is not None and plans.timeline is not None
    leave = len(plans.plan.offload)
    assert leave >= 6
    first = sum(("a", m) in plans.plan.offload for m in range(4))
    last = sum(("a", m) in plans.plan.offload for m in range(8, 12))
    assert first and last
    copies(plans._store.outbound, [1.0] * first + [2.0] * (leave - first))
    copies(plans._store.inbound, [4.0] * (leave - last) + [3.0] * last)
    rates = plans._rates()
    assert rates.opening == pytest.approx(1e9) and rates.closing == pytest.approx(MB / 3e-3)
    assert rates.out is not None and rates.back is not None
    assert 5e8 < rates.out < rates.opening and 2.5e8 < rates.back < rates.closing
    copies(plans._store.inbound, [1.0])
    more = plans._rates()
    assert more.opening is more.closing is None and more.out == rates.out


@pytest.mark.parametrize("late", [False, True])
def test_a_link_is_counted_on_less_where_a_plan_made_for_a_graph_was_late(late: bool) -> None:
    plans = planning()
    seen: list[Timeline] = []
    plan_pipeline = plans._plan_pipeline

    def plan(with_times: Timeline) -> Any:
        seen.append(with_times)
        return plan_pipeline(with_times)

    plans._plan_pipeline = plan  # type: ignore[method-assign]
    for _ in range(2):
        plans._replayed = Replayed(0.05 if late else 0.0)  # type: ignore[assignment]
        plans.plan_again()
    rates = [t.out_rate for t in seen]
    assert rates == ([10e9, pytest.approx(8.5e9)] if late else [10e9]), "late, on rates of calls: new rates say why"
