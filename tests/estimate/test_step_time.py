"""Step times on a device of round figures: operations, schedules with their published bubbles, gathers and reductions by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.estimate.device import FIGURES, DeviceProfile, Figure, load
from forebay.estimate.layer_time import Clock, KernelTime
from forebay.estimate.op_costs import _grouped
from forebay.estimate.routing import EvenRouting
from forebay.estimate.state import Sharing
from forebay.estimate.step_time import (
    Beside,
    Elements,
    ScheduleTimer,
    ShardingTime,
    StageTime,
    StepOverhead,
    StepTime,
)
from forebay.estimate.types import OpCost
from forebay.pipeline.schedule import Action, PipelinePlan, local_plan, make_plan

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROUND = {"bandwidth": 1e3, "kernel": 1e-9, "launch": 1e-9, "contention": 1e-9}


def device(node: int = 8, **figures: float) -> DeviceProfile:
    """Every rate is 1e6, bandwidth 1e3, and times are almost 0, except for `figures`."""
    values = {**dict.fromkeys(FIGURES, 1e6), **ROUND, **figures}
    made = {name: Figure(((0.0, value),), "measured", "here") for name, value in values.items()}
    return DeviceProfile("plain", "a plain device", node, made)


# --- operations -------------------------------------------------------------------------------------------------------


def test_an_operation_takes_the_longer_of_its_two_limits() -> None:
    """1e6 FLOP/s, 1e3 bytes/s, and a gap between kernels."""
    clock = Clock(device())
    assert clock.seconds(OpCost("gemm", 5_000_000, 1000)) == pytest.approx(5)
    assert clock.seconds(OpCost("gemm", 5_000_000, 7000)) == pytest.approx(7)
    assert clock.seconds(OpCost("pointwise", 0, 3000)) == pytest.approx(3)
    assert Clock(device(kernel=0.5)).seconds(OpCost("pointwise", 0, 1000, launches=4)) == pytest.approx(1 + 4 * 0.5)


def test_each_kind_has_its_rate() -> None:
    rates = {"grouped": 1e6, "grouped_weights": 2e6, "attention": 4e6, "attention_backward": 8e6}
    clock = Clock(device(**rates))
    assert [clock.seconds(OpCost(kind, 8_000_000, 0)) for kind in rates] == pytest.approx([8, 4, 2, 1])
    wide = Clock(device(matmul_fp32=1e5, **rates), wide=True)
    assert wide.seconds(OpCost("grouped", 8_000_000, 0)) == pytest.approx(80)


def test_experts_products_take_whole_tiles_in_turns() -> None:
    """The kernels of six steps on H200s, small tiles among them. Full tiles of long sums run at what power allows."""
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "captured_kernels.json"
    clock = Clock(load("h200"))
    for p in json.loads(file.read_text("utf-8"))["products"]:
        op = _grouped(p["kind"], p["rows"], p["inner"], p["outer"], p["experts"], 2)
        assert clock.seconds(op) == pytest.approx(p["microseconds"] / 1e6, rel=0.12 if op.small else 0.08), p
    one, two = (clock.seconds(_grouped("grouped", 66 * rows, 2048, 256, 66, 2)) for rows in (1024, 1025))
    assert two > 1.08 * one, "one row more is another turn of all multiprocessors"


def test_experts_with_few_rows_are_bound_by_their_matrices() -> None:
    """Gradients from 128 rows of each of 48 experts: 0.48 ms for [1216, 7168] and 0.26 for [3584, 1216] on an H200, and 1.2 and
    0.61 added to fp32 sums; 0.94 and 0.48 for 112 rows of 128 experts, [896, 3072] and [896, 1536] (run 10 of draw 26)."""
    clock = Clock(load("h200"))
    adds = replace(clock, sums=4.0)
    for rows, inner, outer, experts, took, added in (
        (6144, 1216, 7168, 48, 475, 1190),
        (6144, 3584, 1216, 48, 255, 606),
        (14336, 896, 3072, 128, None, 940),
        (14336, 896, 1536, 128, None, 482),
    ):
        op = _grouped("grouped_weights", rows, inner, outer, experts, 2)
        assert adds.seconds(op) == pytest.approx(added / 1e6, rel=0.13)
        assert took is None or clock.seconds(op) == pytest.approx(took / 1e6, rel=0.13)


def test_torch_picks_tiles_by_the_rows_that_a_capacity_may_fill() -> None:
    """Half of them are empty, and the large tiles compute as many of the others."""
    few, many = (_grouped("grouped", 96 * 48, 4608, 640, 48, 2, given * 48) for given in (96, 192))
    assert (few.small, few.tiles, many.small, many.tiles) == (True, 48 * 5, False, 48 * 3)
    assert few.flops == many.flops


def test_a_routers_product_is_bound_by_its_rows() -> None:
    """fp32 [16896, 1536] @ [1536, 16] takes 61 microseconds on an H200, [4096, 2048] @ [2048, 128] 65."""
    clock = Clock(load("h200"))
    for rows, hidden, experts, took in ((16896, 1536, 16, 61e-6), (4096, 2048, 128, 65e-6)):
        moved = 4 * (rows * hidden + hidden * experts + rows * experts)
        assert clock.seconds(OpCost("gemm_fp32", 2 * rows * hidden * experts, moved)) == pytest.approx(took, rel=0.12)


def test_a_heads_gradient_is_bound_by_its_sum_or_its_flops() -> None:
    """Chunks of a head's tokens on H200s: 512 of 250,240 x 640 take 547 microseconds, 1792 of 105,216 x 2176 1248, 1472 of
    89,728 x 1152 535."""
    clock = Clock(load("h200"))
    for tokens, vocabulary, width, took in (
        (512, 250240, 640, 547),
        (1792, 105216, 2176, 1248),
        (1472, 89728, 1152, 535),
    ):
        moved = 2 * tokens * (vocabulary + width) + 8 * vocabulary * width
        found = clock.seconds(OpCost("gemm_sum", 2 * tokens * vocabulary * width, moved))
        assert found == pytest.approx(took / 1e6, rel=0.1)


def test_what_whole_tiles_compute_takes_time() -> None:
    clock = Clock(device(attention=1e6))
    assert clock.seconds(OpCost("attention", 8_000_000, 0, padding=1.5)) == pytest.approx(12)


def test_unvectorized_and_unaligned_kernels_are_slower() -> None:
    """fp32 [32768, 2048] into bf16 on an H200: 0.27 ms of torch's loop, 0.10 of a vectorized kernel. An H100's loop is hardly
    slower, 1.83 to 1.99 ms for 2.83 GB of bf16, though its memory is. A GEMM is slower unless it is bound by memory."""
    n = 32768 * 2048
    slow, fast = (Clock(load("h200")).seconds(OpCost("pointwise", 0, 6 * n, loads=loads)) for loads in (3 * n, 0))
    assert slow == pytest.approx(0.27e-3, rel=0.05) and fast == pytest.approx(0.10e-3, rel=0.05)
    scores = OpCost("pointwise", 0, 2_830_000_000, loads=1_415_000_000)
    assert Clock(load("h100")).seconds(scores) == pytest.approx(1.91e-3, rel=0.05)
    clock = Clock(device())
    aligned, unaligned = (clock.seconds(OpCost(kind, 10**6, 10)) for kind in ("gemm", "gemm_unaligned"))
    assert unaligned > 5 * aligned
    assert clock.seconds(OpCost("gemm_unaligned", 10**6, 10**6)) == pytest.approx(1000)


def test_an_all_to_all_uses_the_links_within_and_between_nodes_at_once() -> None:
    """Of 16 ranks, 8 a node, 7 of 15 others are on the same node."""
    slow = device(node=8, all_to_all_between=1e3)
    assert Clock(slow, ranks=8).seconds(OpCost("all_to_all", 0, 4000)) == pytest.approx(4e-3, rel=1e-3)
    assert Clock(slow, ranks=16).seconds(OpCost("all_to_all", 0, 4000)) == pytest.approx(4 * 8 / 15)
    lopsided = device(node=8, all_to_all=1e3, all_to_all_between=1e6)
    assert Clock(lopsided, ranks=16).seconds(OpCost("all_to_all", 0, 4000)) == pytest.approx(4 * 7 / 15)
    assert Clock(device(kernel=1.0)).seconds(OpCost("all_to_all", 0, 0)) == 0


def test_rows_that_cross_once_a_node_take_two_transfers() -> None:
    """16 ranks, 8 a node. A rank has T tokens and receives 16 T hit(8) rows, 7 of 8 from its node in the second one."""
    tokens, row = 1000, 10

    def hit(held: int) -> float:
        return 1 - math.comb(128 - held, 8) / math.comb(128, 8)

    received = 16 * tokens * hit(8)
    share = EvenRouting(128, 8).crossing_share(16, 8, "auto")
    clock = Clock(device(node=8, all_to_all=1e3, all_to_all_between=1e2), ranks=16, crossing=share)
    expected = tokens * hit(64) * row / 1e2 + received * 7 / 8 * row / 1e3
    flat = OpCost("all_to_all", 0, round(received * 15 / 16 * row))
    assert clock.seconds(flat) == pytest.approx(expected, rel=1e-4)
    assert EvenRouting(128, 8).crossing_share(16, 8, "nccl") == EvenRouting(128, 8).crossing_share(8, 8, "auto") == 1
    assert EvenRouting().crossing_share(16, 8, "auto") == 1


def test_shares_of_a_kernel_time() -> None:
    ops = [OpCost("gemm", 10**6, 0), OpCost("all_to_all", 0, 2 * 10**6), OpCost("grouped_weights", 3 * 10**6, 0, 2)]
    found = Clock(device()).kernel_time(ops)
    assert (found.compute, found.all_to_all, found.weight_grads) == pytest.approx((1, 2, 3))
    assert (found.launches, found.computing, found.alone) == pytest.approx((4, 4, 6))
    assert found + found == KernelTime(2 * found.compute, 2 * found.all_to_all, 2 * found.weight_grads, 8)


# --- schedules --------------------------------------------------------------------------------------------------------

F, B, W = 1.0, 1.5, 0.5  # seconds of a stage; B is without W


def stage(*layers: tuple[KernelTime, KernelTime]) -> StageTime:
    return StageTime(tuple(f for f, _ in layers), tuple(b for _, b in reversed(layers)))


def overlapped(forward: int, forward_mb: int, backward: int, backward_mb: int) -> Action:
    parts = Action("F", forward, forward_mb), Action("B", backward, backward_mb)
    return Action("OVERLAP_F_B", -1, -1, parts)


ONE = stage((KernelTime(F), KernelTime(B, weight_grads=W)))
WITH_TRANSFERS = stage(*[(KernelTime(2, all_to_all=1), KernelTime(3, all_to_all=1, weight_grads=1))] * 2)
FB = [Action("F", 0, 0), Action("B", 0, 0)]


def of_plan(plan: PipelinePlan, **more: Any) -> ScheduleTimer:
    computing = [[a for a in mine if a.computes] for mine in plan.actions]
    return ScheduleTimer(computing, plan.ranks, dict.fromkeys(range(len(plan.ranks)), ONE), **more)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (2, 7), (4, 8), (8, 32)])
def test_1f1b_waits_for_pp_minus_1_microbatches(pp: int, microbatches: int) -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), 2.2.1: (pp - 1) (F + B) seconds of bubble on every rank."""
    found = of_plan(make_plan("1f1b", pp, microbatches))
    whole = F + B + W
    assert found.seconds == pytest.approx((microbatches + pp - 1) * whole)
    assert found.busy == pytest.approx([microbatches * whole] * pp)


