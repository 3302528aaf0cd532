"""Assigns decoder layers to pipeline stages by cost.

Input: a `LayerCost` for every decoder layer, the embedding and the head, which the caller knows; a schedule; the number of
pipeline ranks and of microbatches. Output: a `Partition`. Stages are numbered along the forward; stage 0 also has the
embedding, the last stage the head. A stage may end between the two sublayers of a layer, attention and MLP. Nothing here needs
a device or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.config import Config, stages_of, wrong_stage
from forebay.errors import UsageError

_V = ("zbv", "dualpipev")
_ALIKE = 100  # ranks that differ by one part in this many are equally fast
_BITS = 52  # of the sum of all costs as an integer: what a float holds exactly
_NO_BOUND = 1 << 100
_NO_TIME = 1 << 62  # more than any partition takes


@dataclass(frozen=True)
class LayerCost:
    """Cost of one microbatch in a layer: time of forward and backward in any unit, and bytes saved for backward."""

    time: float
    memory: float


@dataclass(frozen=True)
class ModelCosts:
    """Costs of one microbatch in each part of a model; `layers` are in forward order.

    Attributes:
        attention: of each layer, what of its cost is its first sublayer's; empty if no layer may be cut in two.
    """

    layers: tuple[LayerCost, ...]
    embedding: LayerCost
    head: LayerCost
    attention: tuple[LayerCost, ...] = ()

    @property
    def sublayers(self) -> tuple[LayerCost, ...]:
        """Two for each layer."""
        pairs = zip(self.layers, self.attention, strict=True)
        return tuple(c for a, b in pairs for c in (b, LayerCost(a.time - b.time, a.memory - b.memory)))


class StageLayer(NamedTuple):
    """A decoder layer, or one of its two sublayers, on a stage or a rank."""

    number: int
    attention: bool = True
    mlp: bool = True

    @property
    def sublayers(self) -> tuple[str, ...]:
        """Those that are here, of "self_attn" and "mlp"."""
        return ("self_attn",) * self.attention + ("mlp",) * self.mlp

    @property
    def is_whole(self) -> bool:
        """Whether it has both sublayers."""
        return self.attention and self.mlp

    def __str__(self) -> str:
        return str(self.number) if self.is_whole else f"{self.number} ({self.sublayers[0]})"


def held_by(stages: Iterable[Sequence[StageLayer]]) -> list[StageLayer]:
    """The layers of several stages of a rank; one whose sublayers are on two of them is whole."""
    found: dict[int, StageLayer] = {}
    for layer in (layer for stage in stages for layer in stage):
        before = found.get(layer.number, StageLayer(layer.number, False, False))
        found[layer.number] = StageLayer(layer.number, before.attention or layer.attention, before.mlp or layer.mlp)
    return list(found.values())


def listed(layers: Iterable[StageLayer]) -> str:
    """Layers of a stage in order, such as "0 (mlp), 1-3"."""
    runs: list[list[StageLayer]] = []
    for layer in layers:
        if runs and layer.is_whole and runs[-1][-1].is_whole:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@dataclass(frozen=True)
class Partition:
    """Layers of each stage, and the rank of each stage.

    Attributes:
        layers: by stage, its decoder layers in forward order.
        ranks: by stage, its pipeline rank.
        time: by rank, time of one microbatch through all its stages; None without costs.
        memory: by rank, the most bytes saved for backward; None without costs.
    """

    layers: tuple[tuple[StageLayer, ...], ...]
    ranks: tuple[int, ...]
    time: tuple[float, ...] | None = None
    memory: tuple[float, ...] | None = None

    @property
    def counts(self) -> tuple[float, ...]:
        """Number of layers by stage; a sublayer is half a layer."""
        halves = (sum(len(layer.sublayers) for layer in layers) for layers in self.layers)
        return tuple(n / 2 if n % 2 else n // 2 for n in halves)

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the forward."""
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)

    @property
    def balance(self) -> float | None:
        """Time of the slowest rank over the mean: 1.0 is perfect; None without costs."""
        return None if not self.time else max(self.time) * len(self.time) / (sum(self.time) or 1.0)


