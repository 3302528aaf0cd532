"""Which decoder layers each stage of a pipeline has, from what the layers cost. No device, no tensors.

In: a `LayerCost` for every decoder layer, the embedding and the head; a schedule; pipeline ranks; microbatches. Out: a
`Partition`. Nothing is kept. Stages are numbered along the forward; stage 0 has the embedding too, the last one the head.

    1f1b              pp stages, stage s on rank s
    interleaved-1f1b  chunks * pp stages, stage s on rank s % pp
    zbv, dualpipev    2 * pp stages in a V: rank r has r and 2 * pp - 1 - r, so rank 0 has embedding and head

What is best, in this order, where a rank's time is the sum over its stages and its memory the sum of in-flight
microbatches x memory of one:

    1. every rank within the budget, if there is one
    2. the slowest rank as fast as can be; from here on, whatever is within 1 % of that counts as equally fast
    3. where a rank has several stages, stages alike (least squares): in a V its two run at once, one forward and one
       backward, and a short one cannot hide a long one; interleaved ranks wait for each other stage by stage. Before
       memory, because making the first stages single layers would always save some: a budget can ask for that
    4. the smallest peak memory over ranks
    5. ranks alike (least squares), and layers that are left over on inner stages, away from embedding and head

How: a rank's stages are a *group*, which takes layers from the front, in a V from the back too. Groups come from the
outside inwards, so a state of the dynamic programme is the range [i, j) of layers that are still free: j stays at the end
without a V. A state whose rest cannot fit the remaining groups under the bound is dropped; the bound starts at what no
partition can be below and widens until there is a solution, which is then the best. Few states lie between: 128 layers on
32 stages take about a second. Costs become integers first, so equal is equal.

Interleaved ranks couple stages that lie apart, for which this state is too small. There the stages are balanced exactly,
and then single layers moved as long as that makes the ranks better: good, not proven to be the best.

Worked example: 12 equal layers and a head that weighs 4, dualpipev on 2 ranks: 3, 4, 4 and 1 layers. Both ranks have 8 of
the 16; of the even split's, which is 3, 3, 3 and 3, rank 0 has 10.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from forebay.config import stages_of

_V = ("zbv", "dualpipev")
_ALIKE = 100  # ranks that differ by one part in this many are equally fast
_BITS = 52  # of the sum of all costs as an integer: what a float holds exactly
_SCALE = 1 << _BITS
_NO_BOUND = 1 << 100


@dataclass(frozen=True)
class LayerCost:
    """What one microbatch costs in a layer: time of forward and backward in any unit, bytes saved for backward."""

    time: float
    memory: float


@dataclass(frozen=True)
class Partition:
    """Layers by stage, and who has the stages.

    Attributes:
        layers: by stage, the numbers of its decoder layers.
        ranks: by stage, its pipeline rank.
        time: by rank, of one microbatch through all its stages; None where no costs were given.
        memory: by rank, bytes saved for backward at most; None where no costs were given.
    """

    layers: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    time: tuple[float, ...] | None = None
    memory: tuple[float, ...] | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of layers by stage."""
        return tuple(len(layers) for layers in self.layers)

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the forward."""
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)

    @property
    def balance(self) -> float | None:
        """Time of the slowest rank over the mean: 1.0 is perfect; None without costs."""
        return None if not self.time else max(self.time) * len(self.time) / (sum(self.time) or 1.0)


def rank_of(schedule: str, stage: int, pp: int) -> int:
    """The pipeline rank that has `stage`."""
    return min(stage, 2 * pp - 1 - stage) if schedule in _V else stage % pp


def in_flight(schedule: str, stage: int, pp: int, microbatches: int, chunks: int = 2) -> int:
    """Microbatches whose activations `stage` holds at most: forwards begun less (input) backwards done.

    Without interleaving it is the number of stages from this one to the end, itself included: the first forwards of a stage
    are followed by its first backward when the loss has come back to it. In the schedules of torch 2.11 to 2.13 that is so
    for the V's as well: rank r runs 2 pp - r forwards of its first stage before the first backward, r + 1 of its second.

    Raises:
        ValueError: a stage there is not, or microbatches that the interleaved schedule cannot divide into rounds.
    """
    stages = stages_of(schedule, pp, chunks)
    if not 0 <= stage < stages:
        raise ValueError(f"there is no stage {stage} of {schedule} on {pp} ranks; valid are 0 to {stages - 1}")
    if schedule != "interleaved-1f1b":
        return min(microbatches, stages - stage)
    return _interleaved_in_flight(stage, pp, microbatches, chunks)


def _interleaved_in_flight(stage: int, pp: int, microbatches: int, chunks: int) -> int:
    """Counted along the plan: rounds of microbatches, chunk by chunk, forwards ahead of backwards by the warm-up."""
    rounds = max(1, microbatches // pp)
    if microbatches % rounds:
        raise ValueError(
            f"interleaved-1f1b on {pp} ranks cannot divide {microbatches} microbatches into {rounds} rounds; "
            f"valid near that are {microbatches // rounds * rounds} and {-(-microbatches // rounds) * rounds}"
        )
    chunk, rank = divmod(stage, pp)
    width, total = microbatches // rounds, microbatches * chunks
    ahead = min((chunks - 1) * width + 2 * (pp - 1 - rank), total)
    held = most = 0
    for step in range(total + ahead):
        if step < total:
            held += (step // width) % chunks == chunk
            most = max(most, held)
        if step >= ahead:
            held -= chunks - 1 - ((step - ahead) // width) % chunks == chunk
    return most


def even_partition(n_layers: int, schedule: str, pp: int, chunks: int = 2) -> Partition:
    """As many layers on every stage, whatever they cost; one more on the innermost stages where that does not divide.

    Raises:
        ValueError: more stages than layers.
    """
    stages = stages_of(schedule, pp, chunks)
    _check_stages(stages, n_layers, schedule, pp)
    inner = sorted(range(stages), key=lambda s: (abs(2 * s - (stages - 1)), -s))[: n_layers % stages]
    return of_counts([n_layers // stages + (s in inner) for s in range(stages)], n_layers, schedule, pp, chunks)


def of_counts(counts: Sequence[int], n_layers: int, schedule: str, pp: int, chunks: int = 2) -> Partition:
    """A partition given as the number of layers of each stage.

    Raises:
        ValueError: not one number for each stage, a stage without a layer, or another sum than `n_layers`.
    """
    stages = stages_of(schedule, pp, chunks)
    if len(counts) != stages:
        raise ValueError(f"the partition names {len(counts)} stages; {schedule} on {pp} ranks has {stages}")
    for stage, count in enumerate(counts):
        if count < 1:
            raise ValueError(f"stage {stage} of the partition has {count} layers; every stage needs at least one")
    if sum(counts) != n_layers:
        raise ValueError(f"the partition has {sum(counts)} layers and the model {n_layers}; valid is that sum exactly")
    cuts = list(accumulate(counts, initial=0))
    layers = tuple(tuple(range(low, high)) for low, high in pairwise(cuts))
    return Partition(layers, tuple(rank_of(schedule, s, pp) for s in range(stages)))


def with_costs(
    partition: Partition,
    layers: Sequence[LayerCost],
    schedule: str,
    *,
    embedding: LayerCost,
    head: LayerCost,
    microbatches: int,
) -> Partition:
    """The same partition with time and memory of every rank."""
    pp, stages = max(partition.ranks) + 1, len(partition.layers)
    time, memory = [0.0] * pp, [0.0] * pp
    for stage, (numbers, rank) in enumerate(zip(partition.layers, partition.ranks, strict=True)):
        parts = [layers[n] for n in numbers] + [embedding] * (stage == 0) + [head] * (stage == stages - 1)
        time[rank] += sum(part.time for part in parts)
        held = in_flight(schedule, stage, pp, microbatches, stages // pp)
        memory[rank] += held * sum(part.memory for part in parts)
    return replace(partition, time=tuple(time), memory=tuple(memory))


def partition_layers(
    layers: Sequence[LayerCost],
    schedule: str,
    pp: int,
    *,
    embedding: LayerCost,
    head: LayerCost,
    microbatches: int,
    chunks: int = 2,
    budget: float | None = None,
) -> Partition:
    """The best partition, as this file's docstring says what that is.

    Args:
        layers: of all decoder layers, in order.
        schedule: one of `SCHEDULES`.
        pp: pipeline ranks.
        embedding, head: what the first and the last stage have besides.
        microbatches: of a step, for one pipeline.
        chunks: stages of a rank, for "interleaved-1f1b".
        budget: bytes of saved activations that no rank may exceed.

    Raises:
        ValueError: more stages than layers, or a budget that no partition meets.
    """
    stages = stages_of(schedule, pp, chunks)
    _check_stages(stages, len(layers), schedule, pp)
    held = [in_flight(schedule, s, pp, microbatches, chunks) for s in range(stages)]
    costs = _Costs.of(layers, embedding, head, held, [rank_of(schedule, s, pp) for s in range(stages)])
    bound = _NO_BOUND if budget is None else int(budget * costs.memory_scale)
    interleaved, v = schedule == "interleaved-1f1b", schedule in _V
    best = _interleaved(costs, bound) if interleaved else _exact(_Groups(costs, v), bound)
    if best is None:
        least = _leanest_found(costs)[0] if interleaved else _least_peak(_Groups(costs, v))
        smallest = f"smallest {'found' if interleaved else 'possible'} is {math.ceil(least / costs.memory_scale)}"
        raise ValueError(
            f"no partition of {len(layers)} layers by {schedule} on {pp} ranks keeps every rank within the budget of "
            f"{budget:.0f} bytes; the {smallest}"
        )
    found = of_counts([b - a for a, b in pairwise(best)], len(layers), schedule, pp, chunks)
    return with_costs(found, layers, schedule, embedding=embedding, head=head, microbatches=microbatches)


def _check_stages(stages: int, n_layers: int, schedule: str, pp: int) -> None:
    if stages > n_layers:
        raise ValueError(
            f"{schedule} on {pp} ranks has {stages} stages, and each needs at least one of the model's {n_layers} decoder "
            f"layers; valid is at most {n_layers // (stages // pp)} ranks"
        )


@dataclass(frozen=True)
class _Costs:
    """Integer costs. ``time[i]`` and ``memory[i]`` are sums over the layers before i; ``extra_*`` and ``held`` by stage."""

    time: list[int]
    memory: list[int]
    extra_time: list[int]
    extra_memory: list[int]
    held: list[int]
    ranks: list[int]
    memory_scale: float

    @classmethod
    def of(
        cls, layers: Sequence[LayerCost], embedding: LayerCost, head: LayerCost, held: list[int], ranks: list[int]
    ) -> _Costs:
        every = [*layers, embedding, head]
        ts, ms = _unit([c.time for c in every]), _unit([c.memory for c in every])
        extra_time, extra_memory = [0] * len(held), [0] * len(held)
        for stage, cost in ((0, embedding), (-1, head)):
            extra_time[stage] += round(cost.time * ts)
            extra_memory[stage] += round(cost.memory * ms)
        time = list(accumulate((round(c.time * ts) for c in layers), initial=0))
        memory = list(accumulate((round(c.memory * ms) for c in layers), initial=0))
        return cls(time, memory, extra_time, extra_memory, held, ranks, ms)

    def time_of(self, stage: int, low: int, high: int) -> int:
        return self.time[high] - self.time[low] + self.extra_time[stage]

    def memory_of(self, stage: int, low: int, high: int) -> int:
        return self.held[stage] * (self.memory[high] - self.memory[low] + self.extra_memory[stage])


def _unit(values: list[float]) -> float:
    """A power of two, so that whole numbers (FLOPs, bytes) stay exact, that makes the sum as large as `_SCALE` allows."""
    return 2.0 ** (_BITS - math.frexp(sum(values))[1])


class _Take(NamedTuple):
    """What a group takes of the free layers [low, high): it leaves [low2, high2). ``first``, ``second``: its stages' time."""

    low2: int
    high2: int
    first: int
    second: int
    memory: int  # bytes of both, all microbatches in flight
    outer: int  # layers, weighed by how far out the stages are


