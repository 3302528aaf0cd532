"""Pipeline schedules as plain lists: what each pipeline rank runs in a step, and in which order.

Input: a schedule's name, the number of pipeline ranks and of microbatches. Output: a read-only `PipelinePlan`, which the
runtime carries out and the estimator and the tests read; `overlap` runs a forward and a backward in turns. The orders, and the
places of sends and receives, are those of `torch.distributed.pipelining.schedules`. torch's runtime is not used, because it holds
receive buffers for every microbatch of a step and every sent tensor until the step's end. Nothing here needs a device, a process
group or a model.
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

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP = "F", "B", "I", "W", "OVERLAP_F_B"
RECV_F, RECV_B = "RECV_F", "RECV_B"
COMPUTE = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP)


@dataclass(frozen=True)
class Action:
    """One action of a rank.

    Attributes:
        kind: F, B (whole backward), I (input gradients), W (weight gradients), OVERLAP_F_B (both `parts` at once), or SEND_F,
            RECV_F, SEND_B, RECV_B: the transfer of the named stage's output or input gradient.
        stage, microbatch: numbers; -1 for OVERLAP_F_B.
        parts: the forward and the backward of an OVERLAP_F_B.
    """

    kind: str
    stage: int
    microbatch: int
    parts: tuple[Action, ...] = ()

    @property
    def each(self) -> tuple[Action, ...]:
        """The action itself, or the `parts` of an OVERLAP_F_B."""
        return self.parts or (self,)

    @property
    def computes(self) -> bool:
        """Whether the action computes, as opposed to a transfer between ranks."""
        return self.kind in COMPUTE

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class PipelinePlan:
    """One step of a pipeline.

    Attributes:
        name: one of `forebay.config.SCHEDULES`, "in turn", "overlap" or "forward".
        ranks: pipeline rank of each stage.
        microbatches: number of microbatches in a step.
        actions: actions of each rank, in its order.
    """

    name: str
    ranks: tuple[int, ...]
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    def stages(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, ascending."""
        return tuple(s for s, r in enumerate(self.ranks) if r == rank)

    def computations(self, rank: int) -> Iterator[Action]:
        """The rank's computations in order; an OVERLAP_F_B yields its parts one after the other."""
        for action in self.actions[rank]:
            if action.computes:
                yield from action.each


