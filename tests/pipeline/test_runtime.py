"""The runtime on small layers: gradients are those of plain autograd, tensors die when they should, nothing is left behind.

Pipeline ranks are threads of this process where experts are on one rank, and gloo processes where they are on two.
`tests/train/test_matrix.py` runs whole models.
"""

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from forebay.config import SCHEDULES
from forebay.models.router import balance_loss
from forebay.moe.dispatch import LocalDispatcher, NcclDispatcher, TokenDispatcher
from forebay.pipeline.p2p import DistLinks, Links, Message, Packet, neighbors
from forebay.pipeline.runtime import PipelineRuntime, Stage, StageBalance
from forebay.pipeline.schedule import Action, PipelinePlan, forward_plan, make_plan
from tests.helpers import count_handles, no_collector
from tests.pipeline.nets import CPU, E, H, K, Moe, Net, equal, like, tokens
from tests.ranks import run_ranks

KINDS = "bdmbdm"  # six layers, so that stages of every schedule are of unequal size
COUNT = 6  # microbatches: what every schedule takes on two ranks, and more than are in flight
COEFFICIENT = 0.3
GONE = Message("gone", 0, 0)


def net_of(kinds: str = KINDS) -> Net:
    return Net(LocalDispatcher(E), kinds)


class Watched(nn.Module):
    """An MoE layer in which autograd saves none of the tensors between its stages, so that only the engine holds them.

    `seen` names each call's tensors; `alive` are (when, what, whether it was alive) of the current call.
    """

    def __init__(self, dispatcher: TokenDispatcher) -> None:
        super().__init__()
        self.dispatcher, self.back = dispatcher, None
        self.first, self.second = (nn.Parameter(torch.randn(H, H) * H**-0.5) for _ in range(2))
        self.seen: dict[str, StorageWeakRef] = {}
        self.everything: list[StorageWeakRef] = []
        self.alive: list[tuple[str, str, bool]] = []
        self.patient = False

    def _see(self, **tensors: Tensor) -> None:
        found = {name: StorageWeakRef(t.untyped_storage()) for name, t in tensors.items()}
        self.seen.update(found)
        self.everything += found.values()

    def look(self, when: str, *names: str) -> None:
        """gloo's threads release what they sent shortly after it has arrived: if `patient`, wait for that."""
        deadline = time.monotonic() + (2.0 if self.patient else 0.0)
        for name in names:
            while not self.seen[name].expired() and time.monotonic() < deadline:
                time.sleep(0.001)
            self.alive.append((when, name, not self.seen[name].expired()))

    def stage1(self, x: Tensor) -> Any:
        entered = x.view(-1, H) * 1.0
        inside = entered @ self.first
        residual, sent, weights = inside * 0.5, inside * 2.0, inside[:, :K] * 0.1
        self._see(entered=entered, inside=inside, residual=residual, sent=sent)
        return residual, sent, inside.detach()[:, :E].topk(K).indices, weights, inside[:, :E] * 1.0

    def experts(self, rows: Tensor, ids: Tensor, weights: Tensor, max_rows: int | None) -> Tensor:
        self.look("stage 3", "sent")
        # Rows after the received ones are uninitialized memory.
        scaled = torch.where((ids >= 0).any(1, keepdim=True), rows, 0.0) * 2.0
        gates = torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
        y = scaled @ self.second + gates
        self._see(rows=rows, scaled=scaled, y=y)
        return y

    def forward(self, x: Tensor) -> Tensor:
        residual, rows, ids, weights, _ = self.stage1(x)
        return (residual + self.experts(rows, ids, weights, None)).view(x.shape)


class WatchedNet(Net):
    """A net whose kind "w" is a `Watched` layer."""

    def make(self, kind: str) -> nn.Module:
        return Watched(self.dispatcher) if kind == "w" else super().make(kind)

    def watched(self) -> list[Watched]:
        return [layer for layer in self.layers if isinstance(layer, Watched)]

    def alive(self) -> int:
        """How many of the tensors that the layers and the head made are alive."""
        refs = [ref for layer in self.watched() for ref in layer.everything] + self.of_head
        return sum(not ref.expired() for ref in refs)


