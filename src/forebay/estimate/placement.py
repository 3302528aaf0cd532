"""Chooses placements for a rank's sublayers before anything runs: those that fit a budget and cost the least time.

Input: the options of a rank's sublayers (`rank_options`), its actions, and a `Machine`. Output: a `Choice`: a placement for
every sublayer, with the bytes that it frees and the seconds that it costs. A level of `forebay.estimate.walk` is a sum
over sublayers of what their placements hold, so the mixed-integer program has a row for each distinct level and is exact.
docs/solver.md has the mathematics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from forebay.estimate.fit import RankFit
from forebay.estimate.levels import SublayerMemory, Walk, fit_rank, sublayer_memory
from forebay.estimate.state import RankState
from forebay.estimate.types import ModelTrace, PartTrace, StageLayers
from forebay.memory.solver import Answer, Program
from forebay.memory.timeline import LIGHT_RECOMPUTE_SHARE
from forebay.pipeline.schedule import Action
from forebay.policy import format_bytes

_SECONDS = 1.0  # time limit for a rank; the ranks of DeepSeek-V3 on 512 GPUs take 0.02 to 0.1
_GAP = 2e-3
_MISSING = 1e3  # cost of exceeding the budget by all of itself, in plain steps: more than any placement costs
_MOVING = 1e-3  # cost of a second of transfer in seconds of waiting: prefers the answer that moves less
_MANY = 12  # equal sublayers of a stage from which on their order is fixed


class Seconds(Protocol):
    """Seconds by part."""

    def __call__(self, part: PartTrace) -> tuple[float, float]:
        """Of a microbatch's forward and backward."""


@dataclass(frozen=True)
class Machine:
    """What placements cost on a device.

    Attributes:
        out_rate, back_rate: bytes a second of the link to the host, with all GPUs of a host at once; see `Timeline`.
        copy_rate: bytes a second that a kernel reads or writes.
        end_rates: of a pipeline, the link's rates at the two ends of a step.
    """

    seconds: Seconds
    out_rate: float
    back_rate: float
    copy_rate: float
    end_rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class Option:
    """A sublayer under one placement: seconds that it costs a microbatch, and bytes that cross the link."""

    memory: SublayerMemory
    seconds: float
    moved: int = 0


@dataclass(frozen=True)
class Placed:
    """A sublayer's placement: bytes that it frees, and seconds that it costs, for one microbatch."""

    path: str
    placement: str
    rank: int
    freed: int
    seconds: float


@dataclass(frozen=True)
class Choice:
    """The placements of a rank.

    Attributes:
        placements: sublayer path to placement, without "keep".
        placed: the same, in forward order, with what they free and cost.
        seconds: cost of a step, waits for the link included.
        waits: seconds of waits among them.
        gap: share by which the cost may exceed the optimum.
        fit: the walk's highest level.
    """

    placements: Mapping[str, str]
    placed: tuple[Placed, ...]
    seconds: float
    waits: float
    gap: float
    fit: RankFit


def rank_options(
    trace: ModelTrace, stages: Mapping[int, StageLayers], allowed: frozenset[str], machine: Machine, **keywords: Any
) -> tuple[dict[int, list[list[Option]]], dict[str, tuple[float, float]]]:
    """The options of a rank's sublayers by stage, in forward order with "keep" first; and their seconds by path.

    Args:
        allowed: placements besides "keep". A sublayer has those that free something.
        keywords: of `forebay.estimate.levels.sublayer_memory`.
    """
    found: dict[int, list[list[Option]]] = {}
    times: dict[str, tuple[float, float]] = {}
    for number, stage in stages.items():
        parts = parts_by_path(trace, stage, keywords["prefix"])
        placed = [
            sublayer_memory(trace, stage, dict.fromkeys(parts, placement), **keywords)
            for placement in ("keep", *sorted(allowed - {"keep"}))
        ]
        found[number] = []
        for kept, *others in zip(*placed, strict=True):
            part = parts[kept.path]
            freeing = [h for h in others if h.placement != kept.placement and h.held < kept.held]
            found[number].append([_option(part, h, machine, keywords["recompute"]) for h in (kept, *freeing)])
            times[kept.path] = machine.seconds(part)
    return found, times