def test_two_ranks_by_hand() -> None:
    """Rank 0: F0 F1 . . B0 . B1 with F = 1, B = 2 on each, two microbatches, and half a second from rank to rank.

    F0 of rank 0 ends at 1, of rank 1 at 2.5, its B at 4.5; rank 0's B0 runs from 5 to 7. F1 arrives at rank 1 at 2.5,
    and runs there from 4.5 to 5.5, its B to 7.5; rank 0's B1 runs from 8 to 10.
    """
    found = of_plan(make_plan("1f1b", 2, 2), message=0.5)
    assert found.seconds == pytest.approx(10) and found.busy == pytest.approx([6, 6])


@pytest.mark.parametrize(("pp", "chunks"), [(2, 2), (4, 2), (4, 3)])
def test_interleaving_divides_the_bubble(pp: int, chunks: int) -> None:
    """The same paper, 2.2.2: one chunk-th of it for the same work."""
    found = of_plan(make_plan("interleaved-1f1b", pp, 4 * pp, chunks))
    whole = F + B + W
    assert found.busy == pytest.approx([4 * pp * chunks * whole] * pp)
    assert found.seconds == pytest.approx(4 * pp * chunks * whole + (pp - 1) * whole)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_bubbles_do_not_grow_with_microbatches(name: str) -> None:
    idle = [(found := of_plan(make_plan(name, 4, m))).seconds - max(found.busy) for m in (16, 32, 64)]
    assert idle == pytest.approx([idle[0]] * 3)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize("microbatches", [8, 16])
