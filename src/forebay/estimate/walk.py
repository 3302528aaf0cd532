"""The memory of a rank over a step: parts as they are placed, what the manager offloads, and the highest level.

Input: a `ModelTrace`, the `RankState` of a rank, its stages, the actions of its schedule, and a placement for every
sublayer. Output: a `RankFit`: the highest point of the step and what it consists of. `plan_link` makes the offload
plan that the run's manager would make, from a trace instead of a measured step. Nothing is run or kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from forebay.estimate.state import RankState
from forebay.estimate.types import STASHED, Event, ModelTrace, PartEvents, PartTrace
from forebay.memory.offload_plan import fit_link, is_interleaved, offload_all, plan_interleaved
from forebay.memory.timeline import CallFigures, Plan, Timeline, TimelineEvent

# A rank's memory over a step, laid on what the rank does, and whether that fits a budget.
#
# In: a `ModelTrace`, the `RankState` of a rank, its stages and the list of what it computes (a pipeline's own plan, or one
# forward and backward after the other), and a placement for every half. Out: a `RankFit`: the highest point of the step, and
# what makes it up. Nothing is run or kept.
#
# The step is walked action by action, half by half. At each half's forward and backward the level is
#
#     parameters + moments + gathered weights + gradients so far + saved so far + what this half needs for a moment + other
#
# Gradients of a part are there from its first backward on (`RankState` says which kinds are there from the begin). Where a
# forward and a backward run together, half k of the one meets half k of the other, counted from where each begins. Between the
# two parts of a split backward what the experts' weight gradients need waits (`forebay.moe.wgrad`).
#
# What a placement makes of the bytes that a half saves:
#
#     keep        all are held
#     recompute   of a MoE half with Forebay's experts all but the first product ("light"; "save-dispatch" holds
#                 less and is counted so too); "full", and every other half: its input alone, and backward makes the rest again
#     offload     what the manager's plan takes off the device (`forebay.estimate.walk`) is not held, but for two halves on
#                 their way; where placements are only being chosen, all of the half
#     stash       x and h of the experts as the rows that came, in pages, not as buffers of the capacity
#
# Levels are of allocated memory. What the allocator reserves beside it, `forebay.estimate.reserved` finds out, and `RankFit`
# has as `cached`.

ERROR = 0.02
"""Share of a planned total by which the run may take more. Of measured runs none reserved more than 1.6 % above its plan; of 10
that were given about their plan, 2 ran out of memory with just that (benchmarks/results/planner.md)."""
ALLOWANCE = f"with {100 * ERROR:.0f} % of the peak left for the plan's own error"


class ActionLike(Protocol):
    """What `forebay.pipeline.schedule.Action` is."""

    @property
    def kind(self) -> str:
        """F, B (whole backward), I (to the inputs), W (to the weights), OVERLAP_F_B."""

    @property
    def stage(self) -> int:
        """Its number."""

    @property
    def microbatch(self) -> int:
        """Its number."""

    @property
    def parts(self) -> Sequence[Any]:
        """The forward and the backward of an OVERLAP_F_B."""


class LocalAction(NamedTuple):
    """An action on one process alone."""

    kind: str
    stage: int
    microbatch: int
    parts: tuple[Any, ...] = ()

    def __str__(self) -> str:
        """As a pipeline's action is written."""
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class StageLayers:
    """Layers of a stage by number in the model, and their places among the rank's own; whether it has embedding and head."""

    layers: tuple[int, ...]
    places: tuple[int, ...]
    embedding: bool
    head: bool


@dataclass(frozen=True)
class Held:
    """One half under its placement, bytes: `held` from forward to backward, `forward` and `backward` above the level before,
    `later` from the input part of a split backward to its weight part, `stays` from backward to the step's end, and `gradient`:
    the place of its part's gradient (a layer's place, "embedding" or "head")."""

    path: str
    placement: str
    saved: int
    held: int
    forward: int
    backward: int
    later: int
    gradient: Any
    stays: int = 0


