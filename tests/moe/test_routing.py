"""Bounds of the routing. tests/kernels/test_permute.py tests the sort, tests/moe/test_experts.py what reads it."""

import pytest
import torch

from forebay.moe.routing import route


def test_more_experts_than_a_short_key_counts() -> None:
    num_experts = 2**15 + 1
    ids = torch.tensor([[num_experts - 1, 0], [2**15 - 1, num_experts]])
    got = route(ids, num_experts)
    assert got.order.tolist() == [1, 2, 0, 3]
    assert got.inverse.tolist() == [[2, 0], [1, -1]]
    assert got.offs[[0, -2, -1]].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("shape", "num_experts", "message"),
    [((3,), 2, r"\[T, K\]"), ((3, 1), 0, "experts >= 1"), ((2**16, 2**15), 2, "int32")],
)
def test_refusals(shape: tuple[int, ...], num_experts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(torch.zeros((1,) * len(shape), dtype=torch.int64).expand(shape), num_experts)