def make_plan(name: str, pp: int, microbatches: int, chunks: int = 2, weights_early: bool = False) -> PipelinePlan:
    """The plan of a schedule.

    Args:
        name: "1f1b", "interleaved-1f1b", "zbv" or "dualpipev".
        pp: number of pipeline ranks.
        microbatches: number of microbatches in a step.
        chunks: stages per rank, for "interleaved-1f1b".
        weights_early: compute deferred weight gradients before waiting for another rank's gradient, instead of where the
            schedule has room. Fewer operands wait in memory; it costs little time, because most ranks have to wait anyway.

    Raises:
        ValueError: an unknown name, or a number of microbatches that the schedule cannot run.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; valid are {', '.join(SCHEDULES)}")
    stages = stages_of(name, pp, chunks)
    ranks = tuple(rank_of(name, s, pp) for s in range(stages))
    stubs = [_stub(s, stages, pp) for s in range(stages) if ranks[s] == 0]
    kinds: dict[str, Any] = {
        "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
        "zbv": torch_schedules.ScheduleZBVZeroBubble,
        "dualpipev": torch_schedules.ScheduleDualPipeV,
    }
    try:
        if name == "1f1b":
            torch_schedules.Schedule1F1B(stubs[0], microbatches)  # raises for too few microbatches
            order = {r: _one_forward_one_backward(r, pp, microbatches) for r in ranks}
        else:
            order = kinds[name](stubs, microbatches).pipeline_order
        plan = _with_transfers(name, ranks, microbatches, order)
    except ValueError as error:
        raise ValueError(
            f"{name} on {pp} ranks cannot run {microbatches} microbatches: {' '.join(str(error).split())}"
        ) from error
    if weights_early:
        return replace(plan, actions=tuple(_weights_early(actions, ranks) for actions in plan.actions))
    return plan


def local_plan(microbatches: int, overlap: bool) -> PipelinePlan:
    """The plan of a single rank with one stage: one microbatch after the other, or (`overlap`) each forward together with the
    backward of the microbatch before:

        in turn    F0 | B0 | F1 | B1 | ... | F(M-1) | B(M-1)
        overlap    F0 | F1 with B0 | F2 with B1 | ... | F(M-1) with B(M-2) | B(M-1)

    Raises:
        ValueError: no microbatches.
    """
    if microbatches < 1:
        raise ValueError("there are no microbatches to run")
    forwards, backwards = ([Action(kind, 0, m) for m in range(microbatches)] for kind in (FORWARD, BACKWARD))
    if not overlap:
        in_turn = tuple(action for pair in zip(forwards, backwards, strict=True) for action in pair)
        return PipelinePlan("in turn", (0,), microbatches, (in_turn,))
    pairs = zip(forwards[1:], backwards, strict=False)
    overlaps = [Action(OVERLAP, -1, -1, pair) for pair in pairs]
    return PipelinePlan("overlap", (0,), microbatches, ((forwards[0], *overlaps, backwards[-1]),))


def forward_plan(plan: PipelinePlan) -> PipelinePlan:
    """The same stages on the same ranks, forward only, in groups of as many microbatches as there are ranks."""
    pp = len(plan.actions)
    order = {
        rank: [
            torch_schedules._Action(stage, torch_schedules.FORWARD, m)
            for first in range(0, plan.microbatches, pp)
            for stage in plan.stages(rank)
            for m in range(first, min(first + pp, plan.microbatches))
        ]
        for rank in range(pp)
    }
    return _with_transfers("forward", plan.ranks, plan.microbatches, order)


def _one_forward_one_backward(rank: int, pp: int, microbatches: int) -> list[Any]:
    """The actions that torch's Schedule1F1B runs. Its own list is wrong: in 2.13, `_get_pipeline_order` begins the last
    stage with microbatch 1."""
    ahead = min(microbatches, pp - rank)
    order = [torch_schedules._Action(rank, torch_schedules.FORWARD, m) for m in range(ahead)]
    for m in range(microbatches):
        order.append(torch_schedules._Action(rank, torch_schedules.FULL_BACKWARD, m))
        if m + ahead < microbatches:
            order.append(torch_schedules._Action(rank, torch_schedules.FORWARD, m + ahead))
    return order


def _stub(stage: int, stages: int, pp: int) -> Any:
    """The attributes of a `PipelineStage` that torch's schedules read to make their order."""
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


def _with_transfers(
    name: str, ranks: tuple[int, ...], microbatches: int, order: Mapping[int, Sequence[Any]]
) -> PipelinePlan:
    """The plan of an order of torch's computations, with sends and receives where torch puts them."""
    computing = {rank: [a for a in actions if a is not None and a.is_compute_op] for rank, actions in order.items()}
    lowered = torch_schedules._add_send_recv(computing, stage_to_rank=lambda s: ranks[s], num_stages=len(ranks))
    return PipelinePlan(name, ranks, microbatches, tuple(tuple(map(_action, lowered[r])) for r in sorted(lowered)))


def _action(theirs: Any) -> Action:
    parts = tuple(_action(a) for a in theirs.sub_actions or ())
    microbatch = -1 if theirs.microbatch_index is None else theirs.microbatch_index
    return Action(str(theirs.computation_type.value), theirs.stage_index, microbatch, parts)