@dataclass(frozen=True)
class RankFit:
    """Bytes on a rank at the highest point of its step.

    Attributes:
        activations: saved for backward.
        transient: what the running halves need besides, gathered weights, and reductions.
        where: what runs then.
        held_at_most: the most that is saved at any moment.
        cached: what the caching allocator holds at most beside the other columns: `forebay.estimate.reserved`.
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
        """The highest point of what is in use, context and communicators included."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient + self.other

    @property
    def total(self) -> int:
        """The highest point of what is taken from the device."""
        return self.allocated + self.cached

    @property
    def reserved(self) -> int:
        """Of that, what the caching allocator reserves."""
        return self.total - self.other

    def headroom(self, budget: int) -> int:
        """See `headroom`."""
        return headroom(self.total, budget)


def least_budget(total: int) -> int:
    """That a planned total fits: itself, and `ERROR` of it."""
    return total + int(ERROR * total)


def headroom(total: int, budget: int) -> int:
    """Bytes that the budget leaves beside a planned total and `ERROR` of it; negative if nobody should rely on its fitting."""
    return budget - least_budget(total)


def within(budget: int) -> int:
    """The highest total that fits, give or take a byte."""
    return int(budget / (1 + ERROR))


def alone(microbatches: int, overlap: bool) -> list[LocalAction]:
    """What a process without a pipeline computes in a step."""
    forwards = [LocalAction("F", 0, m) for m in range(microbatches)]
    backwards = [LocalAction("B", 0, m) for m in range(microbatches)]
    if not overlap:
        return [action for pair in zip(forwards, backwards, strict=True) for action in pair]
    both = [LocalAction("OVERLAP_F_B", -1, -1, (forwards[m], backwards[m - 1])) for m in range(1, microbatches)]
    return [forwards[0], *both, backwards[-1]]


def sublayers_of(
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
) -> list[Held]:
    """The halves of a stage in forward order, embedding and head included.

    Args:
        placements: half's path to placement; "keep" where it is not named.
        prefix: module path of the layers.
        recompute: see `[memory]`.
        engine: a pipeline or overlap runs the stage: the head's backward is a part of its forward.
        summed: the engine adds the gradient of the head's weight to a sum in forward, and collects that of embedded tokens.
        at_once: it adds that to a sum too, as it is made.
        carried: by path, bytes of an offloaded half that leave; all of them without it.
    """
    found = []
    if stage.embedding:
        kept = _kept("embedding", trace.embedding, "embedding")
        if engine and summed:  # gradients of the tokens are collected, and spread over the vocabulary once
            tokens = trace.layers[0].attention.inputs
            rows = 2 * tokens  # in the dtype of the sum
            kept = replace(kept, backward=tokens + (rows if at_once else 0), stays=0 if at_once else tokens)
        found.append(kept)
    for nth, (number, place) in enumerate(zip(stage.layers, stage.places, strict=True)):
        layer = trace.layers[number]
        for name, part in (("self_attn", layer.attention), ("mlp", layer.mlp)):
            path = f"{prefix}.{number}.{name}"
            leaves = part.saved if carried is None else min(carried.get(path, 0), part.saved)
            sublayer = _placed(path, part, placements.get(path, "keep"), recompute, place, leaves)
            if name == "mlp" and layer.is_moe:
                sublayer = replace(sublayer, held=sublayer.held + trace.balance)
            if name == "self_attn" and nth == 0:
                sublayer = replace(sublayer, held=sublayer.held + trace.shared)
            found.append(sublayer)
    if stage.head:
        head = trace.head
        weight = trace.head_gradient
        kept = _kept("head", head, "head")
        if engine:
            in_forward = max(head.forward, head.saved + head.backward) - (2 * weight if summed else 0)
            kept = replace(kept, held=head.inputs, forward=in_forward, backward=head.inputs)
        found.append(kept)
    return found