class _Groups:
    """The dynamic programme over groups, from the outside inwards. `v`: groups of two stages, which meet in the middle."""

    def __init__(self, costs: _Costs, v: bool):
        stages = len(costs.held)
        self.costs, self.v, self.n = costs, v, len(costs.time) - 1
        self.pairs = [(s, stages - 1 - s if v else None) for s in range(stages // 2 if v else stages)]
        self.outer = [(stages - 1 - 2 * first) ** 2 for first, _ in self.pairs]

    def search(
        self, most_time: int, most_memory: int, start: Any, extend: Callable[[Any, _Take], Any]
    ) -> tuple[Any, list[int]] | None:
        """The least value over all partitions within the bounds, and its cuts; None if there is no such partition.

        `extend` is the value of a partition with one more group. It must not make of a smaller value a larger one.
        """
        rests = self._rests(most_time, most_memory)
        states: dict[tuple[int, int], tuple[Any, tuple[int, int] | None]] = {(0, self.n): (start, None)}
        history = [states]
        for group in range(len(self.pairs)):
            after: dict[tuple[int, int], tuple[Any, tuple[int, int] | None]] = {}
            for state, (value, _) in states.items():
                for take in self._takes(group, *state, most_time, most_memory, rests[group]):
                    candidate, reached = extend(value, take), (take.low2, take.high2)
                    known = after.get(reached)
                    if known is None or candidate < known[0]:
                        after[reached] = candidate, state
            history.append(after)
            states = after
        if not states:
            return None
        end = min(states, key=lambda state: (states[state][0], state))
        return states[end][0], self._cuts(history, end)

    def least_time(self) -> int:
        """What the slowest rank cannot be below: the mean, or a rank's embedding and head alone."""
        costs = self.costs
        total = costs.time[-1] + sum(costs.extra_time)
        return max(-(-total // len(self.pairs)), *(sum(costs.extra_time[s] for s in _stages(p)) for p in self.pairs))

    def least_memory(self) -> int:
        """What the peak cannot be below: every layer where it weighs least, ranks filled alike."""
        room = sum(1 / min(self.costs.held[s] for s in _stages(pair)) for pair in self.pairs)
        return int(self.costs.memory[-1] / room)

    def _cuts(self, history: list[Any], end: tuple[int, int]) -> list[int]:
        state: tuple[int, int] | None = end
        cuts = set()
        for states in reversed(history):
            assert state is not None
            cuts |= set(state)
            state = states[state][1]
        return sorted(cuts)

    def _rests(self, most_time: int, most_memory: int) -> list[tuple[int, int, int]]:
        """For each group: layers that those after it need, and the time and memory (of layers, once) they can take."""
        rests = []
        layers = time = memory = 0
        for pair in reversed(self.pairs):
            rests.append((layers, time, memory))
            stages = _stages(pair)
            layers += len(stages)
            time += most_time - sum(self.costs.extra_time[s] for s in stages)
            memory += most_memory // min(self.costs.held[s] for s in stages)
        return rests[::-1]

    def _takes(
        self, group: int, low: int, high: int, most_time: int, most_memory: int, rest: tuple[int, int, int]
    ) -> Iterator[_Take]:
        """What a group can take of the free layers [low, high) such that it and the groups after it stay within bounds."""
        first, second = self.pairs[group]
        costs, last = self.costs, group == len(self.pairs) - 1
        layers, rest_time, rest_memory = rest
        for low2 in range(low + 1, high - layers + 1):
            time, memory = costs.time_of(first, low, low2), costs.memory_of(first, low, low2)
            if time > most_time or memory > most_memory:
                return
            # the largest end of the free layers that the other groups can still take
            furthest = min(
                bisect_right(costs.time, costs.time[low2] + rest_time) - 1,
                bisect_right(costs.memory, costs.memory[low2] + rest_memory) - 1,
            )
            if second is None:
                if high <= furthest and (not last or low2 == high):
                    yield _Take(low2, high, time, 0, memory, (low2 - low) * self.outer[group])
                continue
            for high2 in range(min(high - 1, furthest), low2 + layers - 1, -1):
                time2, memory2 = costs.time_of(second, high2, high), costs.memory_of(second, high2, high)
                if time + time2 > most_time or memory + memory2 > most_memory:
                    break
                if not last or high2 == low2:
                    outer = (low2 - low + high - high2) * self.outer[group]
                    yield _Take(low2, high2, time, time2, memory + memory2, outer)


def _stages(pair: tuple[int, int | None]) -> list[int]:
    return [stage for stage in pair if stage is not None]


def _exact(groups: _Groups, most_memory: int) -> list[int] | None:
    """The cuts of the best partition; None if no partition stays within `most_memory`."""

    def slowest(value: int, take: _Take) -> int:
        return max(value, take.first + take.second)

    def unlike(take: _Take) -> int:
        return (take.first - take.second) ** 2 if groups.v else 0

    def fullest(value: tuple[int, int], take: _Take) -> tuple[int, int]:
        return value[0] + unlike(take), max(value[1], take.memory)

    def spread(value: tuple[int, int, int], take: _Take) -> tuple[int, int, int]:
        pairs, ranks, outer = value
        return pairs + unlike(take), ranks + (take.first + take.second) ** 2, outer + take.outer

    fastest = _widening(groups.least_time(), 2 * _SCALE, lambda bound: groups.search(bound, most_memory, 0, slowest))
    if fastest is None:
        return None
    most_time = fastest[0] + fastest[0] // _ALIKE
    leanest = groups.search(most_time, most_memory, (0, 0), fullest)
    assert leanest is not None  # the fastest one is within these bounds
    best = groups.search(most_time, leanest[0][1], (0, 0, 0), spread)
    assert best is not None
    return best[1]


def _least_peak(groups: _Groups) -> int:
    """The smallest peak memory that a partition can have, however slow."""

    def search(bound: int) -> tuple[Any, list[int]] | None:
        return groups.search(_NO_BOUND, bound, 0, lambda value, take: max(value, take.memory))

    found = _widening(groups.least_memory(), _NO_BOUND, search)
    assert found is not None
    return found[0]


def _widening(
    least: int, most: int, search: Callable[[int], tuple[Any, list[int]] | None]
) -> tuple[Any, list[int]] | None:
    """The first solution as the bound widens from `least` to `most`; None if there is none within `most`.

    `search` must give the best solution within a bound; whatever a wider bound would let in besides is no better.
    """
    width = max(least // 64, 1)
    bound = least
    while True:
        found = search(bound)
        if found is not None or bound == most:
            return found
        bound, width = min(bound + width, most), 2 * width


def _interleaved(costs: _Costs, most_memory: int) -> list[int] | None:
    """Stages balanced exactly, then layers moved while ranks gain; None if nothing found is within `most_memory`."""
    balanced = _exact(_Groups(costs, False), _NO_BOUND)
    assert balanced is not None
    starts = [balanced, _even_cuts(costs)]
    if most_memory < _NO_BOUND:
        starts.append(_leanest_found(costs)[1])
    key, cuts = min(_descend(costs, start, most_memory, 0) for start in starts)
    key, cuts = _descend(costs, cuts, most_memory, key[1] + key[1] // _ALIKE)
    return None if key[0] else cuts


def _leanest_found(costs: _Costs) -> tuple[int, list[int]]:
    """The smallest peak memory found for interleaved ranks, however slow, and its cuts."""
    key, cuts = _descend(costs, _even_cuts(costs), 0, _NO_BOUND)
    return key[0], cuts


def _even_cuts(costs: _Costs) -> list[int]:
    stages, n = len(costs.held), len(costs.time) - 1
    return [s * n // stages for s in range(stages + 1)]


_Key = tuple[int, int, int, int, int]


def _descend(costs: _Costs, cuts: list[int], most_memory: int, fast_enough: int) -> tuple[_Key, list[int]]:
    """Move single layers from stage to stage, each time the move that gains most, until none gains."""
    best = _key(costs, cuts, most_memory, fast_enough), cuts
    while True:
        better = min(((_key(costs, moved, most_memory, fast_enough), moved) for moved in _moves(best[1])), default=best)
        if better[0] >= best[0]:
            return best
        best = better


def _moves(cuts: list[int]) -> Iterator[list[int]]:
    """One stage gives a layer, another gets one, and those between are shifted."""
    stages = len(cuts) - 1
    for giver in range(stages):
        if cuts[giver + 1] - cuts[giver] < 2:
            continue
        for taker in range(stages):
            step = -1 if giver < taker else 1
            low, high = sorted((giver, taker))
            if low < high:
                yield [c + step if low < i <= high else c for i, c in enumerate(cuts)]


def _key(costs: _Costs, cuts: list[int], most_memory: int, fast_enough: int) -> _Key:
    """Less is better: bytes over the budget, slowest rank, unlike stages, peak memory, layers on outer stages."""
    pp = max(costs.ranks) + 1
    times, memory, unlike, outer = [0] * pp, [0] * pp, 0, 0
    for stage, (low, high) in enumerate(pairwise(cuts)):
        time = costs.time_of(stage, low, high)
        times[costs.ranks[stage]] += time
        unlike += time * time
        memory[costs.ranks[stage]] += costs.memory_of(stage, low, high)
        outer += (high - low) * (len(cuts) - 2 - 2 * stage) ** 2
    peak = max(memory)
    return max(peak - most_memory, 0), max(*times, fast_enough), unlike, peak, outer
