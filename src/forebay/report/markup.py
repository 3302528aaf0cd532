"""HTML out of Python, in which nothing is forgotten to be escaped.

In: names of elements, attributes, and children that are text or `Html`. Out: `Html`, which is text that is markup already. Every
plain string, whatever file or configuration it came from, is escaped where it is put in; only `tag` and `data` make `Html`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any, TypeAlias

_VOID = frozenset("br link meta".split())


class Html(str):
    """Text that is markup already, and is put in as it is."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Iterable[Child] | None"


def join(*children: Child) -> Html:
    """Children one after the other: `Html` as it is, other text escaped, None left out."""
    return Html("".join(_text(child) for child in children))


def tag(name: str, /, *children: Child, **attributes: Any) -> Html:
    """An element.

    Args:
        attributes: ``class_`` is ``class`` and ``aria_label`` is ``aria-label``. True is an attribute without a value, None and
            False are none.
    """
    said = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{said}>")
    return Html(f"<{name}{said}>{join(*children)}</{name}>")


def data(value: Any) -> Html:
    """JSON that a script reads. No text in it can end the element that holds it."""
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
    name = key.removesuffix("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
