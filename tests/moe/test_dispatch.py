"""Dispatch and combine over a process group: against a simulation and one process, in traces, and what they leave behind."""

import importlib.util
import itertools
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from forebay.moe import backends as choose
from forebay.moe.backends import BACKENDS, Topology, make_dispatcher
from forebay.moe.dispatch import (
    ALIGNMENT,
    LocalDispatcher,
    NcclDispatcher,
    TokenDispatcher,
    _as_int32,
    _from_int32,
    combine,
    dispatch,
)
from forebay.moe.experts import experts
from tests.helpers import count_handles
from tests.moe.layers import CASES, INNER, E, H, K, equal, group, inputs, layer, relative
from tests.ranks import run_ranks

WORLD = 2


def gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def by_hand(rank: int, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, int]]]:
    """Rows, ids and weights that this rank receives, and (rank, token) of each row: slot by slot."""
    held = E // dist.get_world_size()
    rows, row_ids, row_weights, source = [], [], [], []
    for p, (xs, them, ws) in enumerate(gathered((x, ids, weights))):
        for t in range(len(xs)):
            local = [e - rank * held if rank * held <= e < (rank + 1) * held else -1 for e in them[t].tolist()]
            if max(local) >= 0:
                rows.append(xs[t])
                row_ids.append(torch.tensor(local))
                row_weights.append(ws[t])
                source.append((p, t))
    empty = (x.new_empty(0, H), ids.new_empty(0, K), weights.new_empty(0, K))
    stacked = [torch.stack(t) if t else e for t, e in zip((rows, row_ids, row_weights), empty, strict=True)]
    return stacked[0], stacked[1], stacked[2], source


def summed(rank: int, n_tokens: int, rows: Tensor, source: list[tuple[int, int]], init: Tensor | None) -> Tensor:
    """The sums over ranks, in their order, in fp32 or fp64, rounded once."""
    compute = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros(n_tokens, rows.shape[1], dtype=compute)
    total = total if init is None else total + init
    for theirs, at in gathered((rows, source)):
        for row, (p, t) in zip(theirs, at, strict=True):
            if p == rank:
                total[t] += row
    return total.to(rows.dtype)


DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float64),
]


