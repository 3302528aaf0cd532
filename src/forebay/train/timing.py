"""How long a step of a run is expected to take: the trainer's configuration, as the planner's model of time needs it told.

In: a valid `Config`, its `LayerPlan`, a trace, the model's shapes, placements and a `DeviceProfile`. Out: a `StepTime`. The
figures are `forebay.planner`'s; this file knows what the trainer does with each key, and keeps nothing.

    keep, stash    as traced: pages cost the device 1 % of a layer (docs/log.md)
    recompute      of a MoE half with Forebay's experts their first product again; else forward again, exchanges included
    offload        "fit" costs nothing, for only what the link carries behind computation leaves; "all" makes a forward or
                   backward as long as its copies, and a pipeline's step as much longer as its plans may wait
    auto           the placements that were chosen
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forebay.planner.choose import Machine
from forebay.planner.device import DeviceProfile
from forebay.planner.figures import LayerTrace, ModelTrace, PartTrace
from forebay.planner.fit import Stage, alone
from forebay.planner.interleaved import WAITS
from forebay.planner.sharedtime import Elements, SharedTime
from forebay.planner.state import Sharing, Weights
from forebay.planner.steptime import Besides, StageTime, StepTime, lay
from forebay.planner.time import NOTHING, Clock, Spell
from forebay.train.config import Config
from forebay.train.planning import LayerPlan

HALF_LAUNCHES = 40
"""What a half's forward or backward costs the host besides its kernels (guards, hooks, autograd), in operations of the profile's
`launch`. Estimated: a quarter of a millisecond. No recorded run is held up by it, so none tells."""
CUT_LAUNCHES = 320
"""The same of a half that is cut where its tokens travel: segments, streams, FSDP2's experts. Calibrated with the H200's
`launch`, on eager runs of several hosts: see docs/planner.md."""
STEP_LAUNCHES = 500
"""What a step costs the host while the device has nothing to run: the batch, the optimizer's groups, reading the loss. 3 ms.
Calibrated on the grid, see docs/planner.md."""
EXCHANGE_LAUNCHES = 15
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
    weights: Weights
    sharing: Sharing
    prefix: str
    placements: Mapping[str, str]
    parameters: Sequence[int]
    stages: Sequence[Mapping[int, Stage]]
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

    def _stage(self, device: DeviceProfile, stage: Stage, engine: bool) -> StageTime:
        clock, shared = self._clock(device), self._shared(device)
        forward: list[Spell] = []
        backward: list[Spell] = []
        for number in stage.layers:
            there, back = self._layer(clock, number)
            more = shared.layer(self._elements(number), there, back)
            forward.append(there + Spell(more[0]))
            backward.insert(0, back + Spell(more[1]))
        if stage.embedding:
            part = self.trace.embedding
            forward[0] = forward[0] + clock.spell(part.forward_ops)
            if not engine:  # an engine spreads the tokens' gradients over the vocabulary once a step
                backward[-1] = backward[-1] + clock.spell(part.backward_ops)
        if stage.head:
            there, back = clock.spell(self.trace.head.forward_ops), clock.spell(self.trace.head.backward_ops)
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
        halves = (("self_attn", layer.attention), ("mlp", layer.mlp))
        return sum(p.saved for name, p in halves if self._placement(number, name) == "offload")

    def _placement(self, number: int, name: str) -> str:
        return self.placements.get(f"{self.prefix}.{number}.{name}", "keep")

    def _layer(self, clock: Clock, number: int) -> tuple[Spell, Spell]:
        layer: LayerTrace = self.trace.layers[number]
        there = back = NOTHING
        for name, part in (("self_attn", layer.attention), ("mlp", layer.mlp)):
            f, b = self._half(clock, part, self._placement(number, name))
            there, back = there + f, b + back
        if layer.is_moe:
            waits = self._synchronised()
            there = there + Spell(compute=waits, launches=waits / clock.device.at("launch"))
        return there, back

    def _half(self, clock: Clock, part: PartTrace, placement: str) -> tuple[Spell, Spell]:
        memory = self.config.memory
        forward, backward = clock.spell(part.forward_ops), clock.spell(part.backward_ops)
        if placement == "recompute":
            light = part.light_ops if memory.recompute != "full" else ()
            backward = clock.spell(light) if light else forward + backward
        more = STASH_LAUNCHES if placement == "stash" else 0
        p = self.config.parallel
        more += CUT_LAUNCHES if p.pp > 1 or p.overlap or p.ep > 1 else HALF_LAUNCHES
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
        return self.clock.spell(part.forward_ops).alone, self.clock.spell(part.backward_ops).alone


def machine_of(device: DeviceProfile, ep: int, sharing: Sharing) -> Machine:
    """What placements cost on a device, for `forebay.planner.choose`."""
    clock = Clock(device, ep, sharing.compute == 4)
    copied = device.at("bandwidth", 1 << 30)
    out_rate, back_rate, *ends = _host(device, sharing)
    return Machine(_ByClock(clock), out_rate, back_rate, copied, tuple(ends))


def _host(device: DeviceProfile, sharing: Sharing) -> tuple[float, ...]:
    return device.host(sharing.data * sharing.pp, sharing.pp > 1)


def _waiting(spells: Sequence[Spell], copies: float) -> Spell:
    """What copies of a whole pass take longer than the pass itself."""
    return Spell(compute=max(0.0, copies - sum(s.alone for s in spells)))


def _hosted(spell: Spell, ops: Sequence[Any], more: int) -> Spell:
    exchanges = sum(op.kind == "exchange" for op in ops)
    return replace(spell, launches=spell.launches + EXCHANGE_LAUNCHES * exchanges + more)


def _count(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))
