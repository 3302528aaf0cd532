"""How long a step takes: the halves' seconds laid on what each rank does.

In: for every stage its layers' `Spell`s forward and backward, every pipeline rank's list of actions, and what a step has besides:
gathering and reducing of sharded weights, the optimizer, the host. Out: a `StepTime`. Nothing is run or kept.

    action                  seconds
    F                       every layer computes and exchanges
    B                       the same; an engine makes the experts' weight gradients behind dispatch's gradient, the half of its
                            exchanges (`forebay.pipeline.passes`)
    I, W                    B without the experts' weight gradients; those
    OVERLAP_F_B             layer by layer the longer of both microbatches' computing and both microbatches' exchanges; where one
                            has no layer left, the other's runs as if alone

    What hides an exchange takes longer itself, by a share of it (`contention`): both want the same memory and multiprocessors.

An action starts when its rank is free and what it needs has come: the stage before (forward) or behind (backward), and from
another rank a message. A rank's bubble is the share of the time from the first action to the end in which it runs none.

The host launches kernels ahead of the device, layer by layer: none ends before it is launched, and what the host gains while a
long one runs, such as the head, is not lost. A captured step has no launches. Where tokens travel in sizes that the host has to
know, it waits for the device once a layer and forward, and then has nothing launched ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.planner.fit import Action
from forebay.planner.time import NOTHING, Spell


@dataclass(frozen=True)
class StageTime:
    """One microbatch in one stage; `forward` and `backward` in the order in which they run, an entry a layer or end."""

    forward: tuple[Spell, ...]
    backward: tuple[Spell, ...]


@dataclass(frozen=True)
class Besides:
    """Seconds of a step that no action of the schedule takes.

    Attributes:
        gather, reduce: of sharded weights and gradients, not hidden.
        optimizer: clipping and the update.
    """

    gather: float = 0.0
    reduce: float = 0.0
    optimizer: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and where they go.

    Attributes:
        device: name of the profile.
        schedule: from the first action to the last rank's end, on the device.
        launched: the same, with hosts that have to launch what runs; equal to `schedule` of a captured step.
        gather, reduce, optimizer: see `Besides`; of the slowest rank.
        host: what the slowest host needs for its launches; 0 of a captured step.
        busy: by pipeline rank, seconds in which an action runs.
        exposed: by pipeline rank, seconds of exchanges that nothing hides.
        tokens: of the global batch.
        measured: some figure of the device was measured on one; else all are data sheets'.
        around: seconds of the host between steps, while the device has nothing to run.
    """

    device: str
    schedule: float
    launched: float
    gather: float
    reduce: float
    optimizer: float
    host: float
    busy: tuple[float, ...]
    exposed: tuple[float, ...]
    tokens: int
    measured: bool = True
    around: float = 0.0

    @property
    def gradients(self) -> float:
        """Forwards and backwards of all microbatches, until reduced gradients are there."""
        return self.launched + self.gather + self.reduce

    @property
    def seconds(self) -> float:
        """All of a step."""
        return self.gradients + self.optimizer + self.around

    @property
    def tokens_per_second(self) -> float:
        """Of all processes."""
        return self.tokens / self.seconds

    @property
    def bubble(self) -> tuple[float, ...]:
        """By pipeline rank, share of the schedule in which nothing runs."""
        return tuple(1 - busy / self.schedule for busy in self.busy)

    @property
    def limited_by_host(self) -> bool:
        """Whether the host's launches take longer than what they launch."""
        return self.host > self.schedule

    def sentence(self) -> str:
        """For a person."""
        sheets = "" if self.measured else ", from data sheets"
        parts = [
            f"expected on {self.device}{sheets}: {self.seconds:.3f} s a step, {self.tokens_per_second:,.0f} tokens/s"
        ]
        if len(self.busy) > 1:
            parts.append(f"bubble {100 * min(self.bubble):.0f} to {100 * max(self.bubble):.0f} %")
        if self.limited_by_host:
            parts.append("the host's launches take longest: memory.graph = true captures them")
        return "; ".join(parts) + "."

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "device": self.device,
            "measured": self.measured,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "schedule_seconds": self.schedule,
            "launched_seconds": self.launched,
            "gather_seconds": self.gather,
            "reduce_seconds": self.reduce,
            "optimizer_seconds": self.optimizer,
            "host_seconds": self.host,
            "around_seconds": self.around,
            "limited_by_host": self.limited_by_host,
            "bubble": list(self.bubble),
            "exposed_exchange_seconds": list(self.exposed),
        }


@dataclass(frozen=True)
class Laid:
    """A schedule in time: its length, and by rank how long it is busy, what of that are exchanges that wait, and launches."""

    seconds: float
    busy: tuple[float, ...]
    exposed: tuple[float, ...]
    launches: tuple[float, ...]


