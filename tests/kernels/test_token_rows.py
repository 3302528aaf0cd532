"""`add_token_rows` against sums in fp64, in both forms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.kernels.token_rows import add_token_rows
from tests.kernels.common import DEVICE, backends, moved_on, strided, turned
from tests.products import cover

VOCABULARY = 100
# Chunks of 32 sorted positions.
RUNS: dict[str, list[int]] = {  # rows of each token
    "one row": [1],
    "one token": [300],
    "a whole chunk": [32, 1],
    "one off a chunk": [31, 33, 32, 1],
    "ends with a chunk": [5, 59, 2],
    "over two chunks": [10, 70, 3],
    "two long runs meet in a chunk": [40, 50, 6],
    "none, then many": [0, 0, 200, 0, 1],
    "one row each": [1] * 70,
}


def ids_of(runs: list[int]) -> Tensor:
    """Ids in a random order; the tokens that `runs` tells of are drawn."""
    tokens = torch.randperm(VOCABULARY)[: len(runs)]
    ids = torch.repeat_interleave(tokens, torch.tensor(runs))
    return ids[torch.randperm(len(ids))].to(DEVICE)


def name_of(value: Any) -> str | None:
    return getattr(value, "__name__", None)


def check(ids: Tensor, rows: Tensor, backend: str) -> None:
    total = torch.randn(VOCABULARY, rows.shape[1], device=DEVICE)
    wanted = total.double().index_add(0, ids.long().cpu().to(DEVICE), rows.double())
    magnitude = total.abs().double().index_add(0, ids.long(), rows.abs().double())
    again = total.clone()
    add_token_rows(total, ids, rows, backend=backend)  # type: ignore[arg-type]
    # fp32 sums in another order: each of at most 300 additions rounds by 2^-24 of what was added so far.
    assert ((total.double() - wanted).abs() <= 300 * 2**-24 * magnitude).all()
    add_token_rows(again, ids, rows, backend=backend)  # type: ignore[arg-type]
    assert torch.equal(again, total)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("runs", RUNS)
def test_sums_of_runs(runs: str, dtype: torch.dtype, backend: str) -> None:
    ids = ids_of(RUNS[runs])
    check(ids, torch.randn(len(ids), 48, device=DEVICE).to(dtype), backend)


@backends
@pytest.mark.parametrize(
    ("layout", "width"), cover([Tensor.contiguous, strided, turned, moved_on], [1, 7, 511, 513]), ids=name_of
)
def test_layouts(layout: Callable[[Tensor], Tensor], width: int, backend: str) -> None:
    ids = layout(ids_of([40, 3, 50, 1]).int())
    check(ids, layout(torch.randn(len(ids), width, device=DEVICE)), backend)


@backends
def test_expanded_rows(backend: str) -> None:
    ids = ids_of([40, 3])
    check(ids, torch.randn(1, 20, device=DEVICE).expand(len(ids), -1), backend)


@backends
def test_no_rows(backend: str) -> None:
    total = torch.randn(5, 8, device=DEVICE)
    before = total.clone()
    add_token_rows(total, torch.empty(0, dtype=torch.int64, device=DEVICE), total[:0], backend=backend)  # type: ignore[arg-type]
    assert torch.equal(total, before)


def test_what_is_refused() -> None:
    total, ids, rows = torch.zeros(5, 8), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 8)
    with pytest.raises(TypeError, match=r"total must be float32, got torch.bfloat16"):
        add_token_rows(total.bfloat16(), ids, rows)
    for wrong in (total.t(), total[0]):
        with pytest.raises(ValueError, match=r"total must be \[V, H\] and contiguous, got .* with strides"):
            add_token_rows(wrong, ids, rows)
    with pytest.raises(TypeError, match=r"ids must be torch.int32 or torch.int64, got torch.float32"):
        add_token_rows(total, ids.float(), rows)
    with pytest.raises(ValueError, match=r"rows must be \[3, 8\], got \[3, 7\]"):
        add_token_rows(total, ids, rows[:, :7])


def test_the_same_bits_with_several_threads() -> None:
    """torch shares additions of at least 32,768 elements out to its threads."""
    ids, rows = torch.randint(0, 50, (8192,)), torch.randn(8192, 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        totals = [torch.zeros(50, 64) for _ in range(10)]
        for total in totals:
            add_token_rows(total, ids, rows)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(total, totals[0]) for total in totals)


@pytest.mark.gpu
def test_more_than_two_billion_elements() -> None:
    """The last row of a total with more, and the last of more rows."""
    width = 4096
    for vocabulary, tokens in ((2**19 + 3, 70), (3, 2**19 + 3)):
        total = torch.zeros(vocabulary, width, device="cuda")
        ids = torch.full((tokens,), vocabulary - 1, device="cuda")
        rows = torch.zeros(tokens, width, device="cuda", dtype=torch.bfloat16)
        rows[0], rows[-1] = 1.0, 2.0
        add_token_rows(total, ids, rows)
        assert (total[-1] == 3).all() and not total[:-1].any()
        del total, rows
