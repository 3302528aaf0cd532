"""The offload plan of a manager, recorded in a walk: a link counted by hand, and steps played with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forebay.config import Config
from forebay.estimate import offloading, rank
from forebay.estimate.allocator import CachingAllocator
from forebay.estimate.fsdp import PersistentState
from forebay.estimate.layers import plan_layers
from forebay.estimate.offloading import OffloadManager, PartRun, offloadable, offloaded_bytes
from forebay.estimate.parts import Part
from forebay.estimate.plan import fit_run
from forebay.estimate.rank_run import Link, RankRun, Walked
from forebay.estimate.state import Sharing
from forebay.estimate.types import PartEvents
from forebay.estimate.walk import walk
from forebay.memory.solver import plan_offload
from forebay.memory.timeline import Plan, Timeline
from forebay.pipeline.schedule import Action, local_plan, make_plan
from forebay.train.trainer import Trainer
from tests.train.common import MODEL, config, write_text

MIB = 1 << 20
NAMES = ["l.0.mlp", "l.1.mlp", "l.2.mlp"]


def events(size: int) -> PartEvents:
    """Saves a storage of `size`, and one byte."""
    return PartEvents(
        forward=((1, size), (2, 1), (3, 16 * MIB)), backward=((6, 16 * MIB), (4, 0), (1, 0), (2, 0)),
        x=0, output=3, gradient=4, dx=6, weight_grads={}, saved=(1, 2), transferred=frozenset(),
    )  # fmt: skip


EMBEDDING = Part("embedding", "embedding", PartEvents(
    -1, 1, 2, -1, {}, (), frozenset(), forward=((1, 16 * MIB),), backward=((2, 0),),
))  # fmt: skip


def parts(size: int, kept: str = "") -> list[Part]:
    return [
        Part(name, n, events(size), "keep" if name == kept else "offload", mlp=True) for n, name in enumerate(NAMES)
    ]


def ten_seconds(part: Part) -> list[tuple[float, float]]:
    """Each way; an embedding takes no time."""
    return [(0.0, 0.0) if part.path == "embedding" else (10.0, 10.0)]


def walked(stage: list[Part], rate: float, least: int, everything: bool = False, microbatches: int = 1) -> Walked:
    alone = Sharing(sharded=False, parameter=4, compute=4, random=False)
    run = RankRun(
        [], alone, {0: [EMBEDDING, *stage]}, local_plan(microbatches, False).actions[0],
        adding_tokens=0, hidden=16 * MIB, least=least,
        link=Link((rate, rate), ten_seconds, everything),
    )  # fmt: skip
    return walk(run)


def noted_timelines(monkeypatch: pytest.MonkeyPatch) -> list[Timeline]:
    """Collects the timelines that plans are made of."""
    seen: list[Timeline] = []

    def noted(timeline: Timeline, paths: frozenset[str], everything: bool) -> Plan:
        seen.append(timeline)
        return plan_offload(timeline, paths, everything)

    monkeypatch.setattr(offloading, "plan_offload", noted)
    return seen


def timelines_of(monkeypatch: pytest.MonkeyPatch, settings: Config) -> list[Timeline]:
    seen = noted_timelines(monkeypatch)
    fit_run(settings, plan_layers(settings, 1), 1)
    return seen


def planned(stage: list[Part], rate: float, least: int, everything: bool = False) -> Plan:
    plan = walked(stage, rate, least, everything).plan
    assert plan is not None
    return plan


def test_what_a_store_takes_is_saved_and_large_enough_in_order() -> None:
    found = replace(events(8), saved=(2, 0, 1))
    assert offloadable(found, hidden=4, least=2) == [(0, 4), (1, 8)]
    assert offloadable(found, hidden=4, least=1) == [(2, 1), (0, 4), (1, 8)]


def test_what_leaves_is_freed_and_fetched_in_the_order_of_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, moved = {0: 16 * MIB, 1: 3 * MIB, 2: 5 * MIB}, list[int]()
    manager = OffloadManager(allocator := CachingAllocator(), 0, RankRun([], Sharing(), {}, [], 0, sizes[0], least=MIB))
    part = Part(
        "l.0.mlp", 0, replace(events(sizes[1]), forward=((1, sizes[1]), (2, sizes[2])), saved=(2, 0, 1)), "offload"
    )
    run = PartRun(part, {n: allocator.malloc(sizes[n]) for n in (1, 2)}, allocator.malloc(sizes[0]))
    monkeypatch.setattr(CachingAllocator, "free", lambda _, block: moved.append(block.size))
    manager.end_forward(run)
    for n in (1, 2):
        manager.begin_forward(PartRun(replace(part, path=f"l.{n}.mlp"), following=run))
        manager.end_forward(PartRun(replace(part, path=f"l.{n}.mlp")))
    fetched = [*run.offloaded.values()]
    manager.begin_backward(run)
    assert moved == fetched == [sizes[2], sizes[0], sizes[1]]
    assert [*run.blocks] == [2, 1] and not run.offloaded


def test_a_link_counted_by_hand() -> None:
    """1 MiB a second, events of 10 s: F0 F1 F2 B2 B1 B0, 5 MiB each. The first sublayer's leave from 10 to 15 s, and
    are released at F2 (20 s); back they take 5 / 0.92 s up to 50 s, so they begin at B1 (40 s). The second's would have
    to come back between 30 and 40 s; but at B2 no fetch may begin, because the turn has not passed. They stay, and so
    do the third's."""
    plan = planned(parts(5 * MIB), rate=MIB, least=2 * MIB)
    first = (NAMES[0], 0)
    assert plan.offload == {first: frozenset({0})}
    assert plan.release_at == {first: ("F", (NAMES[2], 0))}
    assert plan.fetch_at == {("B", (NAMES[1], 0)): (first,)}
    run = RankRun([], Sharing(), {}, [], 0, 4, least=2 * MIB)
    assert [offloaded_bytes(plan, part, run) for part in parts(5 * MIB)] == [5 * MIB, 0, 0]


