"""Process groups of every mesh, collective calls, refusals before a run starts, and whole runs of several processes."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from forebay.cli import main, program
from forebay.communicators import DEFAULT, options
from forebay.config import Config, check_world, from_mapping
from forebay.errors import RunError, UsageError, exit_code_of
from forebay.moe import backends
from forebay.train import distributed, hf_io
from forebay.train.distributed import ALONE, Mesh, World
from tests.ranks import on_processes, run_ranks
from tests.train import common
from tests.train.common import CPU, MODEL, config_file, train_command, write_text


def with_keys(**sections: dict[str, Any]) -> Config:
    return from_mapping({"model": {"family": "qwen3_moe"}, **sections})


@pytest.mark.parametrize(
    ("sections", "size", "reachable", "expected"),
    [
        # Members and channels: processes with the same experts, and those that share them.
        ({"ep": 2}, 2, True, [(1, 1), (2, 4)]),
        ({"ep": 2, "dispatch": "symmetric"}, 4, True, [(2, None), (2, 4)]),
        ({"ep": 2, "dispatch": "nccl"}, 4, True, [(2, None), (2, None)]),
        ({"ep": 2}, 4, False, [(2, None), (2, 4), (2, None)]),
        ({"pp": 2}, 2, True, [(1, 1), (2, 4)]),  # the pipeline stage, the pipeline
        ({"pp": 2}, 4, True, [(2, None), (2, 4)]),
        ({"replicate": 2}, 4, True, [(2, None), (2, None)]),  # a replica, the same shards of all replicas
    ],
)
def test_groups_that_carry_little_have_few_channels(
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any],
    size: int,
    reachable: bool,
    expected: list[tuple[int, int | None]],
) -> None:
    made: list[tuple[int, int | None]] = []

    def made_by(ranks: list[list[int]], timeout: timedelta, pg_options: Any = None) -> tuple[Any, None]:
        assert pg_options is None or pg_options._timeout == timeout
        made.append((len(ranks[0]), pg_options and pg_options.config.max_ctas))
        return MagicMock(), None

    for name, value in {
        "is_initialized": lambda: True,
        "get_backend_config": lambda: "cpu:gloo,cuda:nccl",
        "ProcessGroupNCCL": MagicMock(Options=lambda: MagicMock()),
        "new_subgroups_by_enumeration": made_by,
        "destroy_process_group": lambda _: None,
    }.items():
        monkeypatch.setattr(distributed.dist, name, value, raising=False)
    monkeypatch.setattr(backends, "peers_are_reachable", lambda _: reachable)
    monkeypatch.setattr(distributed.Mesh, "all", lambda _, condition: condition)
    monkeypatch.setattr(distributed, "_mesh", MagicMock())
    parallel = with_keys(parallel=sections).parallel
    Mesh(World(0, size, 0), torch.device("cpu"), parallel, timedelta(seconds=7), owns=False, store=None)
    assert made == expected


def test_only_nccl_has_channels() -> None:
    assert options(4, "cpu:gloo,cuda:gloo") is None and options(DEFAULT, "cuda:nccl") is None


def test_world_of_environment() -> None:
    assert World.of_environment({"HOME": "/"}) == ALONE
    assert World.of_environment({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == World(5, 8, 1)
    assert not World(5, 8, 1).is_main and ALONE.is_main
    with pytest.raises(UsageError, match=r"RANK, WORLD_SIZE, LOCAL_RANK must all be set.*LOCAL_RANK"):
        World.of_environment({"RANK": "5", "WORLD_SIZE": "8"})
    with pytest.raises(UsageError, match=r"whole numbers.*'x'"):
        World.of_environment({"RANK": "x", "WORLD_SIZE": "8", "LOCAL_RANK": "0"})
    with pytest.raises(UsageError, match="RANK = 8 is none of the 8 processes"):
        World.of_environment({"RANK": "8", "WORLD_SIZE": "8", "LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("sections", "size", "message"),
    [
        ({"parallel": {"ep": 4}}, 1, "parallel.ep = 4 needs 4 processes .* torchrun --nproc-per-node 4 -m forebay train"),
        ({"parallel": {"ep": 3}}, 4, "parallel.ep = 3 does not divide the 4 processes; valid are 1, 2, 4$"),
        ({"train": {"batch": 6}}, 4, "batch = 6 is no multiple of the 4 processes that share the batch; the nearest above is 8"),
        ({"train": {"batch": 24, "microbatch": 4}}, 4,
         "train.batch = 24 .* train.microbatch = 4 on each of the 4 processes that share .*; valid here .* are 1, 2, 3, 6$"),
        ({"parallel": {"pp": 2, "ep": 4}}, 1, "pp = 2 with parallel.ep = 4 needs 8 processes .* --nproc-per-node 8 -m"),
        ({"parallel": {"pp": 4}}, 6, "parallel.pp = 4 does not divide the 6 processes; valid are 1, 2, 3, 6$"),
        ({"parallel": {"pp": 2, "ep": 4}}, 12,
         r"parallel.ep = 4 does not divide the 6 processes of a pipeline stage \(12 / 2\); valid are 1, 2, 3, 6$"),
        ({"parallel": {"replicate": 2, "pp": 2, "ep": 2}}, 1,
         "replicate = 2 with parallel.pp = 2 with parallel.ep = 2 needs 8 processes .* --nproc-per-node 8 -m"),
        ({"parallel": {"replicate": 4}}, 6, "parallel.replicate = 4 does not divide the 6 processes; valid are 1, 2, 3, 6$"),
        ({"parallel": {"replicate": 2, "pp": 4}}, 12,
         r"parallel.pp = 4 does not divide the 6 processes of a replica \(12 / 2\); valid are 1, 2, 3, 6$"),
        ({"parallel": {"replicate": 4, "ep": 4}}, 8,
         r"parallel.ep = 4 does not divide the 2 processes of a replica \(8 / 4\); valid are 1, 2$"),
        ({"parallel": {"replicate": 2, "pp": 2, "ep": 4}}, 8,
         r"parallel.ep = 4 does not divide the 2 processes of a pipeline stage \(4 / 2\); valid are 1, 2$"),
        ({"parallel": {"ep": 2}, "model": {"family": "qwen3_moe", "experts": "transformers"}}, 2, "experts = 'forebay'"),
        ({"parallel": {"ep": 2}, "memory": {"policy": "auto", "budget": "1GiB", "recompute": "full"}}, 2,
         "memory.recompute = 'full' repeats communication"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(sections: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_world(with_keys(**sections), size)


def test_alone_nothing_is_asked_of_anyone() -> None:
    with Mesh.open(with_keys(device={"type": "cpu"}), ALONE) as mesh:
        assert (mesh.rank, mesh.size, mesh.data, mesh.grid, mesh.expert_group) == (0, 1, None, None, None)
        assert mesh.max(1, 2.5) == [1, 2.5] and mesh.on_main(lambda: 3) == 3 and mesh.first_to_fail()
        assert mesh.sum(torch.ones(2)).tolist() == [1, 1] and not dist.is_initialized()
        assert mesh.sum_batch(torch.ones(2)).tolist() == [1, 1]
        assert (mesh.batch, mesh.pp, mesh.pp_rank, mesh.pipeline) == (ALONE, 1, 0, None)


def refuse() -> None:
    raise UsageError("main says no")


def talk(rank: int, world: int, replicate: int, pp: int, ep: int) -> dict[str, Any]:
    parallel = {"replicate": replicate, "pp": pp, "ep": ep, "schedule": "1f1b"}
    settings = with_keys(parallel=parallel, train={"batch": 16, "microbatch": 1}, device={"type": "cpu"})
    with Mesh.open(settings) as mesh:
        assert mesh.data is not None
        grid = [mesh.grid.get_group(name) for name in mesh.grid.mesh_dim_names or ()] if mesh.grid else []
        groups = [*([mesh.pipeline] if mesh.pipeline else []), *mesh.data.get_all_groups(), *grid]
        found = {
            "rank": (mesh.pp_rank, mesh.batch.rank, mesh.batch.size, mesh.batch.local_rank, mesh.rank, mesh.size),
            "groups": [dist.get_process_group_ranks(group) for group in groups],
            "timeouts": {group._get_backend(CPU).options._timeout.seconds for group in [*grid, *groups[:-1]]},
            "sums": (mesh.sum(torch.tensor([rank])).item(), mesh.sum_batch(torch.tensor([rank])).item()),
            "max": mesh.max(rank, -rank),
            "all": (mesh.all(rank < 4), mesh.all(rank != 2)),
            "main": mesh.on_main(lambda: f"rank {rank}"),
            "first": mesh.first_to_fail(),
        }
        with pytest.raises(UsageError, match="main says no"):
            mesh.on_main(refuse)
    assert mesh.pipeline is None and mesh.data is None and mesh.grid is None
    return {**found, "group is left to its owner": dist.is_initialized()}


@pytest.mark.parametrize(
    ("world", "replicate", "pp", "ep"),
    [(4, 1, 1, 2), (4, 1, 2, 1), (4, 1, 2, 2), (4, 1, 4, 1), (8, 2, 2, 2), (8, 2, 1, 4), (8, 8, 1, 1)],
)
def test_groups_of_a_mesh(world: int, replicate: int, pp: int, ep: int) -> None:
    """A replica has processes with neighboring numbers, and in it a stage has; neighbors share experts."""
    shards = world // replicate // pp
    everyone = [(r, s, n) for r in range(replicate) for s in range(pp) for n in range(shards)]
    numbers = {place: rank for rank, place in enumerate(everyone)}
    for rank, found in enumerate(run_ranks(talk, world, replicate, pp, ep)):
        replica, stage, shard = everyone[rank]
        own = replica * shards + shard
        assert found["rank"] == (stage, own, replicate * shards, rank, rank, world)
        pipeline = [[numbers[replica, s, shard] for s in range(pp)]] if pp > 1 else []
        across = [[numbers[r, stage, shard] for r in range(replicate)]] if replicate > 1 else []
        those = [numbers[replica, stage, n] for n in range(shards)]
        column = [numbers[replica, stage, n] for n in range(shards) if n % ep == shard % ep]
        row = [numbers[replica, stage, n] for n in range(shards) if n // ep == shard // ep]
        assert found["groups"] == [*pipeline, *across, those, *([*across, column, row] if ep > 1 else [])]
        sharing = [numbers[r, stage, n] for r in range(replicate) for n in range(shards)]
        assert found["sums"] == (sum(range(world)), sum(sharing)) and found["max"] == [world - 1, 0]
        assert found["all"] == (world == 4, False) and found["main"] == "rank 0" and found["first"] == (rank == 0)
        assert found["timeouts"] <= {600, 60} and found["group is left to its owner"]  # the default group is the test's


def test_as_a_person_starts_it(tmp_path: Path) -> None:
    """Lines are printed once, and so is the message of a failure, whether one process finds it or all."""
    settings = common.config(
        common.write_text(tmp_path, 50),
        {**MODEL, "num_hidden_layers": 1},
        train={"steps": 2},
        checkpoint={"last": False},
        parallel={"ep": 2, "timeout": 30},
        device={"threads": 0},
    )
    config = config_file(tmp_path, settings)
    codes, out, error = on_processes(2, main, train_command(config))
    assert codes == [0, 0], error
    assert out.count("step 00000002/00000002") == 1 and "on 2 x CPU" in out
    assert "Qwen3MoeForCausalLM" in out and "Warning" not in error
    codes, out, error = on_processes(2, main, train_command(config, "parallel.ep=3"))
    assert codes == [2, 2] and error.count("forebay: parallel.ep = 3 does not divide the 2 processes") == 1
    # By torchrun itself. A loss that is not finite is found by all, in the second step.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "forebay"]
    late = subprocess.run(
        [*command, *train_command(config, "optimizer.lr=1e30")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=False,
    )
    assert late.returncode == 1 and "exitcode  : 4" in late.stderr and late.stderr.count("which is not finite") == 1, (
        late.stderr
    )
    assert late.stdout.count("step 00000001/00000002") == 1 and "on 2 x CPU" in late.stdout


def test_a_failed_process_does_not_wait_for_what_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying the groups of a rank that was out of memory waited for the other one, which waited for it (two H200s)."""
    aborted, never = threading.Event(), threading.Event()
    mesh = Mesh(World(0, 1, 0), torch.device("cuda"), with_keys().parallel, timedelta(seconds=1), owns=True, store=None)
    group = SimpleNamespace(abort=aborted.set)
    monkeypatch.setattr(
        distributed,
        "dist",
        SimpleNamespace(
            is_initialized=lambda: True, group=SimpleNamespace(WORLD=group), destroy_process_group=never.wait
        ),
    )
    monkeypatch.setattr(distributed, "_ABORTING", 0.1)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="its own"), mesh:
            raise torch.OutOfMemoryError("its own")
        assert aborted.wait(60)
    finally:
        never.set()


