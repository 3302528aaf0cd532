"""Replicas on two and four GPUs, through NCCL: what `test_matrix` shows on gloo, with FSDP2's streams and with CUDA graphs.

The file is a script too: `torchrun --nproc-per-node N test_replicas_gpu.py DEVICE FOLDER` runs all cases of N processes, and
leaves each rank's losses, gradients and part of the model in FOLDER.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.common import (
    GPU_SIZES,
    assert_near_steps,
    assert_same_steps,
    config,
    differing,
    gradients_of_steps,
    script_rank,
    state_of,
    torchrun,
    write_text,
)

STEPS = 4  # gradients of the same parameters, then as many of their updates; a graph is captured by then
SIZES = {**GPU_SIZES, "num_hidden_layers": 4, "num_experts": 8, "router_aux_loss_coef": 0.01}
REPLICAS = {"replicate": 2}
PIPELINES = {**REPLICAS, "pp": 2, "schedule": "1f1b", "reshard": False}
OVERLAP = {**REPLICAS, "overlap": True, "reshard": False}
IN_FP32: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one process": {}},
    2: {"alone": REPLICAS, "alone, overlap": OVERLAP},
    4: {
        "sharded": REPLICAS,
        "each microbatch": {**REPLICAS, "reduce": "microbatch"},
        "experts": {**REPLICAS, "ep": 2, "dispatch": "nccl"},
        "pipelines": PIPELINES,
    },
}
# In fp32 a grouped product asks the device for its sizes: nothing to capture.
IN_A_GRAPH = {1: {}, 2: {"graph, alone": OVERLAP}, 4: {"graph, pipelines": PIPELINES}}


def run(device: str, folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name, parallel in IN_FP32[world].items():
        torch.save(results(device, folder, parallel, "", graph=False), folder / f"{name}-{rank}.pt")
    for name, parallel in IN_A_GRAPH[world].items():
        for graph in (False, True):
            found = results(device, folder, parallel, "bfloat16", graph)
            torch.save(found, folder / f"{name}, {graph}-{rank}.pt")


def results(device: str, folder: Path, parallel: dict[str, Any], compute: str, graph: bool) -> Any:
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    settings = config(
        folder,
        SIZES,
        model={"dtype": "float32", "compute": compute, "attention": "eager"},
        train={"batch": 8, "microbatch": 1, "sequence": 256, "steps": 9, "clip": 0.1},
        parallel=parallel,
        memory={"graph": graph},
        device={"type": device, "threads": 0},
    )
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        found = gradients_of_steps(trainer, STEPS)
        if trainer.cuda_graph is not None:
            assert trainer.cuda_graph.is_captured, trainer.cuda_graph.eager_reason
        norms = [trainer.step(number).gradient_norm for number in range(1, STEPS + 1)]
        return found, norms, state_of(trainer)


@pytest.mark.gpu
@pytest.mark.multi
@pytest.mark.parametrize("world", [2, 4])
def test_replicas_through_nccl(tmp_path: Path, world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    folder = write_text(tmp_path, 2000)
    for processes in (1, world):
        torchrun(__file__, processes, "cuda", folder, seconds=300)
    check(tmp_path, world)


def check(folder: Path, world: int) -> None:
    wanted, norms, _ = torch.load(folder / "one process-0.pt")
    for case in IN_FP32[world]:
        ranks = [torch.load(folder / f"{case}-{rank}.pt") for rank in range(world)]
        for found, its_norms, _ in ranks:
            assert its_norms[0] == pytest.approx(norms[0], rel=1e-4), case
            assert_near_steps(found, wanted, case)
        check_equal(case, ranks)
    for case in IN_A_GRAPH[world]:
        called, replayed = (
            [torch.load(folder / f"{case}, {graph}-{rank}.pt") for rank in range(world)] for graph in (False, True)
        )
        for (found, _, state), (same, _, its_state) in zip(called, replayed, strict=True):
            assert not differing(its_state, state), case
            assert_same_steps(same, found, case)
        check_equal(case, replayed)


def check_equal(case: str, ranks: list[Any]) -> None:
    """Both replicas hold the same bits after some updates."""
    half = len(ranks) // 2
    for (_, norms, state), (_, its_norms, its_state) in zip(ranks[:half], ranks[half:], strict=True):
        assert norms == its_norms and not differing(its_state, state), case


if __name__ == "__main__":
    with script_rank(sys.argv[1]):
        run(sys.argv[1], Path(sys.argv[2]))
