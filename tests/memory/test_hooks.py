"""The manager's contract: bitwise neutral placements, storages stored once, nothing left behind; alone and beside other code."""

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import forebay
from forebay.memory import autotune
from forebay.memory.hooks import Manager
from forebay.memory.solver import plan_interleaved
from forebay.memory.step import Step
from forebay.memory.timeline import Assignment, Plan, Timeline, simulate
from forebay.policy import BudgetError, PolicyError
from tests.helpers import used_bytes
from tests.memory.networks import ROWS, WIDTH, Block, gradients, manage, network, same
from tests.ranks import run_ranks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLACEMENTS = ["keep", "recompute", "offload", "recompute+offload"]
POLICIES: list[dict[str, str]] = [
    *({"?": placement} for placement in PLACEMENTS),
    {"0": "offload", "1": "recompute", "2": "keep", "3": "offload"},
]


# --- results and bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offload", ["fit", "all"])
@pytest.mark.parametrize("policy", POLICIES)
def test_results_are_bitwise_those_of_the_unmanaged_model(policy: dict[str, str], offload: str, device: str) -> None:
    truth = [gradients(network(device), device, seed) for seed in range(4)]
    model = network(device)
    mem = manage(model, policy, device, offload=offload)
    for seed in range(4):
        assert same(gradients(model, device, seed), truth[seed])
        assert mem.store.live_tickets == 0 and used_bytes(mem.store.pool) == 0
    if any("offload" in placement for placement in policy.values()):
        assert mem.plan is not None and mem.plan.planned_bytes > 0, "the test must have offloaded something"
    mem.detach()
    assert all("forward" not in block.__dict__ for block in model)


@pytest.mark.parametrize("device", DEVICES)
def test_a_storage_is_stored_once_and_weights_never(device: str) -> None:
    model = network(device)
    mem = manage(model, {"2": "offload"}, device)
    out = model(torch.randn(ROWS, WIDTH, device=device))
    unit = ROWS * WIDTH * 4
    # x (saved by up); h once, though saved through chunks and a transposed slice (2 units); sigmoid; the product; the
    # dropout mask; the dropped product; y before and after scaling; tanh. No weight and no buffer (`scale` is WIDTH * 4 bytes).
    sizes = sorted(h.nbytes for h in mem.store._live())
    assert sizes.count(2 * unit) == 1
    assert all(size in (ROWS * WIDTH, unit, 2 * unit) for size in sizes)
    del out
    gc.collect()
    assert mem.store.live_tickets == 0


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        base = x * 2
        return (base[3:9:2, 1:].t() * base.t()[1:, 3:9:2]).sum() + (base.as_strided((4, 4), (1, 2), 5) ** 2).sum()


class Lazy(nn.Module):
    """Saves tensors whose bytes are another tensor's: conjugates, and negated imaginary parts, which are real."""

    def forward(self, x: Tensor) -> Tensor:
        c = torch.view_as_complex(torch.stack((x * 2, x.sin()), -1))
        imaginary = c.conj().imag
        assert imaginary.is_neg()
        return x + (imaginary * imaginary * x).tanh() + (c.conj() * c.conj() * 3j).real * imaginary


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("block", "count"), [(Views, 1), (Lazy, 2)])
def test_views_and_lazy_bits_come_back(block: Callable[[], nn.Module], count: int, placement: str, device: str) -> None:
    """Views with their size, stride and offset, and conjugate and negative bits."""
    truth = [gradients(network(device, block, count), device, seed) for seed in range(3)]
    model = network(device, block, count)
    manage(model, placement, device)
    assert all(same(gradients(model, device, seed), truth[seed]) for seed in range(3))


def test_a_storage_that_its_ticket_may_not_stand_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that another stream saves again: see `HostStore.may_stand_for`."""
    truth = gradients(network())
    model = network()
    mem = manage(model, "offload")
    asked: list[bool] = []
    monkeypatch.setattr(mem.store, "may_stand_for", lambda ticket, storage: bool(asked.append(False)))
    assert same(gradients(model), truth) and asked
    assert mem.store.live_tickets == 0


class Forked(nn.Module):
    """Saves `h` twice: on the region's stream, and on a side stream that is late and joined after the last region."""

    def __init__(self, side: torch.cuda.Stream, late: list[Tensor]):
        super().__init__()
        self.side, self.late = side, late

    def forward(self, x: Tensor) -> Tensor:
        h = x.exp()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(200_000_000)
            self.late.append(h * h)
        return x * 2


