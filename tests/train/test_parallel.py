"""The trainer on gloo ranks against one process: losses, gradient norms and parameters, for several meshes and families."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.train.config import Config, from_mapping
from forebay.train.mesh import Mesh
from forebay.train.trainer import IGNORE, Trainer
from tests.ranks import run_ranks

STEPS = 3
DEEPSEEK = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}


def mask_some(trainer: Trainer) -> None:
    """Make targets uneven over positions: the first half of some windows counts for nothing, one window is empty."""
    windows = trainer._windows

    def masked(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = windows(number)
        first = number * windows.batch + trainer.mesh.rank
        for row in range(len(targets)):
            position = first + row * trainer.mesh.size
            if position % 3 == 0:
                targets[row, : targets.shape[1] // 2] = IGNORE
            if position % 8 == 5:
                targets[row] = IGNORE
        return inputs, targets

    trainer._windows = masked  # type: ignore[assignment]


def run(trainer: Trainer) -> dict[str, Any]:
    mask_some(trainer)
    records = [trainer.step(n + 1) for n in range(STEPS)]
    named = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in trainer.model.named_parameters()}
    named |= {n: b for n, b in trainer.model.named_buffers() if "e_score" in n}
    return {
        "loss": [r.cross_entropy_loss for r in records],
        "balance": [r.load_balance_loss for r in records],
        "norm": [r.gradient_norm for r in records],
        "parameters": {n: t.detach().clone() for n, t in named.items()},
    }


def worst_error(got: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    errors = {
        k: max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(got[k], wanted[k], strict=True))
        for k in ("loss", "balance", "norm")
    }
    assert got["parameters"].keys() == wanted["parameters"].keys()
    for name, tensor in wanted["parameters"].items():
        errors[name] = float((got["parameters"][name] - tensor).abs().max())
    return errors


def on_ranks(rank: int, world: int, folder: str, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, float]]:
    found = []
    for reference, raw in cases:
        config = from_mapping(raw)
        with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
            got = run(trainer)
            if trainer.exchange is not None:
                assert trainer.exchange.live_handles == 0
        found.append(worst_error(got, torch.load(Path(folder) / reference)))
    return found


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},  # the conftest's
    "deepseek_v2": {"family": "deepseek_v2", "config": DEEPSEEK},
}


@pytest.mark.parametrize("world", [2, 4])
def test_n_processes_are_one(tiny: Callable[..., Config], tmp_path: Path, world: int) -> None:
    """The same global batch: also with policies that recompute and offload, regathered weights, and gradients reduced early.

    A sequence a microbatch, so that the load-balancing loss, a mean over microbatches, has the same terms.
    """
    cases, labels = [], []
    train = {"steps": STEPS, "batch": 8, "microbatch": 1, "clip": 0.5}
    for family, model in FAMILIES.items():
        with Trainer(tiny(model=model, train=train)) as alone:
            torch.save(run(alone), tmp_path / family)
        for ep in (n for n in (1, 2, 4) if n <= world):
            variants: list[dict[str, Any]] = [{"parallel": {"reshard": False}}]
            if family == "qwen3_moe":
                variants += [
                    {"parallel": {"reshard": True, "reduce": "microbatch"}},
                    {"memory": {"policy": {"*.mlp": "recompute", "*.self_attn": "offload"}, "recompute": "full"}},
                ]
            for variant in variants:
                config = tiny(
                    model=model, train=train, **{**variant, "parallel": {"ep": ep, **variant.get("parallel", {})}}
                )
                cases.append((family, config.to_dict()))
                labels.append((family, ep, variant))
    for rank, results in enumerate(run_ranks(on_ranks, world, str(tmp_path), cases)):
        for label, errors in zip(labels, results, strict=True):
            # fp32: sums over tokens are grouped by rank, those over experts by their rank. AdamW's first steps divide a
            # gradient by its own size, so where it is near 0 its rounding decides: hence absolute, at a rate of 1e-2.
            worst = max(errors, key=errors.__getitem__)
            assert errors[worst] < 1e-5, (rank, label, worst, errors[worst])
