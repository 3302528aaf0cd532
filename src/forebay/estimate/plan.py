"""Whether a run fits: what ``forebay plan`` is asked and answers, without a GPU, weights or other processes.

Input: a TOML file or preset, a published model by name, or a folder with a config.json (`ask`), and a number of
processes. Output: a `Fit`: for each pipeline rank what its fullest process holds at the highest level of a step.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from forebay.config import Config, FastPath, apply_override, from_mapping, load, presets, why_called
from forebay.config.fast_path import GRAPH
from forebay.config.sections import AUTO
from forebay.errors import UsageError, nearest
from forebay.estimate.device import DEFAULT, DeviceProfile
from forebay.estimate.device import load as load_device
from forebay.estimate.fit import RankFit, least_budget
from forebay.estimate.layer_time import Clock, is_symmetric
from forebay.estimate.layers import LayerPlan, fast_path_of, shape_of, sharing_of
from forebay.estimate.placement import Choice, Option, by_kind, sentences
from forebay.estimate.processes import forked_map
from forebay.estimate.rank import RankEstimate, RunEstimator, StepTimer
from forebay.estimate.rank_run import StepLevel
from forebay.estimate.routing import EvenRouting
from forebay.estimate.state import SAME_HOST, Sharing, all_to_all_bytes, symmetric_bytes
from forebay.estimate.step_time import StepTime
from forebay.estimate.trace_cache import ModelFacts, TraceCache
from forebay.estimate.types import Shape
from forebay.models.catalog import PUBLISHED, find
from forebay.models.families import decoder_layers
from forebay.models.placements import split_stash
from forebay.models.router import RouterStats
from forebay.policy import PLACEMENTS, Claim, PolicyError, format_bytes, is_inside, refuse_containers, resolve
from forebay.train.hf_io import chosen_attention, declared_by, skeleton
from forebay.train.model_checks import positions_of
from forebay.train.parallel import experts_in

_MICROBATCHES = 4  # of a step for each process; of a pipeline, for each of its ranks
_SETTINGS: Mapping[str, Any] = {
    "train.sequence": 4096,
    "train.microbatch": 1,
    "model.dtype": "float32",
    "model.compute": "bfloat16",
    "memory.compile": True,
    "device.type": "cuda",
}
"""Settings of a bare model, unless an override gives them. Parameters and moments are in float32, sharded over all processes;
several reduce gradients after each microbatch. `_filled` adds the rest."""
_SOME_LAYERS = 8  # among which there is one of each kind


@dataclass(frozen=True)
class PlanRequest:
    """What to plan. `chosen`: ``section.key`` to value of the defaults that a bare model is given; empty for a file or preset."""

    config: Config
    chosen: dict[str, Any] = field(default_factory=dict)

    @property
    def rebatch(self) -> bool:
        """Whether the batch follows the microbatch and the number of processes, because it is a default."""
        return "train.batch" in self.chosen

    def batch(self, microbatch: int, processes: int) -> int:
        """Sequences a step with microbatches of this size: the configuration's, or the default."""
        return _batch(microbatch, processes) if self.rebatch else self.config.train.batch

    def planned_as(self, config: Config) -> PlanRequest:
        """This request without the defaults that a search replaced in `config`."""
        planned = config.to_dict()
        sections = {name: planned[name.partition(".")[0]] for name in self.chosen}
        return replace(self, chosen={n: v for n, v in self.chosen.items() if sections[n][n.partition(".")[2]] == v})

    def sentence(self) -> str:
        if not self.chosen:
            return ""
        return "Defaults used (change with --set): " + ", ".join(
            f"{name}={json.dumps(value)}" for name, value in self.chosen.items()
        )


def ask(source: str, overrides: Iterable[str] = (), processes: int = 0) -> PlanRequest:
    """The request for a file, preset, published model or model folder, with ``section.key=value`` texts.

    Args:
        processes: of the run; 0 means as few as possible.

    Raises:
        UsageError: `source` is none of these, or what `forebay.config.load` raises.
    """
    model = bare_model(source)
    if model is None:
        return PlanRequest(load(source, overrides))
    raw: dict[str, Any] = {"model": model}
    for override in overrides:
        apply_override(raw, override)
    return _filled(raw, source, processes)


