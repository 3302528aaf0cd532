"""HTML from Python: escaped markup, tables, and the skeleton of a page that is one file.

Input: names of elements, attributes, and children that are text or `Html`; rows of figures; a title and sections.
Output: `Html`, or a whole page as text, light or dark, from a phone to paper, without network access or other files.
Every plain string is escaped where it is inserted; only `tag`, `data` and the page's own assets make `Html`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from forebay.errors import RunError, UsageError
from forebay.policy import format_bytes
from forebay.train.durable import replace_text

OPENS = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="Forebay">'
"""The beginning of every page, and of no other file."""
PAGE = "report.html"
_VOID = frozenset("br link meta".split())
_MANY = 9  # columns above which a table is set closer
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


class Html(str):
    """Markup, which is inserted without escaping."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Iterable[Child] | None"


def join(*children: Child) -> Html:
    """Children one after the other: `Html` unchanged, other text escaped, None left out."""
    return Html("".join(_text(child) for child in children))


def tag(name: str, /, *children: Child, **attributes: Any) -> Html:
    """An element.

    Args:
        attributes: ``class_`` becomes ``class``, ``aria_label`` becomes ``aria-label``. True is an attribute without a value;
            None and False leave it out.
    """
    given = "".join(map(_attribute, attributes, attributes.values()))
    if name in _VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{join(*children)}</{name}>")


def data(value: Any) -> Html:
    """JSON for the page's script. No text in it can end the element that holds it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return Html('<script type="application/json">' + text.replace("<", "\\u003c") + "</script>")


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return escape(child)
    if isinstance(child, (int, float)):
        return str(child)
    return "".join(_text(each) for each in child)


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = key.removesuffix("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


@dataclass(frozen=True)
class Section:
    """A part of a page: the name of its anchor, its title, a sentence on what it shows, and its content."""

    name: str
    title: str
    lead: str
    body: Html


@dataclass(frozen=True)
class Verdict:
    """The first statement of a page: "good", "bad" or "plain"; a word or two, and a sentence."""

    kind: str
    word: str
    sentence: str


def page(what: str, title: str, verdict: Verdict, hero: Html, sections: Sequence[Section]) -> str:
    """The whole file.

    Args:
        what: the kind of page, "plan" or "run".
        title: the name of the plan or the run.
        hero: the main figure, and what it is made of.
    """
    assets = resources.files("forebay.report") / "assets"
    style, script = ((assets / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # No source but the page's own script, by its hash: nothing from a configuration could run even if it were not escaped.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    head = join(
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title}: {what} | Forebay"),
        tag("style", Html(style)),
    )
    button = tag("button", "Dark", id="theme", type="button")
    links = [tag("li", tag("a", s.title, href=f"#{s.name}")) for s in sections]
    header = tag(
        "header",
        tag("div", tag("span", tag("b", "Forebay"), f" {what}"), button, class_="top"),
        tag("h1", title),
        tag("p", tag("b", verdict.word), tag("span", verdict.sentence), class_=f"verdict {verdict.kind}"),
        hero,
        tag("nav", tag("ul", links), aria_label="Sections"),
    )
    body = tag(
        "body",
        tag("a", "To the figures", class_="skip", href="#main"),
        header,
        tag("main", [_section(s) for s in sections], id="main"),
        tag("footer", "Made by Forebay. 1 GiB is 2", tag("sup", 30), " bytes, 1 MiB is 2", tag("sup", 20), " bytes."),
        tag("script", Html(script)),
    )
    return f"{OPENS}{head}</head>{body}</html>\n"


def checked(file: Path) -> Path:
    """`file`, if a page can be written to it.

    Raises:
        UsageError: the folder does not exist, or another file or folder is in the way.
        RunError: the existing file cannot be read.
    """
    if file.is_dir():
        raise UsageError(f"{file} is a folder; name a file for the page, such as {file / PAGE}")
    if not file.parent.is_dir():
        raise UsageError(f"{file} cannot be written: {file.parent} is not a folder; create it, or name another file")
    try:
        if file.exists():
            if not file.is_file():  # to read a pipe would wait for ever
                raise UsageError(f"{file} is no ordinary file; name one for the page, such as {PAGE}")
            with file.open("rb") as opened:
                ours = opened.read(len(OPENS)) == OPENS.encode()
            if not ours:
                raise UsageError(f"{file} exists and is not a page that Forebay wrote; name another file")
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
    return file


def write_page(text: str, file: Path) -> None:
    """Write a page, all of it or nothing.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        replace_text(file, text)
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from error


