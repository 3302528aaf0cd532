"""What a plan refuses, chooses and notes, where a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import Config, from_mapping
from forebay.config import load as load_config
from forebay.errors import UsageError
from forebay.estimate.device import load
from forebay.estimate.layers import plan_layers
from forebay.estimate.plan import Fit, fit_run, unplaced
from forebay.models.families import decoder_layers
from forebay.policy import PolicyError
from forebay.train.trainer import Trainer
from tests.helpers import TRANSFORMERS
from tests.models.conftest import IN_ONE_STAGE
from tests.products import cover
from tests.train.common import DENSE, MODEL, config, write_text
from tests.train.families import FAMILIES, fields_of, tiny_of

pytestmark = pytest.mark.usefixtures("shared_traces")


def fit_of(settings: Any, world: int = 1, auto: int | None = None) -> Fit:
    return fit_run(settings, plan_layers(settings, world), world, auto, auto=auto)


@pytest.mark.parametrize(
    ("model", "policy", "said"),
    [
        ({}, "stash", "without expert parallelism"),
        ({}, {"*.mlp.experts": "stash"}, "without expert parallelism"),
        ({}, {"*.self_attn": "stash"}, "which is no paged region; valid are the experts of MoE layers"),
        ({"family": "qwen3", "config": DENSE}, "stash", "and this model has none"),
    ],
)
def test_plans_refuse_a_stash_that_runs_refuse(
    tmp_path: Path, model: dict[str, Any], policy: str | dict[str, str], said: str
) -> None:
    settings = config(write_text(tmp_path, 500), MODEL, model=model, memory={"policy": policy})
    reasons = []
    for refuses in (Trainer, fit_of):
        with pytest.raises(UsageError, match=said) as caught:
            refuses(settings)
        reasons.append(str(caught.value).split(": ", 1)[1])
    assert reasons[0] == reasons[1]


@pytest.mark.parametrize("path", ["model.layers.0.mlp.experts", "model.layers.0.self_attn.q_proj"])
def test_plans_refuse_placements_inside_compiled_code_as_runs_do(tmp_path: Path, path: str) -> None:
    memory = {"policy": {path: "recompute"}, "compile": True, "recompute": "full"}
    settings = config(write_text(tmp_path, 500), MODEL, memory=memory)
    reasons = []
    for refuses in (Trainer, fit_of):
        with pytest.raises((UsageError, PolicyError), match="only modules inside compiled regions") as caught:
            refuses(settings)
        reasons.append(str(caught.value))
    assert reasons[0] == f"[memory] and [model]: {reasons[1]}"


@pytest.mark.parametrize(
    ("world", "parallel", "experts", "takes"),
    [
        (1, {"overlap": True}, "forebay", True),
        (2, {"ep": 2}, "forebay", True),
        (2, {"pp": 2, "schedule": "1f1b"}, "forebay", True),
        (2, {}, "forebay", False),
        (1, {}, "transformers", False),
    ],
    ids=str,
)
def test_plans_take_a_stash_where_a_dispatcher_brings_rows(
    tmp_path: Path, world: int, parallel: dict[str, Any], experts: str, takes: bool
) -> None:
    model, train = {"experts": experts, "dtype": "bfloat16"}, {"batch": 8, "microbatch": 1}
    settings = config(tmp_path, MODEL, model=model, train=train, memory={"policy": "stash"}, parallel=parallel)
    if not takes:
        with pytest.raises(UsageError, match="'stash' puts 'stash' on"):
            fit_of(settings, world)
        return
    placed = {row["placement"]: row["parts"] for row in fit_of(settings, world).placements()}
    assert placed["stash"] == MODEL["num_hidden_layers"]


SIZES = {**MODEL, "hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 64, "num_hidden_layers": 4}
OPEN: dict[str, Any] = {"overlap": "auto", "reshard": "auto", "capacity_factor": "auto"}


def opened(folder: Path, memory: dict[str, Any], parallel: dict[str, Any]) -> Config:
    """A run on GPUs whose fast path is open."""
    return config(
        folder,
        SIZES,
        model={"dtype": "float32", "compute": "bfloat16"},
        train={"batch": 8, "microbatch": 1, "sequence": 1024},
        memory={"graph": "auto", **memory},
        parallel={**OPEN, **parallel},
        device={"type": "cuda"},
    )


def with_settings(settings: Config, given: dict[str, Any]) -> Config:
    raw = settings.to_dict()
    for name, value in given.items():
        section, key = name.split(".")
        raw[section][key] = value
    return from_mapping(raw)


LEAST = 1  # a budget that nothing fits: the placements that hold the least


@pytest.fixture
def search_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers, all 81 choices are planned besides, which takes most of the time; see tests/estimate/test_placement.py."""
    monkeypatch.setattr("forebay.estimate.placement._FEW", 0)


GRAPH = {"memory.graph": True}


