"""Routing: bounds, experts of rows and slots, the map of weights. tests/kernels/test_permute.py tests the sort."""

import pytest
import torch

from forebay.moe.routing import Routing, route, routing_map, row_experts, slot_experts


def test_more_experts_than_a_short_key_counts() -> None:
    num_experts = 2**15 + 1
    ids = torch.tensor([[num_experts - 1, 0], [2**15 - 1, num_experts]])
    got = route(ids, num_experts)
    assert got.order.tolist() == [1, 2, 0, 3]
    assert got.inverse.tolist() == [[2, 0], [1, -1]]
    assert got.offs[[0, -2, -1]].tolist() == [1, 2, 3]


def test_experts_of_rows_and_slots() -> None:
    ids = torch.randint(-1, 6, (17, 3))
    routing = route(ids, 5)
    expert = row_experts(routing.offs, 51)
    wanted = ids.masked_fill((ids < 0) | (ids >= 5), 5)
    assert expert.tolist() == wanted.view(-1)[routing.order.long()].tolist()
    assert torch.equal(slot_experts(routing, expert, 5), wanted)


def test_routing_map_adds_an_expert_named_twice_and_leaves_sentinels_out() -> None:
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0]], dtype=torch.bfloat16)
    got = routing_map(weights, torch.tensor([[1, 1], [2, 0]]), 2)
    assert got.dtype == torch.float32
    assert got.tolist() == [[0.0, 0.75], [2.0, 0.0]]


def test_without_rows_every_slot_is_a_sentinel() -> None:
    routing = route(torch.tensor([[0, 1], [2, 3]]), 5, max_rows=0)
    assert slot_experts(routing, row_experts(routing.offs, 0), 5).tolist() == [[5, 5], [5, 5]]


@pytest.mark.parametrize(
    ("shape", "num_experts", "message"),
    [((3,), 2, r"\[T, K\]"), ((3, 1), 0, "experts >= 1"), ((2**16, 2**15), 2, "int32")],
)
def test_refusals(shape: tuple[int, ...], num_experts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(torch.zeros((1,) * len(shape), dtype=torch.int64).expand(shape), num_experts)


@pytest.mark.gpu
def test_no_sync_and_captured_with_ids_that_change() -> None:
    ids = torch.randint(0, 129, (512, 8), device="cuda")
    route(ids, 128)  # allocations of the sort's workspace
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        route(ids, 128)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = route(ids, 128)
    for _ in range(3):
        ids.copy_(torch.randint(0, 129, (512, 8), device="cuda"))
        graph.replay()
        wanted: Routing = route(ids.cpu(), 128)
        for got, want in zip(captured, wanted, strict=True):
            assert torch.equal(got.cpu(), want)
