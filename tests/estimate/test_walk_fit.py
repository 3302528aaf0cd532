"""A rank's step on paper: levels by hand, limits of every placement, schedules against the number of microbatches they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forebay.estimate.state import RankState
from forebay.estimate.types import LayerTrace, ModelTrace, PartTrace
from forebay.estimate.walk import StageLayers, SublayerMemory, fit_rank, local_actions, sublayer_memory
from forebay.pipeline.partition import in_flight
from forebay.pipeline.schedule import make_plan

STATE = RankState(
    parameters=1000,
    optimizer=2000,
    gathered=0,
    layer_gradients=(30, 40),
    embedding_gradient=10,
    head_gradient=20,
    at_once=False,
    reducing=0,
    sharded_gradients=100,
    stepping=0,
    other=7,
)
PART = PartTrace(saved=50, inputs=8, forward=60, backward=20, forward_flops=0, backward_flops=0)
MOE = replace(PART, saved=90, forward=120, backward=70, light=(40, 75), stash=(30, 20), deferred=25)
TRACE = ModelTrace(
    embedding=PartTrace(2, 0, 10, 12, 0, 0),
    layers=(LayerTrace(PART, PART, False), LayerTrace(PART, MOE, True)),
    head=PartTrace(300, 8, 400, 250, 0, 0),
    shared=5,
    balance=3,
    kinds=2,
    head_gradient=100,
)
WHOLE = StageLayers((0, 1), (0, 1), True, True)


def sublayers(
    stage: StageLayers = WHOLE, engine: bool = False, recompute: str = "light", **placements: str
) -> list[SublayerMemory]:
    named = {f"m.{name[1]}.{name[3:]}": placement for name, placement in placements.items()}
    return sublayer_memory(TRACE, stage, named, prefix="m", recompute=recompute, engine=engine, summed=False)


def fit(found: list[SublayerMemory], microbatches: int = 1, state: RankState = STATE, overlap: bool = False) -> Any:
    return fit_rank(0, state, {0: found}, local_actions(microbatches, overlap))


@pytest.mark.parametrize("at_once", [False, True])
def test_gradients_of_embedded_tokens_stay_unless_they_are_added_at_once(at_once: bool) -> None:
    """Hidden states are 8 bytes; in the dtype of the sum they would be 16."""
    ways = {"prefix": "m", "recompute": "light", "engine": True, "summed": True}
    embedding = sublayer_memory(TRACE, WHOLE, {}, **ways, at_once=at_once)[0]  # type: ignore[arg-type]
    assert (embedding.backward, embedding.until_end) == ((8 + 16, 0) if at_once else (8, 8))


def test_what_a_step_holds_by_hand() -> None:
    """Everything is saved by the time of the head's backward, and no gradient is there yet."""
    found = fit(sublayers())
    saved = 2 + (50 + 5) + 50 + 50 + (90 + 3) + 300
    assert found.held_at_most == saved
    assert (found.activations, found.gradients, found.where) == (saved, 0, "head backward")
    assert found.transient == 250 and found.other == 7
    assert found.total == 1000 + 2000 + saved + 250 + 7
    least = found.total + found.total // 50  # 2 % for the plan's error
    assert found.headroom(least) == 0 and found.headroom(least - 1) == -1


def test_gradients_of_a_second_microbatch_wait_for_its_activations() -> None:
    one, two, many = (fit(sublayers(), n) for n in (1, 2, 5))
    assert two.gradients == 30 + 40 + 10 + 20 and two.total == one.total + 100
    assert many.total == two.total  # one after the other: no more is held


def test_gradients_from_the_begin() -> None:
    assert fit(sublayers(), 1, replace(STATE, at_once=True)).gradients == 100


def test_overlap_needs_for_two_halves_at_once() -> None:
    """What the one microbatch lets go of, the other one saves; but two halves run."""
    alone_, both = fit(sublayers(engine=True), 4), fit(sublayers(engine=True), 4, overlap=True)
    assert alone_.held_at_most <= both.held_at_most <= 2 * alone_.held_at_most
    assert both.total == alone_.total + 2 + 12  # the embedding's backward beside the head's forward
    assert fit(sublayers(engine=True), 1, overlap=True) == fit(sublayers(engine=True), 1)


def test_an_engine_keeps_nothing_of_the_head_but_a_gradient() -> None:
    (head,) = [h for h in sublayers(engine=True) if h.path == "head"]
    assert head.held == 8 and head.forward == 300 + 250


def test_the_optimizers_step_can_be_the_peak() -> None:
    found = fit(sublayers(), 1, replace(STATE, stepping=10_000))
    assert found.where == "optimizer" and found.gradients == 100 and found.transient == 10_000


