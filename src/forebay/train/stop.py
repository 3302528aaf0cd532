"""Why a run stops before its last step: a signal, or a time limit that is near.

`StopRequest` remembers signals while its context is open. `TimeLimit` is told when steps and saves end, and says when the time
that is left is just enough for one more step and a save, after a save that is under way. Both know this process only; the loop
asks all processes after each step, so that all stop after the same one.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Ctrl-C; what Kubernetes, Slurm and torchrun send before SIGKILL; what Slurm's --signal is usually set to.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Room for a step or a save that is slower than all before it, as on a file system that others use.
_MARGIN = 1.5


class StopRequest:
    """Remembers the signal that asked the run to stop. A second Ctrl-C raises KeyboardInterrupt.

    Attributes:
        signal: its number; 0 while there is none.
    """

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Context that handles SIGINT, SIGTERM and SIGUSR1 in the main thread; in other threads signals stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self) for number in _SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class TimeLimit:
    """Measures steps and saves against a limit that counts from construction.

    Args:
        seconds: the limit; infinite for none.
        clock: returns seconds.
    """

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock = seconds, clock
        self._started = self._mark = clock()
        self._first: float | None = None
        self._step = 0.0
        self._save: float | None = None
        self._save_began: float | None = None

    def stepped(self) -> None:
        """A step ended, with its validation."""
        before, self._mark = self._mark, self._clock()
        seconds = self._mark - before
        if self._first is None:
            self._first = seconds  # with building the model and compiling: longer than any other
        else:
            self._step = max(self._step, seconds)

    def save_began(self) -> None:
        """A save began, and training goes on: the time since the last step does not count for the next step."""
        self._save_began = self._mark = self._clock()

    def saved(self, seconds: float) -> None:
        """The save that began took so many seconds."""
        self._save = max(self._save or 0.0, seconds)
        self._save_began = None
        self._mark = self._clock()

    @property
    def is_near(self) -> bool:
        """Whether one more step, the rest of a save under way and another save may end after the limit.

        Each is taken for as slow as the slowest so far.
        """
        return self._ends_within(self._step or self._first or 0.0)

    @property
    def leaves_only_saves(self) -> bool:
        """Whether the rest of a save under way and another save may end after the limit, even without one more step."""
        return self._ends_within(0.0)

    @property
    def needs_measured_save(self) -> bool:
        """Whether half of the time is over, and no save has shown yet how long one takes."""
        return self._save is None and self._left < self._seconds / 2

    def _ends_within(self, step: float) -> bool:
        """Whether a step of so many seconds, the rest of a save under way and another save may end after the limit."""
        save, rest = self._save or 0.0, 0.0
        if self._save_began is not None:
            ran = self._clock() - self._save_began
            save = max(save, ran)
            rest = save - ran
        return self._left < _MARGIN * (step + save + rest)

    @property
    def _left(self) -> float:
        return self._seconds - (self._clock() - self._started)
