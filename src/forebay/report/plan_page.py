"""The page of a plan: does it fit, what fills the memory, what is placed where, and how long a step takes.

Input: a `Planned`, the configuration, its name, and the search that led to it; or a configuration to plan (`plan_run`).
Output: HTML as text. A plan without a device, without chosen placements or without a search has no section on it.
The sections on memory are also those of a run's page, with what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from forebay.config import Config
from forebay.estimate.allocator import ROLES
from forebay.estimate.fit import RankFit
from forebay.estimate.layers import LayerPlan, plan_layers
from forebay.estimate.placement import Choice, by_kind, ranges
from forebay.estimate.plan import Fit, fit_run
from forebay.estimate.search import Search
from forebay.estimate.step_time import StepTime
from forebay.estimate.trace_cache import TraceCache
from forebay.policy import PLACEMENTS, format_bytes
from forebay.report.charts import (
    COLUMNS,
    PARTS,
    Ceiling,
    Level,
    Scale,
    bar,
    byte_scale,
    has_stages,
    legend,
    parts_bar,
    placement_map,
    stacked,
)
from forebay.report.html import (
    Child,
    Html,
    Section,
    Verdict,
    alike,
    big,
    count,
    duration,
    grouped,
    join,
    layer_of,
    page,
    table,
    tag,
    tiles,
)

PLACED = "The placement of each sublayer's saved tensors. Freed bytes are those that the device does not hold until backward."
_HEADROOM = 1.1  # of a chart over its highest point, for the text there
_LABELS, _FEW_LABELS = 9, 4  # along a step, in a large chart and in a small one
_SHOWN = 2.0  # a line further above the highest point would flatten the chart
_LARGEST = 12  # rows of the table of saved tensors
_MESHES = 12  # rows of a table, as on a terminal
_NOTHING = 1e-9  # seconds: a rounding difference
_WAITS = 1e-6  # seconds below which nothing waits
_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "transient", "cached", "other", "total")
_MEANS: Mapping[str, str] = {
    "keep": "stays on the device",
    "recompute": "is computed again in backward",
    "offload": "is copied to host memory",
    "stash": "is packed into pages",
}
_Levels: TypeAlias = Mapping[int, Sequence[Level]]
_Lines: TypeAlias = Mapping[int, Sequence[Ceiling]]


@dataclass(frozen=True)
class Planned:
    """A plan and its verdict."""

    plan: LayerPlan
    fit: Fit

    @property
    def levels(self) -> _Levels:
        """By pipeline rank the levels of a step in their order."""
        return {
            rank.rank: [
                Level(level.action, level.where, {"other": rank.other, **dict(zip(ROLES, level.by_role, strict=True))})
                for level in levels
            ]
            for rank, levels in zip(self.fit.ranks, self.fit.levels, strict=True)
        }


def plan_run(config: Config, world: int) -> Planned:
    """Plan a run on `world` processes, without a budget.

    Raises:
        UsageError: see `forebay.estimate.layers.plan_layers` and `forebay.estimate.plan.fit_run`.
    """
    traces = TraceCache()
    plan = plan_layers(config, world, traces)
    return Planned(plan, fit_run(config, plan, world, traces=traces))


def plan_page(planned: Planned, config: Config, name: str, found: Search | None = None) -> str:
    """The page.

    Args:
        name: name of the configuration, as given on the command line.
        found: the search that found the plan.
    """
    fit = planned.fit
    budget = [Ceiling("budget", fit.budget, "budget")] if fit.budget is not None else []
    chosen = _chosen(fit.choices) if fit.choices else None
    sections = [
        _search_section(found) if found is not None else None,
        step_section(planned, {r.rank: budget for r in fit.ranks}, {}, _lead(fit)),
        _ranks_section(fit),
        time_section(fit.step) if fit.step is not None else None,
        Section("placements", "Placements", PLACED, join(placements_body(fit), chosen)),
        Section("saved", "Largest saved tensors", "", _largest_saved(fit)),
        _pipeline(planned.plan),
        about(config, fit.notes),
    ]
    line = ("budget", fit.budget) if fit.budget is not None else None
    top = hero(parts_of(fit.fullest), _what(fit), line, more=_tiles(fit))
    return page("plan", name, _verdict(fit), top, [s for s in sections if s is not None])


def _verdict(fit: Fit) -> Verdict:
    kind, word = {True: ("good", "Fits"), False: ("bad", "Does not fit"), None: ("plain", "No budget")}[fit.fits]
    return Verdict(kind, word, fit.verdict().removeprefix(word).lstrip())


def _what(fit: Fit) -> str:
    """The main figure in words. On a CPU only allocated memory is known."""
    most = fit.fullest
    of = f" of pipeline rank {most.rank}, the fullest of {len(fit.ranks)}" if len(fit.ranks) > 1 else ""
    on = f"on {fit.world:,} processes" if fit.world > 1 else "on one process"
    model = f"A model of {count(fit.parameters)} parameters {on}"
    if not most.cached:
        return f"allocated at most by a process{of}, at {most.where}. {model}"
    inside = f"{format_bytes(most.reserved)} of it reserved by torch's allocator"
    return f"taken from its GPU by a process{of}, {inside}; the peak is at {most.where}. {model}"


def _lead(fit: Fit) -> str:
    lead = "Memory that a process has allocated while each sublayer (attention or MLP) runs forward and backward."
    line = " The line is what the process takes from the GPU: the allocator reserves whole segments and keeps them."
    return lead + line * any(rank.cached for rank in fit.ranks)


def _tiles(fit: Fit) -> Html | None:
    found = [] if fit.step is None else time_tiles(fit.step)
    if fit.choices:
        most = max(fit.choices, key=lambda choice: choice.seconds)
        of = f", rank {most.rank}" if len(fit.choices) > 1 and most.seconds else ""
        found.append(("chosen placements cost", duration(most.seconds), f"a step{of}"))
    return tiles(found) if found else None


# Memory


def parts_of(level: RankFit) -> dict[str, int]:
    """Bytes by part."""
    return {part: getattr(level, part) for part in PARTS}


def without_other(parts: Mapping[str, int]) -> dict[str, int]:
    """Bytes by part in torch's allocator, which holds all but "other"."""
    return {part: size for part, size in parts.items() if part != "other"}


