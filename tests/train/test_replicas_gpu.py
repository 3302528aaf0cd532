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
import torch.distributed as dist

from tests.train.common import GPU_SIZES, config, differing, state_of, torchrun, whole, write_text

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
    if device == "cuda":
        torch.cuda.set_device(rank)
    # One group for all cases: a run of its own would make one.
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, parallel in IN_FP32[world].items():
        torch.save(results(device, folder, parallel, "", graph=False), folder / f"{name}-{rank}.pt")
    for name, parallel in IN_A_GRAPH[world].items():
        for graph in (False, True):
            found = results(device, folder, parallel, "bfloat16", graph)
            torch.save(found, folder / f"{name}, {graph}-{rank}.pt")
    dist.destroy_process_group()


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
    found = []
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        for number in range(1, STEPS + 1):
            losses = mesh.sum(torch.stack(trainer.gradients(number)))
            found.append((losses.cpu(), {n: whole(p.grad).cpu() for n, p in trainer.model.named_parameters()}))
            trainer.optimizer.zero_grad(set_to_none=True)
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
            for (losses, grads), (true_losses, true) in zip(found, wanted, strict=True):
                assert torch.allclose(losses, true_losses, rtol=1e-5), case
                for name, grad in grads.items():  # products in fp32 on a GPU, summed in another order
                    assert (grad - true[name]).norm() <= 1e-4 * true[name].norm(), f"{case} {name}"
        check_equal(case, ranks)
    for case in IN_A_GRAPH[world]:
        called, replayed = (
            [torch.load(folder / f"{case}, {graph}-{rank}.pt") for rank in range(world)] for graph in (False, True)
        )
        for (found, _, state), (same, _, its_state) in zip(called, replayed, strict=True):
            assert not differing(its_state, state), case
            for (losses, grads), (its_losses, its_grads) in zip(found, same, strict=True):
                assert torch.equal(losses, its_losses) and not differing(its_grads, grads), case
        check_equal(case, replayed)


def check_equal(case: str, ranks: list[Any]) -> None:
    """Both replicas hold the same bits after some updates."""
    half = len(ranks) // 2
    for (_, norms, state), (_, its_norms, its_state) in zip(ranks[:half], ranks[half:], strict=True):
        assert norms == its_norms and not differing(its_state, state), case


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
