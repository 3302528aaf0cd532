"""The page of a plan: does it fit, what fills the memory, what is placed where, and how long a step takes.

Input: a `Planned`, the configuration, its name, and the search that led to it. Output: HTML as text. A plan without a device,
without chosen placements or without a search has no section on it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from forebay.config import Config
from forebay.estimate.layers import LayerPlan
from forebay.estimate.placement import Choice, by_kind
from forebay.estimate.plan import Fit
from forebay.estimate.search import Search
from forebay.estimate.step_time import StepTime
from forebay.estimate.walk import headroom
from forebay.policy import format_bytes
from forebay.report.charts import Ceiling, bar
from forebay.report.html import Html, Section, Verdict, count, duration, join, page, ranges, table, tag, tiles
from forebay.report.sections import (
    PLACED,
    Planned,
    hero,
    largest_saved,
    parts_of,
    placements_body,
    ranks_section,
    room,
    step_section,
)

_NOTHING = 1e-9  # seconds: a rounding difference
_MESHES = 12  # rows of a table, as on a terminal
_WAITS = 1e-6  # seconds below which nothing waits


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
        ranks_section(fit),
        time_section(fit.step) if fit.step is not None else None,
        Section("placements", "Placements", PLACED, join(placements_body(fit), chosen)),
        Section("saved", "Largest saved tensors", "", largest_saved(fit)),
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
    if any(rank.cached for rank in fit.ranks):
        lead += (
            " The line is what the process takes from the GPU: the allocator reserves whole segments and keeps them."
        )
    return lead


def _tiles(fit: Fit) -> Html | None:
    found = [] if fit.step is None else time_tiles(fit.step)
    if fit.choices:
        most = max(fit.choices, key=lambda choice: choice.seconds)
        of = f", rank {most.fit.rank}" if len(fit.choices) > 1 and most.seconds else ""
        found.append(("chosen placements cost", duration(most.seconds), f"a step{of}"))
    return tiles(found) if found else None


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
    """What a step's time is made of, and what each rank runs."""
    lead = (
        f"Expected {_device(step)}; --device names another GPU, or a file of forebay doctor --save-profile. "
        f"A step has {step.tokens:,} tokens."
    )
    if step.host:
        lead += f" The slowest host needs {duration(step.host)} to launch the schedule's kernels."
    if step.limited_by_host:
        lead += " That is longer than they run: memory.graph = true captures the launches."
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


def _chosen(choices: Sequence[Choice]) -> Html:
    """Placements that the solver chose, and what each rank pays; sublayers that free and cost the same in one row."""
    kinds = by_kind(choices)
    if not kinds:
        return tag("p", "The planner chose to keep all saved tensors.", class_="empty")
    most = max(row["freed_bytes"] * len(row["layers"]) for row in kinds) or 1
    rows = []
    for row in kinds:
        each, every = row["freed_bytes"], row["freed_bytes"] * len(row["layers"])
        what = [str(row["rank"]), row["placement"], tag("code", row["half"]), ranges(row["layers"])]
        costs = [format_bytes(each), f"{row['milliseconds']:.2f} ms", format_bytes(every)]
        rows.append([*what, *costs, bar(every / most, row["placement"])])
    heads = "rank|placement|sublayer|of layers:path|each frees:n|each costs:n|all free:n|:share"
    return join(table("Chosen by the planner; for one microbatch", heads, rows), _paid(choices))


def _paid(choices: Sequence[Choice]) -> Html:
    rows = [
        (
            str(choice.fit.rank),
            str(len(choice.placed)),
            format_bytes(sum(p.freed for p in choice.placed)),
            duration(choice.seconds),
            duration(choice.waits) if choice.waits > _WAITS else "none",
        )
        for choice in choices
    ]
    heads = "rank|parts not kept:n|freed per microbatch:n|cost a step:n|of it, waiting for the link:n"
    return table("Cost of the chosen placements", heads, rows)


def _search_section(found: Search) -> Section:
    """What was searched, and what limits it. The rest of the page shows what was found, or what comes nearest."""
    settings = " ".join(f"--set {name}={value}" for name, value in found.settings.items())
    used: tuple[Any, ...] = ("This page shows what was found: ", tag("code", settings))
    if not settings:
        used = ("This page shows what comes nearest.",)
    shown = _meshes(found) if found.what == "mesh" else _tried(found)
    return Section("search", f"Search: {found.what}", found.sentence, join(tag("p", *used), shown))


def _tried(found: Search) -> Html:
    rows = [(f"{t.value:,}", room(t.headroom)) for t in sorted(found.tried, key=lambda t: t.value)]
    return table("Values that were tried", f"{found.what}|headroom:n", rows)


def _meshes(found: Search) -> Html:
    budget = found.fit.budget
    rows = []
    for c in found.candidates[:_MESHES]:
        left = None if budget is None else room(headroom(c.peak, budget))
        time = None if c.seconds is None else duration(c.seconds)
        rows.append((f"{c.mesh.pp} x {c.mesh.ep} x {c.mesh.fsdp}", format_bytes(c.peak), str(c.rank), left, time))
    notes = []
    if len(found.candidates) > _MESHES:
        notes.append(f"{len(found.candidates) - _MESHES} more can run.")
    if found.refused:
        mesh, reason = found.refused[0]
        notes.append(f"{len(found.refused)} cannot run, such as {mesh}: {reason.rstrip('.')}.")
    return join(
        table(
            f"Meshes of {found.fit.world:,} GPUs, best first",
            "PP x EP x FSDP|peak:n|on rank:n|headroom:n|a step:n",
            rows,
        ),
        tag("p", " ".join(notes), class_="lead") if notes else None,
    )


def about(config: Config, notes: tuple[str, ...], more: Html | None = None) -> Section:
    """The assumptions behind the figures, and the whole configuration."""
    text = json.dumps(config.to_dict(), indent=2, ensure_ascii=False)
    listed = tag("ul", [tag("li", note) for note in notes], class_="notes") if notes else None
    opened = tag("details", tag("summary", "Configuration"), tag("pre", text, tabindex="0"))
    return Section("about", "Assumptions and configuration", "", join(listed, more, opened))


def _pipeline(plan: LayerPlan) -> Section:
    rows = plan.rows()
    longest = max(row["time_share"] for row in rows)
    found = [
        (
            str(row["rank"]),
            "; ".join(_stage(s) for s in row["stages"]),
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


def _stage(stage: dict[str, Any]) -> str:
    ends = ("embedding, " if stage["embedding"] else "", ", head" if stage["head"] else "")
    return f"stage {stage['stage']}: {ends[0]}{ranges(stage['layers'])}{ends[1]}"
