"""Tensors that autograd saves in a step of a pipeline, on this rank: bytes by decoder layer, part and microbatch, and the peak.

Input: a `Trainer` on a pipeline. Output: a `PipelineProfile`, plain figures. The forwards and backwards of one step run in the
schedule's order with the placements off; the gradients are discarded. Storages are counted whole, as in
`forebay.memory.profiler`, once a microbatch, for the layer and part that saved them first. Weights are counted apart, and so
are storages that several microbatches save (masks, rotary tables, the batch); with a single microbatch these count for the
first layer. Not counted: deferred weight gradients (`forebay.moe.wgrad`) and messages between ranks, which are not autograd's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from forebay.errors import UsageError
from forebay.memory.profiler import StorageNumbers, WeightStorages, plain_parts
from forebay.pipeline.partition import Partition
from forebay.pipeline.runtime import Stage
from forebay.pipeline.schedule import FORWARD, Action, PipelinePlan
from forebay.pipeline.sublayer import Layer
from forebay.policy import format_bytes
from forebay.train.trainer import Trainer

# In the order of the forward. "dense": all of a layer without experts but its attention; "front": norm, router and shared
# experts of a layer with experts, "experts" on the rows they are sent, and "back" what some families do with their sums;
# "head": last norm, head and loss, freed when its forward is over.
_PARTS = ("embedding", "attention", "dense", "front", "experts", "back", "head")


class Place(NamedTuple):
    """Where something was saved. `layer` is its number in the whole model, None for embedding and head."""

    stage: int
    layer: int | None
    part: str

    @property
    def in_forward_order(self) -> tuple[int, int, int, int]:
        """Sorts places as the forward goes through them."""
        at = {"embedding": -1, "head": 1}.get(self.part, 0)
        return self.stage, at, self.layer or 0, _PARTS.index(self.part)


@dataclass(frozen=True)
class Saved:
    """Saved in one place for one microbatch: bytes of activations, and of weights, which the model holds anyway."""

    place: Place
    microbatch: int
    nbytes: int
    weight_bytes: int


@dataclass(frozen=True)
class PipelineProfile:
    """Bytes that one rank saved in one step."""

    schedule: str  # its name
    rank: int  # this pipeline rank
    ranks: int  # how many there are
    microbatches: int  # of a step
    saved: tuple[Saved, ...]  # by place in the order of the forward, then by microbatch
    shared_bytes: int  # of storages that several microbatches save, each once
    in_flight: Mapping[int, int]  # stage -> most microbatches for which it held something
    peak_bytes: int  # peak of the activations of all stages together
    peak_in_flight: Mapping[int, int]  # stage -> microbatches for which it held something at that peak

    @cached_property
    def by_place(self) -> dict[Place, list[int]]:
        """Bytes of activations of each microbatch."""
        found: dict[Place, list[int]] = {}
        for saved in self.saved:
            found.setdefault(saved.place, [0] * self.microbatches)[saved.microbatch] = saved.nbytes
        return found

    @cached_property
    def by_stage(self) -> dict[int, list[int]]:
        """Stage -> bytes of activations of each microbatch that wait for its backward: without the head's."""
        found: dict[int, list[int]] = {stage: [0] * self.microbatches for stage in self.in_flight}
        for place, sizes in self.by_place.items():
            if place.part != "head":
                found[place.stage] = [a + b for a, b in zip(found[place.stage], sizes, strict=True)]
        return found

    def table(self) -> str:
        """Plain text, at most 80 columns: by stage, by place, by microbatch."""
        lines = [
            f"pipeline rank {self.rank} of {self.ranks}: {self.schedule}, {self.microbatches} microbatches",
            f"saved for backward: {format_bytes(self.peak_bytes)} of activations at the peak",
            f"({format_bytes(self.shared_bytes)} shared by microbatches, such as masks and tables, not included)",
            "",
            "microbatches in flight",
            f"  {'stage':>5}  {'at most':>8}  {'at the peak':>12}",
        ]
        lines += [f"  {s:>5}  {most:>8}  {self.peak_in_flight[s]:>12}" for s, most in self.in_flight.items()]
        lines += [
            "",
            "saved for one microbatch (from - to, where they differ; weights are held anyway)",
            f"  {'stage':>5}  {'layer':>5}  {'part':<9}  {'activations':>27}  {'weights':>12}",
        ]
        weights = {saved.place: saved.weight_bytes for saved in sorted(self.saved, key=lambda s: s.weight_bytes)}
        for place, sizes in self.by_place.items():
            least, most = min(sizes), max(sizes)
            size = format_bytes(most) if least == most else f"{format_bytes(least)} - {format_bytes(most)}"
            layer = "" if place.layer is None else place.layer
            held = format_bytes(weights[place])
            lines.append(f"  {place.stage:>5}  {layer:>5}  {place.part:<9}  {size:>27}  {held:>12}")
        lines += ["", "by microbatch, without the head, which is freed in its forward"]
        for stage, sizes in self.by_stage.items():
            for _, neighbors in groupby(range(len(sizes)), sizes.__getitem__):
                equal = list(neighbors)
                first, last = equal[0], equal[-1]
                name = f"microbatch {first}" if first == last else f"microbatches {first} to {last}"
                lines.append(f"  {stage:>5}  {name:<22}  {format_bytes(sizes[first]):>20}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "rank": self.rank,
            "ranks": self.ranks,
            "microbatches": self.microbatches,
            "peak_bytes": self.peak_bytes,
            "peak_in_flight": dict(self.peak_in_flight),
            "in_flight": dict(self.in_flight),
            "shared_bytes": self.shared_bytes,
            "saved": [
                {**s.place._asdict(), "microbatch": s.microbatch, "bytes": s.nbytes, "weight_bytes": s.weight_bytes}
                for s in self.saved
            ],
        }


