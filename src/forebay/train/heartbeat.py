"""Detects a dead process, so that the other processes of a run report it and end instead of waiting.

Input: the store through which the processes found each other. Output: a thread in each process, which writes a beat to the
store once a period and reads those of the others. A blocked collective cannot be interrupted, and the error of one that fails
at once (gloo: "connection closed by peer") names no process. A process counts as lost when it has been silent for `patience`
seconds, when it ran on this machine and its pid is gone, when the store ended with it before its first beat was read, or when
it left with an error, whose reason it wrote to the store. All others then end, with the exit code of that error or of
`PeerLost`, and one of them reports which process was lost. A process whose torchrun is gone ends too, or it would hold its GPU
while another torchrun starts in that one's place. `Heartbeat` owns its thread and its connection to the store. `ending_after`
limits what comes before there is a store.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError

from forebay.errors import PeerLost, Stopped, exit_code_of, first_line

_GRACE = 5.0
"""Periods between the loss of a process and the end of this one, so that this one's own error, if it has one, is reported first.
Also the beats that a process may miss before a failed collective is blamed on it."""


@dataclass
class _Peer:
    """The state of another process, as far as this one knows. Times are those of this process's clock."""

    name: str = "not heard of since the start"  # host and pid
    place: str = ""
    pid: int = 0
    beat: int = 0  # its number; 0 before the first
    heard: float = 0.0
    fate: str = ""  # how it was lost; "" while it runs
    exit_code: int = PeerLost.exit_code  # of the error with which it left
    lost_at: float = 0.0
    finished: bool = False  # left without an error


