"""The charts of a page as SVG and HTML: stacked levels, curves, bars, a map of placements, and the actions of ranks.

Input: plain figures. Output: `Html`. What a chart shows is also given in words (`aria-label`). A stack of many levels
is drawn as at most `COLUMNS` columns, each the highest of its levels, so that no peak is lost. Nothing is kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from forebay.policy import format_bytes
from forebay.report.html import Child, Html, data, join, tag

# Axes of a chart: which figures to write beside it, in which unit, and the frame around what is drawn.
#
# In: the largest figure, labels and places. Out: `Scale` (a unit and its ticks), and HTML that puts an SVG drawing of 1000 x 1000
# units between its labels. Drawings are stretched to the page's width and their labels are text of the page beside them, so that
# text has one size from a phone to paper.

SIZE = 1000  # units of a drawing, both ways
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_MANY = 6  # labels along an axis that a phone has no room for all of


@dataclass(frozen=True)
class Scale:
    """An axis: figures are divided by `per` and written with `unit`; it goes from `low` to `high`, in figures."""

    per: float
    unit: str
    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """From 0 at the low end to 1 at the high one."""
        return (value - self.low) / (self.high - self.low)

    def label(self, tick: float) -> str:
        """As few digits as tell neighbouring ticks apart."""
        step = (self.ticks[1] - self.ticks[0]) / self.per if len(self.ticks) > 1 else 1.0
        digits = max(0, -math.floor(math.log10(step))) if step < 1 else 0
        digits += round(step, 9) * 10**digits % 1 > 1e-6
        return f"{tick / self.per:,.{digits}f}"


@dataclass(frozen=True)
class Tick:
    """A label at a place along the axis, from 0 to 1."""

    place: float
    text: str


def byte_scale(most: float) -> Scale:
    """From 0 to at least `most` bytes, in the largest unit of which that is one."""
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
    drawing: Html,
    y: Scale,
    x: Sequence[Tick],
    axis: str,
    described: str,
    *more: Child,
    figures: dict[str, Any] | None = None,
) -> Html:
    """A drawing with its axes.

    Args:
        axis: what the horizontal one shows, with its unit.
        described: what the chart shows, for those who cannot see it.
        more: text over the drawing, placed by itself.
        figures: what the tips say; see ``assets/page.js``.
    """
    lines = [_level(y.place(t), "base" if t == y.ticks[0] else "grid") for t in y.ticks]
    svg = tag(
        "svg",
        lines,
        drawing,
        viewBox=f"0 0 {SIZE} {SIZE}",
        preserveAspectRatio="none",
        aria_hidden="true",
        focusable="false",
    )
    up = [tag("span", y.label(t), class_="y", style=f"bottom:{100 * y.place(t):.2f}%") for t in y.ticks]
    live = dict(tabindex="0", data_live=True) if figures is not None else {}
    plot = tag(
        "div",
        svg,
        up,
        along(x),
        tag("span", axis, class_="axis"),
        join(*more),
        data(figures) if figures is not None else None,
        class_="plot",
        role="img" if figures is None else "application",
        aria_label=described if figures is None else f"{described} Arrow keys go along it.",
        **live,
    )
    return tag("div", plot, class_="chart")


def _level(place: float, kind: str) -> Html:
    height = round(SIZE * (1 - place))
    return tag("path", d=f"M0 {height}H{SIZE}", class_=kind)


def along(ticks: Sequence[Tick]) -> list[Html]:
    """Labels below an axis. Those at its ends stay within it; of many, a phone shows every second."""
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


# The charts of a page, as SVG and HTML made here: stacked levels, curves, bars, a map of placements, and who ran what when.
#
# In: plain figures. Out: `Html`. What a chart shows is also in words (`aria-label`), and its figures are in tables beside it or
# in tips that keys reach as well. Nothing is kept.
#
# A stack of many levels is drawn as at most `COLUMNS` columns: each is the highest of the levels that fall into it, so that no
# peak is lost.

COLUMNS = 240
_STAGE = re.compile(r"(?<!\w)\d+(?=[A-Z])")  # of "0F3", and both of "(0F3;7B1)OVERLAP_F_B"
_ROOM = 0.022  # of the width, for a number of two digits in a picture of 620 pixels
PARTS = ("other", "parameters", "optimizer", "gradients", "activations", "transient", "cached")
"""What memory is made of, in the order of a stack from below: what lasts first, what Forebay can change next, and last what the
allocator holds besides."""


@dataclass(frozen=True)
class Level:
    """Bytes at a moment, by part; in which action, and what runs. `cut` were taken off it: of equal levels, the one that was
    highest before is the highest."""

    action: str
    where: str
    bytes: Mapping[str, int]
    cut: int = 0

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.bytes.values())

    @property
    def height(self) -> tuple[int, int]:
        """By which levels are compared."""
        return self.total, self.cut


@dataclass(frozen=True)
class Ceiling:
    """A horizontal line over a stack: what it is, bytes, and its colour's name ("budget", "cached", "measured")."""

    name: str
    bytes: int
    colour: str


