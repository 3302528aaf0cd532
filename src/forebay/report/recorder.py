"""Records what a pipeline rank runs, as it runs: a watcher for `forebay.pipeline.runtime`.

In: the runtime's calls around each action. Out: `Ran` records for `forebay.report.pipeline`, on a clock that begins with the
step.

On a CUDA device times are those of the compute stream, by events; the host waits for nothing until `records` is asked. Ranks
have a clock in common if they begin their steps together (a barrier).

`Recorder` owns the events of one step.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from forebay.pipeline.schedule import Action
from forebay.report.pipeline import Ran


class Recorder:
    """One step of one rank.

    Args:
        rank: in the pipeline.
        device: where it runs. Without a GPU, memory is 0.
    """

    def __init__(self, rank: int, device: torch.device):
        self._rank, self._gpu, self._device = rank, device.type == "cuda", device
        self._actions: list[tuple[Action, Any, Any, int]] = []
        self._open: Any = None
        self._zero = self._now()

    def began(self, action: Action) -> None:
        """See `forebay.pipeline.runtime.Watcher`."""
        self._open = self._now()

    def ended(self, action: Action) -> None:
        """See `forebay.pipeline.runtime.Watcher`."""
        held = torch.cuda.memory_allocated(self._device) if self._gpu else 0
        self._actions.append((action, self._open, self._now(), held))

    def records(self) -> list[Ran]:
        """The step so far. Waits for the device."""
        if self._gpu:
            torch.cuda.synchronize(self._device)
        return [
            Ran(self._rank, action.kind, str(action), self._since(began), self._since(ended), held)
            for action, began, ended, held in self._actions
        ]

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, moment: Any) -> float:
        return self._zero.elapsed_time(moment) if self._gpu else 1e3 * (moment - self._zero)
