"""Small layers and a net of them, for an engine and for plain autograd."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from forebay.moe.dispatch import TokenDispatcher, combine, dispatch
from forebay.moe.experts import experts
from forebay.moe.wgrad import WeightGradients
from forebay.pipeline.p2p import Links
from forebay.pipeline.runtime import LocalBalance, PipelineRuntime, Stage
from forebay.pipeline.schedule import PipelinePlan, local_plan

E, K, H, INNER, V, S = 4, 2, 16, 8, 11, 6
CPU = torch.device("cpu")


class Dense(nn.Module):
    dispatcher, experts, back = None, None, None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(H), nn.Linear(H, H)

    def stage1(self, x: Tensor) -> Any:
        raise AssertionError("a dense layer is called whole")

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.inner(self.norm(x)))


class Moe(nn.Module):
    """Attention, router, shared expert and routed experts; its rows have three readers, its residual none that saves it.

    With a store, experts may defer their weight gradients. `broken` names the stage that raises.
    """

    def __init__(self, dispatcher: TokenDispatcher, store: WeightGradients | None = None) -> None:
        super().__init__()
        self.dispatcher, self.store, self.back = dispatcher, store, None
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
        store = None if self.broken else self.store
        y = experts(rows, ids, weights, self.gate_up, self.down, max_rows=max_rows, deferred=store)
        if self.broken == "backward":
            y.register_hook(_raise)
        return y

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The stages in sequence, for plain autograd."""
        residual, rows, ids, weights, logits = self.stage1(x)
        sent = dispatch(rows, ids, weights, self.dispatcher)
        y_rows = self.experts(sent.rows, sent.ids, sent.weights, sent.max_rows)
        return combine(y_rows, sent.handle, residual).view(x.shape), logits, ids


class MoeWithBack(Moe):
    """Its experts' sums are normed and scaled, and mixed with a second stream that its input makes; it has a mask among what it
    holds, and a number."""

    def __init__(self, dispatcher: TokenDispatcher, store: WeightGradients | None = None) -> None:
        super().__init__(dispatcher, store)
        self.last, self.mix = nn.LayerNorm(H), nn.Linear(H, 1)
        self.back = self.mixed  # type: ignore[assignment]

    def stage1(self, x: Tensor) -> Any:
        residual, rows, ids, weights, logits = super().stage1(x)
        if self.broken == "stage1":
            raise ArithmeticError("broken")
        return None, rows, ids, weights, logits, residual, self.mix(rows), rows > 0, x.shape

    def mixed(self, rest: Any, sums: Tensor, residual: Tensor, mix: Tensor, mask: Tensor) -> Tensor:
        if self.broken == "back":
            raise ArithmeticError("broken")
        return (residual + mix.sigmoid() * self.last(sums) * mask).view(rest)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, rows, ids, weights, logits, *held, rest = self.stage1(x)
        sent = dispatch(rows, ids, weights, self.dispatcher)
        y_rows = self.experts(sent.rows, sent.ids, sent.weights, sent.max_rows)
        return self.mixed(rest, combine(y_rows, sent.handle), *held), logits, ids


def _raise(_: Tensor) -> None:
    raise ArithmeticError("broken")


class Net(nn.Module):
    """Embedding, layers, head; the same weights on every rank but for the experts. A pipeline rank uses its part of it.

    `kinds` has "d" for a dense layer, "m" for an MoE layer, "b" for one with a back.
    """

    def __init__(self, dispatcher: TokenDispatcher, kinds: str, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dispatcher, self.store = dispatcher, WeightGradients()
        self.embedding, self.norm, self.head = nn.Embedding(V, H), nn.LayerNorm(H), nn.Linear(H, V, bias=False)
        self.layers = nn.ModuleList([self.make(kind) for kind in kinds])
        if tied:
            self.head.weight = self.embedding.weight
        self.embedding.requires_grad_(not frozen)
        self.of_head: list[StorageWeakRef] = []

    def make(self, kind: str) -> nn.Module:
        return Dense() if kind == "d" else {"m": Moe, "b": MoeWithBack}[kind](self.dispatcher, self.store)

    def epilogue(self, x: Tensor, ids: Tensor) -> Tensor:
        normed = self.norm(x)
        logits = self.head(normed).view(-1, V)
        self.of_head += [StorageWeakRef(t.untyped_storage()) for t in (normed, logits)]
        return F.cross_entropy(logits, ids.roll(-1, 1).view(-1))

    def overlapped(self, **settings: Any) -> "Overlapped":
        return Overlapped(list(self.layers), self.embedding, self.epilogue, CPU, **settings)

    def stages(self, plan: PipelinePlan, rank: int) -> dict[int, Stage]:
        parts, last = np.array_split(range(len(self.layers)), len(plan.ranks)), len(plan.ranks) - 1
        return {
            s: Stage(
                [self.layers[n] for n in parts[s]],  # type: ignore[misc]
                self.embedding if s == 0 else None,
                self.epilogue if s == last else None,
            )
            for s in plan.stages(rank)
        }

    def runtime(
        self, plan: PipelinePlan, rank: int = 0, links: Links | None = None, **settings: Any
    ) -> PipelineRuntime:
        return PipelineRuntime(self.stages(plan, rank), plan, rank, links, CPU, weights=self.store, **settings)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The loss and the router outputs."""
        x, router_outputs = self.embedding(ids), []
        for layer in self.layers:
            x = layer(x)
            if isinstance(x, tuple):
                x, logits, chosen = x
                router_outputs.append((logits, chosen))
        return self.epilogue(x, ids), router_outputs

    def sequential(self, microbatches: Sequence[Tensor], routers: Any = None) -> Tensor:
        """Losses; gradients by plain autograd, one microbatch after the other. `routers` is added to each loss."""
        losses = []
        for ids in microbatches:
            loss, router_outputs = self(ids)
            losses.append(loss.detach())
            (loss + routers(router_outputs) if routers and router_outputs else loss).backward()
        return torch.stack(losses)

    def take_gradients(self) -> dict[str, Tensor | None]:
        grads = {name: p.grad for name, p in self.named_parameters()}
        self.zero_grad(set_to_none=True)
        return grads


class Overlapped:
    """A runtime of one stage, for steps of any number of microbatches. `routers` is added to each loss."""

    def __init__(
        self, layers: Any, prologue: Any, epilogue: Any, device: torch.device, routers: Any = None, weights: Any = None
    ) -> None:
        balance = LocalBalance(routers, 1.0, device) if routers else None
        stages = {0: Stage(layers, prologue, epilogue)}
        self.runtime = PipelineRuntime(
            stages, local_plan(1, overlap=True), 0, None, device, balance=balance, weights=weights
        )
        self.context = self.runtime.context

    def run(self, microbatches: Sequence[Tensor]) -> Tensor:
        self.runtime.plan = local_plan(len(microbatches), overlap=True)
        losses = self.runtime.run(microbatches, like)
        assert losses is not None
        return losses


def like(ids: Tensor) -> Tensor:
    return torch.empty(*ids.shape, H, device="meta")


def tokens(count: int, rank: int = 0, batch: int = 2) -> list[Tensor]:
    g = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(0, V, (batch, S), generator=g) for _ in range(count)]


def equal(left: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> bool:
    """Whether gradients are bitwise equal; at least one is not 0."""
    assert left.keys() == right.keys() and any(g is not None and bool(g.any()) for g in left.values())
    pairs = ((left[name], right[name]) for name in left)
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]
