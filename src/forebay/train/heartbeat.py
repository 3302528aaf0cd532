"""Knows which process of a run has died, so that the others can say it and end instead of waiting.

In: the store through which the processes found each other. Out: a thread in each process that leaves a beat in the store once a
period and reads the others'. A collective that waits for a dead process cannot be interrupted, and where it fails at once (gloo:
"connection closed by peer") its message names nobody. So a process counts as lost when it

    is silent for `patience` seconds                            it froze, or its machine or the network to it is gone
    runs on this machine, and its process is no longer there    killed; known within a period
    left with an error                                          it wrote its reason into the store

and then every other process ends with exit code 1, one of them saying who was lost and how. Where a collective raises first,
`who_is_gone` gives that sentence, and the process ends in its own way.

Beats come from a thread: a long compilation or checkpoint does not silence a process, death and a stopped process do. Silence
is measured by the watcher's own clock, which stands still while the watcher does: a machine that slept blames nobody.
`Heartbeat` owns its thread and its connection.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from forebay.train.errors import first_line

_GRACE = 5.0
"""Periods that a loss must last before this process is ended for it, so that its own error, if it has one, comes first; and
beats that a process may miss before a failed collective is blamed on it."""


@dataclass
class _Other:
    """What is known of another process. Times are of the watcher's clock."""

    name: str  # host and process number
    place: str
    pid: int
    beat: int = -1
    heard: float = 0.0
    fate: str = ""  # how it was lost; "" while all is well
    since: float = 0.0
    finished: bool = False  # left without an error


class Heartbeat:
    """Beats for this process and listens to the others. A context manager: to leave it with an error is to fail for all.

    Args:
        store: of torch.distributed; a clone of it is used, so that waits of one thread do not hold up the other.
        rank, size: of this process, and how many there are.
        patience: seconds of silence after which a process counts as lost.
        advice: what the last message adds, such as which checkpoint is intact.
        period: seconds between beats.
        leave: ends this process; os._exit, as the main thread may be inside a collective.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        patience: float,
        advice: Callable[[], str],
        period: float = 1.0,
        leave: Callable[[int], Any] = os._exit,
    ):
        self._store, self._rank = store.clone(), rank
        self._store.set_timeout(timedelta(seconds=max(patience / 2, 4 * period)))
        self._patience, self._advice, self._period, self._leave = patience, advice, period, leave
        self._self = {"name": f"{os.uname().nodename}, pid {os.getpid()}", "place": _place(), "pid": os.getpid()}
        self._unheard = [r for r in range(size) if r != rank]
        self._others: dict[int, _Other] = {}
        self._clock = 0.0
        self._store_gone: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(timeout=2 * self._period)
        if self._thread.is_alive() or self._store_gone is not None:
            return  # the store does not answer
        # Who ends because another one was lost is no loss of its own.
        why = first_line(error) if error is not None and not self._lost(_GRACE * self._period) else ""
        try:
            self._say(beat=0, left=True, why=why)
        except RuntimeError:
            return

    def who_is_gone(self) -> str:
        """A sentence that names the processes that were lost within the last seconds; "" if all are well. Takes some."""
        deadline = time.monotonic() + (_GRACE + 2) * self._period
        while time.monotonic() < deadline:
            lost = self._lost(_GRACE * self._period)
            if lost:
                return self._sentence(lost)
            time.sleep(self._period / 4)
        return self._sentence([])

    def _run(self) -> None:
        beat, before = 0, time.monotonic()
        while not self._over.wait(self._period):
            now = time.monotonic()
            self._clock += min(now - before, 2 * self._period)
            before, beat = now, beat + 1
            if self._store_gone is None:
                try:
                    self._say(beat=beat)
                    self._listen()
                except RuntimeError:  # DistError too: the process that holds the store died, or does not answer
                    self._store_gone = self._clock
            self._look()
            lost = [
                r for r in self._lost(self._patience) if self._clock - self._others[r].since > _GRACE * self._period
            ]
            if lost or (self._store_gone is not None and self._clock - self._store_gone > self._patience):
                self._end(lost)

    def _say(self, **what: Any) -> None:
        self._store.set(f"forebay/beat/{self._rank}", json.dumps({**self._self, **what}))

    def _listen(self) -> None:
        for rank in [r for r in self._unheard if self._store.check([f"forebay/beat/{r}"])]:
            self._unheard.remove(rank)
            self._others[rank] = _Other("", "", 0, heard=self._clock)
        ranks = [r for r, other in self._others.items() if not other.finished]
        if not ranks:
            return
        for rank, raw in zip(ranks, self._store.multi_get([f"forebay/beat/{r}" for r in ranks]), strict=True):
            said, other = json.loads(raw), self._others[rank]
            if said["beat"] == other.beat:
                continue
            other.name, other.place, other.pid = said["name"], said["place"], said["pid"]
            other.beat, other.heard = said["beat"], self._clock
            if said.get("left"):
                other.finished = not said["why"]
                self._lose(other, f"failed: {said['why']}" if said["why"] else "")

    def _look(self) -> None:
        """Processes of this machine that are no longer there."""
        for other in self._others.values():
            if not other.finished and other.place == self._self["place"] and _is_gone(other.pid):
                self._lose(other, "died")

    def _lose(self, other: _Other, fate: str) -> None:
        if fate and not other.fate:
            other.fate, other.since = fate, self._clock

    def _lost(self, patience: float) -> list[int]:
        """Processes that ended badly or were silent for so long, the first to go first."""
        others = list(self._others.items())  # the thread may add one meanwhile
        lost = {r: o.since for r, o in others if o.fate}
        silent = {r: o.heard for r, o in others if not (o.fate or o.finished)}
        if self._store_gone is None:  # else all are silent
            lost |= {r: heard for r, heard in silent.items() if self._clock - heard > patience}
        return sorted(lost, key=lambda r: (lost[r], r))

    def _sentence(self, lost: list[int]) -> str:
        if not lost:
            return "" if self._store_gone is None else "the process that the others found each other through is gone"
        others = {r: self._others[r] for r in lost}
        fates = {r: o.fate or f"has not answered for {self._clock - o.heard:.0f} s" for r, o in others.items()}
        return " and ".join(f"process {r} ({o.name}) {fates[r]}" for r, o in others.items())

    def _end(self, lost: list[int]) -> None:
        if self._over.is_set():
            return
        if self._speaks(lost):
            print(f"forebay: {self._sentence(lost)}; the run has ended; {self._advice()}", file=sys.stderr, flush=True)
        self._leave(1)

    def _speaks(self, lost: list[int]) -> bool:
        """Whether this process is the one that says it: the first of those that ask, or the lowest that may live."""
        try:
            if self._store_gone is None:
                return self._store.add("forebay/dead", 1) == 1
        except RuntimeError:
            pass
        # Without torchrun process 0 holds the store.
        return not [
            r for r, other in self._others.items() if 0 < r < self._rank and not other.finished and r not in lost
        ]


def _place() -> str:
    """What two processes share that see each other's process numbers: the booted machine and the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown to {os.getpid()}"  # so that nobody looks for this process


def _is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended: there is none, or its parent has not yet taken note."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"
