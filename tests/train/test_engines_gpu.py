"""Pipelines on two GPUs, through NCCL: what `test_engines` and `test_matrix` show on gloo, with real streams and copies.

The file is a script too: `torchrun --nproc-per-node N test_engines_gpu.py DEVICE FOLDER` runs all cases that N processes can, and
leaves each rank's losses and gradients in FOLDER.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.train.common import GPU_SIZES, config, torchrun, whole, write_text

SCHEDULES = ("1f1b", "interleaved-1f1b", "zbv", "dualpipev")
STEPS = 12  # the measuring ones, those that time the plan again, and some more
BF16_STEPS = 32  # until steps with offload are captured for good: three graphs are timed before
# Eager attention: under `warn_only`, the backward of flash attention still adds up in any order. Of 2,900 tiny steps with it, 5
# differed in some query weights' last bits, with and without a graph.
MODEL = {"dtype": "float32", "attention": "eager"}
SIZES = {**GPU_SIZES, "num_hidden_layers": 4, "num_experts": 8, "router_aux_loss_coef": 0.01}


def cases(world: int) -> dict[str, dict[str, Any]]:
    if world == 1:
        return {"one process": {"model": MODEL}}
    found: dict[str, dict[str, Any]] = {}
    for schedule in SCHEDULES:
        # In fp32 a grouped product asks the device for its sizes: nothing to capture.
        for what, own in (
            ("keep", {}),
            ("offload", {"policy": "offload"}),
            ("bf16", {}),
            ("bf16 keep in a graph", {"graph": True}),
            ("bf16 offload in a graph", {"graph": True, "policy": "offload"}),
        ):
            compute = {"compute": "bfloat16"} if "bf16" in what else {}
            parallel = {"pp": 2, "schedule": schedule, "reshard": "graph" not in what}
            found[f"{schedule} {what}"] = {
                "parallel": parallel,
                "memory": own,
                # Dropout in bf16: the processes' differ, so these are compared with each other only.
                "model": {**MODEL, **compute, "config": {**SIZES, "attention_dropout": 0.1 * ("bf16" in what)}},
            }
    return found


def run(device: str, folder: Path) -> None:
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    # One group for all cases: a run of its own would make one.
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, sections in cases(world).items():
        settings = config(
            folder,
            SIZES,
            train={"batch": 8, "microbatch": 1, "sequence": 512, "steps": 9},
            device={"type": device, "threads": 0},
            **sections,
        )
        found = []
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            for number in range(1, (BF16_STEPS if "bf16" in name else STEPS) + 1):
                losses = mesh.sum(torch.stack(trainer.gradients(number)))
                found.append((losses.cpu(), {n: whole(p.grad).cpu() for n, p in trainer.model.named_parameters()}))
                trainer.optimizer.zero_grad(set_to_none=True)
            engine = trainer.pipeline if world > 1 else None
            ran = engine is None or tuple(engine.ran) == engine.plan.actions[mesh.pp_rank]
            if trainer.cuda_graph is not None:
                assert trainer.cuda_graph.is_captured, f"{name}: {trainer.cuda_graph.eager_reason}"
        torch.save((found, ran), folder / f"{name}-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.multi
def test_pipelines_through_nccl(tmp_path: Path) -> None:
    folder = write_text(tmp_path, 2000)
    for world in (1, 2):
        torchrun(__file__, world, "cuda", folder, seconds=300)
    wanted, _ = torch.load(tmp_path / "one process-0.pt")
    for schedule in SCHEDULES:
        for rank in range(2):
            keep, ran = torch.load(tmp_path / f"{schedule} keep-{rank}.pt")
            assert ran, f"{schedule}: rank {rank} did not run its plan"
            for one, other in (
                ("keep", "offload"),
                ("bf16", "bf16 keep in a graph"),
                ("bf16", "bf16 offload in a graph"),
            ):
                pair = (torch.load(tmp_path / f"{schedule} {name}-{rank}.pt")[0] for name in (one, other))
                for step, ((losses, grads), (same_losses, same)) in enumerate(zip(*pair, strict=True), 1):
                    assert torch.equal(losses, same_losses), f"{schedule}, {other}, step {step}"
                    for name, grad in grads.items():
                        assert torch.equal(grad, same[name]), f"{schedule}, {other}, step {step}: {name} is not {one}'s"
            for (losses, grads), (true_losses, true) in zip(keep, wanted, strict=True):
                assert torch.allclose(losses, true_losses, rtol=1e-5), schedule
                for name, grad in grads.items():
                    # Products in fp32 on a GPU, summed in another order where the router's loss is made stage by stage.
                    assert (grad - true[name]).norm() <= 1e-4 * true[name].norm(), f"{schedule} {name}"


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
