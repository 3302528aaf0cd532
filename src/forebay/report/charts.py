"""The charts of a page as SVG and HTML: stacked memory, curves, bars, a map of placements, and the actions of ranks.

Input: plain figures. Output: `Html`. A drawing of 1000 x 1000 units is stretched to the page's width; its labels are text
of the page beside it, so that text has one size from a phone to paper. Each chart is also described in words
(`aria-label`), and its figures are in tables or in tips that the keyboard reaches too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Any

from forebay.policy import format_bytes
from forebay.report.html import Child, Html, data, join, tag

SIZE = 1000  # units of a drawing, both ways
COLUMNS = 240  # of a stack at most
PARTS = ("other", "parameters", "optimizer", "gradients", "activations", "transient", "cached")
"""The parts of memory, from the bottom of a stack: what stays first, then what Forebay can change, last the allocator's rest."""
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_MANY = 6  # labels along an axis; a phone has no room for more
_ROOM = 0.022  # of the width: room for a number of two digits in a drawing of 620 pixels
_STAGE = re.compile(r"(?<!\w)\d+(?=[A-Z])")  # of "0F3", and both of "(0F3;7B1)OVERLAP_F_B"


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`. Labels are values divided by `per`, in `unit`."""

    per: float
    unit: str
    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """From 0 at the low end to 1 at the high end."""
        return (value - self.low) / (self.high - self.low)

    def label(self, tick: float) -> str:
        """As few digits as distinguish neighboring ticks."""
        step = (self.ticks[1] - self.ticks[0]) / self.per if len(self.ticks) > 1 else 1.0
        digits = max(0, -math.floor(math.log10(step))) if step < 1 else 0
        digits += round(step, 9) * 10**digits % 1 > 1e-6
        return f"{tick / self.per:,.{digits}f}"

    def labels(self) -> list[Tick]:
        """A label at each tick."""
        return [Tick(self.place(t), self.label(t)) for t in self.ticks]


@dataclass(frozen=True)
class Tick:
    """A label at a place along an axis, from 0 to 1."""

    place: float
    text: str


def byte_scale(most: float) -> Scale:
    """From 0 to at least `most` bytes, in the largest unit that `most` reaches."""
    per, unit = next(((1 << n, name) for n, name in ((30, "GiB"), (20, "MiB")) if most >= 1 << n), (1 << 10, "KiB"))
    return scale(0.0, most, per, unit)


def scale(low: float, high: float, per: float = 1.0, unit: str = "", count: int = 4) -> Scale:
    """A scale whose ends are ticks, with about `count` steps between."""
    if not high > low:
        high = low + per
    raw = (high - low) / per / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = per * power * next(s for s in _STEPS if s * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Scale(per, unit, first * step, last * step, tuple(n * step for n in range(first, last + 1)))


def frame(
    drawing: Html, y: Scale, x: Sequence[Tick], axis: str, described: str, figures: dict[str, Any], *over: Child
) -> Html:
    """A drawing with its axes.

    Args:
        axis: what the horizontal axis shows, with its unit.
        described: what the chart shows, in words.
        figures: the content of the tips; see ``assets/page.js``.
        over: text over the drawing.
    """
    lines = [_line(y, t, "base" if t == y.ticks[0] else "grid") for t in y.ticks]
    up = [tag("span", y.label(t), class_="y", style=f"bottom:{100 * y.place(t):.2f}%") for t in y.ticks]
    inside = [_svg(lines, drawing, focusable="false"), up, axis_labels(x), tag("span", axis, class_="axis")]
    described = f"{described} Arrow keys move along it."
    live = {"role": "application", "aria_label": described, "tabindex": "0", "data_live": True}
    return tag("div", tag("div", *inside, *over, data(figures), class_="plot", **live), class_="chart")


def _svg(*drawn: Child, **attributes: str) -> Html:
    box = f"0 0 {SIZE} {SIZE}"
    return tag("svg", *drawn, viewBox=box, preserveAspectRatio="none", aria_hidden="true", **attributes)


def _line(y: Scale, value: float, kind: str) -> Html:
    return tag("path", d=f"M0 {round(SIZE * (1 - y.place(value)))}H{SIZE}", class_=kind)


def axis_labels(ticks: Sequence[Tick]) -> list[Html]:
    """Labels below an axis. The outermost stay within it; a phone shows every second one of many."""
    found = []
    for n, tick in enumerate(ticks):
        kinds = ["x"]
        if tick.place < 0.02:
            kinds.append("first")
        elif tick.place > 0.98:
            kinds.append("last")
        if len(ticks) >= _MANY and n % 2 and n != len(ticks) - 1:
            kinds.append("wide")
        found.append(tag("span", tick.text, class_=" ".join(kinds), style=f"left:{100 * tick.place:.2f}%"))
    return found


@dataclass(frozen=True)
class Level:
    """Bytes by part at one sublayer of a step.

    Attributes:
        action: the action that runs, such as "0F3"; "" outside of actions.
        where: what runs, in words.
    """

    action: str
    where: str
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Ceiling:
    """A horizontal line over a stack; `color` is "budget", "cached" or "measured"."""

    name: str
    bytes: int
    color: str


@dataclass(frozen=True)
class Curve:
    """(x, y) points; `color` is "one" to "four". `dots` draws points instead of a line."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str = "one"
    dots: bool = False


def stacked(
    levels: Sequence[Level],
    y: Scale,
    ceilings: Sequence[Ceiling],
    described: str,
    axis: str,
    measured: Mapping[str, int] = MappingProxyType({}),
    labels: int = 9,
) -> Html:
    """Memory over a step: a column for each level, with the highest point annotated.

    Args:
        measured: action -> bytes at its end, drawn as points.
        labels: how many labels fit along the step.

    Raises:
        ValueError: no levels.
    """
    columns = thinned(levels)
    if not columns:
        raise ValueError("there are no levels to draw")
    count, with_stage = len(columns), has_stages(columns)
    top = max(range(count), key=lambda n: columns[n].total)
    lines = [tag("path", d=f"M0 {_height(c.bytes, y)}H{SIZE}", class_=f"ceiling s-{c.color}") for c in ceilings]
    ends = {column.action: n + 1 for n, column in enumerate(columns)}
    dots = [(round(SIZE * ends[a] / count, 1), _height(b, y)) for a, b in measured.items() if a in ends and b]
    lines += _dots(dots, "measured") if dots else []
    shown = [part for part in reversed(PARTS) if any(c.bytes.get(part) for c in columns)]
    series = [
        {"name": part, "color": f"f-{part}", "values": [round(c.bytes.get(part, 0) / y.per, 4) for c in columns]}
        for part in shown
    ]
    tips = [f"{action_label(c.action, with_stage)}: {c.where}" if c.action else c.where for c in columns]
    figures = {"x": tips, "unit": f" {y.unit}", "digits": 2, "total": True, "start": top, "series": series}
    drawing = join(*_bands(columns, y), *lines)
    peak = _peak_tag(columns[top], (top + 0.5) / count, y)
    return frame(drawing, y, _starts(columns, labels, with_stage), axis, described, figures, peak)


def _bands(columns: Sequence[Level], y: Scale) -> list[Html]:
    drawn, below = [], [0] * len(columns)
    for part in PARTS:
        above = [b + level.bytes.get(part, 0) for b, level in zip(below, columns, strict=True)]
        if above != below:
            drawn.append(tag("path", d=_band(below, above, y), class_=f"band f-{part}"))
        below = above
    return drawn


def _peak_tag(level: Level, place: float, y: Scale) -> Html:
    side = "left" if place > 0.75 else "right" if place < 0.25 else ""
    style = f"left:{100 * place:.2f}%;bottom:{100 * y.place(level.total):.2f}%"
    return tag("span", tag("b", format_bytes(level.total)), class_=f"tag {side}".strip(), style=style)


def thinned(levels: Sequence[Level]) -> list[Level]:
    """At most `COLUMNS` levels in their order: of neighbors the highest, so that no peak is lost."""
    if len(levels) <= COLUMNS:
        return list(levels)
    cuts = [n * len(levels) // COLUMNS for n in range(COLUMNS + 1)]
    return [max(levels[a:b], key=lambda level: level.total) for a, b in pairwise(cuts)]


def curves(
    found: Sequence[Curve], x: Scale, y: Scale, described: str, *, digits: int, unit: str = "", per: float = 1.0
) -> Html:
    """Lines over steps. Tips show values divided by `per`, with `unit`."""
    numbers = sorted({at for curve in found for at, _ in curve.points})
    series = []
    for curve in found:
        values = dict(curve.points)
        shown = [round(values[n] / per, digits + 2) if n in values else None for n in numbers]
        series.append({"name": curve.name, "color": f"f-{curve.color}", "values": shown})
    tips, places = [f"step {number:g}" for number in numbers], [round(x.place(number), 4) for number in numbers]
    figures = {"x": tips, "places": places, "unit": unit, "digits": digits, "total": False, "start": len(numbers) - 1}
    figures["series"] = series
    drawing = join(*(_curve(curve, x, y) for curve in found))
    return frame(drawing, y, x.labels(), "step", described, figures)


def _curve(curve: Curve, x: Scale, y: Scale) -> Child:
    places = [(round(SIZE * x.place(at), 1), _height(value, y)) for at, value in curve.points]
    if curve.dots or len(places) == 1:
        return _dots(places, curve.color)
    return tag("path", d="M" + "L".join(f"{a} {b}" for a, b in places), class_=f"curve s-{curve.color}")


def _dots(places: Sequence[tuple[float, float]], color: str) -> list[Html]:
    path = "".join(f"M{a} {b}h0" for a, b in places)
    return [tag("path", d=path, class_="halo"), tag("path", d=path, class_=f"dots s-{color}")]


def bar(share: float, kind: str) -> Html:
    """A bar in a cell of a table: `share` of its width, from 0 to 1."""
    return tag("span", tag("i", class_=f"f-{kind}", style=f"width:{100 * share:.2f}%"), aria_hidden="true")


def parts_bar(parts: Mapping[str, int], whole: float) -> Html:
    """The parts of memory side by side, over a width of `whole` bytes."""
    total = sum(parts.values())
    pieces = [tag("i", class_=f"f-{p}", style=f"width:{100 * parts[p] / total:.3f}%") for p in PARTS if parts.get(p)]
    return tag("i", pieces, class_="stack", style=f"width:{100 * total / whole:.3f}%")


def legend(entries: Sequence[tuple[str, str, str]]) -> Html:
    """Colors in words: (class, name, figure). A class that begins with "s-" is that of a dashed line."""
    items = []
    for kind, name, figure in entries:
        mark = tag("i", class_=f"{kind} rule" if kind.startswith("s-") else kind)
        items.append(tag("li", mark, name, tag("b", figure) if figure else None))
    return tag("ul", items, class_="legend")


def placement_map(rows: Mapping[str, Sequence[tuple[str, str]]]) -> Html:
    """A cell for each layer: row's name -> (placement, description of the cell) in the order of the layers."""
    found: list[Html] = []
    for name, cells in rows.items():
        described = f"{name}: {', '.join(f'{what} {placement}' for placement, what in cells)}"
        marks = [tag("i", class_=f"f-{placement}", title=f"{what}: {placement}") for placement, what in cells]
        found += [tag("span", name), tag("span", marks, class_="cells", role="img", aria_label=described)]
    last = max(len(cells) for cells in rows.values()) - 1
    ends = tag("span", tag("span", "layer 0"), tag("span", f"layer {last}") if last else None, class_="ends")
    return tag("div", *found, tag("span"), ends, class_="map")


@dataclass(frozen=True)
class Box:
    """A computation of a rank.

    Attributes:
        kind: "F", "B", "I" or "W".
        start, end: in ms.
        low, height: place within the rank's row, from 0 to 1.
        later: whether its stage is not the rank's first one.
    """

    kind: str
    start: float
    end: float
    name: str
    microbatch: int
    low: float = 0.0
    height: float = 1.0
    later: bool = False


def activity(rows: Sequence[tuple[str, str, Sequence[Box]]], x: Scale, described: str) -> Html:
    """The computations of ranks over time: (name, remark, boxes) of each rank."""
    lanes = []
    for name, remark, boxes in rows:
        lane = tag("div", _svg([_rect(box, x) for box in boxes]), _numbers(boxes, x), class_="lane")
        lanes.append(tag("div", tag("span", tag("b", name), remark), lane, class_="row"))
    time = tag("div", axis_labels(x.labels()), tag("span", x.unit, class_="axis"), class_="time")
    inside = tag("div", *lanes, time, class_="boxes")
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=described)


def _rect(box: Box, x: Scale) -> Html:
    return tag(
        "rect",
        tag("title", f"{box.name}, {box.start:.1f} to {box.end:.1f} ms"),
        x=round(SIZE * x.place(box.start), 2),
        y=round(SIZE * box.low),
        width=round(SIZE * (box.end - box.start) / (x.high - x.low), 2),
        height=round(SIZE * box.height),
        class_=f"f-{box.kind}" + " later" * box.later,
    )


def _numbers(boxes: Sequence[Box], x: Scale) -> list[Html]:
    """The microbatches of the boxes that have room for a number."""
    found = []
    for box in boxes:
        if (box.end - box.start) / (x.high - x.low) >= _ROOM:
            left, top = x.place((box.start + box.end) / 2), box.low + box.height / 2
            style = f"left:{100 * left:.2f}%;top:{100 * top:.0f}%"
            found.append(tag("span", box.microbatch, class_="m later" if box.later else "m", style=style))
    return found


def _height(value: float, y: Scale) -> float:
    return round(SIZE * (1 - y.place(value)), 1)


def _band(below: Sequence[int], above: Sequence[int], y: Scale) -> str:
    """A stepped band: along its upper edge to the right, and back along the lower one."""
    width, at, path = SIZE / len(below), 0, ""
    for values, step in ((above, 1), (below[::-1], -1)):
        for value, columns in groupby(values):
            at += step * len(list(columns))
            path += f"V{_height(value, y)}H{round(width * at, 1)}"
    return f"M0 {path.removeprefix('V')}Z"


def _starts(columns: Sequence[Level], most: int, with_stage: bool) -> list[Tick]:
    """Labels where actions begin, as many as fit; an overlap is labeled by its forward."""
    begins = [n for n, level in enumerate(columns) if n == 0 or level.action != columns[n - 1].action]
    every = -(-len(begins) // most)
    found: list[Tick] = []
    for n in begins[::every]:
        tick = Tick(n / len(columns), action_label(columns[n].action, with_stage).split()[0])
        if not found or tick.place - found[-1].place >= 0.8 / most:
            found.append(tick)
    return found


def action_label(action: str, with_stage: bool = False) -> str:
    """A short label of an action: "F3", or "0F3" with its stage; an overlap is its two parts."""
    if not action:
        return "step"
    parts = action.strip("(").split(")")[0].split(";")
    return " ".join(part if with_stage else part.lstrip("0123456789") for part in parts)


def has_stages(levels: Sequence[Level]) -> bool:
    """Whether their actions are of several stages."""
    return len({stage for level in levels for stage in _STAGE.findall(level.action)}) > 1
