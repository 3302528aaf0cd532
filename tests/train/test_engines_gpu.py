"""Pipelines on two GPUs, by copies and through NCCL: what `test_engines` and `test_matrix` show on gloo, with real streams.

The file is a script too: `torchrun --nproc-per-node N test_engines_gpu.py DEVICE FOLDER [families]` runs all cases that N
processes can, or those of every family, and leaves each rank's losses and gradients in FOLDER.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.common import (
    GPU_FAMILIES,
    GPU_SIZES,
    assert_near_steps,
    assert_same_steps,
    config,
    gradients_of_steps,
    script_rank,
    torchrun,
    write_text,
)

SCHEDULES = ("1f1b", "interleaved-1f1b", "zbv", "dualpipev")
STEPS = 12  # the measuring ones, those that time the plan again, and some more
BF16_STEPS = 32  # until steps with offload are captured for good: three graphs are timed before
# Eager attention: under `warn_only`, the backward of flash attention still adds up in any order. Of 2,900 tiny steps with it, 5
# differed in some query weights' last bits, with and without a graph.
MODEL = {"dtype": "float32", "attention": "eager"}
SIZES = {**GPU_SIZES, "num_hidden_layers": 4, "num_experts": 8, "router_aux_loss_coef": 0.01}
IN_A_GRAPH = " in a graph"
# Layers that are cut in two; each rank's weights are others then.
CUT_NAMES = "bf16 cut", "bf16 cut in a graph", "bf16 cut through NCCL", "bf16 cut through NCCL in a graph"
CUT: tuple[tuple[str, dict[str, Any]], ...] = tuple((name, {"graph": "graph" in name}) for name in CUT_NAMES)


def family_cases() -> dict[str, dict[str, Any]]:
    """`dualpipev` of every family: called, and in a graph."""
    return {
        f"{family}{in_a}": {
            "parallel": {"pp": 2, "schedule": "dualpipev", "reshard": False},
            "memory": {"graph": bool(in_a)},
            "model": {**MODEL, "family": family, "compute": "bfloat16", "config": {**sizes, "num_hidden_layers": 4}},
        }
        for family, sizes in GPU_FAMILIES.items()
        for in_a in ("", IN_A_GRAPH)
    }


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
            *((("bf16 resharded in a graph", {"graph": True}), *CUT) if schedule == "dualpipev" else ()),
        ):
            compute = {"compute": "bfloat16"} if "bf16" in what else {}
            parallel = {"pp": 2, "schedule": schedule, "reshard": "resharded" in what or "graph" not in what}
            parallel |= {"partition": [0.5, 1.5, 1, 1]} if "cut" in what else {}
            parallel |= {"dispatch": "nccl"} if "NCCL" in what else {}
            found[f"{schedule} {what}"] = {
                "parallel": parallel,
                "memory": own,
                # Dropout in bf16: the processes' differ, so these are compared with each other only.
                "model": {**MODEL, **compute, "config": {**SIZES, "attention_dropout": 0.1 * ("bf16" in what)}},
            }
    return found


def run(device: str, folder: Path, by_family: bool) -> None:
    from forebay.moe.backends import peers_are_reachable
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    world = int(os.environ["WORLD_SIZE"])
    for name, sections in (family_cases() if by_family else cases(world)).items():
        settings = config(
            folder,
            SIZES,
            train={"batch": 8, "microbatch": 1, "sequence": 512, "steps": 9},
            device={"type": device, "threads": 0},
            **sections,
        )
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            found = gradients_of_steps(trainer, BF16_STEPS if "bf16" in name else STEPS)
            if trainer.pipeline is not None:
                near = "NCCL" not in name and peers_are_reachable(mesh.pipeline)
                assert ("copies" in trainer.pipeline.links) == near, name
            if trainer.cuda_graph is not None:
                assert trainer.cuda_graph.is_captured, f"{name}: {trainer.cuda_graph.eager_reason}"
        torch.save(found, folder / f"{name}-{mesh.rank}.pt")


@pytest.mark.gpu
@pytest.mark.multi
def test_pipelines_on_two_gpus(tmp_path: Path) -> None:
    folder = write_text(tmp_path, 2000)
    for world in (1, 2):
        torchrun(__file__, world, "cuda", folder, seconds=300)
    wanted = torch.load(tmp_path / "one process-0.pt")
    for schedule in SCHEDULES:
        for rank in range(2):
            keep = torch.load(tmp_path / f"{schedule} keep-{rank}.pt")
            for one, other in (
                ("keep", "offload"),
                ("bf16", "bf16 keep in a graph"),
                ("bf16", "bf16 offload in a graph"),
                *((("bf16", "bf16 resharded in a graph"),) if schedule == "dualpipev" else ()),
                *((CUT_NAMES[0], name) for name in CUT_NAMES[1:] if schedule == "dualpipev"),
            ):
                steps, same = (torch.load(tmp_path / f"{schedule} {name}-{rank}.pt") for name in (one, other))
                assert_same_steps(same, steps, f"{schedule}, {other}, rank {rank}")
            assert_near_steps(keep, wanted, schedule)  # the router's loss is made stage by stage


@pytest.mark.gpu
@pytest.mark.multi
def test_pipelines_of_every_family_on_two_gpus(tmp_path: Path) -> None:
    torchrun(__file__, 2, "cuda", write_text(tmp_path, 2000), "families", seconds=300)
    for family in GPU_FAMILIES:
        for rank in range(2):
            called, graph = (torch.load(tmp_path / f"{family}{in_a}-{rank}.pt") for in_a in ("", IN_A_GRAPH))
            assert_same_steps(graph, called, f"{family}, rank {rank}")


if __name__ == "__main__":
    with script_rank(sys.argv[1]):
        run(sys.argv[1], Path(sys.argv[2]), "families" in sys.argv[3:])