@pytest.mark.gpu
@pytest.mark.multi
def test_a_pipeline_rank_that_is_out_of_memory_says_so(tmp_path: Path) -> None:
    """In the middle of a run, while the other one's stream waits for its messages."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    settings = common.config(
        common.write_text(tmp_path, 2000),
        {**MODEL, "num_hidden_layers": 4},
        train={"steps": 5, "batch": 8, "microbatch": 2},
        checkpoint={"last": False},
        parallel={"pp": 2},
        memory={"graph": False},
        device={"type": "cuda", "threads": 0},
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    done = subprocess.run(
        [*command, str(config_file(tmp_path, settings))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(("src", "."))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "forebay: CUDA out of memory, in a test" in done.stderr, done.stderr


def test_others_that_never_come(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=r"the 2 processes could not find each other within 1 s.*torchrun"):
        Mesh.open(tiny(parallel={"timeout": 1}), World(0, 2, 0))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("port", "message"),
    [
        ("", "another process of this machine listens at port"),
        ("x", "invalid literal.*MASTER_ADDR and MASTER_PORT say where processes meet"),
        ("99999", "99999.*; MASTER_ADDR and MASTER_PORT"),
        (None, "MASTER_PORT expected, but not set; MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_no_place_to_meet(
    port: str | None, message: str, tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port in use is a usage error, with exit code 2, as a wrong one is: nothing ran, and the same command fails again."""
    for name, value in {"MASTER_ADDR": "localhost", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with socket.create_server(("localhost", 0)) as taken:
        if port is not None:
            monkeypatch.setenv("MASTER_PORT", port or str(taken.getsockname()[1]))
        with pytest.raises(UsageError, match=message) as caught:
            Mesh.open(tiny(parallel={"timeout": 1}), World(0, 2, 0))
    assert exit_code_of(caught.value) == 2
    assert not dist.is_initialized()


def started_with(ours: list[str], theirs: list[str]) -> int:
    return main([*ours, *(theirs if os.environ["RANK"] == "1" else [])])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("optimizer.lr=0.1", "process 1 was started with optimizer.lr = 0.1, and process 0 with 0.0003; start all"),
        ("train.steps=6", "process 1 was started with train.steps = 6, and process 0 with 2"),
        ("parallel.ep=2", "process 1 was started with parallel.ep = 2, and process 0 with 1"),
        ("model.config.num_experts=8", "process 1 was started with model.config = {"),
        (
            "data.path={folder}/other.txt",
            "process 1 has other data (text: 1 file, 1 documents, 12 tokens) than process 0 (",
        ),
        ("data.path={folder}/same.txt", ""),
        ("data.cache={folder}/elsewhere", ""),
    ],
)
def test_processes_that_were_started_unlike(tmp_path: Path, other: str, said: str) -> None:
    """As by a file that was edited on one node only. Places may differ."""
    settings = common.config(
        write_text(tmp_path), train={"steps": 2, "sequence": 8}, parallel={"timeout": 60}, data={"validation": 0}
    )
    (tmp_path / "other.txt").write_text("other water")
    (tmp_path / "same.txt").write_bytes((tmp_path / "text.txt").read_bytes())
    theirs = ["--set", other.format(folder=tmp_path)]
    codes, _, error = on_processes(2, started_with, train_command(config_file(tmp_path, settings)), theirs)
    assert codes == ([2, 2] if said else [0, 0]) and error.count("forebay: ") == bool(said), error
    assert f"forebay: {said}" in error or not said, error


