"""The memory of a rank over a step: a level for each sublayer's forward and backward, and the highest of them.

Input: a `ModelTrace`, the `RankState` of a rank, its stages, the actions of its schedule, and a placement for every
sublayer. Output: a `RankFit`: the highest level and what it consists of. Levels are allocated memory; what the caching
allocator reserves besides comes from `forebay.estimate.reserved`. Nothing is run or kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from forebay.estimate.state import RankState
from forebay.estimate.types import ModelTrace, PartTrace
from forebay.pipeline.schedule import Action

ERROR = 0.02
"""Share of a planned total by which the run may take more. No measured run reserved more than 1.6 % above its plan; of 10
that were given about their plan, 2 ran out of memory with just that (benchmarks/results/planner.md)."""
ALLOWANCE = f"with {100 * ERROR:.0f} % of the peak left for the plan's own error"


def local_actions(microbatches: int, overlap: bool) -> list[Action]:
    """The actions of a process without a pipeline in a step."""
    forwards = [Action("F", 0, m) for m in range(microbatches)]
    backwards = [Action("B", 0, m) for m in range(microbatches)]
    if not overlap:
        return [action for pair in zip(forwards, backwards, strict=True) for action in pair]
    both = [Action("OVERLAP_F_B", -1, -1, (forwards[m], backwards[m - 1])) for m in range(1, microbatches)]
    return [forwards[0], *both, backwards[-1]]


@dataclass(frozen=True)
class StageLayers:
    """The layers of a stage: their numbers in the model, their places among the rank's own, and whether it has the ends."""

    layers: tuple[int, ...]
    places: tuple[int, ...]
    embedding: bool
    head: bool


@dataclass(frozen=True)
class SublayerMemory:
    """A sublayer (or embedding, or head) under its placement. Bytes for one microbatch.

    Attributes:
        saved: that autograd saves.
        held: on the device from forward to backward.
        forward, backward: above the level before, while it runs.
        deferred: from the input part of a split backward to its weight part.
        gradient: where its parameters' gradients count: a layer's place, "embedding" or "head".
        until_end: from backward to the step's end.
    """

    path: str
    placement: str
    saved: int
    held: int
    forward: int
    backward: int
    deferred: int
    gradient: Any
    until_end: int = 0


