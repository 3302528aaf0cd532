"""The search for the longest sequence in `benchmarks/lora.py`."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def lora(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("lora")


@pytest.mark.integration
@pytest.mark.parametrize("most", [1, 2, 7, 64])
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 6, 7, 8, 33, 63, 64, 99])
@pytest.mark.parametrize("wrong", [0.7, 1.0, 1.4])
def test_the_longest_that_runs(lora: Any, wrong: float, limit: int, most: int) -> None:
    """`wrong`: the line through the first two peaks says so many times the truth."""
    tried = []

    def peak(n: int) -> int | None:
        assert 1 <= n <= most and n not in tried
        tried.append(n)
        return 100 + 10 * n if n <= limit else None

    best, found = lora._longest(peak, 100 + 10 * limit * wrong, most)
    assert list(found) == tried and len(tried) < 25
    assert min(limit, most) * 31 / 32 - 1 <= best <= min(limit, most), "within the width of a move"


@pytest.mark.integration
def test_hollow_attention_has_the_shapes_and_no_products(lora: Any) -> None:
    q, k, v = (torch.randn(2, 4, 64, 16, requires_grad=True) for _ in range(3))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
    real = attend()
    with lora.hollow_attention("cpu", 4, 4, 16):
        out = attend()
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.shape == real.shape and out.stride() == real.stride() and out.unique().numel() == 1
    assert all(g.shape == t.shape and g.unique().numel() == 1 for g, t in zip(grads, (q, k, v), strict=True))
    assert torch.equal(attend(), real)
