"""The share of a peak that is left for a plan's own error."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.config import from_mapping
from forebay.config.fast_path import GRAPH_NODES
from forebay.estimate.device import load
from forebay.estimate.fit import RankFit, headroom, largest_total, least_budget, planning_error
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import Fit, fit_run

pytestmark = pytest.mark.usefixtures("shared_traces")

GIB = 1 << 30
TINY = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256, "num_hidden_layers": 2,
}  # fmt: skip
DENSE = {key: value for key, value in TINY.items() if "moe" not in key and "experts" not in key}


@pytest.mark.parametrize(
    ("gpus", "compiled", "placements", "captured", "pipeline", "share"),
    [
        (1, False, {"keep", "recompute"}, False, False, 0.08),
        (1, True, {"keep"}, False, False, 0.10),
        (1, False, {"keep", "recompute+offload"}, False, False, 0.10),
        (1, True, {"offload", "keep"}, True, False, 0.06),
        (1, True, {"offload", "auto"}, False, False, 0.14),
        (2, True, {"auto"}, True, False, 0.14),
        (2, True, {"offload"}, True, True, 0.05),
        (2, False, {"offload"}, False, False, 0.05),
        (2, False, {"offload"}, False, True, 0.15),
        (2, False, {"keep"}, False, True, 0.05),
    ],
)
def test_the_share_is_that_of_the_run_s_kind(
    gpus: int, compiled: bool, placements: set[str], captured: bool, pipeline: bool, share: float
) -> None:
    assert planning_error(gpus, compiled, placements, captured, pipeline) == share


def test_whole_scores_widen_the_share_of_compiled_graphs_alone() -> None:
    ways = [(False, False), (True, False), (False, True), (True, True)]
    shares = [planning_error(1, compiled, {"keep"}, captured, whole_scores=True) for compiled, captured in ways]
    assert shares == [0.08, 0.10, 0.06, 0.10] and planning_error(2, True, {"keep"}, True, whole_scores=True) == 0.05


@pytest.mark.parametrize("error", [0.05, 0.06, 0.08, 0.10, 0.14])
def test_what_is_left_is_consistent(error: float) -> None:
    for total in (1, 999, 10 * GIB + 7):
        budget = least_budget(total, error)
        assert headroom(total, budget, error) == 0 and headroom(total, budget - 1, error) < 0
        assert abs(largest_total(budget, error) - total) <= 1


@pytest.mark.parametrize(
    ("memory", "auto", "words"),
    [
        ({"policy": "keep", "compile": True}, None, "with 6 % of the peak left"),  # a graph by default
        ({"policy": "keep", "compile": False, "graph": False}, None, "with 8 % of the peak left"),
        ({"policy": "keep", "compile": True, "graph": False}, None, "with 10 % of the peak left"),
        ({"policy": "keep", "compile": False, "graph": False}, 8 * GIB, "with 8 % of the peak left"),
        ({"policy": "auto", "budget": "4GiB", "compile": False}, None, "with 14 % of the peak left"),
    ],
)
def test_a_verdict_says_the_share_of_its_run(memory: dict[str, object], auto: int | None, words: str) -> None:
    config = from_mapping(
        {
            "model": {"family": "qwen3_moe", "config": TINY, "dtype": "bfloat16"},
            "train": {"steps": 1, "microbatch": 1, "batch": 1, "sequence": 64},
            "memory": memory,
            "parallel": {"overlap": False},
            "device": {"type": "cuda"},
        },
        origin="a test",
    )
    found = fit_run(config, plan_layers(config, 1), 1, 8 * GIB, auto=auto)
    assert found.fits and words in found.verdict()
    total, error = found.fullest.total, found.as_dict()["error"]
    assert f"{100 * error:.0f} %" in words
    assert found.fullest.headroom(least_budget(total, error)) == 0


def test_a_verdict_is_that_of_the_rank_that_fits_least() -> None:
    """Its share is larger, as that of a rank with chosen placements that offload."""
    larger = RankFit(0, 100 << 20, 0, 0, 0, 0, 0, "head", error=0.05)
    looser = RankFit(1, 96 << 20, 0, 0, 0, 0, 0, "head", error=0.15)
    fit = Fit((larger, looser), 2, 1, 107 << 20, (), ())
    assert not fit.fits and fit.verdict().startswith("Does not fit 107.00 MiB") and "on rank 1" in fit.verdict()


def planned(graph: bool, device: str = "cuda", packing: str = "joined", **more: Any) -> Fit:
    """A step of 4 microbatches of 2 layers."""
    model = {"family": "qwen3_moe", "config": TINY, "dtype": "bfloat16", **more}
    sections = {"model": model, "train": {"batch": 4, "microbatch": 1, "sequence": 64}, "memory": {"graph": graph}}
    config = from_mapping({**sections, "device": {"type": device}, "data": {"packing": packing}})
    return fit_run(config, plan_layers(config, 1), 1, device=load("h200"))


def test_the_nodes_of_a_graph_are_counted() -> None:
    graph, called = planned(True), planned(False)
    assert graph.ranks[0].other - called.ranks[0].other == 8 * GRAPH_NODES


def test_an_engine_holds_the_masks_of_documents() -> None:
    """Of each microbatch of a step, 2 bytes a pair of tokens."""
    apart, joined = (planned(True, packing=packing) for packing in ("documents", "joined"))
    assert apart.ranks[0].other - joined.ranks[0].other == 4 * 2 * 64**2
    called, also_joined = (planned(False, packing=packing) for packing in ("documents", "joined"))
    assert called.ranks[0].other == also_joined.ranks[0].other


def test_a_cpu_captures_no_graph() -> None:
    """The run says so, and calls its steps with the engine of a graph's."""
    fit = planned(True, "cpu")
    assert_called(fit, "there is no CUDA device to capture steps on")
    assert fit.ranks[0].other == 0