def test_every_schedule_does_all_work_once(name: str, microbatches: int) -> None:
    plan = make_plan(name, 4, microbatches)
    found = of_plan(plan)
    for rank, busy in enumerate(found.busy):
        assert busy == pytest.approx(len(plan.stages(rank)) * microbatches * (F + B + W))
    assert found.seconds >= max(found.busy)


def test_without_an_engine_nothing_overlaps() -> None:
    assert ScheduleTimer([local_plan(3, False).actions[0]], [0], {0: ONE}).seconds == pytest.approx(3 * (F + B + W))
    found = ScheduleTimer([local_plan(2, False).actions[0]], [0], {0: WITH_TRANSFERS}, engine=False)
    assert found.seconds == pytest.approx(2 * 2 * (2 + 1 + 3 + 1 + 1))


def test_transfers_are_hidden_where_a_forward_overlaps_a_backward() -> None:
    """F0, F1 with B0, B1. Alone both wait for their transfers, but weight gradients hide half of a backward's. What hides a
    transfer is slower by a share of it."""
    found = ScheduleTimer([local_plan(2, True).actions[0]], [0], {0: WITH_TRANSFERS})
    forward, backward = 2 * (2 + 1), 2 * (3 + 1 + 1 - 0.5)
    assert found.seconds == pytest.approx(forward + 2 * (2 + 3 + 1) + backward)
    assert found.exposed == pytest.approx([2 + 1])
    contended = ScheduleTimer([local_plan(2, True).actions[0]], [0], {0: WITH_TRANSFERS}, contention=0.5)
    hidden = 4 + 2 * 0.5  # all of the pair's, and half of each of the last backward's
    assert contended.seconds == pytest.approx(found.seconds + 0.5 * hidden)


