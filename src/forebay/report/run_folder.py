"""A run's folder, read: what is there, and nothing made up for what is not.

In: the folder that ``forebay train`` wrote. Out: a `RunFolder` of plain figures; a file that the run did not leave is None or
empty. Nothing is written.

    run.json        configuration, versions, machine           needed: without it this is no run's folder
    metrics.jsonl   a record a step; a last line that a kill cut off is left out
    result.json     by pipeline rank: state, placements, what became of saved bytes
    profile.json    what a forward pass saves: ``forebay profile --json``, or `log.profile`
    pipeline.json   what each rank ran in one step (a Chrome trace, of `log.timeline`)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.report.pipeline import Ran
from forebay.train.config import Config, from_mapping
from forebay.train.errors import RunError, UsageError

TRACE = "pipeline.json"


@dataclass(frozen=True)
class RunFolder:
    """What a run left.

    Attributes:
        config, versions: of the run.
        machine: see `forebay.train.outcome.machine`; empty for a run that did not write it.
        steps: a record a step that was done, see `forebay.train.metrics.StepRecord`.
        validations: (step, nats a token).
        ranks: see `forebay.train.outcome.held_by_rank`; empty unless the run came to its end.
        profile: of one process, or a list of one a pipeline rank; None if there is none.
        ran: of the watched step; empty if there is none.
    """

    folder: Path
    config: Config
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    validations: Sequence[tuple[int, float]]
    ranks: Sequence[Mapping[str, Any]]
    profile: Any
    ran: Sequence[Ran]

    @property
    def processes(self) -> int:
        """Of the run; the fewest it can have had, where it did not write them."""
        p = self.config.parallel
        return int(self.machine.get("processes", p.pp * p.ep))

    @property
    def on_gpu(self) -> bool:
        """Whether memory was measured by the caching allocator."""
        return bool(self.machine) and self.machine["device"] != "CPU"

    @property
    def trace(self) -> Path | None:
        """The file that Perfetto opens."""
        return self.folder / TRACE if self.ran else None


def read_run(folder: Path) -> RunFolder:
    """Read a run's folder.

    Raises:
        UsageError: it is no run's folder.
        RunError: a file in it is damaged.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; name one that `forebay train` wrote")
    about = _json(folder / "run.json")
    if about is None:
        raise UsageError(f"{folder} holds no run: it has no run.json; name a folder that `forebay train` wrote")
    try:
        config = from_mapping(about["config"], origin=str(folder / "run.json"))
        versions, machine = dict(about.get("versions", {})), dict(about.get("machine", {}))
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
            [r for r in records if "cross_entropy_loss" in r],
            [(int(r["step"]), float(r["validation_loss"])) for r in records if "validation_loss" in r],
            result.get("ranks", []),
            _json(folder / "profile.json"),
            [] if trace is None else _ran(trace["traceEvents"]),
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
        raise RunError(f"{path} is damaged: it is no JSON ({error})") from error


def _lines(path: Path) -> list[dict[str, Any]]:
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
                raise ValueError("not a step's record")
        except ValueError as error:
            if number == len(lines) and not whole:
                break
            raise RunError(f"{path} is damaged in line {number}: {error}") from error
        found.append(record)
    return found


def _ran(events: Sequence[Mapping[str, Any]]) -> list[Ran]:
    """The trace's actions as they were recorded. Memory is the counter that was written with each action's end."""
    counted: dict[int, list[int]] = {}
    for event in events:
        if event["ph"] == "C":
            counted.setdefault(event["pid"], []).append(int(event["args"]["bytes"]))
    nth = dict.fromkeys(counted, 0)
    found = []
    for event in (e for e in events if e["ph"] == "X"):
        rank, start = int(event["pid"]), event["ts"] / 1e3
        memory = counted[rank][nth[rank]]
        nth[rank] += 1
        found.append(Ran(rank, event["cat"], event["name"], start, start + event["dur"] / 1e3, memory))
    return found
