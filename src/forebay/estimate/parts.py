"""The parts of a stage with their events under a placement, and the offload plan that a run's manager would make of them.

Input: a `ModelTrace`, a `StageLayers` and placements; for the offload plan the actions of a step, seconds by part and
the link's rates. Output: `Part`s in forward order, which `forebay.estimate.walk` plays on an allocator, and the `Plan`
of `forebay.memory.offload_plan` for a timeline that is traced instead of measured. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

from forebay.estimate.types import PAGES, AllocEvent, ModelTrace, PartEvents, PartTrace, StageLayers
from forebay.memory.offload_plan import fit_link, is_interleaved, offload_all, plan_interleaved
from forebay.memory.timeline import CallFigures, Plan, Timeline, TimelineEvent
from forebay.pipeline.schedule import Action

PAGE = 256 << 10
"""Bytes of a page of `forebay.memory.page_store`, which the estimator does not import."""
_EXPERT_MATRICES = ("experts.gate_up_proj", "experts.down_proj")

WHOLE_LAYER = "layer"
"""Mode of "recompute" in which a checkpoint has both sublayers of a layer, as transformers' `gradient_checkpointing` has."""

MEASURED_STEPS = 2
"""Steps that a GPU's manager measures: everything that may leave does. It follows its plan from then on."""


