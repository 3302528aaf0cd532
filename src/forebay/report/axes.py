"""Axes of a chart: which figures to write beside it, in which unit, and the frame around what is drawn.

In: the largest figure, labels and places. Out: `Scale` (a unit and its ticks), and HTML that puts an SVG drawing of 1000 x 1000
units between its labels. Drawings are stretched to the page's width and their labels are text of the page beside them, so that
text has one size from a phone to paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.report.markup import Child, Html, data, join, tag

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