def bare_model(source: str) -> dict[str, Any] | None:
    """The `[model]` section of a bare model; None for a file or preset."""
    path = Path(source).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if path.is_file() or source in presets():
        return None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"the folder {source!r} has no config.json; valid is a model's folder, or a TOML file")
        return {"path": str(path), "weights": "random"}
    if find(source) is not None:
        return {"family": source}
    valid = (*PUBLISHED, *presets())
    raise UsageError(
        f"{source!r} is no file, preset, model folder or published model; {nearest(source.lower(), valid, 'name')}"
        f"valid presets are {', '.join(presets())}; published models are {', '.join(PUBLISHED)}"
    )


def _filled(raw: dict[str, Any], source: str, processes: int) -> PlanRequest:
    chosen: dict[str, Any] = {}

    def choose(name: str, value: Any) -> None:
        section, option = name.split(".")
        values = raw.setdefault(section, {})
        if option not in values:
            values[option] = chosen[name] = value

    for name, value in _SETTINGS.items():
        choose(name, value)
    so_far = from_mapping({**raw, "train": {"batch": raw["train"]["microbatch"], **raw["train"]}}, origin=source)
    declared = declared_by(so_far)
    longest = positions_of(declared)
    if longest is not None and longest < chosen.get("train.sequence", 0):
        raw["train"]["sequence"] = chosen["train.sequence"] = longest
    groups = so_far.parallel.replicate * so_far.parallel.pp
    processes = processes or groups * raw.get("parallel", {}).get("ep", 1)
    choose("model.attention", chosen_attention(so_far, declared, so_far.device.type != "cpu"))
    both = gcd(processes // groups, experts_in(declared) or 1)
    both = both if both == 1 or "ep" in raw.get("parallel", {}) or _takes_expert_groups(so_far, declared) else 1
    # The most that one host has and that divide processes and experts.
    choose("parallel.ep", max(n for n in range(1, SAME_HOST + 1) if both % n == 0))
    if processes > 1:
        choose("parallel.reduce", "microbatch")
    choose("train.batch", _batch(so_far.train.microbatch, processes))
    return PlanRequest(from_mapping(raw, origin=source), chosen)


def _takes_expert_groups(config: Config, declared: Any) -> bool:
    """Whether expert parallelism takes the family: what comes before and after its experts can run apart. Some layers are built
    on the meta device, which takes milliseconds; all would take a second."""
    text = (declared := copy.deepcopy(declared)).get_text_config()
    text.num_hidden_layers = min(text.num_hidden_layers, _SOME_LAYERS)
    section = replace(config.model, attention="eager")
    try:
        return all(parts.has_stages for parts in decoder_layers(skeleton(section, declared)))
    except (UsageError, ValueError):
        return True  # what is wrong with the model is said later


def _batch(microbatch: int, processes: int) -> int:
    return _MICROBATCHES * processes * (microbatch or 1)


_PARTS = ("parameters", "gradients", "optimizer", "activations", "transient", "cached", "other")


@dataclass(frozen=True)
class Fit:
    """The memory of a run, and the time of its step.

    Attributes:
        ranks: the fullest process of each pipeline rank.
        parameters: number of parameters of the whole model.
        budget: bytes a process may use; None if not given.
        sublayers: of all pipeline ranks, for one microbatch.
        notes: sentences about what these figures assume.
        step: None without a device.
        choices: one for each pipeline rank, if placements were chosen.
        settings: ``section.key`` to value of what a run with the chosen placements needs besides, to be the one that is planned.
        levels: by pipeline rank, what is in use while each part of a step runs.
    """

    ranks: tuple[RankFit, ...]
    world: int
    parameters: int
    budget: int | None
    sublayers: tuple[Option, ...]
    notes: tuple[str, ...]
    step: StepTime | None = None
    choices: tuple[Choice, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    levels: tuple[tuple[StepLevel, ...], ...] = ()

    @property
    def fits(self) -> bool | None:
        return None if self.budget is None else all(r.headroom(self.budget) >= 0 for r in self.ranks)

    @property
    def fullest(self) -> RankFit:
        """The rank that needs the largest budget: shares for the plan's own error may differ by rank."""
        return max(self.ranks, key=lambda r: least_budget(r.total, r.error))

    def verdict(self) -> str:
        most = self.fullest
        what = f"the peak is {format_bytes(most.total)} on rank {most.rank}, at {most.where}"
        if self.budget is None:
            return f"{_capitalized(what)}, to within {100 * most.error:.0f} %; give --budget for a verdict."
        room = most.headroom(self.budget)
        if room >= 0:
            return f"Fits {format_bytes(self.budget)} with {format_bytes(room)} to spare, {most.allowance}: {what}."
        return f"Does not fit {format_bytes(self.budget)}, {format_bytes(-room)} are missing, {most.allowance}: {what}."

    def placements(self) -> list[dict[str, Any]]:
        """By placement: number of sublayers, bytes that they save for one microbatch, and bytes that are held."""
        found = []
        for placement in PLACEMENTS:
            if mine := [h for h in self.sublayers if h.placement == placement]:
                saved, held = sum(h.saved for h in mine), sum(h.held for h in mine)
                found.append({"placement": placement, "parts": len(mine), "saved_bytes": saved, "held_bytes": held})
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "world": self.world,
            "parameters": self.parameters,
            "budget_bytes": self.budget,
            "fits": self.fits,
            "verdict": self.verdict(),
            "error": self.fullest.error,
            "ranks": [
                {
                    **asdict(rank),
                    "allocated": rank.allocated,
                    "reserved": rank.reserved,
                    "total": rank.total,
                    "headroom": None if self.budget is None else rank.headroom(self.budget),
                }
                for rank in self.ranks
            ],
            "placements": self.placements(),
            "chosen": by_kind(self.choices),
            "chosen_cost_ms": [1e3 * c.seconds for c in self.choices],
            "chosen_settings": dict(self.settings),
            "notes": list(self.notes),
            "step": None if self.step is None else self.step.as_dict(),
        }

    def table(self) -> Table:
        scale, unit = (1 << 30, "GiB") if self.fullest.total >= 1 << 30 else (1 << 20, "MiB")
        time = [] if self.step is None else [_capitalized(self.step.sentence())]
        table = Table(
            title=f"a process of {self.world} at its peak, in {unit}; {parameters_of(self)} in all",
            caption="\n".join((self.verdict(), *self._placed(), *sentences(self.choices), *time, *self.notes)),
            caption_justify="left",
        )
        table.add_column("rank", justify="right")
        for name in self.columns():
            table.add_column(name, justify="right")
        for rank in self.ranks:
            table.add_row(str(rank.rank), *(f"{size / scale:.2f}" for size in self.columns(rank).values()))
        return table

    def columns(self, rank: RankFit | None = None) -> dict[str, int]:
        """Bytes of a rank, by default the fullest, by the names of a table's columns."""
        rank = rank or self.fullest
        sizes = {name: getattr(rank, name) for name in (*_PARTS, "total")}
        return sizes if self.budget is None else {**sizes, "headroom": rank.headroom(self.budget)}

    def _placed(self) -> list[str]:
        return [
            f"{p['placement']}: {p['parts']} parts save {format_bytes(p['saved_bytes'])} a microbatch, "
            f"{format_bytes(p['held_bytes'])} are held ({100 * p['held_bytes'] / max(p['saved_bytes'], 1):.0f} %)."
            for p in self.placements()
        ]


def _capitalized(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def parameters_of(fit: Fit) -> str:
    """``30.53 billion parameters``."""
    scale, name = (1e9, "billion") if fit.parameters >= 1e9 else (1e6, "million")
    return f"{fit.parameters / scale:.2f} {name} parameters"


def fit_run(
    config: Config,
    plan: LayerPlan,
    world: int,
    budget: int | None = None,
    skew: float = 1.0,
    *,
    device: DeviceProfile | None = None,
    auto: int | None = None,
    traces: TraceCache | None = None,
    sharing: Sharing | None = None,
    stop_above: int | None = None,
    processes: int = 1,
) -> Fit:
    """Estimate the run of `plan` on `world` processes.

    Args:
        budget: bytes a process may use.
        skew: load of the fullest rank's experts over an even one.
        device: for the step time, and for the cost of chosen placements; without it the latter is that of
            `forebay.estimate.device.DEFAULT`.
        auto: choose placements with which a process fits so many bytes, instead of those of the configuration.
        sharing: of another trainer; default: what Forebay's does under `config`.
        stop_above: stop at the first rank that does not fit a budget of so many bytes. The result lacks the ranks that were not
            estimated, and the step's time.
        processes: that may estimate ranks at the same time; see `forked_map`.

    Raises:
        UsageError: a model that cannot be traced, experts that the processes do not divide, a pattern that matches nothing, a
            placement that the run's engine refuses, or a budget without its unit.
    """
    traces = traces or TraceCache()
    asked = config if auto is None else unplaced(config)
    path = fast_path_of(asked, world, traces)
    config = path.config
    estimator, notes = _estimator(
        config, plan, budget, skew, device, auto, traces, sharing or sharing_of(config, world)
    )
    estimates = _estimates(estimator, plan, stop_above, processes)
    ranks = [estimates[number] for number in sorted(estimates)]
    choices = tuple(rank.choice for rank in ranks if rank.choice is not None)
    placements = dict(estimator.placements)
    for choice in choices:
        placements |= choice.placements
    settings: dict[str, Any] = {}
    if auto is not None:
        asked = _with(asked, {"memory.policy": placements or "keep"})
        settings = _settings_beside(asked, path, world, traces)
    notes += _notes(config, set(placements.values()))
    notes += _path_notes(path, estimator.why_called)
    if settings:
        otherwise = fast_path_of(asked, world, traces).line
        notes.append(f"A run with these placements needs {assigned(settings)} besides; without, it is {otherwise}.")
    if over := [rank.over for rank in ranks if rank.over]:
        notes.append(f"No placements were found that are within the budget; the nearest exceed it: {', '.join(over)}.")
    fits = tuple(rank.fit for rank in ranks)
    _check_unit(budget, max(fits, key=lambda rank: rank.parameters))
    step = None
    if device is not None and len(ranks) == config.parallel.pp:
        stall = max(rank.stall for rank in ranks)
        # What "auto" would say of a graph, whatever was given.
        opened = fast_path_of(_with(asked, {GRAPH: AUTO}), world, traces)
        timer = StepTimer(estimator, placements, [fit.parameters for fit in fits], stall)
        step = replace(timer.step(), capturable=opened.may_capture)
    sublayers = tuple(sublayer for rank in ranks for sublayer in rank.sublayers)
    levels = tuple(rank.levels for rank in ranks)
    return Fit(fits, world, estimator.weights.total, budget, sublayers, tuple(notes), step, choices, settings, levels)


def unplaced(config: Config) -> Config:
    """`config` without placements: what ``--auto`` chooses them for. Its partition and step are those of such a run."""
    return _with(config, {"memory.policy": "keep", "memory.budget": "", "memory.pages": ""})


def _settings_beside(placed: Config, path: FastPath, world: int, traces: TraceCache) -> dict[str, Any]:
    """The fewest keys with which the run of `placed` has the step of `path`: placements may turn the fast path off."""

    def has_step(settings: Mapping[str, Any]) -> bool:
        return fast_path_of(_with(placed, settings), world, traces).config.step == path.config.step

    return next(settings for settings in ({}, {GRAPH: True}, path.chosen) if has_step(settings))


def _with(config: Config, settings: Mapping[str, Any]) -> Config:
    for name, value in settings.items():
        section, option = name.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{option: value})})
    return config