def test_exposed_transfers() -> None:
    """One longer than what hides it; and a layer without a partner: 4 seconds hide 2, the other layer's is exposed."""
    slow = stage((KernelTime(1, all_to_all=5), KernelTime(1, all_to_all=5)))
    actions = [Action("F", 0, 0), overlapped(0, 1, 0, 0), Action("B", 0, 1)]
    assert ScheduleTimer([actions], [0], {0: slow}).exposed == pytest.approx([5 + (10 - 2) + 5])
    short = stage((KernelTime(2, all_to_all=1), KernelTime(2, all_to_all=1)))
    actions = [Action("F", 0, 0), Action("F", 1, 0), overlapped(0, 1, 1, 0)]
    found = ScheduleTimer([actions], [0, 0], {0: WITH_TRANSFERS, 1: short})
    assert found.exposed == pytest.approx([2 + 1 + 1])


def test_nothing_ends_before_it_is_launched() -> None:
    """Layers of 1 second and 3 of launching, then a head of 10 and 1: the host launches the backward while the head runs."""
    layer, head = KernelTime(1, launches=3), KernelTime(10, launches=1)
    assert ScheduleTimer([FB[:1]], [0], {0: StageTime((layer, layer), ())}, launch=1.0).seconds == 6
    headed = {0: StageTime((layer, layer, head), (layer, layer))}
    # Layers end when they are launched, at 3 and 6; the head at 16; the backward's launches end at 10 and 13, before that.
    assert ScheduleTimer([FB], [0], headed, launch=1.0).seconds == 3 + 3 + 10 + 1 + 1
    assert ScheduleTimer([FB], [0], headed).seconds == 14
    # A slow host delays the next rank.
    slow, fast = StageTime((KernelTime(1, launches=5),), ()), StageTime((KernelTime(1),), ())
    found = ScheduleTimer([FB[:1], [Action("F", 1, 0)]], [0, 1], {0: slow, 1: fast}, launch=1.0)
    assert found.seconds == 5 + 1


