"""The trainer on gloo ranks against one process: losses, gradient norms and parameters, for several meshes and families."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import Config, from_mapping
from forebay.errors import RunError, UsageError
from forebay.train import parallel
from forebay.train.distributed import Mesh
from forebay.train.trainer import IGNORE, Trainer
from tests.ranks import run_ranks
from tests.train.common import DEEPSEEK, GLM, whole

STEPS = 3
# AdamW's first steps divide a gradient by its own size, so where it is near 0 its rounding would decide.
EVEN = {"eps": 1e-4}


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
    named = {n: whole(p) for n, p in trainer.model.named_parameters()}
    named |= {n: b for n, b in trainer.model.named_buffers() if "e_score" in n}
    return {
        "loss": [r.cross_entropy_loss for r in records],
        "balance": [r.load_balance_loss for r in records],
        "norm": [r.gradient_norm for r in records],
        "parameters": {n: t.clone() for n, t in named.items()},
    }


def worst_error(got: dict[str, Any], wanted: dict[str, Any]) -> tuple[float, str]:
    """The largest error and what has it: relative for losses and norms, absolute for parameters."""
    errors = {
        k: max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(got[k], wanted[k], strict=True))
        for k in ("loss", "balance", "norm")
        if wanted[k] is not None
    }
    assert got["parameters"].keys() == wanted["parameters"].keys()
    for name, tensor in wanted["parameters"].items():
        errors[name] = float((got["parameters"][name] - tensor).abs().max())
    return max((error, what) for what, error in errors.items())


def on_ranks(rank: int, world: int, folder: str, cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[float, str]]:
    found = []
    for reference, raw in cases:
        config = from_mapping(raw)
        with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
            got = run(trainer)
            if trainer.dispatcher is not None:
                assert trainer.dispatcher.live_handles == 0
        found.append(worst_error(got, torch.load(Path(folder) / reference)))
    return found


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},  # the conftest's
    "deepseek_v2": {"family": "deepseek_v2", "config": {**DEEPSEEK, "topk_method": "greedy"}},
    "glm4_moe": {"family": "glm4_moe", "config": GLM},  # has a router's bias, moved by all ranks' counts
}


def variants_of(family: str, world: int, ep: int) -> list[dict[str, Any]]:
    """The other families' routers, on each mesh in one of both; one family in every way, in turn. test_matrix.py has more."""
    if family != "qwen3_moe":
        return [{"parallel": {"reshard": False}}] if (ep == world) == (family == "glm4_moe") else []
    policy = {"*.mlp": "recompute", "*.self_attn": "offload"}
    ways: dict[int, list[dict[str, Any]]] = {
        1: [{"parallel": {"reshard": False}}],
        2: [{"parallel": {"reshard": True, "reduce": "microbatch"}}, {"parallel": {"overlap": True}}],
        4: [{"memory": {"policy": policy, "recompute": "full", "offload": "all"}}],
    }
    return ways[ep]


@pytest.mark.parametrize("world", [2, 4])
def test_n_processes_are_one(tiny: Callable[..., Config], tmp_path: Path, world: int) -> None:
    """The same global batch: also with policies that recompute and offload, regathered weights, and gradients reduced early.

    A sequence a microbatch, so that the load-balancing loss, a mean over microbatches, has the same terms.
    """
    cases, labels = [], []
    train = {"steps": STEPS, "batch": 8, "microbatch": 1, "clip": 0.5, "router_bias_rate": 0.01}
    for family, model in FAMILIES.items():
        with Trainer(tiny(model=model, train=train, optimizer=EVEN)) as alone:
            torch.save(run(alone), tmp_path / family)
        for ep in (n for n in (1, 2, 4) if n <= world):
            for variant in variants_of(family, world, ep):
                parallel = {"ep": ep, **variant.get("parallel", {})}
                changes = {**variant, "parallel": parallel, "optimizer": EVEN}
                cases.append((family, tiny(model=model, train=train, **changes).to_dict()))
                labels.append((family, ep, variant))
    for rank, results in enumerate(run_ranks(on_ranks, world, str(tmp_path), cases)):
        for label, (error, what) in zip(labels, results, strict=True):
            # fp32: sums over tokens are grouped by rank, those over experts by their rank.
            assert error < 1e-5, (rank, label, what, error)


