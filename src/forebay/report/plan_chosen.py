"""What the planner chose: placements with what each frees and costs, and what a search found.

In: the `Choice`s of a `Fit`, or a `Search`. Out: pieces of a page. Nothing is computed here but sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.planner.choose import Choice, by_kind
from forebay.planner.fit import headroom
from forebay.policy import format_bytes
from forebay.report.charts import bar
from forebay.report.markup import Html, join, tag
from forebay.report.page import Section, missing
from forebay.report.tables import duration, ranges, table
from forebay.train.searching import Search

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
