"""Chooses placements for a rank's sublayers before anything runs: those that fit a budget and cost the least time.

Input: the options of a rank's sublayers (`rank_options`), the levels of a walk in which all are kept, and a `Machine`. Output: a
`Choice`: a placement for every sublayer, with the bytes that it frees and the seconds that it costs. docs/solver.md says what is
tried, and why a larger budget never costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

from forebay.estimate.parts import Part
from forebay.estimate.rank_run import StepLevel
from forebay.estimate.types import PartTrace
from forebay.memory.solver import first_that_fits, front
from forebay.policy import PLACEMENTS, format_bytes

_MOVING = 1e-3  # cost of a second of transfer in seconds of waiting: prefers the answer that moves less
_WAIT = 1e-9  # s; less is rounding
# Choices of a rank up to which all are tried, the cheapest first. With two or three layers the allocator's cache, which is no sum
# over sublayers, decides as much as what they hold: a search by what is held took up to 20 % longer steps.
_FEW = 1000

Chosen = tuple[int, ...]  # the number of the option of each sublayer, stage after stage


@dataclass(frozen=True)
class Machine:
    """What placements cost on a device. Rates are bytes a second.

    Attributes:
        added: seconds by which a microbatch's two passes through a sublayer take longer under a placement, on the slower of
            device and host, without waits for the link.
        out_rate, back_rate, end_rates: of the link to the host, with all GPUs of a host at once, and at the ends of a pipeline's
            step; see `Timeline`.
        copy_rate: that a kernel reads or writes.
    """

    added: Callable[[PartTrace, str], float]
    out_rate: float
    back_rate: float
    copy_rate: float
    end_rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class Option:
    """A sublayer, embedding or head under one placement. Bytes and seconds of a microbatch.

    Attributes:
        saved: that autograd saves.
        held: on the device from forward to backward.
        freed: fewer than if it is kept.
        seconds: that the placement costs.
        moved: over the link, each way.
        mlp: whether it is a layer's second sublayer.
    """

    path: str
    placement: str
    saved: int
    held: int
    freed: int = 0
    seconds: float = 0.0
    moved: int = 0
    mlp: bool = False


@dataclass(frozen=True)
class Choice:
    """The placements of a rank.

    Attributes:
        placed: sublayers that are not kept, in forward order.
        seconds, waits: cost of a step, and waits for the link among it.
        peak: bytes that the rank takes.
    """

    rank: int
    placed: tuple[Option, ...]
    seconds: float
    waits: float
    peak: int

    @property
    def placements(self) -> dict[str, str]:
        """Sublayer path to placement, without "keep"."""
        return {p.path: p.placement for p in self.placed}


def rank_options(
    stages: Mapping[int, Iterable[Part]], allowed: Iterable[str], machine: Machine, recompute: str
) -> dict[int, list[list[Option]]]:
    """The options of a rank's sublayers by stage, in forward order with "keep" first, and those that are `allowed` besides and
    free something; embedding and head are kept."""
    found: dict[int, list[list[Option]]] = {}
    for number, parts in stages.items():
        found[number] = []
        for part in parts:
            kept = option(part, "keep", recompute, machine)
            others = [option(part, p, recompute, machine) for p in sorted(allowed) if "." in part.path]
            found[number].append([kept, *(other for other in others if other.held < kept.held)])
    return found


def option(part: Part, placement: str, recompute: str, machine: Machine, carried: int | None = None) -> Option:
    """A part under a placement. `carried`: bytes that an offloaded part sends to the host; None means all."""
    trace, saved = part.trace, part.trace.saved
    held, moved = saved, 0
    match placement:
        case "recompute" if trace.light is not None and recompute != "full":
            held = trace.light.saved  # "save-dispatch" holds less, and is counted as "light"
        case "recompute":
            held = min(trace.inputs, saved)
        case "offload":
            moved = saved if carried is None else min(carried, saved)
            held = saved - moved
        case "stash":
            capacity, arrived = trace.stash
            held = saved - capacity + arrived
    added = 0.0 if placement == "keep" else machine.added(trace, placement)
    held += part.balance + part.tables.saved_bytes
    return Option(part.path, placement, saved, held, saved - held, added, moved, part.mlp)


class ChoiceCosts:
    """What choices cost and hold, and which are worth a try; only `choose` knows the budget.

    Args:
        stages: see `rank_options`.
        times: seconds of a microbatch's forward and backward, by path.
        levels: of a walk with all sublayers kept.
        waits: the run may wait for the link; else no more is offloaded than the link carries.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[Sequence[Option]]],
        times: Mapping[str, Sequence[float]],
        levels: Sequence[StepLevel],
        microbatches: int,
        machine: Machine,
        waits: bool,
    ):
        self._stages, self._times = stages, times
        self._microbatches, self._waits = microbatches, waits
        self._rates = machine.out_rate, machine.back_rate
        self._sublayers = [options for sublayers in stages.values() for options in sublayers]
        live = {own[0].path: max((v.live.get(own[0].path, 0) for v in levels), default=0) for own in self._sublayers}
        self._in_flight = [max(live[own[0].path], 1) for own in self._sublayers]
        self._kinds = [
            (n, *(replace(option, path="") for option in own)) for n, sublayers in stages.items() for own in sublayers
        ]
        self.first = (0,) * len(self._sublayers)
        self.seconds = cache(self._seconds)

    def choose(self, rank: int, budget: int, used: Callable[[Mapping[str, str]], int]) -> Choice:
        """Choose an option for every sublayer.

        Args:
            budget: bytes that the rank may take; if no choice fits, the one that takes least is returned.
            used: bytes that the rank takes with these placements by path.
        """
        peak = cache(lambda chosen: used({o.path: o.placement for o in self.placed(chosen)}))

        def fits(chosen: Chosen) -> bool:
            return bool(peak(chosen) <= budget)

        simple = self.simple()
        found, ends = [chosen for chosen in (self.first,) if fits(chosen)], []
        for ordered in self.fronts() if not found else ():
            ends.append(ordered[-1])
            if (best := first_that_fits(ordered, fits)) is not None:
                between = self.between(ordered[max(ordered.index(best) - 1, 0)], best)
                found.append(first_that_fits(between, fits) or best)
        for chosen in simple:  # these are few, and none of them may be missed
            if found and self.order(chosen) >= min(map(self.order, found)):
                break
            if fits(chosen):
                found.append(chosen)
        tried = found or sorted({*ends, *simple}, key=lambda chosen: (peak(chosen), self.order(chosen)))[:1]
        chosen = min(tried, key=self.order)
        seconds, waited = self.seconds(chosen)
        return Choice(rank, self.placed(chosen), seconds, waited if self._waits else 0.0, peak(chosen))

    def placed(self, chosen: Chosen) -> tuple[Option, ...]:
        """Those that are not kept."""
        return tuple(o for o in self._picked(chosen) if o.placement != "keep")

    def order(self, chosen: Chosen) -> tuple[float, int, Chosen]:
        """What choices are compared by: their cost, then what they hold, then anything."""
        seconds, _ = self.seconds(chosen)
        moved = sum(o.moved for o in self._picked(chosen))
        return seconds + _MOVING * moved * sum(1 / rate for rate in self._rates), self._held(chosen), chosen

    def simple(self) -> list[Chosen]:
        """The same placement for all attention and for all MLPs, or all choices if they are few; the cheapest first. A policy may
        say the former, so they are allowed: where the run may not wait, its manager offloads less, as the walk does."""
        uniform = {self._uniform(dict(zip((True, False), two, strict=True))) for two in product(PLACEMENTS, repeat=2)}
        few = prod(map(len, self._sublayers)) <= _FEW
        every = product(*(range(len(options)) for options in self._sublayers)) if few else ()
        return sorted({*uniform, *filter(self._allowed, every)}, key=self.order)

    def fronts(self) -> list[list[Chosen]]:
        """Choices from keeping everything to holding as little as possible: each costs more and holds less than the one before.
        One without offloading, whose transfers take memory that is not counted as held, and one with."""
        alone = self._greedy(self.first, frozenset({"offload"}))
        every = {*alone, *self._greedy(self.first), *self._greedy(alone[-1])}
        return [self._front(alone), self._front(every)]

    def between(self, one: Chosen, other: Chosen) -> list[Chosen]:
        """Changes of a single sublayer that cost more than `one` and hold less, and cost less than `other`."""
        found = {c for base in (one, other) for c in self._changed(base) if self._allowed(c)}
        return self._front([one, *(c for c in found if self.order(one) < self.order(c) < self.order(other))])[1:]

    def _picked(self, chosen: Chosen) -> list[Option]:
        return [options[n] for options, n in zip(self._sublayers, chosen, strict=True)]

    def _held(self, chosen: Chosen) -> int:
        return sum(n * o.held for n, o in zip(self._in_flight, self._picked(chosen), strict=True))

    def _allowed(self, chosen: Chosen) -> bool:
        return self._waits or self.seconds(chosen)[1] <= _WAIT

    def _front(self, choices: Iterable[Chosen]) -> list[Chosen]:
        return front(choices, self.order, self._held)

    def _uniform(self, placement: Mapping[bool, str]) -> Chosen:
        """The option of each sublayer with the placement that its being an MLP maps to; without one it is kept."""
        return tuple(
            next((n for n, o in enumerate(options) if o.placement == placement[o.mlp]), 0)
            for options in self._sublayers
        )

    def _changed(self, chosen: Chosen) -> Iterable[Chosen]:
        """One sublayer placed otherwise, of equal ones the first."""
        seen = set()
        for number, (kind, now) in enumerate(zip(self._kinds, chosen, strict=True)):
            for option in range(len(self._sublayers[number])):
                if option != now and (kind, now, option) not in seen:
                    seen.add((kind, now, option))
                    yield (*chosen[:number], option, *chosen[number + 1 :])

    def _greedy(self, chosen: Chosen, barred: frozenset[str] = frozenset()) -> list[Chosen]:
        """Change one sublayer after another to hold less, each time that which costs least for each byte."""
        found, late = [chosen], set[int]()
        while steps := self._steps(chosen, barred, late):
            cost, held, _ = self.order(chosen)

            def by_byte(step: Chosen, cost: float = cost, held: int = held) -> float:
                return (self.order(step)[0] - cost) / (held - self._held(step))

            chosen = min(steps, key=by_byte)
            found.append(chosen)
        return found

    def _steps(self, chosen: Chosen, barred: frozenset[str], late: set[int]) -> list[Chosen]:
        """One sublayer changed to hold less, of equal ones the first. `late` collects those that cannot be offloaded without a
        wait: with more offloaded they never will."""
        _, waited = self.seconds(chosen)
        found: dict[Any, Chosen] = {}
        waiting: dict[Any, Chosen] = {}
        for number, (kind, now) in enumerate(zip(self._kinds, chosen, strict=True)):
            options = self._sublayers[number]
            for n, option in enumerate(options):
                key = kind, now, n
                if option.held >= options[now].held or option.placement in barred or key in found:
                    continue
                step = (*chosen[:number], n, *chosen[number + 1 :])
                if option.moved and (number in late or self.seconds(step)[1] > waited + _WAIT):
                    late.add(number)
                    waiting.setdefault(key, step)
                else:
                    found[key] = step
        return [*({**waiting, **found} if self._waits else found).values()]

    def _seconds(self, chosen: Chosen) -> tuple[float, float]:
        """Cost of a step, and the seconds that all transfers wait for the link: among the cost if the run may wait."""
        cost, waited, picked = 0.0, 0.0, iter(self._picked(chosen))
        for sublayers in self._stages.values():
            own = [next(picked) for _ in sublayers]
            cost += self._microbatches * sum(o.seconds for o in own)
            if any(o.moved for o in own):
                waited += self._microbatches * sum(self._wait(own, way) for way in (0, 1))
        return cost + waited * self._waits, waited

    def _wait(self, options: Sequence[Option], way: int) -> float:
        """Seconds that a pass through a stage waits for the link, of which the walk knows nothing: at most the bytes of the last
        two sublayers may be in transfer, and a sublayer waits until that is so.

        Backward is the same in reverse. By the end of a head's forward, which offloads nothing, all transfers are done.
        """
        queue = before = waited = 0.0  # seconds of copies in transfer; of those, the last sublayer's
        for option in options:
            path, own = option.path, option.moved / self._rates[way]
            queue = max(queue - self._times[path][way], 0.0)
            late = max(queue - (before if path != "head" else 0.0), 0.0)
            queue, before, waited = queue - late + own, own, waited + late
        return waited


