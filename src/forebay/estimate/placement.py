"""Placements of a rank's halves before anything was run: those that fit a budget and cost the least time.

In: a rank's halves as traced, what each placement would make of them, the list of what the rank computes, and a `Machine`. Out: a
`Choice`: a placement for every half, with the bytes that it frees and the seconds that it costs.

`forebay.estimate.walk` walks the step and is the judge. Its level at every half's forward and backward is a sum over halves of
what their placements hold, so a mixed-integer programme can have it as it is, one row for each different moment: nothing is
relaxed, and what the programme has within the budget is so in the walk. docs/solver.md has the mathematics.

The link, of which the walk knows nothing: offloading is counted there as if all but two halves' bytes were gone. So it is
here: of a microbatch's forward through a stage no more than the last two halves' bytes may be on their way, likewise in backward,
and a half waits until that is so. Under `offload = "fit"` nobody waits: then only what the link carries is offloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from forebay.estimate.state import RankState
from forebay.estimate.types import ModelTrace, PartTrace
from forebay.estimate.walk import ActionLike, Held, RankFit, StageLayers, Walk, fit_rank, sublayers_of
from forebay.memory.solver import Answer, Programme
from forebay.memory.timeline import LIGHT
from forebay.policy import format_bytes

_SECONDS = 1.0  # a rank's limit; the ranks of DeepSeek-V3 on 512 GPUs take 0.02 to 0.1
_GAP = 2e-3
_MISSING = 1e3  # cost of a budget exceeded by all of itself, in plain steps: more than any placement's
_MOVING = 1e-3  # cost of occupying the link, of that of waiting as long: of two answers as fast, that which moves less
_MANY = 12  # equal halves of a stage, from which on their order is fixed


class Seconds(Protocol):
    """A model of time."""

    def __call__(self, part: PartTrace) -> tuple[float, float]:
        """Seconds of a microbatch's forward and backward through a part."""


@dataclass(frozen=True)
class Machine:
    """What placements cost on a device.

    Attributes:
        seconds: of a part's halves.
        out_rate, back_rate: of the link to the host, bytes a second, all GPUs of a host at once; as a `Timeline` has them.
        copy_rate: bytes a second that a kernel reads or writes.
        end_rates: of a pipeline, the link's at a step's two ends; likewise.
    """

    seconds: Seconds
    out_rate: float
    back_rate: float
    copy_rate: float
    end_rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class Option:
    """A half under one placement: `held` as the walk has it, seconds that it costs a microbatch, bytes that cross the link."""

    held: Held
    seconds: float
    moved: int = 0


@dataclass(frozen=True)
class Placed:
    """What became of a half: bytes that its placement frees, and seconds that it costs, for one microbatch."""

    path: str
    placement: str
    rank: int
    freed: int
    seconds: float


@dataclass(frozen=True)
class Choice:
    """Of a rank.

    Attributes:
        placements: by half's path, those that are not kept.
        placed: the same, in forward order, with what they free and cost.
        seconds: that they cost a step, waits for the link included.
        waits: of them, waits.
        gap: by how much these seconds may miss the least there are, as a share of them.
        fit: the walk's verdict.
    """

    placements: Mapping[str, str]
    placed: tuple[Placed, ...]
    seconds: float
    waits: float
    gap: float
    fit: RankFit


def rank_options(
    trace: ModelTrace, stages: Mapping[int, StageLayers], allowed: frozenset[str], machine: Machine, **ways: Any
) -> tuple[dict[int, list[list[Option]]], dict[str, tuple[float, float]]]:
    """The options of a rank's halves by stage, in forward order and the one that keeps first, and the halves' seconds by path.

    Args:
        allowed: placements besides "keep". One that frees nothing of a half is none of its options.
        ways: see `forebay.estimate.walk.sublayers_of`, but for the placements.
    """
    found: dict[int, list[list[Option]]] = {}
    times: dict[str, tuple[float, float]] = {}
    for number, stage in stages.items():
        parts = parts_by_path(trace, stage, ways["prefix"])
        laid = [
            sublayers_of(trace, stage, dict.fromkeys(parts, placement), **ways)
            for placement in ("keep", *sorted(allowed - {"keep"}))
        ]
        found[number] = []
        for kept, *others in zip(*laid, strict=True):
            part = parts[kept.path]
            freeing = [h for h in others if h.placement != kept.placement and h.held < kept.held]
            found[number].append([_option(part, h, machine, ways["recompute"]) for h in (kept, *freeing)])
            times[kept.path] = machine.seconds(part)
    return found, times


