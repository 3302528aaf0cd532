"""The manager's contract: bitwise neutral placements, storages stored once, nothing left behind."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from forebay.memory.hooks import Manager
from forebay.memory.regions import ModuleSlot
from forebay.policy import BudgetError, PolicyError, resolve
from tests.helpers import holdings, used_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH = 24


class Block(nn.Module):
    """Saves a weight's view, one storage twice (a view of it once), a buffer and a dropout mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.randn(WIDTH))
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        gate, up = h.chunk(2, dim=-1)
        if self.fail:
            raise ZeroDivisionError("on purpose")
        y = self.down(nn.functional.dropout(gate.sigmoid() * up, 0.25, self.training)) * self.scale
        return x + y + (h.t()[:WIDTH].t() * y).tanh()


def network(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(5)]).to(device)


def manage(model: nn.Sequential, policy: dict[str, str], device: str, **options: object) -> Manager:
    slots = {str(i): ModuleSlot(block) for i, block in enumerate(model)}
    return Manager(slots, resolve(policy, slots), torch.device(device), min_bytes=1, **options)  # type: ignore[arg-type]


def gradients(model: nn.Module, device: str, seed: int = 1) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    x = torch.randn(40, WIDTH, device=device, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


POLICIES: list[dict[str, str]] = [
    {"?": "keep"},
    {"?": "recompute"},
    {"?": "offload"},
    {"0": "offload", "1": "recompute", "2": "keep", "3": "offload"},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offload", ["fit", "all"])
@pytest.mark.parametrize("policy", POLICIES)
def test_results_are_bitwise_those_of_the_unmanaged_model(policy: dict[str, str], offload: str, device: str) -> None:
    truth = [gradients(network(device), device, seed) for seed in range(4)]
    model = network(device)
    mem = manage(model, policy, device, offload=offload)
    for seed in range(4):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, device, seed), truth[seed], strict=True))
        assert mem.ledger.live_tickets == 0 and used_bytes(mem.store.pool) == 0
    if "offload" in policy.values():
        assert mem.plan is not None and mem.plan.planned_bytes > 0, "the test must have offloaded something"
    mem.detach()
    assert all("forward" not in block.__dict__ for block in model)


@pytest.mark.parametrize("device", DEVICES)
def test_a_storage_is_stored_once_and_weights_never(device: str) -> None:
    model = network(device)
    mem = manage(model, {"2": "offload"}, device)
    out = model(torch.randn(40, WIDTH, device=device))
    block = holdings(mem.ledger)
    unit = 40 * WIDTH * 4
    # x (saved by up); h once, though saved through chunks and a transposed slice (2 units); sigmoid; the product; the
    # dropout mask; the dropped product; y before and after scaling; tanh. No weight and no buffer (`scale` is WIDTH * 4 bytes).
    sizes = sorted(h.nbytes for h in block)
    assert sizes.count(2 * unit) == 1
    assert all(size in (40 * WIDTH, unit, 2 * unit) for size in sizes)
    del out
    gc.collect()
    assert mem.ledger.live_tickets == 0


@pytest.mark.parametrize("device", DEVICES)
def test_views_come_back_with_size_stride_and_offset(device: str) -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            base = x * 2
            return (base[3:9:2, 1:].t() * base.t()[1:, 3:9:2]).sum() + (base.as_strided((4, 4), (1, 2), 5) ** 2).sum()

    model = nn.Sequential(Views())
    x = torch.randn(12, 8, device=device, requires_grad=True)
    truth = torch.autograd.grad(model(x), x)[0]
    mem = manage(model, {"0": "offload"}, device)
    assert torch.equal(torch.autograd.grad(model(x), x)[0], truth)
    mem.detach()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_left_behind(policy: dict[str, str], device: str) -> None:
    model = network(device)
    mem = manage(model, policy, device)
    x = torch.randn(40, WIDTH, device=device)

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

    ways: list[Callable[[], None]] = [
        forward_only,
        no_grad,
        inference,
        exception,
        forward_forward_backward,
        backward_fails,
    ]
    for way in ways * 3:
        way()
        gc.collect()
        assert mem.ledger.live_tickets == 0, way.__name__
        assert mem.store.live_tickets == 0 and used_bytes(mem.store.pool) == 0, way.__name__
    assert _hooks_are_empty()


