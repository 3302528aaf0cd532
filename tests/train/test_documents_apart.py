"""Documents of a sequence stay apart in engines: bitwise as in plain steps, with other boundaries in each microbatch and step."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import masking_utils

from forebay.config import Config
from forebay.pipeline.arguments import LayerArguments
from forebay.train import trainer as trainer_module
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer
from tests.models.conftest import build_tiny
from tests.ranks import run_ranks
from tests.train.common import WIDE, config, differing, figures_of, state_of, write_documents

STEPS = 6
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**WIDE, "num_hidden_layers": 4},
    "mixtral": {
        **{name: WIDE[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")},
        "num_hidden_layers": 3, "intermediate_size": 16, "num_local_experts": 4, "sliding_window": 8,
    },
}  # fmt: skip


def apart(folder: Path, family: str = "qwen3_moe", longest: int = 14, **changes: dict[str, Any]) -> Config:
    """Documents of up to 14 bytes, so each sequence of 32 has boundaries."""
    return config(
        folder,
        FAMILIES[family],
        model={"family": family, **changes.pop("model", {})},
        data={**write_documents(folder, longest), "validation": 0.2},
        train={"batch": 8, "microbatch": 2, "sequence": 32, "steps": STEPS, "eval_every": 1, "eval_batches": 1},
        optimizer={"fused": False},
        **changes,
    )


def outcome(settings: Config) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """State, and figures of steps."""
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        figures = [figures_of(trainer.step(n)) for n in range(1, STEPS + 1)]
        return state_of(trainer), figures


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_as_a_graph_has_them_have_the_bits_of_plain_ones(tmp_path: Path, family: str, attention: str) -> None:
    model = {"attention": attention}
    state, figures = outcome(apart(tmp_path, family, model=model))
    assert len(set(figures)) == STEPS
    graph = {"memory": {"graph": True}, "parallel": {"overlap": False, "reshard": False}}
    same, same_figures = outcome(apart(tmp_path, family, model=model, **graph))
    assert figures == same_figures and not differing(state, same)


@pytest.mark.parametrize("longest", [14, 150])
def test_plain_steps_and_evaluations_do_not_ask_where_documents_begin(
    tmp_path: Path, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And have the bits of steps in which transformers asks, also where no document begins in a microbatch."""
    asked: list[bool] = []
    find = masking_utils.find_packed_sequence_indices

    def found(positions: torch.Tensor) -> torch.Tensor | None:
        asked.append(find(positions) is not None)
        return find(positions)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", found)

    def run() -> tuple[dict[str, torch.Tensor], list[Any]]:
        settings = apart(tmp_path, longest=longest)
        with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
            figures = [(figures_of(trainer.step(n)), trainer.evaluate()) for n in range(1, 4)]
            return state_of(trainer), figures

    state, figures = run()
    assert not asked
    with monkeypatch.context() as patch:
        microbatches = Trainer._microbatches
        patch.setattr(Trainer, "_microbatches", lambda self, batch, called: microbatches(self, batch, False))
        patch.setattr(trainer_module, "documents_apart", nullcontext)
        same, same_figures = run()
    assert figures == same_figures and not differing(state, same)
    assert set(asked) == ({True} if longest == 14 else {True, False})


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_overlapped_steps_have_the_bits_of_plain_ones(tmp_path: Path, policy: str) -> None:
    state, figures = outcome(apart(tmp_path))
    parallel = {"overlap": True, "reshard": False}
    same, same_figures = outcome(apart(tmp_path, memory={"policy": policy}, parallel=parallel))
    assert figures == same_figures and not differing(state, same)


def losses(rank: int, world: int, folder: Path, parallel: dict[str, Any]) -> list[Any]:
    settings = apart(folder, parallel=parallel)
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        return [(trainer.step(n).cross_entropy_loss, trainer.evaluate()) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 2, "schedule": "1f1b"},
        {"pp": 2, "schedule": "dualpipev"},
        {"ep": 2, "overlap": True, "dispatch": "nccl"},
    ],
    ids=str,
)
def test_several_processes(tmp_path: Path, parallel: dict[str, Any]) -> None:
    """The order of sums differs between one process and two: fp32 has 24 bits."""
    plain = losses(0, 1, tmp_path, {})
    found = run_ranks(losses, 2, tmp_path, parallel)
    for ranks in found:
        for got, wanted in zip(ranks, plain, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)


def test_arguments_are_made_without_the_last_norm() -> None:
    """Its weight is sharded between steps. Granite's embedded tokens have a factor, which is found by a run of its own."""
    model: Any = build_tiny("granitemoe")
    model.model.norm.weight = None
    arguments = LayerArguments(model, range(len(model.model.layers)))
    arguments.write(0, torch.tensor([[0, 1, 0, 1]]), torch.float32)
    assert arguments.entered(torch.ones(1)).item() == model.config.embedding_multiplier == 2.0


def test_a_batch_without_boundaries_has_a_mask_too() -> None:
    """Replays need the tensors of the step that was captured, and nothing may ask the device whether a document begins."""
    model: Any = build_tiny("qwen3_moe")
    arguments = LayerArguments(model, range(len(model.model.layers)))
    whole, cut = torch.arange(8).expand(2, 8), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 0, 1, 2]])
    arguments.write(0, whole, torch.float32)
    arguments.select_place(0, cut)
    before = arguments.of(0)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    assert torch.equal(before["attention_mask"] == 0, causal.expand(2, 1, 8, 8))
    arguments.write(0, cut, torch.float32)
    arguments.select_place(0, cut)
    after = arguments.of(0)
    assert after["attention_mask"] is before["attention_mask"] and torch.equal(after["position_ids"], cut)
    documents = (cut == 0).cumsum(1)
    inside = causal & (documents[:, None, :, None] == documents[:, None, None, :])
    assert torch.equal(after["attention_mask"] == 0, inside) and bool((after["attention_mask"][~inside] < -1e9).all())
    wanted = model.model.rotary_emb(torch.zeros(1), position_ids=cut)
    assert all(map(torch.equal, after["position_embeddings"], wanted))
    arguments.write(0, cut[:1], torch.float32)
    arguments.select_place(0, cut[:1])
    assert arguments.of(0)["attention_mask"].shape == (1, 1, 8, 8)
