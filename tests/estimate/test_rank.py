"""Step times of whole configurations: against runs measured on H200, and in the right direction without one."""

from __future__ import annotations

import importlib
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.config import from_mapping
from forebay.estimate.device import DeviceProfile, load
from forebay.estimate.layer_time import SUBLAYER_DIRECT
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import Fit, fit_run
from forebay.estimate.state import Sharing
from forebay.estimate.step_time import StepTime
from forebay.estimate.trace_cache import TraceCache

pytestmark = pytest.mark.usefixtures("shared_traces")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGED = {"policy": {"*.mlp.experts": "stash"}}


def planned(
    model: dict[str, Any],
    world: int,
    parallel: dict[str, Any],
    memory: dict[str, Any] | None = None,
    device: DeviceProfile | str = "h200",
    **train: Any,
) -> Fit:
    config = from_mapping(
        {
            "model": {"dtype": "float32", "compute": "bfloat16", **model},
            "train": {"steps": 9, "microbatch": 1, "sequence": 4096, "batch": 64, **train},
            "memory": {"policy": "keep", "compile": True, "graph": False, **(memory or {})},
            "parallel": {"overlap": False, "reshard": True, "capacity_factor": 0.0, **parallel},
            "device": {"type": "cuda"},
        },
        origin="a test",
    )
    return fit_run(
        config, plan_layers(config, world), world, device=load(device) if isinstance(device, str) else device
    )


def step(*arguments: Any, **keywords: Any) -> StepTime:
    """See `planned`."""
    found = planned(*arguments, **keywords).step
    assert found is not None
    return found


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("ep").MODELS


def measured(file: str, **wanted: Any) -> float:
    """Seconds of the row of a result file that has these fields."""
    raw = json.loads((BENCHMARKS / "results" / f"{file}.json").read_text("utf-8"))
    (row,) = [row for row in raw["rows"] if all(row[key] == value for key, value in wanted.items())]
    batch = 32 if file.startswith("paging") else 64
    return float(batch * 4096 / row["tokens/s"])


EP = {"overlap": True, "reshard": False, "gradients": "compute", "dispatch": "symmetric", "capacity_factor": 2.0}
PIPE = {"pp": 2, "ep": 2, "reshard": False, "capacity_factor": 1.0, "partition": [3, 2, 2, 1]}
QWEN = {**PIPE, "partition": [2, 2, 3, 1]}
GRAPHS = [
    ("paging_ep2_qwen3", "qwen3-30b-a3b", "graph", 2, {**EP, "ep": 2}, PAGED),
    ("paging_ep2_deepseek", "deepseek-v2-lite", "graph", 2, {**EP, "ep": 2}, PAGED),
    ("paging_ep4", "qwen3-30b-a3b", "graph", 4, {**EP, "ep": 4}, PAGED),
    ("pipeline_graph_4gpu", "deepseek-v2-lite", "dualpipev, graph", 4, PIPE, {}),
    ("pipeline_graph_4gpu", "deepseek-v2-lite", "dualpipev, bf16 sums, graph", 4, {**PIPE, "gradients": "compute"}, {}),
    ("pipeline_graph_4gpu", "qwen3-30b-a3b", "dualpipev, graph", 4, QWEN, {}),
    ("pipeline_graph_4gpu", "qwen3-30b-a3b", "dualpipev, bf16 sums, graph", 4, {**QWEN, "gradients": "compute"}, {}),
]


def test_cuda_graph_steps_are_planned_within_a_sixth(models: Any) -> None:
    """No host delays them. They ran at earlier states of the code, whose kernels took longer than today's: by 18 % in a step of
    one GPU that ran at both (238 and 202 ms, run 19 of the first blind draw)."""
    errors = []
    for file, model, arm, world, parallel, memory in GRAPHS:
        batch = 32 if file.startswith("paging") else 64
        found = step(models[model], world, parallel, {**memory, "graph": True}, batch=batch)
        assert found.host == 0
        errors.append(found.gradients / measured(file, model=model, arm=arm) - 1)
    assert min(errors) > -0.16 and max(errors) < 0.05, errors
    assert statistics.mean(map(abs, errors)) < 0.13, errors


GRID_RUNS = [
    "1g-qwen3-3L-8kx2-keep-bf16",
    "1g-gpt-oss-2L-4kx1-recompute.full",
    "1g-mixtral-2L-8kx1-recompute.light",
    "1g-dsv2-3L-4kx1-keep-overlap-graph",
    "1g-olmoe-4L-8kx1-keep-compile",
    "2g-olmoe-6L-8kx1-recompute.light-fsdp",
    "2g-dsv2-4L-4kx1-stash-ep-graph",
    "4g-dsv2-6L-32kx1-recompute.light-fsdp",
    "4g-olmoe-6L-4kx1-keep-fsdp2xep2",
    "4g-qwen3-8L-4kx1-keep-dualpipev",
]