def hero(
    parts: Mapping[str, int],
    what: str,
    line: tuple[str, int] | None,
    figure: int | None = None,
    more: Html | None = None,
) -> Html:
    """The main figure of a page, and what the planned peak is made of.

    Args:
        parts: bytes of the planned peak by part.
        what: what the figure is, in words.
        line: name and bytes of a limit or a measurement.
        figure: a figure other than the planned peak.
        more: content below.
    """
    total = sum(parts.values())
    whole = max(total, line[1] if line else 0)
    limit = None
    if line is not None:
        early = " early" * (line[1] < 0.4 * whole)
        label = tag("span", f"{line[0]} {format_bytes(line[1])}")
        limit = tag("span", label, class_=f"limit{early}", style=f"left:{100 * line[1] / whole:.2f}%")
    entries = [(f"f-{p}", p, format_bytes(parts[p])) for p in PARTS if parts.get(p)]
    described = "Planned peak: " + ", ".join(f"{name} {size}" for _, name, size in entries)
    kind = "whole limited" if line else "whole"
    bars = tag("div", parts_bar(parts, whole), limit, class_=kind, role="img", aria_label=described)
    shown = big(total if figure is None else figure)
    return tag("div", shown, tag("p", what, class_="made"), bars, legend(entries), more, class_="hero")