@pytest.mark.parametrize(
    ("placement", "recompute", "held", "backward"),
    [
        ("keep", "light", 93, 70),
        ("recompute", "light", 43, 75),
        ("recompute", "full", 11, 160),
        ("offload", "light", 3, 250),
        ("stash", "light", 83, 80),
    ],
)
def test_placements_of_a_moe_half(placement: str, recompute: str, held: int, backward: int) -> None:
    """3 of what is held are the load balance's, which no placement of the half reaches."""
    (sublayer,) = [h for h in sublayers(recompute=recompute, l1_mlp=placement) if h.path == "m.1.mlp"]
    assert (sublayer.placement, sublayer.held, sublayer.backward) == (placement, held, backward)


def test_a_dense_half_is_recomputed_from_its_input() -> None:
    (sublayer,) = [h for h in sublayers(l0_mlp="recompute") if h.path == "m.0.mlp"]
    assert sublayer.held == 8 and sublayer.backward == 50 + 20


def test_less_is_held_the_more_is_placed() -> None:
    names = ["l0_mlp", "l0_self_attn", "l1_self_attn", "l1_mlp"]
    for placement in ("recompute", "offload"):
        levels = [fit(sublayers(**dict.fromkeys(names[:n], placement))).held_at_most for n in range(5)]
        assert levels == sorted(levels, reverse=True) and levels[0] > levels[-1]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize("microbatches", [8, 16])
def test_a_schedule_holds_what_its_plan_has_in_flight(schedule: str, microbatches: int) -> None:
    """Stages that save one byte a microbatch each: the level is the number of microbatches in flight, counted elsewhere."""
    plan = make_plan(schedule, 4, microbatches)
    for stage, rank in enumerate(plan.ranks):
        one = SublayerMemory("x", "keep", 1, 1, 0, 0, 0, 0)
        nothing = replace(one, held=0)
        found = fit_rank(
            rank,
            replace(STATE, layer_gradients=(0,)),
            {s: [one if s == stage else nothing] for s in plan.stages(rank)},
            [a for a in plan.actions[rank] if a.computes],
        )
        assert found.held_at_most <= in_flight(schedule, stage, 4, microbatches) + 1
        assert found.held_at_most >= in_flight(schedule, stage, 4, microbatches)


def test_a_split_backward_leaves_what_weights_need() -> None:
    """zbv: between I and W the experts' rows wait, and after the last W nothing does."""
    plan = make_plan("zbv", 2, 4)
    kinds = {a.kind for a in plan.actions[0]}
    assert {"I", "W"} <= kinds
    sublayer = SublayerMemory("x", "keep", 10, 10, 0, 0, 4, 0)
    state = replace(STATE, layer_gradients=(0,), reducing=10**6)
    actions = [a for a in plan.actions[0] if a.computes]

    def left(kinds: str) -> int:
        found = fit_rank(0, state, {s: [sublayer] for s in plan.stages(0)}, [a for a in actions if a.kind not in kinds])
        assert found.where == "reduction"
        return found.activations

    assert left("") == 0
    assert left("W") == 4 * sum(a.kind == "I" for a in actions)


def test_messages_and_gathered_weights_are_there_all_the_time() -> None:
    base = fit(sublayers())
    more = fit_rank(0, replace(STATE, gathered=500), {0: sublayers()}, local_actions(1, False), messages=33)
    assert more.total == base.total + 533


def test_the_whole_curve_is_told() -> None:
    """Level by level by hand: 3007 of state and context, what is saved, what a half needs for a moment, gradients from the first
    backward of their part on."""
    told: list[tuple[str, str, int]] = []
    found = fit_rank(
        0,
        STATE,
        {0: sublayers()},
        local_actions(1, False),
        seen=lambda action, level: told.append((action, level.where, level.total)),
    )
    forward = [
        ("embedding forward", 10),
        ("m.0.self_attn forward", 2 + 68),
        ("m.0.mlp forward", 57 + 68),
        ("m.1.self_attn forward", 107 + 68),
        ("m.1.mlp forward", 157 + 128),
        ("head forward", 250 + 408),
    ]
    backward = [
        ("head backward", 550 + 250),
        ("m.1.mlp backward", 250 + 20 + 70),
        ("m.1.self_attn backward", 157 + 60 + 20),
        ("m.0.mlp backward", 107 + 60 + 20),
        ("m.0.self_attn backward", 57 + 90 + 20),
        ("embedding backward", 2 + 90 + 12),
    ]
    end = [("reduction", 100), ("optimizer", 100)]
    assert told == [
        *(("0F0", where, 3007 + more) for where, more in forward),
        *(("0B0", where, 3007 + more) for where, more in backward),
        *(("", where, 3007 + more) for where, more in end),
    ]
    assert found.total == max(total for _, _, total in told)


def test_actions_of_a_process_alone_are_written_as_a_pipelines() -> None:
    assert [str(action) for action in local_actions(2, overlap=True)] == ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]
