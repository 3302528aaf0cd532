"""The overlapped engine against plain autograd, one microbatch after the other: bitwise, on one rank and on two.

`test_execution` tests what hangs on streams: order, lifetimes and races.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from forebay.moe.dispatch import LocalDispatcher, NcclDispatcher, TokenDispatcher
from forebay.moe.dispatch_op import combine, dispatch
from forebay.moe.experts import experts
from forebay.pipeline.runtime import OverlappedStep
from tests.ranks import run_ranks

E, K, H, INNER, V, S = 4, 2, 16, 8, 11, 6
CPU = torch.device("cpu")
MIXED = "dmmd"  # dense and MoE layers, dense ones at both ends


class Dense(nn.Module):
    dispatcher, experts = None, None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(H), nn.Linear(H, H)

    def stage1(self, x: Tensor) -> Any:
        raise AssertionError("a dense layer is called whole")

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.inner(self.norm(x)))


class Moe(nn.Module):
    """Attention, router, shared expert and routed experts; its rows have three readers, its residual none that saves it."""

    def __init__(self, dispatcher: TokenDispatcher) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.norms, self.qkv = nn.ModuleList([nn.LayerNorm(H), nn.LayerNorm(H)]), nn.Linear(H, 3 * H)
        self.router, self.shared = nn.Linear(H, E), nn.Linear(H, H)
        gate_up, down = torch.randn(E, 2 * INNER, H) * 0.3, torch.randn(E, H, INNER) * 0.3
        mine = slice(dispatcher.rank * dispatcher.local_experts, (dispatcher.rank + 1) * dispatcher.local_experts)
        self.gate_up, self.down = nn.Parameter(gate_up[mine].clone()), nn.Parameter(down[mine].clone())
        self.broken = ""

    def stage1(self, x: Tensor) -> Any:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        rows = self.norms[1](x).view(-1, H)
        logits = self.router(rows)
        weights, ids = logits.softmax(-1).topk(K)
        if self.broken == "stage1":
            raise ArithmeticError("broken")
        return x.view(-1, H) + F.silu(self.shared(rows)), rows, ids, weights, logits

    def experts(self, rows: Tensor, ids: Tensor, weights: Tensor, max_rows: int | None) -> Tensor:
        if self.broken == "experts":
            raise ArithmeticError("broken")
        y = experts(rows, ids, weights, self.gate_up, self.down, max_rows=max_rows)
        if self.broken == "backward":
            y.register_hook(_raise)
        return y

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The stages in sequence, for plain autograd."""
        residual, rows, ids, weights, logits = self.stage1(x)
        sent = dispatch(rows, ids, weights, self.dispatcher)
        y_rows = self.experts(sent.rows, sent.ids, sent.weights, sent.max_rows)
        return combine(y_rows, sent.handle, residual).view(x.shape), logits, ids


def _raise(_: Tensor) -> None:
    raise ArithmeticError("broken")


class Model(nn.Module):
    """Embedding, layers, head. The same weights on every rank, but for the experts."""

    def __init__(
        self, dispatcher: TokenDispatcher, kinds: str = MIXED, tied: bool = False, frozen: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.norm, self.head = nn.Embedding(V, H), nn.LayerNorm(H), nn.Linear(H, V, bias=False)
        self.layers = nn.ModuleList([Dense() if k == "d" else Moe(dispatcher) for k in kinds])
        if tied:
            self.head.weight = self.embedding.weight
        self.embedding.requires_grad_(not frozen)

    def epilogue(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).view(-1, V), ids.roll(-1, 1).view(-1))

    @staticmethod
    def balance(said: list[tuple[Tensor, Tensor]]) -> Tensor:
        return sum(t.softmax(-1).mean(0)[ids.view(-1)].mean() for t, ids in said) * 0.1  # type: ignore[return-value]

    def overlapped(self, routers: bool = True, early_release: bool = True) -> OverlappedStep:
        return OverlappedStep(
            list(self.layers),  # type: ignore[arg-type]
            self.embedding,
            self.epilogue,
            next(self.parameters()).device,
            routers=self.balance if routers else None,
            early_release=early_release,
        )

    def sequential(self, microbatches: list[Tensor], routers: bool = True, loss_scale: float = 1.0) -> Iterator[Tensor]:
        for ids in microbatches:
            x, said = self.embedding(ids), []
            for layer in self.layers:
                if isinstance(layer, Moe):
                    x, logits, chosen = layer(x)
                    said.append((logits, chosen))
                else:
                    x = layer(x)
            loss = self.epilogue(x, ids)
            total = loss + self.balance(said) if routers and said else loss
            (total * loss_scale).backward()
            yield loss.detach()

    def take_gradients(self) -> list[Tensor | None]:
        grads = [p.grad for p in self.parameters()]
        self.zero_grad(set_to_none=True)
        return grads


def tokens(count: int, rank: int = 0, batch: int = 2) -> list[Tensor]:
    g = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(0, V, (batch, S), generator=g) for _ in range(count)]


def same(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    assert len(left) == len(right)
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(left, right, strict=True))  # type: ignore[arg-type]


