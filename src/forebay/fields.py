"""Typed fields of configuration sections: `key` declares one, `build_section` validates values against them.

Input: dataclasses whose fields were made with `key`, and mappings read from TOML. Output: instances, or a `UsageError` that
names the section, the key and what is valid. This module does not know which sections exist.
"""

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from forebay.errors import UsageError


def key(
    default: Any, meaning: str, *, choices: tuple[str, ...] = (), low: float | None = None, high: float | None = None
) -> Any:
    """A dataclass field of a configuration section.

    Args:
        default: the default value, or a type that makes it, such as ``dict``.
        meaning: what the documentation says about the key.
        choices: the valid texts; empty for any.
        low, high: inclusive limits of a number.
    """
    metadata = {"meaning": meaning, "choices": choices, "low": low, "high": high}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def nearest(name: str, valid: Iterable[str], what: str) -> str:
    """``the nearest valid WHAT is 'x'; `` with the trailing space, or an empty text if none is near."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"the nearest valid {what} is {close[0]!r}; " if close else ""


def parse_value(text: str) -> Any:
    """The value of a ``--set``: parsed as TOML (``3``, ``true``, ``[1, 2]``, ``"x"``) if possible, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def build_section(section: Any, name: str, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass `section` from `values`.

    Args:
        section: a dataclass type whose fields are annotated with str, int, float, bool, dict, tuples or unions of them.
        name: the section's name, for messages.
        values: value of each key, as read from the file.

    Raises:
        UsageError: an unknown key, a value of the wrong type, or one outside its choices or range.
    """
    fields = {f.name: f for f in dataclasses.fields(section)}
    hints = typing.get_type_hints(section)
    checked = {}
    for option, value in values.items():
        if option not in fields:
            raise UsageError(
                f"unknown key {option!r} in section [{name}]; {nearest(option, fields, 'key')}valid keys are {', '.join(fields)}"
            )
        accepted, result = _fit(value, hints[option])
        if not accepted:
            raise UsageError(f"{name}.{option} = {value!r} has the wrong type: it must be {_describe(hints[option])}")
        _check_limits(f"{name}.{option}", result, fields[option].metadata)
        checked[option] = result
    return section(**checked)


def _check_limits(where: str, value: Any, limits: Mapping[str, Any]) -> None:
    choices, low, high = limits.get("choices"), limits.get("low"), limits.get("high")
    if choices and value not in choices:
        raise UsageError(
            f"{where} = {value!r} is unknown; {nearest(value, choices, 'value')}valid are {', '.join(choices)}"
        )
    if low is not None and value < low:
        raise UsageError(f"{where} = {value!r} is too small; it must be at least {low}")
    if high is not None and value > high:
        raise UsageError(f"{where} = {value!r} is too large; it must be at most {high}")


def _fit(value: Any, hint: Any) -> tuple[bool, Any]:
    """Whether `value` is of the annotated type, and the value as that type (ints count as floats, lists as tuples)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        found = (_fit(value, option) for option in arguments)
        return next((answer for answer in found if answer[0]), (False, None))
    if origin is dict:
        return _fit_table(value, arguments[1])
    if origin is tuple:
        return _fit_list(value, arguments)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)  # a bool is an int in Python
    if hint is float:
        fits = number and math.isfinite(value)
        return fits, float(value) if fits else None
    if hint is int:
        return number and isinstance(value, int), value
    return isinstance(value, hint), value


def _fit_table(value: Any, kind: Any) -> tuple[bool, Any]:
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
        return "a table"
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return f"a list of {count}{_PLURAL[arguments[0]]}"
    return _SINGULAR[hint]


_SINGULAR: Mapping[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
_PLURAL: Mapping[type, str] = {str: "texts", int: "whole numbers", float: "numbers"}
