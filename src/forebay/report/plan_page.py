"""The page of a plan: does it fit, what fills the memory, what is placed where, and how long a step takes.

In: a `Planned`, the configuration, its name, and the search that led to it, if there was one. Out: HTML as text, for
`forebay.report.write`. What a plan does not have (a device, chosen placements, a search) has no section.
"""

from __future__ import annotations

import json

from forebay.policy import format_bytes
from forebay.report.charts import Ceiling, bar
from forebay.report.markup import Html, join, tag
from forebay.report.memory import hero, largest_saved, placements_body, ranks_section, step_section
from forebay.report.page import Section, Verdict, page
from forebay.report.plan_chosen import chosen_body, search_section
from forebay.report.plan_time import time_section, time_tiles
from forebay.report.planned import Planned, parts_of
from forebay.report.tables import count, duration, table, tiles
from forebay.train.config import Config
from forebay.train.fitting import Fit
from forebay.train.planning import LayerPlan
from forebay.train.searching import Search


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
