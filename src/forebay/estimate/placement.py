"""Chooses placements for a rank's sublayers before anything runs: those that fit a budget and cost the least time.

Input: the options of a rank's sublayers (`rank_options`), the levels of a walk in which all are kept, and a `Machine`. Output: a
`Choice`: a placement for every sublayer, with the bytes that it frees and the seconds that it costs. The mixed-integer program
has a row for each distinct level: what the walk found, with each sublayer's bytes under its placement in place of those that it
keeps. docs/solver.md has the mathematics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from forebay.estimate.types import ModelTrace, PartTrace, StageLayers
from forebay.estimate.walk import StepLevel
from forebay.memory.solver import Answer, Program
from forebay.memory.timeline import LIGHT_RECOMPUTE_SHARE
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
    """A sublayer, embedding or head under one placement. Bytes and seconds of a microbatch.

    Attributes:
        saved: that autograd saves.
        held: on the device from forward to backward.
        forward, backward: while it runs, besides what it needs if it is kept.
        seconds: that the placement costs.
        moved: over the link, each way.
    """

    path: str
    placement: str
    saved: int
    held: int
    forward: int = 0
    backward: int = 0
    seconds: float = 0.0
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
        peak: bytes at the highest level, as the program counts them.
    """

    rank: int
    placements: Mapping[str, str]
    placed: tuple[Placed, ...]
    seconds: float
    waits: float
    gap: float
    peak: int


def rank_options(
    trace: ModelTrace,
    stages: Mapping[int, StageLayers],
    allowed: frozenset[str],
    machine: Machine,
    prefix: str,
    recompute: str,
) -> dict[int, list[list[Option]]]:
    """The options of a rank's sublayers by stage, in forward order with "keep" first; embedding and head are kept.

    Args:
        allowed: placements besides "keep". A sublayer has those that free something.
        recompute: see `[memory]`.
    """
    found: dict[int, list[list[Option]]] = {}
    for number, stage in stages.items():
        found[number] = []
        for path, part in parts_by_path(trace, stage, prefix).items():
            more = shared_bytes(trace, stage, path, prefix)
            kept = option(path, part, "keep", recompute, machine, more)
            others = [
                option(path, part, p, recompute, machine, more) for p in sorted(allowed - {"keep"}) if "." in path
            ]
            found[number].append([kept, *(other for other in others if other.held < kept.held)])
    return found


def parts_by_path(trace: ModelTrace, stage: StageLayers, prefix: str) -> dict[str, PartTrace]:
    """The traces of a stage's parts by path, in forward order."""
    parts = {"embedding": trace.embedding} if stage.embedding else {}
    for number in stage.layers:
        parts |= {f"{prefix}.{number}.{name}": part for name, part in trace.layers[number].sublayers}
    return parts | ({"head": trace.head} if stage.head else {})


def shared_bytes(trace: ModelTrace, stage: StageLayers, path: str, prefix: str) -> int:
    """Bytes that a part holds whatever its placement: what layers share, and the load-balancing loss's."""
    if path == f"{prefix}.{stage.layers[0]}.self_attn":
        return trace.shared
    moe = path.endswith(".mlp") and trace.layers[int(path.split(".")[-2])].is_moe
    return trace.balance if moe else 0


def option(
    path: str,
    part: PartTrace,
    placement: str,
    recompute: str,
    machine: Machine,
    more: int = 0,
    carried: int | None = None,
) -> Option:
    """A part under a placement.

    Args:
        more: bytes that it holds besides.
        carried: bytes that an offloaded part sends to the host; None means all.
    """
    saved, seconds = part.saved, machine.seconds(part)[0]
    match placement:
        case "recompute" if part.light is not None and recompute != "full":
            held, backward = part.light  # "save-dispatch" holds less, and is counted as "light"
            again = LIGHT_RECOMPUTE_SHARE * seconds
            return Option(path, placement, saved, held + more, 0, backward - part.backward, again)
        case "recompute":
            again = max(part.forward - part.backward, saved)
            return Option(path, placement, saved, min(part.inputs, saved) + more, 0, again, seconds)
        case "offload":  # two sublayers are in transfer at any time
            leaves = saved if carried is None else min(carried, saved)
            return Option(path, placement, saved, saved - leaves + more, leaves, 2 * leaves, 0.0, leaves)
        case "stash":  # one more write in forward, and a read
            capacity, arrived = part.stash
            less, copies = capacity - arrived, 2 * arrived / machine.copy_rate
            return Option(path, placement, saved, saved - less + more, 0, less, copies)
    return Option(path, "keep", saved, saved + more)


