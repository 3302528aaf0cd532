"""Schedules in time: bubbles by their published formulas, transfers by hand, and what a step has besides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forebay.estimate.step_time import KernelTime, ScheduleTime, StageTime, StepTime, schedule_time
from forebay.estimate.walk import LocalAction, local_actions
from forebay.pipeline.schedule import PipelinePlan, make_plan

F, B, W = 1.0, 1.5, 0.5  # of a stage: B is without W


def stage(*layers: tuple[KernelTime, KernelTime]) -> StageTime:
    return StageTime(tuple(f for f, _ in layers), tuple(b for _, b in reversed(layers)))


ONE = stage((KernelTime(F), KernelTime(B, weight_grads=W)))


def laid(plan: PipelinePlan, one: StageTime = ONE, **more: Any) -> ScheduleTime:
    computing = [[a for a in mine if a.computes] for mine in plan.actions]
    return schedule_time(computing, plan.ranks, dict.fromkeys(range(len(plan.ranks)), one), **more)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (2, 7), (4, 8), (8, 32)])
def test_1f1b_waits_for_pp_minus_1_microbatches(pp: int, microbatches: int) -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), 2.2.1: (pp - 1) (F + B) seconds of bubble on every rank."""
    found = laid(make_plan("1f1b", pp, microbatches))
    whole = F + B + W
    assert found.seconds == pytest.approx((microbatches + pp - 1) * whole)
    assert found.busy == pytest.approx([microbatches * whole] * pp)


def test_two_ranks_by_hand() -> None:
    """Rank 0: F0 F1 . . B0 . B1 with F = 1, B = 2 on each, two microbatches, and half a second from rank to rank.

    F0 of rank 0 ends at 1, of rank 1 at 2.5, its B at 4.5; rank 0's B0 from 5 to 7. F1 of rank 0 has come at 2.5, and runs on
    rank 1 from 4.5 to 5.5, its B to 7.5; rank 0's B1 from 8 to 10.
    """
    found = laid(make_plan("1f1b", 2, 2), message=0.5)
    assert found.seconds == pytest.approx(10)
    assert found.busy == pytest.approx([6, 6])


@pytest.mark.parametrize(("pp", "chunks"), [(2, 2), (4, 2), (4, 3)])
def test_interleaving_divides_the_bubble(pp: int, chunks: int) -> None:
    """The same paper, 2.2.2: of the same work, one chunk-th of it."""
    found = laid(make_plan("interleaved-1f1b", pp, 4 * pp, chunks))
    whole = F + B + W
    assert found.busy == pytest.approx([4 * pp * chunks * whole] * pp)
    assert found.seconds == pytest.approx(4 * pp * chunks * whole + (pp - 1) * whole)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_a_bubble_is_at_a_steps_ends(name: str) -> None:
    """Where all stages are as long, no schedule waits more for having more microbatches."""
    idle = [(found := laid(make_plan(name, 4, m))).seconds - max(found.busy) for m in (16, 32, 64)]
    assert idle == pytest.approx([idle[0]] * 3)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize("microbatches", [8, 16])
def test_every_schedule_does_all_work_once(name: str, microbatches: int) -> None:
    plan = make_plan(name, 4, microbatches)
    found = laid(plan)
    for rank, busy in enumerate(found.busy):
        assert busy == pytest.approx(len(plan.stages(rank)) * microbatches * (F + B + W))
    assert found.seconds >= max(found.busy)


def test_one_process_runs_one_after_the_other() -> None:
    assert schedule_time([local_actions(3, False)], [0], {0: ONE}).seconds == pytest.approx(3 * (F + B + W))


TRAVELS = stage(
    (KernelTime(2, all_to_all=1), KernelTime(3, all_to_all=1, weight_grads=1)),
    (KernelTime(2, all_to_all=1), KernelTime(3, all_to_all=1, weight_grads=1)),
)


def test_exchanges_are_hidden_where_a_forward_meets_a_backward() -> None:
    """F0, F1 with B0, B1. Alone both wait for their exchanges, but half of a backward's has the weight gradients before it."""
    found = schedule_time([local_actions(2, True)], [0], {0: TRAVELS})
    forward, backward = 2 * (2 + 1), 2 * (3 + 1 + 1 - 0.5)
    assert found.seconds == pytest.approx(forward + 2 * (2 + 3 + 1) + backward)
    assert found.exposed == pytest.approx([2 + 1])