def _hooks_are_empty() -> bool:
    """No pack hook is active: a saved tensor is what was saved."""
    x = torch.ones(2, requires_grad=True)
    y = x * x
    return y.grad_fn._saved_self.data_ptr() == x.data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize("device", DEVICES)
def test_several_forwards_before_their_backwards(device: str) -> None:
    def accumulate(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(5)
        losses = [model(torch.randn(40, WIDTH, device=device)).square().mean() for _ in range(3)]
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    truth = accumulate(network(device))
    model = network(device)
    mem = manage(model, {"?": "offload"}, device)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(accumulate(model), truth, strict=True))
        assert mem.ledger.live_tickets == 0


def test_backward_twice_through_one_graph() -> None:
    model = network("cpu").eval()
    x = torch.randn(40, WIDTH, requires_grad=True)
    truth = torch.autograd.grad(model(x).sum(), x)[0]
    mem = manage(model, {"?": "offload"}, "cpu")
    out = model(x).sum()
    assert all(torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], truth) for _ in range(2))
    assert mem.ledger.live_tickets > 0, "retain_graph keeps the tickets"
    del out
    gc.collect()
    assert mem.ledger.live_tickets == 0


def test_two_managed_models_do_not_meet() -> None:
    one, two = network("cpu"), network("cpu")
    first, second = manage(one, {"?": "offload"}, "cpu"), manage(two, {"?": "offload"}, "cpu")
    out = one(torch.randn(40, WIDTH))
    assert first.ledger.live_tickets > 0 and second.ledger.live_tickets == 0
    gradients(two, "cpu")
    del out


def test_a_graph_outlives_detach() -> None:
    model = network("cpu").eval()
    x = torch.randn(40, WIDTH, requires_grad=True)
    truth = torch.autograd.grad(model(x).sum(), x)[0]
    mem = manage(model, {"?": "offload"}, "cpu")
    out = model(x).sum()
    mem.detach()
    assert torch.equal(torch.autograd.grad(out, x)[0], truth)


def test_other_shapes_after_the_plan_are_still_right() -> None:
    model, plain = network("cpu").eval(), network("cpu").eval()
    manage(model, {"?": "offload"}, "cpu")
    for rows in (40, 40, 40, 7, 91, 1, 40):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], torch.autograd.grad(plain(x).sum(), x)[0])


def test_recomputation_runs_the_forward_again_and_keeps_only_its_input() -> None:
    model = network("cpu")
    calls = []
    model[0].up.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    manage(model, {"?": "recompute"}, "cpu")
    gradients(model, "cpu")
    assert len(calls) == 2


def test_auto_meets_its_budget_and_names_the_smallest_when_it_cannot() -> None:
    model = network("cpu")
    saved = manage(model, {"?": "offload"}, "cpu")
    for _ in range(2):
        gradients(model, "cpu")
    assert saved.timeline is not None
    every = sum(sum(c.items) for c in saved.timeline.calls)
    saved.detach()

    claims = resolve({"?": "keep"}, [str(i) for i in range(5)])
    auto = [type(c)(c.path, "auto", c.pattern) for c in claims]
    mem = Manager(
        {str(i): ModuleSlot(b) for i, b in enumerate(model)}, auto, torch.device("cpu"), budget=every // 2, min_bytes=1
    )
    truth = gradients(network("cpu"), "cpu")
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, "cpu"), truth, strict=True))
    assert mem.plan is not None and mem.plan.peak_bytes <= every // 2
    mem.detach()

    tight = Manager(
        {str(i): ModuleSlot(b) for i, b in enumerate(model)}, auto, torch.device("cpu"), budget=10, min_bytes=1
    )
    gradients(model, "cpu")
    with pytest.raises(BudgetError, match=r"smallest budget .* is \d") as caught:
        gradients(model, "cpu")
    smallest = int(str(caught.value).rsplit("(", 1)[1].split()[0])
    tight.detach()
    again = Manager(
        {str(i): ModuleSlot(b) for i, b in enumerate(model)}, auto, torch.device("cpu"), budget=smallest, min_bytes=1
    )
    for _ in range(3):
        gradients(model, "cpu")
    assert again.plan is not None and again.plan.peak_bytes <= smallest