class Poisons(nn.Module):
    """Fills the memory that is free now with NaN."""

    def forward(self, x: Tensor) -> Tensor:
        _held = [torch.full_like(x, float("nan")) for _ in range(4)]
        return x + 1


@pytest.mark.gpu
def test_a_side_stream_is_joined_after_its_operands_are_offloaded() -> None:
    side, late = torch.cuda.Stream(), list[Tensor]()
    x = torch.randn(8 << 20, device="cuda", requires_grad=True)
    model = nn.Sequential(Forked(side, late), Poisons(), Poisons())
    mem = manage(model, {"0": "offload"}, "cuda", offload="all")
    for _ in range(3):
        y = model(x)
        torch.cuda.current_stream().wait_stream(side)
        (y.sum() + late.pop().sum()).backward()
        assert x.grad is not None and torch.equal(x.grad, 2 * x.detach().exp() * x.detach().exp() + 2)
        x.grad = None
    assert mem.store.outbound.nbytes


@pytest.mark.multi
@pytest.mark.parametrize(("policy", "options"), [("offload", {"offload": "all"}), ("auto", {"budget": 1 << 30})])
def test_a_model_on_another_device_than_the_current_one(policy: str, options: dict[str, Any]) -> None:
    truth = [gradients(network("cuda:1"), "cuda:1", seed) for seed in range(8)]
    model = network("cuda:1")
    mem = manage(model, policy, "cuda:1", **options)
    assert all(same(gradients(model, "cuda:1", seed), truth[seed]) for seed in range(8))
    assert mem.plan is not None and torch.cuda.current_device() == 0
    assert mem.report().wait_ms is not None


@pytest.mark.parametrize("device", DEVICES)
def test_several_forwards_before_their_backwards(device: str) -> None:
    def accumulate(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(5)
        losses = [model(torch.randn(ROWS, WIDTH, device=device)).square().mean() for _ in range(3)]
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    truth = accumulate(network(device))
    model = network(device)
    mem = manage(model, "offload", device)
    for _ in range(4):
        assert same(accumulate(model), truth) and mem.store.live_tickets == 0


def test_backward_twice_through_one_graph_and_after_detach() -> None:
    model = network().eval()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    truth = torch.autograd.grad(model(x).sum(), x)[0]
    mem = manage(model, "offload")
    out = model(x).sum()
    assert torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], truth)
    mem.detach()
    assert torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], truth)
    assert mem.store.live_tickets > 0, "retain_graph keeps the tickets"
    del out
    gc.collect()
    assert mem.store.live_tickets == 0


def test_the_report_says_where_the_saved_bytes_are() -> None:
    model, ran = network(), []
    for block in model:
        block.up.register_forward_hook(lambda module, *_: ran.append(module))  # type: ignore[union-attr]
    mem = manage(model, {"0": "offload", "1": "recompute", "2": "keep"})
    for _ in range(3):
        gradients(model)
    assert [ran.count(block.up) for block in model] == [3, 6, 3, 3, 3]
    report = mem.report()
    saved = report.saved_bytes_by_placement
    assert set(saved) >= {"keep", "recompute", "offload"} and report.recomputed == 1
    assert saved["recompute"] == ROWS * WIDTH * 4, "a checkpoint keeps its input"
    assert saved["offload"] == report.planned_bytes > 0
    assert saved["keep"] > 3 * saved["recompute"]


# --- nothing is left behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_left_behind(policy: dict[str, str], device: str) -> None:
    model = network(device)
    mem = manage(model, policy, device)
    x = torch.randn(ROWS, WIDTH, device=device)

    def forward_only() -> None:
        model(x)

    def no_grad() -> None:
        with torch.no_grad():
            model(x)

    def inference() -> None:
        with torch.inference_mode():
            model(x)

    def exception() -> None:
        model[3].fail = True  # type: ignore[union-attr]
        try:
            with pytest.raises(ZeroDivisionError):
                model(x)
        finally:
            model[3].fail = False  # type: ignore[union-attr]

    def forward_forward_backward() -> None:
        (model(x).sum() + model(x).sum()).backward()

    def backward_fails() -> None:
        out = model(x)
        out.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        del out
        # autograd's thread lets go of a graph whose backward failed when it has the next one
        torch.ones(1, device=device, requires_grad=True).exp().backward()

    for way in [forward_only, no_grad, inference, exception, forward_forward_backward, backward_fails] * 3:
        way()
        gc.collect()
        assert mem.store.live_tickets == 0, way.__name__
        assert used_bytes(mem.store.pool) == 0, way.__name__
    y = x.requires_grad_() * x
    assert y.grad_fn._saved_self.data_ptr() == x.data_ptr(), "no pack hook is active"  # type: ignore[union-attr]