def empty(name: str, title: str, why: str) -> Section:
    """A section with nothing to show, and the reason."""
    return Section(name, title, "", tag("p", why, class_="empty"))


def _section(section: Section) -> Html:
    lead = tag("p", section.lead, class_="lead") if section.lead else None
    heading = tag("h2", section.title, id=f"{section.name}-title")
    return tag("section", heading, lead, section.body, id=section.name, aria_labelledby=f"{section.name}-title")


def table(caption: str, heads: str, rows: Iterable[Sequence[Child]], most: int | None = None) -> Html:
    """A table whose first column names its rows.

    Args:
        heads: titles of the columns, separated by "|"; each may have a kind after a colon: "n" figures, "path" module paths,
            "share" bars.
        most: number of the row that is emphasized.
    """
    columns = [(title.strip(), kind.strip() or None) for title, _, kind in (h.partition(":") for h in heads.split("|"))]
    head = tag("tr", [tag("th", title, class_=kind, scope="col") for title, kind in columns])
    lines = []
    for number, row in enumerate(rows):
        cells = [
            tag("td" if column else "th", cell, class_=kind, scope=None if column else "row")
            for column, (cell, (_, kind)) in enumerate(zip(row, columns, strict=True))
        ]
        lines.append(tag("tr", cells, class_="most" if number == most else None))
    dense = "dense" if len(columns) > _MANY else None
    inside = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", lines), class_=dense)
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=caption)


def tiles(figures: Iterable[tuple[str, str, str]]) -> Html:
    """Figures side by side: name, figure, and a remark in small print."""
    found = [
        tag("div", tag("dt", name), tag("dd", figure, tag("small", f" {remark}") if remark else None))
        for name, figure, remark in figures
    ]
    return tag("dl", found, class_="tiles")


def big(count: int) -> Html:
    """Bytes as the main figure of a page."""
    number, unit = format_bytes(count).split(" ")
    return tag("p", number, tag("small", unit), class_="figure")


def count(number: int) -> str:
    """A number of parameters in words."""
    for scale, name in ((10**9, "billion"), (10**6, "million")):
        if number >= scale:
            return f"{number / scale:,.1f} {name}"
    return f"{number:,}"


def duration(seconds: float) -> str:
    """Seconds, or milliseconds below one second."""
    return f"{seconds:,.3f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def percent(measured: float, planned: float) -> str:
    """The plan's difference from the measurement, such as "+2.4 %"."""
    if planned == measured:
        return "exact"
    if not measured:
        return "–"
    off = 100 * (planned - measured) / measured
    return f"{off:+.1f} %" if abs(off) >= 0.05 else f"{off:+.3f} %"


def alike(path: str) -> str:
    """A module path without its layer's number: "model.layers.*.mlp"."""
    return _NUMBER.sub(".*", path)


def layer_of(path: str) -> tuple[int, str] | None:
    """The number of the layer that a path is in, and the rest of the path; None outside of layers."""
    found = _NUMBER.search(path)
    return None if found is None else (int(found[1]), path[found.end() + 1 :])


def grouped(sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Paths that differ only in their layer: (path, number of them, bytes of all), largest first."""
    found: dict[str, list[int]] = {}
    for path, size in sizes.items():
        found.setdefault(alike(path), []).append(size)
    return sorted(((p, len(s), sum(s)) for p, s in found.items()), key=lambda row: (-row[2], row[0]))