def agrees(model: Model, microbatches: list[Tensor], routers: bool = True, **settings: Any) -> bool:
    """Whether losses and all gradients are bitwise those of plain autograd."""
    expected = torch.stack(list(model.sequential(microbatches, routers)))
    grads = model.take_gradients()
    assert any(g is not None and bool(g.any()) for g in grads)
    losses = model.overlapped(routers, **settings).run(microbatches)
    return torch.equal(losses, expected) and not losses.requires_grad and same(model.take_gradients(), grads)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("kinds", [MIXED, "m", "d", "mmm"])
def test_one_rank_is_bitwise_plain_autograd(kinds: str, count: int) -> None:
    dispatcher = LocalDispatcher(E)
    assert agrees(Model(dispatcher, kinds), tokens(count))
    assert dispatcher.live_handles == 0


@pytest.mark.parametrize("settings", [{"routers": False}, {"early_release": False}])
def test_one_rank_settings(settings: dict[str, bool]) -> None:
    assert agrees(Model(LocalDispatcher(E)), tokens(3), **settings)


def test_frozen_embedding() -> None:
    assert agrees(Model(LocalDispatcher(E), frozen=True), tokens(2))


def test_embedding_shared_with_the_head() -> None:
    model = Model(LocalDispatcher(E), tied=True)
    assert agrees(model, tokens(1))
    # Autograd sums the two contributions of a microbatch before it adds them to the gradient; here they come one by one.
    list(model.sequential(tokens(3)))
    expected = model.take_gradients()
    model.overlapped().run(tokens(3))
    for got, wanted in zip(model.take_gradients(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


def test_loss_scale_scales_gradients_and_no_loss() -> None:
    model = Model(LocalDispatcher(E))
    expected = torch.stack(list(model.sequential(tokens(2), loss_scale=0.3)))
    grads = model.take_gradients()
    assert torch.equal(model.overlapped().run(tokens(2), loss_scale=0.3), expected)
    assert same(model.take_gradients(), grads)


def test_after_backward_sees_the_gradients_of_the_microbatches_so_far() -> None:
    model = Model(LocalDispatcher(E))
    expected = []
    for _ in model.sequential(tokens(4)):
        expected.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    model.take_gradients()
    seen: list[Any] = []

    def after(i: int) -> None:
        assert i == len(seen)
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

    model.overlapped().run(tokens(4), after_backward=after)
    assert len(seen) == 4 and all(same(a, b) for a, b in zip(seen, expected, strict=True))


def breaks_and_recovers(model: Model, dispatcher: TokenDispatcher, microbatches: list[Tensor]) -> list[bool]:
    """For an exception in each kind of stage, while two microbatches are under way: is nothing left, does a step work then."""
    list(model.sequential(microbatches))
    grads = model.take_gradients()
    good = []
    step = model.overlapped()
    layer = next(m for m in model.layers if isinstance(m, Moe))
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
        model.take_gradients()
        step.run(microbatches)
        good.append(same(model.take_gradients(), grads) and dispatcher.live_handles == 0)
    return good


def test_an_exception_leaves_nothing_behind_on_one_rank() -> None:
    dispatcher = LocalDispatcher(E)
    good = breaks_and_recovers(Model(dispatcher), dispatcher, tokens(4))
    assert good == [True] * 9


def two_ranks(rank: int, world: int) -> dict[str, Any]:
    dispatcher = NcclDispatcher(dist.group.WORLD, E)
    found: dict[str, Any] = {}
    for kinds, counts in ((MIXED, (1, 2, 3, 4)), ("mm", (3,)), ("m", (2,))):
        for count in counts:
            found[f"{kinds} {count}"] = agrees(Model(dispatcher, kinds), tokens(count, rank))
    found["uneven"] = agrees(Model(dispatcher), tokens(3, rank, batch=1 + 2 * rank))
    found["tied"] = agrees(Model(dispatcher, tied=True), tokens(1, rank))
    found["no routers"] = agrees(Model(dispatcher), tokens(3, rank), routers=False)
    found["late release"] = agrees(Model(dispatcher), tokens(3, rank), early_release=False)
    found["handles"] = dispatcher.live_handles == 0
    alive: list[int] = []
    model = Model(dispatcher, "mmm")
    model.overlapped().run(tokens(3, rank), after_backward=lambda _: alive.append(dispatcher.live_handles))
    # By then the microbatch behind has made its three handles, but for the last.
    found["handles under way"] = alive == [3, 3, 0]
    found["exceptions"] = all(breaks_and_recovers(Model(dispatcher), dispatcher, tokens(4, rank)))
    return found


def test_two_ranks_are_bitwise_plain_autograd() -> None:
    for found in run_ranks(two_ranks, 2):
        assert [name for name, good in found.items() if not good] == []


def test_refusals() -> None:
    dispatcher = LocalDispatcher(E)
    with pytest.raises(ValueError, match="no layers"):
        Model(dispatcher, "").overlapped()
    step = Model(dispatcher).overlapped()
    with pytest.raises(ValueError, match="no microbatches"):
        step.run([])
    with torch.no_grad(), pytest.raises(RuntimeError, match="computes gradients"):
        step.run(tokens(1))
    lost = OverlappedStep([Dense()], lambda m: m, lambda x, m: nn.Parameter(torch.ones(())), CPU)  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="do not depend on its inputs"):
        lost.run([torch.randn(1, 3, H)])
