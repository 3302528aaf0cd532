"""Steps in a CUDA graph, the default, for every family that the trainer takes: the same bits as the steps that are called.

The file is a script too: `torchrun --nproc-per-node N test_every_family_gpu.py FOLDER FAMILY...` runs the cases of N processes,
and leaves what differs of each rank in FOLDER.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config.fast_path import FAMILIES
from tests.models.conftest import IN_ONE_STAGE
from tests.train.common import (
    MIXED_PRECISION,
    config,
    differing,
    figures_of,
    script_rank,
    state_of,
    torchrun,
    write_text,
)
from tests.train.families import IN_GROUPS, fields_of

STEPS = 6
# By processes, [parallel] of each case.
MESHES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"alone": {}},
    2: {"shared": {}, "experts": {"ep": 2}, "pipeline": {"pp": 2}},
}
OPEN = {"overlap": "auto", "reshard": "auto", "capacity_factor": "auto"}


def meshes_of(family: str, world: int) -> dict[str, dict[str, Any]]:
    return {
        name: parallel
        for name, parallel in MESHES[world].items()
        if ("ep" not in parallel or family in IN_GROUPS) and ("pp" not in parallel or family not in IN_ONE_STAGE)
    }


def run(folder: Path, families: list[str]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for family in families:
        for name, parallel in meshes_of(family, world).items():
            begun = time.perf_counter()
            try:
                (state, figures), (same, same_figures) = (trained(folder, family, parallel, c) for c in (False, True))
                found = [*differing(state, same), *(["figures"] if figures != same_figures else [])]
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"]
            print(f"{family}, {name}, rank {rank}, {time.perf_counter() - begun:.1f} s: {found[:3]}", flush=True)
            (folder / f"{family}, {name}-{rank}.json").write_text(json.dumps(found))


def trained(folder: Path, family: str, parallel: dict[str, Any], captured: bool) -> tuple[Any, Any]:
    """This rank's state and figures after all steps."""
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    layers = 4 if "pp" in parallel else 2  # two stages of each rank in a V
    settings = config(
        folder,
        # dq of flash attention's backward differs between two calls
        model={"attention": "eager", "family": family, "config": fields_of(family, layers), **MIXED_PRECISION},
        train={"batch": 8, "microbatch": 2, "sequence": 128, "steps": STEPS, "router_bias_rate": 0.01},
        memory={"graph": "auto"},
        parallel={**OPEN, **parallel},
        device={"type": "cuda", "threads": 0},
    )
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        graph = trainer.cuda_graph
        assert graph is not None, "auto chose no graph"
        if not captured:
            graph._may_capture = lambda: False
        figures = [figures_of(trainer.step(number)) for number in range(1, STEPS + 1)]
        assert (graph.is_captured, graph.eager_reason) == (captured, None), graph.eager_reason
        return state_of(trainer), figures


@pytest.mark.gpu
@pytest.mark.multi
@pytest.mark.parametrize("world", MESHES)
def test_replayed_steps_of_every_family_have_the_bits_of_called_ones(tmp_path: Path, world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    torchrun(__file__, world, write_text(tmp_path, 2000), *FAMILIES, seconds=1200)
    for family in FAMILIES:
        for name in meshes_of(family, world):
            for rank in range(world):
                assert json.loads((tmp_path / f"{family}, {name}-{rank}.json").read_text()) == []


if __name__ == "__main__":
    with script_rank("cuda"):
        run(Path(sys.argv[1]), sys.argv[2:])