def step_section(
    planned: Planned, ceilings: _Lines, measured: Mapping[int, Mapping[str, int]], lead: str, outside: bool = True
) -> Section:
    """Memory over a step: the fullest rank in a large chart, the others in small ones, all on one scale.

    The stack is the memory in use; a line over it is what the process takes from the GPU.

    Args:
        ceilings: further lines by rank.
        measured: by rank, bytes at the end of each action.
        outside: include memory outside of torch's allocator. Otherwise the line is what the allocator reserves.
    """
    levels, fullest = planned.levels, planned.fit.fullest.rank
    if not outside:
        levels = {r: [replace(lv, bytes=without_other(lv.bytes)) for lv in found] for r, found in levels.items()}
    lines = {r: list(ceilings.get(r, ())) for r in levels}
    taken = {r.rank: r.total if outside else r.reserved for r in planned.fit.ranks}
    for rank in planned.fit.ranks:
        if rank.cached:  # a line over the whole step, because the allocator returns nothing to the GPU within it
            name = "taken from the GPU" if outside else "planned to be reserved"
            lines[rank.rank].insert(0, Ceiling(name, taken[rank.rank], "cached"))
    shown = {r: [c for c in found if c.bytes <= _SHOWN * taken[fullest]] for r, found in lines.items()}
    scale = byte_scale(_HEADROOM * max([taken[fullest], *(c.bytes for found in shown.values() for c in found)]))
    figures = {
        rank: _step_figure(rank, levels, shown[rank], scale, measured.get(rank, {}), large=rank == fullest)
        for rank in levels
    }
    large = figures.pop(fullest)
    small = tag("div", figures.values(), class_="many") if figures else None
    body = join(_step_legend(levels, shown), large, small, _step_notes(levels, lines, shown))
    return Section("step", "Memory over a step", lead, body)


def _step_figure(
    rank: int, levels: _Levels, lines: Sequence[Ceiling], scale: Scale, measured: Mapping[str, int], large: bool
) -> Html:
    peak = max(levels[rank], key=lambda level: level.total)
    used = f"in use at most {format_bytes(peak.total)}"
    taken = "".join(f"; {c.name} {format_bytes(c.bytes)}" for c in lines if c.color == "cached")
    described = f"Planned memory of rank {rank} over a step, {used} at {peak.where}{taken}."
    axis, labels, title, remark = "the step", _FEW_LABELS, f"Rank {rank}", scale.unit
    if large:
        example = "F3 is the forward of microbatch 3"
        if any(has_stages(found) for found in levels.values()):
            example = "0F3 is the forward of stage 0 and microbatch 3"
        axis = f"sublayers of the step in the order in which they run; {example}, B is a backward"
        title = f"{title}, the fullest" if len(levels) > 1 else "A process"
        labels, remark = _LABELS, f"{scale.unit}; {used}, at {peak.where}{taken}"
    chart = stacked(levels[rank], scale, lines, described, axis, measured, labels)
    caption = tag("figcaption", tag("b", title), tag("span", remark))
    return tag("figure", caption, chart, class_=None if large else "small")


def _step_legend(levels: _Levels, shown: _Lines) -> Html:
    used = {part for found in levels.values() for level in found for part, size in level.bytes.items() if size}
    named = {c.name: c for found in shown.values() for c in found}
    entries = [(f"f-{part}", part, "") for part in reversed(PARTS) if part in used]
    return legend(entries + [(f"s-{c.color}", c.name, "") for c in named.values()])


def _step_notes(levels: _Levels, lines: _Lines, shown: _Lines) -> Html | None:
    above = {(c.name, c.bytes) for rank, found in lines.items() for c in found if c not in shown[rank]}
    notes = [f"The {name} of {format_bytes(size)} is above this chart." for name, size in sorted(above)[:1]]
    if any(len(found) > COLUMNS for found in levels.values()):
        notes.append(f"Each of the {COLUMNS} columns shows the highest of several sublayers.")
    return tag("p", " ".join(notes), class_="lead") if notes else None


