"""The search for the longest sequence in `benchmarks/lora.py`."""

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def lora(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("lora")


@pytest.mark.integration
@pytest.mark.parametrize("most", [1, 2, 7, 64])
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 6, 7, 8, 33, 63, 64, 99])
def test_the_longest_that_runs(lora: Any, limit: int, most: int) -> None:
    tried = []

    def run(n: int) -> dict[str, Any]:
        assert 1 <= n <= most and n not in tried
        tried.append(n)
        return {"n": n, "ms": 1.0} if n <= limit else {"n": n, "error": "out of memory"}

    row = lora._longest(run, most)
    assert row["n"] == max(1, min(limit, most)) and ("ms" in row) == (limit >= 1)
    assert len(tried) <= 2 * most.bit_length()
