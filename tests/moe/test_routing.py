"""The sort by expert: against a loop over the slots, sentinels and skewed loads included."""

import pytest
import torch

from forebay.moe.routing import Routing, multi_hot, route, routing_map, row_experts, slot_experts


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


def by_boolean_mask(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual way, which asks how many entries a mask has."""
    live = (ids >= 0) & (ids < num_experts)
    token = torch.arange(ids.shape[0]).unsqueeze(1).expand_as(ids)[live]
    chosen = torch.zeros(ids.shape[0], num_experts, dtype=torch.bool)
    chosen[token, ids[live].long()] = True
    zeros = torch.zeros(ids.shape[0], num_experts, dtype=weights.dtype)
    return chosen, zeros.index_put((token, ids[live].long()), weights[live], accumulate=True)


CHOICES = {
    "top k": lambda: torch.rand(19, 7).argsort(1)[:, :3],
    "holes": lambda: torch.rand(19, 7).argsort(1)[:, :3].masked_fill(torch.rand(19, 3) < 0.4, -1),
    "no expert at all": lambda: torch.full((4, 3), -1),
    "out of range": lambda: torch.tensor([[7, -2, 3], [100, 0, -1]]),
    "named twice": lambda: torch.tensor([[2, 2, 5], [0, 6, 0], [1, 1, -1]]),
    "int32": lambda: torch.rand(19, 7).argsort(1)[:, :3].int(),
    "no tokens": lambda: torch.zeros(0, 3, dtype=torch.int64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", CHOICES)
def test_multi_hot_is_the_boolean_mask_bit_for_bit(case: str, dtype: torch.dtype) -> None:
    ids = CHOICES[case]()
    weights = torch.randn(ids.shape, dtype=dtype).requires_grad_()
    chosen, probabilities = multi_hot(ids, weights, 7)
    wanted, wanted_probabilities = by_boolean_mask(ids, weights, 7)
    assert chosen.dtype == torch.bool and torch.equal(chosen, wanted)
    assert probabilities.dtype == dtype and torch.equal(probabilities, wanted_probabilities)
    gradient = torch.randn(probabilities.shape, dtype=dtype)
    (got,) = torch.autograd.grad(probabilities, weights, gradient)
    (want,) = torch.autograd.grad(wanted_probabilities, weights, gradient)
    assert torch.equal(got, want)


def test_multi_hot_of_an_expert_named_twice_is_the_sum() -> None:
    weights = torch.tensor([[0.5, 0.25, 2.0]], requires_grad=True)
    chosen, probabilities = multi_hot(torch.tensor([[1, 1, 0]]), weights, 3)
    assert chosen.tolist() == [[True, True, False]]
    assert probabilities.tolist() == [[2.0, 0.75, 0.0]]
    probabilities.backward(torch.tensor([[10.0, 20.0, 30.0]]))
    assert weights.grad is not None and weights.grad.tolist() == [[20.0, 20.0, 10.0]]


def test_multi_hot_without_weights_counts() -> None:
    chosen, counts = multi_hot(torch.tensor([[1, 1, -1], [2, 0, 3]]), None, 3)
    assert counts.dtype == torch.float32 and counts.tolist() == [[0.0, 2.0, 0.0], [1.0, 0.0, 1.0]]
    assert torch.equal(chosen, counts > 0)


def test_multi_hot_keeps_a_nan_visible_and_in_its_place() -> None:
    _, probabilities = multi_hot(
        torch.tensor([[1, -1], [0, 2]]), torch.tensor([[float("nan"), float("nan")], [1, 2]]), 3
    )
    assert probabilities.isnan().tolist() == [[False, True, False], [False, False, False]]


def test_multi_hot_compiles_in_one_graph() -> None:
    ids, weights = CHOICES["holes"](), torch.rand(19, 3)
    torch._dynamo.reset()
    compiled = torch.compile(lambda i, w: multi_hot(i, w, 7), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(ids, weights), multi_hot(ids, weights, 7), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_multi_hot_never_waits_for_the_device() -> None:
    ids = torch.randint(-1, 9, (64, 4), device="cuda")
    weights = torch.rand(64, 4, device="cuda", requires_grad=True)
    gradient = torch.rand(64, 8, device="cuda")
    torch.autograd.grad(multi_hot(ids, weights, 8)[1], weights, gradient)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chosen, probabilities = multi_hot(ids, weights, 8)
        (got,) = torch.autograd.grad(probabilities, weights, gradient)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    live = (ids >= 0) & (ids < 8)
    assert torch.equal(got, gradient.gather(1, ids.clamp(0, 7)).where(live, 0))
    assert torch.equal(chosen.sum(1), probabilities.count_nonzero(1))


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
