"""What "auto" chooses for `memory.graph`, `parallel.overlap`, `reshard` and `capacity_factor`, and what it says."""

import dataclasses
from typing import Any

import pytest

from forebay.config import Config, Facts, FastPath, from_mapping, resolve

TWO = Facts(gpu=True, processes=2, family="qwen3_moe", reaches=True)
FOUR = dataclasses.replace(TWO, processes=4)
ONE = dataclasses.replace(TWO, processes=1)
HOST = (False, False, True, 0.0)  # graph, overlap, reshard, capacity: a step that the host launches
CAPTURED = (True, True, False, 2.0)
CALLED, ROOMY = (False, True, True, 2.0), (False, False, True, 2.0)  # launched by the host, of expert groups


def config(sections: dict[str, dict[str, Any]]) -> Config:
    raw: dict[str, dict[str, Any]] = {
        "model": {"family": "qwen3_moe", "dtype": "float32", "compute": "bfloat16"},
        "train": {"batch": 32, "microbatch": 1},
        "parallel": {"ep": 2},
    }
    return from_mapping({name: {**raw.get(name, {}), **sections.get(name, {})} for name in {**raw, **sections}})


def values(path: FastPath) -> tuple[bool, bool, bool, float]:
    step = path.config.step
    return step.graph, step.overlap, step.reshard, step.capacity_factor