@dataclass(frozen=True)
class Part:
    """A sublayer, embedding or head under its placement.

    Attributes:
        place: a layer's place among the rank's, "embedding" or "head".
        events: those of light recomputation if `light`; then `placement` is "keep".
        stash: bytes of the experts' x and h in buffers, and of the rows that arrive.
        balance: bytes that the load-balancing loss holds until its backward.
        deferred, token_rows: see `PartTrace`.
        with_previous: under "recompute", one checkpoint has the part before it and this one: only the former's input is kept.
        stashed_x: under "stash", number and bytes of the experts' x, which is in pages after the sublayer's forward.
        seconds: of a microbatch's forward and backward, recomputation included; for `plan_link`.
    """

    path: str
    place: Any
    events: PartEvents
    placement: str = "keep"
    light: bool = False
    stash: tuple[int, int] = (0, 0)
    balance: int = 0
    deferred: tuple[int, ...] = ()
    token_rows: int = 0
    with_previous: bool = False
    stashed_x: tuple[int, int] | None = None
    seconds: tuple[float, float] = (0.0, 0.0)

    @cached_property
    def expert_grads(self) -> dict[int, int]:
        """Bytes of the gradients of the experts' matrices, by number."""
        named = self.events.weight_grads
        return {n: size for n, size in self.events.backward if size and named.get(n, "").endswith(_EXPERT_MATRICES)}

    @property
    def pages(self) -> int:
        """Bytes of the pages of the rows of x and of h that arrive, with one page of each that is not full."""
        return (self.stash[1] // PAGE + 2) * PAGE

    @property
    def mlp(self) -> bool:
        return self.path.endswith(".mlp")

    @property
    def managed(self) -> bool:
        """Embedding and head are not regions: their time belongs to the event before."""
        return self.path not in ("embedding", "head")


def placed_parts(
    trace: ModelTrace, stage: StageLayers, placements: Mapping[str, str], *, prefix: str, recompute: str
) -> list[Part]:
    """The parts of a stage in forward order. `prefix`: module path of the layers; `recompute`: of `[memory]` or `WHOLE_LAYER`."""
    found = [_part("embedding", "embedding", trace.embedding)] if stage.embedding else []
    for number, place in zip(stage.layers, stage.places, strict=True):
        layer = trace.layers[number]
        for name, sublayer in layer.sublayers:
            path = f"{prefix}.{number}.{name}"
            placement = placements.get(path, "keep")
            light = placement == "recompute" and recompute != "full" and sublayer.light_events is not None
            part = _part(path, place, sublayer, "keep" if light else placement, light)
            with_previous = recompute == WHOLE_LAYER and placement == "recompute" and name == "mlp"
            balance = trace.balance if name == "mlp" and layer.is_moe else 0
            found.append(replace(part, balance=balance, with_previous=with_previous))
    return found + ([_part("head", "head", trace.head)] if stage.head else [])


def _part(path: str, place: Any, trace: PartTrace, placement: str = "keep", light: bool = False) -> Part:
    events = trace.light_events if light else trace.events
    assert events is not None, "a trace has events"
    part = Part(
        path, place, events, placement, light, trace.stash, deferred=trace.deferred, token_rows=trace.token_rows
    )
    return _stashed(part) if placement == "stash" and trace.stash[0] else part


def _stashed(part: Part) -> Part:
    """The part with pages: they are taken before h is made, and h is freed after the activation, which is made from it."""
    events = part.events
    x, h = events.experts_x, events.experts_h
    sizes = dict(events.forward)
    if x not in sizes or h not in sizes:
        return part
    forward = _with_pages_for(h, events.forward)
    # In backward x is read from the pages when h is not needed any more, if the weights' gradients are made that late.
    at = events.backward.index((h, 0)) if (h, 0) in events.backward else 0
    backward = (*events.backward[:at], (-1, PAGES), *events.backward[at:])
    size = next(size for n, size in events.forward if n == x and size)
    return replace(part, events=replace(events, forward=forward, backward=backward), stashed_x=(x, size))


def _with_pages_for(h: int, events: Iterable[AllocEvent]) -> tuple[AllocEvent, ...]:
    found: list[AllocEvent] = []
    made = -1  # storages since h, itself included
    for number, size in events:
        allocates = size > 0 and number >= 0
        if number == h and size:
            found.append((-1, PAGES))
        if allocates and (made >= 0 or number == h):
            made += 1
        if made == 2 and (h, 0) not in found:
            found.append((h, 0))
        found.append((number, size))
    return tuple(found)


def offloadable(events: PartEvents, hidden: int, least: int) -> list[tuple[int, int]]:
    """(storage, bytes) of what a sublayer saves that a store would take, in order.

    Args:
        hidden: bytes of its input.
        least: bytes below which a storage stays on the device.
    """
    sizes = {n: size for n, size in events.forward if size and n >= 0}
    sizes[events.x] = hidden
    return [(n, sizes[n]) for n in events.saved if sizes.get(n, 0) >= least]


def plan_link(
    stages: Mapping[int, Sequence[Part]],
    actions: Iterable[Action],
    rates: tuple[float | None, ...],
    *,
    hidden: int,
    least: int,
    everything: bool,
) -> Plan:
    """The manager's plan: what is offloaded, where its device memory is released and where it is fetched.

    It is made by the run's own code; the order is the schedule's, seconds are the device profile's, storages the trace's. A
    device that waits for its host is slower than the profile: the run then offloads more than is planned here.

    Args:
        stages: parts in forward order, by stage.
        actions: of a measured step: a pipeline's whole step; else a forward and its backward.
        rates: positional rates of a `Timeline`, bytes a second.
        hidden, least: see `offloadable`.
        everything: `offload = "all"`: the device may wait for the link.
    """
    builder = _TimelineBuilder(hidden, least)
    for action in actions:
        builder.add(stages, action)
    timeline = Timeline(tuple(builder.calls), tuple(builder.events), *rates)  # type: ignore[arg-type]
    paths = frozenset(p.path for parts in stages.values() for p in parts if p.placement == "offload")
    if is_interleaved(timeline):
        return plan_interleaved(timeline, paths, everything)
    return offload_all(timeline, paths) if everything else fit_link(timeline, paths)


def offloaded_bytes(plan: Plan, stages: Mapping[int, Sequence[Part]], hidden: int, least: int) -> dict[str, int]:
    """Bytes of each offloaded sublayer that leave for one microbatch: the fewest of all calls."""
    found: dict[str, int] = {}
    for part in (p for parts in stages.values() for p in parts if p.placement == "offload"):
        items = offloadable(part.events, hidden, least)
        calls = [chosen for (name, _), chosen in plan.offload.items() if name == part.path]
        found[part.path] = min((sum(items[n][1] for n in chosen) for chosen in calls), default=0)
    return found


class _TimelineBuilder:
    def __init__(self, hidden: int, least: int):
        self._hidden, self._least = hidden, least
        self.calls: list[CallFigures] = []
        self.events: list[TimelineEvent] = []
        self._numbers: dict[tuple[str, int], int] = {}  # of a sublayer's call for a microbatch
        self._counts: dict[str, int] = {}

    def add(self, stages: Mapping[int, Sequence[Part]], action: Action) -> None:
        match action.kind:
            case "OVERLAP_F_B":
                forward, backward = action.parts
                for f, b in zip_longest(stages[forward.stage], reversed(stages[backward.stage])):
                    if f:
                        self._forward(f, forward.microbatch)
                    if b:
                        self._backward(b, backward.microbatch)
            case "F":
                for part in stages[action.stage]:
                    self._forward(part, action.microbatch)
            case "B" | "I":
                for part in reversed(stages[action.stage]):
                    self._backward(part, action.microbatch)

    def _forward(self, part: Part, microbatch: int) -> None:
        forward, backward = part.seconds
        if not part.managed:
            # A head's backward follows its forward at once.
            self._lengthen_last(forward + (backward if part.path == "head" else 0.0))
            return
        count = self._counts.get(part.path, 0)
        self._counts[part.path] = count + 1
        self._numbers[part.path, microbatch] = number = len(self.calls)
        items = tuple(size for _, size in offloadable(part.events, self._hidden, self._least))
        self.calls.append(CallFigures((part.path, count), items, forward))
        self.events.append(TimelineEvent("F", number, forward))

    def _backward(self, part: Part, microbatch: int) -> None:
        if part.managed:
            self.events.append(TimelineEvent("B", self._numbers[part.path, microbatch], part.seconds[1]))

    def _lengthen_last(self, seconds: float) -> None:
        if self.events:
            self.events[-1] = replace(self.events[-1], seconds=self.events[-1].seconds + seconds)