def test_actions_that_wait_for_each_other() -> None:
    with pytest.raises(ValueError, match=r"wait for what never comes: 0B0"):
        ScheduleTimer([FB[::-1]], [0], {0: ONE})


STEP = StepTime("h200", 8.0, 8.0, 0.5, 0.25, 1.25, 4.0, (8.0, 6.0), (0.0, 0.0), 1000)


def test_a_step_is_the_sum_of_its_parts() -> None:
    assert (STEP.gradients, STEP.seconds, STEP.tokens_per_second) == (8.75, 10, 100)
    assert STEP.bubble == (0, 0.25) and not STEP.limited_by_host
    assert STEP.sentence() == "expected on h200: 10.000 s a step to within 45 %, 100 tokens/s; bubble 0 to 25 %."
    around = replace(STEP, around=2.0)
    assert (around.gradients, around.seconds) == (8.75, 12)
    assert replace(STEP, device="h100", measured=False).sentence().startswith("expected on h100, from data sheets: 10")
    slow = StepTime("h200", 8.0, 9.0, 0.5, 0.25, 1.25, 9.0, (8.0,), (0.0,), 1000)
    assert slow.limited_by_host and slow.seconds == 11
    assert "memory.graph" in slow.sentence() and slow.as_dict()["limited_by_host"]
    assert replace(slow, capturable=False).sentence().endswith("hosts differ by 1.6x).")


def test_a_band_has_room_for_a_slower_host() -> None:
    """1.6 times the launches end 5.4 s after those that are planned for, and 0.6 of the time around them is added."""
    assert STEP.error == STEP.as_dict()["error"] == 0.45
    slow = replace(STEP, launched=9.0, host=9.0, launch=6e-6)
    assert slow.error == pytest.approx(5.4 / slow.seconds)
    assert "to within 49 %" in slow.sentence() and "6.0 microseconds" in slow.sentence()
    around = replace(slow, around=2.0)
    assert around.error == pytest.approx((5.4 + 1.2) / around.seconds)
    captured = replace(STEP, host=0.0)
    assert captured.error == 0.33 and replace(captured, around=20.0).error == pytest.approx(12 / 30)


# --- sharding ---------------------------------------------------------------------------------------------------------

# Memory of 1000 bytes/s; links of 10 bytes/s.
DEVICE = device(all_gather=10, reduce_scatter=10)
FOUR = Sharing(data=4, sharded=True, parameter=4, compute=2, summed=4)
ENGINE = replace(FOUR, engine=True, reshard=False)
PART = Elements(1000)
COPIED = (250 * 6 + 2 * 1000 * 2) / 1000  # the own quarter is cast, and what arrives is copied
SENT = 1000 * 2 * 3 / 4 / 10
REDUCED = (2 * 1000 * 4 + 250 * 8) / 1000
# A microbatch's gradients in bf16 become chunks in fp32, which takes longer.
REDUCED_EACH = (2.2 * 1000 * (2 + 4) + 250 * 8) / 1000
REDUCED_SENT = 1000 * 4 * 3 / 4 / 10
ADDED = 1000 * (2 + 2 * 4) / 1000
FIRST = 1000 * (2 + 4) / 1000  # the first microbatch's become the sum
ZEROS = 1000 * 4 / 1000
HIDDEN = Beside(1e6, 1e6, 1e6)


def overhead(sharding: ShardingTime, *parts: Elements, ends: int = 0) -> StepOverhead:
    return sharding.step(parts, Elements(ends), 0, fused=True, clips=False)


