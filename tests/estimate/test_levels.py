"""The levels of a rank's step by hand, the limits of every placement, and schedules against what they have in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forebay.estimate.levels import SublayerMemory, fit_rank, sublayer_memory
from forebay.estimate.state import RankState
from forebay.estimate.types import LayerTrace, ModelTrace, PartTrace, StageLayers
from forebay.estimate.walk import local_actions
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
MOE = replace(PART, saved=90, forward=120, backward=70, light=(40, 75), stash=(30, 20), deferred=(25,))
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


def sublayers(engine: bool = False, recompute: str = "light", **placements: str) -> list[SublayerMemory]:
    named = {f"m.{name[1]}.{name[3:]}": placement for name, placement in placements.items()}
    return sublayer_memory(TRACE, WHOLE, named, prefix="m", recompute=recompute, engine=engine, summed=False)


def fit(
    found: list[SublayerMemory], microbatches: int = 1, state: RankState = STATE, overlap: bool = False, **more: Any
) -> Any:
    return fit_rank(0, state, {0: found}, local_actions(microbatches, overlap), **more)


@pytest.mark.parametrize(("at_once", "expected"), [(True, (8 + 16, 0)), (False, (8, 8))])
def test_gradients_of_embedded_tokens_stay_unless_they_are_added_at_once(
    at_once: bool, expected: tuple[int, int]
) -> None:
    """Hidden states are 8 bytes, and 16 in the dtype of the sum."""
    embedding = sublayer_memory(
        TRACE, WHOLE, {}, prefix="m", recompute="light", engine=True, summed=True, at_once=at_once
    )[0]
    assert (embedding.backward, embedding.until_end) == expected


def test_what_a_step_holds_by_hand() -> None:
    """Everything is saved before the head's backward, and there are no gradients yet. Messages and unsharded parameters
    are always there."""
    found = fit(sublayers())
    saved = 2 + (50 + 5) + 50 + 50 + (90 + 3) + 300
    assert (found.activations, found.gradients, found.where) == (saved, 0, "head backward")
    assert found.transient == 250 and found.other == 7
    assert found.total == 1000 + 2000 + saved + 250 + 7
    least = found.total + found.total // 50  # 2 % for the plan's error
    assert found.headroom(least) == 0 and found.headroom(least - 1) == -1
    assert fit(sublayers(), 1, replace(STATE, gathered=500), messages=33).total == found.total + 533


def test_gradients_of_a_second_microbatch_add_to_its_activations() -> None:
    one, two, many = (fit(sublayers(), n) for n in (1, 2, 5))
    assert two.gradients == 30 + 40 + 10 + 20 and two.total == one.total + 100
    assert many.total == two.total  # one after the other: no more is held
    assert fit(sublayers(), 1, replace(STATE, at_once=True)).gradients == 100


def test_overlap_needs_two_sublayers_at_once() -> None:
    alone, both = fit(sublayers(engine=True), 4), fit(sublayers(engine=True), 4, overlap=True)
    assert both.total == alone.total + 2 + 12  # the embedding's backward beside the head's forward
    assert fit(sublayers(engine=True), 1, overlap=True) == fit(sublayers(engine=True), 1)


def test_the_optimizers_step_can_be_the_peak() -> None:
    found = fit(sublayers(), 1, replace(STATE, stepping=10_000))
    assert found.where == "optimizer" and found.gradients == 100 and found.transient == 10_000


@pytest.mark.parametrize(
    ("path", "placement", "recompute", "held", "backward"),
    [  # 3 of what the MoE sublayer holds are the load balance's, which no placement changes
        ("m.1.mlp", "keep", "light", 93, 70),
        ("m.1.mlp", "recompute", "light", 43, 75),
        ("m.1.mlp", "recompute", "full", 11, 160),
        ("m.1.mlp", "offload", "light", 3, 250),
        ("m.1.mlp", "stash", "light", 83, 80),
        ("m.0.mlp", "recompute", "light", 8, 50 + 20),  # dense: from its input
    ],
)
def test_placements_of_a_sublayer(path: str, placement: str, recompute: str, held: int, backward: int) -> None:
    found = sublayers(recompute=recompute, **{"l" + path[2:].replace(".", "_"): placement})
    (sublayer,) = [h for h in found if h.path == path]
    assert (sublayer.placement, sublayer.held, sublayer.backward) == (placement, held, backward)


def test_an_engine_keeps_only_the_gradient_of_the_head() -> None:
    (head,) = [h for h in sublayers(engine=True) if h.path == "head"]
    assert head.held == 8 and head.forward == 300 + 250


@pytest.mark.parametrize("placement", ["recompute", "offload"])
def test_less_is_held_the_more_is_placed(placement: str) -> None:
    names = ["l0_mlp", "l0_self_attn", "l1_self_attn", "l1_mlp"]
    levels = [fit(sublayers(**dict.fromkeys(names[:n], placement))).activations for n in range(5)]
    assert levels == sorted(levels, reverse=True) and levels[0] > levels[-1]


def test_a_split_backward_keeps_what_weight_gradients_need() -> None:
    """zbv: between I and W the experts' rows wait, and after the last W none do."""
    plan = make_plan("zbv", 2, 4)
    sublayer = SublayerMemory("x", "keep", 10, 10, 0, 0, 4, 0)
    state = replace(STATE, layer_gradients=(0,), reducing=10**6)
    actions = [a for a in plan.actions[0] if a.computes]
    assert {"I", "W"} <= {a.kind for a in actions}

    def left(kinds: str) -> int:
        found = fit_rank(0, state, {s: [sublayer] for s in plan.stages(0)}, [a for a in actions if a.kind not in kinds])
        assert found.where == "reduction"
        return found.activations

    assert left("") == 0
    assert left("W") == 4 * sum(a.kind == "I" for a in actions)


def test_local_actions_are_written_as_a_pipelines() -> None:
    assert [str(action) for action in local_actions(2, overlap=True)] == ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]