def profile_ranks(trainer: Trainer) -> list[PipelineProfile]:
    """Profile the forwards and backwards of the first step: the profiles of all ranks of this process's pipeline. Collective.

    Raises:
        UsageError: the trainer has no pipeline.
    """
    engine = trainer.pipeline
    if engine is None:
        raise UsageError("parallel.pp is 1: there is no pipeline to profile; use Managed.profile for one forward pass")
    attention = frozenset(layer.attention.path for layer in trainer.memory.sublayers.layers)
    collector = Collector(trainer.model, engine.partition, attention)
    with (
        trainer.memory.suspended(collector.region),
        engine.watched(collector, collector.labeled),
        saved_tensors_hooks(collector.pack, collector.unpack),
    ):
        trainer.gradients(1)
    trainer.discard()
    return trainer.mesh.of_pipeline(collector.profile(engine.plan, trainer.mesh.pp_rank))


class Save(NamedTuple):
    """Autograd saved a storage, given by its number."""

    storage: int
    place: Place
    microbatch: int


class _TrackedTensor:
    """The graph owns this in place of a saved tensor. It notes when it is made and when it dies."""

    __slots__ = ("_events", "_saves", "alias")

    def __init__(self, alias: Tensor, saves: list[int], events: list[tuple[bool, int]]):
        self.alias, self._saves, self._events = alias, saves, events
        events.extend((True, save) for save in saves)

    def __del__(self) -> None:
        self._events.extend((False, save) for save in self._saves)


class Collector:
    """Notes what is saved where in one step, and when it is freed; a watcher of the runtime. The graphs own the tensors.

    Args:
        attention: paths of the layers' first sublayers.
    """

    def __init__(self, model: nn.Module, partition: Partition, attention: frozenset[str]):
        self._model, self._partition, self._attention = model, partition, attention
        self._weights = WeightStorages(model)
        self._forward: Action | None = None
        self._inside: tuple[int | None, str] | None = None  # layer and part
        self._storages = StorageNumbers()
        self._saves: list[Save] = []
        self._events: list[tuple[bool, int]] = []  # (True, save) when it is made, (False, save) when it is freed

    def began(self, action: Action) -> None:
        """See `forebay.pipeline.runtime.Watcher`."""
        if not self._events:
            self._weights.add(self._model)  # unsharded by now
        first = action.parts[0] if action.parts else action
        self._forward = first if first.kind == FORWARD else None

    def ended(self, action: Action) -> None:
        """See `forebay.pipeline.runtime.Watcher`."""
        self._forward = None

    @contextmanager
    def region(self, path: str) -> Iterator[None]:
        """Around a managed region. In a layer cut into parts, only the attention sublayer is known by it."""
        if self._inside is None or path not in self._attention:
            yield
            return
        with self._within(self._inside[0], "attention"):
            yield

    def labeled(self, number: int, stage: Stage) -> Stage:
        """The same stage, whose parts tell this collector when they run."""
        layers = [
            _LabeledLayer(layer, partial(self._within, here.number))
            for here, layer in zip(self._partition.layers[number], stage.layers, strict=True)
        ]
        prologue, epilogue = (
            None if fn is None else _run_within(fn, partial(self._within, None, part))
            for fn, part in ((stage.prologue, "embedding"), (stage.epilogue, "head"))
        )
        return replace(stage, layers=layers, prologue=prologue, epilogue=epilogue)

    def pack(self, tensor: Tensor) -> _TrackedTensor:
        """For `saved_tensors_hooks`."""
        # Trap: never the tensor itself. A node that owns its own output is a cycle that the garbage collector does not see.
        if self._forward is None or self._inside is None:
            return _TrackedTensor(tensor.detach(), [], self._events)
        place = Place(self._forward.stage, *self._inside)
        first = len(self._saves)
        for part in plain_parts(tensor):
            self._saves.append(Save(self._storages.number(part), place, self._forward.microbatch))
        return _TrackedTensor(tensor.detach(), list(range(first, len(self._saves))), self._events)

    def unpack(self, packed: _TrackedTensor) -> Tensor:
        """For `saved_tensors_hooks`."""
        return packed.alias

    def profile(self, plan: PipelinePlan, rank: int) -> PipelineProfile:
        weights = frozenset(n for n, ref in enumerate(self._storages.refs) if ref in self._weights)
        return summarize(plan, rank, self._storages.nbytes, weights, self._saves, self._events)

    @contextmanager
    def _within(self, layer: int | None, part: str) -> Iterator[None]:
        before, self._inside = self._inside, (layer, part)
        try:
            yield
        finally:
            self._inside = before


