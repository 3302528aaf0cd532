"""The page of a plan: does it fit, what fills the memory, and what is placed where.

In: a `Planned`, the configuration, and its name. Out: HTML as text, for `forebay.report.write`.
"""

from __future__ import annotations

import json

from forebay.report.charts import Ceiling, bar
from forebay.report.markup import Html, join, tag
from forebay.report.memory import hero, largest_saved, placements_body, ranks_section, step_section
from forebay.report.page import Section, Verdict, page
from forebay.report.planned import Planned
from forebay.report.tables import count, table
from forebay.train.config import Config
from forebay.train.planning import LayerPlan


def plan_page(planned: Planned, config: Config, name: str) -> str:
    """The page.

    Args:
        name: of the configuration, as it was asked for.
    """
    fit = planned.fit
    most = fit.fullest
    of = f" of pipeline rank {most.rank}, the fullest of {len(fit.ranks)}" if len(fit.ranks) > 1 else ""
    on = f"on {fit.world:,} processes" if fit.world > 1 else "on one process"
    what = f"allocated at most by a process{of}, at {most.where}. A model of {count(fit.parameters)} parameters {on}"
    budget = [Ceiling("budget", fit.budget, "budget")] if fit.budget is not None else []
    lead = (
        "What a process has allocated while each half of its layers runs, forward and backward: a half is attention, or what "
        "comes after it."
    )
    where = "Each layer's halves, and where what they save for backward waits. Freed is what the device need not hold."
    sections = [
        step_section(planned, {r.rank: budget for r in fit.ranks}, {}, lead),
        ranks_section(fit),
        Section("placements", "Placements", where, placements_body(fit)),
        Section("saved", "What saves most", "", largest_saved(fit)),
        _pipeline(planned.plan),
        about(config, fit.notes),
    ]
    line = ("budget", fit.budget) if fit.budget is not None else None
    return page("plan", name, _verdict(planned), hero(fit, what, line), sections)


def about(config: Config, notes: tuple[str, ...], more: Html | None = None) -> Section:
    """What the figures leave out, and the whole configuration."""
    text = json.dumps(config.to_dict(), indent=2, ensure_ascii=False)
    said = tag("ul", [tag("li", note) for note in notes], class_="notes") if notes else None
    opened = tag("details", tag("summary", "Configuration"), tag("pre", text, tabindex="0"))
    return Section("about", "What these figures stand on", "", join(said, more, opened))


def _verdict(planned: Planned) -> Verdict:
    fit = planned.fit
    kind, word = {True: ("good", "Fits"), False: ("bad", "Does not fit"), None: ("plain", "No budget")}[fit.fits]
    return Verdict(kind, word, fit.verdict())


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
