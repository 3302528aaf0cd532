"""The leak matrix of benchmarks/leaks.py, with few rounds."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from forebay.moe.dispatch import nccl
from tests.ranks import run_ranks

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def load() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("leaks", BENCHMARKS / "leaks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["leaks"] = module
    spec.loader.exec_module(module)
    return module


def matrix(rank: int, world: int) -> list[dict[str, Any]]:
    return load().matrix(["local", "nccl"], torch.device("cpu"), 5)


def leaking_matrix(rank: int, world: int) -> list[dict[str, Any]]:
    """With an exchange that remembers its handles until they are combined, as public ones do."""
    leaks = load()
    remembered: list[Any] = []
    original = nccl.NcclExchange.dispatch

    def dispatch(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        remembered.append(result[3])
        return result

    nccl.NcclExchange.dispatch = dispatch  # type: ignore[method-assign]
    return leaks.matrix(["nccl"], torch.device("cpu"), 5)


def test_nothing_leaks() -> None:
    for rows in run_ranks(matrix, 2):
        assert len(rows) == 26
        bad = [r for r in rows if r["growth bytes"] or r["live handles"] or not r["same results"]]
        assert not bad


def test_the_matrix_would_see_a_leak() -> None:
    rows = run_ranks(leaking_matrix, 2)[0]
    assert all(row["live handles"] > 0 and row["growth bytes"] > 0 for row in rows)
