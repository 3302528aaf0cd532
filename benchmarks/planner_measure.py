"""Measures configurations of the planner's grid on the GPUs of this machine: hands them to worker processes, and watches those.

In: entries (`benchmarks/planner_grid.py`), perhaps with a limit on what torch may reserve. Out: a line of JSON for each in
OUT/NAME.jsonl, written as it comes, so that whatever ends a run leaves what was measured; allocators' histories and the workers'
logs in OUT/NAME.tar.gz.

Configurations of one GPU run on all GPUs at once, those of two in pairs at once, and so on: `Group` is the processes that
share one. A configuration that fails, or takes longer than its time, costs its group: its processes are killed.
Processes import everything when this begins, and touch a GPU only when they are given a configuration.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from planner_grid import Entry

SECONDS, COMPILING, FIRST = (
    60,
    180,
    90,
)  # that a configuration may take; one that compiles; the first of a process, in addition
GRACE = 5  # seconds that the others of a group have to say what they measured when one has failed
PORTS = 29650


@dataclass
class Group:
    """The processes of `gpus`, which run one configuration after the other. Owns them, and starts them anew after a failure."""

    gpus: tuple[int, ...]
    parts: Path
    logs: Path
    tiny: bool
    entry: Entry | None = None
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    spare: list[subprocess.Popen[str]] = field(default_factory=list)  # they have imported everything, and wait
    fresh: bool = True
    began: float = 0.0
    limit: float = 0.0
    reserved: int | None = None

    def start(self) -> None:
        self.fresh = True
        self.processes = self.spare or self._spawn()
        self.spare = [] if self.tiny else self._spawn()

    def _spawn(self) -> list[subprocess.Popen[str]]:
        return [self._process(rank) for rank in range(len(self.gpus))]

    def _process(self, rank: int) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if not self.tiny:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        if (world := len(self.gpus)) > 1:
            environment |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
            }
        command = [sys.executable, str(Path(__file__).with_name("planner_worker.py")), "--parts", str(self.parts)]
        with (self.logs / f"gpus-{'-'.join(map(str, self.gpus))}.rank{rank}.log").open("a") as out:
            return subprocess.Popen(
                command + ["--tiny"] * self.tiny,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
            )

    def give(self, entry: Entry, port: int, seconds: float | None, reserved: int | None) -> None:
        self.entry, self.began, self.reserved = entry, time.monotonic(), reserved
        usual = COMPILING if entry.sections["memory"].get("compile") else SECONDS
        self.limit = seconds if seconds is not None else usual + FIRST * self.fresh
        self.fresh = False
        line = json.dumps({"name": entry.name, "port": port, "limit": reserved}) + "\n"
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is gone: `answer` says so
                process.stdin.write(line)
                process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """The row of the configuration in hand, once there is one; the group is then ready for the next."""
        assert self.entry is not None
        paths = [self.parts / f"{self.entry.name}.{rank}.json" for rank in range(len(self.gpus))]
        gone = [p.poll() for p in self.processes]  # before looking: a process writes, and then ends
        there = [json.loads(path.read_text()) if path.exists() else None for path in paths]
        late = time.monotonic() - self.began > self.limit
        silent = [r for r, (row, code) in enumerate(zip(there, gone, strict=True)) if row is None and code is not None]
        failed = bool(silent) or any(row is not None and "error" in row for row in there)
        if None in there and not late:
            if not failed:
                return None
            self.limit = min(self.limit, time.monotonic() - self.began + GRACE)
            return None
        row = self._row(there, gone)
        for path in paths:
            path.unlink(missing_ok=True)
        if "error" in row or any(r["ends"] for r in row["ranks"]):
            self.stop()
            self.start()
        self.entry = None
        return row

    def _row(self, there: list[Any], gone: list[int | None]) -> dict[str, Any]:
        assert self.entry is not None
        e = self.entry
        row: dict[str, Any] = {
            "name": e.name,
            "group": e.group,
            "placement": e.placement,
            "gpus": e.gpus,
            "asked_skew": e.skew,
        }
        if self.reserved is not None:
            row["limit"] = self.reserved
        row |= {"seconds": round(time.monotonic() - self.began, 2), "ranks": there}
        errors = [r["error"] for r in there if r is not None and "error" in r]
        if errors:
            row |= {"error": errors[0], "oom": any(r is not None and r.get("oom", False) for r in there)}
        elif None in there:
            ended = {rank: code for rank, code in enumerate(gone) if code is not None}
            row |= {
                "error": f"processes ended: {ended}" if ended else f"took longer than {self.limit:.0f} s",
                "oom": False,
            }
        return row

    def stop(self) -> None:
        """Kill what runs, and wait for it: GPU memory is free then."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes = []

    def close(self) -> None:
        """End all, spare ones too. What is through ends by itself when there is nothing more to read."""
        for process in (*self.processes, *self.spare):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        self.processes, self.spare = [*self.processes, *self.spare], []
        self.stop()


