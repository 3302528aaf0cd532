"""The hierarchical dispatcher against the flat one on ranks of two "nodes", the rows that cross, and what "auto" chooses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from forebay.moe import backends as choose
from forebay.moe.backends import Topology, make_dispatcher, node_name
from forebay.moe.dispatch import NcclDispatcher, TokenDispatcher, combine, dispatch
from forebay.moe.experts import experts
from forebay.moe.hierarchical import HierarchicalDispatcher
from tests.helpers import count_handles
from tests.moe.layers import CASES, INNER, E, H, K, equal, inputs, layer, relative
from tests.moe.test_symmetric import MappedDispatcher, ranks_or_skip
from tests.pipeline import nets
from tests.pipeline.test_overlap import MIXED, agrees, breaks_and_recovers
from tests.ranks import run_ranks


def made(backend: str = "hierarchical", **changes: Any) -> Any:
    settings = {"num_experts": E, "tokens": 9, "hidden": H, "slots_per_token": K, "dtype": torch.float32, **changes}
    return make_dispatcher(backend, dist.group.WORLD, **settings)


def nodes_of(ids: torch.Tensor) -> torch.Tensor:
    """[T, 2] bool: which of the two nodes have an expert of each token."""
    valid = (ids >= 0) & (ids < E)
    return torch.stack([(valid & (ids // (E // 2) == node)).any(1) for node in range(2)], 1)


def against_flat(rank: int, world: int) -> list[dict[str, Any]]:
    """Errors against the flat dispatcher, and rows between nodes in each of a layer's four transfers."""
    flat, ours = NcclDispatcher(dist.group.WORLD, E), made()
    assert isinstance(ours, HierarchicalDispatcher)
    of_ours, of_flat = count_handles(ours), count_handles(flat)
    node, found = rank // (world // 2), []
    crossed: list[int] = []  # rows of each transfer between nodes
    original = dist.all_to_all_single

    def counting(out: Any, given: Any, back: Any = None, to: Any = None, group: Any = None) -> Any:
        if group is ours._groups[0] and to is not None and given.shape[1] == H:
            crossed.append(len(given) - to[group.rank()])
        return original(out, given, back, to, group=group)

    for seed, (tokens, kind) in enumerate(CASES):
        given = inputs(rank, (tokens * 2)[rank], kind, seed)
        wanted = layer(flat, given)
        dist.all_to_all_single = counting
        try:
            got = layer(ours, given)
        finally:
            dist.all_to_all_single = original
        sent, flat_sent = (dispatch(given["x"], given["ids"], given["w"], d) for d in (ours, flat))
        to, _ = flat._splits(flat_sent.handle.tensors[2])
        found.append(
            {
                "errors": [relative(a, b.double()) for a, b in zip(got, wanted, strict=True)],
                "same every time": equal(layer(ours, given), got),
                "needed": int(nodes_of(given["ids"])[:, 1 - node].sum()),
                "crossed": crossed.copy(),
                "flat": sum(n for p, n in enumerate(to) if p // (world // 2) != node),
                "handles": [of_ours()],
            }
        )
        del sent, flat_sent
        found[-1]["handles"] += [of_ours(), of_flat()]
        crossed.clear()
    ours.close()
    return found


@pytest.mark.parametrize("world", [4, 8])
def test_results_are_those_of_the_flat_dispatcher_and_a_token_crosses_once_a_node(world: int) -> None:
    """Sums are grouped by node, so they differ by rounding; rows of one token that go to several ranks of a node cross once."""
    ranks = run_ranks(against_flat, world, LOCAL_WORLD_SIZE=str(world // 2))
    flat = needed = 0
    for case, *results in zip(CASES, *ranks, strict=True):
        for rank, found in enumerate(results):
            assert max(found["errors"]) <= 1e-6, (rank, case, found)
            assert all(found["same every time"]), (rank, case)
            assert found["handles"] == [1, 0, 0], (rank, case)
            # The rank of the same number on the other node: what it needs comes back from here.
            theirs = results[(rank + world // 2) % world]["needed"]
            assert found["crossed"] == [found["needed"], theirs, found["needed"], theirs], (rank, case, found)
            assert found["needed"] <= found["flat"], (rank, case, found)
            flat, needed = flat + found["flat"], needed + found["needed"]
    assert needed < 0.8 * flat


def low_precision(rank: int, world: int) -> list[list[float]]:
    """Errors of the hierarchical and the flat dispatcher in bf16 against fp64."""
    given = inputs(rank, 40, "random", 3, torch.bfloat16)
    flat, ours = NcclDispatcher(dist.group.WORLD, E), made()
    truth = layer(flat, {n: t if n == "ids" else t.double() for n, t in given.items()})
    return [[relative(a, b) for a, b in zip(layer(d, given), truth, strict=True)] for d in (ours, flat)]


def test_bf16_has_one_more_rounding() -> None:
    for ours, flat in run_ranks(low_precision, 4, LOCAL_WORLD_SIZE="2"):
        assert all(a <= b + 2**-8 for a, b in zip(ours, flat, strict=True)), (ours, flat)


def under_way(rank: int, world: int) -> dict[str, Any]:
    """Overlapped microbatches, exceptions, a graph that is dropped, weights in fp64, and the symmetric dispatcher inside."""
    dispatcher = made(num_experts=nets.E)
    found = {f"{count}": agrees(nets.Net(dispatcher, MIXED), nets.tokens(count, rank)) for count in (1, 3)}
    found["exceptions"] = all(breaks_and_recovers(nets.Net(dispatcher, MIXED), nets.tokens(4, rank)))
    given = inputs(rank, 7, "random", 0, torch.float64)
    ours = made()
    handles = count_handles(ours)
    x = given["x"].requires_grad_()
    sent = dispatch(x, given["ids"], given["w"].requires_grad_(), ours)
    y = combine(sent.rows, sent.handle)
    alive = handles()
    del sent, y
    found["dropped"] = (alive, handles()) == (1, 0)
    return found


def test_overlap_is_bitwise_and_nothing_is_left() -> None:
    for found in run_ranks(under_way, 4, LOCAL_WORLD_SIZE="2"):
        assert [name for name, good in found.items() if not good] == []


def with_symmetric_inside(rank: int, world: int, folder: str) -> list[bool]:
    """Against NCCL inside, bit for bit: both sum in the order of ranks."""
    node = rank // 2

    def inside(group: Any, num_experts: int, nodes: int) -> TokenDispatcher:
        options: dict[str, Any] = {"tokens": 256, "hidden": H, "slots_per_token": K, "dtype": torch.float32}
        path = Path(folder) / str(node)
        path.mkdir(exist_ok=True)
        return MappedDispatcher(path, group, num_experts, capacity_factor=None, **options)

    ours, nccl = HierarchicalDispatcher(dist.group.WORLD, E, 2, inside), made()  # type: ignore[arg-type]
    given = inputs(rank, (5, 0, 9, 3)[rank], "random", 1)
    wanted = layer(nccl, given)
    same = equal(layer(ours, given), wanted)
    ours.close()
    nccl.close()
    return [*same, *equal(layer(made(), given), wanted)]  # groups like those that were closed


def test_symmetric_inside_the_nodes(tmp_path: Path) -> None:
    world = ranks_or_skip(4)
    if torch.cuda.device_count():
        pytest.skip("memory is mapped from files where there is no GPU")
    for same in run_ranks(with_symmetric_inside, world, str(tmp_path), LOCAL_WORLD_SIZE="2"):
        assert all(same), same


def traced(rank: int, world: int) -> list[bool]:
    dispatcher = made()
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        x, weights = torch.empty(5, H), torch.empty(5, K)
        trained = (x, weights, torch.empty(2, 2 * INNER, H), torch.empty(2, H, INNER))
        for t in trained:
            t.requires_grad_()
        sent = dispatch(x, torch.empty(5, K, dtype=torch.int64), weights, dispatcher)
        shapes = [isinstance(sent.rows.shape[0], torch.SymInt), isinstance(sent.max_rows, torch.SymInt)]
        y_rows = experts(sent.rows, sent.ids, sent.weights, *trained[2:], max_rows=sent.max_rows)
        y = combine(y_rows, sent.handle, torch.empty(5, H))
        grads = torch.autograd.grad(y.sum(), trained)
        return [*shapes, y.shape == (5, H), *(g.shape == t.shape for g, t in zip(grads, trained, strict=True))]


def test_a_trace_has_symbols_for_what_only_the_device_knows() -> None:
    assert all(map(all, run_ranks(traced, 4, LOCAL_WORLD_SIZE="2")))


def chosen(rank: int, world: int, sizes: list[int]) -> list[str]:
    """What "auto" makes, and the refusal of "hierarchical", on nodes of these sizes."""
    found = []
    agent = next(n for n in range(len(sizes)) if rank < sum(sizes[: n + 1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(agent))
        for backend in ("auto", "hierarchical"):
            try:
                found.append(made(backend).about)
            except ValueError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("sizes", "auto", "refused"),
    [
        ([4], "nccl (one node, its ranks cannot read each other's memory)", "this group has 1 node of 4 ranks; valid"),
        (
            [2, 2],
            "hierarchical (2 nodes of 2 ranks, inside a node nccl (one node, its ranks cannot read each other's memory))",
            "",
        ),
        ([3, 1], "nccl (2 nodes of 3 and 1 ranks)", "this group has 2 nodes of 3 and 1 ranks; valid are auto and nccl"),
        ([1, 1, 1, 1], "nccl (4 nodes of 1 ranks)", "this group has 4 nodes of 1 ranks; valid"),
    ],
)
def test_auto_chooses_by_the_nodes_of_a_group(sizes: list[int], auto: str, refused: str) -> None:
    for found, asked in run_ranks(chosen, 4, sizes):
        assert found == auto
        assert refused in asked if refused else asked.startswith("hierarchical (as asked for: 2 nodes of 2 ranks, ")


@pytest.mark.parametrize(
    ("topology", "dtype", "wanted"),
    [
        (Topology((0,) * 8 + (1,) * 8, True), torch.bfloat16, "deepep"),
        (Topology((0,) * 8 + (1,) * 8, False), torch.bfloat16, "hierarchical"),
        (Topology((0,) * 8 + (1,) * 8, True), torch.float32, "hierarchical"),
        (Topology((0, 0, 1, 1), True), torch.bfloat16, "hierarchical"),
        (Topology((0, 1, 0, 1), True), torch.bfloat16, "nccl"),
    ],
)
def test_deepep_is_for_hosts_of_eight(
    topology: Topology, dtype: torch.dtype, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "peers_are_reachable", lambda group: False)
    monkeypatch.setattr(choose, "topology_of", lambda group: topology)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    backend, why, found = choose._choose(SimpleNamespace(), 64, dtype)  # type: ignore[arg-type]
    assert (backend, found) == (wanted, topology) and str(topology) in why


def test_nodes_by_agent_or_by_local_size() -> None:
    names = [node_name({"RANK": str(r), "LOCAL_WORLD_SIZE": "4"}) for r in range(8)]
    assert len(set(names)) == 2 and names[0] == names[3] != names[4] == names[7]
    assert node_name({"RANK": "0", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}) == names[4]
    assert node_name({}) == names[0]
    assert str(Topology((0, 1, 0, 1))) == "2 nodes of 2 ranks, not neighbors"


def on_gpus(rank: int, world: int, folder: str, bound: bool) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world, device_id=device if bound else None
    )
    flat = NcclDispatcher(dist.group.WORLD, E)  # type: ignore[arg-type]
    ours = made(tokens=64)
    given = inputs(rank, 64, "random", 0, device="cuda")
    wanted, got = layer(flat, given), layer(ours, given)
    found = {
        "about": ours.about,
        "errors": [relative(a, b.double()) for a, b in zip(got, wanted, strict=True)],
        "same": equal(layer(ours, given), got),
    }
    ours.close()
    dist.destroy_process_group()
    return found


@pytest.mark.gpu
@pytest.mark.multi
@pytest.mark.parametrize("bound", [True, False])
def test_four_gpus_as_two_nodes(bound: bool, tmp_path: Path) -> None:
    """NCCL between the nodes and symmetric memory inside; communicators are split off where processes are bound to devices."""
    if torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    for found in run_ranks(on_gpus, 4, str(tmp_path), bound, group=False, LOCAL_WORLD_SIZE="2"):
        assert "inside a node symmetric" in found["about"], found
        assert max(found["errors"]) <= 1e-6 and all(found["same"]), found
