"""Device profiles: the figures of a GPU and its host that turn FLOPs and bytes into seconds.

Input: the name of a profile that comes with Forebay (`devices/*.json`), or a file that ``forebay doctor --save-profile``
wrote: a JSON object with "name", "title", "node" (GPUs of one host), and every name of `FIGURES`. Output: a frozen
`DeviceProfile`. Nothing is measured, and no device is touched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forebay.errors import nearest, parsed
from forebay.memory.timeline import DUPLEX_RATE_SHARE

DEFAULT = "h200"
SOURCES = ("measured", "datasheet", "calibrated", "estimated")

FIGURES: Mapping[str, str] = MappingProxyType(
    {
        "memory": "bytes of device memory",
        "matmul_bf16": "FLOP/s of a product, by its FLOPs",
        "matmul_fp32": "FLOP/s of a product in fp32, by its FLOPs",
        "grouped": "FLOP/s of F.grouped_mm of rows with matrices, by FLOPs",
        "grouped_weights": "FLOP/s of F.grouped_mm of rows with rows, by FLOPs",
        "attention": "FLOP/s of causal attention, by its FLOPs (half of all pairs)",
        "attention_backward": "the same of its backward",
        "bandwidth": "bytes/s read and written, by bytes",
        "host_out": "bytes/s to pinned host memory, by GPUs of a host that copy at once",
        "host_back": "bytes/s from pinned host memory, likewise",
        "host_both": "bytes/s each way of both at once, likewise",
        "all_to_all": "bytes/s that leave a GPU, within a node, by bytes",
        "all_to_all_between": "the same between nodes",
        "all_gather": "bytes/s that reach a GPU, within a node, by GPUs",
        "all_gather_between": "the same between nodes",
        "reduce_scatter": "bytes/s that leave a GPU, within a node, by GPUs",
        "reduce_scatter_between": "the same between nodes",
        "contention": "share of a hidden all-to-all's time that what hides it takes longer",
        "launch": "seconds of the host for an operation",
        "kernel": "seconds of the device between two kernels",
    }
)


@dataclass(frozen=True)
class Figure:
    """A rate or a time in SI units, such as ``{"value": 4.18e12, "source": "measured", "where":
    "benchmarks/results/experts.md"}``.

    Attributes:
        value: (size, value) ascending; a single entry of size 0 if it does not depend on the size of what runs.
        source: "measured" on such a device; "datasheet": the maker's figure, times the share that `where` names or that an H200
            reaches; "calibrated" to the runs that `where` names; "estimated": an assumption, which `where` states.
        where: the evidence.
    """

    value: tuple[tuple[float, float], ...]
    source: str
    where: str

    def at(self, size: float) -> float:
        """The value for a size: log-log interpolation between two entries, constant beyond the ends."""
        first = self.value[0]
        if len(self.value) == 1 or size <= first[0]:
            return first[1]
        for low, high in pairwise(self.value):
            if size <= high[0]:
                share = math.log(size / low[0]) / math.log(high[0] / low[0])
                return low[1] * (high[1] / low[1]) ** share
        return self.value[-1][1]


@dataclass(frozen=True)
class DeviceProfile:
    """A device: its short and full name, GPUs of one host, and figures by the names of `FIGURES`."""

    name: str
    title: str
    node: int
    figures: Mapping[str, Figure]

    def at(self, name: str, size: float = 0.0) -> float:
        return self.figures[name].at(size)

    def moving(self, count: float) -> float:
        """Seconds in which a kernel reads and writes so many bytes together."""
        return count / self.at("bandwidth", count)

    def link(self, name: str, within: bool, size: float) -> float:
        """The rate of a collective within a node, or between nodes."""
        return self.at(name if within else f"{name}_between", size)

    def host(self, world: int, pipeline: bool) -> tuple[float, ...]:
        """Rates of a `Timeline` for each of `world` GPUs, bytes/s; the GPUs of a host share its memory.

        In a pipeline copies go both ways at once except at the two ends of a step: four rates. Otherwise two.
        """
        gpus = min(world, self.node)
        one_way = self.at("host_out", gpus), self.at("host_back", gpus)
        both = self.at("host_both", gpus) / DUPLEX_RATE_SHARE
        return (both, both, *one_way) if pipeline else one_way

    def measured(self) -> tuple[str, ...]:
        return tuple(name for name, figure in self.figures.items() if figure.source in ("measured", "calibrated"))

    def as_dict(self) -> dict[str, Any]:
        figures = {
            name: {"value": _plain(figure.value), "source": figure.source, "where": figure.where}
            for name, figure in self.figures.items()
        }
        return {"name": self.name, "title": self.title, "node": self.node, **figures}


def names() -> tuple[str, ...]:
    folder = resources.files("forebay.estimate") / "devices"
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


def load(source: str) -> DeviceProfile:
    """The profile of a name or a file. Raises ValueError if it is neither, or a file that cannot be read or lacks a figure."""
    known = names()
    if source.lower() in known:
        text = (resources.files("forebay.estimate") / "devices" / f"{source.lower()}.json").read_text("utf-8")
        return of_dict(json.loads(text), source)
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(
            f"device {source!r} is neither a profile nor a file; {nearest(source.lower(), known, 'name')}valid profiles are "
            f"{', '.join(known)}, and any file that 'forebay doctor --save-profile FILE' wrote"
        )
    try:
        raw = parsed(json.loads, path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"device profile {source} cannot be read as JSON: {error}") from error
    return of_dict(raw, source)


def of_dict(raw: Any, origin: str) -> DeviceProfile:
    """The profile of a JSON object. Raises ValueError if a figure is missing, unknown or invalid."""
    if not isinstance(raw, Mapping):
        raise ValueError(
            f"device profile {origin} is not a JSON object; valid is what 'forebay doctor --save-profile FILE' writes"
        )
    wanted = {"name", "title", "node", *FIGURES}
    if missing := sorted(wanted - set(raw)):
        raise ValueError(f"device profile {origin} lacks {', '.join(missing)}")
    if unknown := sorted(set(raw) - wanted):
        raise ValueError(f"device profile {origin} has {', '.join(unknown)}, which no profile has")
    node = raw["node"]
    if not isinstance(node, int) or isinstance(node, bool) or node < 1:
        raise ValueError(f"device profile {origin}: node is {node!r}; valid is a number of GPUs, at least 1")
    figures = {name: _figure(raw[name], f"device profile {origin}: {name}") for name in FIGURES}
    return DeviceProfile(str(raw["name"]), str(raw["title"]), node, MappingProxyType(figures))


def _figure(raw: Any, what: str) -> Figure:
    if not isinstance(raw, Mapping) or set(raw) != {"value", "source", "where"}:
        raise ValueError(f"{what} is not a figure; valid is an object of value, source and where")
    if raw["source"] not in SOURCES:
        raise ValueError(f"{what} has source {raw['source']!r}; valid are {', '.join(SOURCES)}")
    value = raw["value"]
    entries = value if isinstance(value, list) else [[0.0, value]]
    if not entries or not all(isinstance(e, list) and len(e) == 2 and all(map(_is_number, e)) for e in entries):
        raise ValueError(f"{what} has value {value!r}; valid is a number, or a list of [size, number]")
    pairs = tuple((float(size), float(rate)) for size, rate in entries)
    if any(rate <= 0 for _, rate in pairs) or any(a[0] >= b[0] for a, b in pairwise(pairs)):
        raise ValueError(f"{what} has value {value!r}; valid are numbers above 0, by ascending sizes")
    return Figure(pairs, raw["source"], str(raw["where"]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: tuple[tuple[float, float], ...]) -> Any:
    return value[0][1] if len(value) == 1 else [list(entry) for entry in value]
