"""The sections on memory that the pages of a plan and of a run share, and the plan that they show.

Input: a valid `Config` and a number of processes (`plan_run`), or a `Planned` and what was measured. Output: a `Planned`,
with the memory level of every rank at each sublayer of its step, and `Section`s.
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
    Scale,
    bar,
    byte_scale,
    has_stages,
    legend,
    parts_bar,
    placement_map,
    stacked,
)
from forebay.report.html import Child, Html, Section, alike, big, grouped, join, layer_of, table, tag

PLACED = "The placement of each sublayer's saved tensors. Freed bytes are those that the device does not hold until backward."
_HEADROOM = 1.1  # of a chart over its highest point, for the text there
_LABELS, _FEW_LABELS = 9, 4  # along a step, in a large chart and in a small one
_SHOWN = 2.0  # a line further above the highest point would flatten the chart
_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "transient", "cached", "other")
_MEANS: Mapping[str, str] = {
    "keep": "stays on the device",
    "recompute": "is computed again in backward",
    "offload": "is copied to host memory",
    "stash": "is packed into pages",
}


@dataclass(frozen=True)
class Planned:
    """A plan, its verdict, and by pipeline rank the levels of a step in their order."""

    plan: LayerPlan
    fit: Fit
    levels: Mapping[int, Sequence[Level]]


class LevelRecorder:
    """Collects the levels of one plan as `forebay.estimate.walk` reports them."""

    def __init__(self) -> None:
        self._levels: dict[int, list[Level]] = {}

    def seen(self, action: str, level: RankFit) -> None:
        """See `forebay.estimate.walk.Seen`."""
        self._levels.setdefault(level.rank, []).append(Level(action, level.where, parts_of(level)))

    def planned(self, plan: LayerPlan, fit: Fit) -> Planned:
        """The plan with the collected levels, whose peaks agree with the plan's.

        The walk assumes that a sublayer needs all of its memory at once. `forebay.estimate.reserved` replays every allocation,
        but reports only the peak. So transient memory above that peak is cut from each level, and a peak that is too low is
        raised.
        """
        most = {rank.rank: rank.allocated for rank in fit.ranks}
        levels = {r: _raised([_cut(level, most[r]) for level in found], most[r]) for r, found in self._levels.items()}
        return Planned(plan, fit, levels)


def _cut(level: Level, most: int) -> Level:
    """The level with at most `most` bytes, as far as transient memory can be cut."""
    cut = min(max(0, level.total - most), level.bytes["transient"])
    return replace(level, bytes={**level.bytes, "transient": level.bytes["transient"] - cut}, cut=cut) if cut else level


def _raised(levels: list[Level], most: int) -> list[Level]:
    """The levels with the highest one raised to at least `most` bytes, by transient memory."""
    top = max(range(len(levels)), key=lambda i: levels[i].total)
    level = levels[top]
    transient = level.bytes["transient"] + max(0, most - level.total)
    return [*levels[:top], replace(level, bytes={**level.bytes, "transient": transient}), *levels[top + 1 :]]


def plan_run(config: Config, world: int) -> Planned:
    """Plan a run on `world` processes, without a budget.

    Raises:
        UsageError: see `forebay.estimate.layers.plan_layers` and `forebay.estimate.plan.fit_run`.
    """
    recorder = LevelRecorder()
    plan = plan_layers(config, world)
    return recorder.planned(plan, fit_run(config, plan, world, seen=recorder.seen))


def parts_of(level: RankFit) -> dict[str, int]:
    """Bytes by part."""
    return {part: getattr(level, part) for part in PARTS}


def reserved_parts(rank: RankFit) -> dict[str, int]:
    """Bytes by part in torch's allocator, which holds all but "other"."""
    return _without_other(parts_of(rank))


def _without_other(parts: Mapping[str, int]) -> dict[str, int]:
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
    planned: Planned,
    ceilings: Mapping[int, Sequence[Ceiling]],
    measured: Mapping[int, Mapping[str, int]],
    lead: str,
    outside: bool = True,
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
        levels = {r: [replace(lv, bytes=_without_other(lv.bytes)) for lv in found] for r, found in levels.items()}
    taken = {r.rank: r.total if outside else r.reserved for r in planned.fit.ranks}
    lines = {r: [*_taken_line(planned.fit, r, taken[r], outside), *ceilings.get(r, ())] for r in levels}
    shown = {r: [c for c in found if c.bytes <= _SHOWN * taken[fullest]] for r, found in lines.items()}
    scale = byte_scale(_HEADROOM * max([taken[fullest], *(c.bytes for found in shown.values() for c in found)]))
    axis = _step_axis(levels)
    figures = {
        rank: _step_figure(
            rank, found, shown[rank], scale, measured.get(rank, {}), axis if rank == fullest else None, levels
        )
        for rank, found in levels.items()
    }
    large = figures.pop(fullest)
    small = tag("div", figures.values(), class_="many") if figures else None
    body = join(_step_legend(levels, shown), large, small, _step_notes(levels, lines, shown))
    return Section("step", "Memory over a step", lead, body)


