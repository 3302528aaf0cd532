"""The memory of a rank at the highest level of its step, and whether that fits a budget.

`forebay.estimate.walk` fills in a `RankFit`; `headroom` and its kin leave room for the plan's own error. Plain data.
"""

from __future__ import annotations

from dataclasses import dataclass

ERROR = 0.05
"""Share of a planned total by which a run may take more or less: the largest error of four configurations that had no part in
making the estimator (-3.9 to +5.0 % of what they reserved). Of the 45 runs of benchmarks/results/planner.md,
one took less by more (a plan 6.8 % too high), and none took over 3.1 % more."""
TIME_ERROR = 0.15
"""The same for the time of a step: those four took up to 13 % longer than planned."""
HOSTS = 1.6
"""How much longer a slow host takes for the same launches: the same configurations took 115 and 68 ms, and 27 and 18 ms, on two
machines with H200s (runs 21 and 12 of the second blind draw, and benchmarks/results/step_kernels.json)."""
ALLOWANCE = f"with {100 * ERROR:.0f} % of the peak left for the plan's own error"


@dataclass(frozen=True)
class RankFit:
    """Bytes on a rank at the highest level of its step.

    Attributes:
        activations: saved for backward.
        transient: needed while sublayers run, unsharded weights, and buffers of reductions.
        other: not the allocator's: CUDA context, communicators, symmetric memory.
        where: what runs then.
        cached: what the caching allocator reserves at most besides the columns before; 0 on a CPU.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transient: int
    other: int
    where: str
    cached: int = 0

    @property
    def allocated(self) -> int:
        """Peak of what is in use, context and communicators included."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient + self.other

    @property
    def total(self) -> int:
        """Peak of what is taken from the device."""
        return self.allocated + self.cached

    @property
    def reserved(self) -> int:
        """The part of `total` that the caching allocator reserves."""
        return self.total - self.other

    def headroom(self, budget: int) -> int:
        return headroom(self.total, budget)


def least_budget(total: int) -> int:
    """Smallest budget that fits: the total plus `ERROR` for the plan's own error."""
    return total + int(ERROR * total)


def headroom(total: int, budget: int) -> int:
    """Bytes that a budget leaves beside `least_budget(total)`; negative if the plan does not fit."""
    return budget - least_budget(total)


def largest_total(budget: int) -> int:
    """Largest planned total that fits a budget, to within a byte."""
    return int(budget / (1 + ERROR))
