"""Dispatch and combine over gloo, against one process that holds all experts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forebay.moe.dispatch import NcclDispatcher
from forebay.moe.dispatch_op import combine, dispatch
from forebay.moe.experts import experts
from tests.ranks import run_ranks

E, K, H, INNER = 8, 3, 16, 8


def world_inputs(tokens: list[int], ids: str, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """The whole world's inputs, the same on every rank."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    chosen = []
    for t in tokens:
        drawn = torch.rand(t, E, generator=g).argsort(1)[:, :K]
        if ids == "one rank":  # every token on the experts of the first rank of four
            drawn = torch.arange(K).expand(t, K) % 2
        if ids == "holes":
            drawn = drawn.masked_fill(torch.rand(t, K, generator=g) < 0.4, -1)
        chosen.append(drawn)
    return {
        "x": [randn(t, H) for t in tokens],
        "ids": chosen,
        "w": [torch.rand(t, K, generator=g, dtype=torch.float64).to(dtype) for t in tokens],
        "dy": [randn(t, H) for t in tokens],
        "init": [randn(t, H) for t in tokens],
        "gate_up": randn(E, 2 * INNER, H) * 0.3,
        "down": randn(E, H, INNER) * 0.3,
    }


def expert_parallel(rank: int, world: int, tokens: list[int], ids: str, seed: int) -> list[float]:
    """Largest relative errors of y, dx, dw, d_init, d_gate_up, d_down; then the handles alive before and after."""
    tokens = tokens[:world]
    inputs = world_inputs(tokens, ids, seed, torch.float32)
    dispatcher = NcclDispatcher(dist.group.WORLD, E)
    mine = slice(rank * E // world, (rank + 1) * E // world)
    ours = [inputs[n][rank].clone().requires_grad_() for n in ("x", "w", "init")]
    ours += [inputs[n][mine].clone().requires_grad_() for n in ("gate_up", "down")]
    x, w, init, gate_up, down = ours
    sent = dispatch(x, inputs["ids"][rank], w, dispatcher)
    y_rows = experts(sent.rows, sent.ids, sent.weights, gate_up, down, max_rows=sent.max_rows)
    y = combine(y_rows, sent.handle, init)
    y.backward(inputs["dy"][rank])
    got = [y.detach(), *(t.grad for t in ours)]
    alive = dispatcher.live_handles
    del sent, y_rows, y

    truth = world_inputs(tokens, ids, seed, torch.float64)
    whole = [torch.cat(truth[n]).requires_grad_() for n in ("x", "w", "init")]
    whole += [truth[n].requires_grad_() for n in ("gate_up", "down")]
    y64 = experts(whole[0], torch.cat(inputs["ids"]), whole[1], whole[3], whole[4]) + whole[2]
    y64.backward(torch.cat(truth["dy"]))
    at = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    wanted = [y64[at], *(t.grad[at] for t in whole[:3]), *(t.grad[mine] for t in whole[3:])]
    errors = [relative(a, b) for a, b in zip(got, wanted, strict=True)]
    return [*errors, alive, dispatcher.live_handles]


def relative(got: Tensor | None, wanted: Tensor) -> float:
    assert got is not None and got.shape == wanted.shape
    if wanted.numel() == 0:
        return 0.0
    scale = float(wanted.abs().max()) or 1.0
    return float((got.double() - wanted).abs().max()) / scale


CASES = [
    ([5, 7, 3, 4], "random"),
    ([5, 0, 7, 1], "random"),
    ([1, 0, 0, 0], "random"),
    ([0, 0, 0, 0], "random"),
    ([6, 5, 4, 3], "one rank"),
    ([9, 8, 7, 6], "holes"),
]


def all_cases(rank: int, world: int) -> list[list[float]]:
    return [expert_parallel(rank, world, tokens, ids, seed) for seed, (tokens, ids) in enumerate(CASES)]


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_one_process(world: int) -> None:
    for rank, results in enumerate(run_ranks(all_cases, world)):
        for case, (*errors, alive, left) in zip(CASES, results, strict=True):
            assert max(errors) <= 1e-6, (rank, case, errors)
            assert (alive, left) == (1, 0), (rank, case)
