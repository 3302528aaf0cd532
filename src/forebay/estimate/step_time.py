"""How long a step takes: the times of layers, laid on the schedule of each rank.

Input: the `KernelTime`s of every stage, a device profile, the actions of every pipeline rank, and how parameters are sharded.
Output: a `StepTime`. A `ScheduleTimer` puts kernel times on the actions; `ShardingTime` adds gathers and reductions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

from forebay.estimate.device import DeviceProfile
from forebay.estimate.fit import CAPTURED_TIME_ERROR, HOSTS, TIME_ERROR
from forebay.estimate.layer_time import NO_TIME, KernelTime
from forebay.estimate.state import Sharing, Weight
from forebay.pipeline.schedule import Action


@dataclass(frozen=True)
class StageTime:
    """One microbatch in one stage, in the order in which it runs: an entry for each layer, embedding and head."""

    forward: tuple[KernelTime, ...]
    backward: tuple[KernelTime, ...]


class StepOverhead(NamedTuple):
    """Seconds of a step outside of the schedule's actions: of sharded parameters and gradients, not hidden, and of clipping and
    the update."""

    gather: float = 0.0
    reduce: float = 0.0
    optimizer: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and where they go.

    Attributes:
        schedule: from the first action to the last rank's end, on the device.
        launched: the same, with hosts that launch each kernel; equal to `schedule` for a CUDA graph step.
        gather, reduce, optimizer: see `StepOverhead`; of the slowest rank.
        host: seconds of the slowest host's launches; 0 for a CUDA graph step.
        busy, exposed: see `ScheduleTimer`.
        tokens: of the global batch.
        measured: some figure of the device was measured on one; else all are from data sheets.
        around: seconds of the host between steps, while the device is idle.
        launch: seconds of the host that is assumed for a launch; 0 for a CUDA graph step.
        capturable: `memory.graph = true` may capture the step.
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
    launch: float = 0.0
    capturable: bool = True

    @property
    def gradients(self) -> float:
        """Until all gradients are reduced."""
        return self.launched + self.gather + self.reduce

    @property
    def seconds(self) -> float:
        return self.gradients + self.optimizer + self.around

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bubble(self) -> tuple[float, ...]:
        """By pipeline rank, the share of the schedule in which nothing runs."""
        return tuple(1 - busy / self.schedule for busy in self.busy)

    @property
    def limited_by_host(self) -> bool:
        return self.host > self.schedule

    @property
    def error(self) -> float:
        """Share by which a step may take more or less; see `forebay.estimate.fit`. A host slower by `HOSTS` may add more."""
        slower = max(0.0, HOSTS * self.host - self.launched) + (HOSTS - 1) * self.around
        return max(TIME_ERROR if self.host else CAPTURED_TIME_ERROR, slower / self.seconds)

    def sentence(self) -> str:
        sheets = "" if self.measured else ", from data sheets"
        parts = [
            f"expected on {self.device}{sheets}: {self.seconds:.3f} s a step to within {100 * self.error:.0f} %, "
            f"{self.tokens_per_second:,.0f} tokens/s"
        ]
        if len(self.busy) > 1:
            parts.append(f"bubble {100 * min(self.bubble):.0f} to {100 * max(self.bubble):.0f} %")
        if self.limited_by_host:
            parts.append(
                f"the host's launches take longest (of a host that takes {1e6 * self.launch:.1f} microseconds for each; hosts "
                f"differ by {HOSTS}x)" + ": memory.graph = true captures them" * self.capturable
            )
        return "; ".join(parts) + "."

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "measured": self.measured,
            "seconds": self.seconds,
            "error": self.error,
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


@dataclass
class ScheduleTimer:
    """Puts the actions of all ranks in time.

    An action starts when its rank is free and its input is there: from the stage before (forward) or after (backward), and from
    another rank with a message. The host launches kernels ahead of the device, layer by layer: none ends before it is launched,
    and the lead that the host gains during a long kernel is kept.

    F and B compute and transfer. I is B without the experts' weight gradients, and W is those. OVERLAP_F_B takes, layer by layer,
    the longer of both microbatches' computing and both microbatches' transfers; a layer without a partner runs as if alone.

    Attributes:
        actions: of each rank, those that compute; see `forebay.pipeline.schedule`.
        ranks: of each stage.
        message: seconds of hidden states from one rank to another.
        engine: the experts' weight gradients are made during the transfer after dispatch's gradient, half of B's transfers
            (`forebay.pipeline.sublayer`).
        contention: share of a hidden all-to-all by which what hides it is slower: both use the same memory and multiprocessors.
        launch: seconds of the host for a launch; 0 for a CUDA graph step.
        busy, exposed: of each rank, seconds in which an action runs, and those of all-to-alls that nothing hides among them.

    Raises:
        ValueError: actions wait for each other, or for one that no rank has.
    """

    actions: Sequence[Sequence[Action]]
    ranks: Sequence[int]
    stages: Mapping[int, StageTime]
    message: float = 0.0
    engine: bool = True
    contention: float = 0.0
    launch: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.actions)
        # By kind of action, of each layer, embedding and head, without hidden all-to-alls.
        self._segments: dict[tuple[Any, ...], list[KernelTime]] = {}
        self._ended: dict[tuple[str, int, int], float] = {}
        self.busy, self.exposed, self.launches, self._free = ([0.0] * count for _ in range(4))
        self._launched = [0.0] * count  # when each host has launched all of its actions so far
        at = [0] * count
        while any(i < len(todo) for i, todo in zip(at, self.actions, strict=True)):
            before = list(at)
            for rank, todo in enumerate(self.actions):
                while at[rank] < len(todo) and self._perform(rank, todo[at[rank]]):
                    at[rank] += 1
            if at == before:
                waits = ", ".join(str(todo[i]) for i, todo in zip(at, self.actions, strict=True) if i < len(todo))
                raise ValueError(f"these actions wait for what never comes: {waits}")

    @property
    def seconds(self) -> float:
        """When the last rank ends its last action."""
        return max(self._free)

    def _perform(self, rank: int, action: Action) -> bool:
        end = self._free[rank]
        for part in action.each:
            ready = self._ready(rank, part)
            if ready is None:
                return False
            end = max(end, ready)
        total = NO_TIME
        for segment in self._segments_of(action):
            self._launched[rank] += segment.launches * self.launch
            end = max(end + segment.compute + segment.all_to_all, self._launched[rank])
            total += segment
        for part in action.each:
            self._ended["F" if part.kind == "F" else "B", part.stage, part.microbatch] = end
        self._free[rank] = end
        self.busy[rank] += total.alone
        self.exposed[rank] += total.all_to_all
        self.launches[rank] += total.launches
        return True

    def _ready(self, rank: int, part: Any) -> float | None:
        """When the input of a forward or backward is there; None if it has not run yet."""
        last = len(self.ranks) - 1
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
        return ended + (self.message if self.ranks[source[1]] != rank else 0.0)

    def _segments_of(self, action: Action) -> list[KernelTime]:
        kind = (action.kind, action.stage, *(part.stage for part in action.parts))
        if kind not in self._segments:
            self._segments[kind] = self._count(action)
        return self._segments[kind]

    def _count(self, action: Action) -> list[KernelTime]:
        if action.kind == "OVERLAP_F_B":
            forward, backward = action.parts
            return self._overlap_fwd_bwd(self.stages[forward.stage].forward, self.stages[backward.stage].backward)
        stage = self.stages[action.stage]
        match action.kind:
            case "F":
                return self._overlap_fwd_bwd(stage.forward, ())
            case "B":
                return self._overlap_fwd_bwd((), stage.backward)
            case "I":
                return [replace(time, weight_grads=0.0) for time in stage.backward]
            case "W":
                return [KernelTime(sum(time.weight_grads for time in stage.backward))]
        raise ValueError(f"{action} computes nothing")

    def _overlap_fwd_bwd(self, forward: Sequence[KernelTime], backward: Sequence[KernelTime]) -> list[KernelTime]:
        found = []
        for f, b in zip_longest(forward, backward, fillvalue=NO_TIME):
            all_to_all = f.all_to_all + b.all_to_all
            if f is not NO_TIME and b is not NO_TIME:
                hides = f.computing + b.computing
            else:
                hides = min(b.all_to_all / 2, b.weight_grads) if self.engine else 0.0
            hidden = min(all_to_all, hides)
            computing = f.computing + b.computing + self.contention * hidden
            found.append(KernelTime(computing, all_to_all - hidden, launches=f.launches + b.launches))
        return found


_Rate = tuple[float, float]
"""What bounds the rate of an update: a share of a copy's bandwidth, and a number of bytes/s. The lower of the two holds."""
_UPDATES: Mapping[int, _Rate] = MappingProxyType({4: (0.88, 3.4e12), 2: (0.80, 2.5e12)})
"""AdamW's fused update and clipping, by the size of an element: 3.31 to 3.56 TB/s in fp32, 2.35 to 2.76 in bf16 on H200s
(benchmarks/results/step_kernels.json). On H100s, where a copy reaches 2.97 TB/s instead of 4.25, they are 2.6 in fp32 and 2.2 to
2.4 in bf16 (runs 00, 04 and 07 of the twenty-seventh draw)."""
_SPLIT_UPDATES: _Rate = (1.0, 4.0e12)
"""The same of the update of split weights (`forebay.kernels.split_adamw`) and of their gradients' norm: 4.06 TB/s of 5.6e9
weights on an H200 (run 10 of the twenty-sixth draw), 3.0 on an H100."""
_FOREACH: _Rate = (0.93, 3.2e12)
"""The same of an update that is not fused: 2.8 TB/s on H100s (run 02 of the twenty-seventh and of the twenty-ninth draw)."""
_CHUNKS, _CHUNKS_CONVERTED = 1.25, 2.2
"""How much longer than a copy FSDP2's `chunk_cat` takes for the bytes that it reads and writes: as they are 3.4 TB/s, and 1.7 and
2.1 from bf16 to fp32 (benchmarks/results/nccl_links.json)."""
_REDUCE_BESIDE: Mapping[int, float] = MappingProxyType({2: 0.74})
"""By GPUs, the share of its rate that a reduce-scatter reaches beside FSDP2's other kernels: 213 of 289 GB/s between two H200s
(benchmarks/results/nccl_links.json). On four it is not known: with the whole rate the grid's three runs are -0.5 to +13 % off."""


