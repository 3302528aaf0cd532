"""The sections on memory that the pages of a plan and of a run share, and the plan that they show.

Input: a valid `Config` and a number of processes (`planned`), or a `Planned` and what was measured. Output: a
`Planned`, with the level of every rank at each sublayer of its step, and `Section`s. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forebay.config import Config
from forebay.estimate.layers import LayerPlan, plan_layers
from forebay.estimate.plan import Fit, fit_run
from forebay.estimate.walk import RankFit
from forebay.policy import PLACEMENTS, format_bytes
from forebay.report.charts import (
    COLUMNS,
    PARTS,
    Ceiling,
    Level,
    bar,
    byte_scale,
    legend,
    parts_bar,
    placement_map,
    stacked,
    staged,
)
from forebay.report.html import Html, Section, alike, big, grouped, join, layer_of, table, tag

# What the planner says of a configuration, with the whole curve of every rank's step.
#
# In: a valid `Config` and a number of processes. Out: a `Planned`. It is what ``forebay plan`` prints, and for each pipeline
# rank the level at every half of its step, of which the table has the highest.
#
# Levels are what is in use. They are told by the walk of `forebay.estimate.walk`, in which a half needs all that it needs at
# once. The allocator on paper (`forebay.estimate.reserved`) knows better, but only what is in use at most. So what a level has
# above that is taken off what comes and goes, and what the highest has too little is added, as the table has it. What the
# allocator reserves has no curve: it gives nothing back within a step.


@dataclass(frozen=True)
class Planned:
    """A plan, its verdict, and by pipeline rank the levels of a step in their order."""

    plan: LayerPlan
    fit: Fit
    levels: Mapping[int, Sequence[Level]]


class Curves:
    """Collects the levels of one plan, as `forebay.estimate.walk` tells of them."""

    def __init__(self) -> None:
        self._levels: dict[int, list[Level]] = {}

    def seen(self, action: str, level: RankFit) -> None:
        """See `forebay.estimate.walk.Seen`."""
        self._levels.setdefault(level.rank, []).append(Level(action, level.where, parts_of(level)))

    def planned(self, plan: LayerPlan, fit: Fit) -> Planned:
        """The plan with the levels that were told of."""
        most = {rank.rank: rank.allocated for rank in fit.ranks}
        return Planned(
            plan,
            fit,
            {r: _topped([_settled(level, most[r]) for level in found], most[r]) for r, found in self._levels.items()},
        )


def _settled(level: Level, most: int) -> Level:
    """With at most `most` bytes, as far as what comes and goes can be less."""
    cut = min(max(0, level.total - most), level.bytes["transient"])
    return replace(level, bytes={**level.bytes, "transient": level.bytes["transient"] - cut}, cut=cut) if cut else level


def _topped(levels: list[Level], most: int) -> list[Level]:
    """With the highest one at `most` bytes, if all are below: what the walk does not know of comes and goes there."""
    top = max(range(len(levels)), key=lambda i: levels[i].total)
    more = max(0, most - levels[top].total)
    transient = levels[top].bytes["transient"] + more
    return [
        *levels[:top],
        replace(levels[top], bytes={**levels[top].bytes, "transient": transient}),
        *levels[top + 1 :],
    ]


def planned(config: Config, world: int) -> Planned:
    """Plan a run on `world` processes, without a budget.

    Raises:
        UsageError: as `forebay.estimate.layers.plan_layers` and `forebay.estimate.plan.fit_run` do.
    """
    curves = Curves()
    plan = plan_layers(config, world)
    return curves.planned(plan, fit_run(config, plan, world, seen=curves.seen))


def parts_of(level: RankFit) -> dict[str, int]:
    """Bytes by what they are."""
    return {part: getattr(level, part) for part in PARTS}


_HEADROOM = 1.1  # of a chart over its highest point, for what is written there
_LABELS, _FEW_LABELS = 9, 4  # along a step, in a large chart and in a small one
_SHOWN = 2.0  # a ceiling that is further above the highest point would flatten the picture
_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "transient", "cached", "other")
_MEANS: Mapping[str, str] = {
    "keep": "waits on the device",
    "recompute": "is made again in backward",
    "offload": "waits in host memory",
    "stash": "is packed into pages",
}


def hero(
    parts: Mapping[str, int],
    what: str,
    line: tuple[str, int] | None,
    figure: int | None = None,
    more: Html | None = None,
) -> Html:
    """The figure that matters, and what the planned peak is made of.

    Args:
        parts: bytes of the planned peak, by what they are.
        what: in words, what the figure is.
        line: a limit, or a measurement: its name and bytes.
        figure: another figure than the planned peak.
        more: what stands below.
    """
    total = sum(parts.values())
    whole = max(total, line[1] if line else 0)
    limit = None
    if line is not None:
        early = " early" * (line[1] < 0.4 * whole)
        label = tag("span", f"{line[0]} {format_bytes(line[1])}")
        limit = tag("span", label, class_=f"limit{early}", style=f"left:{100 * line[1] / whole:.2f}%")
    entries = [(f"f-{p}", p, format_bytes(parts[p])) for p in PARTS if parts.get(p)]
    spoken = "Planned peak: " + ", ".join(f"{name} {size}" for _, name, size in entries)
    bars = tag(
        "div",
        parts_bar(parts, whole),
        limit,
        class_="whole limited" if line else "whole",
        role="img",
        aria_label=spoken,
    )
    return tag(
        "div",
        big(total if figure is None else figure),
        tag("p", what, class_="made"),
        bars,
        legend(entries),
        more,
        class_="hero",
    )


def step_section(
    planned: Planned,
    ceilings: Mapping[int, Sequence[Ceiling]],
    measured: Mapping[int, Mapping[str, int]],
    lead: str,
    outside: bool = True,
) -> Section:
    """Memory over a step: the fullest rank large, the others small, all on one scale. The stack is what is in use; what the
    process takes at most is a line over it.

    Args:
        ceilings: more lines by rank.
        measured: by rank, bytes at the end of each action.
        outside: with what lies outside of torch's allocator. Without it, the line is what the allocator reserves.
    """
    fullest = planned.fit.fullest
    curves = planned.levels if outside else {r: [_inside(lv) for lv in found] for r, found in planned.levels.items()}
    taken = {r.rank: r.total if outside else r.reserved for r in planned.fit.ranks}
    asked = {r: [*_taken(planned.fit, r, taken[r], outside), *ceilings.get(r, ())] for r in curves}
    shown = {r: [c for c in found if c.bytes <= _SHOWN * taken[fullest.rank]] for r, found in asked.items()}
    most = max([taken[fullest.rank], *(c.bytes for found in shown.values() for c in found)])
    scale = byte_scale(_HEADROOM * most)
    many = any(staged(levels) for levels in curves.values())
    numbers = "between stage and microbatch" if many else "with its microbatch"
    axis = f"halves of the step in the order in which they run; F is forward, B backward, {numbers}"
    charts = []
    for rank, levels in curves.items():
        first = rank == fullest.rank
        peak = max(levels, key=lambda level: level.height)
        more = "".join(f"; {c.name} {format_bytes(c.bytes)}" for c in shown[rank] if c.colour == "cached")
        spoken = f"Planned memory of rank {rank} over a step, in use at most {format_bytes(peak.total)} at {peak.where}{more}."
        inside = measured.get(rank, {})
        chart = stacked(
            levels, scale, shown[rank], spoken, axis if first else "the step", inside, _LABELS if first else _FEW_LABELS
        )
        title = f"Rank {rank}" + ", the fullest" * first if len(curves) > 1 else "A process"
        said_of = f"{scale.unit}; in use at most {format_bytes(peak.total)}, at {peak.where}{more}"
        caption = tag("figcaption", tag("b", title), tag("span", said_of if first else scale.unit))
        charts.append((first, tag("figure", caption, chart, class_=None if first else "small")))
    used = [p for p in reversed(PARTS) if any(level.bytes.get(p) for found in curves.values() for level in found)]
    named = {c.name: c for found in shown.values() for c in found}
    entries = [(f"f-{p}", p, "") for p in used] + [(f"s-{c.colour}", c.name, "") for c in named.values()]
    hidden = sorted(
        {(c.name, c.bytes) for found in asked.values() for c in found}
        - {(c.name, c.bytes) for found in shown.values() for c in found}
    )
    said = [f"The {name} of {format_bytes(size)} is above this picture." for name, size in hidden[:1]]
    if any(level.cut for found in curves.values() for level in found):
        said.append("No column is higher than what is in use at most with every allocation laid in its order.")
    if any(len(found) > COLUMNS for found in curves.values()):
        said.append(f"Each of the {COLUMNS} columns is the highest of the halves that fall into it.")
    others = [chart for first, chart in charts if not first]
    body = join(
        legend(entries),
        [chart for first, chart in charts if first],
        tag("div", others, class_="many") if others else None,
        tag("p", " ".join(said), class_="lead") if said else None,
    )
    return Section("step", "Memory over a step", lead, body)


def _inside(level: Level) -> Level:
    """Of torch's allocator alone."""
    return replace(level, bytes={part: size for part, size in level.bytes.items() if part != "other"})