def choose(
    rank: int,
    options: Mapping[int, Sequence[Sequence[Option]]],
    times: Mapping[str, tuple[float, float]],
    levels: Iterable[StepLevel],
    microbatches: int,
    budget: int,
    machine: Machine,
    waits: bool,
) -> Choice | None:
    """Choose an option for every sublayer. None if the link cannot carry what has to leave, or no answer was found in time.

    Args:
        options: see `rank_options`.
        times: seconds of a microbatch's forward and backward, by path.
        levels: of a walk with all sublayers kept.
        budget: bytes in use that the rank may reach; if no choice fits, the one with the lowest peak is returned.
        waits: the run may wait for the link; else no more is offloaded than the link carries.
    """
    program = _PlacementProgram(options, times, _rows(levels, options), microbatches, budget, machine, waits)
    answer = program.solve()
    if answer is None:
        return None
    chosen = program.chosen(answer)
    placed = tuple(
        Placed(o.path, o.placement, rank, options_[0].held - o.held, o.seconds)
        for options_, o in zip(program.sublayers, chosen, strict=True)
        if o.placement != "keep"
    )
    seconds, waited = program.seconds(answer)
    placements = {p.path: p.placement for p in placed}
    return Choice(rank, placements, placed, seconds, waited, answer.gap, program.peak(chosen))


_Row = tuple[Mapping[str, int], str, str]  # microbatches by sublayer, the sublayers that run forward and backward


def _rows(levels: Iterable[StepLevel], options: Mapping[int, Sequence[Sequence[Option]]]) -> list[tuple[_Row, int]]:
    """Distinct levels, and their bytes besides what sublayers hold."""
    held = {own[0].path: own[0].held for sublayers in options.values() for own in sublayers}
    found: dict[Any, tuple[_Row, int]] = {}
    for level in levels:
        live = {path: count for path, count in level.live.items() if count and path in held}
        runs = level.runs.get("forward", ""), level.runs.get("backward", "")
        key = (*runs, *live.items())
        fixed = level.allocated - sum(count * held[path] for path, count in live.items())
        if key not in found or fixed > found[key][1]:
            found[key] = (live, *runs), fixed
    return list(found.values())


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
        found.append(f"Placements cost at most {most.seconds * 1e3:.1f} ms a step (rank {most.rank}){waits}.")
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


