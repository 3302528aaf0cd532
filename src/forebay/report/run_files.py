"""Reads the folder of a run.

Input: the folder that ``forebay train`` wrote. Output: a `RunFolder`, plain figures. Only run.json is required. A file that is
damaged is a `RunError` that names it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forebay.config import Config, from_mapping
from forebay.errors import RunError, UsageError
from forebay.pipeline.activity import ActionRecord

TRACE = "pipeline.json"
# What pages read of a record in metrics.jsonl, by the key that tells its kind. Names with "_by_" are lists of figures.
_FIGURES = MappingProxyType(
    {
        "cross_entropy_loss": ("seconds", "tokens_per_second", "peak_bytes_by_rank"),
        "busy_seconds_by_process": ("peak_bytes_by_process",),
        "validation_loss": (),
    }
)
_OF_MACHINE = ("processes", "device")
# What pages read of the ranks in result.json, and of profile.json by one process or by pipeline rank.
_OF_RANK = (
    "rank",
    "parameter_bytes",
    "optimizer_bytes",
    "placements",
    "saved_bytes",
    "moved_bytes",
    "d2h_gbps",
    "h2d_gbps",
    "wait_ms",
)
_OF_PROFILE = ("activation_bytes", "weight_bytes", "by_region", "largest")
_OF_PROFILED_RANK = ("rank", "saved", "peak_bytes", "peak_in_flight")


@dataclass(frozen=True)
class RunFolder:
    """The figures of a run.

    Attributes:
        config, versions: of the run.
        machine: see `forebay.train.run_folder.machine`.
        steps: a `forebay.train.metrics.StepRecord` for each step.
        validations: (step, nats a token).
        health: the last record of `log.health`, see `forebay.train.health`; empty without one.
        ranks: see `forebay.train.run_folder.held_by_rank`; empty unless the run finished.
        profile: what a forward saves (`log.profile`): of one process, or a list with one for each pipeline rank; None if absent.
        actions: actions of the step that `log.timeline` names; empty if absent.
    """

    folder: Path
    config: Config
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    validations: Sequence[tuple[int, float]]
    ranks: Sequence[Mapping[str, Any]]
    profile: Any
    actions: Sequence[ActionRecord]
    health: Mapping[str, Any]

    @property
    def processes(self) -> int:
        """Number of processes."""
        return int(self.machine["processes"])

    @property
    def on_gpu(self) -> bool:
        """Whether memory was measured by the caching allocator."""
        return bool(self.machine["device"] != "CPU")

    @property
    def trace(self) -> Path | None:
        """The Perfetto trace."""
        return self.folder / TRACE if self.actions else None

    def peaks(self) -> dict[int, int]:
        """By pipeline rank, the highest measured peak of all steps."""
        return {rank: int(max(size for _, size in points)) for rank, points in self.peak_points().items()}

    def peak_points(self) -> dict[int, list[tuple[float, float]]]:
        """By pipeline rank, (step, measured peak in bytes)."""
        found: dict[int, list[tuple[float, float]]] = {}
        for step in self.steps:
            for rank, size in enumerate(step["peak_bytes_by_rank"]):
                found.setdefault(rank, []).append((step["step"], size))
        return found

    def reserved(self) -> dict[int, int]:
        """By pipeline rank, the most that the allocator reserved in any step; empty on a CPU."""
        found: dict[int, int] = {}
        for step in self.steps:
            for rank, size in enumerate(step.get("reserved_bytes_by_rank", [])):
                found[rank] = max(found.get(rank, 0), int(size))
        return found


def read_run(folder: Path) -> RunFolder:
    """Read a run's folder.

    Raises:
        UsageError: it is not a run's folder.
        RunError: a file in it is damaged.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; name one that `forebay train` wrote")
    with _read_of(folder / "run.json") as path:
        if not path.exists():
            raise UsageError(
                f"{folder} has no run.json, so it is not the folder of a run; name one that `forebay train` wrote"
            )
        run = _json(path)
        versions, machine = dict(run["versions"]), dict(run["machine"])
        _check_keys([machine], _OF_MACHINE)
        machine["processes"] = int(machine["processes"])
        config = _config(path, run["config"])
    records = _lines(folder / "metrics.jsonl")
    with _read_of(folder / "result.json") as path:
        ranks = (_json(path) or {}).get("ranks", [])
        _check_keys(ranks, _OF_RANK)
    with _read_of(folder / "profile.json") as path:
        profile = _json(path)
        if isinstance(profile, Mapping):
            _check_keys([profile], _OF_PROFILE)
        elif profile is not None:
            _check_keys(profile, _OF_PROFILED_RANK)
    with _read_of(folder / TRACE) as path:
        trace = _json(path)
        actions = [] if trace is None else _actions(trace["traceEvents"])
    return RunFolder(
        folder,
        config,
        versions,
        machine,
        steps=[r for r in records if "cross_entropy_loss" in r],
        validations=[(int(r["step"]), float(r["validation_loss"])) for r in records if "validation_loss" in r],
        ranks=ranks,
        profile=profile,
        actions=actions,
        health=next((r for r in reversed(records) if "busy_seconds_by_process" in r), {}),
    )


