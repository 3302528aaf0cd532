"""Steps that exceed the symmetric dispatcher's capacity, on two GPUs: bitwise the run with exact sizes.

The file is a script too: `torchrun --nproc-per-node 2 test_capacity_retry_gpu.py DEVICE FOLDER` runs all cases, and leaves each
rank's parameters, optimizer, losses and which steps ran twice in FOLDER. On a CPU it uses gloo, where nothing is left out.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.common import (
    BALANCED,
    GPU_FAMILIES,
    config,
    differing,
    figures_of,
    script_rank,
    state_of,
    torchrun,
    write_text,
)

STEPS = 4
# With 512 tokens, 2 experts each and a factor of 1 there is room for 1024 rows: any routing that is not even exceeds it.
CASES: dict[str, dict[str, Any]] = {
    f"{family}{' overlapped' if overlap else ''}": {
        "model": {"family": family, "config": GPU_FAMILIES[family], "dtype": "float32"},
        "parallel": {"ep": 2, "overlap": overlap},
    }
    for family in BALANCED
    for overlap in (False, True)
}
FACTORS = (0.0, 1.0, 2.0)  # exact sizes; too little; enough for anything


def run(device: str, folder: Path) -> None:
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    train = {"batch": 4, "microbatch": 1, "sequence": 512, "steps": STEPS, "router_bias_rate": 0.01}
    for name, sections in CASES.items():
        for factor in FACTORS:
            dispatch = (
                {"dispatch": "symmetric", "capacity_factor": factor} if device == "cuda" else {"dispatch": "nccl"}
            )
            changes = {**sections, "parallel": {**sections["parallel"], **dispatch}}
            settings = config(folder, train=train, device={"type": device, "threads": 0}, **changes)
            with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
                records = [trainer.step(number) for number in range(1, STEPS + 1)]
                state = state_of(trainer)
                state["drawn"] = torch.rand(1, device=trainer.device).cpu()
                enough = trainer.enough_capacity()
            figures = [figures_of(r) for r in records]
            torch.save(
                (state, figures, [r.retry is not None for r in records], enough),
                folder / f"{name} {factor}-{mesh.rank}.pt",
            )


@pytest.mark.gpu
@pytest.mark.multi
def test_steps_over_the_capacity_are_exact(tmp_path: Path) -> None:
    torchrun(__file__, 2, "cuda", write_text(tmp_path, 2000), seconds=300)
    for name in CASES:
        for rank in range(2):
            exact, too_little, enough = (torch.load(tmp_path / f"{name} {factor}-{rank}.pt") for factor in FACTORS)
            assert exact[2] == enough[2] == [False] * STEPS and too_little[2] == [True] * STEPS, name
            assert exact[3] is None and 1.0 < too_little[3] <= 2.0 and 1.0 < enough[3] <= 2.0, name
            assert too_little[3] == enough[3], f"{name}: what would have been enough is what was needed"
            for state, figures, *_ in (too_little, enough):
                assert figures == exact[1] and not differing(exact[0], state), name


@pytest.mark.gpu
def test_generators_of_a_gpu() -> None:
    from forebay.train.generators import SavedRngStates

    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = SavedRngStates(device)
        first = torch.rand(4, device=device)
        before.restore()
        second = torch.rand(4, device=device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)


if __name__ == "__main__":
    with script_rank(sys.argv[1]):
        run(sys.argv[1], Path(sys.argv[2]))