def parts_by_path(trace: ModelTrace, stage: StageLayers, prefix: str) -> dict[str, PartTrace]:
    """By path, as `sublayers_of` names them."""
    parts = {"embedding": trace.embedding, "head": trace.head}
    for number in stage.layers:
        parts[f"{prefix}.{number}.self_attn"] = trace.layers[number].attention
        parts[f"{prefix}.{number}.mlp"] = trace.layers[number].mlp
    return parts


def _option(part: PartTrace, held: Held, machine: Machine, recompute: str) -> Option:
    match held.placement:
        case "recompute":
            light = part.light is not None and recompute != "full"
            return Option(held, machine.seconds(part)[0] * (LIGHT if light else 1.0))
        case "offload":
            return Option(held, 0.0, part.saved)
        case "stash":  # written once more in forward, and read back
            return Option(held, 2 * part.stash[1] / machine.copy_rate)
    return Option(held, 0.0)


def choose(
    rank: int,
    state: RankState,
    stages: Mapping[int, Sequence[Sequence[Option]]],
    times: Mapping[str, tuple[float, float]],
    actions: Iterable[ActionLike],
    messages: int,
    budget: int,
    machine: Machine,
    waits: bool,
) -> Choice:
    """Choose an option of every half.

    Args:
        stages: by stage, its halves in forward order, each with its options, the one that keeps it first.
        times: by half's path, seconds of forward and backward.
        actions, messages: see `forebay.estimate.walk.fit_rank`.
        budget: bytes that the rank may hold; if no choice is within it, that with the lowest peak is given.
        waits: the run may wait for the link; else no more is offloaded than it carries.
    """
    todo = list(actions)
    kept = {number: [options[0].held for options in sublayers] for number, sublayers in stages.items()}
    walk = _PeakWalk(rank, state, kept, messages)
    for action in todo:
        walk.step(action)
    target = budget
    for _ in range(3):
        programme = _Programme(stages, times, walk, target, machine, waits)
        answer = programme.solve()
        chosen = programme.chosen(answer)
        fit = fit_rank(rank, state, {n: [o.held for o in chosen[n]] for n in stages}, todo, messages)
        over = fit.total - budget
        if over <= 0 or over > budget >> 10:
            break
        target -= over  # the solver's tolerance
    placed = tuple(
        Placed(o.held.path, o.held.placement, rank, options[0].held.held - o.held.held, o.seconds)
        for number, sublayers in stages.items()
        for options, o in zip(sublayers, chosen[number], strict=True)
        if o.held.placement != "keep"
    )
    seconds, waited = programme.seconds(answer)
    return Choice(
        {p.path: p.placement for p in placed}, placed, seconds, waited, 1.0 if answer is None else answer.gap, fit
    )


def by_kind(choices: Iterable[Choice]) -> list[dict[str, Any]]:
    """Placed halves of a rank that free and cost the same, together: `layers` are their numbers, figures those of one of them."""
    found: dict[Any, list[int]] = {}
    for choice in choices:
        for p in choice.placed:
            layer, _, sublayer = p.path.rpartition(".")
            key = p.rank, p.placement, sublayer, p.freed, p.seconds
            found.setdefault(key, []).append(int(layer.rpartition(".")[2]))
    names = ("rank", "placement", "half", "freed_bytes", "milliseconds")
    return [
        {**dict(zip(names, (*key[:4], key[4] * 1e3), strict=True)), "layers": sorted(n)} for key, n in found.items()
    ]