def assigned(settings: Mapping[str, Any]) -> str:
    """``memory.graph = true and parallel.overlap = true``."""
    return " and ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())


def _estimates(
    estimator: RunEstimator, plan: LayerPlan, stop_above: int | None, processes: int
) -> dict[int, RankEstimate]:
    """By pipeline rank; see `fit_run`."""
    numbers, memory = range(estimator.config.parallel.pp), plan.partition.memory
    if stop_above is None:
        return dict(zip(numbers, forked_map(estimator.rank, numbers, processes), strict=True))
    assert memory is not None
    fullest, *others = sorted(numbers, key=lambda rank: -memory[rank])
    found = {fullest: estimator.rank(fullest)}  # alone: most plans that do not fit end here
    estimates = forked_map(estimator.rank, others, processes)
    for number in others:
        if any(rank.fit.headroom(stop_above) < 0 for rank in found.values()):
            break
        found[number] = next(estimates)
    return found


def _check_unit(budget: int | None, most: RankFit) -> None:
    """Raise UsageError for a budget below 1 MiB and a rank's parameters: its unit was left out."""
    if budget is not None and budget < min(most.parameters, 1 << 20):
        raise UsageError(
            f"a budget of {format_bytes(budget)} is below the parameters alone: rank {most.rank} holds "
            f"{format_bytes(most.parameters)} of them; valid is more than that, such as 80GiB: a number alone is in bytes"
        )