def _run_within(fn: Callable[..., Any], context: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with context():
            return fn(*args)

    return run


class _LabeledLayer:
    """A `forebay.pipeline.sublayer.Layer` whose parts run inside ``within(part)``."""

    def __init__(self, layer: Layer, within: Callable[[str], AbstractContextManager[None]]):
        self.dispatcher = layer.dispatcher
        self.experts = layer.experts and _run_within(layer.experts, partial(within, "experts"))
        self.back = layer.back and _run_within(layer.back, partial(within, "back"))
        self.stage1 = _run_within(layer.stage1, partial(within, "front"))
        self._whole = _run_within(layer, partial(within, "dense"))

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = self._whole(x)
        return found


def summarize(
    plan: PipelinePlan,
    rank: int,
    sizes: list[int],
    weights: frozenset[int],
    saves: list[Save],
    events: Iterable[tuple[bool, int]],
) -> PipelineProfile:
    """The profile of a step.

    Args:
        sizes: bytes of each storage.
        weights: numbers of the storages that are weights.
        saves: in their order.
        events: (True, save) when it was made, (False, save) when it was freed.
    """
    microbatches: dict[int, set[int]] = {}
    for save in saves:
        microbatches.setdefault(save.storage, set()).add(save.microbatch)
    shared = {storage for storage, several in microbatches.items() if len(several) > 1} - weights
    activation_bytes, weight_bytes = Counter[tuple[Place, int]](), Counter[tuple[Place, int]]()
    first_saves = {(save.storage, save.microbatch): save for save in reversed(saves)}
    for save in saves:
        activation_bytes[save.place, save.microbatch] += 0
    for save in first_saves.values():
        if save.storage not in shared:
            counter = weight_bytes if save.storage in weights else activation_bytes
            counter[save.place, save.microbatch] += sizes[save.storage]
    counted = [0 if n in shared or n in weights else size for n, size in enumerate(sizes)]
    in_flight, peak, peak_in_flight = _peak(plan.stages(rank), counted, saves, events)
    return PipelineProfile(
        plan.name,
        rank,
        len(plan.actions),
        plan.microbatches,
        tuple(
            Saved(place, microbatch, activation_bytes[place, microbatch], weight_bytes[place, microbatch])
            for place, microbatch in sorted(activation_bytes, key=lambda key: (key[0].in_forward_order, key[1]))
        ),
        sum(sizes[n] for n in shared),
        in_flight,
        peak,
        peak_in_flight,
    )


def _peak(
    stages: tuple[int, ...], sizes: list[int], saves: list[Save], events: Iterable[tuple[bool, int]]
) -> tuple[dict[int, int], int, dict[int, int]]:
    """Most microbatches in flight by stage; the peak of held bytes, and microbatches in flight then. Skips sizes of 0."""
    in_flight = dict.fromkeys(stages, 0)
    peak, peak_in_flight = 0, dict.fromkeys(stages, 0)
    now = 0
    of_storage = Counter[int]()
    of_microbatch = {stage: Counter[int]() for stage in stages}
    for made, number in events:
        save = saves[number]
        size, stage = sizes[save.storage], save.place.stage
        if not size:
            continue
        change = 1 if made else -1
        before = of_storage[save.storage]
        of_storage[save.storage] += change
        now += size * ((before + change > 0) - (before > 0))
        held = of_microbatch[stage]
        held[save.microbatch] += change
        if not held[save.microbatch]:
            del held[save.microbatch]
        in_flight[stage] = max(in_flight[stage], len(held))
        if now > peak:
            peak, peak_in_flight = now, {s: len(microbatches) for s, microbatches in of_microbatch.items()}
    return in_flight, peak, peak_in_flight