class ThreadLinks:
    """`Links` between the threads of this process, through `mail`; received tensors have memory of their own."""

    def __init__(self, rank: int, mail: dict[Message, Packet], changed: threading.Condition) -> None:
        self.rank, self.mail, self.changed = rank, mail, changed
        self.expected: dict[Message, Sequence[Tensor]] = {}

    def expect(self, message: Message, source: int, like: Sequence[Tensor]) -> None:
        assert message not in self.expected and source != self.rank
        self.expected[message] = like

    def send(self, message: Message, target: int, packet: Packet) -> None:
        with self.changed:
            self.mail[message] = tuple(t.clone() for t in packet)
            self.changed.notify_all()

    def receive(self, message: Message) -> Packet:
        like = self.expected.pop(message)
        with self.changed:
            self.changed.wait_for(lambda: message in self.mail or GONE in self.mail)
            if message not in self.mail:
                raise ConnectionError("the other rank is gone")
            packet = self.mail.pop(message)
        assert [(t.shape, t.dtype) for t in packet] == [(t.shape, t.dtype) for t in like], message
        return packet

    def finish(self) -> None:
        assert not self.expected

    def reset(self) -> None:
        self.expected.clear()
        with self.changed:
            self.mail[GONE] = ()
            self.changed.notify_all()