def test_experts_that_divide_unevenly_and_tied_weights(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """6 experts over 2, each 3 over 2 more: these are cut along another dimension. Larger microbatches; no balance loss."""
    model = {
        "config": {**tiny().model.config, "num_experts": 6, "router_aux_loss_coef": 0.0, "tie_word_embeddings": True}
    }
    train = {"steps": STEPS, "batch": 16, "microbatch": 2}
    with Trainer(tiny(model=model, train={**train, "microbatch": 8}, optimizer=EVEN)) as alone:
        torch.save({**run(alone), "balance": None}, tmp_path / "alone")
    case = ("alone", tiny(model=model, train=train, optimizer=EVEN, parallel={"ep": 2}).to_dict())
    for results in run_ranks(on_ranks, 4, str(tmp_path), [case]):
        assert results[0][0] < 1e-5, results


def in_bfloat16(rank: int, world: int, raws: list[dict[str, Any]]) -> list[list[Any]]:
    """Losses of each configuration; that what is sharded, its gradients and states are fp32; validation."""
    found = []
    for raw in raws:
        config = from_mapping(raw)
        with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
            losses = [trainer.step(n + 1).cross_entropy_loss for n in range(STEPS)]
            trainer.gradients(STEPS + 1)
            held = [p for p in trainer.model.parameters()] + [p.grad for p in trainer.model.parameters()]
            held += [v for s in trainer.optimizer.state.values() for v in s.values()]
            for p, state in trainer.optimizer.state.items():  # DTensors, so that a checkpoint knows the whole
                assert state["exp_avg"].placements == p.placements and state["exp_avg"].device_mesh == p.device_mesh
            found.append([losses, sorted({str(t.dtype) for t in held}), trainer.evaluate()])
    return found


def test_compute_in_bfloat16(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """On one process, through FSDP2 too, and on two: fp32 shards, and losses that agree within bf16's rounding."""
    train = {"steps": STEPS, "batch": 8, "microbatch": 2, "eval_every": 1}
    mixed = {"compute": "bfloat16"}
    with Trainer(tiny(train=train)) as trainer:
        wanted = [trainer.step(n + 1).cross_entropy_loss for n in range(STEPS)] + [trainer.evaluate()]
    with Trainer(tiny(train=train, model=mixed)) as trainer:
        alone = [trainer.step(n + 1).cross_entropy_loss for n in range(STEPS)] + [trainer.evaluate()]
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert not torch.distributed.is_initialized(), "the trainer's own group outlived it"
    assert alone == pytest.approx(wanted, rel=2**-8) and alone != wanted
    raws = [tiny(train=train, model=mixed, parallel={"ep": ep}).to_dict() for ep in (1, 2)]
    for results in run_ranks(in_bfloat16, 2, raws):
        for losses, dtypes, validation in results:
            assert [*losses, validation] == pytest.approx(wanted, rel=2**-8)
            assert dtypes == ["torch.float32"]


def refused(rank: int, world: int, raws: list[dict[str, Any]]) -> list[str]:
    messages = []
    for raw in raws:
        config = from_mapping(raw)
        with pytest.raises(UsageError) as caught, Mesh.open(config) as mesh:
            Trainer(config, mesh).close()
        messages.append(str(caught.value))
    return messages


def test_models_that_cannot_be_shared(tiny: Callable[..., Config]) -> None:
    dense = {
        "family": "llama",
        "config": {k: v for k, v in DEEPSEEK.items() if "hidden" in k or "heads" in k},
    }
    odd = {"config": {**tiny().model.config, "num_experts": 5}}
    strange = {"family": "gpt2", "loss": "transformers", "config": {"n_layer": 1, "n_embd": 8, "n_head": 1}}
    raws = [
        tiny(model=dense, parallel={"ep": 2}).to_dict(),
        tiny(model=odd, parallel={"ep": 2}).to_dict(),
        tiny(model=strange).to_dict(),
    ]
    for messages in run_ranks(refused, 2, raws):
        assert messages[0] == "parallel.ep = 2, but this model has no experts; valid is 1"
        assert messages[1] == "parallel.ep = 2 does not divide the model's 5 experts; valid are 1, 5"
        assert "GPT2LMHeadModel has no decoder layers that Forebay knows; train it in one process" in messages[2]


def test_nothing_to_clip(tiny: Callable[..., Config]) -> None:
    with Trainer(tiny()) as trainer:
        with pytest.raises(RunError, match=r"no parameter has a gradient to clip: .*backward"):
            parallel.clip_gradients(trainer.model.parameters(), 1.0, trainer.mesh)

        class Two:
            size, device = 2, torch.device("cpu")

            def sum(self, tensor: torch.Tensor) -> torch.Tensor:
                return tensor + 9.0  # the other one's

        assert float(parallel.clip_gradients(trainer.model.parameters(), 1.0, Two())) == 3.0  # type: ignore[arg-type]
