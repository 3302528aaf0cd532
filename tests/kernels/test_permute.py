"""The counting sort against Python's stable sort; gather_rows and combine_rows against their plain forms and each other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forebay.kernels.permute import combine_rows, gather_rows, sort_slots
from tests.kernels.common import DEVICE, backends


def assert_sorts(ids: Tensor, num_experts: int) -> None:
    ids = ids.to(DEVICE)
    keys = [e if 0 <= e < num_experts else num_experts for e in ids.reshape(-1).tolist()]
    order = sorted(range(len(keys)), key=lambda slot: (keys[slot], slot))
    inverse = [-1] * len(keys)
    for row, slot in enumerate(order):
        inverse[slot] = row if keys[slot] < num_experts else -1
    for backend in ("triton", "reference"):
        got = sort_slots(ids, num_experts, backend=backend)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in got)
        assert got[1].shape == ids.shape
        assert got[0].tolist() == order and got[1].view(-1).tolist() == inverse
        assert got[2].tolist() == [sum(key <= e for key in keys) for e in range(num_experts)]


# Chunks of 128 slots.
@pytest.mark.parametrize("slots", [1, 127, 128, 129, 255, 256, 257, 1030])
@pytest.mark.parametrize("num_experts", [1, 3, 4, 127])
def test_sort_around_chunks(slots: int, num_experts: int) -> None:
    assert_sorts(torch.randint(-1, num_experts + 2, (slots, 1)), num_experts)


# Experts, ids.
SORTS: dict[str, tuple[int, Callable[[], Tensor]]] = {
    "all on one expert": (5, lambda: torch.full((300, 2), 3)),
    "all sentinels": (5, lambda: torch.full((300, 2), 5)),
    "sentinels far away": (5, lambda: torch.tensor([[2**40, -(2**40)], [2**32 + 1, 1]])),
    "no tokens": (5, lambda: torch.zeros((0, 2), dtype=torch.int64)),
    "int32, strided": (5, lambda: torch.randint(0, 5, (3, 211), dtype=torch.int32).t()),
    "uint8": (5, lambda: torch.randint(0, 9, (30, 2), dtype=torch.uint8)),
    "uint8, all values are experts": (256, lambda: torch.randint(0, 256, (65, 2), dtype=torch.uint8)),
}


@pytest.mark.parametrize("case", SORTS)
def test_sort(case: str) -> None:
    num_experts, ids = SORTS[case]
    assert_sorts(ids(), num_experts)


def routing(tokens: int, k: int, sentinels: bool) -> tuple[Tensor, Tensor, Tensor]:
    return sort_slots(torch.randint(0, 6 if sentinels else 5, (tokens, k), device=DEVICE), 5, backend="reference")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sentinels", [False, True])
@pytest.mark.parametrize(
    ("tokens", "k", "width"),
    # Tiles: gather 2048 elements, at most 512 columns; combine 1024, all in columns if there are.
    [(0, 2, 16), (1, 1, 16), (3, 8, 1024), (5, 2, 1025), (5, 4, 1023), (31, 1, 64), (33, 1, 64), (2, 2, 513),
     (7, 3, 100), (33, 2, 1)],
)  # fmt: skip
def test_triton_is_the_reference(tokens, k, width, sentinels, dtype, poisoned: None) -> None:
    order, inverse, offs = routing(tokens, k, sentinels)
    live = int(offs[-1])
    x = torch.randn(tokens, width, device=DEVICE).to(dtype)
    got = gather_rows(x, order, offs, k, backend="triton")
    assert torch.equal(got[:live], x[order[:live].long() // k]) and got[live:].isnan().all()
    assert torch.equal(gather_rows(x, order, offs, k, backend="reference")[:live], got[:live])

    rows = torch.randn(tokens * k, width, device=DEVICE).to(dtype)
    rows[live:] = torch.nan
    for init in (None, torch.randn(tokens, width, device=DEVICE).to(dtype)):
        got = combine_rows(rows, inverse, init=init, backend="triton")
        wanted = combine_rows(rows, inverse, init=init, backend="reference")
        assert got.dtype == dtype and not got.isnan().any()
        # The same fp32 additions in the same order, then one rounding: the same bits. Triton's
        # interpreter truncates bf16 where the GPU and torch round: one ulp, only there.
        ulp = 2**-7 if dtype is torch.bfloat16 and DEVICE == "cpu" else 0.0
        torch.testing.assert_close(got, wanted, atol=0.0, rtol=ulp)


@backends
def test_combine_with_weights(backend) -> None:
    rows, weights = torch.randn(9, 48, device=DEVICE), torch.rand(4, 3, device=DEVICE)
    inverse = torch.tensor([[0, 3, -1], [8, 1, 2], [-1, -1, -1], [7, 6, 5]], dtype=torch.int32, device=DEVICE)
    rows[4] = torch.nan
    got = combine_rows(rows, inverse, weights=weights, backend=backend)
    picked = torch.where((inverse >= 0).unsqueeze(2), rows[inverse.clamp(min=0)] * weights.unsqueeze(2), 0.0)
    torch.testing.assert_close(got, picked.sum(1))
    with pytest.raises(ValueError, match="weights"):
        combine_rows(rows, inverse, weights=weights[:2], backend=backend)


@backends
def test_combine_adds_in_fp32(backend) -> None:
    """256 + 1 + ... + 1 in bf16 stays 256 if it is rounded on the way."""
    rows = torch.ones(9, 16, dtype=torch.bfloat16, device=DEVICE)
    rows[0] = 256
    inverse = torch.arange(9, dtype=torch.int32, device=DEVICE).view(1, 9)
    assert (combine_rows(rows, inverse, backend=backend) == 264).all()


def test_refusals() -> None:
    order, inverse, offs = routing(4, 2, False)
    x = torch.randn(4, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"R <= 4, got \(8,\)"):
        gather_rows(x, order, offs, 1)
    with pytest.raises(ValueError, match="needs order"):
        gather_rows(x, order.view(4, 2), offs, 2)
    with pytest.raises(ValueError, match="init"):
        combine_rows(x, inverse, init=x[:2])


@pytest.mark.gpu
def test_sort_of_the_size_of_a_real_layer() -> None:
    for num_experts, shape in ((128, (16384, 8)), (256, (65536, 8)), (512, (16384, 10))):
        ids = torch.randint(0, num_experts + 1, shape, device="cuda")
        got = sort_slots(ids, num_experts, backend="triton")
        for a, b in zip(got, sort_slots(ids, num_experts, backend="reference"), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_more_elements_than_int32_counts() -> None:
    tokens, k, width = 2**19 + 2**9, 2, 2048
    x = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
    x[-8:].normal_()
    order, inverse, offs = sort_slots(torch.arange(k, device="cuda").expand(tokens, k), k)
    rows = gather_rows(x, order, offs, k)
    assert rows.numel() > 2**31
    assert torch.equal(rows[-8:], x[-8:])
    y = combine_rows(rows, inverse)
    assert torch.equal(y[-8:], 2 * x[-8:]) and (y[:8] == 0).all()
