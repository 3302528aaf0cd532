"""Reads a TOML file or a preset, with overrides, into a `Config`.

Input: a path or the name of a preset, and ``section.key=value`` texts. Output: a valid `Config`. A section's dataclass says
which keys there are, of which types and within which limits; `forebay.config.checks` sees the whole. Every mistake that can be
seen without data, weights or a GPU raises `UsageError`, which names the key and what would be valid.
"""

import dataclasses
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from datetime import date, time
from importlib import resources
from pathlib import Path
from typing import Any

from forebay.config.checks import check
from forebay.config.sections import Config
from forebay.errors import UsageError, nearest, parsed


def presets() -> dict[str, str]:
    """TOML text of each preset of the package, by name."""
    folder = resources.files("forebay") / "presets"
    found = [f for f in folder.iterdir() if f.name.endswith(".toml")]
    return {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in sorted(found, key=lambda f: f.name)}


def load(source: str, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file, or a preset if no such file exists, and apply ``section.key=value`` texts.

    Raises:
        UsageError: neither a file nor a preset, TOML that cannot be read, or a key or value that is not valid.
    """
    path = Path(source)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{source} cannot be read as a TOML file: {error}") from error
    else:
        named = presets()
        if source not in named:
            model = "" if path.suffix == ".toml" else "; a model is named in a TOML file, by model.family or model.path"
            raise UsageError(
                f"{source!r} is neither a file nor a preset; "
                f"{nearest(source, named, 'preset')}valid presets are {', '.join(named)}{model}"
            )
        text = named[source]
    try:
        raw = parsed(tomllib.loads, text)
    except ValueError as error:
        raise UsageError(f"{source} is not valid TOML: {error}") from error
    for override in overrides:
        apply_override(raw, override)
    return from_mapping(raw, origin=source)


def from_mapping(raw: Mapping[str, Any], origin: str = "the configuration") -> Config:
    """Validate nested mappings of sections.

    Raises:
        UsageError: as `load`.
    """
    sections = {f.name: f.type for f in dataclasses.fields(Config)}
    built = {}
    for name, values in raw.items():
        if name not in sections:
            what = (
                f"an unknown section [{name}]" if isinstance(values, Mapping) else f"a key {name!r} outside any section"
            )
            raise UsageError(
                f"{origin} has {what}; {nearest(name, sections, 'section')}valid sections are {', '.join(sections)}"
            )
        if not isinstance(values, Mapping):
            raise UsageError(f"{origin} has a key {name!r} outside any section; [{name}] must be a section")
        built[name] = build_section(sections[name], name, values)
    config = Config(**built)
    check(config)
    return config


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set ``section.key=value`` or, for a table, ``section.key.name=value`` (the name may hold dots, and quotes around it).

    Raises:
        UsageError: a text that is neither.
    """
    target, equals, text = override.partition("=")
    parts = target.strip().split(".", 2)
    if not equals or len(parts) < 2 or not all(parts):
        raise UsageError(f"--set {override!r} is not understood; write section.key=value, such as train.steps=20")
    section = raw.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise UsageError(f"--set {override!r}: {parts[0]!r} is not a section")
    value = _parse_value(text)
    if len(parts) == 2:
        section[parts[1]] = value
        return
    table = section.setdefault(parts[1], {})
    if not isinstance(table, dict):
        raise UsageError(f"--set {override!r}: {parts[0]}.{parts[1]} is {table!r}, not a table; set it whole")
    name = parts[2]
    quoted = len(name) > 2 and name[0] == name[-1] and name[0] in "\"'"  # as a TOML file has to
    table[name[1:-1] if quoted else name] = value


def _parse_value(text: str) -> Any:
    """The value of a ``--set``: parsed as TOML (``3``, ``true``, ``[1, 2]``, ``"x"``) if possible, else the text itself. So is a
    date or time, as in ``log.folder=2026-11-28``: no key has one."""
    try:
        value = parsed(tomllib.loads, f"value = {text}")["value"]
    except ValueError:
        return text.strip()
    return text.strip() if isinstance(value, (date, time)) else value  # a datetime is a date


def build_section(section: Any, name: str, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass `section`; `name` is for messages."""
    fields = {f.name: f for f in dataclasses.fields(section)}
    hints = typing.get_type_hints(section)
    checked = {}
    for option, value in values.items():
        if option not in fields:
            raise UsageError(
                f"unknown key {option!r} in section [{name}]; {nearest(option, fields, 'key')}valid keys are {', '.join(fields)}"
            )
        accepted, result = _fit(value, hints[option], f"{name}.{option}")
        if not accepted:
            raise UsageError(f"{name}.{option} = {value!r} has the wrong type: it must be {_describe(hints[option])}")
        _check_limits(f"{name}.{option}", result, fields[option].metadata, hints[option])
        checked[option] = result
    return section(**checked)


def _check_limits(where: str, value: Any, limits: Mapping[str, Any], hint: Any) -> None:
    if any(isinstance(text, str) and "\0" in text for text in (value if isinstance(value, tuple) else [value])):
        raise UsageError(f"{where} = {value!r} has a NUL character, which no path, name or URL can have")
    choices, low, high = limits.get("choices"), limits.get("low"), limits.get("high")
    if isinstance(value, str) and choices and value not in choices:
        beside = [_SINGULAR[kind] for kind in typing.get_args(hint) if kind in (bool, int, float)]
        valid = ", ".join([*(choice or "''" for choice in choices), *beside])
        raise UsageError(f"{where} = {value!r} is unknown; {nearest(value, choices, 'value')}valid are {valid}")
    if isinstance(value, str):
        return
    if low is not None and value < low:
        raise UsageError(f"{where} = {value!r} is too small; it must be at least {low}")
    if high is not None and value > high:
        raise UsageError(f"{where} = {value!r} is too large; it must be at most {high}")


def _fit(value: Any, hint: Any, where: str = "") -> tuple[bool, Any]:
    """Whether `value` is of the annotated type, and the value as that type (ints count as floats, lists as tuples).

    `where` is the key, for messages about the tables in it.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        found = (_fit(value, option) for option in arguments)
        return next((answer for answer in found if answer[0]), (False, None))
    if origin is dict:
        return _fit_table(value, arguments[1], where)
    if origin is tuple:
        return _fit_list(value, arguments)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)  # a bool is an int in Python
    if hint is float:
        fits = number and abs(value) <= sys.float_info.max  # no NaN, no infinity, no whole number beyond all floats
        return fits, float(value) if fits else None
    if hint is int:
        return number and isinstance(value, int), value
    return isinstance(value, hint), value


def _fit_table(value: Any, kind: Any, where: str) -> tuple[bool, Any]:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping) or not all(isinstance(v, Mapping) for v in value.values()):
            return False, None
        return True, {name: build_section(kind, f"{where}.{name}", keys) for name, keys in value.items()}
    fits = isinstance(value, Mapping) and (kind is Any or all(isinstance(v, kind) for v in value.values()))
    return fits, dict(value) if fits else None


def _fit_list(value: Any, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)):
        return False, None
    kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(value):
        return False, None
    parts = [_fit(v, k) for v, k in zip(value, kinds, strict=True)]
    return all(fits for fits, _ in parts), tuple(part for _, part in parts)


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(a) for a in arguments)
    if origin is dict:
        return "a table of tables" if dataclasses.is_dataclass(arguments[1]) else "a table"
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return f"a list of {count}{_PLURAL[arguments[0]]}"
    return _SINGULAR[hint]


_SINGULAR: Mapping[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}

_PLURAL: Mapping[type, str] = {str: "texts", int: "whole numbers", float: "numbers"}
