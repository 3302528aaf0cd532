"""How long a step takes: a roofline for every operation, laid on the schedule of each rank.

Input: the `OpCost`s of every part, a device profile, the actions of every pipeline rank, and how weights are sharded. Output: a
`StepTime`. `Clock` turns costs into seconds, `lay` puts them on the actions, `SharedTime` adds gathers and reductions of sharded
weights. Nothing is run or kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from forebay.estimate.device import DeviceProfile
from forebay.estimate.state import Sharing
from forebay.estimate.types import OpCost
from forebay.estimate.walk import ActionLike

# How long the parts of a model take on a device: a roofline, operation by operation.
#
# In: the `OpCost`s of a part (`forebay.estimate.op_costs`), and a `Clock` for a device. Out: a `KernelTime`: seconds of a
# forward or backward, computing and exchanging apart, and the kernels that the host launches for them. Nothing is run.
#
#     products, attention   max(FLOPs / what the device achieves at that size, bytes / bandwidth)
#     gemm_odd              the same, at a share of the products' rate (`_ODD`)
#     pointwise             bytes / bandwidth
#     walked                bytes / a share of the bandwidth (`_WALKED`)
#     exchange              bytes / all-to-all's rate at that size, within a node or between nodes, whichever takes longer
#     each kernel           the time between two kernels on top
#
# A spell has three shares, for they may run at different times: the experts' weight gradients, which nobody waits for;
# exchanges, which another microbatch's computation can hide; and the rest.

_RATES: Mapping[str, str] = MappingProxyType(
    {
        "gemm": "matmul_bf16",
        "gemm_odd": "matmul_bf16",
        "grouped": "grouped",
        "grouped_weights": "grouped_weights",
        "attention": "attention",
        "attention_backward": "attention_backward",
    }
)


_WALKED = 0.37
"""Share of a copy's bandwidth of a kernel that finds each element by itself: 1.5 of 4.0 TB/s, measured on an H200 of torch's loop
from fp32 into bf16 (`forebay.kernels.scale`)."""
_ODD = 0.03
"""Share of a product's rate where rows do not begin at multiples of 16 bytes, some 20 TFLOP/s on an H200. Calibrated on GPT-OSS,
whose eager attention has 4097 scores a row; see docs/estimator.md."""


@dataclass(frozen=True)
class KernelTime:
    """Seconds on the device; `launches` is a number, of kernels that the host launches.

    Attributes:
        compute: but for `weights`.
        exchange: all-to-alls.
        weights: the experts' weight gradients.
    """

    compute: float = 0.0
    exchange: float = 0.0
    weights: float = 0.0
    launches: float = 0

    @property
    def computing(self) -> float:
        """Seconds but for exchanges."""
        return self.compute + self.weights

    @property
    def alone(self) -> float:
        """Seconds where nothing runs beside it."""
        return self.computing + self.exchange

    def __add__(self, other: KernelTime) -> KernelTime:
        return KernelTime(
            self.compute + other.compute,
            self.exchange + other.exchange,
            self.weights + other.weights,
            self.launches + other.launches,
        )


NOTHING = KernelTime()


@dataclass(frozen=True)
class Clock:
    """Turns costs into seconds.

    Attributes:
        device: whose.
        ranks: that share experts, neighbours: as many of them on one node as it has GPUs.
        wide: products are in fp32: experts' and attention's run at fp32's rate too.
    """

    device: DeviceProfile
    ranks: int = 1
    wide: bool = False

    def kernel_time(self, ops: Iterable[OpCost]) -> KernelTime:
        """Of operations that run one after the other."""
        compute = exchange = weights = 0.0
        launches = 0
        for op in ops:
            seconds = self.seconds(op)
            launches += op.launches
            if op.kind == "exchange":
                exchange += seconds
            elif op.kind == "grouped_weights":
                weights += seconds
            else:
                compute += seconds
        return KernelTime(compute, exchange, weights, launches)

    def seconds(self, op: OpCost) -> float:
        """Of one operation; an all-to-all of no bytes is none."""
        gap = op.launches * self.device.at("kernel")
        if op.kind == "exchange":
            return self._sent(op.bytes) + gap if op.bytes else 0.0
        moved = self.moved(op.bytes)
        if op.kind == "pointwise":
            return moved + gap
        if op.kind == "walked":
            return moved / _WALKED + gap
        rate = self.device.at("matmul_fp32" if self.wide else _RATES[op.kind], op.flops)
        share = _ODD if op.kind == "gemm_odd" else 1.0
        return max(op.flops / (rate * share), moved) + gap

    def _sent(self, count: float) -> float:
        """Of an all-to-all: what goes to this node's other GPUs and what goes to other nodes are on their way at once."""
        node = min(self.device.node, self.ranks)
        away = count * (self.ranks - node) / max(1, self.ranks - 1)
        here = count - away
        within = here / self.device.link("all_to_all", True, here) if here else 0.0
        return max(within, away / self.device.link("all_to_all", False, away) if away else 0.0)

    def moved(self, count: float) -> float:
        """Seconds in which so many bytes are read and written."""
        return count / self.device.at("bandwidth", count)