def bounding(
    config: Config, plan: LayerPlan, world: int, traces: TraceCache, skew: float = 1.0, auto: int | None = None
) -> RunEstimator:
    """For `RunEstimator.least` and `RunEstimator.mean`, which need no walk. See `fit_run`."""
    config = fast_path_of(config, world, traces).config
    return _estimator(config, plan, None, skew, None, auto, traces, sharing_of(config, world))[0]


def _estimator(
    config: Config,
    plan: LayerPlan,
    budget: int | None,
    skew: float,
    device: DeviceProfile | None,
    auto: int | None,
    traces: TraceCache,
    sharing: Sharing,
) -> tuple[RunEstimator, list[str]]:
    c, p = config, config.parallel
    declared = traces.declared(c)
    text, routing = declared.get_text_config(), EvenRouting.of(declared)
    facts = traces.facts(c)
    if routing.experts and sharing.trainer:
        try:
            RouterStats(facts.model)  # refuses the routers that `forebay train` refuses
        except ValueError as error:
            raise UsageError(f"model.family: {error}") from error
    called = why_called(c, sharing.gpu, routing.experts)
    notes = _model_notes(c, facts.attention, routing.experts, skew)
    placements, light, whole = dict[str, str](), set[int](), set[int]()
    if auto is None:
        claims = _claims(c, facts)
        _refuse_stash(claims, c, facts)
        mode = c.recompute if c.model.experts == "forebay" else "full"
        placements, light, whole = _placements(claims, facts.sublayers, mode, notes)
    shape = shape_of(c, declared, sharing, skew)
    trace = traces.trace(c, shape)
    trace = trace.with_mlps([layer.mlp.light or layer.mlp for layer in trace.layers], light)
    if whole:
        checkpointed = traces.trace(c, replace(shape, checkpointed_experts=True))
        trace = trace.with_mlps([layer.mlp for layer in checkpointed.layers], whole)
    hidden = shape.sequence * shape.microbatch * text.hidden_size
    actions = None
    if p.pp > 1:
        # Chosen placements may offload nothing: then weight gradients wait as the schedule says.
        early = c.weights_early and auto is None
        schedule = p.schedule, p.pp, plan.microbatches, p.chunks, early
        actions = traces.pipeline(*schedule).actions
        if sharing.gpu and sharing.world <= SAME_HOST and p.may_share:
            sharing = replace(sharing, slot_bytes=traces.slots(*schedule) * hidden * sharing.compute)
    return RunEstimator(
        c,
        plan,
        facts.weights,
        facts.prefix,
        trace,
        sharing,
        placements,
        hidden=hidden,
        beside=_dispatcher_bytes(c, text, shape, sharing) + _mask_bytes(c, text, shape, plan.microbatches),
        clock=Clock.of(device or load_device(DEFAULT), c, routing, sharing),
        actions=actions,
        why_called=called,
        budget=budget,
        auto=auto,
    ), notes