def _ranks_section(fit: Fit) -> Section:
    """A row for each rank: what its peak is made of, and its headroom in the budget."""
    whole = max([fit.budget or 0, *(r.total for r in fit.ranks)])
    rows = []
    for rank in fit.ranks:
        row: list[Child] = [str(rank.rank), tag("span", parts_bar(parts_of(rank), whole), aria_hidden="true")]
        row += [format_bytes(getattr(rank, name)) for name in _COLUMNS]
        row += [_room(rank.headroom(fit.budget))] if fit.budget is not None else []
        rows.append(row)
    heads = "|".join(["rank", ":share", *(f"{name}:n" for name in _COLUMNS)])
    heads += "|headroom:n" * (fit.budget is not None)
    most = next(n for n, r in enumerate(fit.ranks) if r is fit.fullest) if len(fit.ranks) > 1 else None
    body = table("Each rank at the peak of its step, its fullest process", heads, rows, most)
    return Section("ranks", "By rank", _ranks_lead(fit), body)


def _ranks_lead(fit: Fit) -> str:
    notes = [f"The fullest process of each pipeline rank, of {fit.world:,} in all."] if len(fit.ranks) > 1 else []
    if any(rank.cached for rank in fit.ranks):
        notes.append(
            "Cached memory is reserved by the caching allocator but not in use; it is not returned to the GPU."
        )
    if any(rank.other for rank in fit.ranks):
        notes.append(
            "Other memory is outside of the allocator: CUDA's context, NCCL, symmetric memory, a CUDA graph's nodes."
        )
    return " ".join(notes)


def _room(size: int) -> Html:
    """A headroom in bytes; a negative one is emphasized."""
    return tag("span", format_bytes(size), class_="less" if size >= 0 else "over")


# Time


def time_tiles(step: StepTime) -> list[tuple[str, str, str]]:
    """Name, figure and remark; see `forebay.report.html.tiles`."""
    found = [
        ("expected step time", duration(step.seconds), _device(step)),
        ("tokens a second", f"{step.tokens_per_second:,.0f}", "of all processes"),
    ]
    if len(step.busy) > 1:
        low, high = (f"{100 * share:.0f}" for share in (min(step.bubble), max(step.bubble)))
        found.append(("bubble", f"{high} %" if low == high else f"{low} to {high} %", "by pipeline rank"))
    return found


def time_section(step: StepTime) -> Section:
    """The parts of a step's time, and the actions of each rank."""
    lead = (
        f"Expected {_device(step)}; --device names another GPU, or a file of forebay doctor --save-profile. "
        f"A step has {step.tokens:,} tokens."
    )
    if step.host:
        lead += f" The slowest host needs {duration(step.host)} to launch the schedule's kernels."
    if step.limited_by_host:
        lead += " That is longer than they run" + ": memory.graph = true captures the launches" * step.capturable + "."
    return Section("time", "Time of a step", lead, join(_time_by_part(step), _time_by_rank(step)))


def _device(step: StepTime) -> str:
    return f"on {step.device}" + ("" if step.measured else ", from data sheets")


def _time_by_part(step: StepTime) -> Html:
    parts = [
        ("schedule on the device, from the first forward to the last backward", step.schedule),
        ("waiting for the host's launches", step.gradients - step.gather - step.reduce - step.schedule),
        ("gathering sharded weights", step.gather),
        ("reducing gradients", step.reduce),
        ("optimizer", step.optimizer),
        ("host, between steps", step.seconds - step.gradients - step.optimizer),
    ]
    rows = [
        (name, duration(seconds), f"{100 * seconds / step.seconds:.1f} %", bar(seconds / step.seconds, "F"))
        for name, seconds in parts
        if seconds > _NOTHING
    ]
    rows.append(("whole step", duration(step.seconds), "100.0 %", join()))
    return table("Time by part, on the slowest rank", "part:path|time:n|share:n|:share", rows, len(rows) - 1)