# How long a step takes: the halves' seconds laid on what each rank does.
#
# In: for every stage its layers' `KernelTime`s forward and backward, every pipeline rank's list of actions, and what a step has
# besides: gathering and reducing of sharded weights, the optimizer, the host. Out: a `StepTime`. Nothing is run or kept.
#
#     action                  seconds
#     F                       every layer computes and exchanges
#     B                       the same; an engine makes the experts' weight gradients behind dispatch's gradient, the half of
#                             its exchanges (`forebay.pipeline.sublayer`)
#     I, W                    B without the experts' weight gradients; those
#     OVERLAP_F_B             layer by layer the longer of both microbatches' computing and both microbatches' exchanges; where
#                             one has no layer left, the other's runs as if alone
#
#     What hides an exchange takes longer itself, by a share of it (`contention`): both want the same memory and
#     multiprocessors.
#
# An action starts when its rank is free and what it needs has come: the stage before (forward) or behind (backward), and from
# another rank a message. A rank's bubble is the share of the time from the first action to the end in which it runs none.
#
# The host launches kernels ahead of the device, layer by layer: none ends before it is launched, and what the host gains while
# a long one runs, such as the head, is not lost. A captured step has no launches. Where tokens travel in sizes that the host
# has to know, it waits for the device once a layer and forward, and then has nothing launched ahead.


@dataclass(frozen=True)
class StageTime:
    """One microbatch in one stage; `forward` and `backward` in the order in which they run, an entry a layer or end."""

    forward: tuple[KernelTime, ...]
    backward: tuple[KernelTime, ...]


@dataclass(frozen=True)
class Besides:
    """Seconds of a step that no action of the schedule takes.

    Attributes:
        gather, reduce: of sharded weights and gradients, not hidden.
        optimizer: clipping and the update.
    """

    gather: float = 0.0
    reduce: float = 0.0
    optimizer: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and where they go.

    Attributes:
        device: name of the profile.
        schedule: from the first action to the last rank's end, on the device.
        launched: the same, with hosts that have to launch what runs; equal to `schedule` of a captured step.
        gather, reduce, optimizer: see `Besides`; of the slowest rank.
        host: what the slowest host needs for its launches; 0 of a captured step.
        busy: by pipeline rank, seconds in which an action runs.
        exposed: by pipeline rank, seconds of exchanges that nothing hides.
        tokens: of the global batch.
        measured: some figure of the device was measured on one; else all are data sheets'.
        around: seconds of the host between steps, while the device has nothing to run.
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

    @property
    def gradients(self) -> float:
        """Forwards and backwards of all microbatches, until reduced gradients are there."""
        return self.launched + self.gather + self.reduce

    @property
    def seconds(self) -> float:
        """All of a step."""
        return self.gradients + self.optimizer + self.around

    @property
    def tokens_per_second(self) -> float:
        """Of all processes."""
        return self.tokens / self.seconds

    @property
    def bubble(self) -> tuple[float, ...]:
        """By pipeline rank, share of the schedule in which nothing runs."""
        return tuple(1 - busy / self.schedule for busy in self.busy)

    @property
    def limited_by_host(self) -> bool:
        """Whether the host's launches take longer than what they launch."""
        return self.host > self.schedule

    def sentence(self) -> str:
        """For a person."""
        sheets = "" if self.measured else ", from data sheets"
        parts = [
            f"expected on {self.device}{sheets}: {self.seconds:.3f} s a step, {self.tokens_per_second:,.0f} tokens/s"
        ]
        if len(self.busy) > 1:
            parts.append(f"bubble {100 * min(self.bubble):.0f} to {100 * max(self.bubble):.0f} %")
        if self.limited_by_host:
            parts.append("the host's launches take longest: memory.graph = true captures them")
        return "; ".join(parts) + "."

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "device": self.device,
            "measured": self.measured,
            "seconds": self.seconds,
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


