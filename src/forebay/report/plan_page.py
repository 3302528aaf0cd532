"""The page of a plan: does it fit, what fills the memory, what is placed where, and how long a step takes.

Input: a `Planned`, the configuration, its name, and the search that led to it. Output: HTML as text. What a plan does not have (a
device, chosen placements, a search) has no section.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from forebay.config import Config
from forebay.estimate.layers import LayerPlan
from forebay.estimate.placement import Choice, by_kind
from forebay.estimate.plan import Fit
from forebay.estimate.search import Search
from forebay.estimate.step_time import StepTime
from forebay.estimate.walk import headroom
from forebay.policy import format_bytes
from forebay.report.charts import Ceiling, bar
from forebay.report.html import Html, Section, Verdict, count, duration, join, missing, page, ranges, table, tag, tiles
from forebay.report.sections import Planned, hero, largest_saved, parts_of, placements_body, ranks_section, step_section

_NOTHING = 1e-9  # seconds: what is left of a difference


def time_tiles(step: StepTime) -> list[tuple[str, str, str]]:
    """Name, figure and what stands behind it; see `forebay.report.html.tiles`."""
    found = [
        ("expected step time", duration(step.seconds), _device(step)),
        ("tokens a second", f"{step.tokens_per_second:,.0f}", "of all processes"),
    ]
    if len(step.busy) > 1:
        low, high = (f"{100 * share:.0f}" for share in (min(step.bubble), max(step.bubble)))
        found.append(("bubble", f"{high} %" if low == high else f"{low} to {high} %", "by pipeline rank"))
    return found


def time_section(step: StepTime) -> Section:
    lead = (
        f"Expected {_device(step)}; --device names another GPU, or a file of forebay doctor --save-profile. "
        f"A step has {step.tokens:,} tokens."
    )
    if step.host:
        lead += f" The slowest host needs {duration(step.host)} to launch what the schedule runs."
    if step.limited_by_host:
        lead += " That is longer than it runs: memory.graph = true captures the launches."
    return Section("time", "Time of a step", lead, join(_where(step), _by_rank(step)))


def _device(step: StepTime) -> str:
    return f"on {step.device}" + ("" if step.measured else ", from data sheets")


def _where(step: StepTime) -> Html:
    """What a step is the sum of."""
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
    rows.append(("all of a step", duration(step.seconds), "100.0 %", join()))
    heads = [("part", "path"), ("time", "n"), ("share", "n"), ("", "share")]
    return table("Where the time goes, of the slowest rank", heads, rows, len(rows) - 1)


def _by_rank(step: StepTime) -> Html:
    rows = [
        (str(rank), duration(busy), duration(exposed), f"{100 * max(idle, 0.0):.1f} %", bar(max(idle, 0.0), "other"))
        for rank, (busy, exposed, idle) in enumerate(zip(step.busy, step.exposed, step.bubble, strict=True))
    ]
    heads = [("rank", ""), ("runs", "n"), ("of it, exchanges that nothing hides", "n"), ("bubble", "n"), ("", "share")]
    return table("What each pipeline rank runs of the schedule; the bubble is when it runs nothing", heads, rows)


_MESHES = 12  # in a table, as on a terminal
_WAITS = 1e-6  # seconds below which nothing waits


def chosen_body(choices: Sequence[Choice]) -> Html:
    """Placements that were chosen: halves that free and cost the same in one line, and what each rank pays."""
    kinds = by_kind(choices)
    if not kinds:
        return missing("The planner chose these placements: it keeps all.")
    most = max(row["freed_bytes"] * len(row["layers"]) for row in kinds) or 1
    rows = [
        (
            str(row["rank"]),
            row["placement"],
            tag("code", row["half"]),
            ranges(row["layers"]),
            format_bytes(row["freed_bytes"]),
            f"{row['milliseconds']:.2f} ms",
            format_bytes(row["freed_bytes"] * len(row["layers"])),
            bar(row["freed_bytes"] * len(row["layers"]) / most, row["placement"]),
        )
        for row in kinds
    ]
    heads = [("rank", ""), ("placement", ""), ("half", ""), ("of layers", "path"), ("each frees", "n")]
    heads += [("each costs", "n"), ("all free", "n"), ("", "share")]
    return join(table("Chosen by the planner; of one microbatch", heads, rows), _paid(choices))


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
    heads = [("rank", ""), ("parts not kept", "n"), ("free of a microbatch", "n"), ("cost a step", "n")]
    heads += [("of it waits for the link", "n")]
    return table("What they cost each rank", heads, rows)


def search_section(found: Search) -> Section:
    """What was searched, and what stopped it. The rest of the page is of what was found, or of what came nearest."""
    said = " ".join(f"--set {name}={value}" for name, value in found.settings.items())
    used = tag("p", "The page is of what was found: ", tag("code", said)) if said else None
    used = used or tag("p", "The page is of what comes nearest.")
    shown = _meshes(found) if found.what == "mesh" else _tried(found)
    return Section("search", f"Search: {found.what}", found.sentence, join(used, shown))


def _tried(found: Search) -> Html:
    rows = [(f"{t.value:,}", _room(t.headroom)) for t in sorted(found.tried, key=lambda t: t.value)]
    return table("What was looked at", [(found.what, ""), ("headroom", "n")], rows)


def _meshes(found: Search) -> Html:
    budget = found.fit.budget
    heads = [("PP x EP x FSDP", ""), ("peak", "n"), ("on rank", "n"), ("headroom", "n"), ("a step", "n")]
    rows = []
    for c in found.candidates[:_MESHES]:
        room = None if budget is None else _room(headroom(c.peak, budget))
        time = None if c.seconds is None else duration(c.seconds)
        rows.append((f"{c.mesh.pp} x {c.mesh.ep} x {c.mesh.fsdp}", format_bytes(c.peak), str(c.rank), room, time))
    said = []
    if len(found.candidates) > _MESHES:
        said.append(f"{len(found.candidates) - _MESHES} more can be run.")
    if found.refused:
        mesh, reason = found.refused[0]
        said.append(f"{len(found.refused)} cannot be run, such as {mesh}: {reason.rstrip('.')}.")
    return join(
        table(f"Meshes of {found.fit.world:,} GPUs, the best first", heads, rows),
        tag("p", " ".join(said), class_="lead") if said else None,
    )


def _room(size: int) -> Html:
    return tag("span", format_bytes(size), class_="less" if size >= 0 else "over")


# The page of a plan: does it fit, what fills the memory, what is placed where, and how long a step takes.
#
# In: a `Planned`, the configuration, its name, and the search that led to it, if there was one. Out: HTML as text, for
# `forebay.report.write`. What a plan does not have (a device, chosen placements, a search) has no section.


def plan_page(planned: Planned, config: Config, name: str, found: Search | None = None) -> str:
    """The page.

    Args:
        name: of the configuration, as it was asked for.
        found: by a search; the plan is that of what it found.
    """
    fit = planned.fit
    budget = [Ceiling("budget", fit.budget, "budget")] if fit.budget is not None else []
    where = "Each layer's halves, and where what they save for backward waits. Freed is what the device need not hold."
    chosen = chosen_body(fit.choices) if fit.choices else None
    sections = [
        search_section(found) if found is not None else None,
        step_section(planned, {r.rank: budget for r in fit.ranks}, {}, _lead(fit)),
        ranks_section(fit),
        time_section(fit.step) if fit.step is not None else None,
        Section("placements", "Placements", where, join(placements_body(fit), chosen)),
        Section("saved", "What saves most", "", largest_saved(fit)),
        _pipeline(planned.plan),
        about(config, fit.notes),
    ]
    line = ("budget", fit.budget) if fit.budget is not None else None
    top = hero(parts_of(fit.fullest), _what(fit), line, more=_tiles(fit))
    return page("plan", name, _verdict(planned), top, [s for s in sections if s is not None])


def _what(fit: Fit) -> str:
    """In words, what the one figure is. On a CPU nothing is known beside what is allocated."""
    most = fit.fullest
    of = f" of pipeline rank {most.rank}, the fullest of {len(fit.ranks)}" if len(fit.ranks) > 1 else ""
    on = f"on {fit.world:,} processes" if fit.world > 1 else "on one process"
    model = f"A model of {count(fit.parameters)} parameters {on}"
    if not most.cached:
        return f"allocated at most by a process{of}, at {most.where}. {model}"
    inside = f"{format_bytes(most.reserved)} of it reserved by torch's allocator"
    return f"taken from its GPU by a process{of}, {inside}; the peak is at {most.where}. {model}"


def _lead(fit: Fit) -> str:
    said = (
        "What a process has allocated while each half of its layers runs, forward and backward: a half is attention, or what "
        "comes after it."
    )
    if not any(rank.cached for rank in fit.ranks):
        return said
    return (
        f"{said} What it takes from the GPU for that is a line: the allocator reserves whole segments, and gives none back "
        "within a step."
    )


def _tiles(fit: Fit) -> Html | None:
    found = [] if fit.step is None else time_tiles(fit.step)
    if fit.choices:
        most = max(fit.choices, key=lambda choice: choice.seconds)
        of = f", rank {most.fit.rank}" if len(fit.choices) > 1 and most.seconds else ""
        found.append(("chosen placements cost", duration(most.seconds), f"a step{of}"))
    return tiles(found) if found else None


def about(config: Config, notes: tuple[str, ...], more: Html | None = None) -> Section:
    """What the figures leave out, and the whole configuration."""
    text = json.dumps(config.to_dict(), indent=2, ensure_ascii=False)
    said = tag("ul", [tag("li", note) for note in notes], class_="notes") if notes else None
    opened = tag("details", tag("summary", "Configuration"), tag("pre", text, tabindex="0"))
    return Section("about", "What these figures stand on", "", join(said, more, opened))


def _verdict(planned: Planned) -> Verdict:
    fit = planned.fit
    kind, word = {True: ("good", "Fits"), False: ("bad", "Does not fit"), None: ("plain", "No budget")}[fit.fits]
    return Verdict(kind, word, fit.verdict().removeprefix(word).lstrip())


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
    heads = [("rank", ""), ("layers", "path"), ("microbatches held", "n"), ("share of time", "n"), ("", "share")]
    lead = (
        f"{plan.schedule[0].upper()}{plan.schedule[1:]}, {plan.microbatches} microbatches of {plan.tokens:,} tokens a step. "
        f"The slowest rank takes {plan.partition.balance:.3f} of the mean. Time is estimated for an H200."
    )
    return Section("pipeline", "Layers and ranks", lead, table("What each pipeline rank has", heads, found))


def _stage(stage: dict[str, object]) -> str:
    layers = stage["layers"]
    assert isinstance(layers, list)
    numbers = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
    ends = ("embedding, " if stage["embedding"] else "", ", head" if stage["head"] else "")
    return f"stage {stage['stage']}: {ends[0]}{numbers}{ends[1]}"