def _kept(path: str, part: PartTrace, gradient: Any) -> Held:
    return Held(path, "keep", part.saved, part.saved, part.inputs + part.forward, part.backward, part.later, gradient)


def _placed(path: str, part: PartTrace, placement: str, recompute: str, place: int, leaves: int) -> Held:
    kept = replace(_kept(path, part, place), placement=placement)
    match placement:
        case "recompute" if part.light is not None and recompute != "full":
            held, backward = part.light
            return replace(kept, held=held, backward=backward)
        case "recompute":
            held = min(part.inputs, part.saved)
            again = max(part.forward, part.saved + part.backward)
            return replace(kept, held=held, backward=again)
        case "offload":
            return replace(
                kept, held=part.saved - leaves, forward=kept.forward + leaves, backward=2 * leaves + part.backward
            )
        case "stash":
            capacity, came = part.stash
            return replace(kept, held=part.saved - capacity + came, backward=part.backward + capacity - came)
    return kept


Seen = Callable[[str, RankFit], None]
"""Told of every level of a step in turn: the action ("" after the last), and the level as if it were the highest."""


def fit_rank(
    rank: int,
    state: RankState,
    stages: Mapping[int, Sequence[Held]],
    actions: Iterable[ActionLike],
    messages: int = 0,
    seen: Seen | None = None,
) -> RankFit:
    """The highest point of a rank's step.

    Args:
        stages: its halves in forward order, by stage.
        actions: what it computes, in order; transfers may be among them and are not looked at.
        messages: bytes of hidden states and gradients on their way between ranks.
        seen: told of every level: the whole curve, of which the highest point is returned.
    """
    walk = Walk(rank, state, stages, messages, seen)
    for action in actions:
        walk.step(action)
    return walk.done()


class Walk:
    """A step so far."""

    def __init__(
        self, rank: int, state: RankState, stages: Mapping[int, Sequence[Held]], messages: int, seen: Seen | None = None
    ):
        self._rank, self._state, self._stages = rank, state, stages
        self._seen, self._action = seen, ""
        self._held = self._most = 0
        self._messages = messages
        self._gradients = state.gradients if state.at_once else 0
        self._with_gradient: set[Any] = set()
        self._best: RankFit | None = None

    @property
    def level(self) -> int:
        """Bytes now, but for what the halves that run need for a moment."""
        return self._at(self._state.gathered + self._messages, "").total

    def step(self, action: ActionLike) -> None:
        """Carry out one action."""
        self._action = str(action)
        match action.kind:
            case "OVERLAP_F_B":
                forward, backward = action.parts
                self._overlap_fwd_bwd(self._stages[forward.stage], self._stages[backward.stage], str(action))
            case "F":
                self._overlap_fwd_bwd(self._stages[action.stage], (), str(action))
            case "B" | "I":
                self._overlap_fwd_bwd((), self._stages[action.stage], str(action), split=action.kind == "I")
            case "W":
                sublayers = self._stages[action.stage]
                self._level(max((h.later for h in sublayers), default=0), str(action))
                self._held -= sum(h.later for h in sublayers)

    def done(self) -> RankFit:
        """The step is over."""
        s = self._state
        self._action = ""
        self._level(s.reducing, "reduction")
        end = replace(self._at(s.stepping, "optimizer"), gradients=s.sharded_gradients)
        self._note(end)
        assert self._best is not None
        return replace(self._best, held_at_most=self._most)

    def _overlap_fwd_bwd(
        self, forward: Sequence[Held], backward: Sequence[Held], what: str, split: bool = False
    ) -> None:
        back = list(reversed(backward))
        for k in range(max(len(forward), len(back))):
            f = forward[k] if k < len(forward) else None
            b = back[k] if k < len(back) else None
            self.meet(f, b, what)
            if f:
                self._held += f.held
            if b:
                self._held += (b.later if split else 0) + b.stays - b.held
                self._gradient(b.gradient)
            self._most = max(self._most, self._held)

    def meet(self, f: Held | None, b: Held | None, what: str) -> None:
        """A half's forward and another one's backward run together, or one of them alone."""
        needed = (f.forward if f else 0) + (b.backward if b else 0)
        name = " and ".join(f"{sublayer.path} {way}" for sublayer, way in ((f, "forward"), (b, "backward")) if sublayer)
        self._level(needed, name or what)

    def _gradient(self, place: Any) -> None:
        """A part's gradients are there. Those of a layer are complete with its attention, which comes last; they count from its
        MoE half on."""
        s = self._state
        if s.at_once or place in self._with_gradient:
            return
        self._with_gradient.add(place)
        ends = {"embedding": s.embedding_gradient, "head": s.head_gradient}
        self._gradients += ends[place] if place in ends else s.layer_gradients[place]

    def _level(self, needed: int, where: str) -> None:
        self._note(self._at(needed + self._state.gathered + self._messages, where))

    def _at(self, transient: int, where: str) -> RankFit:
        s = self._state
        return RankFit(
            self._rank, s.parameters, self._gradients, s.optimizer, self._held, transient, s.other, where, self._most
        )

    def _note(self, level: RankFit) -> None:
        if self._seen is not None:
            self._seen(self._action, level)
        if self._best is None or level.total > self._best.total:
            self._best = level


