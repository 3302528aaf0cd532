"""The parts of a stage with their events under a placement.

Input: a `ModelTrace`, a `StageLayers` and placements. Output: `Part`s in forward order, which `forebay.estimate.walk` plays
on an allocator. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from forebay.estimate.events import split_backward
from forebay.estimate.types import AllocEvent, Mark, ModelTrace, PartEvents, PartTrace, SharedTables, StageLayers

_EXPERT_MATRICES = ("experts.gate_up_proj", "experts.down_proj")

WHOLE_LAYER = "layer"
"""Mode of "recompute" in which a checkpoint has both sublayers of a layer, as transformers' `gradient_checkpointing` has."""


@dataclass(frozen=True)
class Part:
    """A sublayer, embedding or head under its placement.

    Attributes:
        place: a layer's number, "embedding" or "head".
        events: those of light recomputation if `light`; then `placement` is "keep".
        balance: bytes that the load-balancing loss holds until its backward.
        tables: what all layers of the stage share, if this is the first one's: it holds until its backward what they save.
        held: places in `SharedTables.given`: what this part's checkpoint holds until its backward. A mask is listed at the
            first part that holds it.
        alone: the first sublayer of a layer whose second one another stage has: a computation of its own.
        with_previous: under "recompute", one checkpoint has the part before it and this one: only the former's input is kept.
        stashed_x: under "stash", number and bytes of the experts' x, which is in pages after the sublayer's forward.
        attention, mlp: whether it is a layer's first sublayer, or its second.
    """

    path: str
    place: Any
    events: PartEvents
    placement: str = "keep"
    light: bool = False
    trace: PartTrace = field(default_factory=lambda: PartTrace(0, 0))
    balance: int = 0
    tables: SharedTables = field(default_factory=SharedTables)
    held: tuple[int, ...] = ()
    alone: bool = False
    with_previous: bool = False
    stashed_x: tuple[int, int] | None = None
    attention: bool = False
    mlp: bool = False

    @cached_property
    def expert_grads(self) -> dict[int, int]:
        """Bytes of the gradients of the experts' matrices, by number."""
        named = self.events.weight_grads
        return {n: size for n, size in self.events.backward if size and named.get(n, "").endswith(_EXPERT_MATRICES)}

    @cached_property
    def split_backward(self) -> tuple[tuple[AllocEvent, ...], tuple[AllocEvent, ...]]:
        """See `forebay.estimate.events.split_backward`; nothing waits if no matrix of the experts is trained."""
        return split_backward(self.events) if self.expert_grads else (self.events.backward, ())

    @cached_property
    def without_expert_grads(self) -> tuple[AllocEvent, ...]:
        """The events of a backward whose experts' weight gradients are made in the memory of their sum, if they can wait."""
        elsewhere = self.expert_grads if self.split_backward[1] else {}
        return tuple(event for event in self.events.backward if event[0] not in elsewhere)

    @property
    def pages(self) -> int:
        """Bytes of the pages of the rows of x and of h that arrive."""
        return self.trace.stash[1]

    @cached_property
    def kept(self) -> int:
        """Bytes of what a part that is kept makes in its forward and holds until its backward."""
        events = self.events
        made = {n: size for n, size in events.forward if n >= 0 and size}
        gone = {events.output, *(n for n, size in events.forward if not size)}
        return sum(size for n, size in made.items() if n not in gone) if self.placement == "keep" else 0

    @cached_property
    def staged(self) -> bool:
        """A MoE sublayer that an engine runs by its stages; the experts are a computation of their own."""
        return bool(self.events.transferred) or (-1, Mark.EXPERTS_BEGIN) in self.events.forward


def placed_parts(
    trace: ModelTrace, stage: StageLayers, placements: Mapping[str, str], *, prefix: str, recompute: str
) -> list[Part]:
    """The parts of a stage in forward order. `prefix`: path of the layers; `recompute`: `Config.recompute` or `WHOLE_LAYER`."""
    found = [part_of("embedding", "embedding", trace.embedding)] if stage.embedding else []
    holding: set[int] = set()  # masks, by their checkpoints so far
    for here in stage.layers:
        number, layer = here.number, trace.layers[here.number]
        for name, sublayer in layer.on(here):
            path = f"{prefix}.{number}.{name}"
            placement = placements.get(path, "keep")
            light = sublayer.light if placement == "recompute" and recompute != "full" else None
            part = part_of(path, number, sublayer, "keep" if light else placement, light)
            mlp = name == layer.names[1]
            first = (number, mlp) == stage.reader
            given_here = sublayer.given if part.placement == "recompute" else ()
            held = tuple(n for n in given_here if n not in holding)
            holding.update(held)
            part = replace(
                part,
                attention=not mlp,
                mlp=mlp,
                balance=trace.balance if mlp and layer.is_moe else 0,
                tables=trace.tables if first else SharedTables(),
                held=held,
                alone=not here.mlp,
                with_previous=recompute == WHOLE_LAYER and placement == "recompute" and mlp,
            )
            found.append(part)
    return found + ([part_of("head", "head", trace.head)] if stage.head else [])


def part_of(path: str, place: Any, trace: PartTrace, placement: str = "keep", light: PartTrace | None = None) -> Part:
    events = (light or trace).events
    assert events is not None, "a trace has events"
    part = Part(path, place, events, placement, light is not None, trace)
    return _stashed(part) if placement == "stash" and trace.stash[0] else part


def _stashed(part: Part) -> Part:
    """The part with pages: they are taken before h is made, and h is freed after the activation, which is made from it."""
    events = part.events
    x, h = events.experts_x, events.experts_h
    sizes = dict(events.forward)
    if x not in sizes or h not in sizes:
        return part
    forward = _with_pages_for(h, events.forward)
    # In backward dh has memory of its own, and x is read from the pages for gate_up's gradient.
    placed: dict[int, AllocEvent] = {Mark.DH: (h, sizes[h]), Mark.GATE_UP_GRAD: (-1, Mark.PAGES)}
    backward = tuple(placed.get(e[1], e) if e[0] < 0 else e for e in events.backward)
    size = next(size for n, size in events.forward if n == x and size)
    return replace(part, events=replace(events, forward=forward, backward=backward), stashed_x=(x, size))


def _with_pages_for(h: int, events: Iterable[AllocEvent]) -> tuple[AllocEvent, ...]:
    found: list[AllocEvent] = []
    made = -1  # storages since h, itself included
    for number, size in events:
        allocates = size > 0 and number >= 0
        if number == h and size:
            found.append((-1, Mark.PAGES))
        if allocates and (made >= 0 or number == h):
            made += 1
        if made == 2 and (h, 0) not in found:
            found.append((h, 0))
        found.append((number, size))
    return tuple(found)
