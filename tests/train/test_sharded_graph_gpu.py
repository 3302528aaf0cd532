"""Steps of sharded processes in a CUDA graph, on two and four GPUs: the same bits as the steps that are called.

The file is a script too: `torchrun --nproc-per-node N test_sharded_graph_gpu.py FOLDER` runs all cases of N processes, and leaves
each rank's figures and part of the model in FOLDER.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.common import (
    BALANCED,
    GPU_FAMILIES,
    GPU_PLACEMENTS,
    MIXED_PRECISION,
    config,
    differing,
    figures_of,
    script_rank,
    state_of,
    torchrun,
    write_text,
)

STEPS = 7
MOVING_STEPS = 20  # where something is offloaded, several graphs are timed first
ALONE = {"overlap": False, "reshard": False}
EXPERTS = {"ep": 2, "overlap": True, "reshard": False, "dispatch": "symmetric", "capacity_factor": 2.0}
PIPELINE = {"pp": 2, "schedule": "dualpipev", "reshard": False}
APART = {"source": "stdlib", "path": "", "packing": "documents"}
FOUR_LAYERS = {**GPU_FAMILIES["glm4_moe"], "num_hidden_layers": 4}  # a stage of a pipeline has one at least
PLAIN = "plain"  # FSDP2's own hooks gather weights and reduce gradients, without an engine, in another order
# Name -> what is apart from two microbatches of each process.
Case = dict[str, dict[str, Any]]
CASES: dict[int, dict[str, Case]] = {
    2: {
        **{f"{family} in bf16": {"model": {"family": family}} for family in BALANCED},
        **{family: {"model": {"family": family, **MIXED_PRECISION}} for family in GPU_FAMILIES},
        **{name: {"memory": memory, "model": MIXED_PRECISION} for name, memory in GPU_PLACEMENTS.items()},
        "documents apart": {"data": APART, "model": MIXED_PRECISION},
        "experts, documents apart": {"parallel": EXPERTS, "model": {"family": "qwen3_moe"}, "data": APART},
        "pipelines, documents apart": {
            "parallel": PIPELINE,
            "model": {**MIXED_PRECISION, "config": FOUR_LAYERS},
            "data": APART,
        },
        "one microbatch": {"train": {"microbatch": 4}, "model": MIXED_PRECISION},
        "replicas": {"parallel": {"replicate": 2}, "model": MIXED_PRECISION},
        "replicas, resharded": {"parallel": {"replicate": 2, "reshard": True}, "model": MIXED_PRECISION},
        PLAIN: {"model": {**MIXED_PRECISION, "config": {**GPU_FAMILIES["glm4_moe"], "attention_dropout": 0.0}}},
    },
    4: {
        "sharded": {"model": MIXED_PRECISION},
        "replicas": {"parallel": {"replicate": 2}, "model": MIXED_PRECISION},
        "experts": {"parallel": EXPERTS, "model": MIXED_PRECISION},
        "pipelines": {"parallel": PIPELINE, "model": {**MIXED_PRECISION, "config": FOUR_LAYERS}},
        "sharded, offload": {"memory": GPU_PLACEMENTS["all leaves"], "model": MIXED_PRECISION},
        "experts, gpt_oss": {"parallel": EXPERTS, "model": {"family": "gpt_oss"}},
        "pipelines, 1f1b": {
            "parallel": {**PIPELINE, "schedule": "1f1b"},
            "model": {"family": "qwen3_moe", **MIXED_PRECISION},
        },
    },
}


def run(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name, case in CASES[world].items():
        for captured in (False, True):
            found = trained(folder, world, case, captured, engine=captured or name != PLAIN)
            torch.save(found, folder / f"{name}, {captured}-{rank}.pt")


def trained(folder: Path, world: int, case: Case, captured: bool, engine: bool) -> tuple[Any, Any, bool]:
    """This rank's state and figures after all steps, and whether memory was planned to move.

    Args:
        captured: steps are replayed.
        engine: they are those of a graph, replayed or not.
    """
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    model = {"family": "glm4_moe", "dtype": "bfloat16", **case.get("model", {})}
    memory = case.get("memory", {})
    steps = STEPS if memory.get("policy", "keep") in ("keep", "recompute") else MOVING_STEPS
    settings = config(
        folder,
        # dq of flash attention's backward differs between two calls
        model={"attention": "eager", "config": GPU_FAMILIES[model["family"]], **model},
        train={"batch": 4 * world, "microbatch": 2, "sequence": 512, "steps": steps, "router_bias_rate": 0.01}
        | case.get("train", {}),
        memory={**memory, "graph": engine},
        parallel={**ALONE, **case.get("parallel", {})},
        device={"type": "cuda", "threads": 0},
        data=case.get("data", {}),
    )
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        graph = trainer.cuda_graph
        if graph is not None and not captured:
            graph._may_capture = lambda: False
        figures = [figures_of(trainer.step(number)) for number in range(1, steps + 1)]
        moved = trainer.memory.plan is not None and trainer.memory.plan.planned_bytes > 0
        assert graph is None or (graph.is_captured, graph.eager_reason) == (captured, None)
        return state_of(trainer), figures, moved


@pytest.mark.gpu
@pytest.mark.multi
@pytest.mark.parametrize("world", CASES)
def test_replayed_steps_of_sharded_processes_have_the_bits_of_called_ones(tmp_path: Path, world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    torchrun(__file__, world, write_text(tmp_path, 2000))
    for name, case in CASES[world].items():
        for rank in range(world):
            (state, figures, _), (same_state, same_figures, moved) = (
                torch.load(tmp_path / f"{name}, {captured}-{rank}.pt") for captured in (False, True)
            )
            if name == PLAIN:  # the first step's figures, of the same weights; bf16 has 8 bits
                assert figures[0] == pytest.approx(same_figures[0], rel=1e-3)
                continue
            assert figures == same_figures and not differing(state, same_state), f"{name}, rank {rank}"
            assert moved or case.get("memory", {}).get("offload") != "all", f"{name}, rank {rank}"


if __name__ == "__main__":
    with script_rank("cuda"):
        run(Path(sys.argv[1]))