def test_a_model_that_is_another_one_on_one_machine(tmp_path: Path) -> None:
    """As a folder that was copied to the others only: layers would be of two models."""
    made = common.config(write_text(tmp_path))
    for seed, name in enumerate(("ours", "theirs")):
        hf_io.save(hf_io.build(made.model, 257, CPU, seed=seed), tmp_path / name)
    model = {"family": "", "config": {}, "path": str(tmp_path / "ours")}
    settings = common.config(tmp_path, model=model, parallel={"timeout": 60})
    ours = train_command(config_file(tmp_path, settings))
    codes, _, error = on_processes(2, started_with, ours, ["--set", f"model.path={tmp_path}/theirs"])
    said = f"process 1 has another model ({tmp_path}/theirs) than process 0 ({tmp_path}/ours); all processes need"
    assert codes == [2, 2] and error.count("forebay: ") == 1 and said in error, error


if __name__ == "__main__":
    from forebay.train.trainer import Trainer

    def fails(self: Any, number: int, step: Any = Trainer.gradients) -> Any:
        if number == 3 and self.mesh.pp_rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory, in a test")
        return step(self, number)

    Trainer.gradients = fails  # type: ignore[method-assign]
    sys.argv[1:] = train_command(Path(sys.argv[1]))
    program()