class _PlacementProgram:
    """The mixed-integer program. Memory is in units of the budget, time in units of the step without placements."""

    def __init__(
        self,
        stages: Mapping[int, Sequence[Sequence[Option]]],
        times: Mapping[str, tuple[float, float]],
        rows: Sequence[tuple[_Row, int]],
        microbatches: int,
        budget: int,
        machine: Machine,
        waits: bool,
    ):
        self._times, self._rows, self._microbatches, self._budget = times, rows, microbatches, budget
        self.sublayers = [options for sublayers in stages.values() for options in sublayers]
        self._numbers = {options[0].path: number for number, options in enumerate(self.sublayers)}
        self._plain = microbatches * sum(sum(times[options[0].path]) for options in self.sublayers) or 1.0
        self._program = Program()
        self._over = self._program.variable(cost=_MISSING)
        self._waits: list[int] = []
        self._choices = [self._choice(i, options, machine) for i, options in enumerate(self.sublayers)]
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

    def chosen(self, answer: Answer) -> list[Option]:
        """The option of every sublayer."""
        return [
            max(zip(options, choice, strict=True), key=lambda pair: answer.values[pair[1]])[0]
            for options, choice in zip(self.sublayers, self._choices, strict=True)
        ]

    def peak(self, chosen: Sequence[Option]) -> int:
        """Bytes at the highest level."""
        by_path = {o.path: o for o in chosen}
        none = Option("", "keep", 0, 0)

        def level(row: _Row, fixed: int) -> int:
            live, forward, backward = row
            held = sum(count * by_path[path].held for path, count in live.items())
            return fixed + held + by_path.get(forward, none).forward + by_path.get(backward, none).backward

        return max(level(*row) for row in self._rows)

    def seconds(self, answer: Answer) -> tuple[float, float]:
        """The cost of the chosen options in a step, waits included, and the waits."""
        waits = self._microbatches * sum(answer.values[v] for v in self._waits) * self._plain
        return self._microbatches * sum(option.seconds for option in self.chosen(answer)) + waits, waits

    def _choice(self, number: int, options: Sequence[Option], machine: Machine) -> list[int]:
        found = []
        late = 1 + number / len(self.sublayers)  # of equal sublayers the earlier ones leave: they wait longer
        for option in options:
            moving = late * option.moved * (1 / machine.out_rate + 1 / machine.back_rate) * _MOVING
            found.append(self._program.choice(self._microbatches * (option.seconds + moving) / self._plain))
        self._program.row([(v, 1.0) for v in found], 1.0, 1.0)
        return found

    def _memory(self) -> None:
        """A row for each level. What is held is a variable: that of the level before, and the change."""
        p, held = self._program, self._program.variable(upper=0.0)
        before: Mapping[str, int] = {}
        for (live, forward, backward), fixed in self._rows:
            changed = [path for path in {**before, **live} if before.get(path) != live.get(path)]
            if changed:
                change = [
                    (v, -(live.get(path, 0) - before.get(path, 0)) * o.held / self._budget)
                    for path in changed
                    for o, v in self._pairs(path)
                ]
                now = p.variable()
                p.row([(now, 1.0), (held, -1.0), *change], 0.0, 0.0)
                before, held = live, now
            running = [(v, o.forward / self._budget) for o, v in self._pairs(forward) if o.forward]
            running += [(v, o.backward / self._budget) for o, v in self._pairs(backward) if o.backward]
            p.row([(held, 1.0), *running, (self._over, -1.0)], high=(self._budget - fixed) / self._budget)

    def _pairs(self, path: str) -> list[tuple[Option, int]]:
        """The options of a part and their variables; none for one that is not placed."""
        number = self._numbers.get(path)
        return [] if number is None else list(zip(self.sublayers[number], self._choices[number], strict=True))

    def _order(self, numbers: Sequence[int]) -> None:
        """Break the symmetry of many equal sublayers: none is recomputed or stashed after one that is kept."""
        equal: dict[Any, list[int]] = {}
        for number in numbers:
            kind = tuple(replace(o, path="") for o in self.sublayers[number])
            equal.setdefault(kind, []).append(number)
        for same in equal.values():
            for one, other in pairwise(same) if len(same) >= _MANY else ():
                later = [
                    (v, 1.0)
                    for o, v in zip(self.sublayers[other][1:], self._choices[other][1:], strict=True)
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
                for o, v in zip(self.sublayers[number], self._choices[number], strict=True)
                if o.moved
            ]
            queue = p.variable()  # seconds of copies in transfer when the sublayer's own are added
            p.row([(queue, 1.0), *((v, -f) for v, f in own)], low=0.0)
            path = self.sublayers[number][0].path
            p.row([(queue, 1.0), *((v, -f) for v, f in (*own, *(before if path != "head" else ())))], high=0.0)
            if last is not None:
                seconds = self._times[path][way] / self._plain
                terms = [(queue, 1.0), (last, -1.0), *((v, -f) for v, f in own)]
                if waits:
                    wait = p.variable(cost=float(self._microbatches))
                    self._waits.append(wait)
                    terms.append((wait, 1.0))
                p.row(terms, low=-seconds)
            last, before = queue, own
