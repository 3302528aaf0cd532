"""Overlapped microbatches against plain autograd, one microbatch after the other: bitwise, on one rank and on two."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forebay.moe.dispatch import LocalDispatcher, NcclDispatcher
from tests.helpers import count_handles
from tests.pipeline.nets import CPU, Dense, E, H, Moe, MoeWithBack, Net, Overlapped, equal, tokens
from tests.ranks import run_ranks

MIXED = "dmmd"  # dense and MoE layers, dense ones at both ends


def routers(outputs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return sum(t.softmax(-1).mean(0)[ids.view(-1)].mean() for t, ids in outputs) * 0.1  # type: ignore[return-value]


def agrees(net: Net, microbatches: list[Tensor], added: Any = routers, **settings: Any) -> bool:
    """Whether losses and all gradients are bitwise those of plain autograd."""
    expected = net.sequential(microbatches, added)
    grads = net.take_gradients()
    losses = net.overlapped(routers=added, **settings).run(microbatches)
    return torch.equal(losses, expected) and not losses.requires_grad and equal(net.take_gradients(), grads)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("kinds", [MIXED, "m", "d", "mmm", "bmb"])
def test_one_rank_is_bitwise_plain_autograd(kinds: str, count: int) -> None:
    net = Net(LocalDispatcher(E), kinds)
    assert agrees(net, tokens(count)) and agrees(net, tokens(count), None, weights=net.store)


def test_embeddings_that_are_frozen_or_the_head() -> None:
    assert agrees(Net(LocalDispatcher(E), MIXED, frozen=True), tokens(2))
    net = Net(LocalDispatcher(E), MIXED, tied=True)
    assert agrees(net, tokens(1))
    # Autograd sums the two contributions of a microbatch before it adds them to the gradient; here they come one by one.
    net.sequential(tokens(3))
    expected = net.take_gradients()
    net.overlapped().run(tokens(3))
    torch.testing.assert_close(net.take_gradients(), expected, rtol=1e-6, atol=1e-7)


def breaks_and_recovers(net: Net, microbatches: list[Tensor]) -> list[bool]:
    """For an exception in each kind of stage, with two microbatches under way: is nothing left, does a step work afterwards."""
    net.sequential(microbatches, routers)
    grads = net.take_gradients()
    good, alive = [], count_handles(net.dispatcher)
    layer = next(m for m in net.layers if isinstance(m, Moe))
    where, forwards = "", 0

    def breaking(outputs: list[tuple[Tensor, Tensor]]) -> Tensor:
        nonlocal forwards
        forwards += 1
        layer.broken = where if forwards == 2 else layer.broken
        return routers(outputs)

    step = net.overlapped(routers=breaking)
    backs = [("back", 2)] if isinstance(layer, MoeWithBack) else []
    for where, ended in (("stage1", 2), ("experts", 2), ("backward", 3), *backs):
        forwards = 0
        with pytest.raises(ArithmeticError):
            step.run(microbatches)
        good.append(forwards == ended and alive() == 0 and not step.context._deferred)
        layer.broken, where = "", ""
        net.take_gradients()
        step.run(microbatches)
        good.append(equal(net.take_gradients(), grads) and alive() == 0)
    return good


def two_ranks(rank: int, world: int) -> dict[str, Any]:
    dispatcher = NcclDispatcher(dist.group.WORLD, E)
    handles = count_handles(dispatcher)
    found: dict[str, Any] = {}
    for kinds, count in ((MIXED, 1), (MIXED, 2), (MIXED, 3), (MIXED, 4), ("mm", 3), ("m", 2), ("bmb", 3)):
        found[f"{kinds} {count}"] = agrees(Net(dispatcher, kinds), tokens(count, rank))
    found["uneven"] = agrees(Net(dispatcher, MIXED), tokens(3, rank, batch=1 + 2 * rank))
    found["tied"] = agrees(Net(dispatcher, MIXED, tied=True), tokens(1, rank))
    found["no routers"] = agrees(Net(dispatcher, MIXED), tokens(3, rank), None)
    found["handles"] = handles() == 0
    alive: list[int] = []

    def counting(outputs: list[tuple[Tensor, Tensor]]) -> Tensor:
        alive.append(handles())
        return routers(outputs)

    Net(dispatcher, "mmm").overlapped(routers=counting).run(tokens(3, rank))
    found["handles under way"] = alive == [3, 3, 3] and handles() == 0
    found["exceptions"] = all(breaks_and_recovers(Net(dispatcher, MIXED), tokens(4, rank)))
    found["of a back"] = all(breaks_and_recovers(Net(dispatcher, "dbd"), tokens(4, rank)))
    return found


def test_two_ranks_are_bitwise_plain_autograd() -> None:
    for found in run_ranks(two_ranks, 2):
        assert [name for name, good in found.items() if not good] == []


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no microbatches"):
        Net(LocalDispatcher(E), MIXED).overlapped().run([])
    lost = Overlapped([Dense()], lambda m: m, lambda x, m: nn.Parameter(torch.ones(())), CPU)
    with pytest.raises(RuntimeError, match="do not depend on its inputs"):
        lost.run([torch.randn(1, 3, H)])