@dataclass(frozen=True)
class Curve:
    """Values over numbers, such as steps; `colour` is "one" to "four". Points alone where they are few and far between."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = "one"
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
    """Memory over a step: a column a level, and its highest point annotated.

    Args:
        measured: action -> bytes at its end, drawn as points.
        labels: how many there is room for along the step.

    Raises:
        ValueError: no levels.
    """
    columns = thinned(levels)
    if not columns:
        raise ValueError("a stack needs a level")
    count, with_stage = len(columns), staged(columns)
    top = max(range(count), key=lambda n: columns[n].height)
    drawn, below = [], [0] * count
    for part in PARTS:
        above = [b + level.bytes.get(part, 0) for b, level in zip(below, columns, strict=True)]
        if above != below:
            drawn.append(tag("path", d=_band(below, above, y), class_=f"band f-{part}"))
        below = above
    lines = [tag("path", d=f"M0 {_height(c.bytes, y)}H{SIZE}", class_=f"ceiling s-{c.colour}") for c in ceilings]
    ends = {column.action: n + 1 for n, column in enumerate(columns)}
    spots = "".join(
        f"M{round(SIZE * ends[a] / count, 1)} {_height(b, y)}h0" for a, b in measured.items() if a in ends and b
    )
    if spots:
        lines += [tag("path", d=spots, class_="halo"), tag("path", d=spots, class_="dots s-measured")]
    place = (top + 0.5) / count
    side = "left" if place > 0.75 else "right" if place < 0.25 else ""
    style = f"left:{100 * place:.2f}%;bottom:{100 * y.place(columns[top].total):.2f}%"
    peak = tag("span", tag("b", format_bytes(columns[top].total)), class_=f"tag {side}".strip(), style=style)
    shown = [p for p in reversed(PARTS) if any(c.bytes.get(p) for c in columns)]
    figures = {
        "x": [_named(level, with_stage) for level in columns],
        "unit": f" {y.unit}",
        "digits": 2,
        "total": True,
        "start": top,
        "series": [
            {"name": p, "colour": f"f-{p}", "values": [round(c.bytes.get(p, 0) / y.per, 4) for c in columns]}
            for p in shown
        ],
    }
    return frame(join(*drawn, *lines), y, _starts(columns, labels, with_stage), axis, described, peak, figures=figures)


def thinned(levels: Sequence[Level], most: int = COLUMNS) -> list[Level]:
    """At most `most` levels in their order; of neighbours the highest."""
    if len(levels) <= most:
        return list(levels)
    cuts = [n * len(levels) // most for n in range(most + 1)]
    return [max(levels[a:b], key=lambda level: level.height) for a, b in pairwise(cuts)]


def curves(
    found: Sequence[Curve], x: Scale, y: Scale, axis: str, described: str, unit: str, digits: int, per: float
) -> Html:
    """Lines over a numeric axis. Tips say values over `per` with `unit`."""
    numbers = sorted({at for curve in found for at, _ in curve.points})
    drawn = []
    for curve in found:
        places = [(round(SIZE * x.place(at), 1), _height(value, y)) for at, value in curve.points]
        if curve.dots or len(places) == 1:
            spots = "".join(f"M{a} {b}h0" for a, b in places)
            drawn += [tag("path", d=spots, class_="halo"), tag("path", d=spots, class_=f"dots s-{curve.colour}")]
        else:
            path = "M" + "L".join(f"{a} {b}" for a, b in places)
            drawn.append(tag("path", d=path, class_=f"curve s-{curve.colour}"))
    values = [dict(curve.points) for curve in found]
    figures = {
        "x": [f"{axis} {number:g}" for number in numbers],
        "places": [round(x.place(number), 4) for number in numbers],
        "unit": unit,
        "digits": digits,
        "total": False,
        "start": len(numbers) - 1,
        "series": [
            {
                "name": curve.name,
                "colour": f"f-{curve.colour}",
                "values": [round(of[n] / per, digits + 2) if n in of else None for n in numbers],
            }
            for curve, of in zip(found, values, strict=True)
        ],
    }
    ticks = [Tick(x.place(t), x.label(t)) for t in x.ticks]
    return frame(join(*drawn), y, ticks, axis, described, figures=figures)


def bar(share: float, kind: str) -> Html:
    """A bar in a cell of a table: `share` of its width, from 0 to 1."""
    return tag("span", tag("i", class_=f"f-{kind}", style=f"width:{100 * share:.2f}%"), aria_hidden="true")


def parts_bar(parts: Mapping[str, int], whole: float) -> Html:
    """What memory is made of, side by side, over a width that is `whole` bytes."""
    total = sum(parts.values())
    pieces = [tag("i", class_=f"f-{p}", style=f"width:{100 * parts[p] / total:.3f}%") for p in PARTS if parts.get(p)]
    return tag("i", pieces, class_="stack", style=f"width:{100 * total / whole:.3f}%")


def legend(entries: Sequence[tuple[str, str, str]]) -> Html:
    """Colours in words: (class, name, figure); a class that begins with "s-" is a dashed line's."""
    return tag(
        "ul",
        [
            tag(
                "li",
                tag("i", class_=f"{kind} rule" if kind.startswith("s-") else kind),
                name,
                tag("b", figure) if figure else None,
            )
            for kind, name, figure in entries
        ],
        class_="legend",
    )