def _time_by_rank(step: StepTime) -> Html:
    rows = [
        (str(rank), duration(busy), duration(exposed), f"{100 * max(idle, 0.0):.1f} %", bar(max(idle, 0.0), "other"))
        for rank, (busy, exposed, idle) in enumerate(zip(step.busy, step.exposed, step.bubble, strict=True))
    ]
    heads = "rank|busy:n|of it, exposed communication:n|bubble:n|:share"
    return table("Time by pipeline rank; the bubble is the share in which a rank runs nothing", heads, rows)


# Placements and saved tensors


def placements_body(fit: Fit) -> Html:
    """The placement of saved tensors, layer by layer, and what it frees."""
    found = fit.placements()
    whole = max([p["saved_bytes"] for p in found], default=1) or 1
    rows = []
    for p in found:
        saved, held = p["saved_bytes"], p["held_bytes"]
        freed = max(saved - held, 0)
        name = join(tag("span", p["placement"]), f": {_MEANS[p['placement']]}")
        sizes = [format_bytes(size) for size in (saved, held, freed)]
        rows.append([name, str(p["parts"]), *sizes, bar(freed / whole, p["placement"])])
    heads = "placement|parts:n|saved:n|held on the device:n|freed:n|:share"
    cells = layer_placements({h.path: h.placement for h in fit.sublayers})
    return join(cells, table("For one microbatch, as planned", heads, rows))


def layer_placements(placements: Mapping[str, str]) -> Html:
    """A map with a cell for each layer and part, colored by placement."""
    rows: dict[str, dict[int, str]] = {}
    for path, placement in placements.items():
        if (found := layer_of(path)) is not None:
            rows.setdefault(found[1] or "layer", {})[found[0]] = placement
    if not rows:
        return join()
    used = [p for p in PLACEMENTS if p in set(placements.values())]
    cells = {
        name: [(of[n], f"layer {n}") for n in sorted(of)]
        for name, of in sorted(rows.items(), key=lambda row: row[0] != "self_attn")
    }
    return join(placement_map(cells), legend([(f"f-{p}", f"{p}: {_MEANS[p]}", "") for p in used]))


def _chosen(choices: Sequence[Choice]) -> Html:
    """Placements that the solver chose, and what each rank pays; sublayers that free and cost the same in one row."""
    kinds = by_kind(choices)
    if not kinds:
        return tag("p", "The planner chose to keep all saved tensors.", class_="empty")
    most = max(row["freed_bytes"] * len(row["layers"]) for row in kinds) or 1
    rows = []
    for row in kinds:
        each, every = row["freed_bytes"], row["freed_bytes"] * len(row["layers"])
        what = [str(row["rank"]), row["placement"], tag("code", row["half"]), ranges(row["layers"], " to ")]
        costs = [format_bytes(each), f"{row['milliseconds']:.2f} ms", format_bytes(every)]
        rows.append([*what, *costs, bar(every / most, row["placement"])])
    heads = "rank|placement|sublayer|of layers:path|each frees:n|each costs:n|all free:n|:share"
    return join(table("Chosen by the planner; for one microbatch", heads, rows), _paid(choices))


def _paid(choices: Sequence[Choice]) -> Html:
    rows = [
        (
            str(choice.rank),
            str(len(choice.placed)),
            format_bytes(sum(p.freed for p in choice.placed)),
            duration(choice.seconds),
            duration(choice.waits) if choice.waits > _WAITS else "none",
        )
        for choice in choices
    ]
    heads = "rank|parts not kept:n|freed per microbatch:n|cost a step:n|of it, waiting for the link:n"
    return table("Cost of the chosen placements", heads, rows)


