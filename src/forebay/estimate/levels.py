"""Memory levels as sums over sublayers, which the program of `forebay.estimate.placement` needs; the plan itself has them from
`forebay.estimate.walk`.

Input: a `ModelTrace`, the `RankState` of a rank, its stages, the actions of its schedule, and a placement for every
sublayer. Output: a `RankFit`: the highest level and what it consists of. Nothing is run or kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from forebay.estimate.fit import RankFit
from forebay.estimate.state import RankState
from forebay.estimate.types import ModelTrace, PartTrace, StageLayers
from forebay.pipeline.schedule import Action


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
    return SublayerMemory(path, "keep", part.saved, part.saved, forward, part.backward, sum(part.deferred), gradient)


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


def fit_rank(
    rank: int,
    state: RankState,
    stages: Mapping[int, Sequence[SublayerMemory]],
    actions: Iterable[Action],
    messages: int = 0,
) -> RankFit:
    """The highest level of a rank's step.

    Args:
        stages: its sublayers in forward order, by stage.
        actions: in order; transfers are ignored.
        messages: bytes of hidden states and gradients in transfer between ranks.
    """
    walk = Walk(rank, state, stages, messages)
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
    ):
        self._rank, self._state, self._stages = rank, state, stages
        self._held = 0
        self._messages = messages
        self._gradients = state.gradients if state.at_once else 0
        self._with_gradient: set[Any] = set()
        self._highest: RankFit | None = None

    @property
    def level(self) -> int:
        """Bytes now, without what the running sublayers need."""
        return self._at(self._state.gathered + self._messages, "").total

    def step(self, action: Action) -> None:
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
                self._running(max((h.deferred for h in sublayers), default=0), str(action))
                self._held -= sum(h.deferred for h in sublayers)

    def done(self) -> RankFit:
        """End the step with its reductions and the optimizer; the highest level."""
        s = self._state
        self._running(s.reducing, "reduction")
        self._note(replace(self._at(s.stepping, "optimizer"), gradients=s.sharded_gradients))
        assert self._highest is not None
        return self._highest

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
        return RankFit(self._rank, s.parameters, self._gradients, s.optimizer, self._held, transient, s.other, where)

    def _note(self, level: RankFit) -> None:
        if self._highest is None or level.total > self._highest.total:
            self._highest = level
