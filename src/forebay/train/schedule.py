"""Learning rate by step, as a pure function: no state to save, nothing to restore.

In: the step's number and a `Schedule` section. Out: the factor on `optimizer.lr` for that step.

Three shapes share the warm-up, which rises in a line and reaches 1 at step `warmup`:

* ``cosine``: half a cosine from 1 down to `minimum` at the last step.
* ``wsd`` (warm-up, stable, decay): 1 until `decay` steps before the end, then a line down to `minimum`.
* ``constant``: 1.
"""

import math
from typing import Protocol


class ScheduleLike(Protocol):
    """The fields of the ``[schedule]`` section that matter here."""

    @property
    def kind(self) -> str: ...
    @property
    def warmup(self) -> int: ...
    @property
    def decay(self) -> int: ...
    @property
    def minimum(self) -> float: ...


def factor(schedule: ScheduleLike, step: int, steps: int) -> float:
    """Factor on the learning rate.

    Args:
        schedule: kind, warmup (steps), decay (steps) and minimum (a fraction of the learning rate).
        step: 1-based number of the optimizer step; the first step has number 1.
        steps: number of the last step.

    Returns:
        A factor in (0, 1]: never 0 during the warm-up, `minimum` at the last step of ``cosine`` and ``wsd``.
    """
    if step <= schedule.warmup:
        return step / schedule.warmup
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "cosine":
        done = (step - schedule.warmup) / max(1, steps - schedule.warmup)
        falling = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    else:
        falling = min(1.0, max(0.0, (steps - step) / max(1, schedule.decay)))
    return schedule.minimum + (1.0 - schedule.minimum) * falling