# The parts of a stage as they are laid: each with its events, and with what its placement makes of them.
#
# In: a `ModelTrace`, a `StageLayers` and placements. Out: `Part`s in forward order, which `forebay.estimate.reserved` plays.
# Nothing is kept.

PAGE = 256 << 10
"""Bytes of a page of `forebay.memory.page_store`, which is a store's and not for a planner."""
_ROUNDED = 4096  # bytes by which two tensors may be larger than they were asked for


@dataclass(frozen=True)
class Part:
    """A half, or an end, as it is placed.

    Attributes:
        place: a layer's place among the rank's, "embedding" or "head".
        stash: bytes of x and h as buffers, and of the rows that came.
        balance: bytes that the load-balancing loss holds for it until its backward is over.
        later, token_rows: see `PartTrace`.
        stashed: if it is placed so, number and bytes of the experts' x, which lies in pages from the half's end on.
    """

    path: str
    place: Any
    events: PartEvents
    placement: str = "keep"
    stash: tuple[int, int] = (0, 0)
    balance: int = 0
    later: int = 0
    token_rows: int = 0
    stashed: tuple[int, int] | None = None

    @cached_property
    def experts_gradients(self) -> dict[int, int]:
        """Bytes of the experts' weight gradients, by number: the two largest of its weights are theirs."""
        sizes = {n: size for n, size in self.events.backward if size and n in self.events.weights}
        return {n: sizes[n] for n in sorted(sizes, key=lambda n: -sizes[n])[:2]}

    @property
    def pages(self) -> int:
        """Bytes of the pages of its rows that came: of x and of h, each with a page that is not full."""
        return (self.stash[1] // PAGE + 2) * PAGE

    @property
    def mlp(self) -> bool:
        """The second half of a layer."""
        return self.path.endswith(".mlp")


def parts_of(
    trace: ModelTrace, stage: StageLayers, placements: Mapping[str, str], *, prefix: str, recompute: str
) -> list[Part]:
    """The parts of a stage in forward order: what `forebay.estimate.walk.sublayers_of` makes of the same arguments."""
    found = [_part("embedding", "embedding", trace.embedding)] if stage.embedding else []
    for number, place in zip(stage.layers, stage.places, strict=True):
        layer = trace.layers[number]
        for name, sublayer in (("self_attn", layer.attention), ("mlp", layer.mlp)):
            path = f"{prefix}.{number}.{name}"
            placement = placements.get(path, "keep")
            light = placement == "recompute" and recompute != "full" and sublayer.light_events is not None
            part = _part(path, place, sublayer, "keep" if light else placement, light)
            found.append(replace(part, balance=trace.balance if name == "mlp" and layer.is_moe else 0))
    return found + ([_part("head", "head", trace.head)] if stage.head else [])


def _part(path: str, place: Any, trace: PartTrace, placement: str = "keep", light: bool = False) -> Part:
    events = trace.light_events if light else trace.events
    assert events is not None, "a trace has events"
    part = Part(path, place, events, placement, trace.stash, later=trace.later, token_rows=trace.token_rows)
    return _stashing(part) if placement == "stash" and trace.stash[0] else part


def _stashing(part: Part) -> Part:
    """The half with pages: they are taken before h is made, and h is let go of behind the activation, which is made from it. x
    and h are the two saved tensors that come to the bytes of the pair; rows of x are the smaller one."""
    sizes = {n: size for n, size in part.events.forward if size and n in part.events.saved}
    pairs = [(x, h) for x in sizes for h in sizes if sizes[x] < sizes[h]]
    found = [pair for pair in pairs if 0 <= sum(sizes[n] for n in pair) - part.stash[0] < _ROUNDED]
    if not found:
        return part
    (x, h), *_ = found
    forward: list[Event] = []
    made = -1  # behind h
    for number, size in part.events.forward:
        if number == h and size:
            forward.append((-1, STASHED))
        made += size > 0 and number >= 0 and (made >= 0 or number == h)
        if made == 2 and (h, 0) not in forward:
            forward.append((h, 0))
        forward.append((number, size))
    # In backward x comes out of the pages when h is not needed any more, if the weights' gradients are made that late.
    back = part.events.backward
    at = back.index((h, 0)) if (h, 0) in back else 0
    bringing = (*back[:at], (-1, STASHED), *back[at:])
    return replace(part, events=replace(part.events, forward=tuple(forward), backward=bringing), stashed=(x, sizes[x]))


# What a run's manager will offload, and when: its own plan, made from a trace instead of from measured cycles.
#
# In: a rank's stages as they are placed (`PlacedSublayer`), what it computes in a step, and the link's rates. Out: the `Plan`
# that `forebay.memory.hooks` would make of them, whose calls are (half's path, number of its call in a cycle). Nothing is kept.
#
# The manager plans with a `Timeline`: in which order regions begin forward and backward, how long that takes, and the bytes of
# each storage that a region saves and a store could take. It measures the three; here the order is the schedule's, seconds are
# the device profile's, and storages are the trace's. What is planned with is the same code: `forebay.memory.offload_plan` for
# forwards that are followed by their backwards, `forebay.memory.offload_plan` for a pipeline.
#
# A device that waits for its host takes longer than the profile says, and carries more meanwhile: more is away than is planned
# here, and memory is lower.

MEASURED_STEPS = 2
"""A GPU's manager measures so many cycles, in which everything that may leave does, and follows its plan from then on."""


@dataclass(frozen=True)
class PlacedSublayer:
    """A half of a layer in a run, or an end.

    Attributes:
        leaves: it is placed to be offloaded.
        forward, backward: seconds of a microbatch, what is made again in backward included.
    """

    path: str
    events: PartEvents
    leaves: bool
    forward: float
    backward: float

    @property
    def managed(self) -> bool:
        """Embedding and head are nobody's region: their time is a part of the moment before."""
        return self.path not in ("embedding", "head")


def may_leave(events: PartEvents, hidden: int, least: int) -> list[tuple[int, int]]:
    """(storage, bytes) of what a half saves that a store would take, in order. `hidden`: bytes of its input."""
    sizes = {n: size for n, size in events.forward if size and n >= 0}
    sizes[events.x] = hidden
    return [(n, sizes[n]) for n in events.saved if sizes.get(n, 0) >= least]


def plan_link(
    stages: Mapping[int, Sequence[PlacedSublayer]],
    actions: Iterable[Any],
    rates: tuple[float | None, ...],
    *,
    hidden: int,
    least: int,
    everything: bool,
) -> Plan:
    """What leaves in a cycle, where it is settled and where it is fetched.

    Args:
        stages: halves in forward order, ends included, by stage.
        actions: of a cycle: a pipeline's step; else a forward and its backward.
        rates: bytes a second, to the host and back, at a pipeline's two ends, and of the device's own memory; as a `Timeline` has
            them.
        hidden: bytes of a half's input.
        least: bytes below which a storage stays.
        everything: `offload = "all"`: wait for the link where that is needed.
    """
    builder = _TimelineBuilder(hidden, least)
    for action in actions:
        builder.add(stages, action)
    calls = tuple(builder.calls)
    timeline = Timeline(calls, tuple(builder.events), *rates)  # type: ignore[arg-type]
    paths = frozenset(sublayer.path for sublayers in stages.values() for sublayer in sublayers if sublayer.leaves)
    if is_interleaved(timeline):
        return plan_interleaved(timeline, paths, everything)
    return offload_all(timeline, paths) if everything else fit_link(timeline, paths)


def offloaded_bytes(
    plan: Plan, stages: Mapping[int, Sequence[PlacedSublayer]], hidden: int, least: int
) -> dict[str, int]:
    """Bytes of each half that leave for one microbatch: the fewest of all calls."""
    events = {
        sublayer.path: sublayer.events for sublayers in stages.values() for sublayer in sublayers if sublayer.leaves
    }
    found: dict[str, int] = {}
    for path in events:
        items = may_leave(events[path], hidden, least)
        calls = [chosen for (name, _), chosen in plan.offload.items() if name == path]
        found[path] = min((sum(items[n][1] for n in chosen) for chosen in calls), default=0)
    return found


class _TimelineBuilder:
    """A timeline in the making."""

    def __init__(self, hidden: int, least: int):
        self._hidden, self._least = hidden, least
        self.calls: list[CallFigures] = []
        self.events: list[TimelineEvent] = []
        self._numbers: dict[tuple[str, int], int] = {}  # of a half's call for a microbatch
        self._counts: dict[str, int] = {}

    def add(self, stages: Mapping[int, Sequence[PlacedSublayer]], action: Any) -> None:
        match action.kind:
            case "OVERLAP_F_B":
                forward, backward = action.parts
                there, back = list(stages[forward.stage]), list(reversed(stages[backward.stage]))
                for k in range(max(len(there), len(back))):
                    for sublayer in there[k : k + 1]:
                        self._forward(sublayer, forward.microbatch)
                    for sublayer in back[k : k + 1]:
                        self._backward(sublayer, backward.microbatch)
            case "F":
                for sublayer in stages[action.stage]:
                    self._forward(sublayer, action.microbatch)
            case "B" | "I":
                for sublayer in reversed(stages[action.stage]):
                    self._backward(sublayer, action.microbatch)

    def _forward(self, sublayer: PlacedSublayer, microbatch: int) -> None:
        if not sublayer.managed:
            # A head's backward follows its forward at once.
            self._longer(sublayer.forward + (sublayer.backward if sublayer.path == "head" else 0.0))
            return
        count = self._counts.get(sublayer.path, 0)
        self._counts[sublayer.path] = count + 1
        self._numbers[sublayer.path, microbatch] = number = len(self.calls)
        items = tuple(size for _, size in may_leave(sublayer.events, self._hidden, self._least))
        self.calls.append(CallFigures((sublayer.path, count), items, sublayer.forward))
        self.events.append(TimelineEvent("F", number, sublayer.forward))

    def _backward(self, sublayer: PlacedSublayer, microbatch: int) -> None:
        if sublayer.managed:
            self.events.append(TimelineEvent("B", self._numbers[sublayer.path, microbatch], sublayer.backward))

    def _longer(self, seconds: float) -> None:
        if self.events:
            self.events[-1] = replace(self.events[-1], seconds=self.events[-1].seconds + seconds)