def _taken(fit: Fit, rank: int, size: int, outside: bool) -> list[Ceiling]:
    """What the allocator took stays taken: a line over the whole step. None where it is not known, as on a CPU."""
    if not any(r.cached for r in fit.ranks if r.rank == rank):
        return []
    return [Ceiling("taken from the GPU" if outside else "planned to be reserved", size, "cached")]


def reserved_parts(rank: RankFit) -> dict[str, int]:
    """What torch's allocator holds, by what it is."""
    return {part: size for part, size in parts_of(rank).items() if part != "other"}


def ranks_section(fit: Fit) -> Section:
    """A line a rank: what its peak is made of, and what the budget leaves."""
    whole = max([fit.budget or 0, *(r.total for r in fit.ranks)])
    heads = [("rank", ""), ("", "share"), *((name, "n") for name in _COLUMNS), ("total", "n")]
    rows = []
    for rank in fit.ranks:
        row = [str(rank.rank), tag("span", parts_bar(parts_of(rank), whole), aria_hidden="true")]
        row += [format_bytes(getattr(rank, name)) for name in _COLUMNS]
        row.append(format_bytes(rank.total))
        if fit.budget is not None:
            room = rank.headroom(fit.budget)
            row.append(tag("span", format_bytes(room), class_="less" if room >= 0 else "over"))
        rows.append(row)
    if fit.budget is not None:
        heads.append(("headroom", "n"))
    most = next(n for n, r in enumerate(fit.ranks) if r is fit.fullest) if len(fit.ranks) > 1 else None
    body = table("Each rank at the highest point of its step, its fullest process", heads, rows, most)
    said = [f"The fullest process of each pipeline rank, of {fit.world:,} in all."] if len(fit.ranks) > 1 else []
    if any(rank.cached for rank in fit.ranks):
        said.append(
            "Cached is what the caching allocator has reserved beside what is in use; it gives none of it back."
        )
    if any(rank.other for rank in fit.ranks):
        said.append("Other lies outside of the allocator: CUDA's context, NCCL, symmetric memory.")
    return Section("ranks", "By rank", " ".join(said), body)