def parts_by_path(trace: ModelTrace, stage: StageLayers, prefix: str) -> dict[str, PartTrace]:
    """The traces of a stage by path, as `sublayer_memory` names them."""
    parts = {"embedding": trace.embedding, "head": trace.head}
    for number in stage.layers:
        parts |= {f"{prefix}.{number}.{name}": part for name, part in trace.layers[number].sublayers}
    return parts


def _option(part: PartTrace, memory: SublayerMemory, machine: Machine, recompute: str) -> Option:
    match memory.placement:
        case "recompute":
            light = part.light is not None and recompute != "full"
            return Option(memory, machine.seconds(part)[0] * (LIGHT_RECOMPUTE_SHARE if light else 1.0))
        case "offload":
            return Option(memory, 0.0, part.saved)
        case "stash":  # one more write in forward, and a read
            return Option(memory, 2 * part.stash[1] / machine.copy_rate)
    return Option(memory, 0.0)


def choose(
    rank: int,
    state: RankState,
    stages: Mapping[int, Sequence[Sequence[Option]]],
    times: Mapping[str, tuple[float, float]],
    actions: Iterable[Action],
    messages: int,
    budget: int,
    machine: Machine,
    waits: bool,
) -> Choice:
    """Choose an option for every sublayer.

    Args:
        stages, times: see `rank_options`.
        actions, messages: see `forebay.estimate.levels.fit_rank`.
        budget: bytes that the rank may hold; if no choice fits, the one with the lowest peak is returned.
        waits: the run may wait for the link; else no more is offloaded than the link carries.
    """
    todo = list(actions)
    kept = {number: [options[0].memory for options in sublayers] for number, sublayers in stages.items()}
    walk = _PeakWalk(rank, state, kept, messages)
    for action in todo:
        walk.step(action)
    target = budget
    for _ in range(3):
        program = _PlacementProgram(stages, times, walk, target, machine, waits)
        answer = program.solve()
        chosen = program.chosen(answer)
        fit = fit_rank(rank, state, {n: [o.memory for o in chosen[n]] for n in stages}, todo, messages)
        over = fit.total - budget
        if over <= 0 or over > budget >> 10:
            break
        target -= over  # within the solver's tolerance
    placed = tuple(
        Placed(o.memory.path, o.memory.placement, rank, options[0].memory.held - o.memory.held, o.seconds)
        for number, sublayers in stages.items()
        for options, o in zip(sublayers, chosen[number], strict=True)
        if o.memory.placement != "keep"
    )
    seconds, waited = program.seconds(answer)
    return Choice(
        {p.path: p.placement for p in placed}, placed, seconds, waited, 1.0 if answer is None else answer.gap, fit
    )


def by_kind(choices: Iterable[Choice]) -> list[dict[str, Any]]:
    """Sublayers of a rank that free and cost the same, together: `layers` are their numbers, figures those of one of them."""
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
    """The same as sentences, and the cost of a step on the rank where it is highest."""
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
    """A walk that records its distinct levels: how many microbatches each sublayer holds, and which sublayers run."""

    def __init__(self, rank: int, state: RankState, stages: Mapping[int, Sequence[SublayerMemory]], messages: int):
        super().__init__(rank, state, stages, messages)
        self._number = {h.path: i for i, h in enumerate(h for sublayers in stages.values() for h in sublayers)}
        self._saves = [h.held for sublayers in stages.values() for h in sublayers]
        self._counts = [0] * len(self._saves)
        self._in_sublayers = 0
        self.forwards = [0] * len(self._saves)
        self.levels: dict[tuple[tuple[int, ...], int | None, int | None], int] = {}

    def run_pair(self, f: SublayerMemory | None, b: SublayerMemory | None) -> None:
        """Record the level, as the bytes that no placement changes."""
        super().run_pair(f, b)
        forward = None if f is None else self._number[f.path]
        backward = None if b is None else self._number[b.path]
        key = tuple(self._counts), forward, backward
        self.levels[key] = max(self.levels.get(key, 0), self.level - self._in_sublayers)
        for number, change in ((forward, 1), (backward, -1)):
            if number is not None:
                self._counts[number] += change
                self._in_sublayers += change * self._saves[number]
        if forward is not None:
            self.forwards[forward] += 1


