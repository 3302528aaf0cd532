"""The time and the peak of one cycle that runs as planned, on a CUDA device.

In: the cycle's begin (a `Meter` is made), each region call as it is entered, and each moment. Out, when the next cycle begins:
its time and by how much memory rose over its base, or None if the cycle is no measure.

The last backward moment runs on into the optimizer's step and the next batch, which are no part of a plan. So its rise is cut to
the highest that the plan has for a backward moment, as the timeline's is (`forebay.saved.order`).
"""

from collections.abc import Callable

import torch

from forebay.planner.simulate import Key, Plan, Timeline
from forebay.saved.order import Peaks

_ALIKE = 0.01  # by so much a call's inputs may differ from the measured ones'


class Meter:
    """Of one cycle, from now on. Reads the allocator's peak twice in it and resets it as often.

    Args:
        base: bytes that were held before the cycle; None: those that are held now.
        peaks: are told of what is reset.
    """

    def __init__(
        self, device: torch.device, timeline: Timeline, plan: Plan, base: int | None, peaks: Peaks | None = None
    ):
        self._device, self._peaks = device, peaks or Peaks()
        self._inputs = {call.key: call.input_bytes for call in timeline.calls}
        last = timeline.moments[-1]
        self._last = last.kind, timeline.calls[last.call].key
        self._rise = highest_rise(timeline, plan)
        self._base = base if base is not None else torch.cuda.memory_allocated(device)
        self._tops: tuple[int, int] | None = None  # at most before the last moment, and at its start
        self._alike = True
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()
        self._peaks.reset(device)

    def entered(self, key: Key, input_bytes: int) -> None:
        """A region call begins, with so many bytes of inputs: a shorter batch is faster by no merit of the plan."""
        then = self._inputs.get(key, -1)
        self._alike = self._alike and abs(input_bytes - then) <= _ALIKE * then

    def moment(self, kind: str, key: Key) -> None:
        """A region's forward or backward starts; what is due has been fetched and settled."""
        if (kind, key) == self._last:
            self._tops = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
            self._peaks.reset(self._device)

    def over(self) -> tuple[Callable[[], float], int] | None:
        """The next cycle begins.

        Returns:
            (milliseconds, to be asked for later, since that waits for the device; peak in bytes over the base), or None if this
            cycle had other inputs or did not come to its last backward.
        """
        if self._tops is None or not self._alike:
            return None
        begin, end = self._begin, torch.cuda.Event(enable_timing=True)
        end.record()
        top, start = self._tops
        rise = min(torch.cuda.max_memory_allocated(self._device) - start, self._rise)

        def milliseconds() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return milliseconds, max(top, start + rise) - self._base


def highest_rise(timeline: Timeline, plan: Plan) -> int:
    """Bytes that a backward moment rises above its start at most, what is recomputed in it included."""
    rises = [0]
    for moment in timeline.moments:
        if moment.kind == "B":
            call = timeline.calls[moment.call]
            rises.append(moment.transient + (call.recompute_rises if call.key[0] in plan.recompute else 0))
    return max(rises)