PP = {"ep": 1, "pp": 2}
SHARED_BF16: dict[str, dict[str, Any]] = {"parallel": {"ep": 1}, "model": {"dtype": "bfloat16", "compute": ""}}
TABLE: list[tuple[dict[str, dict[str, Any]], Facts, tuple[bool, bool, bool, float], str]] = [
    # What is given, where it runs, what it becomes, a part of the line.
    ({}, TWO, CAPTURED, "fast path: one CUDA graph a step, overlap, weights gathered once a step, room for 2.0 times"),
    ({"parallel": {"ep": 4}}, FOUR, CAPTURED, "fast path: one CUDA graph"),
    ({"memory": {"policy": {"*.mlp.experts": "stash"}}}, TWO, CAPTURED, "fast path: one CUDA graph"),
    ({"model": {"family": "glm4_moe"}}, dataclasses.replace(TWO, family="glm4_moe"), CAPTURED, "fast path"),
    ({"parallel": PP}, TWO, (True, False, False, 0.0), "fast path: one CUDA graph a step, weights gathered once a step; turned"),
    ({"parallel": {**PP, "schedule": "1f1b"}, "memory": {"policy": "offload"}}, TWO, (True, False, False, 0.0), "fast path"),
    ({"parallel": {"ep": 1, "pp": 4}}, FOUR, (True, False, False, 0.0), "fast path"),
    ({}, FOUR, CAPTURED, "fast path: one CUDA graph"),
    ({"parallel": {"reshard": True}}, dataclasses.replace(FOUR, gathered=5 << 30), (True, True, True, 2.0), "one CUDA graph"),
    ({"parallel": PP}, FOUR, (True, False, False, 0.0), "fast path: one CUDA graph a step, weights gathered once a step; turned"),
    ({"parallel": {**PP, "replicate": 2}}, FOUR, (True, False, False, 0.0), "fast path: one CUDA graph"),
    # One key each turns a choice off; the rest stays as far as it ran that way.
    ({"memory": {"graph": False}}, TWO, (False, True, False, 2.0), "fast path: overlap, weights gathered once a step, room"),
    ({"parallel": {"overlap": False}}, TWO, ROOMY, "even routing; launched by the host: parallel.overlap = false"),
    ({"parallel": {"reshard": True}}, TWO, (True, True, True, 2.0), "fast path: one CUDA graph a step, overlap, room for 2.0"),
    ({"parallel": {"capacity_factor": 0}}, TWO, (False, True, False, 0.0), "launched by the host: parallel.capacity_factor = 0"),
    ({"parallel": {"dispatch": "nccl"}}, TWO, (False, True, False, 0.0), "launched by the host: parallel.dispatch = 'nccl'"),
    ({"parallel": {"capacity_factor": 1.5}}, TWO, (True, True, False, 1.5), "fast path: one CUDA graph"),
    ({"parallel": {**PP, "reshard": True}}, TWO, (True, False, True, 0.0), "fast path: one CUDA graph a step; turned off"),
    # What did not run in a graph is launched by the host; expert groups still overlap and leave room.
    ({}, dataclasses.replace(TWO, gpu=False), HOST, "host-launched: there is no GPU"),
    ({}, dataclasses.replace(TWO, reaches=False), HOST, "host-launched: the GPUs of an expert group do not read each other's"),
    ({"parallel": {"ep": 8}}, dataclasses.replace(TWO, processes=8), CALLED, "only 1, 2 or 4 processes ran in a graph, not 8"),
    ({}, dataclasses.replace(FOUR, one_node=False), CALLED, "launched by the host: processes of several nodes did not run"),
    ({}, dataclasses.replace(FOUR, gathered=5 << 30), CALLED, "experts of whole steps on each process would take 5.0 GiB more"),
    ({"parallel": PP}, dataclasses.replace(TWO, one_node=False), HOST, "processes of several nodes did not run in a graph"),
    ({"parallel": {"ep": 2, "pp": 2}}, FOUR, HOST, "pipelines of expert groups"),
    ({"parallel": {"ep": 1, "pp": 4, "schedule": "zbv"}}, FOUR, HOST, "'dualpipev' only"),
    ({"parallel": {"replicate": 2}}, FOUR, CALLED, "no replicas of expert groups ran in a graph"),
    ({"parallel": {"dispatch": "deepep"}}, TWO, HOST, "parallel.dispatch = 'deepep'"),
    ({"parallel": {"reduce": "microbatch"}}, TWO, HOST, "parallel.reduce = 'microbatch'"),
    ({}, dataclasses.replace(TWO, family="mixtral"), CAPTURED, "fast path: one CUDA graph"),
    ({}, dataclasses.replace(TWO, family="afmoe"), CAPTURED, "fast path: one CUDA graph"),
    ({}, dataclasses.replace(TWO, family="dbrx"), HOST, "no model of family 'dbrx'"),
    ({"parallel": PP}, dataclasses.replace(TWO, family="glm4_moe"), (True, False, False, 0.0), "fast path"),
    ({"model": {"compute": ""}}, TWO, HOST, "host-launched: grouped products in float32"),
    ({"model": {"compute": ""}, "parallel": PP}, dataclasses.replace(TWO, family="gemma2"), HOST, "no model of family 'gemma2'"),
    ({"model": {"dtype": "bfloat16", "compute": ""}}, TWO, CAPTURED, "fast path: one CUDA graph"),
    ({"model": {"dtype": "bfloat16", "compute": ""}, "parallel": PP}, TWO, HOST, "and model.compute = 'bfloat16', not as here"),
    ({"model": {"loss": "transformers"}}, TWO, HOST, "model.loss = 'fused'"),
    ({"memory": {"policy": "offload"}}, TWO, ROOMY, "memory.policy with 'offload'"),
    ({"memory": {"policy": "recompute"}}, TWO, CAPTURED, "fast path: one CUDA graph"),
    ({"memory": {"policy": "recompute", "recompute": "full"}}, TWO, ROOMY, "memory.recompute = 'full' did not run in a graph"),
    ({"parallel": PP, "memory": {"policy": {"*.mlp.experts": "stash"}}}, TWO, HOST, "memory.policy with 'stash'"),
    ({"data": {"packing": "documents"}}, TWO, CAPTURED, "fast path: one CUDA graph"),
    ({"memory": {"precision": "fp8"}}, TWO, HOST, "memory.precision = 'fp8' ran in a graph on one GPU only"),
    ({"train": {"microbatch": 16}}, TWO, ROOMY, "one microbatch"),
    # One process.
    ({"parallel": {"ep": 1}}, ONE, (True, False, False, 0.0), "a step, weights gathered once a step; turned off"),
    ({"parallel": {"ep": 1}, "model": {"dtype": "bfloat16"}}, ONE, (True, False, False, 0.0), "CUDA graph a step; turned off"),
    ({"parallel": {"ep": 1}, "model": {"compute": ""}}, ONE, HOST, "host-launched: grouped products in float32"),
    ({"parallel": {"ep": 1}}, dataclasses.replace(ONE, layers=48), (True, False, False, 0.0), "fast path: one CUDA graph"),
    ({"parallel": {"ep": 1}, "train": {"batch": 64}}, dataclasses.replace(ONE, layers=48), HOST, "64 microbatches of 48 layers"),
    ({"parallel": {"ep": 1}}, dataclasses.replace(ONE, container="model.layers.0"), HOST, "places 'model.layers.0', and a"),
    ({"parallel": {"ep": 1}}, dataclasses.replace(ONE, container=""), HOST, "places 'the whole model'"),
    ({}, dataclasses.replace(TWO, container="model"), ROOMY, "places 'model', and a graph's step"),
    ({"parallel": {"ep": 1}, "memory": {"policy": "recompute"}}, ONE, (True, False, False, 0.0), "fast path: one CUDA graph"),
    ({"parallel": {"ep": 1}, "memory": {"policy": "offload"}}, ONE, (True, False, False, 0.0), "fast path: one CUDA graph"),
    ({"parallel": {"ep": 1}, "memory": {"precision": "fp8"}}, ONE, (True, False, False, 0.0), "fast path: one CUDA graph"),
    ({"parallel": {"ep": 1, "overlap": True}}, ONE, (True, True, False, 0.0), "fast path: one CUDA graph a step"),
    ({"parallel": {"ep": 1}}, dataclasses.replace(ONE, gathered=5 << 30), HOST, "copies of its smaller weights in bfloat16"),
    ({"parallel": {"ep": 1, "reshard": True}}, dataclasses.replace(ONE, gathered=5 << 30), (True, False, True, 0.0), "graph"),
    ({"parallel": {"ep": 1}, "optimizer": {"fused": False}}, ONE, HOST, "host-launched: optimizer.fused = false"),
    ({"parallel": {"ep": 1}}, dataclasses.replace(ONE, family="dbrx"), HOST, "host-launched: no model of family 'dbrx'"),
    # A dense model has no grouped products.
    ({"parallel": {"ep": 1}, "model": {"compute": ""}}, dataclasses.replace(ONE, family="gemma2"), HOST, "of family 'gemma2'"),
    ({"parallel": {"ep": 1}}, dataclasses.replace(ONE, jitters=True), HOST, "router_jitter_noise draws random numbers"),
    ({"parallel": {"ep": 1}, "train": {"batch": 64}}, dataclasses.replace(ONE, family="gemma2", layers=48), HOST, "'gemma2' ran"),
    ({"parallel": {"ep": 1}, "memory": {"policy": "auto", "budget": "1GiB"}}, ONE, (True, False, False, 0.0), "one CUDA graph"),
    ({"parallel": {"ep": 2}, "memory": {"policy": "auto", "budget": "1GiB"}}, TWO, (False, False, True, 2.0), "with 'auto' did"),
    ({"parallel": {"ep": 1}, "memory": {"policy": "recompute", "recompute": "full"}}, ONE, HOST, "memory.recompute = 'full'"),
    # Several processes that share weights alone.
    ({"parallel": {"ep": 1}}, TWO, (True, False, False, 0.0), "one CUDA graph a step, weights gathered once a step; turned"),
    (SHARED_BF16, TWO, (True, False, False, 0.0), "one CUDA graph a step, weights gathered once a step; turned"),
    ({**SHARED_BF16, "parallel": {"ep": 1, "replicate": 2}}, TWO, (True, False, False, 0.0), "CUDA graph a step; turned off"),
    ({"parallel": {"ep": 1, "replicate": 2, "reshard": True}}, TWO, (True, False, True, 0.0), "fast path: one CUDA graph"),
    ({"parallel": {"ep": 1}, "memory": {"policy": "offload"}}, TWO, (True, False, False, 0.0), "fast path: one CUDA graph"),
    ({"parallel": {"ep": 1}, "memory": {"policy": "auto", "budget": "1GiB"}}, TWO, (True, False, False, 0.0), "one CUDA graph"),
    ({"parallel": {"ep": 1}, "memory": {"policy": {"*.mlp.experts": "stash"}}}, TWO, HOST, "on GPUs that share weights, only"),
    ({"parallel": {"ep": 1, "reshard": True}}, TWO, HOST, "host-launched: parallel.reshard = true gathers weights from other"),
    ({"parallel": {"ep": 1}}, dataclasses.replace(TWO, gathered=5 << 30), HOST, "each process would take 5.0 GiB more; mem"),
    ({"parallel": {"ep": 1}}, FOUR, (True, False, False, 0.0), "one CUDA graph a step, weights gathered once a step; turned"),
    ({"parallel": {"ep": 1}}, dataclasses.replace(TWO, one_node=False), HOST, "several nodes did not run in a graph; memory."),
    ({"parallel": {"ep": 1}}, dataclasses.replace(TWO, processes=8), HOST, "2 or 4 processes ran in a graph, not 8; memory."),
    ({"parallel": {"ep": 1}, "optimizer": {"fused": False}}, TWO, HOST, "host-launched: optimizer.fused = false"),
    ({"parallel": {"ep": 1}, "memory": {"graph": False}}, TWO, HOST, ""),
    # Without a GPU, or with a graph turned off, there is nothing to say.
    ({"parallel": {"ep": 1}}, dataclasses.replace(ONE, gpu=False), HOST, ""),
    ({"parallel": {"ep": 1}, "memory": {"graph": False}}, ONE, HOST, ""),
    ({"parallel": {"ep": 1, "overlap": True}, "memory": {"graph": False}}, ONE, (False, True, True, 0.0), ""),
    # A graph that is asked for takes what it needs, wherever it runs.
    ({"memory": {"graph": True}}, FOUR, CAPTURED, "fast path"),
    ({"memory": {"graph": True}, "parallel": {"ep": 1}}, FOUR, (True, False, False, 0.0), "fast path: weights gathered once"),
    ({"memory": {"graph": True}, "parallel": PP}, dataclasses.replace(TWO, gpu=False), (True, False, False, 0.0), "fast path"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "facts", "wanted", "said"), TABLE)
