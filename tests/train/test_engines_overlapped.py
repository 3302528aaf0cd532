"""Gradients of a step with communication hidden are those of plain forward and backward."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import from_mapping
from forebay.errors import UsageError
from tests.ranks import run_ranks

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
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


def config(folder: str, overlap: bool, ep: int, compute: str, reshard: bool) -> Any:
    return from_mapping(
        {
            "model": {"family": "qwen3_moe", "config": TINY, "compute": compute},
            "data": {"source": "text", "path": folder + "/a.txt", "cache": folder + "/cache"},
            "train": {"batch": 12, "microbatch": 2, "sequence": 16, "steps": 4},
            "parallel": {"ep": ep, "overlap": overlap, "dispatch": "nccl", "reshard": reshard},
            "device": {"type": "cpu", "threads": 1},
            "log": {"folder": folder + "/run"},
        },
        origin="test",
    )


def compare(rank: int, world: int, folder: str) -> list[str]:
    from forebay.train.distributed import Mesh
    from forebay.train.trainer import Trainer

    wrong = []
    for compute, reshard in (("", False), ("bfloat16", False), ("bfloat16", True)):
        results = []
        for overlap in (False, True):
            settings = config(folder, overlap, world, compute, reshard)
            with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
                losses = [float(t) for t in trainer.gradients(1)]
                grads = {n: p.grad.full_tensor() for n, p in trainer.model.named_parameters()}  # type: ignore[union-attr]
                trainer.optimizer.zero_grad(set_to_none=True)
                records = [trainer.step(n) for n in (2, 3)]
                results.append((losses, grads, [(r.cross_entropy_loss, r.gradient_norm) for r in records]))
        plain, overlapped = results
        if plain[0] != overlapped[0] or (not compute and plain[2] != overlapped[2]):
            wrong.append(f"{compute}: {plain[0]} {overlapped[0]} {plain[2]} {overlapped[2]}")
        for name, wanted in plain[1].items():
            got = overlapped[1][name]
            if compute and (name in ("lm_head.weight", "model.embed_tokens.weight") or ".experts." in name):
                # Plain steps round each microbatch's gradient of these to bf16 before it is summed, this one does not.
                if (got - wanted).norm() > 2**-8 * wanted.norm() or torch.equal(got, wanted):
                    wrong.append(f"{compute} {name}: {float((got - wanted).norm() / wanted.norm())}")
            elif not torch.equal(got, wanted):
                wrong.append(f"{compute} {name}")
    return wrong


def test_gradients_are_those_of_plain_steps(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 400)
    assert run_ranks(compare, 2, str(tmp_path)) == [[], []]


def test_alone_and_compiled(tmp_path: Path) -> None:
    """One process has nothing to hide; its halves are cut all the same, and the load-balancing loss is counted."""
    from forebay.train.trainer import Trainer

    (tmp_path / "a.txt").write_text("the water comes unevenly and goes on evenly. " * 400)
    found = []
    for overlap in (False, True):
        plain = config(str(tmp_path), overlap, 1, "", False)
        settings = replace(plain, memory=replace(plain.memory, compile=True))
        with Trainer(settings) as trainer:
            losses = [float(t) for t in trainer.gradients(1)]
            found.append(
                (losses, {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
            )
    (losses, grads), (same_losses, same) = found
    assert losses == pytest.approx(same_losses, rel=1e-6) and grads.keys() == same.keys()
    for name, grad in grads.items():  # fp32; sums over microbatches in another order
        assert (grad - same[name]).norm() <= 1e-6 * grad.norm(), name


@pytest.mark.parametrize(
    "section", [{"memory": {"policy": "offload"}}, {"model": {"family": "qwen3_moe", "loss": "transformers"}}]
)
def test_refusals(section: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"parallel.overlap"):
        from_mapping({"model": {"family": "qwen3_moe"}, **section, "parallel": {"overlap": True}}, origin="test")