def in_threads(pp: int, call: Callable[[int, Links], Any]) -> list[Any]:
    """call(rank, links) of each rank; exceptions come back as text, so that no traceback holds a tensor."""
    mail: dict[Message, Packet] = {}
    changed = threading.Condition()
    found: dict[int, Any] = {}

    def go(rank: int) -> None:
        try:
            found[rank] = call(rank, ThreadLinks(rank, mail, changed))
        except Exception as error:
            found[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == pp, "a rank did not end"
    return [found[rank] for rank in range(pp)]


def on_two(name: str, microbatches: list[Tensor], nets: Sequence[Net] = (), **settings: Any) -> tuple[Any, list[Net]]:
    """(losses, the nets with gradients) of two ranks that are threads; each net holds its part's gradients."""
    plan = make_plan(name, 2, len(microbatches))
    nets = nets or [net_of() for _ in range(2)]
    results = in_threads(2, lambda r, links: nets[r].runtime(plan, r, links, **settings).run(microbatches, like))
    assert all(not isinstance(r, str) for r in results), results
    losses = [losses for losses in results if losses is not None]
    assert len(losses) == 1 and not losses[0].requires_grad
    return losses[0], list(nets)


def merged(nets: Sequence[Net]) -> dict[str, Tensor | None]:
    """Gradients of all parts; a parameter has one on one rank only."""
    whole: dict[str, Tensor | None] = {}
    for grads in (net.take_gradients() for net in nets):
        for name, grad in grads.items():
            assert whole.get(name) is None or grad is None, f"{name} has gradients on two ranks"
            whole[name] = grad if grad is not None else whole.get(name)
    return whole


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("count", [2, COUNT])
def test_one_rank_is_bitwise_plain_autograd(name: str, count: int) -> None:
    """Every stage runs its backwards, and its deferred weight gradients, in the order of microbatches, as autograd does."""
    net, microbatches = net_of(), tokens(count)
    expected = net.sequential(microbatches)
    grads = net.take_gradients()
    plan = make_plan(name, 1, count)
    losses = net.runtime(plan).run(microbatches, like)
    assert losses is not None and torch.equal(losses, expected) and equal(net.take_gradients(), grads)


def test_backwards_wake_no_other_thread() -> None:
    """Autograd runs a GPU's nodes on a thread of its own, where it is not told otherwise."""
    seen = []
    watcher = SimpleNamespace(began=lambda _: seen.append(torch._C._is_multithreading_enabled()), ended=lambda _: None)
    net_of().runtime(make_plan(SCHEDULES[0], 1, 2)).run(tokens(2), like, watcher=watcher)
    assert seen and not any(seen)
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_ranks_are_bitwise_plain_autograd(name: str) -> None:
    net, microbatches = net_of(), tokens(COUNT)
    expected = net.sequential(microbatches)
    losses, nets = on_two(name, microbatches)
    assert torch.equal(losses, expected) and equal(merged(nets), net.take_gradients())


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_balance_loss_over_all_stages(name: str) -> None:
    """Its sums are made stage by stage, in another order than in one process: not bitwise."""
    net, microbatches = net_of(), tokens(COUNT)
    net.sequential(microbatches)
    without = net.take_gradients()
    expected = net.sequential(microbatches, lambda outputs: COEFFICIENT * balance_loss(outputs))
    grads = net.take_gradients()
    nets, plan = [net_of() for _ in range(2)], make_plan(name, 2, COUNT)
    balances = [StageBalance(E, COEFFICIENT, CPU) for _ in range(2)]
    results = in_threads(
        2, lambda r, links: nets[r].runtime(plan, r, links, balance=balances[r]).run(microbatches, like)
    )
    assert [isinstance(r, str) for r in results] == [False, False], results
    (losses,) = (losses for losses in results if losses is not None)
    assert torch.equal(losses, expected)
    for parameter, grad in merged(nets).items():
        wanted, plain = grads[parameter], without[parameter]
        assert grad is not None and wanted is not None and plain is not None
        assert (grad - wanted).norm() <= 1e-6 * wanted.norm(), parameter
        if "router" in parameter:  # the balance loss has an effect
            assert not torch.allclose(grad, plain, rtol=1e-3)
    with torch.no_grad():
        imbalance = sum(float(balance_loss(net(ids)[1])) for ids in microbatches)
    assert sum(float(b.take_losses()) for b in balances) == pytest.approx(imbalance, rel=1e-6)


def test_tokens_that_are_routed_nowhere_do_not_count_for_balance() -> None:
    router_outputs = []
    for layer in range(2):
        logits = torch.randn(12, E, requires_grad=True)
        ids = logits.topk(K).indices
        ids[layer : layer + 3] = -1
        router_outputs.append((logits, ids))
    expected = balance_loss(router_outputs)
    (2.0 * expected).backward()
    stages = [StageBalance(E, 2.0, CPU) for _ in router_outputs]
    before, _ = stages[0].forward(router_outputs[:1], ())
    total = stages[1].finish(stages[1].forward(router_outputs[1:], before)[0], 0)
    assert torch.allclose(stages[1].take_losses(), expected, rtol=1e-6)
    for stage, router in zip(stages, router_outputs, strict=True):
        (grad,) = stage.gradients([router], total)
        assert grad is not None and router[0].grad is not None
        assert torch.allclose(grad, router[0].grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_forward_alone(name: str) -> None:
    net, microbatches = WatchedNet(LocalDispatcher(E), "wdww"), tokens(COUNT)
    plan = forward_plan(make_plan(name, 1, COUNT))
    with torch.no_grad():
        expected = torch.stack([net(ids)[0] for ids in microbatches])
        losses = net.runtime(plan).run(microbatches, like)
    assert losses is not None and torch.equal(losses, expected)
    assert all(p.grad is None for p in net.parameters()) and net.alive() == 0


def lifetimes(net: WatchedNet, plan: PipelinePlan, rank: int, links: Links | None) -> list[str]:
    """The tensors that live too long or too short in one step."""
    runtime, handles = net.runtime(plan, rank, links), count_handles(net.dispatcher)
    travels, wrong = net.dispatcher.size > 1, []
    for layer in net.watched():
        layer.patient = travels

    def look(action: Action) -> None:
        for part in action.parts or (action,):
            stage = runtime.stages[part.stage] if part.kind == "F" else Stage([])
            for layer in stage.layers:
                if isinstance(layer, Watched):
                    layer.look("after the forward", "sent", "rows", "y", "residual")
            if stage.epilogue is not None and not all(ref.expired() for ref in net.of_head):
                wrong.append("the epilogue's tensors are alive after its forward")

    microbatches = tokens(plan.microbatches, net.dispatcher.rank)
    runtime.run(microbatches, like, watcher=SimpleNamespace(began=lambda _: None, ended=look))
    for layer in [layer for stage in runtime.stages.values() for layer in stage.layers if isinstance(layer, Watched)]:
        assert len(layer.alive) == 5 * plan.microbatches
        for when, what, alive in layer.alive:
            # On one rank the dispatch input is what stage 3 reads.
            if alive != (when == "stage 3" and not travels):
                wrong.append(f"{what} is {'alive' if alive else 'gone'} at {when}")
    deadline = time.monotonic() + 2.0
    while travels and net.alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    if net.alive() or runtime.context._deferred or handles():
        wrong.append(f"{net.alive()} tensors, {handles()} handles are left")
    return sorted(set(wrong))


@pytest.mark.parametrize("name", SCHEDULES)
def test_boundaries_on_one_rank(name: str) -> None:
    with no_collector():
        assert lifetimes(WatchedNet(LocalDispatcher(E), "wdww"), make_plan(name, 1, 4), 0, None) == []


@pytest.mark.parametrize("where", ["stage1", "experts", "backward"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_exception_leaves_nothing_behind(name: str, where: str) -> None:
    """On the rank that fails and on the other one; and the same runtimes work afterwards."""
    nets, microbatches = [WatchedNet(LocalDispatcher(E), "wmwmdm") for _ in range(2)], tokens(COUNT)
    plan = make_plan(name, 2, COUNT)
    runtimes = [net.runtime(plan, rank) for rank, net in enumerate(nets)]
    layer = next(x for stage in runtimes[1].stages.values() for x in stage.layers if isinstance(x, Moe))
    middle = plan.actions[1][len(plan.actions[1]) // 2 - 1]

    def breaks(action: Action) -> None:
        layer.broken = where if action == middle else layer.broken

    watchers: list[Any] = [None, SimpleNamespace(began=breaks, ended=lambda _: None)]

    def run(rank: int, links: Links) -> Any:
        runtimes[rank].links = links
        return runtimes[rank].run(microbatches, like, watcher=watchers[rank])

    with no_collector():
        results = in_threads(2, run)
        assert results == ["ConnectionError: the other rank is gone", "ArithmeticError: broken"]
        assert [net.alive() for net in nets] == [0, 0]
        assert [len(runtime.context._deferred) for runtime in runtimes] == [0, 0]
    layer.broken, watchers[1] = "", None
    for net in nets:
        net.take_gradients()
    again = in_threads(2, run)
    assert not any(isinstance(r, str) for r in again), again
    after = merged(nets)
    on_two(name, microbatches, fresh := [WatchedNet(LocalDispatcher(E), "wmwmdm") for _ in range(2)])
    assert equal(after, merged(fresh))


def four_ranks(rank: int, world: int) -> dict[str, bool]:
    experts_group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    pipeline, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    dispatcher, pp_rank = NcclDispatcher(experts_group, E), rank // 2
    handles = count_handles(dispatcher)
    microbatches, found = tokens(COUNT, dispatcher.rank), {}
    net = Net(dispatcher, KINDS)
    expected = net.sequential(microbatches)
    grads = net.take_gradients()
    for name in SCHEDULES:
        plan = make_plan(name, 2, COUNT)
        links = DistLinks(pipeline, neighbors(plan.ranks), CPU, [])
        losses = net.runtime(plan, pp_rank, links).run(microbatches, like)
        found[f"{name}: losses"] = losses is None or torch.equal(losses, expected)
        own = {n: g for n, g in net.take_gradients().items() if g is not None}
        found[f"{name}: gradients"] = equal(own, {n: grads[n] for n in own})
        with no_collector():
            for wrong in lifetimes(WatchedNet(dispatcher, "wdww"), plan, pp_rank, links):
                found[f"{name}: {wrong}"] = False
    found["handles"] = handles() == 0
    return found


def test_experts_on_two_ranks() -> None:
    """Gradients are bitwise plain autograd's; dispatch input, gathered rows and experts' outputs die after their last reader."""
    for found in run_ranks(four_ranks, 4):
        assert [what for what, good in found.items() if not good] == []


def test_refusals() -> None:
    net, plan = net_of(), make_plan("1f1b", 2, 4)
    with pytest.raises(ValueError, match=r"rank 0 has stages \(0,\) in this plan, not \(1,\)"):
        PipelineRuntime(net.stages(plan, 1), plan, 0, None, CPU)
    with pytest.raises(ValueError, match="the plan is for 4 microbatches, not 3"):
        net.runtime(make_plan("1f1b", 1, 4)).run(tokens(3), like)