def _mask_bytes(config: Config, text: Any, shape: Shape, microbatches: int) -> int:
    """Bytes of the masks that an engine makes for documents apart: of each microbatch of a step, for all layers of a kind.

    On one H200, four microbatches of 5312 tokens, of 215 MiB by this, took 251 MiB more than joined documents did.
    """
    if config.data.packing != "documents" or not config.has_engine:
        return 0
    kinds = {kind for kind in getattr(text, "layer_types", None) or () if kind != "linear_attention"}
    return _mask_of_sequence(config) * shape.microbatch * microbatches * max(1, len(kinds))


def _mask_of_sequence(config: Config) -> int:
    """Bytes of the mask of one sequence whose documents are apart."""
    size: int = getattr(torch, config.model.computed_in).itemsize
    return size * config.train.sequence**2


def _dispatcher_bytes(config: Config, text: Any, shape: Shape, sharing: Sharing) -> int:
    """Bytes of the token dispatcher outside of the allocator, on a GPU."""
    if sharing.ep == 1 or not sharing.gpu:
        return 0
    if is_symmetric(config):
        tokens = shape.sequence * shape.microbatch
        return symmetric_bytes(sharing.ep, tokens, text.hidden_size, text.num_experts_per_tok, sharing.compute)
    return all_to_all_bytes(sharing.ep)