@dataclass(frozen=True)
class TimedSchedule:
    """A schedule in time: its length, and by rank how long it is busy, what of that are exchanges that wait, and launches."""

    seconds: float
    busy: tuple[float, ...]
    exposed: tuple[float, ...]
    launches: tuple[float, ...]


def lay(
    actions: Sequence[Sequence[ActionLike]],
    ranks: Sequence[int],
    stages: Mapping[int, StageTime],
    message: float = 0.0,
    engine: bool = True,
    contention: float = 0.0,
    launch: float = 0.0,
) -> TimedSchedule:
    """Lay the actions of all ranks in time.

    Args:
        actions: of each rank, those that compute; see `forebay.pipeline.schedule`.
        ranks: rank of each stage.
        message: seconds from a stage's end on one rank until another has its hidden states.
        engine: weight gradients of experts are made behind a transfer.
        contention: share of a hidden exchange by which what hides it takes longer.
        launch: seconds of the host for a launch; 0: all is captured.

    Raises:
        ValueError: actions that wait for each other, or for one that nobody has.
    """
    return _Layout(actions, ranks, message, _Times(stages, engine, contention), launch).run()


class _Layout:
    """One `lay`."""

    def __init__(
        self,
        actions: Sequence[Sequence[ActionLike]],
        ranks: Sequence[int],
        message: float,
        times: _Times,
        launch: float,
    ):
        self._actions, self._ranks, self._message = actions, ranks, message
        self._ended: dict[tuple[str, int, int], float] = {}
        self._free = [0.0] * len(actions)
        self._busy = [0.0] * len(actions)
        self._exposed = [0.0] * len(actions)
        self._launches = [0.0] * len(actions)
        self._times, self._launch = times, launch
        self._launched = [0.0] * len(actions)  # when each host has handed over all of its actions so far

    def run(self) -> TimedSchedule:
        at = [0] * len(self._actions)
        while any(i < len(todo) for i, todo in zip(at, self._actions, strict=True)):
            before = list(at)
            for rank, todo in enumerate(self._actions):
                while at[rank] < len(todo) and self._perform(rank, todo[at[rank]]):
                    at[rank] += 1
            if at == before:
                waits = ", ".join(str(todo[i]) for i, todo in zip(at, self._actions, strict=True) if i < len(todo))
                raise ValueError(f"these actions wait for what never comes: {waits}")
        return TimedSchedule(max(self._free), tuple(self._busy), tuple(self._exposed), tuple(self._launches))

    def _perform(self, rank: int, action: ActionLike) -> bool:
        parts = tuple(action.parts) or (action,)
        start = self._free[rank]
        for part in parts:
            ready = self._ready(rank, part)
            if ready is None:
                return False
            start = max(start, ready)
        spent = self._times.of(action)
        end, computing, exposed, launches = start, 0.0, 0.0, 0.0
        for segment in spent:
            self._launched[rank] += segment[2] * self._launch
            end = max(end + segment[0] + segment[1], self._launched[rank])
            computing, exposed, launches = computing + segment[0], exposed + segment[1], launches + segment[2]
        for part in parts:
            self._ended["F" if part.kind == "F" else "B", part.stage, part.microbatch] = end
        self._free[rank] = end
        self._busy[rank] += computing + exposed
        self._exposed[rank] += exposed
        self._launches[rank] += launches
        return True

    def _ready(self, rank: int, part: Any) -> float | None:
        """When what a forward or backward needs is there; None if that has not run yet."""
        last = len(self._ranks) - 1
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
        return ended + (self._message if self._ranks[source[1]] != rank else 0.0)


TimeSegment = tuple[float, float, float]
"""Seconds computing, seconds of exchanges that nothing hides, launches: of a layer or an end."""


