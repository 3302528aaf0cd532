"""The counting sort: Triton and plain PyTorch against Python's own stable sort."""

import pytest
import torch

from forebay.kernels.permute import sort_slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_hand(ids: torch.Tensor, num_experts: int) -> tuple[list, list, list]:
    flat = ids.reshape(-1).tolist()
    keys = [e if 0 <= e < num_experts else num_experts for e in flat]
    order = sorted(range(len(flat)), key=lambda slot: (keys[slot], slot))
    inverse = [-1] * len(flat)
    for row, slot in enumerate(order):
        inverse[slot] = row if keys[slot] < num_experts else -1
    offs = [sum(key <= e for key in keys) for e in range(num_experts)]
    return order, inverse, offs


def assert_sorts(ids: torch.Tensor, num_experts: int) -> None:
    ids = ids.to(DEVICE)
    order, inverse, offs = by_hand(ids, num_experts)
    for backend in ("triton", "reference"):
        got = sort_slots(ids, num_experts, backend=backend)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in got)
        assert got[1].shape == ids.shape
        assert got[0].tolist() == order
        assert got[1].view(-1).tolist() == inverse
        assert got[2].tolist() == offs


# Blocks of 128 slots, chunks of 512.
@pytest.mark.parametrize("slots", [1, 127, 128, 129, 511, 512, 513, 1030])
@pytest.mark.parametrize("num_experts", [1, 3, 4, 127])
def test_around_blocks_and_chunks(slots: int, num_experts: int) -> None:
    assert_sorts(torch.randint(-1, num_experts + 2, (slots, 1)), num_experts)


CASES = {
    "all on one expert": lambda: torch.full((300, 2), 3),
    "all sentinels": lambda: torch.full((300, 2), 5),
    "sentinels far away": lambda: torch.tensor([[2**40, -(2**40)], [2**32 + 1, 1]]),
    "no tokens": lambda: torch.zeros((0, 2), dtype=torch.int64),
    "int32, strided": lambda: torch.randint(0, 5, (3, 211), dtype=torch.int32).t(),
    "uint8": lambda: torch.randint(0, 9, (30, 2), dtype=torch.uint8),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str) -> None:
    assert_sorts(CASES[case](), 5)


def test_every_value_of_a_byte_is_an_expert() -> None:
    assert_sorts(torch.randint(0, 256, (65, 2), dtype=torch.uint8), 256)


@pytest.mark.gpu
def test_the_size_of_a_real_layer() -> None:
    for num_experts, shape in ((128, (16384, 8)), (256, (65536, 8)), (512, (16384, 10))):
        ids = torch.randint(0, num_experts + 1, shape, device="cuda")
        got = sort_slots(ids, num_experts, backend="triton")
        want = sort_slots(ids, num_experts, backend="reference")
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
