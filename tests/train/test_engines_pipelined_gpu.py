"""Pipelines on two GPUs, through NCCL: what is tested on gloo in `test_matrix` and `test_pipelined_placements`, where streams
and copies are real.

The file is a script too: `torchrun --nproc-per-node N test_pipelined_gpu.py DEVICE FOLDER` runs all cases that N processes can,
and leaves each rank's losses and gradients in FOLDER.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

SCHEDULES = ("1f1b", "interleaved-1f1b", "zbv", "dualpipev")
STEPS = 12  # the measuring ones, those that time the plan again, and some more
BF16_STEPS = 32  # until steps with offload are captured for good: three graphs are timed before
TINY = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "router_aux_loss_coef": 0.01,
}


def cases(world: int) -> dict[str, dict[str, Any]]:
    if world == 1:
        return {"one process": {}}
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
            found[f"{schedule} {what}"] = {"parallel": parallel, "memory": own, "model": compute}
    return found


def run(device: str, folder: Path) -> None:
    from forebay.config import from_mapping
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    # One group for all cases: a run of its own would make one.
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, sections in cases(world).items():
        base: dict[str, Any] = {
            # Eager attention: under `warn_only`, the backward of flash attention still adds up in any order. Of 2,900 tiny steps
            # with it, 5 differed in some query weights' last bits, with and without a graph.
            "model": {"family": "qwen3_moe", "config": TINY, "dtype": "float32", "attention": "eager"},
            "data": {"source": "text", "path": str(folder / "a.txt"), "cache": str(folder / "cache")},
            "train": {"batch": 8, "microbatch": 1, "sequence": 512, "steps": 9},
            "device": {"type": device},
            "log": {"folder": str(folder / "run")},
        }
        config = from_mapping(
            {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}, origin="test"
        )
        found = []
        with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
            for number in range(1, (BF16_STEPS if "bf16" in name else STEPS) + 1):
                losses = mesh.sum(torch.stack(trainer.gradients(number)))
                whole = {
                    n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).cpu()
                    for n, p in trainer.model.named_parameters()
                }
                found.append((losses.cpu(), whole))
                trainer.optimizer.zero_grad(set_to_none=True)
            engine = trainer.pipeline if world > 1 else None
            ran = engine is None or tuple(engine.ran) == engine.plan.actions[mesh.pp_rank]
            if trainer.cuda_graph is not None:
                assert trainer.cuda_graph.is_captured, f"{name}: {trainer.cuda_graph.eager_reason}"
        torch.save((found, ran), folder / f"{name}-{rank}.pt")
    dist.destroy_process_group()


def start(world: int, device: str, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = {**os.environ, "PYTHONPATH": "src", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [*command, __file__, device, str(folder)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.gpu
@pytest.mark.multi
def test_pipelines_through_nccl(tmp_path: Path) -> None:
    check(tmp_path, "cuda")


def check(folder: Path, device: str) -> None:
    (folder / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 2000)
    for world in (1, 2):
        start(world, device, folder)
    wanted, _ = torch.load(folder / "one process-0.pt")
    for schedule in SCHEDULES:
        for rank in range(2):
            keep, ran = torch.load(folder / f"{schedule} keep-{rank}.pt")
            assert ran, f"{schedule}: rank {rank} did not run its plan"
            for one, other in (
                ("keep", "offload"),
                ("bf16", "bf16 keep in a graph"),
                ("bf16", "bf16 offload in a graph"),
            ):
                pair = (torch.load(folder / f"{schedule} {name}-{rank}.pt")[0] for name in (one, other))
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
