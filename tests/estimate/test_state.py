"""Planned parameters, gradients and moments against the tensors of real trainers, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import Config, from_mapping
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import fit_run
from forebay.estimate.state import (
    CHANNEL,
    COMMUNICATOR,
    COMMUNICATOR_ALONE,
    CONTEXT,
    Sharing,
    Weight,
    WeightShapes,
    rank_state,
    symmetric_bytes,
    weight_shapes,
)
from forebay.kernels.symm_mem import PeerLayout
from forebay.memory.storage import local
from forebay.train import hf_io
from forebay.train.data import load_tokenizer
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.common import MODEL


def sections(folder: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of some text\n" for i in range(200)))
    made: dict[str, Any] = {
        "model": {"family": "qwen3_moe", "config": {**MODEL, "mlp_only_layers": [0]}},
        "data": {"source": "text", "path": str(text), "cache": str(folder / "cache")},
        "train": {"steps": 2, "batch": 4, "microbatch": 1, "sequence": 16},
        "log": {"folder": str(folder / "run"), "progress": "off"},
        "device": {"type": "cpu"},
    }
    for section, values in changes.items():
        made[section] = {**made.get(section, {}), **values}
    return made


def size(tensor: torch.Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()


def held(trainer: Trainer) -> dict[str, int]:
    """Bytes of this process's parameters, of gradients on them, and of AdamW's states, in and after a step."""
    trainer.gradients(1)
    gradients = sum(size(p.grad) for p in trainer.model.parameters() if p.grad is not None)
    trainer.discard()
    trainer.step(1)
    return {
        "parameters": sum(size(p) for p in trainer.model.parameters()),
        "gradients": gradients,
        "optimizer": sum(size(t) for s in trainer.optimizer.state.values() for t in s.values()),
    }


def planned(config: Config, world: int) -> dict[str, int]:
    (rank,) = fit_run(config, plan_layers(config, world), world).ranks
    return {"parameters": rank.parameters, "optimizer": rank.optimizer}


def state(config: Config, sharing: Sharing) -> Any:
    declared = hf_io.configuration(config.model, load_tokenizer("bytes").vocabulary)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        weights = weight_shapes(AutoModelForCausalLM.from_config(declared))
    return rank_state(weights, range(len(weights.layers)), True, True, sharing)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_process(tmp_path: Path, dtype: str) -> None:
    config = from_mapping(sections(tmp_path, model={"dtype": dtype}))
    with Trainer(config) as trainer:
        real = held(trainer)
    assert planned(config, 1) == {name: real[name] for name in ("parameters", "optimizer")}
    element = 4 if dtype == "float32" else 2
    assert state(config, Sharing(parameter=element, gpu=False)).gradients == real["gradients"]


def test_tied_weights_count_once(tmp_path: Path) -> None:
    config = from_mapping(sections(tmp_path, model={"config": {**MODEL, "tie_word_embeddings": True}}))
    with Trainer(config) as trainer:
        real = held(trainer)
    assert planned(config, 1) == {name: real[name] for name in ("parameters", "optimizer")}


def _two(rank: int, world: int, mapping: dict[str, Any]) -> dict[str, int]:
    config = from_mapping(mapping)
    with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
        return held(trainer)


@pytest.mark.parametrize("ep", [1, 2])
def test_two_processes(tmp_path: Path, ep: int) -> None:
    """Shards of rank 0, the larger ones if two do not divide a length; experts by rank or by shard."""
    mapping = sections(tmp_path, parallel={"ep": ep}, train={"microbatch": 1})
    config = from_mapping(mapping)
    real = run_ranks(_two, 2, mapping)
    assert planned(config, 2) == {name: real[0][name] for name in ("parameters", "optimizer")}
    assert planned(config, 2)["parameters"] >= real[1]["parameters"]
    sharing = Sharing(data=2, ep=ep, sharded=True, sums=False, gpu=False)
    assert state(config, sharing).gradients == state(config, sharing).sharded_gradients == real[0]["gradients"]


TINY = WeightShapes(
    (Weight("embed_tokens.weight", (10, 4)),),
    (Weight("norm.weight", (4,)), Weight("lm_head.weight", (10, 4))),
    ((Weight("q_proj.weight", (6, 4)), Weight("experts.down_proj", (8, 5, 4), True)),) * 3,
    tied=False,
)


def test_shards_by_hand() -> None:
    """4 processes, experts over 2: of 10 rows 3, of 6 rows 2, of 8 experts 4 each, and of those 2 in each of two columns."""
    s = Sharing(data=4, ep=2, sharded=True, parameter=4, compute=2, summed=4, gpu=False)
    found = rank_state(TINY, (0, 1), True, False, s)
    own = 3 * 4 + 2 * (2 * 4 + 2 * 5 * 4)
    assert found.parameters == 4 * own
    assert found.optimizer == 2 * 4 * own + 5 * 4  # a step count for each of five parameters
    whole = 6 * 4 + 4 * 5 * 4
    assert found.layer_gradients == (4 * whole, 4 * whole) and found.embedding_gradient == 4 * 40
    assert found.head_gradient == 0
    assert found.gathered == 2 * (40 + 3 * whole)  # a layer, the next one, and its buffer
    assert not found.at_once


@pytest.mark.parametrize(
    ("changes", "gathered"),
    [
        ({"reshard": False}, 40 + 2 * 104 + 104),
        ({"gathered": True, "reshard": False}, 40 + 2 * 104),
        ({"gathered": True}, 40 + 2 * 24 + 2 * 80),
    ],
)
def test_gathered_weights(changes: dict[str, Any], gathered: int) -> None:
    s = Sharing(data=4, ep=2, sharded=True, compute=2, gpu=False, **changes)
    found = rank_state(TINY, (0, 1), True, False, s)
    assert found.gathered == 2 * gathered
    assert found.at_once == s.gathered


def test_more_processes_hold_less() -> None:
    """Unsharded parameters and summed gradients stay the same."""
    few, many = (rank_state(TINY, (0, 1, 2), True, True, Sharing(data=n, sharded=True, gpu=False)) for n in (2, 4))
    assert many.parameters < few.parameters and many.optimizer < few.optimizer
    assert many.gathered == few.gathered and many.gradients == few.gradients
    reduced = rank_state(TINY, (0, 1, 2), True, True, Sharing(data=2, sharded=True, sums=False, gpu=False))
    assert reduced.gradients == reduced.parameters < few.gradients


def test_a_gpu_takes_its_share() -> None:
    alone, all_of_them = (
        rank_state(TINY, (0,), True, True, s) for s in (Sharing(), Sharing(data=4, ep=2, pp=2, sharded=True))
    )
    # All processes; those with the same layers; an expert group; the ranks of the same experts; two neighbors' four channels.
    assert alone.other == CONTEXT and all_of_them.other == CONTEXT + 4 * COMMUNICATOR + 4 * CHANNEL
    assert rank_state(TINY, (0,), True, True, Sharing(sharded=True)).other == CONTEXT + COMMUNICATOR_ALONE
    assert rank_state(TINY, (0,), True, True, Sharing(gpu=False)).other == 0


@pytest.mark.parametrize(
    ("ranks", "tokens", "hidden", "slots"), [(2, 4096, 2048, 8), (8, 4096, 7168, 8), (4, 512, 1024, 4)]
)
def test_symmetric_memory_is_that_of_the_dispatcher(ranks: int, tokens: int, hidden: int, slots: int) -> None:
    layout = PeerLayout(ranks, tokens, slots, 2 * hidden)
    assert symmetric_bytes(ranks, tokens, hidden, slots, 2) == pytest.approx(layout.total, rel=1e-3)
