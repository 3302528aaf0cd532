"""The offload plan of a manager, made from a trace: a link counted by hand, and steps played with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.estimate.parts import Part, offloadable, offloaded_bytes, plan_link
from forebay.estimate.state import Sharing
from forebay.estimate.types import PartEvents
from forebay.estimate.walk import RankRun, local_actions, walk
from forebay.pipeline.schedule import turns

MIB = 1 << 20
NAMES = ["l.0.mlp", "l.1.mlp", "l.2.mlp"]
FB = local_actions(1, False)


def events(size: int) -> PartEvents:
    """Saves a storage of `size`, and one byte."""
    return PartEvents(
        forward=((1, size), (2, 1), (3, 16 * MIB)), backward=((6, 16 * MIB), (4, 0), (1, 0), (2, 0)),
        forward_no_grad=(), x=0, output=3, gradient=4, dx=6, saves_x=False, weight_grads={}, transferred=frozenset(),
        saved=(1, 2),
    )  # fmt: skip


def parts(size: int, kept: str = "") -> list[Part]:
    """Three sublayers of 10 s each way."""
    return [
        Part(name, n, events(size), "keep" if name == kept else "offload", seconds=(10.0, 10.0))
        for n, name in enumerate(NAMES)
    ]


def test_what_a_store_takes_is_saved_and_large_enough_in_order() -> None:
    found = replace(events(8), saved=(2, 0, 1), saves_x=True)
    assert offloadable(found, hidden=4, least=2) == [(0, 4), (1, 8)]
    assert offloadable(found, hidden=4, least=1) == [(2, 1), (0, 4), (1, 8)]


def test_a_link_counted_by_hand() -> None:
    """1 byte a second, events of 10 s: F0 F1 F2 B2 B1 B0, 5 bytes each. The first sublayer's leave from 10 to 15 s, and
    are released at F2 (20 s); back they take 5 / 0.92 s up to 50 s, so they begin at B1 (40 s). The second's would have
    to come back between 30 and 40 s; but at B2 no fetch may begin, because the turn has not passed. They stay, and so
    do the third's."""
    stages = {0: parts(5)}
    plan = plan_link(stages, FB, (1.0, 1.0), hidden=4, least=2, everything=False)
    first = (NAMES[0], 0)
    assert plan.offload == {first: frozenset({0})}
    assert plan.release_at == {first: ("F", (NAMES[2], 0))}
    assert plan.fetch_at == {("B", (NAMES[1], 0)): (first,)}
    assert offloaded_bytes(plan, stages, 4, 2) == {NAMES[0]: 5, NAMES[1]: 0, NAMES[2]: 0}


def test_everything_is_offloaded_on_request() -> None:
    plan = plan_link({0: parts(5, kept=NAMES[1])}, FB, (1e-3, 1e-3), hidden=4, least=2, everything=True)
    assert {path for path, _ in plan.offload} == {NAMES[0], NAMES[2]}
    assert plan.stall_seconds > 0


@pytest.mark.parametrize("microbatches", [1, 3])
def test_steps_follow_the_plan_after_the_measured_ones(microbatches: int) -> None:
    """The link carries the first of three sublayers' 64 MiB. At the turn all but these are on the device."""
    rate = 12.8 * MIB  # 64 MiB in 5 s
    plan = plan_link({0: parts(64 * MIB)}, FB, (rate, rate), hidden=16 * MIB, least=MIB, everything=False)
    assert plan.planned_bytes == 64 * MIB
    embedding = Part("embedding", "embedding", PartEvents(
        ((1, 16 * MIB),), ((2, 0),), (), -1, 1, 2, -1, False, {}, frozenset(),
    ))  # fmt: skip
    run = RankRun(
        [], Sharing(sharded=False, parameter=4, compute=4), {0: [embedding, *parts(64 * MIB)]},
        local_actions(microbatches, False), engine=False, summed=0, hidden=16 * MIB, turns=turns, random=False,
    )  # fmt: skip
    kept = [replace(part, placement="keep") for part in parts(64 * MIB)]
    most = walk(replace(run, stages={0: [embedding, *kept]})).peak.allocated
    assert most - walk(replace(run, link=plan)).peak.allocated == 64 * MIB