class _PlacementProgram:
    """The mixed-integer program. Memory is in units of the budget, time in units of the step without placements."""

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
            sum(n * sum(times[o[0].memory.path]) for n, o in zip(walk.forwards, self._sublayers, strict=True)) or 1.0
        )
        self._program = Program()
        self._over = self._program.variable(cost=_MISSING)
        self._waits: list[tuple[int, int]] = []  # variable, and how often it occurs in a step
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
        return self._program.solve(_SECONDS, _GAP)

    def chosen(self, answer: Answer | None) -> dict[int, list[Option]]:
        """By stage, the option of every sublayer; without an answer all are kept."""
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
        """The cost of the chosen options in a step, waits included, and the waits."""
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
        late = 1 + number / len(self._sublayers)  # of equal sublayers the earlier ones leave: they wait longer
        for option in options:
            moving = late * option.moved * (1 / machine.out_rate + 1 / machine.back_rate) * _MOVING
            found.append(self._program.choice(times * (option.seconds + moving) / self._plain))
        self._program.row([(v, 1.0) for v in found], 1.0, 1.0)
        return found

    def _memory(self) -> None:
        """A row for each level. What is held is a variable: that of the level before, and the change."""
        p, before, held = self._program, [0] * len(self._sublayers), self._program.variable(upper=0.0)
        for (counts, forward, backward), fixed in self._walk.levels.items():
            change = [
                (v, -(n - m) * o.memory.held / self._budget)
                for n, m, options, choice in zip(counts, before, self._sublayers, self._choices, strict=True)
                if n != m
                for o, v in zip(options, choice, strict=True)
            ]
            if change:
                now = p.variable()
                p.row([(now, 1.0), (held, -1.0), *change], 0.0, 0.0)
                before, held = list(counts), now
            running = [
                (v, (o.memory.forward if number == forward else o.memory.backward) / self._budget)
                for number in {forward, backward} - {None}
                if number is not None
                for o, v in zip(self._sublayers[number], self._choices[number], strict=True)
            ]
            p.row([(held, 1.0), *running, (self._over, -1.0)], high=(self._budget - fixed) / self._budget)

    def _order(self, numbers: Sequence[int]) -> None:
        """Break the symmetry of many equal sublayers: none is recomputed or stashed after one that is kept."""
        equal: dict[Any, list[int]] = {}
        for number in numbers:
            options = [(o.memory, o.seconds) for o in self._sublayers[number]]
            kind = tuple((h.placement, h.held, h.forward, h.backward, seconds) for h, seconds in options)
            equal.setdefault(kind, []).append(number)
        for same in equal.values():
            for one, other in pairwise(same) if len(same) >= _MANY else ():
                later = [
                    (v, 1.0)
                    for o, v in zip(self._sublayers[other][1:], self._choices[other][1:], strict=True)
                    if not o.moved
                ]
                self._program.row([(self._choices[one][0], 1.0), *later], high=1.0)

    def _link(self, numbers: Sequence[int], way: int, rate: float, waits: bool) -> None:
        """The link, of which the walk knows nothing: in a pass through a stage at most the bytes of the last two
        sublayers may be in transfer, and a sublayer waits until that is so. Without `waits`, only what the link carries
        is offloaded.

        Backward is the same in reverse. By the end of a head's forward, which offloads nothing, all transfers are done.
        """
        p, last = self._program, None
        before: list[tuple[int, float]] = []
        for number in numbers:
            own = [
                (v, o.moved / rate / self._plain)
                for o, v in zip(self._sublayers[number], self._choices[number], strict=True)
                if o.moved
            ]
            queue = p.variable()  # seconds of copies in transfer when the sublayer's own are added
            p.row([(queue, 1.0), *((v, -f) for v, f in own)], low=0.0)
            path = self._sublayers[number][0].memory.path
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
