"""MkDocs hook: tables of all configuration keys in docs/config.md, from the dataclasses of `forebay.config`.

Input: the page's Markdown with one marker. Output: the same with a section per dataclass and a row per key: name, type,
default, meaning.
The meaning of a key is the comment on the lines of its definition and directly below, or else the comment above it.
"""

import dataclasses
import inspect
import io
import json
import tokenize
import types
import typing
from typing import Any

from forebay.config import Config

MARKER = "<!-- config reference -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marker. MkDocs calls it for every page."""
    return markdown.replace(MARKER, reference()) if MARKER in markdown else markdown


def reference() -> str:
    """All sections as Markdown."""
    return "\n\n".join(section(f.name, typing.get_type_hints(Config)[f.name]) for f in dataclasses.fields(Config))


def section(name: str, kind: type) -> str:
    text = " ".join((inspect.getdoc(kind) or "").split()).partition(": ")[2]
    hints, meanings = typing.get_type_hints(kind), comments(kind)
    rows = [
        f"| `{f.name}` | {describe(hints[f.name])} | `{default(f)}` | {meaning(f, meanings.get(f.name, ''))} |"
        for f in dataclasses.fields(kind)
    ]
    table = "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])
    return f"## [{name}]\n{text[:1].upper()}{text[1:]}\n\n{table}"


def comments(kind: type) -> dict[str, str]:
    """Key to comment, from the source of the dataclass."""
    source = inspect.getsource(kind)
    lines = source.splitlines()
    found = {t.start[0]: t.string.lstrip("# ") for t in _tokens(source) if t.type == tokenize.COMMENT}
    alone = {n for n in found if lines[n - 1].lstrip().startswith("#")}
    result, taken = {}, set()
    for statement in _fields(source):
        own = [n for n in range(statement.lineno, statement.end_lineno + 1) if n in found]
        if own:  # comment lines below continue it
            while (below := max(own[-1], statement.end_lineno) + 1) in alone:
                own.append(below)
        else:
            above = statement.lineno - 1
            while above in alone and above not in taken:
                own.insert(0, above)
                above -= 1
        taken.update(own)
        result[statement.target.id] = " ".join(found[n] for n in own)
    return result


def _tokens(source: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(source).readline))


def _fields(source: str) -> list[Any]:
    import ast

    (kind,) = ast.parse(source).body
    return [node for node in kind.body if isinstance(node, ast.AnnAssign)]  # type: ignore[attr-defined]


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


def meaning(f: dataclasses.Field[Any], comment: str) -> str:
    """The comment, then what is valid."""
    choices, low, high = (f.metadata.get(name) for name in ("choices", "low", "high"))
    valid = ""
    if choices:
        valid = "one of " + ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    elif low is not None and high is not None:
        valid = f"from {low} to {high}"
    elif low:
        valid = f"at least {low}"
    text = "; ".join(filter(None, [comment.replace("|", "\\|"), valid]))
    return text[:1].upper() + text[1:]
