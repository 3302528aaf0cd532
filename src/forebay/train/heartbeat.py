"""Knows which process of a run has died, so that the others can say it and end instead of waiting.

In: the store through which the processes found each other. Out: a thread in each process that counts up in the store once a
period and watches the others' counts. A collective that waits for a dead process cannot be interrupted, and where it fails at
once (gloo: "connection closed by peer") its message names nobody. So:

    a process is silent for `patience` seconds     every other one ends with exit code 1, and one of them says who was silent
    a collective raises                            `who_is_gone` waits a little and names the silent process, if there is one

Beats come from a thread: a long compilation or checkpoint does not silence a process, death and a stopped process do. Silence is
measured by the watcher's own clock, so the machines' clocks need not agree. `Heartbeat` owns its thread and its connections.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_GRACE = 5.0
"""Beats that a process may miss before a failed collective is blamed on it."""


class Heartbeat:
    """Beats for this process and listens to the others. A context manager.

    Args:
        store: of torch.distributed; a clone of it is used, as a store is not to be shared between threads.
        rank, size: of this process, and how many there are.
        patience: seconds of silence after which a process counts as dead and this one ends.
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
        self._store, self._rank, self._size = store.clone(), rank, size
        self._patience, self._advice, self._period, self._leave = patience, advice, period, leave
        self._heard: dict[int, tuple[str, float]] = {}
        self._over = threading.Event()
        self._store_gone = False
        self._thread = threading.Thread(target=self._run, name="forebay-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=2 * self._period)

    def who_is_gone(self) -> str:
        """A sentence that names the processes that fell silent within the last seconds; "" if all are well. Takes some."""
        deadline = time.monotonic() + (_GRACE + 2) * self._period
        while time.monotonic() < deadline:
            silent = self._silent(_GRACE * self._period)
            if silent:
                return self._sentence(silent)
            if self._store_gone:
                return "the process that the others found each other through is gone"
            time.sleep(self._period / 4)
        return ""

    def _run(self) -> None:
        beat, name = 0, f"{os.uname().nodename}, pid {os.getpid()}"
        while not self._over.wait(self._period):
            beat += 1
            try:
                self._store.set(f"forebay/beat/{self._rank}", f"{beat}|{name}")
                self._listen()
            except RuntimeError:  # DistError too: the store's own process is gone, and the collectives will fail
                self._store_gone = True
                return
            silent = self._silent(self._patience)
            if silent:
                self._end(silent)

    def _listen(self) -> None:
        now = time.monotonic()
        for rank in range(self._size):
            key = f"forebay/beat/{rank}"
            if rank == self._rank or not self._store.check([key]):
                continue
            value = self._store.get(key).decode()
            if self._heard.get(rank, ("", 0.0))[0] != value:
                self._heard[rank] = value, now

    def _silent(self, seconds: float) -> list[int]:
        """Processes that were heard once and not for so long."""
        now = time.monotonic()
        return [rank for rank, (_, at) in sorted(self._heard.items()) if now - at > seconds]

    def _sentence(self, silent: list[int]) -> str:
        now = time.monotonic()
        named = [
            f"process {r} ({self._heard[r][0].partition('|')[2]}) has not answered for {now - self._heard[r][1]:.0f} s"
            for r in silent
        ]
        return " and ".join(named)

    def _end(self, silent: list[int]) -> None:
        if self._over.is_set():
            return
        try:
            first = self._store.add("forebay/dead", 1) == 1
        except RuntimeError:
            first = True
        if first:
            print(
                f"forebay: {self._sentence(silent)}; the run has ended; {self._advice()}", file=sys.stderr, flush=True
            )
        self._leave(1)
