"""A run on one pipeline rank: the memory of its fullest process, its placements, and the time of its step.

Input: a valid `Config`, its `LayerPlan`, traces and placements. Output: the rank's `RankFit` with reserved memory,
the `Choice` of placements where one is asked for, and a `StepTime`. This module knows what the trainer does with each
key. Nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from forebay.config import Config
from forebay.estimate.device import DeviceProfile
from forebay.estimate.fsdp import groups_of
from forebay.estimate.layers import LayerPlan
from forebay.estimate.placement import Choice, Machine, choose, parts_by_path, rank_options
from forebay.estimate.reserved import Rank, reserve, shortened, with_reserved
from forebay.estimate.state import RankState, Sharing, WeightShapes, state_of
from forebay.estimate.step_time import (
    NOTHING,
    Besides,
    Clock,
    Elements,
    KernelTime,
    SharedTime,
    StageTime,
    StepTime,
    lay,
)
from forebay.estimate.types import LayerTrace, ModelTrace, PartTrace
from forebay.estimate.walk import (
    Held,
    Part,
    PlacedSublayer,
    RankFit,
    Seen,
    StageLayers,
    alone,
    fit_rank,
    offloaded_bytes,
    parts_of,
    plan_link,
    sublayers_of,
    within,
)
from forebay.memory.offload_plan import WAITS
from forebay.memory.timeline import LIGHT, Plan
from forebay.pipeline.model import adds_at_once
from forebay.pipeline.schedule import turns
from forebay.policy import format_bytes, parse_bytes

# A run laid on one pipeline rank: what its fullest process holds, and placements that are chosen for it.
#
# In: what a plan knows of the whole run (`Layout`), a rank, and placements. Out: a `RankEstimate`: the rank's `RankFit`, reserved
# memory included, its halves, and the `Choice` where placements were to be chosen. Nothing is kept between ranks.
#
# A choice is made with the walk of `forebay.estimate.walk`, in which memory is a sum over halves; what the allocator holds
# besides is known only when its placements are laid. So a choice whose reserved memory is above the limit is made again, for as
# much less.

_MESSAGES = 4  # tensors of hidden states on their way in a pipeline: one in and one out, each way
_LEAST, _LEAST_PIPELINE = 1 << 20, 16 << 20  # bytes below which the manager leaves a tensor where it is
_ATTEMPTS = 3  # at a choice: what the allocator holds besides depends on the placements, but little


@dataclass(frozen=True)
class RankEstimate:
    """Of a rank. `over`: which one and by how much, if no placements were found that are within the limit."""

    stages: Mapping[int, StageLayers]
    fit: RankFit
    sublayers: tuple[Held, ...]
    state: RankState
    choice: Choice | None = None
    over: str = ""


@dataclass(frozen=True)
class Layout:
    """Of a run.

    Attributes:
        weights, prefix, trace, sharing: the model's shapes, the path of its layers, its trace, and who shares it.
        placements: half's path to placement, for ranks for which none are chosen.
        hidden: numbers of hidden states of a microbatch, tokens times width.
        exchange: bytes that exchanging tokens takes outside of the allocator.
        actions: by pipeline rank; None without a pipeline.
        budget: bytes a process may use; None where none was given.
        auto: bytes within which placements are chosen; None where they are the configuration's.
        machine: what placements cost.
    """

    config: Config
    plan: LayerPlan
    weights: WeightShapes
    prefix: str
    trace: ModelTrace
    sharing: Sharing
    placements: Mapping[str, str]
    hidden: int
    exchange: int
    actions: Sequence[Sequence[Any]] | None
    budget: int | None
    auto: int | None
    machine: Machine

    @property
    def engine(self) -> bool:
        """A pipeline or overlap runs the stages."""
        return self.config.parallel.pp > 1 or self.config.parallel.overlap

    @property
    def chooses(self) -> bool:
        """Whether placements are chosen."""
        return self.auto is not None or self.config.memory.policy == "auto"

    def rank(self, number: int, seen: Seen | None = None) -> RankEstimate:
        """Lay pipeline rank `number`; `seen` is told of every level of its step."""
        stages = _stages(self.plan, number)
        layers = [n for stage in stages.values() for n in stage.layers]
        ends = any(s.embedding for s in stages.values()), any(s.head for s in stages.values())
        state = state_of(self.weights, layers, *ends, self.sharing)
        state = replace(state, other=state.other + self.exchange)
        placements, choice, over = self.placements, None, ""
        if self.chooses:
            limit = self._limit(state)
            choice, total = self._chosen(number, state, stages, limit)
            placements = choice.placements
            if total > limit:
                over = f"rank {number} by {format_bytes(total - limit)}"
        fit, sublayers = self._fit(number, state, stages, placements, seen)
        return RankEstimate(stages, fit, tuple(sublayers), state, choice, over)

    def _chosen(
        self, number: int, state: RankState, stages: Mapping[int, StageLayers], limit: int
    ) -> tuple[Choice, int]:
        """The choice, and what it takes of the limit. The trainer's own choice asks for what is allocated alone."""
        options, times = rank_options(self.trace, stages, self._allowed(), self.machine, **self._ways())
        waits = self.auto is None or self.config.memory.offload == "all"
        within = limit
        for _ in range(_ATTEMPTS):
            choice = choose(
                number, state, options, times, self._todo(number), self._messages(), within, self.machine, waits
            )
            fit = self._fit(number, state, stages, choice.placements, None)[0]
            total = fit.total if self.auto is not None else fit.total - fit.cached
            if total <= limit or choice.fit.total > within:
                break
            within = min(within, choice.fit.total) - (
                total - limit
            )  # from what the walk had, not from what it might have had
        return choice, total

    def _fit(
        self,
        number: int,
        state: RankState,
        stages: Mapping[int, StageLayers],
        placements: Mapping[str, str],
        seen: Seen | None,
    ) -> tuple[RankFit, list[Held]]:
        paper = self._on_paper(number, stages, placements)
        carried = None
        if paper.link is not None:
            carried = offloaded_bytes(paper.link, self._timed(stages, paper.stages), paper.hidden, paper.least)
        ways = {**self._ways(), "carried": carried}
        found = {n: sublayers_of(self.trace, stage, placements, **ways) for n, stage in stages.items()}
        fit = fit_rank(number, state, found, self._todo(number), self._messages(), seen)
        if self.sharing.gpu:
            fit = with_reserved(fit, reserve(paper))
        return fit, [sublayer for stage in found.values() for sublayer in stage]

    def _on_paper(self, number: int, stages: Mapping[int, StageLayers], placements: Mapping[str, str]) -> Rank:
        c = self.config
        layers = [n for stage in stages.values() for n in stage.layers]
        ends = any(s.embedding for s in stages.values()), any(s.head for s in stages.values())
        actions = self._todo(number) if self.actions is None else self.actions[number]
        vocabulary = self.trace.head_gradient, self.hidden * self.sharing.summed
        rank = Rank(
            groups_of(self.weights, layers, *ends, self.sharing),
            self.sharing,
            {
                n: parts_of(self.trace, stage, placements, prefix=self.prefix, recompute=c.memory.recompute)
                for n, stage in stages.items()
            },
            shortened(actions, self.engine),
            self.engine,
            vocabulary if self._summed() else None,
            self.hidden * self.sharing.compute,
            turns,
            graph=c.memory.graph,
            drawn=not (c.model.path and c.model.weights == "load"),
            pipeline=c.parallel.pp > 1,
            at_once=self._at_once(),
            tied=self.weights.tied,
            least=(_LEAST_PIPELINE if c.parallel.pp > 1 else _LEAST) if self.sharing.gpu else 1,
        )
        # A choice of placements says itself what leaves.
        if self.chooses or "offload" not in placements.values():
            return rank
        return replace(rank, link=self._link(number, rank, self._timed(stages, rank.stages)))

    def _link(self, number: int, rank: Rank, sublayers: Mapping[int, Sequence[PlacedSublayer]]) -> Plan:
        """What the run's manager will plan. Of a process alone, for each microbatch anew. On a CPU a copy takes no time."""
        todo = self._todo(number)
        m = self.machine
        rates = (
            (m.out_rate, m.back_rate, *(m.end_rates or (None, None)), m.copy_rate) if self.sharing.gpu else (inf, inf)
        )
        return plan_link(
            sublayers,
            todo if self.engine else [action for action in todo if action.microbatch == 0],
            rates,
            hidden=rank.hidden,
            least=rank.least,
            everything=self.config.memory.offload == "all",
        )

    def _timed(
        self, stages: Mapping[int, StageLayers], laid: Mapping[int, Sequence[Part]]
    ) -> dict[int, list[PlacedSublayer]]:
        """The halves of stages with the seconds that they take, what is made again in backward included."""
        found: dict[int, list[PlacedSublayer]] = {}
        for number, stage in stages.items():
            traces = parts_by_path(self.trace, stage, self.prefix)
            found[number] = []
            for part in laid[number]:
                trace = traces[part.path]
                forward, backward = self.machine.seconds(trace)
                if part.events is trace.light_events:
                    backward += LIGHT * forward
                elif part.placement == "recompute":
                    backward += forward
                found[number].append(
                    PlacedSublayer(part.path, part.events, part.placement == "offload", forward, backward)
                )
        return found

    def _todo(self, number: int) -> Any:
        """What the rank computes in a step."""
        if self.actions is None:
            return alone(self.plan.microbatches, self.config.parallel.overlap)
        return [action for action in self.actions[number] if action.computes]

    def _messages(self) -> int:
        return _MESSAGES * self.hidden * self.sharing.compute if self.config.parallel.pp > 1 else 0

    def _summed(self) -> bool:
        """Whether the engine sums the vocabulary's gradients itself."""
        return self.engine and self.sharing.sharded and self.sharing.summed > self.sharing.compute

    def _at_once(self) -> bool:
        """Whether it adds those of embedded tokens as they are made."""
        (vocabulary, width), *_ = self.weights.embedding
        tokens = self.plan.microbatches * self.hidden // width
        return self._summed() and adds_at_once(tokens, vocabulary, self.sharing.compute)

    def _ways(self) -> dict[str, Any]:
        recompute = self.config.memory.recompute
        summed = {"summed": self._summed(), "at_once": self._at_once()}
        return {"prefix": self.prefix, "recompute": recompute, "engine": self.engine, **summed}

    def _allowed(self) -> frozenset[str]:
        """What the trainer can carry out; its own `policy = "auto"` stashes nothing."""
        if self.auto is None:
            return frozenset({"recompute", "offload"})
        found = {"recompute", *(("stash",) if self.config.parallel.ep > 1 else ())}
        return frozenset(found if self.config.parallel.overlap else {*found, "offload"})

    def _limit(self, state: RankState) -> int:
        """Bytes: `memory.budget` is over what is held before a forward, and counts for the trainer's own choice. The manager
        measures that in its second cycle: of several microbatches, with the gradients of the first."""
        if self.auto is not None:
            return self.auto
        before = state.parameters + state.optimizer + state.other
        before += state.gradients if state.at_once or self.plan.microbatches > 1 else 0
        own = before + parse_bytes(self.config.memory.budget)
        return own if self.budget is None else min(own, within(self.budget))