class Heads(nn.Module):
    """Layers, and a head whose output the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = network(count=3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.blocks[0](x)
        return self.blocks[1](y), self.blocks[2](y)


def test_a_budget_holds_though_an_output_is_not_used() -> None:
    model = Heads()
    manage(model.blocks, "offload", budget=1, offload="all")
    with pytest.raises(BudgetError):
        for _ in range(3):
            y, _aux = model(torch.ones(4, WIDTH, requires_grad=True))
            y.sum().backward()


def test_an_output_that_is_used_later_is_right() -> None:
    model, truth = Heads().eval(), Heads().eval()
    mem = manage(model.blocks, "offload", offload="all")
    for step in range(6):
        found = []
        for one in (model, truth):
            one.zero_grad()
            x = torch.full((4, WIDTH), float(step), requires_grad=True)
            y, aux = one(x)
            if step % 3 == 0:
                y.sum().backward()
            elif step % 3 == 1:
                y.sum().backward(retain_graph=True)
                aux.sum().backward()
            else:
                (y.sum() + aux.sum()).backward()
            found.append([x.grad, *[p.grad for p in one.parameters() if p.grad is not None]])
        assert same(*found)  # type: ignore[arg-type]
    gc.collect()
    del y, aux
    assert mem.store.live_tickets == 0


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * self.scale).sin(), self.scale


def test_a_leaf_that_a_region_returns_gathers_no_hooks_of_graphs_that_are_dropped() -> None:
    model = nn.Sequential(Leaf())
    manage(model, "offload")
    _, scale = model(torch.randn(4, WIDTH, requires_grad=True))
    assert not scale._backward_hooks


def test_a_failed_forward_whose_traceback_is_held_is_no_part_of_the_next_step() -> None:
    model = network(count=3)
    mem = manage(model, "offload")
    with pytest.raises(RuntimeError) as held:
        model(torch.randn(4, WIDTH + 1, requires_grad=True))
    gradients(model)
    mem.join()
    assert held.tb is not None and mem.tuner.timeline is not None
    assert [call.key for call in mem.tuner.timeline.calls] == [(str(i), 0) for i in range(3)]


# --- budgets and plans ------------------------------------------------------------------------------------------------


def test_auto_meets_its_budget_and_names_the_smallest_when_it_cannot() -> None:
    model = network()
    saved = manage(model, "offload")
    for _ in range(2):
        gradients(model)
    assert saved.tuner.timeline is not None
    every = sum(sum(c.items) for c in saved.tuner.timeline.calls)
    saved.detach()
    truth, smallest = gradients(model), 0

    def meets(budget: int) -> None:
        mem = manage(model, "auto", budget=budget)
        try:
            for _ in range(3):
                assert same(gradients(model), truth)
            assert mem.plan is not None and mem.plan.peak_bytes <= budget
        finally:
            mem.detach()

    meets(every // 2)
    with pytest.raises(BudgetError, match=r"smallest budget .* is \d") as caught:
        meets(10)
    smallest = int(str(caught.value).rsplit("(", 1)[1].split()[0])
    meets(smallest)


@pytest.mark.parametrize("policy", ["auto", "offload"])
def test_a_smaller_batch_may_follow_a_budget_error(policy: str) -> None:
    model, small, large = network(), torch.ones(2, WIDTH), torch.ones(16, WIDTH)

    def step(batch: Tensor) -> None:
        model(batch).sum().backward()

    with pytest.raises(BudgetError) as caught:
        saved = manage(model, policy, budget=1)
        for _ in range(3):
            step(small)
    saved.detach()
    smallest = int(str(caught.value).rsplit("(", 1)[1].split()[0])
    saved = manage(model, policy, budget=smallest)
    with pytest.raises(BudgetError):
        for _ in range(3):
            step(large)
    for _ in range(3):
        step(small)
    assert saved.plan is not None and saved.plan.peak_bytes <= smallest


def test_what_cannot_be_managed_is_refused_early() -> None:
    model = network()
    for policy, options, message in (
        ("auto", {}, "needs a budget"),
        ("recompute", {"budget": 100}, "nothing is left to decide"),
        ("stash", {}, "no paged region"),
        ("offload", {"offload": "some"}, "'fit'"),
    ):
        with pytest.raises(PolicyError, match=message):
            manage(model, policy, **options)
    model[1].up.gradient_checkpointing = True  # type: ignore[union-attr]
    with pytest.raises(
        ValueError, match=r"'1' is to be recomputed, but '1.up' is already under gradient checkpointing"
    ):
        manage(model, {"1": "recompute"})
    assert all("forward" not in block.__dict__ for block in model)


def test_a_longer_batch_is_measured_and_planned_anew() -> None:
    model, plain = network().eval(), network().eval()
    mem, planned = manage(model, "offload"), []
    for rows in (40, 40, 40, 80, 80, 80, 40, 7, 1, 40):
        assert same(gradients(model, rows=rows), gradients(plain, rows=rows))
        planned.append(mem.plan.planned_bytes if mem.plan else None)
    assert planned[0] is None and planned[2] and planned[4] is None, planned
    assert planned[5] == 2 * planned[2] == planned[-1]


@pytest.mark.parametrize("options", [{}, {"budget": 1 << 30}, {"offload": "all"}], ids=str)
def test_lengths_that_change_from_batch_to_batch_are_measured_few_times(options: dict[str, Any]) -> None:
    """The step after a longer batch is measured, and that is a short one again."""
    model, plain = network().eval(), network().eval()
    mem, measured = manage(model, "offload", **options), []
    for turn in range(20):
        rows = (40, 80)[turn % 2]
        assert same(gradients(model, rows=rows), gradients(plain, rows=rows))
        measured.append(mem.plan is None)
        moved = mem.report().moved_bytes
    assert sum(measured) == 2 and measured.index(True, 1) == 2
    assert mem.plan is not None and moved == 2 * mem.plan.planned_bytes > 0


def test_regions_that_save_more_tensors_of_equal_inputs_are_measured_and_planned_anew() -> None:
    """As where dropout is turned on."""
    model, plain = network().eval(), network().eval()
    mem, planned = manage(model, "offload"), []
    for step in range(6):
        model.train(step > 2), plain.train(step > 2)
        assert same(gradients(model), gradients(plain))
        planned.append(mem.plan.planned_bytes if mem.plan else None)
    assert planned[2] and planned[4] is None and planned[5] > planned[2], planned


def test_what_distant_regions_share_stays_on_the_device() -> None:
    class Rotated(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, table = pair
            return (x * table).sin(), table

    model = network(block=Rotated, count=6)
    mem = manage(model, "offload")
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(3):
        model((x * 1, torch.randn(32)))[0].sum().backward()
    assert mem.tuner.timeline is not None and mem.plan is not None
    sizes = {c.key[0]: sorted(c.items) for c in mem.tuner.timeline.calls}
    assert sizes["0"] == [0, 16 * 32 * 4], "the table counts as nothing to move"
    assert sizes["4"] == [16 * 32 * 4]


@pytest.mark.parametrize("by_forward", [False, True])
def test_the_next_step_is_planned_between_two_steps(by_forward: bool) -> None:
    """At the end of a step, or before the model's forward: never inside it. A pipeline's ranks end a step together; they would
    wait for each other's plans if each made its own when its next forward comes."""
    model = network()
    truth = gradients(model)
    manager = manage(model, "offload")

    def between() -> None:
        if by_forward:
            manager.forward_begins(torch.device("cpu"), model)
        else:
            manager.join()

    assert same(gradients(model), truth) and manager.plan is None
    between()
    plan = manager.plan
    assert plan is not None
    between()
    for _ in range(2):
        assert same(gradients(model), truth)
        assert manager.plan is plan, "planned once"