@dataclass(frozen=True)
class Elements:
    """Elements of the parameters that a process computes with.

    Attributes:
        rest: of all parameters but its experts'.
        experts: of its experts.
        frozen: of all that are not trained.
        lent_rest, lent_experts: of `rest` and `experts`, those that are computed with in their shards' memory, not gathered.
        split: of all lent ones, those that are split; see `forebay.train.weights_in_place`.
    """

    rest: int
    experts: int = 0
    frozen: int = 0
    lent_rest: int = 0
    lent_experts: int = 0
    split: int = 0

    @classmethod
    def of(cls, weights: Sequence[Weight], s: Sharing) -> Elements:
        counts = dict.fromkeys(("rest", "experts", "frozen", "lent_rest", "lent_experts", "split"), 0)
        for w in weights:
            kind = "experts" if w.experts else "rest"
            own, processes = (w.elements // s.ep, s.data // s.ep) if w.experts else (w.elements, s.data)
            counts[kind] += own
            counts["frozen"] += w.elements * w.frozen
            counts[f"lent_{kind}"] += own * s.lends(own, processes)
            counts["split"] += own * s.splits(own, processes)
        return cls(**counts)


@dataclass(frozen=True)
class TransferTime:
    """Seconds of copies on the device, and of the link."""

    copies: float = 0.0
    link: float = 0.0

    def __add__(self, other: TransferTime) -> TransferTime:
        return TransferTime(self.copies + other.copies, self.link + other.link)

    @property
    def exposed(self) -> float:
        """Seconds if nothing hides it."""
        return self.copies + self.link

    def beside(self, seconds: float, contention: float) -> float:
        """Seconds if up to so many of the link's are hidden, each of which `contention` makes longer."""
        hidden = min(self.link, seconds)
        return self.copies + self.link - hidden + contention * hidden


class Beside(NamedTuple):
    """Seconds of computing beside a layer's gather in forward, its gather in backward, and its reduction."""

    forward: float
    backward: float
    reduction: float


@dataclass(frozen=True)
class ShardingTime:
    """Seconds of gathering sharded parameters, reducing their gradients, and adding gradients up over a step's `microbatches`.

    Engines (`forebay.train.unsharded_step`) gather once before a step and reduce once after it, and nothing hides that; resharded
    experts are gathered for each forward and backward. FSDP2 gathers a layer while the one before runs, and reduces it while
    the next runs: a layer waits for the seconds that the link is longer than that, and copies are never hidden. Embedding and
    head are gathered and reduced as often, where nothing hides it. Replicas all-reduce their shards once a step; FSDP2 does
    that beside the reduce-scatters, an engine after each of them. DistributedDataParallel all-reduces a layer's gradients while
    the next layer runs, and copies them to its buckets and back.
    """

    device: DeviceProfile
    sharing: Sharing
    microbatches: int

    def layer(self, part: Elements, beside: Beside) -> tuple[float, float]:
        """Seconds of a microbatch's forward and backward through a layer, besides its own kernels."""
        s, count = self.sharing, self.microbatches
        adding = self._adding(part)
        if not s.sharded:
            return 0.0, adding + self._all_reduces(part).beside(beside.reduction, self.device.at("contention"))
        if s.engine:
            experts = part.experts - part.lent_experts
            again = self._gather(experts, self._columns, once=True).exposed if s.gathers_experts else 0.0
            return again, again + adding
        gather, reduce, contention = self._gathers(part), self._reduces(part), self.device.at("contention")
        times = 1.0 if s.reshard else 1.0 / count
        back = 0.0 if not s.reshard else gather.beside(beside.backward, contention)
        reduced = reduce.beside(beside.reduction, contention) / (count if s.sums else 1)
        return times * gather.beside(beside.forward, contention), back + adding + reduced

    def step(
        self, parts: Sequence[Elements], ends: Elements, parameters: int, fused: bool, clips: bool
    ) -> StepOverhead:
        """Seconds of a rank's step outside of its microbatches.

        Args:
            parts, ends: of its layers, and of embedding and head.
            parameters: bytes of its own shards that are trained.
            fused: AdamW is one kernel, which reads parameter, gradient and two moments and writes all but the gradient;
                else about 14 more reads and writes of a shard.
            clips: gradients are clipped: read and written once more; in half precision `forebay train` only writes them, in
                a fused update, or else multiplies them in a kernel that takes four times as long.
        """
        s = self.sharing
        half = s.trainer and s.parameter < 4
        clipping = clips * ((1 if fused else 8) if half else 2)
        split = sum(p.split for p in (*parts, ends))
        rest = parameters - s.parameter * split
        update = _UPDATES[s.parameter] if fused else _FOREACH
        optimizer = self._updating(rest * ((7 if fused else 21) + 1 + clipping), update)
        # Gradients are read twice, once for their norm; weights and moments are read and written.
        optimizer += self._updating(split * (6 * s.parameter + 2 * s.summed), _SPLIT_UPDATES)
        adding = self.microbatches * self._adding(ends)
        if not s.sharded:
            reducing = self.microbatches * self._all_reduces(ends).exposed
            return StepOverhead(reduce=adding + reducing, optimizer=optimizer)
        once = (*parts, ends) if s.engine else (ends,)
        gathers = sum(map(self._gathers, once), TransferTime())
        reduces = sum(map(self._reduces, once), TransferTime())
        if s.engine:  # the sums are filled with zeros
            zeros = s.summed * sum(p.rest + p.experts for p in once)
            return StepOverhead(gathers.exposed + self.device.moving(zeros), reduces.exposed, optimizer)
        gather = gathers.exposed * (2 * self.microbatches if s.reshard else 1)
        return StepOverhead(gather, reduces.exposed * (1 if s.sums else self.microbatches) + adding, optimizer)

    def _updating(self, count: int, rate: _Rate) -> float:
        share, most = rate
        return count / min(share * self.device.at("bandwidth", count), most)

    @property
    def _columns(self) -> int:
        return self.sharing.data // self.sharing.ep

    def _gathers(self, part: Elements) -> TransferTime:
        s, rest, experts = self.sharing, part.rest - part.lent_rest, part.experts - part.lent_experts
        if s.gathers_experts:  # for each use
            return self._gather(rest, s.data)
        if s.ep == 1:
            return self._gather(rest + experts, s.data)
        return self._gather(rest, s.data) + self._gather(experts, self._columns)

    def _reduces(self, part: Elements) -> TransferTime:
        s = self.sharing
        if s.ep == 1:
            return self._reduce(part.rest + part.experts - part.frozen, s.data, part.split)
        return self._reduce(part.rest, s.data) + self._reduce(part.experts, self._columns, part.split)

    def _gather(self, elements: int, processes: int, once: bool = False) -> TransferTime:
        """Each process casts and sends its shard; what arrives is copied to where parameters live. One process copies twice, or
        (`once`) casts to there."""
        s = self.sharing
        copies = 1 if processes > 1 else 0 if once else 2
        moved = elements / processes * (s.parameter + s.compute) + 2 * elements * s.compute * copies
        sent = elements * s.compute * (processes - 1) / processes
        return TransferTime(self.device.moving(moved), sent / self.device.link("all_gather", self._within, processes))

    def _reduce(self, elements: int, processes: int, split: int = 0) -> TransferTime:
        """Gradients are copied in chunks and summed, and the own shard is cast. One process only casts, and not those of weights
        that are split."""
        s = self.sharing
        across = self._across(elements / processes)
        if processes == 1:
            moved = 0.0 if s.summed == s.parameter else (elements - split) * (s.summed + s.parameter)
            if s.replicate > 1 and not s.engine:  # FSDP2 copies them, divides by 1, and copies again
                moved += 6 * elements * s.summed
            return TransferTime(self.device.moving(moved), across)
        moved = self._chunked(elements) + elements / processes * (s.summed + s.parameter)
        sent = elements * s.summed * (processes - 1) / processes
        rate = self.device.link("reduce_scatter", self._within, processes)
        if not s.engine:
            rate *= _REDUCE_BESIDE.get(processes, 1.0)
        inside = sent / rate
        return TransferTime(self.device.moving(moved), inside + across if s.engine else max(inside, across))

    def _chunked(self, elements: int) -> float:
        """Bytes of a copy that take as long as FSDP2's of gradients to where their chunks are sent from."""
        s = self.sharing
        if s.engine or s.sums:
            return 2 * elements * s.summed
        return elements * (s.compute + s.summed) * (_CHUNKS if s.compute == s.summed else _CHUNKS_CONVERTED)

    def _across(self, elements: float) -> float:
        """Seconds of all-reducing a shard's gradients over the replicas: a reduce-scatter and an all-gather of it."""
        s, seconds = self.sharing, self._all_reduce(elements * self.sharing.summed)
        return seconds if s.engine or s.sums else seconds / self.microbatches

    def _all_reduce(self, size: float) -> float:
        s = self.sharing
        within, sent = s.world <= self.device.node, size * (s.replicate - 1) / s.replicate
        return sum(sent / self.device.link(name, within, s.replicate) for name in ("reduce_scatter", "all_gather"))

    def _all_reduces(self, part: Elements) -> TransferTime:
        """DistributedDataParallel's part of a microbatch. If the last one reduces the sums of all, each has its share of that."""
        s = self.sharing
        if not s.ddp:
            return TransferTime()
        size = s.parameter * (part.rest + part.experts - part.frozen) / (self.microbatches if s.sums else 1)
        return TransferTime(self.device.moving(4 * size), self._all_reduce(size))

    def _adding(self, part: Elements) -> float:
        """Add a microbatch's gradients to zeros (engines) or to those of earlier microbatches."""
        s, count = self.sharing, self.microbatches
        if s.sharded and not (s.engine or s.sums):
            return 0.0
        summed = s.summed if s.sharded else s.compute
        share = 1.0 if s.engine and s.sharded else (count - 1) / count
        moved = share * (s.compute + 2 * summed)
        if s.sharded and not s.engine and summed != s.compute:  # the first one's are converted to the sum
            moved += (s.compute + summed) / count
        experts = 0.0 if s.adds_in_place else moved  # `Clock.seconds` has it
        if part.frozen:  # adapters: the experts are frozen
            return self.device.moving((part.rest + part.experts - part.frozen) * moved)
        return self.device.moving(part.rest * moved + part.experts * experts)

    @property
    def _within(self) -> bool:
        return self.sharing.data <= self.device.node