@pytest.mark.parametrize(
    ("world", "parallel", "memory", "budget", "settings"),
    [
        (1, {}, {}, LEAST, {}),
        (1, {}, {"policy": {"model.layers.0": "offload"}}, 80 << 30, {}),  # is ignored, and would turn the graph off
        (1, {}, {"policy": "auto", "budget": "1GiB"}, 80 << 30, {}),
        (2, {"ep": 2}, {}, 80 << 30, {}),
        (2, {"ep": 2}, {"policy": "recompute"}, 80 << 30, {}),
        (2, {"ep": 2}, {}, LEAST, {}),
        (2, {"ep": 2, "capacity_factor": 3}, {"policy": {"*.experts": "stash"}, "pages": "1GiB"}, LEAST, {}),
        (2, {"pp": 2, "schedule": "1f1b"}, {}, LEAST, GRAPH),
        (2, {"ep": 2}, {"graph": False}, LEAST, {}),
        (2, {"ep": 2, "dispatch": "nccl"}, {}, LEAST, {}),
        (2, {"ep": 2, "overlap": False}, {}, LEAST, {}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("search_alone")
def test_a_run_with_the_chosen_placements_is_the_one_that_was_planned(
    tmp_path: Path, world: int, parallel: dict[str, Any], memory: dict[str, Any], budget: int, settings: dict[str, Any]
) -> None:
    """By default, pipelines take a graph with few placements."""
    asked = opened(tmp_path, memory, parallel)
    chosen = fit_run(asked, plan_layers(unplaced(asked), world), world, auto=budget, device=load("h200"))
    placements = {path: placement for choice in chosen.choices for path, placement in choice.placements.items()}
    assert bool(placements) == (budget == LEAST) and dict(chosen.settings) == settings
    given = with_settings(unplaced(asked), {"memory.policy": placements or "keep", **chosen.settings})
    run = fit_run(given, plan_layers(given, world), world, device=load("h200"))
    assert chosen.step is not None and run.step is not None
    assert (run.ranks, run.step.seconds) == (chosen.ranks, chosen.step.seconds)
    (needs,) = [note for note in chosen.notes if note.startswith("A run with these placements needs")] or [""]
    assert bool(needs) == bool(settings) and all(key in needs for key in settings)
    assert not settings or "without, it is host-launched: memory.policy with 'recompute' did not run" in needs


@pytest.mark.parametrize("offload", ["fit", "all"])
def test_chosen_offloads_are_planned_as_a_run_with_them_is(offload: str) -> None:
    """The run's manager plans its copies: the peak is neither that of two sublayers in transfer, nor without what stays."""
    asked = with_settings(unplaced(load_config("quickstart")), {"memory.offload": offload})
    chosen = fit_run(asked, plan_layers(asked, 1), 1, auto=56 << 20, device=load("h200"))
    (choice,) = chosen.choices
    assert "offload" in choice.placements.values()
    kept = fit_run(asked, plan_layers(asked, 1), 1)
    held = [sum(sublayer.held for sublayer in fit.sublayers) for fit in (kept, chosen)]
    assert held[0] - held[1] == sum(placed.freed for placed in choice.placed)
    given = with_settings(asked, {"memory.policy": choice.placements})
    run = fit_run(given, plan_layers(given, 1), 1, device=load("h200"))
    assert chosen.step is not None and run.step is not None
    assert (run.ranks, run.step.seconds) == (chosen.ranks, chosen.step.seconds)


def test_what_is_chosen_is_what_notes_are_about(tmp_path: Path) -> None:
    """The policy of the configuration is not planned."""
    asked = opened(tmp_path, {"policy": "offload"}, {})
    for auto, offloads in ((None, True), (80 << 30, False)):
        fit = fit_run(asked, plan_layers(asked, 1), 1, auto=auto)
        assert any("What is offloaded" in note for note in fit.notes) == offloads


def test_a_step_that_is_called_has_no_fast_path(tmp_path: Path) -> None:
    settings = with_settings(opened(tmp_path, {"graph": True}, {}), {"model.compute": ""})
    notes = fit_of(settings).notes
    assert any("steps cannot be captured" in note for note in notes) and not any("ast path" in note for note in notes)


WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"pp": 2, "schedule": "1f1b"}),
    ({"policy": "recompute", "recompute": "full"}, {}),
    ({"policy": "offload"}, {}),
    ({"policy": "auto", "budget": "1MiB"}, {}),
    ({"compile": True}, {}),
    ({"graph": True}, OPEN),
]