def test_a_measured_step_of_an_engine_moves_one_call_at_a_time() -> None:
    """Of a MoE sublayer, what is saved before the experts leaves when they begin, but not its input, which its caller holds until
    its forward is over. In backward the attention's return after the experts, not before."""
    allocator = CachingAllocator()
    link = Link((1.0, 1.0), lambda part: [(1.0, 1.0)] * (1 + (part.events.experts_h > 0)))
    engine = RankRun([], Sharing(engine=True), {}, [], 0, 16 * MIB, least=MIB, link=link)
    manager = OffloadManager(allocator, 0, engine)
    sizes = {1: 3 * MIB, 2: 5 * MIB}
    whole = replace(events(3 * MIB), forward=((1, sizes[1]), (2, sizes[2]), (3, 16 * MIB)), saved=(0, 1, 2))
    attention = Part("l.0.self_attn", 0, replace(whole, saved=(1,)), "offload", attention=True)
    experts = Part("l.0.mlp", 0, replace(whole, experts_h=2), "offload", mlp=True)
    after = Part("l.1.self_attn", 1, replace(whole, saved=(1,)), "keep", attention=True)

    def run(part: Part) -> PartRun:
        return PartRun(
            part, {n: allocator.malloc(sizes[n]) for n in part.events.saved if n}, allocator.malloc(16 * MIB)
        )

    def away(run: PartRun) -> set[int]:
        return set(run.offloaded)

    manager.begin_step(alone=False)
    manager.begin_forward(first := run(attention))
    manager.end_forward(first)
    manager.begin_forward(second := run(experts))
    assert away(first) == {1} and away(second) == set()
    manager.begin_second_call(second, "F")
    assert away(second) == {1}
    manager.end_forward(second)
    manager.begin_forward(third := run(after))
    assert away(second) == {0, 1, 2} and second.x is None
    manager.end_forward(third)
    third.following, second.following = second, first
    manager.begin_backward(third)
    assert away(second) == {0, 1}, "the experts' are fetched one call ahead"
    manager.begin_backward(second)
    assert away(second) == set() and away(first) == {1}
    manager.begin_second_call(second, "B")
    assert away(first) == set()


