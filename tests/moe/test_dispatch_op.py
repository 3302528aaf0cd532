"""Dispatch and combine against one process that holds all experts; traces; handles that outlive their layer."""

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from forebay.moe.dispatch import LocalDispatcher, NcclDispatcher, combine, dispatch
from forebay.moe.experts import experts
from tests.moe.layers import CASES, INNER, E, H, K, group, inputs, layer, relative
from tests.ranks import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WITH_RESULTS = ["forward, backward", "full checkpoint, early stop", "selective, saving dispatch"]
WITHOUT = ["no_grad", "exception between"]


def expert_parallel(rank: int, world: int) -> list[list[float]]:
    """For each case the largest relative errors of y and all gradients."""
    dispatcher, found = NcclDispatcher(dist.group.WORLD, E), []
    for seed, (tokens, kind) in enumerate(CASES):
        tokens = tokens[:world]
        ranks = [inputs(p, n, kind, seed) for p, n in enumerate(tokens)]
        whole = {name: torch.cat([r[name] for r in ranks]) for name in ("ids", "x", "w", "init", "dy")}
        whole |= {name: ranks[0][name] for name in ("gate_up", "down")}
        truth = layer(LocalDispatcher(E), {n: t if n == "ids" else t.double() for n, t in whole.items()})
        at, mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1])), slice(rank * E // world, (rank + 1) * E // world)
        wanted = [*(t[at] for t in truth[:4]), *(t[mine] for t in truth[4:])]
        found.append([relative(a, b) for a, b in zip(layer(dispatcher, ranks[rank]), wanted, strict=True)])
        sent = dispatch(ranks[rank]["x"], ranks[rank]["ids"], ranks[rank]["w"], dispatcher)
        assert dispatcher.live_handles == 1 and sent.handle.tensors
        del sent
        assert dispatcher.live_handles == 0
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_one_process(world: int) -> None:
    for rank, results in enumerate(run_ranks(expert_parallel, world)):
        for case, errors in zip(CASES, results, strict=True):
            assert max(errors) <= 1e-6, (rank, case, errors)


def test_a_trace_without_ranks_or_numbers() -> None:
    """R, S and the live slots are symbols; the shapes of everything else, gradients included, are known."""
    dispatcher = NcclDispatcher(group(), E)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        x, weights = torch.empty(5, H, dtype=torch.bfloat16), torch.empty(5, K)
        gate_up, down = torch.empty(4, 2 * INNER, H), torch.empty(4, H, INNER)
        trained = (x, weights, gate_up.bfloat16(), down.bfloat16())
        for t in trained:
            t.requires_grad_()
        sent = dispatch(x, torch.empty(5, K, dtype=torch.int64), weights, dispatcher)
        assert isinstance(sent.rows.shape[0], torch.SymInt) and isinstance(sent.max_rows, torch.SymInt)
        assert sent.rows.dtype == torch.bfloat16 and sent.weights.dtype == torch.float32
        assert sent.ids.dtype == torch.int32 and sent.ids.shape[1] == sent.weights.shape[1] == K
        tokens_sent, places, splits = sent.handle.tensors
        assert tokens_sent.dtype == places.dtype == torch.int32 and places.shape == (5, 2)
        assert splits.shape == (5,) and splits.device.type == "cpu"
        y_rows = experts(sent.rows, sent.ids, sent.weights, *trained[2:], max_rows=sent.max_rows)
        y = combine(y_rows, sent.handle, torch.empty(5, H))
        assert y.shape == (5, H) and y.dtype == torch.bfloat16
        for t, gradient in zip(trained, torch.autograd.grad(y.sum(), trained), strict=True):
            assert gradient.shape == t.shape and gradient.dtype == t.dtype


def load() -> Any:
    """benchmarks/leaks.py."""
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
    """With dispatchers that keep their handles, or rows; one whose results differ between calls; and one that raises."""
    leaks = load()
    original = NcclDispatcher.dispatch
    remembered: list[Any] = []
    calls = itertools.count()

    def changed(change: Callable[[tuple[Any, ...]], Any]) -> list[dict[str, Any]]:
        def dispatch(self: Any, *args: Any) -> Any:
            result = original(self, *args)
            change(result)
            return result

        NcclDispatcher.dispatch = dispatch  # type: ignore[method-assign]
        return leaks.matrix(["nccl"], torch.device("cpu"), 3, WITH_RESULTS + WITHOUT)

    found = {
        "handles": changed(lambda result: remembered.append(result[3])),
        "rows": changed(lambda result: remembered.append(result[0])),
        "numbers": changed(lambda result: result[0].add_(next(calls))),
        "crash": changed(lambda result: 1 // 0),
    }
    NcclDispatcher.dispatch = original  # type: ignore[method-assign]
    return found


def test_nothing_leaks() -> None:
    for rows in run_ranks(matrix, 2):
        assert len(rows) == 2 * len(load().WAYS)
        assert not [r for r in rows if load().failed(r)]


def test_the_leak_matrix_finds_leaks() -> None:
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
