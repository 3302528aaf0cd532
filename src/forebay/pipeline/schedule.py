"""What each pipeline rank does in a step, and in which order: torch's schedules as plain lists.

Input: a schedule's name, the numbers of ranks and microbatches. Output: a list of actions for each rank. `turns` is the order in
which a forward and a backward compute when they overlap. Data only: no device, nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch.distributed.pipelining.schedules as torch_schedules
from torch import nn

from forebay.config import SCHEDULES, stages_of
from forebay.pipeline.partition import rank_of

# In what order a forward and a backward compute when they run together, so that each hides the other's transfers.
#
# In: which layers each of the two has, MoE or dense. Out: a list of turns, "F" or "B", one for each computation.
#
#     forward   front, (dispatch) experts, (combine) front, ...           2 of an MoE layer, 1 of a dense one
#     backward  experts', (dispatch') weights, front', (combine') ...     3 of an MoE layer, 1 of a dense one
#
# A transfer, in brackets, lies before the computation that waits for it. Of a forward each needs a backward's computation in
# front of it. A backward's dispatch' has the experts' weight gradients; its combine' needs a forward's. So a forward's
# computations go where the backward needs them most: before a layer's first, then before its last, then between the first two;
# and evenly, where there are fewer than places.
#
# Worked example, both two MoE layers: F experts' weights F front' F experts' weights F front'.


def turns(forward: Sequence[bool], backward: Sequence[bool]) -> list[str]:
    """ "F" and "B" in order; begins with a forward's computation, so that the backward's first transfer is hidden.

    Args:
        forward, backward: of each layer in the order in which it is computed, whether it has experts.
    """
    first: list[int] = []  # places in front of backward computations, by how much they need a forward's there
    before_last: list[int] = []
    between: list[int] = []
    count = 0
    for has_experts in backward:
        first.append(count)
        if has_experts:
            between.append(count + 1)
            before_last.append(count + 2)
        count += 3 if has_experts else 1
    left = sum(2 if has_experts else 1 for has_experts in forward)
    at = [0] * (count + 1)
    for places in (first, before_last, between):
        chosen = _spread(places, left)
        left -= len(chosen)
        for place in chosen:
            at[place] += 1
    at[count] += left  # a forward much longer than the backward: the rest runs alone
    order = ["F" * n + "B" for n in at[:count]]
    return list("".join(order) + "F" * at[count])


def _spread(places: Sequence[int], number: int) -> Sequence[int]:
    """`number` of the places, the first one always and the others evenly; all of them if there are no more."""
    if number >= len(places):
        return places
    return [places[i * len(places) // number] for i in range(number)]


# What each pipeline rank does in a step, and in which order: torch's schedules as plain lists.
#
# In: a schedule's name, the number of pipeline ranks, of stages and of microbatches. Out: a `PipelinePlan`. No process group,
# no device and no model are needed, so the planner and the tests read the same lists that the runtime carries out.
#
# The orders are those of `torch.distributed.pipelining.schedules` (Schedule1F1B, ScheduleInterleaved1F1B,
# ScheduleZBVZeroBubble, ScheduleDualPipeV), as is the way in which sends and receives are put between computations. Its runtime
# is not used: it holds receive buffers for every microbatch of a step, and every sent tensor until the step's end.
#
# Nothing is kept here. `PipelinePlan` is read-only.

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP = "F", "B", "I", "W", "OVERLAP_F_B"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
COMPUTE = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP)


@dataclass(frozen=True)
class Action:
    """One thing that a rank does.

    Attributes:
        kind: F, B (whole backward), I (backward to the inputs), W (backward to the weights), OVERLAP_F_B (`parts` together), or
            SEND_F, RECV_F, SEND_B, RECV_B, of what the named stage's forward or backward gives or needs.
        stage, microbatch: numbers; -1 for OVERLAP_F_B.
        parts: a forward and a backward that run with each other.
    """

    kind: str
    stage: int
    microbatch: int
    parts: tuple[Action, ...] = ()

    @property
    def computes(self) -> bool:
        """Whether it runs a stage, and is no transfer between ranks."""
        return self.kind in COMPUTE

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class PipelinePlan:
    """A step of a pipeline.

    Attributes:
        name: one of `forebay.pipeline.partition.SCHEDULES`, or "forward".
        ranks: pipeline rank of each stage.
        microbatches: of a step.
        actions: of each rank, in its order.
    """

    name: str
    ranks: tuple[int, ...]
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    def stages(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, ascending."""
        return tuple(s for s, r in enumerate(self.ranks) if r == rank)

    def computations(self, rank: int) -> Iterator[Action]:
        """The stages that a rank runs, in order; those of an OVERLAP_F_B one after the other."""
        for action in self.actions[rank]:
            if action.computes:
                yield from action.parts or (action,)