def placement_map(rows: Mapping[str, Sequence[tuple[str, str]]]) -> Html:
    """A cell a layer: row's name -> (placement, what the cell is) in the order of the layers."""
    found: list[Html] = []
    for name, cells in rows.items():
        spoken = f"{name}: {', '.join(f'{what} {placement}' for placement, what in cells)}"
        marks = [tag("i", class_=f"f-{placement}", title=f"{what}: {placement}") for placement, what in cells]
        found += [tag("span", name), tag("span", marks, class_="cells", role="img", aria_label=spoken)]
    last = max(len(cells) for cells in rows.values()) - 1
    ends = tag("span", tag("span", "layer 0"), tag("span", f"layer {last}") if last else None, class_="ends")
    return tag("div", *found, tag("span"), ends, class_="map")


@dataclass(frozen=True)
class Box:
    """What a rank ran: its kind ("F", "B", "I", "W"), from when to when in ms, how it is named, its microbatch; `low` and
    `height` within the rank's row, from 0 to 1; whether it is of another than the rank's first stage."""

    kind: str
    start: float
    end: float
    name: str
    microbatch: int
    low: float = 0.0
    height: float = 1.0
    later: bool = False


def ran(rows: Sequence[tuple[str, str, Sequence[Box]]], x: Scale, described: str) -> Html:
    """Who ran what when: (name, remark, boxes) of each rank."""
    lanes = []
    for name, remark, boxes in rows:
        drawn = [
            tag(
                "rect",
                tag("title", f"{box.name}, {box.start:.1f} to {box.end:.1f} ms"),
                x=round(SIZE * x.place(box.start), 2),
                y=round(SIZE * box.low),
                width=round(SIZE * (box.end - box.start) / (x.high - x.low), 2),
                height=round(SIZE * box.height),
                class_=f"f-{box.kind}" + " later" * box.later,
            )
            for box in boxes
        ]
        svg = tag("svg", drawn, viewBox=f"0 0 {SIZE} {SIZE}", preserveAspectRatio="none", aria_hidden="true")
        label = tag("span", tag("b", name), remark)
        lanes.append(tag("div", label, tag("div", svg, _numbers(boxes, x), class_="lane"), class_="row"))
    time = tag(
        "div", along([Tick(x.place(t), x.label(t)) for t in x.ticks]), tag("span", x.unit, class_="axis"), class_="time"
    )
    inside = tag("div", *lanes, time, class_="boxes")
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=described)