def _largest_saved(fit: Fit) -> Html:
    """The parts of the model that save most for one microbatch; the same part of all layers in one row."""
    found = grouped({h.path: h.saved for h in fit.sublayers})[:_LARGEST]
    whole = max((size for _, _, size in found), default=1) or 1
    held: dict[str, int] = {}
    for sublayer in fit.sublayers:
        held[alike(sublayer.path)] = held.get(alike(sublayer.path), 0) + sublayer.held
    rows = []
    for path, many, size in found:
        sizes = [format_bytes(n) for n in (size / many, size, held[path])]
        rows.append([tag("code", path), str(many), *sizes, bar(size / whole, "activations")])
    heads = "part of the model:path|parts:n|each saves:n|all save:n|held:n|:share"
    return table("Saved for the backward of one microbatch, as planned", heads, rows)


# The search, the pipeline and the configuration


def _search_section(found: Search) -> Section:
    """The values that were searched, and what limits them. The rest of the page shows the value found, or the nearest one."""
    settings = " ".join(f"--set {name}={value}" for name, value in found.settings.items())
    used: tuple[Any, ...] = ("This page shows what was found: ", tag("code", settings))
    if not settings:
        used = ("This page shows what comes nearest.",)
    shown = _meshes(found) if found.what == "mesh" else _tried(found)
    return Section("search", f"Search: {found.what}", found.sentence, join(tag("p", *used), shown))


def _tried(found: Search) -> Html:
    rows = [(f"{t.value:,}", _room(t.headroom)) for t in sorted(found.tried, key=lambda t: t.value)]
    return table("Values that were tried", f"{found.what}|headroom:n", rows)


def _meshes(found: Search) -> Html:
    budget = found.fit.budget
    rows = []
    for c in found.candidates[:_MESHES]:
        left = None if budget is None else _room(c.headroom(budget))
        time = None if c.seconds is None else duration(c.seconds)
        peak = "> " * c.at_least + format_bytes(c.peak)
        replicas = f" x {c.mesh.replicate} replicas" if c.mesh.replicate > 1 else ""
        rows.append((f"{c.mesh.pp} x {c.mesh.ep} x {c.mesh.fsdp}{replicas}", peak, str(c.rank), left, time))
    notes = []
    if len(found.candidates) > _MESHES:
        notes.append(f"{len(found.candidates) - _MESHES} more can run.")
    if found.refused:
        mesh, reason = found.refused[0]
        notes.append(f"{len(found.refused)} cannot run, such as {mesh}: {reason.rstrip('.')}.")
    heads = "PP x EP x FSDP|peak:n|on rank:n|headroom:n|a step:n"
    shown = table(f"Meshes of {found.fit.world:,} GPUs, best first", heads, rows)
    return join(shown, tag("p", " ".join(notes), class_="lead") if notes else None)


def _pipeline(plan: LayerPlan) -> Section:
    rows = plan.rows()
    longest = max(row["time_share"] for row in rows)
    found = [
        (
            str(row["rank"]),
            "; ".join(f"stage {s['stage']}: {plan.named(s['stage'])}" for s in row["stages"]),
            ", ".join(str(s["in_flight"]) for s in row["stages"]),
            f"{100 * row['time_share']:.1f} %",
            bar(row["time_share"] / longest, "F"),
        )
        for row in rows
    ]
    lead = (
        f"{plan.schedule[0].upper()}{plan.schedule[1:]}, {plan.microbatches} microbatches of {plan.tokens:,} tokens a step. "
        f"The slowest rank takes {plan.partition.balance:.3f} of the mean time. Times are estimates for an H200."
    )
    heads = "rank|layers:path|microbatches in flight:n|share of time:n|:share"
    return Section("pipeline", "Layers and ranks", lead, table("Layers of each pipeline rank", heads, found))


def about(config: Config, notes: tuple[str, ...], more: Html | None = None) -> Section:
    """The assumptions behind the figures, and the whole configuration."""
    text = json.dumps(config.to_dict(), indent=2, ensure_ascii=False)
    listed = tag("ul", [tag("li", note) for note in notes], class_="notes") if notes else None
    opened = tag("details", tag("summary", "Configuration"), tag("pre", text, tabindex="0"))
    return Section("about", "Assumptions and configuration", "", join(listed, more, opened))
