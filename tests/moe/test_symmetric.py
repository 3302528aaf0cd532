"""The symmetric dispatcher against the nccl one, bit for bit; its capacity; late ranks.

On CPUs, processes map each other's memory from files, kernels run in Triton's interpreter, and a gloo barrier replaces
waiting kernels: all but the waiting itself is the code of the GPUs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forebay.kernels.symm_mem import LATE, PeerLayout, PeerMemory
from forebay.moe.dispatch import NcclDispatcher, combine, dispatch
from forebay.moe.symmetric import SymmetricDispatcher
from tests.helpers import count_handles
from tests.moe.layers import CASES, E, H, K, equal, group, inputs, layer
from tests.products import first
from tests.ranks import run_ranks

T = 9


def ranks_or_skip(world: int) -> int:
    """With GPUs the kernels are compiled for them: then it takes one for each rank."""
    if 0 < torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, or none")
    return world


class MappedDispatcher(SymmetricDispatcher):
    """Memory of all ranks in files."""

    def __init__(self, folder: Path, *args: Any, **options: Any):
        self.folder = folder
        super().__init__(*args, **options)

    def _share(self, layout: PeerLayout) -> PeerMemory:
        memory = []
        for turn in ("create", "map"):
            for rank in range(self.size):
                if (turn == "create") == (rank == self.rank):
                    name = str(self.folder / str(rank))
                    memory.append((rank, torch.from_file(name, shared=True, size=layout.total, dtype=torch.uint8)))
            dist.barrier(self._group)
        self.mapped = [m for _, m in sorted(memory, key=lambda item: item[0])]
        own = self.mapped[self.rank].zero_()
        dist.barrier(self._group)
        offsets = torch.tensor([m.data_ptr() - own.data_ptr() for m in self.mapped])
        state = torch.zeros(layout.state_size, dtype=torch.int64)
        return PeerMemory(own, offsets, state, self.rank, layout, programs=2, meet=lambda: dist.barrier(self._group))


def dispatcher_of(folder: Path, **options: Any) -> SymmetricDispatcher:
    """On the GPUs if there are enough, else on the CPU."""
    options = {"tokens": T, "hidden": H, "slots_per_token": K, "dtype": torch.float32, **options}
    if torch.cuda.device_count() < dist.get_world_size():
        folder.mkdir(exist_ok=True)
        return MappedDispatcher(folder, dist.group.WORLD, E, **options)
    torch.cuda.set_device(dist.get_rank())
    return SymmetricDispatcher(dist.new_group(backend="nccl"), E, **options)


def bitwise_those_of_nccl(rank: int, world: int, folder: str) -> list[list[bool]]:
    ours = dispatcher_of(Path(folder) / "a", capacity_factor=float(world))
    exact = dispatcher_of(Path(folder) / "b", capacity_factor=None)
    nccl = NcclDispatcher(ours._group, E)
    device = str(ours._open().base.device)
    handles = count_handles(ours), count_handles(exact)
    results = []
    for seed, (tokens, kind) in enumerate(CASES):
        made = inputs(rank, tokens[rank], kind, seed, device=device)
        wanted = layer(nccl, made)
        for dispatcher in (ours, exact):
            results.append(equal(layer(dispatcher, made), wanted))
            dispatcher.check()
    results.append([alive() == 0 for alive in handles])
    sent = dispatch(made["x"], made["ids"], made["w"], exact)
    live = torch.tensor(int((sent.ids >= 0).sum()))
    results.append([sent.rows.shape[0] == 256, sent.max_rows == 256 * -(-int(live) // 256)])
    combine(sent.rows, sent.handle)
    for dispatcher in (ours, exact):
        dispatcher.close()
        dispatcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        dispatch(made["x"], made["ids"], made["w"], ours)
    return results


@pytest.mark.parametrize("world", first(1, [2, 4]))
def test_bitwise_those_of_the_nccl_dispatcher(world: int, tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(bitwise_those_of_nccl, ranks_or_skip(world), str(tmp_path))):
        for n, same in enumerate(results):
            assert all(same), (rank, n, same)


def over_capacity(rank: int, world: int, folder: str) -> list[str]:
    # 100 tokens on 2 ranks fill 100 * 3 slots of rank 0 each: 600; an even split, rounded up, is 512.
    dispatcher = dispatcher_of(Path(folder), tokens=100, capacity_factor=1.0)
    device = str(dispatcher._open().base.device)
    messages = [f"{dispatcher.capacity_rows} {dispatcher.capacity_slots}"]
    made, big = inputs(rank, 100, "one rank", 0, device=device), inputs(rank, 101, "random", 0, device=device)
    layer(dispatcher, made)
    layer(dispatcher, inputs(rank, 30, "random", 0, device=device))  # fits again: the recorded need stays

    def send(x: Tensor, ids: Tensor) -> None:
        dispatch(x, ids, torch.ones(ids.shape, device=device), dispatcher)

    for call in (
        dispatcher.check,
        dispatcher.check,
        lambda: send(made["x"][:, :8], made["ids"]),
        lambda: send(made["x"].double(), made["ids"]),
        lambda: send(made["x"], made["ids"][:, :2]),
        lambda: send(big["x"], big["ids"]),
    ):
        try:
            call()
            messages.append("")
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    dispatcher._open().state[LATE] = 1
    dispatcher.clear_lost()
    dispatcher.check()  # or it would raise
    dispatcher.close()
    return messages


def test_more_than_the_capacity_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for sizes, second, third, width, dtype, slots, tokens in run_ranks(over_capacity, ranks_or_skip(2), str(tmp_path)):
        assert sizes == "200 512"
        assert "rank 0 needed 600 slots and has 512" in second and "capacity_factor of 2 would" in second
        assert third == ""
        assert "up to 100 rows of 16 in torch.float32, got 100 of 8" in width
        assert "got 100 of 16 in torch.float64" in dtype
        assert "made for 3 slots a token" in slots and "got 2 slots" in slots
        assert "up to 100 rows of 16 in torch.float32, got 101 of 16" in tokens


def settled() -> None:
    """All ranks have done what they were given: what they noted is there to read."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def over_and_again(rank: int, world: int, folder: str) -> dict[str, Any]:
    dispatcher = dispatcher_of(Path(folder) / "a", tokens=100, capacity_factor=1.0)
    nccl = NcclDispatcher(dispatcher._group, E)
    device = str(dispatcher._open().base.device)
    skewed, small = inputs(rank, 100, "one rank", 0, device=device), inputs(rank, 30, "random", 1, device=device)
    found: dict[str, Any] = {"nothing yet": dispatcher.suggested_factor(), "lost": []}

    def note() -> None:
        settled()
        flag = dispatcher.lost_flag()
        assert flag is not None and flag.shape == (1,) and flag.dtype == torch.int64 and str(flag.device) == device
        found["lost"].append(int(flag))

    equals = equal(layer(dispatcher, small), layer(nccl, small))
    note()
    layer(dispatcher, skewed)
    layer(dispatcher, small)
    note()
    found["over"] = dispatcher.suggested_factor()
    settled()
    dispatcher.clear_lost()
    settled()
    note()
    with dispatcher.exactly(), dispatcher.exactly():
        equals += equal(layer(dispatcher, skewed), layer(nccl, skewed))
        sent = dispatch(skewed["x"], skewed["ids"], skewed["w"], dispatcher)
        combine(sent.rows, sent.handle)
        needed = world * 100 * K if rank == 0 else 0
        equals.append(sent.max_rows == 256 * -(-needed // 256) and len(sent.handle.tensors) == 4)
    note()
    found["exactly"] = dispatcher.suggested_factor()
    with pytest.raises(KeyError), dispatcher.exactly():
        raise KeyError
    equals += equal(layer(dispatcher, small), layer(nccl, small))
    equals.append(dispatch(small["x"], small["ids"], small["w"], dispatcher).rows.shape[0] == dispatcher.capacity_rows)
    dispatcher.check()
    dispatcher.close()
    found["equal"] = equals
    return found


@pytest.mark.parametrize("world", first(1, [2, 4]))
def test_over_the_capacity_and_again_exactly(tmp_path: Path, world: int) -> None:
    for rank, found in enumerate(run_ranks(over_and_again, ranks_or_skip(world), str(tmp_path))):
        assert found["nothing yet"] is None
        assert all(found["equal"]), (rank, found)
        # All slots of all ranks against the even split of 300, which is rounded up to 512.
        over = world * 100 * K - 512
        assert found["lost"] == [0, over, 0, 0] and found["over"] == float(world)
        # The host counted on the rank that was needed; the others dispatched nothing that they were not told of.
        assert found["exactly"] == (float(world) if rank == 0 else None)


def need(rank: int, world: int, folder: str) -> list[Any]:
    """The sufficient factor for routing that fits, by the dispatcher and by hand; flags of dispatchers that drop no rows."""
    dispatcher = dispatcher_of(Path(folder) / "a", tokens=100, capacity_factor=1.5)
    device = str(dispatcher._open().base.device)
    most = 0
    for seed, kind in enumerate(("random", "holes", "random")):
        made = inputs(rank, 100, kind, seed, device=device)
        sent = dispatch(made["x"], made["ids"], made["w"], dispatcher)
        combine(sent.rows, sent.handle)
        counted = torch.tensor(int((sent.ids >= 0).sum()))
        dist.all_reduce(counted, dist.ReduceOp.MAX)
        most = max(most, int(counted))
    settled()
    by_hand = max(1.0, -(-100 * most // (100 * K)) / 100)
    exact = dispatcher_of(Path(folder) / "b", capacity_factor=None)
    roomy = dispatcher_of(Path(folder) / "c", capacity_factor=float(world))
    found = [dispatcher.suggested_factor(), by_hand, int(dispatcher.lost_flag())]  # type: ignore[arg-type]
    found += [exact.lost_flag(), exact.suggested_factor(), roomy.lost_flag()]
    with exact.exactly():
        pass
    for each in (dispatcher, exact, roomy):
        each.close()
    return found


def test_how_much_would_have_been_enough(tmp_path: Path) -> None:
    for suggested, by_hand, lost, *none in run_ranks(need, ranks_or_skip(2), str(tmp_path)):
        assert suggested == by_hand and 1.0 < suggested < 1.5 and lost == 0
        assert none == [None, None, None]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"capacity_factor": 0.99}, "capacity_factor must be at least 1"),
        ({"capacity_factor": float("nan")}, "capacity_factor must be at least 1"),
        (
            {"dtype": torch.float64},
            "dtype must be one of torch.bfloat16, torch.float16, torch.float32, got torch.float64",
        ),
        ({"hidden": 12, "dtype": torch.bfloat16}, "multiple of 16 bytes, got 24"),
        ({"tokens": 0}, "must be positive, got 0, 16, 3, 120.0"),
    ],
)
def test_refused_at_construction(changed: dict[str, Any], message: str) -> None:
    options = {"num_experts": E, "tokens": T, "hidden": H, "slots_per_token": K, "dtype": torch.float32, **changed}
    with pytest.raises(ValueError, match=message):
        SymmetricDispatcher(group(), **options)  # type: ignore[arg-type]


