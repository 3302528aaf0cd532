"""Cycles that run by a plan: which calls are looked at, which items leave, and what host memory stays."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from forebay.memory import autotune
from forebay.memory.hooks import Manager
from forebay.memory.offload_plan import plan_interleaved
from forebay.memory.regions import ModuleSlot
from forebay.memory.timeline import Plan, Timeline
from forebay.policy import resolve

MICROBATCHES, IN_FLIGHT, WIDTH = 10, 4, 32


class Step(nn.Module):
    """Saves its input and its output: the next one's input."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_at: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.looked_at.append(torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)
        return (x * x).tanh()


def cycle(model: nn.Module) -> list[torch.Tensor]:
    """Forwards and backwards alternate, as in a pipeline."""
    torch.manual_seed(0)
    inputs = [torch.randn(8, WIDTH, requires_grad=True) for _ in range(MICROBATCHES)]
    losses: list[torch.Tensor] = []
    for i in range(MICROBATCHES + IN_FLIGHT):
        if i < MICROBATCHES:
            losses.append(model(inputs[i] * 1).sum())
        if i >= IN_FLIGHT:
            losses[i - IN_FLIGHT].backward()
    return [x.grad for x in inputs if x.grad is not None]


def managed(monkeypatch: pytest.MonkeyPatch, leaving: set[str]) -> tuple[nn.Sequential, Manager]:
    """Four steps, all of them to be offloaded; the plan chooses those of `leaving`."""

    def chosen(timeline: Timeline, paths: frozenset[str], everything: bool) -> Plan:
        plan = plan_interleaved(timeline, paths, everything)
        offload = {key: items for key, items in plan.offload.items() if key[0] in leaving}
        size = {call.key: call.items for call in timeline.calls}
        planned = sum(size[key][item] for key, items in offload.items() for item in items)
        return replace(plan, offload=offload, planned_bytes=planned)

    monkeypatch.setattr(autotune, "plan_interleaved", chosen)
    model = nn.Sequential(*[Step() for _ in range(4)])
    slots: dict[str, Any] = {str(i): ModuleSlot(step) for i, step in enumerate(model)}
    mem = Manager(slots, resolve({"?": "offload"}, slots), torch.device("cpu"), min_bytes=1)
    mem.follow([(str(i), m) for m in range(MICROBATCHES) for i in reversed(range(4))], steady=True)
    return model, mem


def test_a_plan_for_some_regions_holds_though_they_share_storages_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truth = cycle(nn.Sequential(*[Step() for _ in range(4)]))
    model, mem = managed(monkeypatch, {"1"})
    plans = []
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(cycle(model), truth, strict=True))
        assert mem.ledger.live_tickets == 0
        plans.append(mem.plan)
    assert plans[0] is None and plans[1] is not None and all(plan is plans[1] for plan in plans[1:])
    assert mem.report().moved_bytes == plans[1].planned_bytes > 0
    # Of "3" nothing leaves, and nobody saves what it was first to save. "0" saves what "1" saves too, and counts as first; "2"
    # saves what leaves.
    assert all(model[0].looked_at[MICROBATCHES:] + model[2].looked_at[MICROBATCHES:])  # type: ignore[operator, index]
    assert not any(model[3].looked_at[MICROBATCHES:])  # type: ignore[operator, index]
    assert all(model[3].looked_at[:MICROBATCHES]), "while measuring everything is"  # type: ignore[operator, index]


def test_what_two_regions_save_is_free_while_it_is_away_though_of_the_second_nothing_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, mem = managed(monkeypatch, {"2"})
    cycle(model)
    saved: list[StorageWeakRef] = []
    model[2].register_forward_hook(lambda *a: saved.append(StorageWeakRef(a[-1].untyped_storage())))
    held: list[int] = []
    model[3].register_forward_hook(lambda *_: held.append(sum(not ref.expired() for ref in saved[:-1])))
    cycle(model)
    assert mem.plan is not None and any(key[0] == "2" for key in mem.plan.offload)
    assert max(held) < IN_FLIGHT - 1, "its second saver holds what has left"


def test_the_report_counts_the_same_bytes_whether_calls_are_looked_at_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mem = managed(monkeypatch, {"0", "2"})
    cycle(model)
    every = mem.report().saved_bytes_by_placement
    cycle(model)
    saved = mem.report().saved_bytes_by_placement
    assert saved["keep"] > 0 and saved["offload"] > 0
    assert sum(saved.values()) == sum(every.values())


def test_the_report_is_of_the_plan_that_the_cycle_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline's next plan is made at the end of a step, before anybody asks."""
    model, mem = managed(monkeypatch, {"1"})
    cycle(model)
    mem.join()
    assert mem.plan is not None and mem.plan.planned_bytes > 0 == mem.report().planned_bytes
    cycle(model)
    assert mem.report().planned_bytes == mem.report().moved_bytes == mem.plan.planned_bytes


def test_host_memory_is_let_go_once_and_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mem = managed(monkeypatch, {"2"})
    reserved = []
    for _ in range(6):
        cycle(model)
        reserved.append(mem.store.pool.reserved_bytes)
    assert reserved[1] == reserved[0], "the plan's first cycle shows what it uses"
    assert 0 < reserved[2] < reserved[1]
    assert set(reserved[2:]) == {reserved[2]}, "what was let go is page-locked again"


def test_the_flags_of_a_graph_stay_behind_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the graph's first replay may have to open them."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    _, mem = managed(monkeypatch, {"0"})
    flags, words = mem.store.lanes.flags, torch.zeros(4)
    with mem.capturing():
        flags._words.append(words)
    flags.open()
    assert words.eq(1).all()
    with mem.capturing():
        assert not flags._words  # another graph has its own
    mem.detach()