def test_the_next_backward_is_the_schedule_s() -> None:
    ordered, latest = Step([("a", 0), ("a", 1), ("a", 2)]), Step()
    calls = [ordered.new_call("a"), ordered.new_call("a")]
    others = [latest.new_call("a"), latest.new_call("a")]
    assert ordered.next_backward() is calls[0] and latest.next_backward() is others[1]
    for call in calls:
        assert ordered.next_backward() is call
        call.backward_started = True
    assert ordered.next_backward() is None  # its forward is still to come
    third = ordered.new_call("a")
    assert ordered.next_backward() is third


def test_figures_are_read_while_another_thread_drops_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("cpu")
    mem = manage(model, {"?": "offload"}, "cpu")
    for seed in range(2):
        gradients(model, "cpu", seed)
    plan = mem.plan
    for looks in range(8):  # at the plan, before it is gone
        left = [plan] * looks
        monkeypatch.setattr(Manager, "plan", property(lambda self, left=left: left.pop() if left else None))
        assert set(mem.placements.values()) <= {"keep", "offload"}
        assert set(mem.report().saved_bytes_by_placement) <= {"keep", "offload"}


# --- steps that run by a plan -----------------------------------------------------------------------------------------

MICROBATCHES, IN_FLIGHT = 10, 4


