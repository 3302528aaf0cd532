"""MkDocs hook: tables of all configuration keys in docs/config.md, from the dataclasses of `forebay.config`.

Input: the page's Markdown. Output: the same with the text between two markers, which is for readers of the file itself,
replaced by a section per dataclass and a row per key: name, type, default, meaning, valid values.
"""

import dataclasses
import inspect
import json
import types
import typing
from typing import Any

from forebay.config import Config

BEGIN, END = "<!-- config reference -->", "<!-- end of config reference -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace what is between the markers. MkDocs calls it for every page."""
    before, begin, rest = markdown.partition(BEGIN)
    return before + reference() + rest.partition(END)[2] if begin else markdown


def reference() -> str:
    """All sections as Markdown."""
    return "\n\n".join(section(name, kind) for name, kind in typing.get_type_hints(Config).items())


def section(name: str, kind: type) -> str:
    about = " ".join((inspect.getdoc(kind) or "").split()).partition(": ")[2]
    hints = typing.get_type_hints(kind)
    rows = [
        f"| `{f.name}` | {describe(hints[f.name])} | `{default(f)}` | {meaning(f, hints[f.name])} |"
        for f in dataclasses.fields(kind)
    ]
    table = "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])
    return f"## [{name}]\n{about[:1].upper()}{about[1:]}\n\n{table}"


def describe(hint: Any) -> str:
    """A type as TOML has it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(describe, arguments))
    if origin is tuple:
        return f"list of {describe(arguments[0])}s"
    if origin is dict:
        return "table"
    return {str: "string", int: "integer", float: "float", bool: "boolean"}[hint]


def default(f: dataclasses.Field[Any]) -> str:
    value = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[misc]
    return json.dumps(value)


def meaning(f: dataclasses.Field[Any], hint: Any) -> str:
    """What the key means, then what is valid. Choices are those of a string; other types beside it have none."""
    choices, low, high = (f.metadata[name] for name in ("choices", "low", "high"))
    text = f.metadata["meaning"].replace("|", "\\|")
    if choices:
        valid = ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
        return f"{text} {'One of' if hint is str else 'The only string is'} {valid}."
    if high is not None:
        return f"{text} From {low} to {high}."
    return f"{text} At least {low}." if low else text