class _Times:
    """The segments of actions; each kind of action is counted once."""

    def __init__(self, stages: Mapping[int, StageTime], engine: bool, contention: float):
        self._stages, self._engine, self._contention = stages, engine, contention
        self._known: dict[tuple[Any, ...], list[TimeSegment]] = {}

    def of(self, action: ActionLike) -> list[TimeSegment]:
        what = (action.kind, action.stage, *(part.stage for part in action.parts))
        if what not in self._known:
            self._known[what] = self._count(action)
        return self._known[what]

    def _count(self, action: ActionLike) -> list[TimeSegment]:
        if action.kind == "OVERLAP_F_B":
            forward, backward = action.parts
            return self._overlap_fwd_bwd(self._stages[forward.stage].forward, self._stages[backward.stage].backward)
        stage = self._stages[action.stage]
        match action.kind:
            case "F":
                return self._overlap_fwd_bwd(stage.forward, ())
            case "B":
                return self._overlap_fwd_bwd((), stage.backward)
            case "I":
                return [
                    (kernel_time.compute, kernel_time.exchange, kernel_time.launches) for kernel_time in stage.backward
                ]
            case "W":
                return [(sum(kernel_time.weights for kernel_time in stage.backward), 0.0, 0.0)]
        raise ValueError(f"{action} computes nothing")

    def _overlap_fwd_bwd(self, forward: Sequence[KernelTime], backward: Sequence[KernelTime]) -> list[TimeSegment]:
        found = []
        for k in range(max(len(forward), len(backward))):
            f = forward[k] if k < len(forward) else NOTHING
            b = backward[k] if k < len(backward) else NOTHING
            exchange = f.exchange + b.exchange
            if f is not NOTHING and b is not NOTHING:
                hides = f.computing + b.computing
            else:
                hides = min(b.exchange / 2, b.weights) if self._engine else 0.0
            hidden = min(exchange, hides)
            computing = f.computing + b.computing + self._contention * hidden
            found.append((computing, exchange - hidden, f.launches + b.launches))
        return found


# What sharded weights cost a step in time: gathering them, reducing their gradients, and adding gradients up.
#
# In: how many elements the parts of a stage have, a `Sharing`, and a device. Out: seconds, of a step and of each microbatch of
# a layer.
#
# Gathering N elements of n processes: each casts its own part and sends it, and what arrives is copied to where weights live.
#
#     bytes of device memory   N / n (parameter + compute) + 2 N compute, and 2 N compute more where n = 1: a gather to itself
#     bytes of the link        N compute (n - 1) / n
#
# Reducing: gradients are copied in chunks, summed over processes, and the own part is cast. Nothing is reduced where n = 1, but
# cast where two dtypes meet.
#
#     bytes of device memory   2 N summed + N / n (summed + parameter)
#     bytes of the link        N summed (n - 1) / n
#
# Adding a microbatch's gradients to the sum of the others: N (compute + 2 summed) bytes. Where sums are wider than gradients,
# FSDP2 converts the first microbatch's: N (compute + summed). An engine begins with zeros: N summed; its experts add where they
# make a gradient (`forebay.kernels.grouped_wgrad`), which is neither written nor read: N (2 summed - compute), for their
# products count it.
#
# Engines (`forebay.train.unsharded_step`) gather once before a step and reduce once behind it, and nothing hides that; experts
# that are given back after each use are gathered for each forward and backward. Otherwise FSDP2 gathers the next layer while
# one runs, and reduces one while the next runs: what the link takes longer than the layer waits, and copies always run. What
# hides a transfer takes longer itself, by the share of it (`contention`) that an all-to-all costs. Embedding and head are
# gathered and reduced where nothing hides it, and their gradients are added up as a layer's are.

_STEPPING = 0.88
"""Share of a copy's bandwidth at which the optimizer's and clipping's kernels go over many tensors at once. Calibrated on the
grid, see docs/estimator.md."""


@dataclass(frozen=True)
class Elements:
    """That a process computes with in a part: of its experts, and of all else."""

    rest: int
    experts: int = 0


@dataclass(frozen=True)
class Moved:
    """Seconds of copies on the device, and of the link."""

    copies: float = 0.0
    link: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.copies + other.copies, self.link + other.link)

    @property
    def exposed(self) -> float:
        """Seconds where nothing hides it."""
        return self.copies + self.link

    def beside(self, seconds: float, contention: float) -> float:
        """Seconds where the link has so many seconds to hide behind, each of which `contention` makes longer."""
        hidden = min(self.link, seconds)
        return self.copies + self.link - hidden + contention * hidden