class Squared(nn.Module):
    """Saves its input and its output: the next one's input."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hooked.append(torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)
        return (x * x).tanh()


def pipelined(model: nn.Module) -> list[Tensor]:
    """Forwards and backwards alternate, as in a pipeline."""
    torch.manual_seed(0)
    inputs = [torch.randn(8, WIDTH, requires_grad=True) for _ in range(MICROBATCHES)]
    losses: list[Tensor] = []
    for i in range(MICROBATCHES + IN_FLIGHT):
        if i < MICROBATCHES:
            losses.append(model(inputs[i] * 1).sum())
        if i >= IN_FLIGHT:
            losses[i - IN_FLIGHT].backward()
    return [x.grad for x in inputs if x.grad is not None]


def offloading(monkeypatch: pytest.MonkeyPatch, regions: set[str]) -> tuple[nn.Sequential, Manager]:
    """Four regions, all of them to be offloaded; the plan chooses these."""

    def chosen(timeline: Timeline, paths: frozenset[str], everything: bool) -> Plan:
        plan = plan_interleaved(timeline, paths, everything)
        offload = {key: items for key, items in plan.offload.items() if key[0] in regions}
        size = {call.key: call.items for call in timeline.calls}
        planned = sum(size[key][item] for key, items in offload.items() for item in items)
        return replace(plan, offload=offload, planned_bytes=planned)

    monkeypatch.setattr(autotune, "plan_offload", chosen)
    model = network(block=Squared, count=4)
    mem = manage(model, "offload")
    mem.follow([(str(i), m) for m in range(MICROBATCHES) for i in reversed(range(4))], steady=True)
    return model, mem


def test_a_plan_for_some_regions_holds_though_they_share_storages_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truth = pipelined(network(block=Squared, count=4))
    model, mem = offloading(monkeypatch, {"1"})
    plans = []
    for _ in range(5):
        assert same(pipelined(model), truth) and mem.store.live_tickets == 0
        plans.append(mem.plan)
    assert plans[0] is None and plans[1] is not None and all(plan is plans[1] for plan in plans[1:])
    assert mem.report().moved_bytes == plans[1].planned_bytes > 0
    # "3" offloads nothing, and no other region saves what it was first to save. "0" saves what "1" saves too, and counts as
    # first; "2" saves what is offloaded.
    hooked = [region.hooked[MICROBATCHES:] for region in model]  # type: ignore[union-attr, index]
    assert all(hooked[0] + hooked[2]) and not any(hooked[3])  # type: ignore[operator, arg-type]
    assert all(model[3].hooked[:MICROBATCHES]), "while measuring everything is"  # type: ignore[union-attr, index, arg-type]


def test_what_two_regions_save_is_free_while_it_is_away_though_the_second_offloads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, mem = offloading(monkeypatch, {"2"})
    pipelined(model)
    saved: list[StorageWeakRef] = []
    model[2].register_forward_hook(lambda *a: saved.append(StorageWeakRef(a[-1].untyped_storage())))
    held: list[int] = []
    model[3].register_forward_hook(lambda *_: held.append(sum(not ref.expired() for ref in saved[:-1])))
    pipelined(model)
    assert mem.plan is not None and any(key[0] == "2" for key in mem.plan.offload)
    assert max(held) < IN_FLIGHT - 1, "its second saver holds what was offloaded"


def test_the_report_is_of_the_plan_that_the_step_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline's next plan is made at the end of a step, before the report. And bytes count the same in calls with hooks and
    without."""
    model, mem = offloading(monkeypatch, {"0", "2"})
    pipelined(model)
    mem.join()
    assert mem.plan is not None and mem.plan.planned_bytes > 0 == mem.report().planned_bytes
    every = mem.report().saved_bytes_by_placement
    pipelined(model)
    report = mem.report()
    assert report.planned_bytes == report.moved_bytes == mem.plan.planned_bytes
    saved = report.saved_bytes_by_placement
    assert saved["keep"] > 0 and saved["offload"] > 0
    assert sum(saved.values()) == sum(every.values())