def _config(path: Path, raw: Any) -> Config:
    try:
        return from_mapping(raw)
    except UsageError as error:  # such as a key of another release
        raise UsageError(f"{path} holds a configuration that is not valid here: {error}") from error


@contextlib.contextmanager
def _read_of(path: Path) -> Iterator[Path]:
    """Name the file in the error for content of another shape."""
    try:
        yield path
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise RunError(f"{path} is damaged: it is not what `forebay train` writes ({said})") from error


def _check_keys(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raise KeyError or TypeError for a record that lacks one of the keys."""
    for record in records:
        for name in names:
            record[name]


def _json(path: Path) -> Any:
    """A file's content; None if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is damaged: it is not JSON ({error})") from error


def _lines(path: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without a last line that a kill cut off."""
    if not path.is_file():
        return []
    found = []
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text.endswith("\n")
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "step" not in record:
                raise ValueError("it is not the record of a step")
            _check_figures(record)
        except ValueError as error:
            if number == len(lines) and not whole:
                break
            raise RunError(f"{path} is damaged in line {number}: {error}") from error
        found.append(record)
    return found


def _check_figures(record: Mapping[str, Any]) -> None:
    """Raise ValueError for a record that lacks a figure which pages read, or has something else in its place."""
    wanted = ["step"]
    for kind, others in _FIGURES.items():
        if kind in record:
            wanted += [kind, *others]
    for load in (name for name in record if name.startswith("expert_load_by_expert/")):
        layer = load.partition("/")[2]
        wanted += [load, f"expert_load_max_over_mean/{layer}", f"router_entropy/{layer}"]
    for name in wanted:
        value = record.get(name)
        figures = value if "_by_" in name else [value]
        if not isinstance(figures, list) or not figures or not all(isinstance(f, (int, float)) for f in figures):
            raise ValueError(f"{name} is missing, or is not {'a list of numbers' if '_by_' in name else 'a number'}")


def _actions(events: Sequence[Mapping[str, Any]]) -> list[ActionRecord]:
    """The records behind a `forebay.pipeline.activity.trace_json`. Each action is followed by its rank's memory counter."""
    memory: dict[int, list[int]] = {}
    for event in events:
        if event["ph"] == "C":
            memory.setdefault(event["pid"], []).append(int(event["args"]["bytes"]))
    nth = dict.fromkeys(memory, 0)
    found = []
    for event in (e for e in events if e["ph"] == "X"):
        rank, start = int(event["pid"]), event["ts"] / 1e3
        held = memory[rank][nth[rank]]
        nth[rank] += 1
        found.append(ActionRecord(rank, event["cat"], event["name"], start, start + event["dur"] / 1e3, held))
    return found