@dataclass(frozen=True)
class SharedTime:
    """See the module docstring.

    Attributes:
        microbatches: of a process in a step.
    """

    device: DeviceProfile
    sharing: Sharing
    microbatches: int
    _clock: Clock = field(init=False)
    _contention: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_clock", Clock(self.device))
        object.__setattr__(self, "_contention", self.device.at("contention"))

    def layer(self, part: Elements, forward: KernelTime, backward: KernelTime) -> tuple[float, float]:
        """Seconds of a microbatch's forward and backward through a layer, besides its own."""
        s, count = self.sharing, self.microbatches
        adding = self._adding(part)
        if not s.sharded:
            return 0.0, adding
        if s.gathered:
            again = self._gather(part.experts, self._columns).exposed if s.reshard else 0.0
            return again, again + adding
        gather, reduce = self._gathers(part), self._reduces(part)
        times = 1.0 if s.reshard else 1.0 / count
        back = 0.0 if not s.reshard else gather.beside(backward.computing, self._contention)
        reduced = reduce.beside(backward.computing, self._contention) / (count if s.sums else 1)
        return times * gather.beside(forward.computing, self._contention), back + adding + reduced

    def step(self, parts: Sequence[Elements], ends: Elements, parameters: int, fused: bool, clips: bool) -> Besides:
        """Seconds of a rank's step besides its microbatches'.

        Args:
            parts, ends: of all its layers, and of embedding and head.
            parameters: bytes of its own shards.
            fused: AdamW reads parameter, gradient and two moments and writes all but the gradient, once; else in passes of one
                operation each, about 14 reads and writes of a shard more.
            clips: gradients are scaled.
        """
        s = self.sharing
        optimizer = self._clock.moved(parameters * ((7 if fused else 21) + 1 + 2 * clips)) / _STEPPING
        adding = self.microbatches * self._adding(ends)
        if not s.sharded:
            return Besides(reduce=adding, optimizer=optimizer)
        inside = parts if s.gathered else ()
        gathers = sum((self._gathers(p) for p in (*inside, ends)), Moved())
        if s.gathered and s.reshard:  # experts come with their layers
            gathers = sum((self._gather(p.rest, s.data) for p in (*inside, ends)), Moved())
        reduces = sum((self._reduces(p) for p in (*inside, ends)), Moved())
        if s.gathered:  # zeros to sum in
            zeros = s.summed * sum(p.rest + p.experts for p in (*inside, ends))
            gathers += Moved(copies=self._clock.moved(zeros))
        return Besides(gathers.exposed, reduces.exposed + (0.0 if s.gathered else adding), optimizer)

    @property
    def _columns(self) -> int:
        return self.sharing.data // self.sharing.ep

    def _gathers(self, part: Elements) -> Moved:
        s = self.sharing
        if s.ep == 1:
            return self._gather(part.rest + part.experts, s.data)
        return self._gather(part.rest, s.data) + self._gather(part.experts, self._columns)

    def _reduces(self, part: Elements) -> Moved:
        s = self.sharing
        if s.ep == 1:
            return self._reduce(part.rest + part.experts, s.data)
        return self._reduce(part.rest, s.data) + self._reduce(part.experts, self._columns)

    def _gather(self, elements: int, processes: int) -> Moved:
        s = self.sharing
        moved = elements / processes * (s.parameter + s.compute) + 2 * elements * s.compute * (
            2 if processes == 1 else 1
        )
        sent = elements * s.compute * (processes - 1) / processes
        return Moved(self._clock.moved(moved), sent / self.device.link("all_gather", self._within))

    def _reduce(self, elements: int, processes: int) -> Moved:
        s = self.sharing
        if processes == 1:
            cast = 0 if s.summed == s.parameter else elements * (s.summed + s.parameter)
            return Moved(self._clock.moved(cast))
        moved = 2 * elements * s.summed + elements / processes * (s.summed + s.parameter)
        sent = elements * s.summed * (processes - 1) / processes
        return Moved(self._clock.moved(moved), sent / self.device.link("reduce_scatter", self._within))

    def _adding(self, part: Elements) -> float:
        """Into zeros or an earlier sum; without an engine the first microbatch's gradients are the sum."""
        s, count = self.sharing, self.microbatches
        if s.sharded and not (s.gathered or s.sums):
            return 0.0
        summed = s.summed if s.sharded else s.compute
        share = 1.0 if s.gathered and s.sharded else (count - 1) / count
        moved = share * (s.compute + 2 * summed)
        if s.sharded and not s.gathered and summed != s.compute:  # the first one's become the sum by a conversion
            moved += (s.compute + summed) / count
        experts = moved - 2 * s.compute if s.adds_in_place else moved
        return self._clock.moved(part.rest * moved + part.experts * experts)

    @property
    def _within(self) -> bool:
        return self.sharing.data <= self.device.node
