"""Recomputed regions: results to the bit, what runs again, and how often ranks communicate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import set_checkpoint_early_stop

import forebay
from forebay.memory.recompute import recomputed
from forebay.moe.dispatch import combine, dispatch
from forebay.moe.experts import experts
from tests.helpers import count_handles
from tests.models.conftest import build_tiny
from tests.moe.layers import CountedDispatcher
from tests.ranks import run_ranks

MODES = ("full", "save-dispatch")
T, H, E, K, INNER = 6, 16, 4, 2, 8


def layer(dispatcher: CountedDispatcher, rank: int, tail: bool) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A region with both communications, and with an operation after combine that saves its output if `tail`."""
    g = torch.Generator().manual_seed(rank)
    ids = torch.rand(T, E, generator=g).argsort(1)[:, :K]
    shapes = ((T, H), (T, K), (E // 2, 2 * INNER, H), (E // 2, H, INNER))
    trained = [torch.randn(s, generator=g).requires_grad_() for s in shapes]

    def forward(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        sent = dispatch(torch.tanh(x), ids, weights, dispatcher)
        y_rows = experts(sent.rows, sent.ids, sent.weights, gate_up, down, max_rows=sent.max_rows)
        y = combine(y_rows, sent.handle)
        return torch.nn.functional.silu(y) if tail else y

    return forward, trained


def on_two_ranks(rank: int, world: int) -> None:
    dispatcher = CountedDispatcher(dist.group.WORLD, E)
    handles = count_handles(dispatcher)
    for tail in (False, True):
        forward, trained = layer(dispatcher, rank, tail)
        plain = forward(*trained)
        wanted = [plain, *torch.autograd.grad(plain.sum(), trained)]
        for early_stop in (True, False):
            for mode in MODES:
                dispatcher.calls.clear()
                with set_checkpoint_early_stop(early_stop):
                    y = recomputed(forward, mode, tuple)(*trained)
                    got = [y, *torch.autograd.grad(y.sum(), trained)]
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
                # An early stop skips a combine whose result is not needed.
                assert dispatcher.calls == {
                    "dispatch": 2 if mode == "full" else 1,
                    "combine": 2 if tail or not early_stop else 1,
                    "gradient of dispatch": 1,
                }, (mode, tail, early_stop, dispatcher.calls)
                del y, got
        del plain, wanted
    forward, trained = layer(dispatcher, rank, False)
    whole = torch.autograd.grad(forward(*trained).sum(), trained)
    dispatcher.calls.clear()
    with torch.no_grad():
        recomputed(forward, "full", tuple)(*trained)
    assert dispatcher.calls == {"dispatch": 1, "combine": 1} and handles() == 0

    def split_backward(mode: str) -> list[Tensor]:
        """In two parts, for inputs and for weights."""
        y = recomputed(forward, mode, tuple)(*trained)
        first = torch.autograd.grad(y.sum(), trained[:2], retain_graph=True)
        return [*first, *torch.autograd.grad(y.sum(), trained[2:])]

    assert all(torch.equal(a, b) for a, b in zip(split_backward("full"), whole, strict=True))
    with pytest.raises(RuntimeError, match="backward an extra time"):
        split_backward("save-dispatch")


def test_how_often_ranks_communicate_in_each_mode() -> None:
    run_ranks(on_two_ranks, 2)


class Runs:
    """A region with dropout that counts its runs."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.count += 1
        return torch.nn.functional.dropout(torch.sin(x), 0.5)


@pytest.mark.parametrize("mode", MODES)
def test_without_communication_every_mode_runs_the_region_again_with_the_same_numbers(mode: str) -> None:
    x = torch.randn(64, requires_grad=True)
    torch.manual_seed(1)
    plain = Runs()(x)
    wanted = torch.autograd.grad(plain.sum(), x)[0]
    runs = Runs()
    torch.manual_seed(1)
    y = recomputed(runs, mode, tuple)(x)
    assert torch.equal(y, plain) and runs.count == 1
    torch.rand(3)  # backward starts from another state
    state = torch.get_rng_state()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted) and runs.count == 2
    assert torch.equal(torch.get_rng_state(), state)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not recomputed(runs, mode, tuple)(torch.ones(3, requires_grad=True)).requires_grad
    assert runs.count == 4, "without gradients it is a plain call"


def test_a_sublayer_that_dispatches_nothing_does_not_choose_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes each of its operations through Python."""

    def choose(*_: Any) -> None:
        raise AssertionError("operations pass through a dispatch mode")

    monkeypatch.setattr("forebay.memory.recompute.create_selective_checkpoint_contexts", choose)
    ids = torch.randint(0, 64, (2, 8))
    gradients = []
    for policy in ("keep", "recompute"):
        model = build_tiny("qwen3_moe")
        with forebay.manage(model, policy, recompute="save-dispatch"):
            model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([w.grad for w in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("given", ["a keyword", "a list", "nothing"])
def test_generators_are_restored_of_devices_that_no_positional_tensor_is_on(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the arguments alone the checkpoint knows on which devices it has to. Fake tensors stand for a GPU's."""
    devices: list[set[str]] = []

    def noted(run: Callable[..., Any], *args: Any, **_: Any) -> Any:
        devices.append({t.device.type for t in args if isinstance(t, Tensor)})
        return run(*args)

    monkeypatch.setattr("forebay.memory.recompute.checkpoint", noted)
    with FakeTensorMode():
        module, x = torch.nn.RMSNorm(4, device="cuda").requires_grad_(False), torch.empty(2, 4, device="cuda")

        def forward(rows: Any = None, *, x: Tensor = x) -> Tensor:
            return (x if rows is None else rows[0]) * module.weight

        region = recomputed(forward, "full", lambda: (module,))
        y = {"a keyword": lambda: region(x=x), "a list": lambda: region([x]), "nothing": region}[given]()
        assert y.shape == (2, 4) and devices == [{"cuda"}]


@pytest.mark.gpu
def test_a_region_that_is_called_by_keyword_draws_the_same_numbers_again() -> None:
    drop, x = torch.nn.Dropout(0.5), torch.randn(1000, device="cuda", requires_grad=True)
    y = recomputed(lambda x: drop(x.exp()).square(), "full", lambda: (drop,))(x=x)
    torch.cuda.manual_seed(1)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, 2 * y)