def _weights_early(actions: Sequence[Action], ranks: Sequence[int]) -> tuple[Action, ...]:
    """The actions of a rank, with each W before the first backward after its I whose gradient comes from another rank."""
    found: list[Action] = []
    deferred: list[Action] = []
    for action in actions:
        if action.kind == BACKWARD_WEIGHT:
            if action in deferred:  # otherwise it was moved ahead already
                deferred.remove(action)
                found.append(action)
            continue
        if action.kind in (BACKWARD, BACKWARD_INPUT) and _receives_gradient(action.stage, ranks):
            found += deferred
            deferred = []
        found.append(action)
        if action.kind == BACKWARD_INPUT:
            deferred.append(replace(action, kind=BACKWARD_WEIGHT))
    return tuple(found)


def _receives_gradient(stage: int, ranks: Sequence[int]) -> bool:
    """Whether the output gradient of `stage` comes from another rank."""
    return stage + 1 < len(ranks) and ranks[stage + 1] != ranks[stage]


def turns(forward: Sequence[bool], backward: Sequence[bool]) -> list[str]:
    """The order in which an overlapped forward and backward compute: "F" or "B" for each computation.

    Transfers (in brackets) precede the computation that waits for them:

        forward   front, (dispatch) experts, (combine) front, ...           2 computations per MoE layer, 1 per dense layer
        backward  experts', (dispatch') weights, front', (combine') ...     3 computations per MoE layer, 1 per dense layer

    The experts' weight gradients hide dispatch'. Only a forward computation can hide combine'. So forward computations are
    placed where the backward needs them most: before a layer's first computation, then before its last, then between its
    first two; evenly where there are fewer computations than places. The order begins with "F", which hides the backward's
    first transfer. Example, two MoE layers each: F experts' weights F front' F experts' weights F front'.

    Args:
        forward, backward: for each layer in the order in which it is computed, whether it has experts.
    """
    before_first: list[int] = []  # places in front of backward computations, most useful kind first
    before_last: list[int] = []
    between: list[int] = []
    count = 0
    for has_experts in backward:
        before_first.append(count)
        if has_experts:
            between.append(count + 1)
            before_last.append(count + 2)
        count += 3 if has_experts else 1
    remaining = sum(2 if has_experts else 1 for has_experts in forward)
    at = [0] * (count + 1)
    for places in (before_first, before_last, between):
        chosen = _spread(places, remaining)
        remaining -= len(chosen)
        for place in chosen:
            at[place] += 1
    at[count] += remaining  # a forward much longer than the backward: the rest runs alone
    order = ["F" * n + "B" for n in at[:count]]
    return list("".join(order) + "F" * at[count])


def turns_of_stages(forward: Sequence[bool], backward: Sequence[bool], head: bool) -> list[str]:
    """`turns` of two stages of a pipeline. A head is a computation of the forward too, as long as several layers. One more "F"
    takes the forward's output and sends it on, one computation later."""
    order = turns([*forward, *[False] * head], backward)
    last = len(order) - order[::-1].index("F")
    return [*order[: last + 1], "F", *order[last + 1 :]]


def overlap(
    forward: Iterator[None],
    backward: Iterator[None],
    forwards: Sequence[bool],
    backwards: Sequence[bool],
    head: bool | None,
) -> None:
    """Run a forward and a backward, which stop after each computation, in turns.

    Args:
        forwards, backwards: for each layer in the order in which it is computed, whether it has experts.
        head: whether the forward ends with a head. None: of the plan's only stage, where the head needs the memory that the
            backward frees.
    """
    order = turns(forwards, backwards) if head is None else turns_of_stages(forwards, backwards, head)
    next(backward)  # its first transfer goes first, so that the forward's first computation hides it
    for turn in order:
        next(forward if turn == "F" else backward, None)
    for rest in (backward, forward) if head is None else (forward, backward):
        drain(rest)


def drain(computations: Iterator[None]) -> None:
    for _ in computations:
        pass


def _spread(places: Sequence[int], number: int) -> Sequence[int]:
    """`number` of the places, evenly and with the first one; all of them if there are no more."""
    if number >= len(places):
        return places
    return [places[i * len(places) // number] for i in range(number)]
