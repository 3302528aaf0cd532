"""The sort by expert: against a loop over the slots, sentinels and skewed loads included."""

import pytest
import torch

from forebay.moe.routing import Routing, route, routing_map, row_experts, slot_experts


def by_hand(ids: torch.Tensor, num_experts: int) -> tuple[list[int], list[list[int]], list[int]]:
    flat = ids.reshape(-1).tolist()
    keys = [e if 0 <= e < num_experts else num_experts for e in flat]
    order = sorted(range(len(flat)), key=lambda slot: (keys[slot], slot))
    row = {slot: r for r, slot in enumerate(order)}
    k = ids.shape[1]
    inverse = [[row[t * k + i] if keys[t * k + i] < num_experts else -1 for i in range(k)] for t in range(ids.shape[0])]
    offs = [sum(key <= e for key in keys) for e in range(num_experts)]
    return order, inverse, offs


CASES = {
    "mixed": lambda: torch.randint(0, 5, (17, 3)),
    "sentinels of both kinds": lambda: torch.randint(-2, 8, (17, 3)),
    "all on one expert": lambda: torch.full((9, 2), 3),
    "all sentinels": lambda: torch.full((9, 2), 5),
    "one slot": lambda: torch.tensor([[4]]),
    "no tokens": lambda: torch.zeros((0, 2), dtype=torch.int64),
    "int32, strided": lambda: torch.randint(0, 5, (3, 11), dtype=torch.int32).t(),
}


@pytest.mark.parametrize("case", CASES)
def test_route_is_a_stable_sort(case: str) -> None:
    ids = CASES[case]()
    order, inverse, offs = by_hand(ids, 5)
    got = route(ids, 5)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in got)
    assert got.order.tolist() == order
    assert got.inverse.shape == ids.shape and got.inverse.tolist() == inverse
    assert got.offs.tolist() == offs


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


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"\[T, K\]"):
        route(torch.zeros(3, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="experts >= 1"):
        route(torch.zeros((3, 1), dtype=torch.int64), 0)
    with pytest.raises(ValueError, match="int32"):
        route(torch.zeros((1, 1), dtype=torch.int64).expand(2**16, 2**15), 2)


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
