"""Tables of a page, the grouping of module paths that they share, and how figures are written.

In: rows of text, `Html` and figures. Out: `Html`. A table scrolls by itself where a page is narrower than it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from forebay.policy import format_bytes
from forebay.report.markup import Child, Html, tag

_MANY = 9  # columns above which a table is set closer
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def table(
    caption: str, heads: Sequence[tuple[str, str]], rows: Iterable[Sequence[Child]], most: int | None = None
) -> Html:
    """A table whose first column names its rows.

    Args:
        heads: title and kind of each column: "" text, "n" figures, "path" module paths, "share" bars.
        most: number of the row that is emphasised.
    """
    head = tag("tr", [tag("th", title, class_=kind or None, scope="col") for title, kind in heads])
    lines = []
    for number, row in enumerate(rows):
        cells = [
            tag("td" if column else "th", cell, class_=kind or None, scope=None if column else "row")
            for column, (cell, (_, kind)) in enumerate(zip(row, heads, strict=True))
        ]
        lines.append(tag("tr", cells, class_="most" if number == most else None))
    kind = "dense" if len(heads) > _MANY else None
    inside = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", lines), class_=kind)
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=caption)


def tiles(figures: Iterable[tuple[str, str, str]]) -> Html:
    """Figures side by side: name, figure, and what stands small behind it."""
    found = [
        tag("div", tag("dt", name), tag("dd", figure, tag("small", f" {more}") if more else None))
        for name, figure, more in figures
    ]
    return tag("dl", found, class_="tiles")


def big(count: int) -> Html:
    """Bytes as the one figure of a page."""
    number, unit = format_bytes(count).split(" ")
    return tag("p", number, tag("small", unit), class_="figure")


def count(number: int) -> str:
    """A number of parameters in words."""
    for scale, name in ((10**9, "billion"), (10**6, "million")):
        if number >= scale:
            return f"{number / scale:,.1f} {name}"
    return f"{number:,}"


def duration(seconds: float) -> str:
    """Seconds, or milliseconds of less than one."""
    return f"{seconds:,.3f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, neighbours together: "0 to 3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def percent(measured: float, said: float) -> str:
    """How far a plan is off what was measured, such as "+2.4 %"."""
    if said == measured:
        return "exact"
    if not measured:
        return "–"
    off = 100 * (said - measured) / measured
    return f"{off:+.1f} %" if abs(off) >= 0.05 else f"{off:+.3f} %"


def alike(path: str) -> str:
    """A module path with its layer's number left open: "model.layers.*.mlp"."""
    return _NUMBER.sub(".*", path)


def layer_of(path: str) -> tuple[int, str] | None:
    """Number of the layer that a path is in, and the rest of the path; None outside of layers."""
    found = _NUMBER.search(path)
    return None if found is None else (int(found[1]), path[found.end() + 1 :])


def grouped(sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Paths that differ in their layer alone: (path, how many, bytes of all), largest first."""
    found: dict[str, list[int]] = {}
    for path, size in sizes.items():
        found.setdefault(alike(path), []).append(size)
    return sorted(((p, len(s), sum(s)) for p, s in found.items()), key=lambda row: (-row[2], row[0]))