def simulated(rank: int, dispatcher: TokenDispatcher, given: dict[str, Tensor]) -> list[bool]:
    """Dispatch and combine, forward and backward, bit for bit what a loop over everyone's tensors gives."""
    x, w, init = (given[n].detach().clone().requires_grad_() for n in ("x", "w", "init"))
    sent = dispatch(x, given["ids"], w, dispatcher)
    rows, ids, weights, source = by_hand(rank, given["x"], given["ids"], given["w"])
    n = len(rows)
    live = sent.ids[:n] >= 0
    y = combine(sent.rows, sent.handle, init)
    d_rows = torch.zeros_like(sent.rows)
    d_rows[:n] = rows * 3
    d_weights = torch.where(sent.ids >= 0, torch.ones_like(sent.weights), 0)
    gradients = (given["dy"], d_rows, d_weights)
    dx, dw, d_init = torch.autograd.grad((y, sent.rows, sent.weights), (x, w, init), gradients)
    # The gradient of a row: what its token's dy is, beside the one given; added in the rows' dtype, as autograd does.
    dy_rows = by_hand(rank, given["dy"], given["ids"], given["w"])[0]
    bound = -(-int(live.sum()) // ALIGNMENT) * ALIGNMENT
    return [
        sent.rows.shape[0] % ALIGNMENT == 0 and n <= sent.rows.shape[0] < n + ALIGNMENT,
        sent.max_rows == bound,
        torch.equal(sent.rows[:n], rows),
        torch.equal(sent.ids[:n], ids.int()) and bool((sent.ids[n:] == -1).all()),
        sent.weights.dtype == w.dtype and torch.equal(sent.weights[:n][live], weights[live]),
        torch.equal(y, summed(rank, len(x), rows, source, given["init"])),
        torch.equal(dx, summed(rank, len(x), dy_rows + rows * 3, source, None)),
        torch.equal(dw, torch.where((given["ids"] >= 0) & (given["ids"] < E), torch.ones_like(dw), 0)),
        torch.equal(d_init, given["dy"]),
    ]


def strided(t: Tensor) -> Tensor:
    """The same numbers, every other one of a wider tensor."""
    return torch.stack([t, torch.full_like(t, 7)], -1).flatten(-2)[..., ::2]


def odd_inputs(rank: int, world: int) -> dict[str, Any]:
    dispatcher = NcclDispatcher(dist.group.WORLD, E)
    handles = count_handles(dispatcher)
    found: dict[str, Any] = {}
    for seed, (dtype, weights) in enumerate(DTYPES):
        given = inputs(rank, (9, 6)[rank], "random", seed, dtype)
        given["w"] = given["w"].to(weights)
        if weights == torch.bfloat16:
            given["w"][0] = 1e30  # out of fp16's range
        found[f"{dtype}, {weights}"] = simulated(rank, dispatcher, given)
    given = inputs(rank, 7, "random", 20)
    found["int32 ids"] = simulated(rank, dispatcher, {**given, "ids": given["ids"].int()})
    bad = given["ids"].clone()
    bad[0, 0], bad[1, 1], bad[2], bad[3, 2] = E, -5, -1, 1000
    found["ids out of range"] = simulated(rank, dispatcher, {**given, "ids": bad})

    # 300 rows and 900 live slots for rank 0: their bounds differ, which are multiples of 256.
    found["more slots than rows"] = simulated(rank, dispatcher, inputs(rank, 150, "one rank", 21))

    found["nothing received, float64"] = simulated(rank, dispatcher, inputs(rank, 5, "one rank", 22, torch.float64))

    plain = layer(dispatcher, given)
    found["not contiguous"] = equal(layer(dispatcher, {name: strided(t) for name, t in given.items()}), plain)
    broken = {**given, "w": given["w"].clone()}
    if rank == 1:
        broken["w"][2, 1] = torch.nan
    y, dx, dw, *_ = layer(dispatcher, broken)
    others = torch.ones(7, dtype=torch.bool)
    others[2] = rank != 1
    found["nan"] = [
        y[2].isnan().any().item() == (rank == 1),
        dx[2].isnan().any().item() == (rank == 1),
        *equal([t[others] for t in (y, dx, dw)], [t[others] for t in plain[:3]]),
    ]

    # Only received rows: unused ones are undefined, and would differ from run to run.
    given = inputs(rank, ALIGNMENT // WORLD, "random", 30)
    given["ids"][:, 0], given["ids"][:, 1] = rank, E // WORLD + rank
    x, w = given["x"].requires_grad_(), given["w"].requires_grad_()
    torch.library.opcheck(torch.ops.forebay.dispatch.default, (x, given["ids"], w, dispatcher))
    sent = dispatch(x.detach(), given["ids"], w.detach(), dispatcher)
    rows, init, handle = sent.rows.requires_grad_(), given["init"].requires_grad_(), sent.handle.tensors
    torch.library.opcheck(torch.ops.forebay.combine.default, (rows, init, handle, len(x), dispatcher))
    torch.library.opcheck(torch.ops.forebay.spread.default, (init.detach(), handle, ALIGNMENT, dispatcher))
    torch.library.opcheck(torch.ops.forebay.collect.default, (rows.detach(), sent.weights, handle, len(x), dispatcher))
    found["received"] = [rows.shape[0] == ALIGNMENT]
    del sent, rows, handle
    found["handles"] = [handles() == 0]
    return found


def test_dtypes_strides_nan_and_ids_out_of_range() -> None:
    for rank, found in enumerate(run_ranks(odd_inputs, WORLD)):
        for case, checks in found.items():
            assert all(checks), (rank, case, checks)


def test_weights_of_one_choice_in_any_layout() -> None:
    """As words beside the ids: contiguous, and a view to other words would refuse its stride."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        weights = torch.rand(1, 4).to(dtype).t()
        assert torch.equal(_from_int32(_as_int32(weights), dtype), weights)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"9 experts cannot be divided evenly among 2 ranks; valid .* 1, 3, 9"):
        NcclDispatcher(group(), 9)
    dispatcher = NcclDispatcher(group(), E)
    x, ids, weights = torch.zeros(4, H), torch.zeros(4, K, dtype=torch.int64), torch.zeros(4, K)
    for wrong in ((x[:3], ids, weights), (x, ids, weights[:, :2]), (x, ids[:, 0], weights), (x[0], ids, weights)):
        with pytest.raises(ValueError, match="do not fit"):
            dispatch(*wrong, dispatcher)


def synchronizations(rank: int, world: int) -> list[str]:
    torch.cuda.set_device(rank)
    dispatcher = NcclDispatcher(dist.new_group(backend="nccl"), E)
    given = inputs(rank, 64, "random", 0, torch.bfloat16, "cuda")
    layer(dispatcher, given)  # compiles kernels, starts communicators
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            layer(dispatcher, given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [str(w.message) for w in caught if "called a synchronizing" in str(w.message)]


@pytest.mark.gpu
@pytest.mark.multi
def test_the_host_waits_once_a_layer() -> None:
    for found in run_ranks(synchronizations, 2):
        assert len(found) == 1, found


def held_by_collectives(rank: int, world: int) -> list[int]:
    """Live handles of graphs that were dropped, while someone holds the tensors that every collective was given."""
    dispatcher, held, original = NcclDispatcher(dist.group.WORLD, E), [], dist.all_to_all_single
    handles = count_handles(dispatcher)

    def holding(out: Tensor, given: Tensor, *splits: Any, **more: Any) -> Any:
        held.append((out, given))
        return original(out, given, *splits, **more)

    given = inputs(rank, 7, "random", 0)
    dist.all_to_all_single = holding
    alive = []
    for combined in (False, True):
        sent = dispatch(given["x"].requires_grad_(), given["ids"], given["w"].requires_grad_(), dispatcher)
        y = combine(sent.rows, sent.handle) if combined else None
        alive.append(handles())
        del sent, y
        alive.append(handles())
    return [*alive, len(held)]


def test_a_collective_that_outlives_its_call_holds_no_graph() -> None:
    """gloo's thread drops a collective's tensors some time after the host has waited for it: on a busy machine they led to
    graphs that were dropped."""
    assert run_ranks(held_by_collectives, 2) == [[1, 0, 1, 0, 7]] * 2


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WITH_RESULTS = ["forward, backward", "full checkpoint, early stop", "selective, saving dispatch"]
WITHOUT = ["no_grad", "exception between"]


def expert_parallel(rank: int, world: int) -> list[list[float]]:
    """For each case the largest relative errors of y and all gradients."""
    dispatcher, found = NcclDispatcher(dist.group.WORLD, E), []
    handles = count_handles(dispatcher)
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
        assert handles() == 1 and sent.handle.tensors
        del sent
        assert handles() == 0
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


def make(backend: str, size: int | None = 2, **more: Any) -> Any:
    settings = {"tokens": 16, "hidden": 32, "slots_per_token": 2, "dtype": torch.bfloat16, **more}
    return make_dispatcher(backend, None if size is None else group(size), settings.pop("num_experts", E), **settings)


class Made:
    """What a backend was asked for."""

    def __init__(self, group: Any, num_experts: int, **options: Any):
        self.group, self.num_experts, self.options = group, num_experts, options


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the two backends that this machine cannot run."""
    for kind in ("SymmetricDispatcher", "DeepEpDispatcher"):
        monkeypatch.setattr(choose, kind, type(kind, (Made,), {}))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [None, 1])
def test_one_rank_needs_no_dispatcher(backend: str, size: int | None) -> None:
    dispatcher = make(backend, size)
    assert isinstance(dispatcher, LocalDispatcher) and dispatcher.num_experts == E


def test_backends_by_name(backends: None) -> None:
    nccl, deepep = make("nccl"), make("deepep")
    assert isinstance(nccl, NcclDispatcher) and (nccl.size, nccl.num_experts) == (2, E)
    assert type(deepep).__name__ == "DeepEpDispatcher" and deepep.options == {"hidden": 32, "dtype": torch.bfloat16}
    shapes = {"tokens": 16, "hidden": 32, "slots_per_token": 2, "dtype": torch.bfloat16}
    for factor in (None, 1.5):
        made = make("symmetric", capacity_factor=factor)
        assert type(made).__name__ == "SymmetricDispatcher" and made.num_experts == E
        assert made.options == {**shapes, "capacity_factor": factor}
    assert make("symmetric", timeout=timedelta(seconds=7)).options["timeout_s"] == 7.0


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, "SymmetricDispatcher"),
        ({"dtype": torch.float16}, "SymmetricDispatcher"),
        ({"dtype": torch.float32}, "SymmetricDispatcher"),
        ({"dtype": torch.float64}, "NcclDispatcher"),  # it does not carry fp64
        ({"hidden": 36}, "NcclDispatcher"),  # nor rows of odd bytes
    ],
)
def test_auto_is_symmetric_where_peers_are_reachable(
    backends: None, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], wanted: str
) -> None:
    monkeypatch.setattr(choose, "topology_of", lambda group: Topology((0, 0)))
    monkeypatch.setattr(choose, "peers_are_reachable", lambda group: True)
    assert type(make("auto", **more)).__name__ == wanted
    monkeypatch.setattr(choose, "peers_are_reachable", lambda group: False)
    assert isinstance(make("auto", **more), NcclDispatcher)