def test_what_cannot_be_managed_is_refused_early() -> None:
    model = network("cpu")
    with pytest.raises(PolicyError, match="needs a budget"):
        Manager({}, [type(c)(c.path, "auto", c.pattern) for c in resolve({"?": "keep"}, ["0"])], torch.device("cpu"))
    with pytest.raises(PolicyError, match="nothing is left to decide"):
        manage(model, {"?": "recompute"}, "cpu", budget=100)
    with pytest.raises(PolicyError, match="no paged region"):
        manage(model, {"?": "stash"}, "cpu")
    with pytest.raises(PolicyError, match="'fit'"):
        manage(model, {"?": "offload"}, "cpu", offload="some")
    model[1].gradient_checkpointing = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match="already under gradient checkpointing"):
        manage(model, {"1": "recompute"}, "cpu")
    assert all("forward" not in block.__dict__ for block in model)


def test_a_longer_batch_is_measured_and_planned_anew() -> None:
    model = network("cpu").eval()
    mem = manage(model, {"?": "offload"}, "cpu")
    planned = []
    for rows in (40, 40, 40, 80, 80, 80, 40, 40):
        model(torch.randn(rows, WIDTH)).sum().backward()
        planned.append(mem.plan.planned_bytes if mem.plan else None)
    assert planned[0] is None and planned[2] and planned[4] is None, planned
    assert planned[5] == 2 * planned[2] == planned[7]


def test_the_report_says_where_the_saved_bytes_are() -> None:
    model = network("cpu")
    mem = manage(model, {"0": "offload", "1": "recompute", "2": "keep"}, "cpu")
    for _ in range(3):
        gradients(model, "cpu")
    report = mem.report()
    saved = report.saved_bytes_by_placement
    assert set(saved) >= {"offload", "recompute", "keep"} and report.recomputed == 1
    assert saved["recompute"] == 40 * WIDTH * 4, "a checkpoint keeps its input"
    assert saved["offload"] == report.planned_bytes > 0
    assert saved["keep"] > 3 * saved["recompute"]


def test_what_distant_regions_share_stays_on_the_device() -> None:
    class Rotated(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            x, table = pair
            return (x * table).sin(), table

    model = nn.Sequential(*[Rotated() for _ in range(6)])
    mem = manage(model, {"?": "offload"}, "cpu")
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(3):
        model((x * 1, torch.randn(32)))[0].sum().backward()
    assert mem.timeline is not None and mem.plan is not None
    sizes = {c.key[0]: sorted(c.items) for c in mem.timeline.calls}
    assert sizes["0"] == [0, 16 * 32 * 4], "the table counts as nothing to move"
    assert sizes["4"] == [16 * 32 * 4]


def test_the_next_cycle_is_planned_at_the_end_of_one() -> None:
    """A pipeline's ranks end a step together; planned when the next forward comes, they would wait for each other's plans."""
    model = network("cpu")
    truth = gradients(model, "cpu")
    manager = manage(model, {"?": "offload"}, "cpu")
    assert all(map(torch.equal, gradients(model, "cpu"), truth))
    assert manager.plan is None
    manager.join()
    plan = manager.plan
    assert plan is not None
    manager.join()
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, "cpu"), truth))
        assert manager.plan is plan, "planned once"
    manager.detach()