def _claims(config: Config, facts: ModelFacts) -> list[Claim]:
    """What the configuration's policy places. Raises PolicyError for one that matches nothing, or that nests placements, and
    UsageError for a placement that an engine refuses."""
    policy, sublayers = config.memory.policy, facts.sublayers
    if policy == "auto":
        return []
    if isinstance(policy, str):
        placed = _moe_sublayers(facts) if policy == "stash" else []
        return [Claim(path, policy, policy) for path in placed or sublayers]
    sealed = _sealed(config, facts)
    here = [path for path in facts.paths if path not in sealed]
    claims = resolve(policy, here, sealed, _light_experts(config, facts.paths), sublayers)
    if config.has_engine:
        try:
            refuse_containers({claim.path: claim.placement for claim in claims}, sublayers)
        except PolicyError as error:
            raise UsageError(f"{config.engine_key}: {error}") from error
    return claims


def _refuse_stash(claims: Sequence[Claim], config: Config, facts: ModelFacts) -> None:
    """Raise UsageError for a "stash" that a run refuses: only what a token dispatcher brings to Forebay's experts is paged."""
    dispatches = config.cuts_at_dispatch and config.model.experts == "forebay"
    paged = {path for h in _moe_sublayers(facts) for path in (h, f"{h}.experts")} if dispatches else set()
    try:
        split_stash(facts.model, [claim for claim in claims if claim.path not in paged], None)
    except PolicyError as error:
        raise UsageError(f"memory.policy: {error}") from error


def _moe_sublayers(facts: ModelFacts) -> list[str]:
    return [path for path in facts.sublayers if f"{path}.experts" in facts.paths]


