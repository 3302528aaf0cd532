"""A run on one rank, as the walk reads it, and what the walk finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType

from forebay.estimate.fsdp import ParamGroup
from forebay.estimate.parts import Part
from forebay.estimate.state import Sharing
from forebay.memory.timeline import Plan
from forebay.pipeline.schedule import Action

# By an action's kind: forwards that wait for their backward, more or less.
_HELD = MappingProxyType({"F": 1, "B": -1, "I": -1})


@dataclass(frozen=True)
class Link:
    """The link to the host, and what may use it.

    Attributes:
        rates: positional rates of a `Timeline`, bytes a second.
        seconds: of the forward and backward of each of a part's calls, recomputation included. A device that waits for its host
            is slower than its profile: the run then offloads more than is planned here.
        everything: `offload = "all"`: the device may wait for the link.
    """

    rates: tuple[float | None, ...]
    seconds: Callable[[Part], Sequence[tuple[float, float]]]
    everything: bool = False


@dataclass(frozen=True)
class RankRun:
    """A run on one rank.

    Attributes:
        stages: by number, parts in forward order.
        actions: of a step; a pipeline's receives too.
        adding_tokens: if the engine sums the vocabulary's gradients itself, bytes that it takes for a moment to add those of a
            microbatch's embedded tokens; else 0.
        hidden: bytes of a microbatch's hidden states.
        graph, fails: steps are to be captured in a CUDA graph, which fails: all are called.
        expandable: segments of torch's allocator grow; on GPUs only.
        at_once: the engine adds the embedding's gradients as they are made.
        tied: embedding and head are one parameter.
        least: bytes below which nothing is offloaded.
        link: over which the manager plans to offload; None offloads all of a sublayer, with two in transfer.
        measured: the stages while `policy = "auto"` measures and has not chosen their placements.
        router_loss: the load-balancing loss, which an engine without stages on other ranks runs forward and backward before its
            head; else each layer holds its share from forward to backward.
    """

    groups: Sequence[ParamGroup]
    sharing: Sharing
    stages: Mapping[int, Sequence[Part]]
    actions: Sequence[Action]
    adding_tokens: int
    hidden: int
    graph: bool = False
    fails: bool = False
    expandable: bool = False
    at_once: bool = False
    tied: bool = False
    least: int = 1 << 20
    link: Link | None = None
    measured: Mapping[int, Sequence[Part]] | None = None
    router_loss: Part | None = None

    @property
    def kept(self) -> int:
        """The most bytes of what parts that are kept hold between actions; see `Part.kept`."""
        # An engine's head runs its backward at once.
        ends = ("head",) if self.engine else ()
        kept = {n: sum(part.kept for part in parts if part.path not in ends) for n, parts in self.stages.items()}
        changes = (sum(kept.get(o.stage, 0) * _HELD.get(o.kind, 0) for o in action.each) for action in self.actions)
        return max(accumulate(changes, initial=0))

    @property
    def engine(self) -> bool:
        """An engine runs the stages: the token dispatcher has a stream of its own."""
        return self.sharing.engine

    @property
    def interleaves(self) -> bool:
        """Some forward begins while another one waits for its backward. A manager's step is then the whole step; else it is a
        microbatch, as without a pipeline, and on the last rank of 1F1B."""
        waiting = 0
        for action in self.actions:
            for one in action.each:
                if one.kind == "F" and waiting:
                    return True
                waiting += _HELD.get(one.kind, 0)
        return False


@dataclass(frozen=True)
class StepLevel:
    """Bytes in use at the highest point while a part runs.

    Attributes:
        action: of the schedule, such as "F0"; "" outside of them.
        where: the part or parts that run.
        by_role: bytes by `forebay.estimate.allocator.ROLES`.
        live: sublayer to the number of microbatches whose saved tensors it has when the part begins.
    """

    action: str
    where: str
    by_role: tuple[int, ...]
    live: Mapping[str, int] = field(default_factory=dict)

    @property
    def allocated(self) -> int:
        return sum(self.by_role)


@dataclass(frozen=True)
class Walked:
    """The result of a walk.

    Attributes:
        reserved: peak bytes of segments.
        peak: of all steps.
        levels: of the last step, in order; `peak` comes first if it is higher than all of them.
        before: bytes in use before a forward, as a manager measures them in its second step, with all moments.
        plan: what the manager offloads, and when.
    """

    reserved: int
    peak: StepLevel
    levels: tuple[StepLevel, ...]
    before: int
    plan: Plan | None = None
