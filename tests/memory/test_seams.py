"""Where regions meet other code: the caller's checkpointing, in-place changes, lazy bits, unused outputs, leaves."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

from forebay.memory.hooks import Manager
from forebay.memory.regions import ModuleSlot
from forebay.policy import BudgetError, PolicyError, resolve
from tests.ranks import run_ranks

WIDTH = 8


def managed(model: nn.Sequential, placement: str, **options: Any) -> Manager:
    slots: dict[str, Any] = {str(i): ModuleSlot(block) for i, block in enumerate(model)}
    claims = resolve({"*": placement if placement != "auto" else "offload"}, slots)
    if placement == "auto":
        claims = [type(c)(c.path, "auto", c.pattern) for c in claims]
    return Manager(slots, claims, torch.device("cpu"), min_bytes=1, **options)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.linear(x).tanh() * x).sin()


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(3)])


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], seed: int = 1) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    x = torch.randn(4, WIDTH, requires_grad=True)
    loss = run(x).square().sum()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]


def same(found: list[Tensor], truth: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


PLACEMENTS = ["keep", "recompute", "offload"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_caller_s_checkpoint_is_right_from_the_first_step(placement: str, reentrant: bool) -> None:
    model = blocks()

    def run(x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    truth = [gradients(model, run, seed) for seed in range(3)]
    mem = managed(model, placement)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert all(same(gradients(model, run, seed), truth[seed]) for seed in range(3))
    told = [str(w.message) for w in caught if "activation checkpointing" in str(w.message)]
    assert len(told) == (3 if placement == "offload" else 0), "each region that is not placed as asked says so once"
    assert mem.ledger.live_tickets == 0


def test_a_budget_is_refused_inside_a_caller_s_checkpoint() -> None:
    model = blocks()
    managed(model, "auto", budget=1 << 20)
    with pytest.raises(PolicyError, match=r"inside activation checkpointing.*budget would not hold"):
        checkpoint(model, torch.randn(4, WIDTH, requires_grad=True), use_reentrant=False)


def test_a_checkpoint_inside_a_region_is_right() -> None:
    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[return-value]

    torch.manual_seed(0)
    model = nn.Sequential(*[Inside() for _ in range(3)])
    truth = [gradients(model, model, seed) for seed in range(3)]
    for placement in PLACEMENTS:
        mem = managed(model, placement)
        assert all(same(gradients(model, model, seed), truth[seed]) for seed in range(3))
        mem.detach()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_torch_func_runs_regions_unmanaged(placement: str) -> None:
    model = blocks()
    x = torch.randn(4, WIDTH)

    def f(x: Tensor) -> Tensor:
        return model(x).square().sum()

    truth = torch.func.grad(f)(x)
    managed(model, placement)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(torch.func.grad(f)(x), truth)


class Lazy(nn.Module):
    """Saves tensors whose bytes are another tensor's: conjugates, and negated imaginary parts, which are real."""

    def forward(self, x: Tensor) -> Tensor:
        c = torch.view_as_complex(torch.stack((x * 2, x.sin()), -1))
        imaginary = c.conj().imag
        assert imaginary.is_neg()
        return x + (imaginary * imaginary * x).tanh() + (c.conj() * c.conj() * 3j).real * imaginary


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_conjugate_and_negative_bits_come_back(placement: str) -> None:
    model = nn.Sequential(Lazy(), Lazy())
    truth = [gradients(model, model, seed) for seed in range(3)]
    mem = managed(model, placement)
    assert all(same(gradients(model, model, seed), truth[seed]) for seed in range(3))
    mem.detach()


class Returns(nn.Module):
    """Returns what its node saved, for the caller to write to."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).exp()


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_saved_tensor_that_was_written_to_raises(placement: str, step: int) -> None:
    model = nn.Sequential(Returns(), Block())
    managed(model, placement)
    for number in range(step + 1):
        x = torch.randn(4, WIDTH, requires_grad=True)
        y = model[0](x)
        out = model[1](y)
        if number == step:
            y.detach().add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_weights_that_step_between_forward_and_backward_raise(placement: str, step: int) -> None:
    model = blocks()
    managed(model, placement)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(step + 1):
        loss = model(torch.randn(4, WIDTH, requires_grad=True)).sum()
        if number == step:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


class Two(nn.Module):
    """Layers, and a head whose output the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.blocks[0](x)
        return self.blocks[1](y), self.blocks[2](y)


def containers(mem: Manager) -> int:
    step = mem._step
    return sum(map(len, (step.saved, step.saved_by, step._calls, step.leaving, mem._saved_by)))


@pytest.mark.parametrize("placement", ["offload", "auto"])
def test_an_output_that_the_loss_does_not_use(placement: str) -> None:
    model, truth = Two(), Two()
    mem = managed(model.blocks, placement, budget=1 << 20 if placement == "auto" else None)
    sizes = []
    for step in range(20):
        y, aux = model(torch.ones(4, WIDTH) * step)
        y.sum().backward()
        y_truth, _ = truth(torch.ones(4, WIDTH) * step)
        y_truth.sum().backward()
        assert aux.requires_grad, "held until the next step"
        sizes.append(containers(mem))
        for p, q in zip(model.parameters(), truth.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or (q.grad is not None and torch.equal(p.grad, q.grad))
    assert mem.plan is not None
    assert max(sizes[2:]) == sizes[2] == sizes[-1]


def test_a_budget_holds_though_an_output_is_not_used() -> None:
    model = Two()
    managed(model.blocks, "offload", budget=1, offload="all")
    with pytest.raises(BudgetError):
        for _ in range(3):
            y, _aux = model(torch.ones(4, WIDTH, requires_grad=True))
            y.sum().backward()


def test_an_output_that_is_used_later_is_right() -> None:
    model, truth = Two(), Two()
    mem = managed(model.blocks, "offload", offload="all")
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
    assert mem.ledger.live_tickets == 0


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * self.scale).sin(), self.scale


def test_a_leaf_that_a_region_returns_gathers_no_hooks() -> None:
    model = nn.Sequential(Leaf())
    mem = managed(model, "offload")
    for _ in range(5):
        y, scale = model(torch.randn(4, WIDTH, requires_grad=True))
        (y.sum() + scale.sum()).backward()
    assert not scale._backward_hooks
    mem.detach()
    assert not scale._backward_hooks


def test_a_failed_forward_whose_traceback_is_held_blocks_no_plan() -> None:
    model = blocks()
    mem = managed(model, "offload")
    held = []
    for step in range(8):
        try:
            model(torch.randn(4, WIDTH + (step % 4 == 0), requires_grad=True)).sum().backward()
        except RuntimeError as error:
            held.append(error)
    assert len(held) == 2 and mem.plan is not None
    assert len(mem._step._calls) <= 4


def _fsdp1(rank: int, world: int) -> None:
    def sharded(module: nn.Module, original: bool) -> nn.Module:
        return FullyShardedDataParallel(module, use_orig_params=original, device_id=torch.device("cpu"))

    for inside in (False, True):
        for original in (False, True):
            for placement in (None, *PLACEMENTS):
                model = blocks()
                if inside:
                    for block in model:
                        block.linear = sharded(block.linear, original)  # type: ignore[assignment]
                mem = managed(model, placement) if placement else None
                run = model if inside else sharded(model, original)
                found = []
                for seed in range(3):
                    found += gradients(run, run, seed)
                    assert mem is None or mem.ledger.live_tickets == 0
                if placement is None:
                    truth = found
                assert same(found, truth), (inside, original, placement)


def test_fsdp1_empties_weights_inside_a_region() -> None:
    run_ranks(_fsdp1, 2)
