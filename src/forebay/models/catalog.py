"""Published models by name, read from `catalog.toml`: family, configuration, and published parameter counts.

Input: a name such as "qwen3-30b-a3b". Output: a `Published`. No weights, no network access. Multi-token prediction
modules, which transformers does not build, are left out. `tests/models/test_catalog.py` checks the configurations
against the published counts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Published:
    """One model.

    Attributes:
        family: model type in transformers.
        config: keys of that family's configuration.
        source: the Hugging Face repository whose config.json has these values.
        total, active: number of parameters, and of those that multiply a token, rounded as published.
        paper: where the counts are published.
    """

    family: str
    config: Mapping[str, Any]
    source: str
    total: float
    active: float
    paper: str


def _load() -> Mapping[str, Published]:
    entries = tomllib.loads(files(__package__).joinpath("catalog.toml").read_text(encoding="utf-8"))
    for entry in entries.values():
        entry["config"] = MappingProxyType({**entry["config"], **dict.fromkeys(entry.pop("none", ()))})
    return MappingProxyType({name: Published(**entry) for name, entry in entries.items()})


PUBLISHED: Mapping[str, Published] = _load()


def find(name: str) -> Published | None:
    """The model of that name in any case, with or without an organization before a slash. None if unknown."""
    return PUBLISHED.get(name.strip().lower().rpartition("/")[2])