def test_capacities() -> None:
    class Unshared(SymmetricDispatcher):
        def _share(self, layout: PeerLayout) -> None:  # type: ignore[override]
            return None

    def of(**options: Any) -> tuple[int, int]:
        made = Unshared(group(), E, hidden=H, dtype=torch.float32, **{"tokens": 1000, "slots_per_token": K, **options})  # type: ignore[arg-type]
        return made.capacity_rows, made.capacity_slots

    assert of(capacity_factor=1.0) == (2000, 3072)  # 3000 slots, and no more rows than there are tokens
    assert of(capacity_factor=2.0) == (2000, 6144)  # 6000: all slots of both ranks
    assert of(capacity_factor=9.0) == (2000, 6144)
    assert of(slots_per_token=6, capacity_factor=9.0) == (2000, 8192)  # a rank holds 4 experts: 4 slots a token
    assert of(slots_per_token=1, capacity_factor=1.0) == (1024, 1024)


def no_sync_and_a_graph(rank: int, world: int) -> list[bool]:
    dispatcher = dispatcher_of(Path(), capacity_factor=float(world), dtype=torch.bfloat16)
    nccl = NcclDispatcher(dispatcher._group, E)

    def made(seed: int) -> dict[str, Tensor]:
        return inputs(rank, T, "random", seed, torch.bfloat16, "cuda")

    fixed = made(0)
    layer(dispatcher, fixed)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(dispatcher, fixed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = layer(dispatcher, fixed)
    found = []
    for seed in range(1, 5):
        other = made(seed)
        wanted = layer(nccl, other)
        for name, t in fixed.items():
            t.copy_(other[name])
        graph.replay()
        found += equal(captured, wanted)
    del graph, captured
    dispatcher.check()
    dispatcher.close()
    return found


@pytest.mark.gpu
@pytest.mark.multi
def test_no_host_sync_and_a_graph_with_other_ids() -> None:
    assert all(map(all, run_ranks(no_sync_and_a_graph, 2)))


def noted_without_sync(rank: int, world: int) -> list[Any]:
    """All of an attempt but reading the flag; then the second one."""
    dispatcher = dispatcher_of(Path(), tokens=300, capacity_factor=1.0, dtype=torch.bfloat16)
    nccl = NcclDispatcher(dispatcher._group, E)
    made = inputs(rank, 300, "one rank", 0, torch.bfloat16, "cuda")
    layer(dispatcher, made)  # compiles
    dispatcher.lost_flag()
    settled()
    dispatcher.clear_lost()
    settled()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(dispatcher, made)
        flag = dispatcher.lost_flag()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    dist.all_reduce(flag, group=dispatcher._group)
    found: list[Any] = [int(flag)]  # type: ignore[arg-type]
    torch.cuda.set_sync_debug_mode("error")
    try:
        dispatcher.clear_lost()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with dispatcher.exactly():
        found += equal(layer(dispatcher, made), layer(nccl, made))
    for _ in range(20):  # streams of the ranks drift: a note must neither outlive its clearing nor be cleared too early
        layer(dispatcher, made)
        flag = dispatcher.lost_flag()
        dist.all_reduce(flag, group=dispatcher._group)
        found.append(int(flag) == world * (world * 300 * K - 1024))  # type: ignore[arg-type]
        dispatcher.clear_lost()
        with dispatcher.exactly():
            layer(dispatcher, made)
        found.append(int(dispatcher.lost_flag()) == 0)  # type: ignore[arg-type]
    dispatcher.check()
    dispatcher.close()
    return found


@pytest.mark.gpu
@pytest.mark.multi
def test_an_overflow_is_noted_without_the_host() -> None:
    for lost, *true in run_ranks(noted_without_sync, 2):
        assert lost == 2 * (2 * 300 * K - 1024) and all(true)


def late(rank: int, world: int) -> list[str]:
    dispatcher = dispatcher_of(Path(), timeout_s=2.0)
    made = inputs(rank, T, "random", 0, device="cuda")
    layer(dispatcher, made)
    torch.cuda.synchronize()
    dist.barrier()
    messages = []
    for ask in (dispatcher.check, lambda: dispatcher.exactly().__enter__()) if rank == 0 else ():
        dispatch(made["x"], made["ids"], made["w"], dispatcher)
        dispatch(made["x"], made["ids"], made["w"], dispatcher)  # does not wait another time
        try:
            ask()
        except RuntimeError as error:
            messages.append(str(error))
    if rank == 0:
        dispatch(made["x"], made["ids"], made["w"], dispatcher)
        dispatcher.clear_lost()
        dispatcher.check()  # or it would raise
    dist.barrier()
    return messages


@pytest.mark.gpu
@pytest.mark.multi
def test_a_late_rank_is_named() -> None:
    messages = run_ranks(late, 2)[0]
    assert len(messages) == 2
    assert all("rank 1 of 2 did not join an operation within 2 s of rank 0" in message for message in messages)