def test_everything_that_frees_memory_is_offloaded_on_request() -> None:
    """Not what the last sublayer saves: its backward comes at once."""
    plan = planned(parts(5 * MIB, kept=NAMES[1]), rate=1e-3, least=2 * MIB, everything=True)
    assert {path for path, _ in plan.offload} == {NAMES[0]}
    assert plan.stall_seconds > 0


@pytest.mark.parametrize(
    "policy", ["offload", {"*.mlp": "offload", "model.layers.1.mlp.experts": "recompute"}], ids=["whole", "experts"]
)
def test_the_calls_of_an_engine_are_those_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str | dict[str, str]
) -> None:
    """A MoE sublayer is two calls, the dense one of the first layer is one."""
    settings = config(
        write_text(tmp_path, 500),
        {**MODEL, "num_hidden_layers": 2, "mlp_only_layers": [0]},
        model={"dtype": "float32", "compute": "bfloat16"},
        train={"batch": 4, "microbatch": 2},
        memory={"graph": True, "policy": policy, "offload": "all"},
        parallel={"reshard": False},
    )
    with Trainer(settings) as trainer:
        trainer.step(1)
        real = trainer.memory.manager.tuner.timeline
    assert real is not None
    (found,) = timelines_of(monkeypatch, settings)
    assert [call.key for call in found.calls] == [call.key for call in real.calls]
    assert [call.key[1] for call in found.calls] == [0, 0, 0, 0, 1]
    assert [(e.kind, e.call) for e in found.events] == [(e.kind, e.call) for e in real.events]
    mlp = [n for n, call in enumerate(real.calls) if call.key[0].endswith(".mlp")]
    assert [found.calls[n].items for n in mlp] == [real.calls[n].items for n in mlp]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_steps_follow_the_plan_after_the_measured_ones(microbatches: int) -> None:
    """The link carries the first of three sublayers' 64 MiB in 5 s. At the turn all but these are on the device."""
    found = walked(parts(64 * MIB), 12.8 * MIB, MIB, microbatches=microbatches)
    assert found.plan is not None and found.plan.planned_bytes == 64 * MIB
    kept = [replace(part, placement="keep") for part in parts(64 * MIB)]
    most = walked(kept, 12.8 * MIB, MIB, microbatches=microbatches).peak.allocated
    assert most - found.peak.allocated == 64 * MIB


def test_auto_measures_with_everything_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a microbatch's sublayers are kept; in the two steps before, at most two hold their 64 MiB. Before plans are tried
    the cache is emptied."""
    emptied = list[int]()
    empty_cache = CachingAllocator.empty_cache

    def noted(allocator: CachingAllocator) -> list[int]:
        emptied.append(allocator.reserved)
        return empty_cache(allocator)

    monkeypatch.setattr(CachingAllocator, "empty_cache", noted)
    kept = [replace(part, placement="keep") for part in parts(64 * MIB)]
    sharing = Sharing(sharded=False, parameter=4, compute=4, random=False)
    actions = local_plan(1, False).actions[0]
    measured = {0: [EMBEDDING, *parts(64 * MIB)]}
    run = RankRun([], sharing, {0: [EMBEDDING, *kept]}, actions, 0, 16 * MIB, least=MIB, measured=measured)
    chosen, before = walk(run), walk(run, steps=2)
    assert chosen.peak.allocated - before.peak.allocated == 64 * MIB
    assert chosen.peak == walk(replace(run, measured=None)).peak
    assert emptied == [before.reserved]  # by the third step's forward, which the other walk does not have


@pytest.mark.parametrize(
    ("engine", "microbatches", "order"),
    [
        (False, 1, "optimizer optimizer cache optimizer"),
        (False, 2, "optimizer cache optimizer"),
        (True, 1, "optimizer cache optimizer"),
        (True, 2, "cache optimizer"),
    ],
)
def test_auto_tries_plans_as_soon_as_two_microbatches_are_over(
    engine: bool, microbatches: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine ends the manager's step before the optimizer updates; without one the next forward does."""
    happened = list[str]()
    monkeypatch.setattr(CachingAllocator, "empty_cache", lambda allocator: happened.append("cache") or [])
    monkeypatch.setattr(PersistentState, "optimize", lambda state, late: happened.append("optimizer"))
    kept = [replace(part, placement="keep") for part in parts(64 * MIB)]
    sharing = Sharing(sharded=False, parameter=4, compute=4, random=False)
    stage, measured = {0: [EMBEDDING, *kept]}, {0: [EMBEDDING, *parts(64 * MIB)]}
    actions = local_plan(microbatches, False).actions[0]
    walk(RankRun([], replace(sharing, engine=engine), stage, actions, 0, 16 * MIB, least=MIB, measured=measured))
    assert " ".join(happened).startswith(order) and happened.count("cache") == 1