def rank_of(schedule: str, stage: int, pp: int) -> int:
    """The pipeline rank of `stage`.

    1f1b              pp stages, stage s on rank s
    interleaved-1f1b  chunks * pp stages, stage s on rank s % pp
    zbv, dualpipev    2 * pp stages in a V: rank r has stages r and 2 * pp - 1 - r, so rank 0 has embedding and head
    """
    return min(stage, 2 * pp - 1 - stage) if schedule in _V else stage % pp


def in_flight(schedule: str, stage: int, pp: int, microbatches: int, chunks: int = 2) -> int:
    """The most microbatches whose activations `stage` holds: forwards begun minus (input) backwards done.

    Without interleaving it is the number of stages from this one to the last, both included: the first backward follows when
    the first loss has come back. In the schedules of torch 2.11 to 2.13 this also holds for a V: rank r runs 2 pp - r
    forwards of its first stage before the first backward, and r + 1 of its second.

    Raises:
        ValueError: a stage that does not exist, or microbatches that the interleaved schedule cannot divide into rounds.
    """
    stages = stages_of(schedule, pp, chunks)
    if not 0 <= stage < stages:
        raise ValueError(f"{schedule} on {pp} ranks has no stage {stage}; valid are 0 to {stages - 1}")
    if schedule != "interleaved-1f1b":
        return min(microbatches, stages - stage)
    return _interleaved_in_flight(stage, pp, microbatches, chunks)