_Levels = Mapping[int, Sequence[Level]]
_Lines = Mapping[int, Sequence[Ceiling]]


def _taken_line(fit: Fit, rank: int, size: int, outside: bool) -> list[Ceiling]:
    """A line over the whole step, because the allocator returns nothing to the GPU within it. None on a CPU."""
    if not any(r.cached for r in fit.ranks if r.rank == rank):
        return []
    return [Ceiling("taken from the GPU" if outside else "planned to be reserved", size, "cached")]


def _step_axis(levels: _Levels) -> str:
    example = "F3 is the forward of microbatch 3"
    if any(has_stages(found) for found in levels.values()):
        example = "0F3 is the forward of stage 0 and microbatch 3"
    return f"sublayers of the step in the order in which they run; {example}, B is a backward"


def _step_figure(
    rank: int,
    levels: Sequence[Level],
    lines: Sequence[Ceiling],
    scale: Scale,
    measured: Mapping[str, int],
    axis: str | None,
    every: _Levels,
) -> Html:
    """The chart of one rank: a large one with the given axis, or a small one without."""
    large = axis is not None
    peak = max(levels, key=lambda level: level.height)
    used = f"in use at most {format_bytes(peak.total)}"
    taken = "".join(f"; {c.name} {format_bytes(c.bytes)}" for c in lines if c.color == "cached")
    described = f"Planned memory of rank {rank} over a step, {used} at {peak.where}{taken}."
    labels = _LABELS if large else _FEW_LABELS
    chart = stacked(levels, scale, lines, described, axis or "the step", measured, labels)
    title = f"Rank {rank}" + ", the fullest" * large if len(every) > 1 else "A process"
    remark = f"{scale.unit}; {used}, at {peak.where}{taken}" if large else scale.unit
    caption = tag("figcaption", tag("b", title), tag("span", remark))
    return tag("figure", caption, chart, class_=None if large else "small")


def _step_legend(levels: _Levels, shown: _Lines) -> Html:
    used = {part for found in levels.values() for level in found for part, size in level.bytes.items() if size}
    named = {c.name: c for found in shown.values() for c in found}
    entries = [(f"f-{part}", part, "") for part in reversed(PARTS) if part in used]
    return legend(entries + [(f"s-{c.color}", c.name, "") for c in named.values()])


def _step_notes(levels: _Levels, lines: _Lines, shown: _Lines) -> Html | None:
    def sizes(of: _Lines) -> set[tuple[str, int]]:
        return {(c.name, c.bytes) for found in of.values() for c in found}

    notes = [
        f"The {name} of {format_bytes(size)} is above this chart."
        for name, size in sorted(sizes(lines) - sizes(shown))[:1]
    ]
    if any(level.cut for found in levels.values() for level in found):
        notes.append("Columns are limited to the peak that a replay of all allocations gives.")
    if any(len(found) > COLUMNS for found in levels.values()):
        notes.append(f"Each of the {COLUMNS} columns shows the highest of several sublayers.")
    return tag("p", " ".join(notes), class_="lead") if notes else None


def ranks_section(fit: Fit) -> Section:
    """A row for each rank: what its peak is made of, and its headroom in the budget."""
    whole = max([fit.budget or 0, *(r.total for r in fit.ranks)])
    heads = "|".join(["rank", ":share", *(f"{name}:n" for name in (*_COLUMNS, "total"))])
    rows = []
    for rank in fit.ranks:
        row: list[Child] = [str(rank.rank), tag("span", parts_bar(parts_of(rank), whole), aria_hidden="true")]
        row += [format_bytes(getattr(rank, name)) for name in (*_COLUMNS, "total")]
        row += [room(rank.headroom(fit.budget))] if fit.budget is not None else []
        rows.append(row)
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
        notes.append("Other memory is outside of the allocator: CUDA's context, NCCL, symmetric memory.")
    return " ".join(notes)


def room(size: int) -> Html:
    """A headroom in bytes; a negative one is emphasized."""
    return tag("span", format_bytes(size), class_="less" if size >= 0 else "over")


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


def largest_saved(fit: Fit, count: int = 12) -> Html:
    """The parts of the model that save most for one microbatch; the same part of all layers in one row."""
    found = grouped({h.path: h.saved for h in fit.sublayers})[:count]
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