def measure(
    entries: Sequence[Entry],
    out: Path,
    name: str,
    gpus: int,
    *,
    tiny: bool = False,
    seconds: float | None = None,
    deadline: float = 540,
    limits: dict[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Measure all `entries` that `gpus` GPUs can run.

    Args:
        seconds: that a configuration may take; None for the usual.
        deadline: seconds after which nothing more is begun, and what runs is killed.
        limits: by name, bytes that torch may reserve on each GPU.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    ends, ports = time.monotonic() + deadline, count(PORTS)
    with tempfile.TemporaryDirectory() as folder:
        parts, logs = Path(folder, "parts"), Path(folder, "logs")
        parts.mkdir()
        logs.mkdir()
        sizes = sorted({e.gpus for e in entries if e.gpus <= gpus})
        phases = [(size, [Group(g, parts, logs, tiny) for g in _split(gpus, size)]) for size in sizes]
        try:
            for _, groups in phases:
                for group in groups:
                    group.start()
            _make_corpus(entries[0])
            for size, groups in phases:
                # What compiles takes longest: it comes first, and the others fill the other groups meanwhile.
                todo = sorted(
                    (e for e in entries if e.gpus == size), key=lambda e: not e.sections["memory"].get("compile")
                )
                for row in _phase(todo, groups, ports, seconds, ends, limits or {}):
                    rows.append(row)
                    with (out / f"{name}.jsonl").open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(f"{row['seconds']:7.1f} s  {row['name']}  {row.get('error', '')[:160]}", flush=True)
                for group in groups:
                    group.close()
                _pack(out / f"{name}.tar.gz", Path(folder))
        finally:
            for _, groups in phases:
                for group in groups:
                    group.stop()
                    group.close()
    return rows


def _split(gpus: int, size: int) -> list[tuple[int, ...]]:
    return [tuple(range(first, first + size)) for first in range(0, gpus - size + 1, size)]


def _phase(
    todo: list[Entry],
    groups: list[Group],
    ports: Iterator[int],
    seconds: float | None,
    ends: float,
    limits: dict[str, int],
) -> Iterator[dict[str, Any]]:
    """Rows as they come, until there is nothing to do, or no time."""
    while todo or any(g.entry is not None for g in groups):
        if time.monotonic() > ends:
            for entry in [*(g.entry for g in groups if g.entry is not None), *todo]:
                yield {
                    "name": entry.name,
                    "gpus": entry.gpus,
                    "seconds": 0.0,
                    "error": "no time was left",
                    "oom": False,
                }
            for group in groups:
                group.entry = None
                group.stop()
            return
        for group in groups:
            if group.entry is not None and (row := group.answer()) is not None:
                yield row
            if group.entry is None and todo:
                entry = todo.pop(0)
                group.give(entry, next(ports), seconds, limits.get(entry.name))
        time.sleep(0.02)


def _make_corpus(entry: Entry) -> None:
    """Tokenise the data once: all trainers read it from the cache."""
    from forebay.config import from_mapping
    from forebay.train.data import load_corpus, load_tokenizer

    data = from_mapping(entry.sections).data
    load_corpus(data, load_tokenizer(data.tokenizer))


def _pack(path: Path, folder: Path) -> None:
    partial = path.with_suffix(".partial")
    with tarfile.open(partial, "w:gz") as archive:
        for file in sorted([*folder.glob("parts/*.trace.gz"), *folder.glob("logs/*")]):
            archive.add(file, arcname=file.name)
    partial.rename(path)