def _stages(plan: LayerPlan, rank: int) -> dict[int, StageLayers]:
    """The stages of a rank by number; its layers have places in the order of the forward."""
    found, last, before = {}, len(plan.partition.layers) - 1, 0
    for number in plan.partition.stages(rank):
        layers = plan.partition.layers[number]
        found[number] = StageLayers(layers, tuple(range(before, before + len(layers))), number == 0, number == last)
        before += len(layers)
    return found


# How long a step of a run is expected to take: the trainer's configuration, as the planner's model of time needs it told.
#
# In: a valid `Config`, its `LayerPlan`, a trace, the model's shapes, placements and a `DeviceProfile`. Out: a `StepTime`. The
# figures are `forebay.estimate`'s; this file knows what the trainer does with each key, and keeps nothing.
#
#     keep, stash    as traced: pages cost the device 1 % of a layer (benchmarks/LOG.md)
#     recompute      of a MoE half with Forebay's experts their first product again; else forward again, exchanges included
#     offload        "fit" costs nothing, for only what the link carries behind computation leaves; "all" makes a forward or
#                    backward as long as its copies, and a pipeline's step as much longer as its plans may wait
#     auto           the placements that were chosen

SUBLAYER_LAUNCHES = 40
"""What a half's forward or backward costs the host besides its kernels (guards, hooks, autograd), in operations of the profile's
`launch`. Estimated: a quarter of a millisecond. No recorded run is held up by it, so none tells."""
CUT_LAUNCHES = 320
"""The same of a half that is cut where its tokens travel: segments, streams, FSDP2's experts. Calibrated with the H200's
`launch`, on eager runs of several hosts: see docs/estimator.md."""
STEP_LAUNCHES = 500
"""What a step costs the host while the device has nothing to run: the batch, the optimizer's groups, reading the loss. 3 ms.
Calibrated on the grid, see docs/estimator.md."""
ALL_TO_ALL_LAUNCHES = 15
"""The same, of an exchange: 0.09 ms eager (benchmarks/results/ep_exchange_4gpu.md)."""
STASH_LAUNCHES = 55
"""What pages cost a half's forward or backward besides: 85 ms of host in 128 layers, stash against capacity, both eager
(benchmarks/results/paging_ep2_memory.md)."""
# Seconds of a layer and microbatch that an exchange of exact sizes takes longer, for the host waits in it and has nothing
# launched ahead then. Calibrated: nccl against capacity in benchmarks/results/paging_ep2_qwen3.md, and Qwen3's own routing
# against float32 in ep.md; the dispatch alone, in ep_exchange_4gpu.md, is longer by 0.6 and 0.1 ms.
_SYNCHRONISED: Mapping[str, float] = {"nccl": 3.0e-3, "symmetric": 1.4e-3}


