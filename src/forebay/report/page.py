"""The skeleton of a page that is one file: no network, no other files, light and dark, from a phone to paper.

In: a title, a verdict, the one figure that matters, and sections. Out: HTML as text, for `forebay.report.write`.

Style and script are in ``assets/`` and go into the page as they are. The page forbids itself everything else: its content
security policy names no source, and the script by its hash, so that nothing from a configuration could run even if it were not
escaped. Without a script the page is complete but for the tips at the charts and the button.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from forebay.report.markup import Html, join, tag

OPENS = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="Forebay">'
"""How every page begins, and no other file."""


@dataclass(frozen=True)
class Section:
    """A part of a page: the name of its anchor, its title, a sentence on what it shows, and what it shows."""

    name: str
    title: str
    lead: str
    body: Html


@dataclass(frozen=True)
class Verdict:
    """What the page says first: "good", "bad" or "plain"; a word or two, and a sentence."""

    kind: str
    word: str
    sentence: str


def page(what: str, title: str, verdict: Verdict, hero: Html, sections: Sequence[Section]) -> str:
    """The whole file.

    Args:
        what: the kind of page, "plan" or "run".
        title: of what.
        hero: the one figure that matters, and what it is made of.
    """
    style, script = _asset("page.css"), _asset("page.js")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{_digest(script)}'"
    head = join(
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title}: {what} | Forebay"),
        tag("style", Html(style)),
    )
    top = tag(
        "div",
        tag("span", tag("b", "Forebay"), f" {what}"),
        tag("button", "Dark", id="theme", type="button"),
        class_="top",
    )
    links = tag("ul", [tag("li", tag("a", s.title, href=f"#{s.name}")) for s in sections])
    header = tag(
        "header",
        top,
        tag("h1", title),
        tag("p", tag("b", verdict.word), tag("span", verdict.sentence), class_=f"verdict {verdict.kind}"),
        hero,
        tag("nav", links, aria_label="Sections"),
    )
    body = tag(
        "body",
        tag("a", "To the figures", class_="skip", href="#main"),
        header,
        tag("main", [_section(s) for s in sections], id="main"),
        tag("footer", "Made by Forebay. GiB are 2", tag("sup", "30"), " bytes, MiB 2", tag("sup", "20"), "."),
        tag("script", Html(script)),
    )
    return f"{OPENS}{head}</head>{body}</html>\n"


def missing(sentence: str) -> Html:
    """What stands where a section has nothing to show: one sentence on why."""
    return tag("p", sentence, class_="empty")


def _section(section: Section) -> Html:
    lead = tag("p", section.lead, class_="lead") if section.lead else None
    heading = tag("h2", section.title, id=f"{section.name}-title")
    return tag("section", heading, lead, section.body, id=section.name, aria_labelledby=f"{section.name}-title")


def _asset(name: str) -> str:
    return (resources.files("forebay.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
