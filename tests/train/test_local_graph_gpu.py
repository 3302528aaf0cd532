"""Steps of one process in a CUDA graph, the default on one GPU: the same bits as the steps that are called."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.common import (
    GPU_FAMILIES,
    GPU_PLACEMENTS,
    MIXED_PRECISION,
    config,
    differing,
    figures_of,
    state_of,
    write_documents,
    write_text,
)
from tests.train.families import fields_of

STEPS = 20  # where something is offloaded, several graphs are timed first
TRIALS = 25  # steps more in which plans are tried
MEMORY: dict[str, dict[str, Any]] = {
    **GPU_PLACEMENTS,
    "keep": {},
    "in 8 bits": {"precision": "fp8"},
    "all leaves in 8 bits": {"policy": "offload", "offload": "all", "precision": "fp8"},
    "compiled": {"compile": True, "policy": {"*.layers.0.*": "recompute", "*.layers.1.*": "offload"}, "offload": "all"},
}


def trained(
    folder: Path,
    family: str,
    memory: dict[str, Any],
    dtypes: dict[str, str],
    reshard: bool | str,
    called: bool,
    **more: Any,
) -> tuple[Any, Any]:
    """State and figures after all steps; `called`: no step is replayed."""
    from forebay.train.trainer import Trainer

    steps = STEPS + TRIALS * ("budget" in memory)
    settings = config(
        folder,
        model={
            "family": family,
            "config": GPU_FAMILIES.get(family) or fields_of(family),
            "attention": "eager",  # dq of flash attention's backward differs between two calls
            **dtypes,
        },
        train={"batch": 6, "microbatch": 2, "sequence": 2048, "steps": steps, "router_bias_rate": 0.01},
        memory={"graph": "auto", **memory},
        parallel={"overlap": "auto", "reshard": reshard, "capacity_factor": "auto"},
        device={"type": "cuda", "threads": 0},
        **more,
    )
    with Trainer(settings) as trainer:
        if called:
            trainer.cuda_graph._may_capture = lambda: False
        records = [trainer.step(number) for number in range(1, steps + 1)]
        state, graph = state_of(trainer), trainer.cuda_graph
        assert (graph.is_captured, graph.eager_reason) == (not called, None)
        assert memory.get("offload") != "all" or trainer.memory.plan.planned_bytes > 0
        assert "budget" not in memory or {"keep"} < set(trainer.memory.placements.values())
    return state, [figures_of(r) for r in records]


def compare(
    folder: Path, family: str, memory: dict[str, Any], dtypes: dict[str, str], reshard: bool | str = "auto", **more: Any
) -> None:
    write_text(folder, 2000)
    (state, figures), (same_state, same_figures) = (
        trained(folder, family, memory, dtypes, reshard, called, **more) for called in (True, False)
    )
    assert figures == same_figures and not differing(state, same_state)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_replayed_steps_of_every_family_have_the_bits_of_called_ones(tmp_path: Path, family: str) -> None:
    compare(tmp_path, family, {}, {"dtype": "bfloat16"})


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", MEMORY)
def test_replayed_steps_with_every_placement_have_the_bits_of_called_ones(tmp_path: Path, name: str) -> None:
    compare(tmp_path, "glm4_moe", MEMORY[name], MIXED_PRECISION)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("placed", ["keep", "recompute", "what fits"])
def test_replayed_steps_with_flex_attention_have_the_bits_of_called_ones(tmp_path: Path, placed: str) -> None:
    compare(tmp_path, "gpt_oss", {**MEMORY[placed], "compile": True}, {"attention": "flex", **MIXED_PRECISION})


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("family", ["granitemoe", "ernie4_5_moe", "lfm2_moe"])
def test_replayed_steps_of_compiled_families_have_the_bits_of_called_ones(tmp_path: Path, family: str) -> None:
    """More is done with the experts' sum than to add it, or the mixer is a convolution; see test_every_family_gpu.py."""
    compare(tmp_path, family, MEMORY["compiled"], MIXED_PRECISION)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_replayed_steps_with_a_budget_in_bf16_have_the_bits_of_called_ones(tmp_path: Path) -> None:
    compare(tmp_path, "qwen3_moe", MEMORY["a budget"], {"dtype": "bfloat16"})


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("placed", ["keep", "recompute", "all leaves"])
def test_replayed_steps_with_documents_apart_have_the_bits_of_called_ones(tmp_path: Path, placed: str) -> None:
    """Documents of up to 900 bytes and sequences of 2048: each step has other masks."""
    data = write_documents(tmp_path, 900)
    compare(tmp_path, "qwen3_moe", MEMORY[placed], MIXED_PRECISION, data=data)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_replayed_steps_that_gather_experts_for_each_use_have_the_bits_of_called_ones(
    tmp_path: Path, policy: str
) -> None:
    compare(tmp_path, "qwen3_moe", {"policy": policy, "graph": True}, MIXED_PRECISION, reshard=True)
