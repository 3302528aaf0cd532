"""The parts of a stage as they are laid: each with its events, and with what its placement makes of them.

In: a `ModelTrace`, a `Stage` and placements. Out: `Part`s in forward order, which `forebay.planner.reserved` plays. Nothing is
kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from forebay.planner.events import STASHED, Event, PartEvents
from forebay.planner.figures import ModelTrace, PartTrace
from forebay.planner.fit import Stage

PAGE = 256 << 10
"""Bytes of a page of `forebay.stores.pages`, which is a store's and not for a planner."""
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
    trace: ModelTrace, stage: Stage, placements: Mapping[str, str], *, prefix: str, recompute: str
) -> list[Part]:
    """The parts of a stage in forward order: what `forebay.planner.fit.halves_of` makes of the same arguments."""
    found = [_part("embedding", "embedding", trace.embedding)] if stage.embedding else []
    for number, place in zip(stage.layers, stage.places, strict=True):
        layer = trace.layers[number]
        for name, half in (("self_attn", layer.attention), ("mlp", layer.mlp)):
            path = f"{prefix}.{number}.{name}"
            placement = placements.get(path, "keep")
            light = placement == "recompute" and recompute != "full" and half.light_events is not None
            part = _part(path, place, half, "keep" if light else placement, light)
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