@contextmanager
def ending_after(seconds: float, why: str, leave: Callable[[int], Any] = os._exit) -> Iterator[None]:
    """Context that ends this process with the code of `PeerLost`, and prints `why`, if it takes longer.

    Torch's own limits add up while processes look for each other: connecting to a store on which no process listens takes 2.3
    times its timeout, and each process group waits once more.
    """

    def end() -> None:
        print(f"forebay: {why}", file=sys.stderr, flush=True)
        leave(PeerLost.exit_code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Heartbeat:
    """Writes beats for this process and watches the others. A context manager; leaving it with an error tells the others to end.

    Beats come from a thread, so a long compilation or checkpoint does not look like a death. The first one is written when the
    context is entered, which all processes do within `patience` of each other.

    Args:
        store: of torch.distributed. A clone is used, so that a wait of another thread does not block the beats.
        patience: seconds of silence after which a process counts as lost.
        advice: text that the last message adds, such as which checkpoint is intact.
        period: seconds between beats.
        leave: ends this process. os._exit, as the main thread may be blocked in a collective.
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
        self._peers = {r: _Peer() for r in range(size) if r != rank}
        self._clock = 0.0
        self._store_gone: float | None = None
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        with suppress(RuntimeError):  # the thread finds out that the store is gone
            self._write(beat=1)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        self._thread.join(timeout=2 * self._period)
        if self._thread.is_alive() or self._store_gone is not None:
            return  # the store does not answer
        # A process that ends because another one was lost does not count as lost, and all stop together when asked to.
        why, code = "", 0
        if not (error is None or isinstance(error, Stopped) or self._lost(_GRACE * self._period)):
            why, code = first_line(error), exit_code_of(error)
        with suppress(RuntimeError):
            self._write(beat=-1, left=True, why=why, code=code)

    def find_lost(self) -> PeerLost | None:
        """An error that names the processes lost within the last seconds; None if all are well. Waits some seconds for a loss."""
        deadline = time.monotonic() + (_GRACE + 2) * self._period
        while time.monotonic() < deadline:
            lost = self._lost(_GRACE * self._period)
            if lost:
                return PeerLost(self._sentence(lost), self._peers[lost[0]].exit_code)
            time.sleep(self._period / 4)
        return PeerLost(self._sentence([])) if self._store_gone is not None else None

    def _run(self) -> None:
        beat, before = 1, time.monotonic()
        while not self._over.wait(self._period):
            now = time.monotonic()
            # Silence is measured by a clock that stops while this process is stopped: a machine that slept blames no other.
            self._clock += min(now - before, 2 * self._period)
            before, beat = now, beat + 1
            if self._agent not in (None, os.getppid()):
                return self._orphaned()
            if self._store_gone is None:
                try:
                    self._write(beat=beat)
                    self._read()
                except RuntimeError as error:  # DistError too: the process that holds the store died, or is silent
                    self._store_gone = self._clock
                    if isinstance(error, DistNetworkError):
                        self._lose_unheard_holder()
            for peer in self._peers.values():  # a process of this machine is known to be gone by its pid
                if not peer.finished and peer.place == self._self["place"] and _is_gone(peer.pid):
                    self._lose(peer, "died")
            lost = [
                r for r in self._lost(self._patience) if self._clock - self._peers[r].lost_at > _GRACE * self._period
            ]
            if lost or (self._store_gone is not None and self._clock - self._store_gone > self._patience):
                self._end(lost)

    def _write(self, **values: Any) -> None:
        self._store.set(f"forebay/beat/{self._rank}", json.dumps({**self._self, **values}))

    def _read(self) -> None:
        # A key that is not there yet would make multi_get wait.
        waiting = [r for r, peer in self._peers.items() if not peer.finished]
        ranks = [r for r in waiting if self._peers[r].beat or self._store.check([f"forebay/beat/{r}"])]
        if not ranks:
            return
        for rank, raw in zip(ranks, self._store.multi_get([f"forebay/beat/{r}" for r in ranks]), strict=True):
            message, peer = json.loads(raw), self._peers[rank]
            if message["beat"] == peer.beat:
                continue
            peer.name, peer.place, peer.pid = message["name"], message["place"], message["pid"]
            peer.beat, peer.heard = message["beat"], self._clock
            if message.get("left"):
                peer.finished = not message["why"]
                self._lose(peer, f"failed: {message['why']}" if message["why"] else "")
                peer.exit_code = message["code"]

    def _lose(self, peer: _Peer, fate: str) -> None:
        if fate and not peer.fate:
            peer.fate, peer.lost_at = fate, self._clock

    def _lose_unheard_holder(self) -> None:
        """Process 0 died if the connection to the store broke, which it holds without torchrun, and its pid is not known yet."""
        holder = self._peers.get(0)
        if holder is not None and not holder.beat:
            self._lose(holder, "died")

    def _lost(self, patience: float) -> list[int]:
        """Processes that ended badly or were silent for `patience` seconds, in the order in which they were lost."""
        lost = {r: p.lost_at for r, p in self._peers.items() if p.fate}
        silent = {r: p.heard for r, p in self._peers.items() if not (p.fate or p.finished)}
        if self._store_gone is None:  # without the store all are silent
            lost |= {r: heard for r, heard in silent.items() if self._clock - heard > patience}
        return sorted(lost, key=lambda r: (lost[r], r))

    def _sentence(self, lost: list[int]) -> str:
        if not lost:
            return "the process that the others found each other through is gone"
        peers = {r: self._peers[r] for r in lost}
        fates = {r: p.fate or f"has not answered for {self._clock - p.heard:.0f} s" for r, p in peers.items()}
        return " and ".join(f"process {r} ({p.name}) {fates[r]}" for r, p in peers.items())

    def _end(self, lost: list[int]) -> None:
        if self._over.is_set():
            return
        if self._reports(lost):
            print(f"forebay: {self._sentence(lost)}; the run has ended; {self._advice()}", file=sys.stderr, flush=True)
        self._leave(self._peers[lost[0]].exit_code if lost else PeerLost.exit_code)

    def _orphaned(self) -> None:
        """End, and let the others report that this process left: without torchrun, its own output is not read."""
        why = f"the torchrun that started it (pid {self._agent}) is gone"
        with suppress(RuntimeError):
            self._write(beat=-1, left=True, why=why, code=PeerLost.exit_code)
        self._leave(PeerLost.exit_code)

    def _reports(self, lost: list[int]) -> bool:
        """Whether this process reports the loss: the first one that asks, or without the store the lowest rank that may live."""
        with suppress(RuntimeError):
            if self._store_gone is None:
                return self._store.add("forebay/dead", 1) == 1
        # Without torchrun process 0 holds the store: it is gone.
        return not [
            r for r, p in self._peers.items() if 0 < r < self._rank and p.beat and not p.finished and r not in lost
        ]


def _place() -> str:
    """Identifies the booted machine and the container: processes with the same place see each other's pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown to {os.getpid()}"  # equal to no other process's


def _is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended; a zombie has."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"