def sentences(choices: Sequence[Choice]) -> list[str]:
    """The same, for people; and what a step costs, of the rank that pays most."""
    found = []
    for row in by_kind(choices):
        several = "s" * (len(row["layers"]) > 1)
        found.append(
            f"rank {row['rank']}: {row['placement']} {row['half']} of layer{several} {_ranges(row['layers'])}; "
            f"each frees {format_bytes(row['freed_bytes'])} and costs {row['milliseconds']:.2f} ms a microbatch."
        )
    most = max(choices, key=lambda c: c.seconds, default=None)
    if most is not None:
        waits = f", {most.waits * 1e3:.1f} ms of them waits for the link" if most.waits > 1e-6 else ""
        found.append(f"Placements cost at most {most.seconds * 1e3:.1f} ms a step (rank {most.fit.rank}){waits}.")
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3, 5``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class _PeakWalk(Walk):
    """A walk that notes its different moments: how many microbatches each half holds, and which halves run."""

    def __init__(self, rank: int, state: RankState, stages: Mapping[int, Sequence[Held]], messages: int):
        super().__init__(rank, state, stages, messages)
        self._number = {h.path: i for i, h in enumerate(h for sublayers in stages.values() for h in sublayers)}
        self._saves = [h.held for sublayers in stages.values() for h in sublayers]
        self._counts = [0] * len(self._saves)
        self._in_sublayers = 0
        self.forwards = [0] * len(self._saves)
        self.moments: dict[tuple[tuple[int, ...], int | None, int | None], int] = {}

    def meet(self, f: Held | None, b: Held | None, what: str) -> None:
        """Note it, with the bytes that no placement changes."""
        super().meet(f, b, what)
        forward = None if f is None else self._number[f.path]
        backward = None if b is None else self._number[b.path]
        key = tuple(self._counts), forward, backward
        self.moments[key] = max(self.moments.get(key, 0), self.level - self._in_sublayers)
        for number, change in ((forward, 1), (backward, -1)):
            if number is not None:
                self._counts[number] += change
                self._in_sublayers += change * self._saves[number]
        if forward is not None:
            self.forwards[forward] += 1


