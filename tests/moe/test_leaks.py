"""The leak matrix of benchmarks/leaks.py, with few rounds."""

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forebay.moe import dispatch as nccl
from tests.ranks import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


WITH_RESULTS = ["forward, backward", "full checkpoint, early stop", "selective, saving dispatch"]
WITHOUT = ["no_grad", "exception between"]


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


def broken_matrices(rank: int, world: int) -> dict[str, list[dict[str, Any]]]:
    """With an exchange that remembers its handles, as public ones do until they are combined; one that remembers rows; one whose
    gradients are not always the same; and one that crashes where nothing requires grad."""
    leaks = load()
    cpu = torch.device("cpu")
    original = nccl.NcclDispatcher.dispatch
    remembered: list[Any] = []

    def changed(change: Callable[[tuple[Any, ...]], Any]) -> list[dict[str, Any]]:
        def dispatch(self: Any, *args: Any) -> Any:
            result = original(self, *args)
            change(result)
            return result

        nccl.NcclDispatcher.dispatch = dispatch  # type: ignore[method-assign]
        return leaks.matrix(["nccl"], cpu, 3, WITH_RESULTS + WITHOUT)

    calls = itertools.count()
    found = {
        "handles": changed(lambda result: remembered.append(result[3])),
        "rows": changed(lambda result: remembered.append(result[0])),
        "numbers": changed(lambda result: result[0].add_(next(calls))),
        "crash": changed(lambda result: 1 // 0),
    }
    nccl.NcclDispatcher.dispatch = original  # type: ignore[method-assign]
    return found


def test_nothing_leaks() -> None:
    for rows in run_ranks(matrix, 2):
        assert len(rows) == 2 * len(load().WAYS)
        assert not [r for r in rows if load().failed(r)]


def test_the_matrix_would_see_it() -> None:
    failed = load().failed
    found = run_ranks(broken_matrices, 2)[0]
    ways = len(WITH_RESULTS + WITHOUT)
    for name, rows in found.items():
        assert len(rows) == ways and sum(map(failed, rows)) == (len(WITH_RESULTS) if name == "numbers" else ways)
    assert all(row["live handles"] > 0 and row["growth bytes"] > 0 for row in found["handles"])
    assert all(row["live tensors"] > 0 and row["growth bytes"] > 0 for row in found["rows"])
    assert [row["way"] for row in found["numbers"] if row["same results"] is False] == WITH_RESULTS
    assert not any(row["live tensors"] or row["growth bytes"] for row in found["numbers"])
    assert all(row["crash"] and row["growth bytes"] is None for row in found["crash"])