def test_grouped_products_in_float32_are_called() -> None:
    """The run gives its graph up in the first layer of experts. A dense model's is captured."""
    fit, called = planned(True, dtype="float32"), planned(False, dtype="float32")
    assert_called(fit, "grouped products in float32 wait for sizes")
    assert fit.ranks[0].other == called.ranks[0].other
    dense = planned(True, dtype="float32", family="qwen3", config=DENSE)
    assert dense.step is not None and dense.step.launch == 0
    assert any("captured step's memory" in note for note in dense.notes)


SPREAD: dict[str, Any] = {"parallel": {"ep": 2}}  # with more processes than that: an obstacle that advises a graph


@pytest.mark.parametrize(
    ("capturable", "graph", "gpus", "sections"),
    [
        (True, False, 1, {}),
        # Its obstacle says that memory.graph = true tries it.
        (True, "auto", 1, {"model": {"family": "helium", "config": DENSE}}),
        (True, False, 1, {"parallel": {"overlap": True}}),
        (False, False, 1, {"model": {"dtype": "float32"}}),
        (True, False, 1, {"parallel": {"reshard": True}}),
        (False, "auto", 1, {"memory": {"policy": {"model.layers.0": "recompute"}}}),
        (False, "auto", 1, {"device": {"type": "cpu"}}),
        (True, "auto", 8, {}),
        (True, "auto", 8, SPREAD),
        (True, "auto", 8, {**SPREAD, "memory": {"policy": "recompute"}}),
        (True, "auto", 1, {"optimizer": {"fused": False}, "memory": {"policy": "auto", "budget": "1GiB"}}),
        # The first obstacle advises a graph, and a later one refuses it.
        (False, "auto", 8, {"parallel": {"reshard": True}}),
        (False, "auto", 8, {"model": {"loss": "transformers"}}),
        (False, "auto", 8, {"model": {"experts": "transformers"}}),
        (False, "auto", 8, {"model": {"dtype": "float32"}}),
        (True, "auto", 8, {"data": {"packing": "documents"}}),
        (False, "auto", 8, {"memory": {"policy": "recompute", "recompute": "full"}}),
        (False, "auto", 8, {"memory": {"policy": {"model.layers.0": "recompute"}}}),
        (False, "auto", 8, {**SPREAD, "memory": {"policy": "offload"}}),
        (False, "auto", 8, {**SPREAD, "memory": {"policy": "auto", "budget": "1GiB"}}),
        (False, "auto", 8, {**SPREAD, "parallel": {"ep": 2, "capacity_factor": 0}}),
        (False, "auto", 8, {**SPREAD, "model": {"config": {**TINY, "hidden_size": 20}}}),  # rows of 40 bytes
    ],
    ids=str,
)
def test_a_graph_is_advised_where_it_can_be_captured(
    capturable: bool, graph: bool | str, gpus: int, sections: dict[str, dict[str, Any]]
) -> None:
    raw: dict[str, dict[str, Any]] = {
        "model": {"family": "qwen3_moe", "config": TINY, "dtype": "bfloat16"},
        "train": {"batch": 8, "microbatch": 1, "sequence": 64},
        "device": {"type": "cuda"},
        "memory": {"graph": graph},
    }
    config = from_mapping({name: {**raw.get(name, {}), **sections.get(name, {})} for name in {**raw, **sections}})
    fit = fit_run(config, plan_layers(config, gpus), gpus, device=load("h200"))
    step = fit.step
    assert step is not None and step.launch > 0 and step.limited_by_host
    assert step.capturable == capturable == ("memory.graph = true" in step.sentence())
    if graph == "auto":
        advised = [note for note in fit.notes if "memory.graph = true tries it" in note]
        assert bool(advised) == capturable


def assert_called(fit: Fit, why: str) -> None:
    assert fit.step is not None and fit.step.launch > 0
    assert any(
        note.startswith(f"memory.graph = true: steps cannot be captured and are launched by the host: {why}")
        for note in fit.notes
    )
    assert not any("captured step's memory" in note for note in fit.notes)