class _Programme:
    """Memory in units of the budget, time in units of the plain step."""

    def __init__(
        self,
        stages: Mapping[int, Sequence[Sequence[Option]]],
        times: Mapping[str, tuple[float, float]],
        walk: _PeakWalk,
        budget: int,
        machine: Machine,
        waits: bool,
    ):
        self._stages, self._times, self._walk, self._budget = stages, times, walk, budget
        self._sublayers = [options for sublayers in stages.values() for options in sublayers]
        self._plain = (
            sum(n * sum(times[o[0].held.path]) for n, o in zip(walk.forwards, self._sublayers, strict=True)) or 1.0
        )
        self._programme = Programme()
        self._over = self._programme.variable(cost=_MISSING)
        self._waits: list[tuple[int, int]] = []  # variable, and how often a step waits so
        self._choices = [self._choice(i, options, machine) for i, options in enumerate(self._sublayers)]
        self._memory()
        first = 0
        for sublayers in stages.values():
            numbers = range(first, first + len(sublayers))
            first += len(sublayers)
            self._order(numbers)
            self._link(numbers, 0, machine.out_rate, waits)
            self._link(numbers, 1, machine.back_rate, waits)

    def solve(self) -> Answer | None:
        """The best answer found in time."""
        return self._programme.solve(_SECONDS, _GAP)

    def chosen(self, answer: Answer | None) -> dict[int, list[Option]]:
        """By stage, an option of every half; without an answer all are kept."""
        if answer is None:
            return {number: [options[0] for options in sublayers] for number, sublayers in self._stages.items()}
        picked = iter(zip(self._sublayers, self._choices, strict=True))
        found: dict[int, list[Option]] = {}
        for number, sublayers in self._stages.items():
            found[number] = []
            for _ in sublayers:
                options, choice = next(picked)
                found[number].append(max(zip(options, choice, strict=True), key=lambda pair: answer.values[pair[1]])[0])
        return found

    def seconds(self, answer: Answer | None) -> tuple[float, float]:
        """That the chosen options cost a step, with waits, and the waits."""
        if answer is None:
            return 0.0, 0.0
        waits = sum(times * answer.values[v] for v, times in self._waits) * self._plain
        cost = sum(
            times * option.seconds
            for times, options, choice in zip(self._walk.forwards, self._sublayers, self._choices, strict=True)
            for option, variable in zip(options, choice, strict=True)
            if answer.chosen(variable)
        )
        return cost + waits, waits

    def _choice(self, number: int, options: Sequence[Option], machine: Machine) -> list[int]:
        times, found = self._walk.forwards[number], []
        late = 1 + number / len(self._sublayers)  # earlier halves wait longer: of equal ones they leave
        for option in options:
            moving = late * option.moved * (1 / machine.out_rate + 1 / machine.back_rate) * _MOVING
            found.append(self._programme.choice(times * (option.seconds + moving) / self._plain))
        self._programme.row([(v, 1.0) for v in found], 1.0, 1.0)
        return found

    def _memory(self) -> None:
        """What the walk has at each moment, as a sum over choices; what is held is that of the moment before, changed."""
        p, before, held = self._programme, [0] * len(self._sublayers), self._programme.variable(upper=0.0)
        for (counts, forward, backward), fixed in self._walk.moments.items():
            change = [
                (v, -(n - m) * o.held.held / self._budget)
                for n, m, options, choice in zip(counts, before, self._sublayers, self._choices, strict=True)
                if n != m
                for o, v in zip(options, choice, strict=True)
            ]
            if change:
                now = p.variable()
                p.row([(now, 1.0), (held, -1.0), *change], 0.0, 0.0)
                before, held = list(counts), now
            running = [
                (v, (o.held.forward if number == forward else o.held.backward) / self._budget)
                for number in {forward, backward} - {None}
                if number is not None
                for o, v in zip(self._sublayers[number], self._choices[number], strict=True)
            ]
            p.row([(held, 1.0), *running, (self._over, -1.0)], high=(self._budget - fixed) / self._budget)

    def _order(self, numbers: Sequence[int]) -> None:
        """Of many equal halves none is recomputed or stashed behind one that is kept."""
        equal: dict[Any, list[int]] = {}
        for number in numbers:
            ways = [(o.held, o.seconds) for o in self._sublayers[number]]
            kind = tuple((h.placement, h.held, h.forward, h.backward, seconds) for h, seconds in ways)
            equal.setdefault(kind, []).append(number)
        for same in equal.values():
            for one, other in pairwise(same) if len(same) >= _MANY else ():
                later = [
                    (v, 1.0)
                    for o, v in zip(self._sublayers[other][1:], self._choices[other][1:], strict=True)
                    if not o.moved
                ]
                self._programme.row([(self._choices[one][0], 1.0), *later], high=1.0)

    def _link(self, numbers: Sequence[int], way: int, rate: float, waits: bool) -> None:
        """Of a pass through a stage in the order of forward: bytes follow their half out; so in backward, reversed.

        By the end of a head's forward, which has none, all are gone.
        """
        p, last = self._programme, None
        before: list[tuple[int, float]] = []
        for number in numbers:
            own = [
                (v, o.moved / rate / self._plain)
                for o, v in zip(self._sublayers[number], self._choices[number], strict=True)
                if o.moved
            ]
            queue = p.variable()  # seconds of copies under way when the half's own are added
            p.row([(queue, 1.0), *((v, -f) for v, f in own)], low=0.0)
            path = self._sublayers[number][0].held.path
            p.row([(queue, 1.0), *((v, -f) for v, f in (*own, *(before if path != "head" else ())))], high=0.0)
            if last is not None:
                seconds = self._times[path][way] / self._plain
                terms = [(queue, 1.0), (last, -1.0), *((v, -f) for v, f in own)]
                if waits:
                    wait = p.variable(cost=float(self._walk.forwards[number]))
                    self._waits.append((wait, self._walk.forwards[number]))
                    terms.append((wait, 1.0))
                p.row(terms, low=-seconds)
            last, before = queue, own