def _numbers(boxes: Sequence[Box], x: Scale) -> list[Html]:
    """The microbatches of the boxes that have room for a number."""
    return [
        tag(
            "span",
            box.microbatch,
            class_="m later" if box.later else "m",
            style=f"left:{100 * x.place((box.start + box.end) / 2):.2f}%;top:{100 * (box.low + box.height / 2):.0f}%",
        )
        for box in boxes
        if (box.end - box.start) / (x.high - x.low) >= _ROOM
    ]


def _height(value: float, y: Scale) -> float:
    return round(SIZE * (1 - y.place(value)), 1)


def _band(below: Sequence[int], above: Sequence[int], y: Scale) -> str:
    """A stepped band: along its upper edge to the right, and back along the lower one."""
    count = len(below)
    width = SIZE / count
    path = [f"M0 {_height(above[0], y)}"]
    for n in range(count):
        if n and above[n] != above[n - 1]:
            path.append(f"V{_height(above[n], y)}")
        if n == count - 1 or above[n] != above[n + 1]:
            path.append(f"H{round(width * (n + 1), 1)}")
    path.append(f"V{_height(below[-1], y)}")
    for n in reversed(range(count)):
        if n < count - 1 and below[n] != below[n + 1]:
            path.append(f"V{_height(below[n], y)}")
        if n == 0 or below[n] != below[n - 1]:
            path.append(f"H{round(width * n, 1)}")
    return "".join(path) + "Z"


def _starts(columns: Sequence[Level], most: int, with_stage: bool) -> list[Tick]:
    """Labels where actions begin, as many as there is room for; an overlap has its forward's."""
    begins = [n for n, level in enumerate(columns) if n == 0 or level.action != columns[n - 1].action]
    every = -(-len(begins) // most)
    found: list[Tick] = []
    for n in begins[::every]:
        tick = Tick(n / len(columns), short(columns[n].action, with_stage).split()[0])
        if not found or tick.place - found[-1].place >= 0.8 / most:
            found.append(tick)
    return found


def short(action: str, staged: bool = False) -> str:
    """An action in a label: "F3", or "0F3" with its stage where a rank has several; an overlap is its two parts."""
    if not action:
        return "step"
    parts = action.strip("(").split(")")[0].split(";")
    return " ".join(part if staged else part.lstrip("0123456789") for part in parts)


def staged(levels: Sequence[Level]) -> bool:
    """Whether their actions are of several stages."""
    return len({stage for level in levels for stage in _STAGE.findall(level.action)}) > 1


def _named(level: Level, with_stage: bool) -> str:
    return f"{short(level.action, with_stage)}: {level.where}" if level.action else level.where