def test_an_engine_gathers_and_reduces_once_a_step_and_nothing_hides_it() -> None:
    sharding = ShardingTime(DEVICE, ENGINE, 8)
    gather, reduce = pytest.approx(2 * (COPIED + SENT + ZEROS)), pytest.approx(2 * (REDUCED + REDUCED_SENT))
    assert overhead(sharding, PART, PART) == StepOverhead(gather, reduce, 0)
    assert sharding.layer(PART, HIDDEN) == pytest.approx((0, ADDED))
    slow = device(node=2, all_gather=10, all_gather_between=1, reduce_scatter=10, reduce_scatter_between=1)
    found = overhead(ShardingTime(slow, ENGINE, 1), PART)
    assert found.gather == pytest.approx(COPIED + 10 * SENT + ZEROS)
    assert found.reduce == pytest.approx(REDUCED + 10 * REDUCED_SENT)


def test_an_engine_that_reshards_experts_gathers_them_for_each_use() -> None:
    """The experts of this process alone: a gather to itself is a cast."""
    sharding = ShardingTime(DEVICE, replace(FOUR, ep=4, engine=True, reshard=True, apart=True), 8)
    again = 1000 * 6 / 1000
    # Gradients are added to their sums as they are made: `Clock.seconds` has that.
    assert sharding.layer(Elements(0, 1000), HIDDEN) == pytest.approx((again, again))
    found = overhead(sharding, Elements(1000, 1000))
    assert found.gather == pytest.approx(COPIED + SENT + 2 * ZEROS)
    # Their gradients are in the shards' dtype already: nothing to reduce and nothing to cast.
    assert found.reduce == pytest.approx(REDUCED + REDUCED_SENT)


@pytest.mark.parametrize("contention", [1e-9, 0.5])
def test_without_an_engine_a_layer_hides_the_links(contention: float) -> None:
    """Each microbatch gathers for its forward and again for its backward; gradients are reduced once. What hides a link is slower
    by a share of it."""
    sharding = ShardingTime(device(all_gather=10, reduce_scatter=10, contention=contention), FOUR, 8)
    forward, backward = sharding.layer(PART, HIDDEN)
    reduced = REDUCED + contention * REDUCED_SENT
    assert forward == pytest.approx(COPIED + contention * SENT)
    assert backward == pytest.approx(COPIED + contention * SENT + (ADDED * 7 + FIRST + reduced) / 8)
    assert sharding.layer(PART, HIDDEN._replace(forward=100))[0] == pytest.approx(
        COPIED + SENT - 100 + contention * 100
    )
    alone = sharding.layer(PART, Beside(0, 0, 0))
    assert alone[1] - backward == pytest.approx((1 - contention) * (SENT + REDUCED_SENT / 8))


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [
        ({"reshard": False}, (COPIED / 8, (ADDED * 7 + FIRST + REDUCED) / 8)),
        ({"sums": False}, (COPIED, COPIED + REDUCED_EACH)),
    ],
    ids=["unsharded parameters are gathered once", "reducing each microbatch adds nothing"],
)
def test_fsdp_options(sharing: dict[str, Any], expected: tuple[float, float]) -> None:
    assert ShardingTime(DEVICE, replace(FOUR, **sharing), 8).layer(PART, HIDDEN) == pytest.approx(expected)


def test_replicas_all_reduce_a_shard_once_a_step() -> None:
    """A quarter of the weights, half of it from each of two replicas, sent and received, between nodes."""
    links = device(node=4, all_gather=10, reduce_scatter=10, all_gather_between=1, reduce_scatter_between=1)
    across = 250 * 4 / 2 * (1 + 1)
    engine = ShardingTime(links, replace(ENGINE, replicate=2), 8)
    assert overhead(engine, PART).reduce == pytest.approx(REDUCED + REDUCED_SENT + across)
    assert overhead(engine, PART).gather == pytest.approx(COPIED + SENT + ZEROS)  # inside a node
    # FSDP2 does both at once, and the longer one counts. Each microbatch is reduced inside the replica.
    ends = overhead(ShardingTime(links, replace(FOUR, replicate=2, sums=False), 4), ends=1000)
    assert ends.reduce == pytest.approx(4 * (REDUCED_EACH + max(REDUCED_SENT, across / 4)))
    alone = ShardingTime(links, replace(FOUR, data=1, replicate=2, engine=True), 1)
    assert overhead(alone, ends=1000).reduce == pytest.approx(1000 * 4 / 2 * (1 / 10 + 1 / 10))


