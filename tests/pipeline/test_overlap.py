"""Overlapped microbatches against plain autograd, one microbatch after the other: bitwise, on one rank and on two."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forebay.moe.dispatch import LocalDispatcher, NcclDispatcher
from forebay.pipeline.runtime import OverlappedStep
from tests.pipeline.nets import CPU, Dense, E, H, Moe, Net, equal, tokens
from tests.ranks import run_ranks

MIXED = "dmmd"  # dense and MoE layers, dense ones at both ends


def routers(outputs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return sum(t.softmax(-1).mean(0)[ids.view(-1)].mean() for t, ids in outputs) * 0.1  # type: ignore[return-value]


def agrees(
    net: Net, microbatches: list[Tensor], balanced: bool = True, loss_scale: float = 1.0, **settings: Any
) -> bool:
    """Whether losses and all gradients are bitwise those of plain autograd."""
    added = routers if balanced else None
    expected = net.sequential(microbatches, added, loss_scale)
    grads = net.take_gradients()
    losses = net.overlapped(routers=added, **settings).run(microbatches, loss_scale=loss_scale)
    return torch.equal(losses, expected) and not losses.requires_grad and equal(net.take_gradients(), grads)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("kinds", [MIXED, "m", "d", "mmm"])
def test_one_rank_is_bitwise_plain_autograd(kinds: str, count: int) -> None:
    dispatcher = LocalDispatcher(E)
    assert agrees(Net(dispatcher, kinds), tokens(count))
    assert dispatcher.live_handles == 0


@pytest.mark.parametrize("settings", [{"balanced": False}, {"early_release": False}, {"loss_scale": 0.3}])
def test_one_rank_settings(settings: dict[str, Any]) -> None:
    assert agrees(Net(LocalDispatcher(E), MIXED), tokens(3), **settings)


def test_embeddings_that_are_frozen_or_the_head() -> None:
    assert agrees(Net(LocalDispatcher(E), MIXED, frozen=True), tokens(2))
    net = Net(LocalDispatcher(E), MIXED, tied=True)
    assert agrees(net, tokens(1))
    # Autograd sums the two contributions of a microbatch before it adds them to the gradient; here they come one by one.
    net.sequential(tokens(3))
    expected = net.take_gradients()
    net.overlapped().run(tokens(3))
    torch.testing.assert_close(net.take_gradients(), expected, rtol=1e-6, atol=1e-7)


def test_after_backward_sees_the_gradients_of_the_microbatches_so_far() -> None:
    net = Net(LocalDispatcher(E), MIXED)

    def gradients() -> dict[str, Any]:
        return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}

    expected = []
    for ids in tokens(4):
        net.sequential([ids])
        expected.append(gradients())
    net.take_gradients()
    seen: list[Any] = []

    def after(i: int) -> None:
        assert i == len(seen)
        seen.append(gradients())

    net.overlapped().run(tokens(4), after_backward=after)
    assert len(seen) == 4 and all(equal(a, b) for a, b in zip(seen, expected, strict=True))


def breaks_and_recovers(net: Net, microbatches: list[Tensor]) -> list[bool]:
    """For an exception in each kind of stage, with two microbatches under way: is nothing left, does a step work afterwards."""
    net.sequential(microbatches, routers)
    grads = net.take_gradients()
    good, step, dispatcher = [], net.overlapped(routers=routers), net.dispatcher
    layer = next(m for m in net.layers if isinstance(m, Moe))
    for where in ("stage1", "experts", "backward"):
        done: list[int] = []

        def after(i: int, done: list[int] = done, where: str = where) -> None:
            done.append(i)
            layer.broken = where

        try:
            step.run(microbatches, after_backward=after)
        except ArithmeticError:
            good.append(done == [0] or (where == "backward" and done == [0, 1]))
        else:
            good.append(False)
        good.append(dispatcher.live_handles == 0 and not step._context._deferred)
        layer.broken = ""
        net.take_gradients()
        step.run(microbatches)
        good.append(equal(net.take_gradients(), grads) and dispatcher.live_handles == 0)
    return good


def test_an_exception_leaves_nothing_behind_on_one_rank() -> None:
    assert breaks_and_recovers(Net(LocalDispatcher(E), MIXED), tokens(4)) == [True] * 9


def two_ranks(rank: int, world: int) -> dict[str, Any]:
    dispatcher = NcclDispatcher(dist.group.WORLD, E)
    found: dict[str, Any] = {}
    for kinds, count in ((MIXED, 1), (MIXED, 2), (MIXED, 3), (MIXED, 4), ("mm", 3), ("m", 2)):
        found[f"{kinds} {count}"] = agrees(Net(dispatcher, kinds), tokens(count, rank))
    found["uneven"] = agrees(Net(dispatcher, MIXED), tokens(3, rank, batch=1 + 2 * rank))
    found["tied"] = agrees(Net(dispatcher, MIXED, tied=True), tokens(1, rank))
    found["no routers"] = agrees(Net(dispatcher, MIXED), tokens(3, rank), balanced=False)
    found["late release"] = agrees(Net(dispatcher, MIXED), tokens(3, rank), early_release=False)
    found["handles"] = dispatcher.live_handles == 0
    alive: list[int] = []
    net = Net(dispatcher, "mmm")
    net.overlapped(routers=routers).run(tokens(3, rank), after_backward=lambda _: alive.append(dispatcher.live_handles))
    # By then the next microbatch, if there is one, has made its three handles.
    found["handles under way"] = alive == [3, 3, 0]
    found["exceptions"] = all(breaks_and_recovers(Net(dispatcher, MIXED), tokens(4, rank)))
    return found


def test_two_ranks_are_bitwise_plain_autograd() -> None:
    for found in run_ranks(two_ranks, 2):
        assert [name for name, good in found.items() if not good] == []


def test_refusals() -> None:
    dispatcher = LocalDispatcher(E)
    with pytest.raises(ValueError, match="no layers"):
        Net(dispatcher, "").overlapped()
    step = Net(dispatcher, MIXED).overlapped()
    with pytest.raises(ValueError, match="no microbatches"):
        step.run([])
    with torch.no_grad(), pytest.raises(RuntimeError, match="computes gradients"):
        step.run(tokens(1))
    lost = OverlappedStep([Dense()], lambda m: m, lambda x, m: nn.Parameter(torch.ones(())), CPU)  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="do not depend on its inputs"):
        lost.run([torch.randn(1, 3, H)])
