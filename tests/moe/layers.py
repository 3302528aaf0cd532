"""A small expert-parallel layer for the tests of the dispatchers: shapes, inputs of each rank, results and gradients."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from forebay.moe.dispatch import NcclDispatcher, TokenDispatcher, combine, dispatch
from forebay.moe.experts import experts

E, K, H, INNER = 8, 3, 16, 8

# Tokens of each of up to four ranks, and the kind of routing.
CASES = [
    ([5, 7, 3, 4], "random"),
    ([5, 0, 7, 1], "random"),
    ([1, 0, 0, 0], "random"),
    ([0, 0, 0, 0], "random"),
    ([6, 5, 4, 3], "one rank"),
    ([9, 8, 7, 6], "holes"),
]


class Group:
    """Ranks that are only counted: communicating with them fails."""

    def __init__(self, size: int = 2):
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


def group(size: int = 2) -> Any:
    return Group(size)


class CountedDispatcher(NcclDispatcher):
    """Counts what it is asked to do: combine and the gradient of dispatch are both `collect`."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.calls: Counter[str] = Counter()

    def dispatch(self, *args: Any) -> Any:
        self.calls["dispatch"] += 1
        return super().dispatch(*args)

    def collect(self, rows: Tensor, narrow: Tensor | None, *args: Any) -> Any:
        self.calls["combine" if narrow is None else "gradient of dispatch"] += 1
        return super().collect(rows, narrow, *args)


def inputs(
    rank: int, tokens: int, kind: str, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Tensor]:
    """One rank's inputs, and the expert weights of all ranks.

    Args:
        kind: "random"; "one rank", every token on the first two experts; "holes", some slots without a valid expert.
    """
    shared, own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1000 * seed + rank + 1)
    ids = torch.rand(tokens, E, generator=own).argsort(1)[:, :K]
    if kind == "one rank":
        ids = torch.arange(K).expand(tokens, K) % 2
    if kind == "holes":
        ids = ids.masked_fill(torch.rand(tokens, K, generator=own) < 0.4, -1)
        ids[:1, 0] = E + 5
    made = {
        "x": torch.randn(tokens, H, generator=own),
        "w": torch.rand(tokens, K, generator=own),
        "init": torch.randn(tokens, H, generator=own),
        "dy": torch.randn(tokens, H, generator=own),
        "gate_up": torch.randn(E, 2 * INNER, H, generator=shared) * 0.3,
        "down": torch.randn(E, H, INNER, generator=shared) * 0.3,
    }
    return {"ids": ids.to(device), **{name: t.to(device, dtype) for name, t in made.items()}}


def layer(dispatcher: TokenDispatcher, given: dict[str, Tensor]) -> list[Tensor]:
    """y, and the gradients of x, w, init and of this rank's gate_up and down."""
    mine = slice(dispatcher.rank * dispatcher.local_experts, (dispatcher.rank + 1) * dispatcher.local_experts)
    trained = [given[n].detach().clone().requires_grad_() for n in ("x", "w", "init")]
    trained += [given[n][mine].detach().clone().requires_grad_() for n in ("gate_up", "down")]
    x, w, init, gate_up, down = trained
    sent = dispatch(x, given["ids"], w, dispatcher)
    y_rows = experts(sent.rows, sent.ids, sent.weights, gate_up, down, max_rows=sent.max_rows)
    y = combine(y_rows, sent.handle, init)
    return [y.detach(), *torch.autograd.grad(y, trained, given["dy"])]


def equal(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def relative(got: Tensor, wanted: Tensor) -> float:
    """Largest error relative to the largest value."""
    assert got.shape == wanted.shape
    return float((got.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)) if wanted.numel() else 0.0