def test_whole_steps_of_the_grid_are_planned_within_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of each kind of the runs of benchmarks/planner.py, optimizer and host included, whose kernels take longer than their
    launches. Two of them were measured before the order of reductions changed, which changes memory only. A pipeline on four GPUs
    takes a fifth longer than planned."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    entries = {e.name: e for e in importlib.import_module("planner_grid").GRID}
    files = [BENCHMARKS / "results" / f"planner_measured{part}.jsonl" for part in ("_before", "")]
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    rows = {row["name"]: row for row in map(json.loads, lines) if "error" not in row}
    errors = []
    for name in GRID_RUNS:
        entry, row = entries[name], rows[name]
        config = from_mapping(importlib.import_module("common").by_host(entry.sections), origin=name)
        found = fit_run(
            config, plan_layers(config, entry.gpus), entry.gpus, skew=entry.skew or 1.0, device=load("h200")
        ).step
        assert found is not None
        took = max(statistics.median(rank["seconds"]) for rank in row["ranks"])
        errors.append(found.seconds / took - 1)
    *others, pipeline = errors
    assert max(map(abs, others)) < 0.2 and abs(pipeline) < 0.21, errors
    assert statistics.mean(map(abs, errors)) < 0.06, errors


def test_offloading_all_of_a_pipeline_with_experts_recomputed(models: Any) -> None:
    """PP 4 took 1.026 and 1.025 of the time (benchmarks/results/pipeline_graph_pp4.md). What is recomputed is not saved."""
    sublayers = {"*.self_attn": "offload", "*.mlp": "offload"}
    found = []
    for policy in ("keep", sublayers, {**sublayers, "model.layers.[1-6].mlp.experts": "recompute"}):
        memory = {"policy": policy, "offload": "all" if policy != "keep" else "fit", "compile": True, "graph": True}
        parallel = {"pp": 4, "reshard": False, "partition": [1] * 8}
        sections = {
            "model": {**models["deepseek-v2-lite"], "dtype": "float32", "compute": "bfloat16"},
            "train": {"steps": 9, "microbatch": 1, "sequence": 4096, "batch": 64},
            "memory": memory, "parallel": parallel, "device": {"type": "cuda"},
        }  # fmt: skip
        config = from_mapping(sections, origin="a test")
        found.append(fit_run(config, plan_layers(config, 4), 4, device=load("h200")))
    seconds = [fit.step.gradients for fit in found if fit.step is not None]
    assert 1.0 < seconds[1] / seconds[0] < 1.03 and 1.0 < seconds[2] / seconds[0] < 1.06
    kept, offloaded, light = (sum(sublayer.saved for sublayer in fit.sublayers) for fit in found)
    assert kept == offloaded and offloaded - light == 6 * (4096 * 6) * (2 * 1408) * 2
    for rank in (1, 2, 3):
        totals = [fit.ranks[rank].total for fit in found]
        assert totals[0] > totals[1] > totals[2]


def test_a_bubble_is_where_it_was_measured(models: Any) -> None:
    """DeepSeek-V2-Lite as 3-2-2-1: 0.003 and 0.261 of the step on the two ranks (benchmarks/results/pipeline.md)."""
    first, second = step(models["deepseek-v2-lite"], 4, PIPE).bubble
    assert first < 0.05 and second == pytest.approx(0.261, abs=0.08)


SMALL = {
    "family": "qwen3_moe",
    "config": {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
    },
}


def small(world: int = 1, device: DeviceProfile | str = "h200", **sections: Any) -> StepTime:
    return step(SMALL, world, sections.get("parallel", {}), sections.get("memory"), device, batch=16)


def with_host(launch: float) -> DeviceProfile:
    """An H200 whose host takes so many seconds for an operation."""
    device = load("h200")
    figure = replace(device.figures["launch"], value=((0.0, launch),))
    return replace(device, figures={**device.figures, "launch": figure})


def test_placements_cost_time() -> None:
    keep = small()
    light = small(memory={"policy": {"*.mlp": "recompute"}})
    full = small(memory={"policy": "recompute", "recompute": "full"})
    assert keep.schedule < light.schedule < full.schedule < 1.5 * keep.schedule