def make_plan(name: str, pp: int, microbatches: int, chunks: int = 2, weights_early: bool = False) -> PipelinePlan:
    """The plan of a schedule.

    Args:
        name: "1f1b", "interleaved-1f1b", "zbv" or "dualpipev".
        pp: pipeline ranks.
        microbatches: of a step.
        chunks: stages of a rank, for "interleaved-1f1b".
        weights_early: a rank makes the weight gradients that it has left before it waits for another rank's gradient, rather than
            where the schedule has room for them: fewer operands wait in memory, for little time, as most ranks do have to wait.

    Raises:
        ValueError: an unknown name, or microbatches that the schedule cannot run.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; valid are {', '.join(SCHEDULES)}")
    stages = stages_of(name, pp, chunks)
    ranks = tuple(rank_of(name, s, pp) for s in range(stages))
    stubs = [_stub(s, stages, pp) for s in range(stages) if ranks[s] == 0]
    try:
        if name == "1f1b":
            torch_schedules.Schedule1F1B(stubs[0], microbatches)  # refuses too few microbatches
            return _lowered(
                name, ranks, microbatches, {r: _one_forward_one_backward(r, pp, microbatches) for r in ranks}
            )
        kinds: dict[str, Any] = {
            "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
            "zbv": torch_schedules.ScheduleZBVZeroBubble,
            "dualpipev": torch_schedules.ScheduleDualPipeV,
        }
        plan = _lowered(name, ranks, microbatches, kinds[name](stubs, microbatches).pipeline_order)
        return replace(plan, actions=tuple(_weights_early(a, ranks) for a in plan.actions)) if weights_early else plan
    except ValueError as error:
        raise ValueError(
            f"{name} on {pp} ranks cannot run {microbatches} microbatches: {' '.join(str(error).split())}"
        ) from error


def forward_plan(plan: PipelinePlan) -> PipelinePlan:
    """The same stages on the same ranks, forward only: microbatches in groups of as many as there are ranks."""
    pp = len(plan.actions)
    order: dict[int, list[Any]] = {}
    for rank in range(pp):
        order[rank] = [
            torch_schedules._Action(stage, torch_schedules.FORWARD, m)
            for first in range(0, plan.microbatches, pp)
            for stage in plan.stages(rank)
            for m in range(first, min(first + pp, plan.microbatches))
        ]
    return _lowered("forward", plan.ranks, plan.microbatches, order)


def _one_forward_one_backward(rank: int, pp: int, microbatches: int) -> list[Any]:
    """What torch's Schedule1F1B runs; it has no list of it that is right (in 2.13, `_get_pipeline_order` begins the last stage
    with microbatch 1)."""
    ahead = min(microbatches, pp - rank)
    order = [torch_schedules._Action(rank, torch_schedules.FORWARD, m) for m in range(ahead)]
    for m in range(microbatches):
        order.append(torch_schedules._Action(rank, torch_schedules.FULL_BACKWARD, m))
        if m + ahead < microbatches:
            order.append(torch_schedules._Action(rank, torch_schedules.FORWARD, m + ahead))
    return order


def _stub(stage: int, stages: int, pp: int) -> Any:
    """All that torch's schedules ask of a stage to make their order."""
    return SimpleNamespace(
        stage_index=stage,
        num_stages=stages,
        group_size=pp,
        group_rank=0,
        submod=nn.Identity(),
        is_first=stage == 0,
        is_last=stage == stages - 1,
        has_backward=True,
    )


def _lowered(name: str, ranks: tuple[int, ...], microbatches: int, order: Mapping[int, Sequence[Any]]) -> PipelinePlan:
    """The plan of an order of computations, with sends and receives where torch puts them."""
    computing = {rank: [a for a in actions if a is not None and a.is_compute_op] for rank, actions in order.items()}
    lowered = torch_schedules._add_send_recv(computing, stage_to_rank=lambda s: ranks[s], num_stages=len(ranks))
    return PipelinePlan(name, ranks, microbatches, tuple(tuple(map(_action, lowered[r])) for r in sorted(lowered)))


def _weights_early(actions: Sequence[Action], ranks: Sequence[int]) -> tuple[Action, ...]:
    """The actions of a rank, each W before the first backward behind its I whose gradient comes from another rank."""
    found: list[Action] = []
    left: list[Action] = []
    for action in actions:
        if action.kind == BACKWARD_WEIGHT:
            if action in left:  # else it came early
                left.remove(action)
                found.append(action)
            continue
        if action.kind in (BACKWARD, BACKWARD_INPUT) and _gradient_travels(action.stage, ranks):
            found += left
            left = []
        found.append(action)
        if action.kind == BACKWARD_INPUT:
            left.append(replace(action, kind=BACKWARD_WEIGHT))
    return tuple(found)


def _gradient_travels(stage: int, ranks: Sequence[int]) -> bool:
    """Whether the gradient that a backward of `stage` needs comes from another rank."""
    return stage + 1 < len(ranks) and ranks[stage + 1] != ranks[stage]


def _action(theirs: Any) -> Action:
    parts = tuple(_action(a) for a in theirs.sub_actions or ())
    microbatch = -1 if theirs.microbatch_index is None else theirs.microbatch_index
    return Action(str(theirs.computation_type.value), theirs.stage_index, microbatch, parts)