@pytest.mark.usefixtures("search_alone", "short_chunks")
@pytest.mark.parametrize(("family", "way"), cover(FAMILIES, WAYS))
def test_every_family_is_planned(tmp_path: Path, family: str, way: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """By the paths that its sublayers have in a run."""
    (memory, parallel), world = way, way[1].get("pp", 1)
    settings = config(
        tmp_path,
        fields_of(family, 4),
        model={"family": family, "attention": "eager", "dtype": "float32", "compute": "bfloat16"},
        train={"batch": 8, "microbatch": 2, "sequence": 64},
        memory=memory,
        parallel=parallel,
        device={"type": "cuda"},
    )
    if world > 1 and family in IN_ONE_STAGE:
        with pytest.raises(UsageError, match=r"parallel.pp = 2: the layers of .* return .*; valid is 1"):
            plan_layers(settings, world)
        return
    plan = plan_layers(settings, world)
    fit = fit_run(settings, plan, world, device=load("h200"))
    with torch.device("meta"):
        paths = [
            path for y in decoder_layers(tiny_of(family, torch.bfloat16)) for path in (y.attention_path, y.block_path)
        ]
    assert [sublayer.path for sublayer in fit.sublayers if "." in sublayer.path] == paths
    assert fit.step is not None and fit.step.seconds > 0
    policy = memory.get("policy", "keep")
    placed = {row["placement"] for row in fit.placements()}
    assert policy == "keep" or placed > {"keep"}
    chosen = fit_run(unplaced(settings), plan, world, auto=1, device=load("h200"))
    assert {path for choice in chosen.choices for path in choice.placements} <= set(paths)
    assert chosen.fullest.total <= fit_run(unplaced(settings), plan, world).fullest.total


@pytest.mark.parametrize(("experts", "ep", "said"), [(False, 1, True), (True, 1, True), (True, 2, False)])
def test_a_skew_without_expert_parallelism_is_said_to_change_nothing(
    tmp_path: Path, experts: bool, ep: int, said: bool
) -> None:
    model = {} if experts else {"family": "qwen3", "config": DENSE}
    settings = config(tmp_path, MODEL, model=model, parallel={"ep": ep})
    plan = plan_layers(settings, ep)
    even, skewed = (fit_run(settings, plan, ep, skew=skew) for skew in (1.0, 2.0))
    assert any("A skew changes nothing" in note for note in skewed.notes) == said
    assert not any("skew" in note for note in even.notes) and (even.ranks == skewed.ranks or not said)


def test_too_many_layers_are_refused_before_they_are_made(tmp_path: Path) -> None:
    settings = config(tmp_path, {**MODEL, "num_hidden_layers": 10**6})
    with pytest.raises(
        UsageError, match="num_hidden_layers = 1000000 are more than a plan takes; valid is at most 1024"
    ):
        plan_layers(settings)


@pytest.mark.skipif(TRANSFORMERS >= (5, 23), reason="Jamba's routers return logits and ids from transformers 5.23 on")
def test_routers_that_runs_refuse_are_refused(tmp_path: Path) -> None:
    attention = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False}
    sizes = {key: MODEL[key] for key in MODEL if key not in ("head_dim", "moe_intermediate_size")}
    settings = config(write_text(tmp_path, 500), {**sizes, **attention}, model={"family": "jamba"})
    reasons = []
    for refuses in (Trainer, fit_of):
        with pytest.raises(UsageError, match="does not return logits and ids") as caught:
            refuses(settings)
        reasons.append(str(caught.value))
    assert reasons[0] == reasons[1]


@pytest.mark.parametrize("path", ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"])
def test_placements_that_are_not_counted_are_named(tmp_path: Path, path: str) -> None:
    notes = fit_of(config(tmp_path, memory={"policy": {path: "offload"}})).notes
    assert f"Placements of other modules than sublayers are counted as keep: {path!r}." in notes


@pytest.mark.parametrize("recompute", ["light", "full", "save-dispatch"])
def test_experts_that_are_recomputed_alone(tmp_path: Path, recompute: str) -> None:
    """As they run: they repeat their first product, or all of their own. A sublayer that is recomputed saves less than that."""
    fits = [
        fit_of(config(tmp_path, memory={"policy": policy, "recompute": recompute}))
        for policy in ("keep", {"*.mlp.experts": "recompute"}, {"*.mlp": "recompute"})
    ]
    kept, experts, sublayers = (fit.fullest.total for fit in fits)
    assert kept > experts >= sublayers and (experts > sublayers) == (recompute != "light")
    assert any("run again in backward; the rest" in note for note in fits[1].notes) == (recompute != "light")


@pytest.mark.parametrize("ep", [1, 2])
def test_save_dispatch_keeps_what_dispatch_returned(tmp_path: Path, ep: int) -> None:
    """Where nothing is dispatched, it is "full"."""
    light, full, save = (
        fit_of(config(tmp_path, memory={"policy": "recompute", "recompute": mode}, parallel={"ep": ep}), ep).ranks[0]
        for mode in ("light", "full", "save-dispatch")
    )
    assert full.activations < light.activations
    assert save == (light if ep > 1 else full)  # "light" keeps more, and stands in for it
