"""Rows of even routing against tokens drawn one by one, and the fields that families have."""

from __future__ import annotations

import pytest
import torch

from forebay.estimate.routing import EvenRouting
from forebay.models.catalog import find
from forebay.train import hf_io


def drawn(r: EvenRouting, tokens: int) -> torch.Tensor:
    """Experts of tokens [T, K]: the best of all in the best groups, by random scores."""
    random = torch.Generator().manual_seed(0)
    groups = torch.rand(tokens, r.groups, generator=random).argsort(1)[:, : r.chosen]
    allowed = torch.zeros(tokens, r.groups).scatter_(1, groups, 1.0).repeat_interleave(r.experts // r.groups, 1)
    return (torch.rand(tokens, r.experts, generator=random) * allowed).topk(r.slots).indices


@pytest.mark.parametrize("dispatch", ["auto", "nccl"])
@pytest.mark.parametrize(
    "routing",
    [EvenRouting(16, 3), EvenRouting(32, 3, 8, 3), EvenRouting(32, 3, 4, 2), EvenRouting(32, 4, 16, 8)],
    ids=str,
)
def test_rows_between_nodes_are_counted(routing: EvenRouting, dispatch: str) -> None:
    """2 nodes of 4: the mean over many tokens of the first node. A rank has one group, half of one or two, a node several."""
    ranks = drawn(routing, 40_000) // (routing.experts // 8)
    away = [(ranks == p).any(1) for p in range(4, 8)]
    counted = sum(a.sum() for a in away) if dispatch == "nccl" else torch.stack(away).any(0).sum()
    assert routing.between_nodes(8, 4, dispatch) == pytest.approx(float(counted) / 40_000, rel=0.01)


def test_published_shapes() -> None:
    """DeepSeek-V3 on 8 nodes: 4 groups of 8, each a node, of which 3.6 have an expert, one in 8 its own."""
    assert EvenRouting(128, 8).between_nodes(16, 8) == pytest.approx(1.0, abs=0.005)
    assert EvenRouting(128, 8).between_nodes(16, 8, "nccl") == pytest.approx(3.30, abs=0.005)
    assert EvenRouting(256, 8, 8, 4).between_nodes(64, 8) == pytest.approx(7 / 8 * 4 * 0.906, abs=0.01)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-v3", EvenRouting(256, 8, 8, 4)),
        ("deepseek-v2-lite", EvenRouting(64, 6)),
        ("glm-4.5-air", EvenRouting(128, 8)),
        ("gpt-oss-20b", EvenRouting(32, 4)),
    ],
)
def test_routing_of_published_models(name: str, expected: EvenRouting) -> None:
    from forebay.estimate.plan import ask

    assert find(name) is not None
    assert EvenRouting.of(hf_io.configuration(ask(name).config.model, 0)) == expected