@pytest.mark.parametrize("sums", [True, False], ids=["once a step", "each microbatch"])
def test_ddp_all_reduces_gradients_beside_the_backward(sums: bool) -> None:
    """3 of 4 parts are sent and received of 2000 bytes, after a copy to a bucket and before one back. Nothing hides the ends'."""
    ddp = ShardingTime(DEVICE, Sharing(replicate=4, parameter=2, compute=2, summed=2, sums=sums), 8)
    added, each = 7 / 8 * 1000 * 6 / 1000, 8 if sums else 1
    copied, sent = 2 * 2 * 2000 / 1000, 2 * 3 / 4 * 2000 / 10
    assert ddp.layer(PART, Beside(1e6, 1e6, 1e6)) == pytest.approx((0, added + copied / each), rel=1e-6)
    assert ddp.layer(PART, Beside(1e6, 1e6, 0)) == pytest.approx((0, added + (copied + sent) / each))
    assert ddp.layer(Elements(1000, frozen=1000), Beside(0, 0, 0))[1] == 0
    found = overhead(ddp, PART, ends=1000)
    assert (found.gather, found.reduce) == pytest.approx((0, 8 * added + 8 / each * (copied + sent)))


def test_gradients_of_embedding_and_head_are_added_up_too() -> None:
    """The last 3 of 4 microbatches, in bf16: each reads two gradients and writes one. One process gathers nothing."""
    alone = ShardingTime(DEVICE, Sharing(parameter=2, compute=2, summed=4), 4)
    assert overhead(alone, PART, ends=500).reduce == pytest.approx(3 * 500 * 6 / 1000)
    assert overhead(alone, PART) == StepOverhead(0, 0, 0)
    assert alone.layer(PART, HIDDEN) == pytest.approx((0, 3 / 4 * 1000 * 6 / 1000))
    found = overhead(ShardingTime(DEVICE, FOUR, 8), PART, ends=1000)
    assert found.reduce == pytest.approx(7 * ADDED + FIRST + REDUCED + REDUCED_SENT)
    assert found.gather == pytest.approx(8 * 2 * (COPIED + SENT))  # for each forward, and again for each backward


def test_the_optimizer_reads_four_and_writes_three() -> None:
    """The norm reads gradients once more, clipping reads and writes them: 8 or 10 passes."""
    sharding = ShardingTime(DEVICE, Sharing(), 1)
    plain, clipped = (sharding.step([], Elements(0), 1000, fused=True, clips=c).optimizer for c in (False, True))
    assert clipped / plain == pytest.approx(10 / 8)
    assert 8 < plain < 8 / 0.75


@pytest.mark.parametrize(("name", "rate"), [("h200", 2.52e12), ("h100", 2.34e12)])
def test_an_update_in_bf16_is_not_slowed_down_by_slower_memory(name: str, rate: float) -> None:
    """2.35 to 2.76 TB/s on H200s, 2.2 to 2.4 on an H100, whose copies reach 0.7 of the H200's."""
    sharding = ShardingTime(load(name), Sharing(parameter=2), 1)
    optimizer = sharding.step([], Elements(0), int(6e9), fused=True, clips=True).optimizer
    assert 9 * 6e9 / optimizer == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("draw, number, gb, size", [(2, "10", 1.681, 4), (2, "00", 14.516, 2), (2, "21", 2.441, 2)])
def test_an_update_takes_what_its_kernels_took(draw: int, number: str, gb: float, size: int) -> None:
    """Clipping and AdamW's update of `gb` GB of parameters on an H200: bf16 reaches less of the bandwidth than fp32. These runs
    clipped by a pass of its own, of 10 in all; in bf16 the update does it now, which saves one."""
    runs = json.loads((RESULTS / "step_kernels.json").read_text("utf-8"))["runs"]
    run = next(r for r in runs if r["draw"] == draw and r["name"].startswith(number))
    took = sum(ms for name, _, ms in run["kernels"] if "multi_tensor_apply" in name) / 1e3 * (0.9 if size == 2 else 1)
    sharding = ShardingTime(load("h200"), Sharing(parameter=size), 1)
    assert sharding.step([], Elements(0), int(gb * 1e9), fused=True, clips=True).optimizer == pytest.approx(
        took, rel=0.1
    )
