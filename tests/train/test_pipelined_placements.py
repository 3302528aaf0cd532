"""Placements under pipelines: losses and gradients are bitwise those of keeping everything, step after step; a region is
recomputed once, whether its backward is split or whole; and split backwards give the gradients of whole ones."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from forebay.moe import experts_op
from forebay.train.config import from_mapping
from tests.ranks import run_ranks

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "mlp_only_layers": [1],
    "router_aux_loss_coef": 0.01,
}
SCHEDULES = ("dualpipev", "zbv", "interleaved-1f1b")
PLACEMENTS: dict[str, dict[str, Any]] = {
    "recompute": {"policy": "recompute"},
    "recompute attention": {"policy": {"*.self_attn": "recompute"}},
    "offload": {"policy": "offload"},
    "offload all": {"policy": "offload", "offload": "all"},
    "mixed": {"policy": {"*.self_attn": "offload", "*.mlp": "recompute"}},
}
STEPS = (1, 2, 3)  # offloading measures in the first one and follows its plan from then on
MICROBATCHES = 6

Grads = dict[str, torch.Tensor]


def config(folder: str, world: int, schedule: str, **memory: Any) -> Any:
    sharing = world // 2
    return from_mapping(
        {
            "model": {"family": "qwen3_moe", "config": TINY},
            "data": {"source": "text", "path": folder + "/a.txt", "cache": folder + "/cache"},
            "train": {"batch": MICROBATCHES * sharing, "microbatch": 1, "sequence": 16, "steps": 4},
            "parallel": {"dispatch": "nccl", "pp": 2, "ep": sharing, "schedule": schedule},
            "memory": memory,
            "device": {"type": "cpu", "threads": 1},
            "log": {"folder": folder + "/run"},
        },
        origin="test",
    )


class Ran:
    """Steps of one configuration on this process. Parameters stay as they are.

    Attributes:
        steps: of each, the losses and this process's gradients by name.
        wrong: what the manager left undone.
    """

    def __init__(self, folder: str, world: int, schedule: str, **memory: Any) -> None:
        from forebay.train.mesh import Mesh
        from forebay.train.trainer import Trainer

        self.steps: list[tuple[list[float], Grads]] = []
        self.wrong: list[str] = []
        settings = config(folder, world, schedule, **memory)
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            for number in STEPS:
                losses = mesh.sum(torch.stack(trainer.gradients(number))).tolist()
                grads = {n: p.grad.detach() for n, p in trainer.model.named_parameters() if p.grad is not None}
                trainer.optimizer.zero_grad(set_to_none=True)
                local = {n: g.to_local() if hasattr(g, "to_local") else g for n, g in grads.items()}  # type: ignore[attr-defined]
                self.steps.append((losses, local))
                if trainer.memory.ledger.live_tickets:
                    self.wrong.append(f"step {number}: tickets are left: {trainer.memory.ledger.holdings()[:3]}")
            policy = memory["policy"]
            if policy == "offload" or "offload" in dict(policy if isinstance(policy, dict) else {}).values():
                plan = trainer.memory.plan
                if plan is None or not plan.planned_bytes or not trainer.memory.report().moved_bytes:
                    self.wrong.append("nothing was offloaded")
            if policy == "recompute" and set(trainer.memory.placements.values()) != {"recompute"}:
                self.wrong.append(f"placements are {trainer.memory.placements}")


def differences(got: Ran, wanted: Ran) -> list[str]:
    wrong = got.wrong + wanted.wrong
    for number, ((losses, grads), (wanted_losses, wanted_grads)) in enumerate(
        zip(got.steps, wanted.steps, strict=True), 1
    ):
        if losses != wanted_losses:
            wrong.append(f"step {number}: losses {losses} for {wanted_losses}")
        if grads.keys() != wanted_grads.keys():
            wrong.append(f"step {number}: gradients of other parameters")
        wrong += [f"step {number}: {n}" for n in grads if not torch.equal(grads[n], wanted_grads[n])]
    return wrong


def placements(rank: int, world: int, folder: str, names: list[str]) -> dict[str, list[str]]:
    """What differs from `keep`, by case."""
    found = {}
    for schedule in SCHEDULES:
        wanted = Ran(folder, world, schedule, policy="keep")
        for name in names:
            found[f"{schedule}, {name}"] = differences(Ran(folder, world, schedule, **PLACEMENTS[name]), wanted)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 400)
    return str(tmp_path)


@pytest.mark.parametrize(("world", "names"), [(2, list(PLACEMENTS)), (4, ["offload all", "mixed"])])
def test_placements_change_no_bit(folder: str, world: int, names: list[str]) -> None:
    for found in run_ranks(placements, world, folder, names):
        assert {case: wrong for case, wrong in found.items() if wrong} == {}


def calls(rank: int, world: int, folder: str) -> dict[str, tuple[int, int, int]]:
    """By schedule: (layers here, calls of an attention a layer and microbatch, first products a MoE layer and microbatch)."""
    from forebay.models.families import moe_blocks
    from forebay.train.mesh import Mesh
    from forebay.train.trainer import Trainer

    found = {}
    for schedule in (*SCHEDULES, "1f1b"):
        settings = config(folder, world, schedule, policy="recompute")
        attended: list[str] = []
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            layers = [(n, m) for n, m in trainer.model.named_modules() if n.endswith("self_attn")]
            for name, module in layers:
                module.register_forward_hook(lambda *_, name=name: attended.append(name))
            gate_up = {id(block.experts.gate_up_proj): block.path for block in moe_blocks(trainer.model)}
            made: list[torch.Size] = []

            def count(rows: Any, matrix: Any, offs: Any, original: Any = experts_op.rows_by_matrix) -> Any:
                made.append(matrix.shape)
                return original(rows, matrix, offs)

            with mock.patch.object(experts_op, "rows_by_matrix", count):
                trainer.gradients(1)
            # [E, H, 2I]: products with gate_up; the ones that make h, and not those that make dx from it.
            first = sum(shape[1:] == (32, 32) for shape in made)
        per_layer = {name: attended.count(name) / MICROBATCHES for name, _ in layers}
        assert len(set(per_layer.values())) == 1, per_layer
        found[schedule] = (len(layers), next(iter(per_layer.values())), first / MICROBATCHES / len(gate_up))
    return found