def lay(
    actions: Sequence[Sequence[Action]],
    ranks: Sequence[int],
    stages: Mapping[int, StageTime],
    message: float = 0.0,
    engine: bool = True,
    contention: float = 0.0,
    launch: float = 0.0,
) -> Laid:
    """Lay the actions of all ranks in time.

    Args:
        actions: of each rank, those that compute; see `forebay.pipeline.schedule`.
        ranks: rank of each stage.
        message: seconds from a stage's end on one rank until another has its hidden states.
        engine: weight gradients of experts are made behind a transfer.
        contention: share of a hidden exchange by which what hides it takes longer.
        launch: seconds of the host for a launch; 0: all is captured.

    Raises:
        ValueError: actions that wait for each other, or for one that nobody has.
    """
    return _Layout(actions, ranks, message, _Times(stages, engine, contention), launch).run()


class _Layout:
    """One `lay`."""

    def __init__(
        self,
        actions: Sequence[Sequence[Action]],
        ranks: Sequence[int],
        message: float,
        times: _Times,
        launch: float,
    ):
        self._actions, self._ranks, self._message = actions, ranks, message
        self._ended: dict[tuple[str, int, int], float] = {}
        self._free = [0.0] * len(actions)
        self._busy = [0.0] * len(actions)
        self._exposed = [0.0] * len(actions)
        self._launches = [0.0] * len(actions)
        self._times, self._launch = times, launch
        self._launched = [0.0] * len(actions)  # when each host has handed over all of its actions so far

    def run(self) -> Laid:
        at = [0] * len(self._actions)
        while any(i < len(todo) for i, todo in zip(at, self._actions, strict=True)):
            before = list(at)
            for rank, todo in enumerate(self._actions):
                while at[rank] < len(todo) and self._perform(rank, todo[at[rank]]):
                    at[rank] += 1
            if at == before:
                waits = ", ".join(str(todo[i]) for i, todo in zip(at, self._actions, strict=True) if i < len(todo))
                raise ValueError(f"these actions wait for what never comes: {waits}")
        return Laid(max(self._free), tuple(self._busy), tuple(self._exposed), tuple(self._launches))

    def _perform(self, rank: int, action: Action) -> bool:
        parts = tuple(action.parts) or (action,)
        start = self._free[rank]
        for part in parts:
            ready = self._ready(rank, part)
            if ready is None:
                return False
            start = max(start, ready)
        spent = self._times.of(action)
        end, computing, exposed, launches = start, 0.0, 0.0, 0.0
        for segment in spent:
            self._launched[rank] += segment[2] * self._launch
            end = max(end + segment[0] + segment[1], self._launched[rank])
            computing, exposed, launches = computing + segment[0], exposed + segment[1], launches + segment[2]
        for part in parts:
            self._ended["F" if part.kind == "F" else "B", part.stage, part.microbatch] = end
        self._free[rank] = end
        self._busy[rank] += computing + exposed
        self._exposed[rank] += exposed
        self._launches[rank] += launches
        return True

    def _ready(self, rank: int, part: Any) -> float | None:
        """When what a forward or backward needs is there; None if that has not run yet."""
        last = len(self._ranks) - 1
        if part.kind == "W" or (part.kind == "F" and part.stage == 0):
            return 0.0
        if part.kind == "F":
            source = ("F", part.stage - 1, part.microbatch)
        elif part.stage == last:
            source = ("F", last, part.microbatch)
        else:
            source = ("B", part.stage + 1, part.microbatch)
        ended = self._ended.get(source)
        if ended is None:
            return None
        return ended + (self._message if self._ranks[source[1]] != rank else 0.0)


Segment = tuple[float, float, float]
"""Seconds computing, seconds of exchanges that nothing hides, launches: of a layer or an end."""


class _Times:
    """The segments of actions; each kind of action is counted once."""

    def __init__(self, stages: Mapping[int, StageTime], engine: bool, contention: float):
        self._stages, self._engine, self._contention = stages, engine, contention
        self._known: dict[tuple[Any, ...], list[Segment]] = {}

    def of(self, action: Action) -> list[Segment]:
        what = (action.kind, action.stage, *(part.stage for part in action.parts))
        if what not in self._known:
            self._known[what] = self._count(action)
        return self._known[what]

    def _count(self, action: Action) -> list[Segment]:
        if action.kind == "OVERLAP_F_B":
            forward, backward = action.parts
            return self._together(self._stages[forward.stage].forward, self._stages[backward.stage].backward)
        stage = self._stages[action.stage]
        match action.kind:
            case "F":
                return self._together(stage.forward, ())
            case "B":
                return self._together((), stage.backward)
            case "I":
                return [(spell.compute, spell.exchange, spell.launches) for spell in stage.backward]
            case "W":
                return [(sum(spell.weights for spell in stage.backward), 0.0, 0.0)]
        raise ValueError(f"{action} computes nothing")

    def _together(self, forward: Sequence[Spell], backward: Sequence[Spell]) -> list[Segment]:
        found = []
        for k in range(max(len(forward), len(backward))):
            f = forward[k] if k < len(forward) else NOTHING
            b = backward[k] if k < len(backward) else NOTHING
            exchange = f.exchange + b.exchange
            if f is not NOTHING and b is not NOTHING:
                hides = f.computing + b.computing
            else:
                hides = min(b.exchange / 2, b.weights) if self._engine else 0.0
            hidden = min(exchange, hides)
            computing = f.computing + b.computing + self._contention * hidden
            found.append((computing, exchange - hidden, f.launches + b.launches))
        return found
