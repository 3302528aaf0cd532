"""Steps that go over the symmetric exchange's capacity, on two GPUs: bitwise the run that had exact sizes.

The file is a script too: `torchrun --nproc-per-node 2 test_rerun_gpu.py DEVICE FOLDER` runs all cases, and leaves each rank's
parameters, optimizer, losses and which steps ran twice in FOLDER. On a CPU it goes through gloo, where nothing is left out.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

STEPS = 4
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 2,
    "attention_dropout": 0.1,
}
QWEN = {**SIZES, "num_experts": 8, "router_aux_loss_coef": 0.01}
GLM = {**SIZES, "n_routed_experts": 8, "intermediate_size": 256, "first_k_dense_replace": 1, "n_shared_experts": 1}
# With 512 tokens, 2 experts each and a factor of 1 there is room for 1024 slots: any routing that is not even goes over.
CASES = {
    f"{family}{' overlapped' if overlap else ''}": {
        "model": {"family": family, "config": sizes, "dtype": "float32"},
        "parallel": {"ep": 2, "overlap": overlap},
    }
    for family, sizes in (("qwen3_moe", QWEN), ("glm4_moe", GLM))
    for overlap in (False, True)
}
FACTORS = (0.0, 1.0, 2.0)  # exact sizes; too little; enough for anything


def run(device: str, folder: Path) -> None:
    from forebay.config import from_mapping
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    # One group for all cases: a run of its own would make one.
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, sections in CASES.items():
        for factor in FACTORS:
            dispatch = (
                {"dispatch": "symmetric", "capacity_factor": factor} if device == "cuda" else {"dispatch": "nccl"}
            )
            base: dict[str, Any] = {
                "data": {"source": "text", "path": str(folder / "a.txt"), "cache": str(folder / "cache")},
                "train": {"batch": 4, "microbatch": 1, "sequence": 512, "steps": STEPS, "router_bias_rate": 0.01},
                "device": {"type": device},
                "log": {"folder": str(folder / "run")},
                **sections,
            }
            base["parallel"] = {**base["parallel"], **dispatch}
            config = from_mapping(base, origin="test")
            with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
                records = [trainer.step(number) for number in range(1, STEPS + 1)]
                state = {n: local(p) for n, p in trainer.model.named_parameters()}
                state |= {n: local(b) for n, b in trainer.model.named_buffers()}
                for number, held in enumerate(trainer.optimizer.state.values()):
                    state |= {f"{number} {key}": local(value) for key, value in held.items()}
                state["drawn"] = torch.rand(1, device=trainer.device).cpu()
                enough = trainer.enough_capacity()
            figures = [(r.cross_entropy_loss, r.load_balance_loss, r.gradient_norm) for r in records]
            torch.save(
                (state, figures, [r.retry is not None for r in records], enough), folder / f"{name} {factor}-{rank}.pt"
            )
    dist.destroy_process_group()


def local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().cpu()


@pytest.mark.gpu
@pytest.mark.multi
def test_steps_over_the_capacity_are_exact(tmp_path: Path) -> None:
    start("cuda", tmp_path)
    for name in CASES:
        for rank in range(2):
            exact, too_little, enough = (torch.load(tmp_path / f"{name} {factor}-{rank}.pt") for factor in FACTORS)
            assert exact[2] == enough[2] == [False] * STEPS and too_little[2] == [True] * STEPS, name
            assert exact[3] is None and 1.0 < too_little[3] <= 2.0 and 1.0 < enough[3] <= 2.0, name
            assert too_little[3] == enough[3], f"{name}: what would have been enough is what was needed"
            for state, figures, *_ in (too_little, enough):
                assert figures == exact[1], name
                differing = [n for n, tensor in exact[0].items() if not torch.equal(tensor, state[n])]
                assert not differing, f"{name}: {differing}"


def start(device: str, folder: Path) -> None:
    (folder / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 2000)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": "src", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [*command, __file__, device, str(folder)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
