"""Losses and gradients of pipelines, in every schedule, on 2 and 4 ranks, with and without expert parallelism, are those of one
process; and what ran is the schedule's plan."""

from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.train.config import from_mapping
from tests.ranks import run_ranks

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "mlp_only_layers": [1],
    "router_aux_loss_coef": 0.01,
}
SCHEDULES = ("1f1b", "interleaved-1f1b", "zbv", "dualpipev")
TOLERANCE = 1e-6  # of the gradient's norm: the same sums in another order, fp32


def config(folder: str, **parallel: Any) -> Any:
    sections: dict[str, Any] = {
        "model": {"family": "qwen3_moe", "config": TINY},
        "data": {"source": "text", "path": folder + "/a.txt", "cache": folder + "/cache"},
        "train": {"batch": 16, "microbatch": 1, "sequence": 16, "steps": 4, "eval_every": 1, "eval_batches": 1},
        "parallel": {"dispatch": "nccl", **parallel},
        "device": {"type": "cpu", "threads": 1},
        "log": {"folder": folder + "/run"},
    }
    for key in ("memory", "model"):
        sections.setdefault(key, {}).update(sections["parallel"].pop(key, {}))
    return from_mapping(sections, origin="test")


def results(rank: int, world: int, folder: str, cases: list[dict[str, Any]]) -> list[Any]:
    """Of each case: loss, balance, gradients by name (whole), whether what ran was the plan, validation."""
    from forebay.train.mesh import Mesh
    from forebay.train.trainer import Trainer

    found = []
    for parallel in cases:
        settings = config(folder, **parallel)
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            losses = mesh.sum(torch.stack(trainer.gradients(1)))
            grads = {}
            for name, p in trainer.model.named_parameters():
                g = p.grad
                grads[name] = (g.full_tensor() if hasattr(g, "full_tensor") else g).numpy() if g is not None else None
            engine = trainer._gradients
            ran = engine is None or tuple(engine.ran) == engine.plan.actions[mesh.pp_rank]  # type: ignore[union-attr]
            found.append((losses.tolist(), grads, ran, trainer.evaluate()))
            trainer.optimizer.zero_grad(set_to_none=True)
    return found


def cases_of(world: int) -> list[dict[str, Any]]:
    meshes = {2: [(2, 1)], 4: [(2, 2), (4, 1)]}[world]
    cases = [{"pp": pp, "ep": ep, "schedule": name} for name in SCHEDULES for pp, ep in meshes]
    return cases + ([{"pp": 2, "ep": 1, "schedule": "dualpipev"}] if world == 4 else [])  # sharded by FSDP2 alone


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_one_process(tmp_path: Path, world: int) -> None:
    (tmp_path / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 400)
    ((wanted_losses, wanted, _, wanted_validation),) = run_ranks(results, 1, str(tmp_path), [{}])[0]
    cases = cases_of(world)
    by_rank = run_ranks(results, world, str(tmp_path), cases)
    for number, case in enumerate(cases):
        seen = set()
        for rank in range(world):
            losses, grads, ran, validation = by_rank[rank][number]
            assert ran, f"{case}: rank {rank} did not run its plan"
            assert losses == pytest.approx(wanted_losses, rel=1e-6), case
            assert validation == pytest.approx(wanted_validation, rel=1e-6), case
            for name, got in grads.items():
                seen.add(name)
                want = torch.from_numpy(wanted[name])
                error = (torch.from_numpy(got) - want).norm() / want.norm()
                assert error <= TOLERANCE, f"{case}: {name} is off by {error}"
        assert seen == set(wanted), case