def _interleaved_in_flight(stage: int, pp: int, microbatches: int, chunks: int) -> int:
    """Counted along the plan: rounds of microbatches, chunk by chunk, with forwards ahead of backwards by the warm-up."""
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
    for tick in range(total + ahead):
        if tick < total:
            held += (tick // width) % chunks == chunk
            most = max(most, held)
        if tick >= ahead:
            held -= chunks - 1 - ((tick - ahead) // width) % chunks == chunk
    return most


def even_partition(n_layers: int, schedule: str, pp: int, chunks: int = 2) -> Partition:
    """The same number of layers on every stage, whatever they cost; one more on the innermost stages for a remainder.

    Raises:
        ValueError: more stages than layers.
    """
    stages = stages_of(schedule, pp, chunks)
    _check_stages(stages, n_layers, schedule, pp)
    inner = sorted(range(stages), key=lambda s: (abs(2 * s - (stages - 1)), -s))[: n_layers % stages]
    return of_counts([n_layers // stages + (s in inner) for s in range(stages)], n_layers, schedule, pp, chunks)


def of_counts(counts: Sequence[float], n_layers: int, schedule: str, pp: int, chunks: int = 2) -> Partition:
    """The partition with the given number of layers on each stage, in halves: 1.5 ends, or begins, between two sublayers.

    Raises:
        ValueError: not one number for each stage, a number that is not halves, a stage without a sublayer, or a sum other than
            `n_layers`.
    """
    stages = stages_of(schedule, pp, chunks)
    if len(counts) != stages:
        raise ValueError(f"the partition names {len(counts)} stages; {schedule} on {pp} ranks has {stages}")
    if (wrong := wrong_stage(counts)) is not None:
        raise ValueError(
            f"stage {wrong} of the partition has {counts[wrong]} layers; valid are 0.5 and more, in steps of 0.5 (half a layer "
            "is one of its sublayers)"
        )
    if sum(counts) != n_layers:
        raise ValueError(f"the partition has {sum(counts)} layers, but the model has {n_layers}")
    cuts = accumulate((round(2 * count) for count in counts), initial=0)
    layers = tuple(tuple(_between(low, high)) for low, high in pairwise(cuts))
    return Partition(layers, tuple(rank_of(schedule, s, pp) for s in range(stages)))


def _between(low: int, high: int) -> Iterator[StageLayer]:
    """The layers of the sublayers `low` to `high`, where 2 n is the attention of layer n and 2 n + 1 its MLP."""
    for number in range(low // 2, (high + 1) // 2):
        yield StageLayer(number, low <= 2 * number, 2 * number + 1 < high)


def partition_of(config: Config, layers: int, sharing: int, costs: ModelCosts | None = None) -> Partition:
    """The partition that ``parallel.partition`` names, with time and memory of every rank if `costs` are given.

    Args:
        layers: number of decoder layers.
        sharing: number of processes that share the batch, which are those of one stage.
        costs: of a microbatch on one of these; without them "auto" is `even_partition`.

    Raises:
        UsageError: the layers cannot be cut that way.
    """
    schedule, pp, chunks, microbatches = pipeline_shape(config, sharing)
    asked = config.parallel.partition
    try:
        if isinstance(asked, tuple):
            chosen = of_counts(asked, layers, schedule, pp, chunks)
        elif costs is None or asked == "even":
            chosen = even_partition(layers, schedule, pp, chunks)
        else:
            return partition_layers(costs, schedule, pp, microbatches=microbatches, chunks=chunks)
        return chosen if costs is None else with_costs(chosen, costs, schedule, microbatches)
    except ValueError as error:
        raise UsageError(f"parallel.partition = {asked!r}: {error}") from error


def pipeline_shape(config: Config, sharing: int) -> tuple[str, int, int, int]:
    """Schedule, ranks, chunks and microbatches. No pipeline is a single stage of 1f1b."""
    p = config.parallel
    microbatches = config.microbatches(sharing)
    return (p.schedule if p.pp > 1 else "1f1b"), p.pp, p.chunks, microbatches


def with_costs(partition: Partition, costs: ModelCosts, schedule: str, microbatches: int) -> Partition:
    """The same partition with time and memory of every rank."""
    pp, stages = max(partition.ranks) + 1, len(partition.layers)
    time, memory = [0.0] * pp, [0.0] * pp
    for stage, (numbers, rank) in enumerate(zip(partition.layers, partition.ranks, strict=True)):
        parts = [_cost_of(layer, costs) for layer in numbers]
        parts += [costs.embedding] * (stage == 0) + [costs.head] * (stage == stages - 1)
        time[rank] += sum(part.time for part in parts)
        held = in_flight(schedule, stage, pp, microbatches, stages // pp)
        memory[rank] += held * sum(part.memory for part in parts)
    return replace(partition, time=tuple(time), memory=tuple(memory))


def _cost_of(layer: StageLayer, costs: ModelCosts) -> LayerCost:
    if layer.is_whole:
        return costs.layers[layer.number]
    if not costs.attention:
        raise ValueError(
            "the layers of this model cannot be cut in two, because they have weights of their own or share some between their "
            "sublayers; give whole numbers of layers"
        )
    return costs.sublayers[2 * layer.number + (not layer.attention)]


def partition_layers(costs: ModelCosts, schedule: str, pp: int, *, microbatches: int, chunks: int = 2) -> Partition:
    """The best partition, with time and memory of every rank.

    A rank's time is the sum over its stages; its memory is the sum of in-flight microbatches x memory of one. The best
    partition has, in this order:

    1. the fastest slowest rank; all partitions within 1 % of it count as equally fast
    2. stages alike within each rank (least squares): in a V a rank's two stages run together, one forward and one backward,
       and a short one cannot hide a long one; interleaved ranks wait for each other stage by stage. This comes before
       memory, which single-layer first stages would always save
    3. the smallest peak memory over ranks
    4. ranks alike (least squares), and remaining layers on inner stages, away from embedding and head

    A layer is cut in two only where that makes the slowest rank more than 1 % faster than whole layers do.

    For interleaved-1f1b the partition is good, but not proven to be the best. Example: 12 equal layers and a head that weighs
    4, dualpipev on 2 ranks: 3, 4, 4 and 1 layers, so that both ranks have 8 of the 16; 3 on each stage would give rank 0 10.

    Args:
        costs: of all decoder layers, and additional ones of the first and the last stage.
        schedule: one of `forebay.config.SCHEDULES`.
        pp: number of pipeline ranks.
        microbatches: number of microbatches in a step of one pipeline.
        chunks: stages per rank, for "interleaved-1f1b".

    Raises:
        ValueError: more stages than layers.
    """
    stages, n_layers = stages_of(schedule, pp, chunks), len(costs.layers)
    _check_stages(stages, n_layers, schedule, pp)
    held = [in_flight(schedule, s, pp, microbatches, chunks) for s in range(stages)]
    ranks = [rank_of(schedule, s, pp) for s in range(stages)]

    def best(units: Sequence[LayerCost]) -> Partition:
        found = _Costs.of(units, costs.embedding, costs.head, held, ranks)
        cuts = _interleaved(found) if schedule == "interleaved-1f1b" else _exact(_Groups(found, schedule in _V))
        counts = [(b - a) * n_layers / len(units) for a, b in pairwise(cuts)]
        return with_costs(of_counts(counts, n_layers, schedule, pp, chunks), costs, schedule, microbatches)

    whole = best(costs.layers)
    assert whole.time is not None
    ends = costs.head.time + costs.embedding.time * (schedule in _V)
    least = max(sum(whole.time) / pp, ends)  # of the slowest rank, however layers are cut
    if not costs.attention or max(whole.time) <= least * (1 + 1 / _ALIKE):
        return whole
    cut = best(costs.sublayers)
    assert cut.time is not None
    return cut if max(cut.time) * (1 + 1 / _ALIKE) < max(whole.time) else whole


def _check_stages(stages: int, n_layers: int, schedule: str, pp: int) -> None:
    if stages > n_layers:
        raise ValueError(
            f"{schedule} on {pp} ranks has {stages} stages, and each needs at least one of the model's {n_layers} decoder "
            f"layers; valid is at most {max(1, n_layers // (stages // pp))} ranks"
        )


@dataclass(frozen=True)
class _Costs:
    """Integer costs. ``time[i]`` and ``memory[i]`` are sums over the layers before i; ``extra_*`` and ``held`` are by stage."""

    time: list[int]
    memory: list[int]
    extra_time: list[int]
    extra_memory: list[int]
    held: list[int]
    ranks: list[int]

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
        return cls(time, memory, extra_time, extra_memory, held, ranks)

    def time_of(self, stage: int, low: int, high: int) -> int:
        return self.time[high] - self.time[low] + self.extra_time[stage]

    def memory_of(self, stage: int, low: int, high: int) -> int:
        return self.held[stage] * (self.memory[high] - self.memory[low] + self.extra_memory[stage])


def _unit(values: list[float]) -> float:
    """The factor that makes the sum as large as `_BITS` allow; a power of two, so that whole FLOPs and bytes stay exact."""
    return 2.0 ** (_BITS - math.frexp(sum(values))[1])


_State = tuple[int, int]
"""The range [low, high) of layers that are free."""

_Take = tuple[_State, int, int, int, int]
"""Layers that a group takes from the free ones: the state that it leaves, the group's time, the difference between its two
stages' times (0 without a V), bytes of all microbatches in flight, number of layers times how far out the stages are."""


_Found = tuple[Any, list[int]]
"""The value of a partition and its cuts: stage s has layers cuts[s] to cuts[s + 1]."""


class _Groups:
    """A dynamic program over groups, which are the stages of a rank. `v`: groups have two stages, which meet in the middle.

    A group takes layers from the front, in a V from the back too. Groups are filled from the outside inwards, so a state is the
    range [i, j) of layers that are still free; without a V, j stays at the end. Costs are integers, so that ties are exact.

    The slowest group at best, from each state to the end, is found first, for all states at once (`_SlowestLeft`). A search
    then drops the states that cannot end within its bound of time.
    """

    def __init__(self, costs: _Costs, v: bool):
        stages = len(costs.held)
        self.costs, self.n = costs, len(costs.time) - 1
        self.pairs = [(s, stages - 1 - s if v else None) for s in range(stages // 2 if v else stages)]
        self.outer = [(stages - 1 - 2 * first) ** 2 for first, _ in self.pairs]
        self._left = _SlowestLeft(costs, self.pairs).by_group()

    @property
    def least_time(self) -> int:
        """Time of the slowest group in the fastest partition."""
        return int(self._left[0][0, self.n])

    def takes(self, most_time: int) -> _Takes:
        """For each group and each state in which it may begin, what it can take so that no group needs more than `most_time`.

        Args:
            most_time: at most `least_time` and one part in `_ALIKE` of it.
        """
        found: _Takes = []
        states = [(0, self.n)]
        for group in range(len(self.pairs)):
            # By the low end, the high ends from which the groups after this one finish in time, the highest first.
            ends = [np.flatnonzero(row)[::-1].tolist() for row in self._left[group + 1] <= most_time]
            takes = {state: list(self._takes_from(group, state, most_time, ends)) for state in states}
            found.append(takes)
            states = list({take[0]: None for several in takes.values() for take in several})
        return found

    def _takes_from(self, group: int, state: _State, most_time: int, ends: list[list[int]]) -> Iterator[_Take]:
        (low, high), (first, second), costs = state, self.pairs[group], self.costs
        time, memory, outer = costs.time, costs.memory, self.outer[group]
        for low2 in range(low + 1, high + 1):
            time1, bytes1 = costs.time_of(first, low, low2), costs.memory_of(first, low, low2)
            if time1 > most_time:
                return
            if second is None:
                if high in ends[low2]:
                    yield (low2, high), time1, 0, bytes1, (low2 - low) * outer
                continue
            held = costs.held[second]
            time_end, memory_end = time[high] + costs.extra_time[second], memory[high] + costs.extra_memory[second]
            for high2 in ends[low2]:
                if high2 >= high:
                    continue
                time2 = time_end - time[high2]
                if time1 + time2 > most_time:
                    break
                bytes2 = held * (memory_end - memory[high2])
                layers = low2 - low + high - high2
                yield (low2, high2), time1 + time2, time1 - time2, bytes1 + bytes2, layers * outer


_Takes = list[dict[_State, list[_Take]]]


def _least(takes: _Takes, most_memory: int, start: Any, extend: Callable[[Any, _Take], Any]) -> _Found:
    """The smallest value over all partitions within a bound of memory, of which there must be one, and its cuts.

    `extend` returns the value of a partition with one more group. It must be monotonic in the value.
    """
    (first,) = takes[0]
    states: dict[_State, tuple[Any, _State | None]] = {first: (start, None)}
    history = [states]
    for takes_from in takes:
        after: dict[_State, tuple[Any, _State | None]] = {}
        for state, (value, _) in states.items():
            for take in takes_from[state]:
                if take[3] > most_memory:
                    continue
                candidate, reached = extend(value, take), take[0]
                known = after.get(reached)
                if known is None or candidate < known[0]:
                    after[reached] = candidate, state
        history.append(after)
        states = after
    end = min(states, key=lambda state: (states[state][0], state))
    return states[end][0], _cuts(history, end)


def _cuts(history: list[Any], end: _State) -> list[int]:
    state: _State | None = end
    cuts = set()
    for states in reversed(history):
        assert state is not None
        cuts |= set(state)
        state = states[state][1]
    return sorted(cuts)


class _SlowestLeft:
    """For each state of `_Groups`, the time of the slowest group from there to the end, in the fastest partition.

    A state is an element [i, j] of a matrix, so that a step of a group, which takes so many layers from the front and so many
    from the back, is a shift of the matrix. Steps that no partition as fast as `_ALIKE` needs are not looked at.
    """

    def __init__(self, costs: _Costs, pairs: Sequence[tuple[int, int | None]]):
        self._time = np.array(costs.time)
        self._extra = [sum(costs.extra_time[s] for s in _stages(pair)) for pair in pairs]
        self._pairs, self._n = pairs, len(costs.time) - 1
        even = pairwise(_even_cuts(costs))
        times = [costs.time_of(stage, low, high) for stage, (low, high) in enumerate(even)]
        slowest = max(sum(times[s] for s in _stages(pair)) for pair in pairs)
        self._most = slowest + slowest // _ALIKE

    def by_group(self) -> list[npt.NDArray[np.int64]]:
        """A matrix for each group, as that one begins, and one after the last; `_NO_TIME` where there is no partition."""
        n = self._n
        done = np.full((n + 1, n + 1), _NO_TIME)
        np.fill_diagonal(done, 0)
        found = [done]
        for group in reversed(range(len(self._pairs))):
            found.append(self._before(group, found[-1]))
        return found[::-1]

    def _before(self, group: int, after: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        found, n, (_, second) = np.full_like(after, _NO_TIME), self._n, self._pairs[group]
        rows, columns = self._reached(group)
        most = self._most - self._extra[group]
        for front in range(1, n + 1):
            i = slice(rows.start, min(rows.stop, n + 1 - front))
            first = self._time[i.start + front : i.stop + front] - self._time[i]
            if not first.size or first.min() > most:
                break
            for back in range(1, n + 1) if second is not None else (0,):
                j = slice(max(columns.start, back), columns.stop)
                last = self._time[j] - self._time[j.start - back : j.stop - back]
                if not last.size or first.min() + last.min() > most:
                    break
                rest = after[i.start + front : i.stop + front, j.start - back : j.stop - back]
                slowest = np.maximum(first[:, None] + (last + self._extra[group]), rest)
                np.minimum(found[i, j], slowest, out=found[i, j])
        return found

    def _reached(self, group: int) -> tuple[slice, slice]:
        """The rows and columns of the states in which a group may begin."""
        time, n = self._time, self._n
        reach = group * self._most
        rows = slice(group, int(np.searchsorted(time, reach, "right")))
        if self._pairs[group][1] is None:
            return rows, slice(n, n + 1)
        return rows, slice(int(np.searchsorted(time, time[n] - reach)), n + 1 - group)


def _stages(pair: tuple[int, int | None]) -> list[int]:
    return [stage for stage in pair if stage is not None]


def _exact(groups: _Groups) -> list[int]:
    """The cuts of the best partition: the fastest one, then the leanest within 1 % of that, then the most even."""

    def fullest(value: tuple[int, int], take: _Take) -> tuple[int, int]:
        _, _, unlike, memory, _ = take
        most = value[1]
        return value[0] + unlike * unlike, memory if memory > most else most

    def spread(value: tuple[int, int, int], take: _Take) -> tuple[int, int, int]:
        _, time, unlike, _, outer = take
        pairs, ranks, outside = value
        return pairs + unlike * unlike, ranks + time * time, outside + outer

    takes = groups.takes(groups.least_time + groups.least_time // _ALIKE)
    (_, memory), _ = _least(takes, _NO_BOUND, (0, 0), fullest)
    return _least(takes, memory, (0, 0, 0), spread)[1]


def _interleaved(costs: _Costs) -> list[int]:
    """Stages balanced exactly or by number, then single layers moved while ranks gain.

    Interleaved ranks have stages that lie apart, for which the states of `_Groups` are too small.
    """
    key, cuts = min(_descend(costs, start, 0) for start in (_exact(_Groups(costs, False)), _even_cuts(costs)))
    return _descend(costs, cuts, key[0] + key[0] // _ALIKE)[1]


def _even_cuts(costs: _Costs) -> list[int]:
    stages, n = len(costs.held), len(costs.time) - 1
    return [s * n // stages for s in range(stages + 1)]


_Key = tuple[int, int, int, int]


def _descend(costs: _Costs, cuts: list[int], fast_enough: int) -> tuple[_Key, list[int]]:
    """Move single layers from stage to stage, each time with the largest gain, until no move gains."""
    best = _key(costs, cuts, fast_enough), cuts
    while True:
        better = min(((_key(costs, moved, fast_enough), moved) for moved in _moves(best[1])), default=best)
        if better[0] >= best[0]:
            return best
        best = better


def _moves(cuts: list[int]) -> Iterator[list[int]]:
    """One stage gives up a layer, another gains one, and the stages between are shifted."""
    stages = len(cuts) - 1
    for giver in range(stages):
        if cuts[giver + 1] - cuts[giver] < 2:
            continue
        for taker in range(stages):
            step = -1 if giver < taker else 1
            low, high = sorted((giver, taker))
            if low < high:
                yield [c + step if low < i <= high else c for i, c in enumerate(cuts)]


def _key(costs: _Costs, cuts: list[int], fast_enough: int) -> _Key:
    """Smaller is better: slowest rank, unlike stages, peak memory, layers on outer stages."""
    pp = max(costs.ranks) + 1
    times, memory, unlike, outer = [0] * pp, [0] * pp, 0, 0
    for stage, (low, high) in enumerate(pairwise(cuts)):
        time = costs.time_of(stage, low, high)
        times[costs.ranks[stage]] += time
        unlike += time * time
        memory[costs.ranks[stage]] += costs.memory_of(stage, low, high)
        outer += (high - low) * (len(cuts) - 2 - 2 * stage) ** 2
    return max(*times, fast_enough), unlike, max(memory), outer
