"""Planned parameters, gradients and moments against the tensors of real trainers, on one process and on two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import Config, from_mapping
from forebay.estimate.allocator import GRADIENTS
from forebay.estimate.fsdp import param_groups
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import fit_run
from forebay.estimate.state import (
    CHANNEL,
    CHANNEL_RECEIVE,
    CHANNEL_RING,
    CHANNEL_SEND,
    CONTEXT,
    MESSAGES,
    NCCL,
    NCCL_ALONE,
    Sharing,
    Weight,
    WeightShapes,
    outside_bytes,
    symmetric_bytes,
    weight_shapes,
)
from forebay.kernels.symm_mem import PeerLayout
from forebay.memory.storage import local
from forebay.pipeline.partition import StageLayer
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer
from tests.models.conftest import build_tiny
from tests.ranks import run_ranks
from tests.train.common import MODEL, config, write_text


def tiny(folder: Path, **changes: dict[str, Any]) -> Config:
    return config(write_text(folder), {**MODEL, "mlp_only_layers": [0]}, train={"microbatch": 1}, **changes)


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
    fit = fit_run(config, plan_layers(config, world), world)
    (rank,), (levels,) = fit.ranks, fit.levels
    gradients = levels[-1].by_role[GRADIENTS]  # while the optimizer runs
    return {"parameters": rank.parameters, "gradients": gradients, "optimizer": rank.optimizer}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_process(tmp_path: Path, dtype: str) -> None:
    settings = tiny(tmp_path, model={"dtype": dtype})
    with Trainer(settings) as trainer:
        real = held(trainer)
    assert planned(settings, 1) == real


def test_tied_weights_count_once(tmp_path: Path) -> None:
    settings = tiny(tmp_path, model={"config": {**MODEL, "tie_word_embeddings": True}})
    with Trainer(settings) as trainer:
        real = held(trainer)
    assert planned(settings, 1) == real


def _two(rank: int, world: int, mapping: dict[str, Any]) -> dict[str, int]:
    settings = from_mapping(mapping)
    with Mesh.open(settings) as mesh, Trainer(settings, mesh) as trainer:
        return held(trainer)


@pytest.mark.parametrize("parallel", [{"ep": 1}, {"ep": 2}, {"replicate": 2}], ids=str)
def test_two_processes(tmp_path: Path, parallel: dict[str, int]) -> None:
    """Shards of rank 0, the larger ones if two do not divide a length; experts by rank or by shard; replicas hold everything."""
    settings = tiny(tmp_path, parallel=parallel)
    real = run_ranks(_two, 2, settings.to_dict())
    assert planned(settings, 2) == real[0]
    assert real[0]["parameters"] >= real[1]["parameters"]


def test_pipeline_ranks_that_share_a_layer(tmp_path: Path) -> None:
    """Rank 0 has the attention of layer 0 and the MLP of layer 2, rank 1 their other sublayers."""
    sizes = {**MODEL, "num_hidden_layers": 4, "mlp_only_layers": [0]}
    parallel = {"pp": 2, "schedule": "dualpipev", "partition": [0.5, 1, 1, 1.5]}
    train = {"batch": 8, "microbatch": 1}
    settings = config(write_text(tmp_path), sizes, train=train, parallel=parallel)
    real = run_ranks(_two, 2, settings.to_dict())
    ranks = fit_run(settings, plan_layers(settings, 2), 2).ranks
    assert [(r.parameters, r.optimizer) for r in ranks] == [(r["parameters"], r["optimizer"]) for r in real]


TINY = WeightShapes(
    (Weight("embed_tokens.weight", (10, 4)),),
    (Weight("norm.weight", (4,)), Weight("lm_head.weight", (10, 4))),
    ((Weight("q_proj.weight", (6, 4)), Weight("experts.down_proj", (8, 5, 4), True)),) * 3,
    tied=False,
)


def test_a_layer_that_is_cut_in_two_has_the_weights_of_one_sublayer() -> None:
    weights = weight_shapes(build_tiny("qwen3_moe"))
    whole, attention, mlp = (weights.of(StageLayer(1, *here)) for here in ((True, True), (True, False), (False, True)))
    assert weights.divisible and {*attention, *mlp} == set(whole) and not {*attention} & {*mlp}
    assert {w.name.partition(".")[0] for w in attention} == {"input_layernorm", "self_attn"}
    assert {w.name.partition(".")[0] for w in mlp} == {"post_attention_layernorm", "mlp"}
    groups = param_groups(weights, [StageLayer(0), StageLayer(1, mlp=False)], False, False, Sharing())
    assert [p.name for p in groups[-1].params] == [w.name for w in attention]


def test_shards_by_hand() -> None:
    """4 processes, experts over 2: of 10 rows 3, of 6 rows 2, of 8 experts 4 each, and of those 2 in each of two columns."""
    s = Sharing(data=4, ep=2, sharded=True, apart=True)
    ends, *layers = param_groups(TINY, (StageLayer(0), StageLayer(1)), True, False, s)
    assert [(p.own, p.whole) for p in ends.params] == [(3 * 4, 10 * 4)]
    assert [(g.place, g.experts, g.processes, *((p.own, p.whole, p.drawn) for p in g.params)) for g in layers] == [
        group
        for place in (0, 1)
        for group in (
            (place, False, 4, (2 * 4, 6 * 4, 6 * 4)),
            (place, True, 2, (2 * 5 * 4, 4 * 5 * 4, 8 * 5 * 4)),
        )
    ]


def test_a_gpu_takes_its_share() -> None:
    ring = CHANNEL + CHANNEL_RING
    assert outside_bytes(Sharing()) == CONTEXT
    assert outside_bytes(Sharing(sharded=True)) == CONTEXT + NCCL_ALONE + ring
    assert outside_bytes(Sharing(data=4, sharded=True)) == CONTEXT + NCCL + 32 * ring
    assert outside_bytes(Sharing(replicate=4)) == CONTEXT + NCCL + 32 * ring, "DistributedDataParallel"
    # All processes; those with the same layers; an expert group; the ranks of the same experts; the pipeline and its channels.
    everything = Sharing(data=4, ep=2, pp=2, sharded=True)
    several = CONTEXT + NCCL + (4 + 32 + 4 + 32 + 4) * ring
    channels = MESSAGES + 16 * (4 * CHANNEL + CHANNEL_SEND + CHANNEL_RECEIVE)
    assert outside_bytes(everything) == several + channels
    assert outside_bytes(everything, both_ways=True) == several + channels + 16 * (CHANNEL_SEND + CHANNEL_RECEIVE)
    assert outside_bytes(replace(everything, slot_bytes=64 << 20), both_ways=True) == several + (64 << 20)
    replicated = replace(everything, replicate=2)
    assert outside_bytes(replicated) == outside_bytes(everything) + 32 * ring
    assert (
        outside_bytes(replace(everything, data=2)) == outside_bytes(everything) - 31 * ring
    )  # experts have one holder
    assert outside_bytes(Sharing(gpu=False)) == 0


@pytest.mark.parametrize(
    ("ranks", "tokens", "hidden", "slots"), [(2, 4096, 2048, 8), (8, 4096, 7168, 8), (4, 512, 1024, 4)]
)
def test_symmetric_memory_is_that_of_the_dispatcher(ranks: int, tokens: int, hidden: int, slots: int) -> None:
    layout = PeerLayout(ranks, tokens, slots, 2 * hidden)
    assert symmetric_bytes(ranks, tokens, hidden, slots, 2) == pytest.approx(layout.total, rel=1e-3)