def placements_body(fit: Fit) -> Html:
    """Where saved tensors wait, layer by layer, and what that frees."""
    sublayers = {h.path: h.placement for h in fit.sublayers}
    rows = []
    found = fit.placements()
    whole = max([p["saved_bytes"] for p in found], default=1) or 1
    for p in found:
        freed = p["saved_bytes"] - p["held_bytes"]
        rows.append(
            (
                join(tag("span", p["placement"]), f": {_MEANS[p['placement']]}"),
                str(p["parts"]),
                format_bytes(p["saved_bytes"]),
                format_bytes(p["held_bytes"]),
                format_bytes(max(freed, 0)),
                bar(max(freed, 0) / whole, p["placement"]),
            )
        )
    heads = [
        ("placement", ""),
        ("parts", "n"),
        ("saved", "n"),
        ("held on the device", "n"),
        ("freed", "n"),
        ("", "share"),
    ]
    return join(the_map(sublayers), table("For one microbatch, as planned", heads, rows))


def the_map(placements: Mapping[str, str]) -> Html:
    """A cell a layer and part, coloured by placement."""
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


def largest_saved(fit: Fit, count: int = 12) -> Html:
    """The parts of the model that save most for one microbatch, those alike in one line."""
    sizes = {f"{h.path}": h.saved for h in fit.sublayers}
    found = grouped(sizes)[:count]
    whole = max((size for _, _, size in found), default=1) or 1
    held: dict[str, int] = {}
    for sublayer in fit.sublayers:
        held[alike(sublayer.path)] = held.get(alike(sublayer.path), 0) + sublayer.held
    rows = [
        (
            tag("code", path),
            str(many),
            format_bytes(size / many),
            format_bytes(size),
            format_bytes(held[path]),
            bar(size / whole, "activations"),
        )
        for path, many, size in found
    ]
    heads = [
        ("part of the model", "path"),
        ("parts", "n"),
        ("each saves", "n"),
        ("all save", "n"),
        ("held", "n"),
        ("", "share"),
    ]
    return table("Saved for the backward of one microbatch, as planned", heads, rows)