@pytest.mark.parametrize("size", [None, 2])
def test_a_capacity_below_an_even_load_and_an_unknown_name_are_refused_first(
    backends: None, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    monkeypatch.setattr(choose, "peers_are_reachable", lambda group: pytest.fail("ranks were asked"))
    for backend in BACKENDS:
        for factor in (0.99, 0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="capacity_factor must be at least 1"):
                make(backend, size, capacity_factor=factor)
    with pytest.raises(
        ValueError, match=r"'nvshmem' is unknown; valid are auto, nccl, symmetric, hierarchical, deepep"
    ):
        make("nvshmem", size)


def reachable(rank: int, world: int) -> dict[str, bool]:
    """The decision of all ranks, told of other machines than this one. Objects travel over the real group, which is gloo."""
    group = dist.group.WORLD
    assert group is not None
    found = {"no GPU": torch.cuda.is_available() or choose.peers_are_reachable(group)}
    # The rank's device, which pairs can read each other, the rank's host, the group's backends.
    cases: dict[str, tuple[int, Any, str, str]] = {
        "peers": (rank, lambda own, other: True, "a", "cuda:nccl"),
        "peers, and a backend for CPUs": (rank, lambda own, other: True, "a", "cpu:gloo,cuda:nccl"),
        "two hosts": (rank, lambda own, other: True, "ab"[rank], "cuda:nccl"),
        "one GPU": (0, lambda own, other: True, "a", "cuda:nccl"),
        "one cannot read": (rank, lambda own, other: own != 1, "a", "cuda:nccl"),
        "gloo": (rank, lambda own, other: True, "a", "cpu:gloo,cuda:gloo"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        for name, (device, can_access, host, backends) in cases.items():
            patch.setattr(torch.cuda, "current_device", lambda device=device: device)
            patch.setattr(torch.cuda, "can_device_access_peer", can_access)
            patch.setattr(dist, "get_backend_config", lambda group, backends=backends: backends)
            patch.setattr(choose.os, "uname", lambda host=host: SimpleNamespace(nodename=host))
            found[name] = choose.peers_are_reachable(group)
    return found


def test_all_ranks_decide_alike() -> None:
    for found in run_ranks(reachable, 2):
        assert found == {
            "no GPU": torch.cuda.is_available(),
            "peers": True,
            "peers, and a backend for CPUs": True,
            "two hosts": False,
            "one GPU": False,
            "one cannot read": False,
            "gloo": False,
        }