def test_an_exchange_longer_than_what_hides_it_is_seen() -> None:
    slow = stage((KernelTime(1, all_to_all=5), KernelTime(1, all_to_all=5)))
    pair = LocalAction("OVERLAP_F_B", -1, -1, (LocalAction("F", 0, 1), LocalAction("B", 0, 0)))
    found = schedule_time([[LocalAction("F", 0, 0), pair, LocalAction("B", 0, 1)]], [0], {0: slow})
    assert found.exposed == pytest.approx([5 + (10 - 2) + 5])


def test_without_an_engine_nothing_is_hidden() -> None:
    found = schedule_time([local_actions(2, False)], [0], {0: TRAVELS}, engine=False)
    assert found.seconds == pytest.approx(2 * 2 * (2 + 1 + 3 + 1 + 1))


def test_what_hides_an_exchange_takes_longer() -> None:
    free = schedule_time([local_actions(2, True)], [0], {0: TRAVELS})
    found = schedule_time([local_actions(2, True)], [0], {0: TRAVELS}, contention=0.5)
    hidden = 4 + 2 * 0.5  # all of the pair's, and half of each of the last backward's
    assert found.seconds == pytest.approx(free.seconds + 0.5 * hidden)


def test_layers_without_a_partner_run_alone() -> None:
    short = stage((KernelTime(2, all_to_all=1), KernelTime(2, all_to_all=1)))
    times = {0: TRAVELS, 1: short}
    both = LocalAction("OVERLAP_F_B", -1, -1, (LocalAction("F", 0, 1), LocalAction("B", 1, 0)))
    found = schedule_time([[LocalAction("F", 0, 0), LocalAction("F", 1, 0), both]], [0, 0], times)
    # One layer of the forward meets the backward's only one: 4 seconds hide 2. The other one waits for its exchange.
    assert found.exposed == pytest.approx([2 + 1 + 1])


def test_nothing_ends_before_it_is_launched() -> None:
    """Layers of 1 second and 3 of launching, then a head of 10 and 1: the host launches the backward while the head runs."""
    layer, head = KernelTime(1, launches=3), KernelTime(10, launches=1)
    behind = {0: StageTime((layer, layer), ())}
    assert (
        schedule_time([[LocalAction("F", 0, 0)]], [0], behind, launch=1.0).seconds == 6
    )  # the device waits for the host
    headed = {0: StageTime((layer, layer, head), (layer, layer))}
    # Layers end when they are launched, at 3 and 6; the head at 16; the backward's launches end at 10 and 13, before that.
    found = schedule_time([[LocalAction("F", 0, 0), LocalAction("B", 0, 0)]], [0], headed, launch=1.0)
    assert found.seconds == 3 + 3 + 10 + 1 + 1
    assert schedule_time([[LocalAction("F", 0, 0), LocalAction("B", 0, 0)]], [0], headed).seconds == 14


def test_a_host_that_is_behind_holds_up_the_next_rank() -> None:
    slow, fast = StageTime((KernelTime(1, launches=5),), ()), StageTime((KernelTime(1),), ())
    found = schedule_time([[LocalAction("F", 0, 0)], [LocalAction("F", 1, 0)]], [0, 1], {0: slow, 1: fast}, launch=1.0)
    assert found.seconds == 5 + 1


def test_actions_that_wait_for_each_other() -> None:
    with pytest.raises(ValueError, match=r"wait for what never comes: 0B0"):
        schedule_time([[LocalAction("B", 0, 0), LocalAction("F", 0, 0)]], [0], {0: ONE})


STEP = StepTime("h200", 8.0, 8.0, 0.5, 0.25, 1.25, 6.0, (8.0, 6.0), (0.0, 0.0), 1000)


def test_a_step_is_the_sum_of_its_parts() -> None:
    assert (STEP.gradients, STEP.seconds, STEP.tokens_per_second) == (8.75, 10, 100)
    assert STEP.bubble == (0, 0.25) and not STEP.limited_by_host
    assert STEP.sentence() == "expected on h200: 10.000 s a step, 100 tokens/s; bubble 0 to 25 %."


def test_the_host_between_steps_counts_for_the_step_alone() -> None:
    found = replace(STEP, around=2.0)
    assert (found.gradients, found.seconds) == (8.75, 12)


def test_a_device_that_nobody_measured_says_so() -> None:
    assert replace(STEP, device="h100", measured=False).sentence().startswith("expected on h100, from data sheets: 10")


def test_a_slow_host_is_what_counts_and_is_named() -> None:
    slow = StepTime("h200", 8.0, 9.0, 0.5, 0.25, 1.25, 9.0, (8.0,), (0.0,), 1000)
    assert slow.limited_by_host and slow.seconds == 11
    assert "memory.graph" in slow.sentence() and slow.as_dict()["limited_by_host"]
