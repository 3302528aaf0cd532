"""The memory of a rank at the highest level of its step, and whether that fits a budget.

`forebay.estimate.rank` fills in a `RankFit`; `headroom` and its kin leave room for the plan's own error. Plain data.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

SEVERAL_GPUS_ERROR = 0.05
"""Share of a planned total by which a run on several GPUs may take more or less: of the 31 runs of benchmarks/results/planner.md
on 2 or 4, and of the 151 of the blind draws, none reserved over 3.0 % more. All shares cover what every run
of the 19 blind draws reserved, as planned before it ran; counts are of draws 1 to 16, docs/estimator.md has those of all. One
took more of its GPU outside of torch's allocator (run 11 of draw 9, 0.8 % above the budget that its plan was said to fit), for
communicators, which are smaller since (`forebay.communicators`)."""
CAPTURED_ERROR = 0.06
"""The same for CUDA graph steps on one GPU, whose pool begins empty: of 79 runs, one reserved 5.4 % more than planned."""
SCORES_ERROR = 0.10
"""The same for those of compiled code with eager attention, where one block that is not used again is a tensor of scores: of 8
runs, run 10 of draw 36 reserved 9.6 % more than it is planned with today (22.1 % more than it was), the others 1.5 % at most."""
EAGER_ERROR = 0.08
"""The same for called steps of eager code on one GPU: of 63 runs, two reserved 7.6 and 7.0 % more than planned."""
COMPILED_ERROR = 0.10
"""The same for those of compiled code: of 39 runs, one reserved 9.4 % more than planned; run 19 of draw 26 9.7 %."""
OFFLOAD_ERROR = 0.10
"""The same for those with offloading: of 37 runs, one reserved 9.8 % more. What is offloaded when depends on measured times."""
PIPELINE_OFFLOAD_ERROR = 0.15
"""The same for a pipeline that offloads in called steps: of 5 runs, one reserved 14.2 % more (run 11 of draw 22; when it ran
again, 4.5 %). Measured times correct its plan three times, and each plan leaves free blocks in other places."""
AUTO_ERROR = 0.14
"""The same for `policy = "auto"` on any number of GPUs, whose placements depend on measured times: of 15 runs, two reserved 13.1
and 13.6 % more, and one on two GPUs 10.7 %."""
TIME_ERROR = 0.45
"""The share for the time of a step that a host launches: of the 76 of blind draws 9 to 16, 67 took 0.78 to 1.42 times as long as
planned, the others 1.47 to 1.73 times. The smaller a step's kernels, the more of it is not planned."""
CAPTURED_TIME_ERROR = 0.33
"""The same for CUDA graph steps: of 82, 81 took 0.78 to 1.32 times as long as planned, one 1.58 times."""
HOSTS = 1.6
"""How much longer a slow host takes for the same launches: the same configurations took 115 and 68 ms, and 27 and 18 ms, on two
machines with H200s (runs 21 and 12 of the second blind draw, and benchmarks/results/step_kernels.json)."""


def planning_error(
    gpus: int,
    compiled: bool,
    placements: Collection[str],
    captured: bool = False,
    pipeline: bool = False,
    whole_scores: bool = False,
) -> float:
    """The share for a run. `placements`: those of its sublayers, or of its policy; `captured`: its step is a CUDA graph;
    `whole_scores`: attention is eager, which makes tensors of all scores."""
    offloads = any("offload" in placement for placement in placements)
    if "auto" in placements:
        return AUTO_ERROR
    if gpus > 1:
        return PIPELINE_OFFLOAD_ERROR if pipeline and offloads and not captured else SEVERAL_GPUS_ERROR
    if captured:
        return SCORES_ERROR if compiled and whole_scores else CAPTURED_ERROR
    if offloads:
        return OFFLOAD_ERROR
    return COMPILED_ERROR if compiled else EAGER_ERROR


@dataclass(frozen=True)
class RankFit:
    """Bytes on a rank at the highest level of its step.

    Attributes:
        activations: saved for backward.
        transient: needed while sublayers run, unsharded weights, and buffers of reductions.
        other: not the allocator's: CUDA context, communicators, symmetric memory, nodes of a CUDA graph.
        where: what runs then.
        cached: what the caching allocator reserves at most besides the columns before; 0 on a CPU.
        error: share of the total by which the run may take more or less; see `planning_error`.
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
    error: float = SEVERAL_GPUS_ERROR

    @property
    def allocated(self) -> int:
        """Peak of what is in use, `other` included."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient + self.other

    @property
    def total(self) -> int:
        """Peak of what is taken from the device."""
        return self.allocated + self.cached

    @property
    def reserved(self) -> int:
        """The part of `total` that the caching allocator reserves."""
        return self.total - self.other

    @property
    def allowance(self) -> str:
        return f"with {100 * self.error:.0f} % of the peak left for the plan's own error"

    def headroom(self, budget: int) -> int:
        return headroom(self.total, budget, self.error)


def least_budget(total: int, error: float = SEVERAL_GPUS_ERROR) -> int:
    """Smallest budget that fits: the total plus a share for the plan's own error."""
    return total + int(error * total)


def headroom(total: int, budget: int, error: float = SEVERAL_GPUS_ERROR) -> int:
    """Bytes that a budget leaves beside `least_budget(total, error)`; negative if the plan does not fit."""
    return budget - least_budget(total, error)


def largest_total(budget: int, error: float = SEVERAL_GPUS_ERROR) -> int:
    """Largest planned total that fits a budget, to within a byte."""
    return int(budget / (1 + error))