def by_kind(choices: Iterable[Choice]) -> list[dict[str, Any]]:
    """Sublayers of a rank that free and cost the same, together: `layers` are their numbers, figures those of one of them."""
    found: dict[Any, list[int]] = {}
    for choice in choices:
        for p in choice.placed:
            layer, _, sublayer = p.path.rpartition(".")
            key = choice.rank, p.placement, sublayer, p.freed, p.seconds
            found.setdefault(key, []).append(int(layer.rpartition(".")[2]))
    names = ("rank", "placement", "half", "freed_bytes", "milliseconds")
    return [
        {**dict(zip(names, (*key[:4], key[4] * 1e3), strict=True)), "layers": sorted(n)} for key, n in found.items()
    ]


def sentences(choices: Sequence[Choice]) -> list[str]:
    """The same as sentences, and the cost of a step on the rank where it is highest."""
    found = []
    for row in by_kind(choices):
        several = "s" * (len(row["layers"]) > 1)
        found.append(
            f"rank {row['rank']}: {row['placement']} {row['half']} of layer{several} {ranges(row['layers'])}; "
            f"each frees {format_bytes(row['freed_bytes'])} and costs {row['milliseconds']:.2f} ms a microbatch."
        )
    most = max(choices, key=lambda c: c.seconds, default=None)
    if most is not None:
        waits = f", {most.waits * 1e3:.1f} ms of them waits for the link" if most.waits > 1e-6 else ""
        found.append(f"Placements cost at most {most.seconds * 1e3:.1f} ms a step (rank {most.rank}){waits}.")
    return found


def ranges(numbers: Iterable[int], to: str = "-") -> str:
    """Ascending numbers with runs joined: ``0-3, 5``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}{to}{b}" for a, b in runs)