@dataclass(frozen=True)
class Timed:
    """What a step's time is made from; see the module docstring.

    Attributes:
        prefix: module path of the layers.
        placements: half's path to placement; "keep" where it is not named.
        parameters: by pipeline rank, bytes of its own shards.
        stages: by pipeline rank, its stages by number.
        actions: by pipeline rank; None without a pipeline.
    """

    config: Config
    plan: LayerPlan
    trace: ModelTrace
    weights: WeightShapes
    sharing: Sharing
    prefix: str
    placements: Mapping[str, str]
    parameters: Sequence[int]
    stages: Sequence[Mapping[int, StageLayers]]
    actions: Sequence[Sequence[Any]] | None

    def on(self, device: DeviceProfile) -> StepTime:
        """The step's time on a device."""
        p = self.config.parallel
        engine = p.pp > 1 or p.overlap
        times = {n: self._stage(device, stage, engine) for mine in self.stages for n, stage in mine.items()}
        actions = self.actions or [alone(self.plan.microbatches, p.overlap)]
        ranks = [next(r for r, mine in enumerate(self.stages) if n in mine) for n in sorted(times)]
        message, contention = self._message(device) if p.pp > 1 else 0.0, device.at("contention")
        laid = lay(actions, ranks, times, message, engine, contention)
        launch = 0.0 if self.config.memory.graph else device.at("launch")
        launched = lay(actions, ranks, times, message, engine, contention, launch).seconds if launch else laid.seconds
        waits = 1 + WAITS if self._everything and self._alternates else 1.0
        besides = [self._besides(device, rank) for rank in range(len(self.stages))]
        slowest = max(besides, key=lambda b: b.gather + b.reduce)
        host = max(laid.launches) * launch
        return StepTime(
            device=device.name,
            schedule=waits * laid.seconds,
            launched=waits * launched,
            gather=slowest.gather,
            reduce=slowest.reduce,
            optimizer=max(b.optimizer for b in besides),
            host=host,
            busy=laid.busy,
            exposed=laid.exposed,
            tokens=self.config.train.batch * self.config.train.sequence,
            measured=bool(device.measured()),
            around=STEP_LAUNCHES * device.at("launch"),
        )

    @property
    def _everything(self) -> bool:
        return self.config.memory.offload == "all" and "offload" in self.placements.values()

    @property
    def _alternates(self) -> bool:
        """Whether forwards follow backwards, as in a pipeline with more microbatches than ranks: such plans wait little."""
        return self.plan.microbatches > self.config.parallel.pp > 1

    def _clock(self, device: DeviceProfile) -> Clock:
        return Clock(device, self.config.parallel.ep, self.sharing.compute == 4)

    def _shared(self, device: DeviceProfile) -> SharedTime:
        return SharedTime(device, self.sharing, self.plan.microbatches)

    def _stage(self, device: DeviceProfile, stage: StageLayers, engine: bool) -> StageTime:
        clock, shared = self._clock(device), self._shared(device)
        forward: list[KernelTime] = []
        backward: list[KernelTime] = []
        for number in stage.layers:
            there, back = self._layer(clock, number)
            more = shared.layer(self._elements(number), there, back)
            forward.append(there + KernelTime(more[0]))
            backward.insert(0, back + KernelTime(more[1]))
        if stage.embedding:
            part = self.trace.embedding
            forward[0] = forward[0] + clock.kernel_time(part.forward_ops)
            if not engine:  # an engine spreads the tokens' gradients over the vocabulary once a step
                backward[-1] = backward[-1] + clock.kernel_time(part.backward_ops)
        if stage.head:
            there, back = (
                clock.kernel_time(self.trace.head.forward_ops),
                clock.kernel_time(self.trace.head.backward_ops),
            )
            forward.append(there + back if engine else there)
            if not engine:
                backward.insert(0, back)
        if self._everything and not self._alternates:
            moved = sum(self._offloaded(number) for number in stage.layers)
            out_rate, back_rate = _host(device, self.sharing)[:2]
            forward[-1] = forward[-1] + _waiting(forward, moved / out_rate)
            backward[-1] = backward[-1] + _waiting(backward, moved / back_rate)
        return StageTime(tuple(forward), tuple(backward))

    def _offloaded(self, number: int) -> int:
        """Bytes that a microbatch's layer sends to the host and gets back."""
        layer: LayerTrace = self.trace.layers[number]
        sublayers = (("self_attn", layer.attention), ("mlp", layer.mlp))
        return sum(p.saved for name, p in sublayers if self._placement(number, name) == "offload")

    def _placement(self, number: int, name: str) -> str:
        return self.placements.get(f"{self.prefix}.{number}.{name}", "keep")

    def _layer(self, clock: Clock, number: int) -> tuple[KernelTime, KernelTime]:
        layer: LayerTrace = self.trace.layers[number]
        there = back = NOTHING
        for name, part in (("self_attn", layer.attention), ("mlp", layer.mlp)):
            f, b = self._sublayer(clock, part, self._placement(number, name))
            there, back = there + f, b + back
        if layer.is_moe:
            waits = self._synchronised()
            there = there + KernelTime(compute=waits, launches=waits / clock.device.at("launch"))
        return there, back

    def _sublayer(self, clock: Clock, part: PartTrace, placement: str) -> tuple[KernelTime, KernelTime]:
        memory = self.config.memory
        forward, backward = clock.kernel_time(part.forward_ops), clock.kernel_time(part.backward_ops)
        if placement == "recompute":
            light = part.light_ops if memory.recompute != "full" else ()
            backward = clock.kernel_time(light) if light else forward + backward
        more = STASH_LAUNCHES if placement == "stash" else 0
        p = self.config.parallel
        more += CUT_LAUNCHES if p.pp > 1 or p.overlap or p.ep > 1 else SUBLAYER_LAUNCHES
        return _hosted(forward, part.forward_ops, more), _hosted(backward, part.backward_ops, more)

    def _synchronised(self) -> float:
        """Seconds that a dispatch of exact sizes costs over one that knows its sizes."""
        p = self.config.parallel
        if p.ep == 1:
            return 0.0
        if p.dispatch == "nccl" or (p.dispatch == "auto" and p.ep > 8):
            return _SYNCHRONISED["nccl"]
        return 0.0 if p.capacity_factor else _SYNCHRONISED["symmetric"]

    def _elements(self, number: int) -> Elements:
        rest, experts = self.weights.layers[number]
        return Elements(_count(rest), _count(experts) // self.sharing.ep)

    def _besides(self, device: DeviceProfile, rank: int) -> Besides:
        mine = self.stages[rank].values()
        layers = [self._elements(n) for stage in mine for n in stage.layers]
        ends = sum(_count(self.weights.embedding) for s in mine if s.embedding)
        ends += sum(_count(self.weights.head) for s in mine if s.head)
        fused, clips = self.config.optimizer.fused, self.config.train.clip > 0
        return self._shared(device).step(layers, Elements(ends), self.parameters[rank], fused, clips)

    def _message(self, device: DeviceProfile) -> float:
        """Hidden states of a microbatch to the neighbour."""
        size = self.trace.layers[0].attention.inputs
        world = self.sharing.data * self.sharing.pp
        return size / device.link("all_to_all", world <= device.node, size) + device.at("kernel")


@dataclass(frozen=True)
class _ByClock:
    """Seconds of a part on the device alone."""

    clock: Clock

    def __call__(self, part: PartTrace) -> tuple[float, float]:
        return self.clock.kernel_time(part.forward_ops).alone, self.clock.kernel_time(part.backward_ops).alone


def machine_of(device: DeviceProfile, ep: int, sharing: Sharing) -> Machine:
    """What placements cost on a device, for `forebay.estimate.placement`."""
    clock = Clock(device, ep, sharing.compute == 4)
    copied = device.at("bandwidth", 1 << 30)
    out_rate, back_rate, *ends = _host(device, sharing)
    return Machine(_ByClock(clock), out_rate, back_rate, copied, tuple(ends))


def _host(device: DeviceProfile, sharing: Sharing) -> tuple[float, ...]:
    return device.host(sharing.data * sharing.pp, sharing.pp > 1)


def _waiting(kernel_times: Sequence[KernelTime], copies: float) -> KernelTime:
    """What copies of a whole pass take longer than the pass itself."""
    return KernelTime(compute=max(0.0, copies - sum(s.alone for s in kernel_times)))


def _hosted(kernel_time: KernelTime, ops: Sequence[Any], more: int) -> KernelTime:
    exchanges = sum(op.kind == "exchange" for op in ops)
    return replace(kernel_time, launches=kernel_time.launches + ALL_TO_ALL_LAUNCHES * exchanges + more)


def _count(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))