def test_a_run_of_auto_has_parts_for_its_measured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[RankRun] = []

    def noted(run: RankRun) -> Walked:
        runs.append(run)
        return walk(run)

    monkeypatch.setattr(rank, "walk", noted)
    settings = config(write_text(tmp_path, 500), MODEL, memory={"policy": "auto", "budget": "1GiB"})
    fit_run(settings, plan_layers(settings, 1), 1)
    assert runs[0].measured is not None
    placements = {part.path: part.placement for part in runs[0].measured[0]}
    assert {placements.pop("embedding"), placements.pop("head")} == {"keep"} and set(placements.values()) == {"offload"}
    fit_run(settings, plan_layers(settings, 1), 1, auto=1 << 30)  # chosen before the run, which measures nothing
    assert runs[-1].measured is None


def test_forwards_and_backwards_that_overlap_are_recorded_in_the_order_in_which_they_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the forward of microbatch 1 overlaps with the backward of microbatch 0, the latter begins."""
    recorded = noted_timelines(monkeypatch)

    both = Action("OVERLAP_F_B", -1, -1, (Action("F", 0, 1), Action("B", 0, 0)))
    actions = [Action("F", 0, 0), Action("RECV_B", 0, 0), both, Action("RECV_B", 0, 1), Action("B", 0, 1)]
    run = RankRun(
        [], Sharing(data=2, sharded=True, engine=True, pp=2, random=False), {0: [EMBEDDING, *parts(64 * MIB)]}, actions,
        adding_tokens=0, hidden=16 * MIB, link=Link((MIB, MIB), ten_seconds, everything=True),
    )  # fmt: skip
    plan = walk(run).plan
    (timeline,) = recorded
    names = [(event.kind, *timeline.calls[event.call].key) for event in timeline.events]
    assert names[:4] == [*(("F", name, 0) for name in NAMES), ("B", NAMES[2], 0)]
    assert names[-3:] == [("B", name, 1) for name in reversed(NAMES)]
    overlapped = names[3:-3]
    assert [name for name in overlapped if name[0] == "F"] == [("F", name, 1) for name in NAMES]
    assert [name for name in overlapped if name[0] == "B"] == [("B", name, 0) for name in reversed(NAMES)]
    assert all(event.seconds == 10.0 for event in timeline.events)
    assert plan is not None and {path for path, _ in plan.offload} <= set(NAMES)


@pytest.mark.parametrize(
    ("schedule", "interleaves"),
    [("1f1b", [True, True, False]), ("zbv", [True, True, True]), ("dualpipev", [True, True, True])],
)
def test_a_step_of_a_manager_is_a_microbatch_where_each_backward_ends_before_the_next_forward(
    schedule: str, interleaves: list[bool]
) -> None:
    plan, alone = make_plan(schedule, 3, 6), Sharing(sharded=False, parameter=4, compute=4, random=False)
    ranks = [RankRun([], alone, {}, list(plan.computations(rank)), adding_tokens=0, hidden=1) for rank in range(3)]
    assert [run.interleaves for run in ranks] == interleaves