def test_what_is_chosen(
    given: dict[str, dict[str, Any]], facts: Facts, wanted: tuple[bool, bool, bool, float], said: str
) -> None:
    asked = config(given)
    path = resolve(asked, facts)
    assert values(path) == wanted
    assert (said in path.line) if said else not path.line
    for section, keys in given.items():
        for key, value in keys.items():
            assert getattr(getattr(path.config, section), key) == value, "what was given stays"
    assert from_mapping(path.config.to_dict()) == path.config, "valid by itself"
    again = resolve(path.config, facts)
    assert again.config == path.config and not again.reasons and not again.line
    assert all(path.reasons.values())


def test_every_key_that_is_off_is_named() -> None:
    path = resolve(config({}), TWO)
    assert path.line.endswith(
        "turned off by memory.graph=false, parallel.overlap=false, parallel.reshard=true, parallel.capacity_factor=0"
    )
    assert list(path.reasons) == [
        "memory.graph", "parallel.overlap", "parallel.reshard", "parallel.capacity_factor",
    ]  # fmt: skip
    assert path.is_fast
    of_others = resolve(config({"parallel": {"ep": 1}}), dataclasses.replace(TWO, processes=16))
    assert not of_others.is_fast and of_others.advises_graph


def test_a_step_cannot_run_with_what_is_not_chosen_yet() -> None:
    with pytest.raises(ValueError, match="resolve it first"):
        _ = config({}).step