@pytest.mark.parametrize("launch", [1e-9, 15e-6])
def test_what_the_device_waits_for_copies(launch: float) -> None:
    """Until its host has launched a pass, everything is copied that does not fit the link while the device works."""
    device = with_host(launch)
    keep, fits, everything = (
        small(device=device, memory=memory)
        for memory in (None, *({"policy": "offload", "offload": how} for how in ("fit", "all")))
    )
    assert fits.schedule == keep.schedule
    assert (everything.schedule > keep.schedule) == (launch < 1e-6)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_graph_of_one_gpu_waits_for_copies_in_each_microbatch(microbatches: int) -> None:
    """Its manager's step is a microbatch. One of the whole step would offload next to nothing of three."""

    def seconds(policy: str) -> float:
        memory = {"policy": policy, "offload": "all", "graph": True}
        return step(SMALL, 1, {"reshard": False}, memory, "h200", batch=microbatches).schedule

    assert seconds("offload") > 1.4 * seconds("keep")


def test_the_host_pays_for_what_the_device_does_not_see() -> None:
    """A recomputed forward runs its Python again, a copy to the host has some of its own, and launches of a step that is captured
    are no part of it."""
    keep, full = small(), small(memory={"policy": "recompute", "recompute": "full"})
    sublayers = 2 * 16 * SMALL["config"]["num_hidden_layers"]
    assert full.host - keep.host > sublayers * SUBLAYER_DIRECT * keep.launch
    fits = small(memory={"policy": "offload", "offload": "fit"})
    assert fits.host > keep.host
    one, two = (small(n, parallel={"overlap": True, "reshard": False}, memory={"graph": True}) for n in (1, 2))
    assert one.launch == 0 and keep.around == pytest.approx(380 * keep.launch)
    assert one.around == pytest.approx(160 * keep.launch)  # two processes gather and update shards
    weights = 11 * SMALL["config"]["num_hidden_layers"] + 3
    assert two.around == pytest.approx((160 + 1.3 * weights) * keep.launch)


def test_kernels_of_profiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device did in seven steps of H200s, without their hosts: products of every size, experts, attention, optimizer.

    They ran with copies of all weights in bf16.
    """
    monkeypatch.setattr(Sharing, "_in_place", lambda sharing, processes: False)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runs = json.loads((BENCHMARKS / "results" / "step_kernels.json").read_text("utf-8"))["runs"]
    errors = []
    for draw, number in ((1, "13"), (2, "10"), (2, "21"), (10, "01"), (10, "06"), (10, "13"), (10, "18")):
        drawn = json.loads((BENCHMARKS / "results" / f"planner_blind_{draw}.json").read_text("utf-8"))["runs"]
        entries = importlib.import_module("planner_blind").entries_of(drawn)
        (run,) = [run for run in runs if run["draw"] == draw and run["name"].startswith(number)]
        entry = entries[run["name"]]
        config = from_mapping(importlib.import_module("common").by_host(entry.sections), origin=entry.name)
        traces = TraceCache()
        found = fit_run(config, plan_layers(config, 1, traces), 1, device=load("h200"), traces=traces).step
        assert found is not None
        busy = found.schedule + found.gather + found.reduce + found.optimizer
        errors.append(1e3 * busy / run["busy_ms"] - 1)
    assert max(map(abs, errors)) < 0.1, errors


def test_overlap_hides_transfers() -> None:
    parallel = {"ep": 4, "reshard": False, "dispatch": "symmetric", "capacity_factor": 2.0}
    alone, together = (small(4, parallel={**parallel, "overlap": overlap}) for overlap in (False, True))
    assert together.exposed[0] < 0.5 * alone.exposed[0]


def test_experts_on_two_nodes_take_longer() -> None:
    one, two = (small(16, parallel={"ep": ep, "dispatch": "nccl"}) for ep in (8, 16))
    assert two.exposed[0] > 2 * one.exposed[0]


def test_devices_differ() -> None:
    times = [small(device=name).schedule for name in ("b200", "h200", "a100", "rtx4090")]
    assert times == sorted(times)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_placements_cost_what_the_step_takes_longer(graph: bool, policy: str) -> None:
    """Also where the host's launches take longest, which offloaded tensors add to."""

    sizes = {"hidden_size": 1024, "num_hidden_layers": 2, "vocab_size": 512, "num_experts": 8}

    def fit(policy: str) -> Fit:
        memory = {"compile": False, "graph": graph, "policy": policy}
        return planned({"family": "qwen3_moe", "config": sizes}, 1, {"reshard": "auto"}, memory, batch=3)

    kept, placed = fit("keep").step, fit(policy)
    assert kept is not None and placed.step is not None
    added = 3 * sum(sublayer.seconds for sublayer in placed.sublayers)
    assert added == pytest.approx(placed.step.seconds - kept.seconds, rel=1e-6, abs=1e-9)
    assert (added > 0) == (policy == "recompute" or not graph)
