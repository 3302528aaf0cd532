"""Reads the folder of a run.

Input: the folder that ``forebay train`` wrote. Output: a `RunFolder`, plain figures. Only run.json is required. A file that is
damaged is a `RunError` that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config import Config, from_mapping
from forebay.errors import RunError, UsageError
from forebay.pipeline.activity import ActionRecord

TRACE = "pipeline.json"


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
    run = _json(folder / "run.json")
    if run is None:
        raise UsageError(
            f"{folder} has no run.json, so it is not the folder of a run; name one that `forebay train` wrote"
        )
    try:
        config = from_mapping(run["config"], origin=str(folder / "run.json"))
        versions, machine = dict(run["versions"]), dict(run["machine"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{folder / 'run.json'} is damaged: it is not what `forebay train` writes") from error
    records = _lines(folder / "metrics.jsonl")
    result = _json(folder / "result.json") or {}
    trace = _json(folder / TRACE)
    try:
        return RunFolder(
            folder,
            config,
            versions,
            machine,
            steps=[r for r in records if "cross_entropy_loss" in r],
            validations=[(int(r["step"]), float(r["validation_loss"])) for r in records if "validation_loss" in r],
            ranks=result.get("ranks", []),
            profile=_json(folder / "profile.json"),
            actions=[] if trace is None else _actions(trace["traceEvents"]),
            health=next((r for r in reversed(records) if "busy_seconds_by_process" in r), {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"a file in {folder} is damaged: {type(error).__name__}: {error}") from error


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
        except ValueError as error:
            if number == len(lines) and not whole:
                break
            raise RunError(f"{path} is damaged in line {number}: {error}") from error
        found.append(record)
    return found


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