def test_host_memory_is_freed_once_and_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mem = offloading(monkeypatch, {"2"})
    reserved = []
    for _ in range(6):
        pipelined(model)
        reserved.append(mem.store.pool.reserved_bytes)
    assert reserved[1] == reserved[0], "the plan's first step shows what it uses"
    assert 0 < reserved[2] < reserved[1]
    assert set(reserved[2:]) == {reserved[2]}, "what was freed is page-locked again"


def test_the_flags_of_a_graph_stay_after_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the graph's first replay may have to open them."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    _, mem = offloading(monkeypatch, {"0"})
    flags, words = mem.store.lanes.flags, torch.zeros(4)
    with mem.capturing():
        flags._words.append(words)
    flags.open()
    assert words.eq(1).all()
    with mem.capturing():
        assert not flags._words  # another graph has its own


@pytest.mark.parametrize(
    ("width", "slots"), [(48, 4), (3, 4), (16, 1)]
)  # h is wider than hidden states, narrower, or as large
def test_beside_light_recomputation_the_planned_items_are_offloaded(
    monkeypatch: pytest.MonkeyPatch, width: int, slots: int
) -> None:
    """Every MoE sublayer recomputed, and of what is left all but the smallest item offloaded."""
    tokens, hidden = 32, 32

    def light_and_offload(timeline: Timeline, *_: Any) -> Plan:
        light = {i: c for i, c in enumerate(timeline.calls) if c.light_recompute}
        assert light
        assert {c.recompute_frees for c in light.values()} == {tokens * slots * 2 * width * 4}
        rest = {i: [o for o, n in enumerate(c.items) if n and o != c.made_again] for i, c in light.items()}
        smallest = {i: min(items, key=lambda o: light[i].items[o]) for i, items in rest.items()}
        offload = {i: frozenset(o for o in items if o != smallest[i]) for i, items in rest.items()}
        return simulate(timeline, Assignment(offload, frozenset(c.key[0] for c in light.values())))

    monkeypatch.setattr(autotune, "under_budget", light_and_offload)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": slots, "moe_intermediate_size": width, "vocab_size": 31}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    ids = torch.randint(0, 31, (2, 16))

    def step() -> list[Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with forebay.manage(model, policy="recompute"):
        truth = step()
    with forebay.manage(model, policy="auto", budget=1 << 40) as mem:
        for _ in range(3):
            found = step()
        assert mem.plan is not None and mem.plan.planned_bytes > 0
        plan, moved = mem.plan, mem.report().moved_bytes
        step()
        assert mem.plan is plan  # nothing has outgrown it
    assert moved == plan.planned_bytes
    assert same(found, truth)


# --- beside other code ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_caller_s_checkpoint_is_right_from_the_first_step(placement: str, reentrant: bool) -> None:
    model = network(count=3)

    def run(x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    truth = [gradients(model, seed=seed, run=run) for seed in range(3)]
    mem = manage(model, placement)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert all(same(gradients(model, seed=seed, run=run), truth[seed]) for seed in range(3))
    told = [str(w.message) for w in caught if "activation checkpointing" in str(w.message)]
    assert len(told) == (3 if "offload" in placement else 0), "each region that is not placed as asked says so once"
    assert mem.store.live_tickets == 0


def test_a_budget_is_refused_inside_a_caller_s_checkpoint() -> None:
    model = network()
    manage(model, "auto", budget=1 << 20)
    with pytest.raises(PolicyError, match=r"inside activation checkpointing.*budget would not hold"):
        checkpoint(model, torch.randn(4, WIDTH, requires_grad=True), use_reentrant=False)


class Returns(nn.Module):
    """Returns what its node saved, for the caller to write to."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).exp()


@pytest.mark.parametrize("written", ["a saved tensor", "weights"])
@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_writing_between_forward_and_backward_raises(placement: str, step: int, written: str) -> None:
    model = nn.Sequential(Returns(), Block(), Block())
    manage(model, placement)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(step + 1):
        y = model[0](torch.randn(4, WIDTH, requires_grad=True))
        loss = model[2](model[1](y)).sum()
        if number < step:
            loss.backward()
            continue
        if written == "weights":
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        else:
            y.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Counts(nn.Module):
    """Writes an argument that it reads, and reads two others."""

    def forward(self, x: Tensor, count: Tensor, scale: dict[str, Tensor], shift: Tensor) -> Tensor:
        count += 1
        return (x + shift).sin() * scale["of"] * float(count)


@pytest.mark.parametrize("change", ["mode", "buffer", "child", "hook"])
def test_a_rerun_finds_its_region_as_the_forward_did(change: str) -> None:
    """And leaves it as it was found."""

    def run_on(model: nn.Sequential) -> list[Tensor]:
        block: Any = model[1]
        hook = block.down.register_forward_hook(lambda module, inputs, output: 3 * output)

        def run(x: Tensor) -> Tensor:
            out = model(x)
            if change == "mode":
                model.eval()
            elif change == "buffer":
                block.scale = torch.zeros(WIDTH)
            elif change == "child":
                block.up = nn.Linear(WIDTH, 2 * WIDTH)
            else:
                hook.remove()
            return out

        return gradients(model, run=run)[:2]

    model, plain = network(), network()
    mem = manage(model, "recompute")
    assert same(run_on(model), run_on(plain))
    assert model[1].training == (change != "mode") and bool(model[1].scale.any()) == (change != "buffer")  # type: ignore[union-attr, operator]
    mem.detach()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_keyword_arguments_may_be_written_by_the_region_alone(placement: str) -> None:
    """Also if the next region writes the same one; and one may come from inference mode."""
    with torch.inference_mode():
        shift = torch.randn(WIDTH)
    scale = {"of": torch.randn(WIDTH)}

    def step(model: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
        count = torch.zeros(())
        for block in model:
            x = block(x, count=count, scale=scale, shift=shift)
        return x.sum(), count

    managed = nn.Sequential(Counts(), Counts())
    manage(managed, placement)
    for _ in range(3):
        x = torch.randn(4, WIDTH, requires_grad=True)
        (wanted, _), (loss, count) = step(nn.Sequential(Counts(), Counts()), x), step(managed, x)
        for again in (True, False):
            assert same(
                torch.autograd.grad(loss, x, retain_graph=again), torch.autograd.grad(wanted, x, retain_graph=True)
            )
        assert count == 2
    loss, _ = step(managed, torch.randn(4, WIDTH, requires_grad=True))
    scale["of"].mul_(2)
    advice = r".*scale \(argument\).*Change a copy of 'scale'" if "recompute" in placement else ""
    with pytest.raises(RuntimeError, match="modified by an inplace operation" + advice):
        loss.backward()


def _fsdp1(rank: int, world: int) -> None:
    def sharded(module: nn.Module, original: bool) -> nn.Module:
        return FullyShardedDataParallel(module, use_orig_params=original, device_id=torch.device("cpu"))

    for inside in (False, True):
        for original in (False, True):
            for placement in (None, *PLACEMENTS):
                model = network(count=3)
                if inside:
                    for block in model:
                        block.down = sharded(block.down, original)  # type: ignore[assignment]
                mem = manage(model, placement) if placement else None
                run = model if inside else sharded(model, original)
                found = []
                for seed in range(3):
                    found += gradients(run, seed=seed)
                    assert mem is None or mem.store.live_tickets == 0
                if placement is None:
                    truth = found
                assert same(found, truth), (inside, original, placement)


def test_fsdp1_empties_weights_inside_a_region() -> None:
    run_ranks(_fsdp1, 2)