def _placements(
    claims: Sequence[Claim], sublayers: Sequence[str], recompute: str, notes: list[str]
) -> tuple[dict[str, str], set[int], set[int]]:
    """The placement of every sublayer that is not kept, the layers with an offloaded MoE sublayer whose experts recompute their
    first product, and the layers in which experts alone run again as a whole. `recompute`: "light" where that is possible."""
    found: dict[str, str] = {}
    uncounted: list[str] = []
    light, whole, known = set[int](), set[int](), frozenset(sublayers)  # no sublayer is inside another
    for claim in claims:
        inside = [claim.path] if claim.path in known else [h for h in sublayers if is_inside(h, [claim.path])]
        moe_path = claim.path.removesuffix(".experts")
        if inside:
            found |= dict.fromkeys(inside, claim.placement)
        elif claim.placement == "recompute" and found.get(moe_path) == "offload":
            light.add(sublayers.index(moe_path) // 2)
        elif claim.placement == "recompute" and recompute != "light" and moe_path in sublayers:
            whole.add(sublayers.index(moe_path) // 2)
        elif claim.placement in ("recompute", "stash") and moe_path in sublayers:
            found[moe_path] = claim.placement
        elif claim.placement != "keep":
            uncounted.append(claim.path)
    notes += _placement_notes(uncounted, light, whole)
    return found, light, whole


def _placement_notes(uncounted: Sequence[str], light: Iterable[int], whole: Iterable[int]) -> list[str]:
    """`light`, `whole`: see `_placements`."""
    notes = []
    if uncounted:
        more = " and others" * (len(uncounted) > 1)
        notes.append(f"Placements of other modules than sublayers are counted as keep: {uncounted[0]!r}{more}.")
    for numbers, what in (
        (light, "recompute their first product, which is neither saved nor offloaded"),
        (whole, "run again in backward; the rest of their sublayers is kept"),
    ):
        if layers := ", ".join(map(str, sorted(numbers))):
            notes.append(f"Experts of layers {layers} {what}.")
    return notes


def _sealed(config: Config, facts: ModelFacts) -> dict[str, str]:
    """Modules that a run compiles as a part of their sublayer, with that sublayer's path; see
    `forebay.models.placements.sealed_in_sublayers`."""
    if not config.memory.compile:
        return {}
    sublayers, between = set(facts.sublayers), config.cuts_at_dispatch
    depth = facts.prefix.count(".") + 3
    tops = {path: ".".join(path.split(".")[:depth]) for path in facts.paths}
    return {
        path: top
        for path, top in tops.items()
        if top in sublayers and path != top and not (between and path == f"{top}.experts")
    }


def _light_experts(config: Config, paths: Sequence[str]) -> list[str]:
    """Experts that a run can recompute inside an offloaded sublayer: Forebay's, outside of compiled code."""
    memory, ours = config.memory, config.model.experts == "forebay"
    outside = config.cuts_at_dispatch or not memory.compile
    return [p for p in paths if p.endswith(".experts") and outside and memory.recompute == "light" and ours]


def _model_notes(config: Config, attention: str, experts: int, skew: float) -> list[str]:
    notes = []
    if not experts:
        notes.append("A dense model: it has no experts.")
    if skew != 1 and config.parallel.ep == 1:
        notes.append("A skew changes nothing here: processes do not share experts (parallel.ep = 1).")
    if attention == "eager" and config.model.attention != "eager":
        notes.append(f"Attention is counted as eager, which saves more than {config.model.attention}.")
    return notes


def _notes(config: Config, placed: Collection[str]) -> list[str]:
    """`placed`: placements of the run's sublayers, given or chosen."""
    notes = []
    if "offload" in placed:
        notes.append(
            "What is offloaded is what the link carries in the time that the device profile gives a step."
            if config.memory.offload == "fit"
            else "Offloading waits for the link where it has to."
        )
    if config.weights_early and config.parallel.pp > 2:
        notes.append(
            "Weight gradients are made before a rank waits for another one, earlier than the schedule has them."
        )
    if config.data.packing == "documents":
        omitted = "that attention is slower with the masks of documents"
        if not config.has_engine:
            mask = format_bytes(_mask_of_sequence(config))
            omitted = (
                f"the masks of documents, {mask} a sequence for each layer that keeps its attention, and {omitted}"
            )
        notes.append(f"Not counted: {omitted}.")
    return notes


def _path_notes(path: FastPath, called: str) -> list[str]:
    """How a step runs. `called`: see `why_called`."""
    graph = path.config.step.graph
    if graph and called:  # what it has of the fast path is not fast
        return [f"memory.graph = true: steps cannot be captured and are launched by the host: {called}."]
    notes = [f"{_capitalized(path.line)}."] if path.line else []
    if graph:
        notes.insert(0, "A captured step's memory is its own: what the optimizer needs for a moment comes on top.")
    return notes