@dataclass(frozen=True)
class RankFit:
    """Bytes on a rank at the highest level of its step.

    Attributes:
        activations: saved for backward.
        transient: needed while sublayers run, unsharded weights, and reductions.
        where: what runs then.
        held_at_most: the most that is saved at any time.
        cached: what the caching allocator reserves at most besides the other columns; see `forebay.estimate.reserved`.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transient: int
    other: int
    where: str
    held_at_most: int
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


def sublayer_memory(
    trace: ModelTrace,
    stage: StageLayers,
    placements: Mapping[str, str],
    *,
    prefix: str,
    recompute: str,
    engine: bool,
    summed: bool,
    at_once: bool = False,
    carried: Mapping[str, int] | None = None,
) -> list[SublayerMemory]:
    """The sublayers of a stage in forward order, embedding and head included.

    Args:
        placements: sublayer path to placement; the default is "keep".
        prefix: module path of the layers.
        recompute: see `[memory]`.
        engine: a pipeline or overlap runs the stage: the head's backward is a part of its forward.
        summed: the engine adds the gradient of the head's weight to a sum in forward, and collects the gradients of embedded
            tokens to add them once a step.
        at_once: it adds the latter as they are made instead.
        carried: by path, bytes that an offloaded sublayer sends to the host; None means all.
    """
    found = []
    if stage.embedding:
        found.append(_embedding(trace, engine and summed, at_once))
    for nth, (number, place) in enumerate(zip(stage.layers, stage.places, strict=True)):
        layer = trace.layers[number]
        for name, part in layer.sublayers:
            path = f"{prefix}.{number}.{name}"
            leaves = part.saved if carried is None else min(carried.get(path, 0), part.saved)
            sublayer = _placed(path, part, placements.get(path, "keep"), recompute, place, leaves)
            if name == "mlp" and layer.is_moe:
                sublayer = replace(sublayer, held=sublayer.held + trace.balance)
            if name == "self_attn" and nth == 0:
                sublayer = replace(sublayer, held=sublayer.held + trace.shared)
            found.append(sublayer)
    if stage.head:
        found.append(_head(trace, engine, summed))
    return found


def _embedding(trace: ModelTrace, collected: bool, at_once: bool) -> SublayerMemory:
    kept = _kept("embedding", trace.embedding, "embedding")
    if not collected:
        return kept
    tokens = trace.layers[0].attention.inputs
    rows = 2 * tokens  # in the dtype of the sum
    return replace(kept, backward=tokens + (rows if at_once else 0), until_end=0 if at_once else tokens)


def _head(trace: ModelTrace, engine: bool, summed: bool) -> SublayerMemory:
    head, kept = trace.head, _kept("head", trace.head, "head")
    if not engine:
        return kept
    in_forward = max(head.forward, head.saved + head.backward) - (2 * trace.head_gradient if summed else 0)
    return replace(kept, held=head.inputs, forward=in_forward, backward=head.inputs)


def _kept(path: str, part: PartTrace, gradient: Any) -> SublayerMemory:
    forward = part.inputs + part.forward
    return SublayerMemory(path, "keep", part.saved, part.saved, forward, part.backward, part.deferred, gradient)


def _placed(path: str, part: PartTrace, placement: str, recompute: str, place: int, leaves: int) -> SublayerMemory:
    kept = replace(_kept(path, part, place), placement=placement)
    match placement:
        case "recompute" if part.light is not None and recompute != "full":
            held, backward = part.light  # "save-dispatch" holds less, and is counted as "light"
            return replace(kept, held=held, backward=backward)
        case "recompute":
            return replace(
                kept, held=min(part.inputs, part.saved), backward=max(part.forward, part.saved + part.backward)
            )
        case "offload":  # two sublayers are in transfer at any time
            return replace(
                kept, held=part.saved - leaves, forward=kept.forward + leaves, backward=2 * leaves + part.backward
            )
        case "stash":
            capacity, arrived = part.stash
            return replace(kept, held=part.saved - capacity + arrived, backward=part.backward + capacity - arrived)
    return kept


Seen = Callable[[str, RankFit], None]
"""Receives every level of a step in turn: the action ("" after the last), and the level as if it were the highest."""


def fit_rank(
    rank: int,
    state: RankState,
    stages: Mapping[int, Sequence[SublayerMemory]],
    actions: Iterable[Action],
    messages: int = 0,
    seen: Seen | None = None,
) -> RankFit:
    """The highest level of a rank's step.

    Args:
        stages: its sublayers in forward order, by stage.
        actions: in order; transfers are ignored.
        messages: bytes of hidden states and gradients in transfer between ranks.
        seen: receives every level.
    """
    walk = Walk(rank, state, stages, messages, seen)
    for action in actions:
        walk.step(action)
    return walk.done()


class Walk:
    """A step so far. A level is the sum of

    parameters, moments, unsharded weights, gradients so far, saved so far, what the running sublayers need, and `other`.

    The gradients of a part count from its first backward on, unless `RankState` has them from the beginning of the step.
    """

    def __init__(
        self,
        rank: int,
        state: RankState,
        stages: Mapping[int, Sequence[SublayerMemory]],
        messages: int,
        seen: Seen | None = None,
    ):
        self._rank, self._state, self._stages = rank, state, stages
        self._seen, self._action = seen, ""
        self._held = self._held_at_most = 0
        self._messages = messages
        self._gradients = state.gradients if state.at_once else 0
        self._with_gradient: set[Any] = set()
        self._highest: RankFit | None = None

    @property
    def level(self) -> int:
        """Bytes now, without what the running sublayers need."""
        return self._at(self._state.gathered + self._messages, "").total

    def step(self, action: Action) -> None:
        self._action = str(action)
        match action.kind:
            case "OVERLAP_F_B":
                forward, backward = action.parts
                self._run_stages(self._stages[forward.stage], self._stages[backward.stage])
            case "F":
                self._run_stages(self._stages[action.stage], ())
            case "B" | "I":
                self._run_stages((), self._stages[action.stage], split=action.kind == "I")
            case "W":
                sublayers = self._stages[action.stage]
                self._running(max((h.deferred for h in sublayers), default=0), self._action)
                self._held -= sum(h.deferred for h in sublayers)

    def done(self) -> RankFit:
        """End the step with its reductions and the optimizer; the highest level."""
        s = self._state
        self._action = ""
        self._running(s.reducing, "reduction")
        self._note(replace(self._at(s.stepping, "optimizer"), gradients=s.sharded_gradients))
        assert self._highest is not None
        return replace(self._highest, held_at_most=self._held_at_most)

    def _run_stages(
        self, forward: Sequence[SublayerMemory], backward: Sequence[SublayerMemory], split: bool = False
    ) -> None:
        """A forward and a backward that run together run sublayer by sublayer, each counted from where it begins."""
        for f, b in zip_longest(forward, reversed(backward)):
            self.run_pair(f, b)
            if f:
                self._held += f.held
            if b:
                self._held += (b.deferred if split else 0) + b.until_end - b.held
                self._add_gradient(b.gradient)
            self._held_at_most = max(self._held_at_most, self._held)

    def run_pair(self, f: SublayerMemory | None, b: SublayerMemory | None) -> None:
        """One sublayer's forward and another's backward run together, or one of them alone."""
        needed = (f.forward if f else 0) + (b.backward if b else 0)
        self._running(needed, " and ".join(f"{h.path} {way}" for h, way in ((f, "forward"), (b, "backward")) if h))

    def _add_gradient(self, place: Any) -> None:
        """A layer's gradients count from its MoE sublayer on, whose backward is first; all are there after its attention."""
        s = self._state
        if s.at_once or place in self._with_gradient:
            return
        self._with_gradient.add(place)
        ends = {"embedding": s.embedding_gradient, "head": s.head_gradient}
        self._gradients += ends[place] if place in ends else s.layer_gradients[place]

    def _running(self, needed: int, where: str) -> None:
        self._note(self._at(needed + self._state.gathered + self._messages, where))

    def _at(self, transient: int, where: str) -> RankFit:
        s = self._state
        return RankFit(
            self._rank, s.parameters, self._gradients, s.optimizer, self._held, transient, s.other, where,
            self._held_at_most,
        )  # fmt: skip

    def _note(self, level: RankFit) -> None:
        if self._seen is not None:
            self._seen(self._action, level)
        if self._highest is None or level.total > self._highest.total:
            self._highest = level
