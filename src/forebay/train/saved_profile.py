"""What autograd saves in a step of a pipeline, on this rank: by decoder layer, part and microbatch, and how much of it at once.

In: a `Trainer` on a pipeline. Out: a `PipelineProfile`, plain figures. One step's forwards and backwards run as the schedule has
them, with the placements off, and no optimizer step comes of them.

    parts       attention    the attention half of a layer
                dense        the rest of a layer without experts
                front        of one with experts: norm, router, shared experts
                experts      and the experts, on the rows they were sent
                embedding    before the first layer
                head         last norm, head and loss; all of it is free again when its forward is over

Storages are counted whole, as in `forebay.memory.profiler`, once a microbatch: under the layer and part that saved them first.
Weights are counted by themselves. So are storages that several microbatches save, which are there anyway: masks, rotary tables,
the batch. (With a single microbatch they cannot be told, and count for the first layer.)

A saved tensor is let go of when autograd has used it. How long each lived is noted, and from that come the peak and the number of
microbatches in flight. Not autograd's, and not counted: what the backward of a layer's input leaves for that of its weights
(`forebay.moe.wgrad`), and messages between ranks.

    profile_pipeline(trainer)     this rank's profile, a collective call
    profile_ranks(trainer)        those of all ranks of the pipeline
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from forebay.errors import UsageError
from forebay.memory.profiler import WeightStorages, allocated_bytes, plain_parts
from forebay.moe.dispatch import TokenDispatcher
from forebay.pipeline.partition import Partition
from forebay.pipeline.runtime import Stage
from forebay.pipeline.schedule import FORWARD, Action, PipelinePlan
from forebay.pipeline.sublayer import Layer
from forebay.policy import format_bytes
from forebay.train.trainer import Trainer


class Place(NamedTuple):
    """Where something was saved. `layer` is its number in the whole model, None for embedding and head."""

    stage: int
    layer: int | None
    part: str


@dataclass(frozen=True)
class Saved:
    """What was saved in one place for one microbatch: bytes of activations, and of weights, which the model holds anyway."""

    place: Place
    microbatch: int
    nbytes: int
    weight_bytes: int


@dataclass(frozen=True)
class PipelineProfile:
    """Of one rank, one step.

    Attributes:
        schedule: its name.
        rank, ranks: this one in the pipeline, and how many there are.
        microbatches: of a step.
        saved: by place in the order of the forward, then by microbatch.
        shared_bytes: of storages that several microbatches save, each once.
        in_flight: stage -> for how many microbatches it held something at most.
        peak_bytes: of activations, all stages together, at the worst moment.
        peak_in_flight: stage -> for how many microbatches it held something then.
    """

    schedule: str
    rank: int
    ranks: int
    microbatches: int
    saved: tuple[Saved, ...]
    shared_bytes: int
    in_flight: Mapping[int, int]
    peak_bytes: int
    peak_in_flight: Mapping[int, int]

    @cached_property
    def by_place(self) -> dict[Place, list[int]]:
        """Bytes of activations of each microbatch."""
        found: dict[Place, list[int]] = {}
        for saved in self.saved:
            found.setdefault(saved.place, [0] * self.microbatches)[saved.microbatch] = saved.nbytes
        return found

    @cached_property
    def by_layer(self) -> dict[int, list[int]]:
        """Layer -> bytes of activations of each microbatch, all parts together."""
        found: dict[int, list[int]] = {}
        for place, sizes in self.by_place.items():
            if place.layer is not None:
                before = found.get(place.layer, [0] * self.microbatches)
                found[place.layer] = [a + b for a, b in zip(before, sizes, strict=True)]
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
            f"saved for backward: {format_bytes(self.peak_bytes)} of activations at once, at most",
            f"({format_bytes(self.shared_bytes)} that microbatches share, such as masks and tables, not among them)",
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
        weights = self._ranges(lambda saved: saved.weight_bytes)
        for place, (least, most) in self._ranges(lambda saved: saved.nbytes).items():
            size = format_bytes(most) if least == most else f"{format_bytes(least)} - {format_bytes(most)}"
            layer = "" if place.layer is None else place.layer
            held = format_bytes(weights[place][1])
            lines.append(f"  {place.stage:>5}  {layer:>5}  {place.part:<9}  {size:>27}  {held:>12}")
        lines += ["", "by microbatch, without the head, whose part is free again at once"]
        for stage, sizes in self.by_stage.items():
            lines += [
                f"  {stage:>5}  {_numbers(first, last):<22}  {format_bytes(size):>20}"
                for first, last, size in _runs(sizes)
            ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
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

    def to_json(self) -> str:
        """The figures as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def _ranges(self, of: Callable[[Saved], int]) -> dict[Place, tuple[int, int]]:
        found: dict[Place, list[int]] = {}
        for saved in self.saved:
            found.setdefault(saved.place, []).append(of(saved))
        return {place: (min(sizes), max(sizes)) for place, sizes in found.items()}


def profile_pipeline(trainer: Trainer, number: int = 1) -> PipelineProfile:
    """Profile the forwards and backwards of step `number`. All processes of the run call it.

    Raises:
        UsageError: the trainer has no pipeline.
    """
    engine = trainer.pipeline
    if engine is None:
        raise UsageError("parallel.pp is 1: there is no pipeline to profile; use Managed.profile for one forward pass")
    collector = Collector(trainer.model, engine.partition)
    with (
        trainer.memory.suspended(collector.region),
        engine.watched(collector, collector.around),
        saved_tensors_hooks(collector.pack, collector.unpack),
    ):
        trainer.gradients(number)
    trainer.discard()
    return collector.profile(engine.plan, trainer.mesh.pp_rank)


def profile_ranks(trainer: Trainer, number: int = 1) -> list[PipelineProfile]:
    """`profile_pipeline` of every rank of this process's pipeline, on each of them."""
    own = profile_pipeline(trainer, number)
    found: list[Any] = [None] * trainer.mesh.pp
    dist.all_gather_object(found, own, group=trainer.mesh.pipeline)
    return found


class _Storage(NamedTuple):
    """The weak reference keeps the storage's identity from being used again, not its memory."""

    weak: StorageWeakRef
    nbytes: int


class Save(NamedTuple):
    """A storage, by its number, that autograd saved."""

    storage: int
    place: Place
    microbatch: int


class _TrackedTensor:
    """What the graph owns in place of a saved tensor. When it is let go of, so is what was saved."""

    __slots__ = ("_events", "_saves", "tensor")

    def __init__(self, tensor: Tensor, saves: list[int], events: list[tuple[bool, int]]):
        self.tensor, self._saves, self._events = tensor, saves, events
        events.extend((True, save) for save in saves)

    def __del__(self) -> None:
        self._events.extend((False, save) for save in self._saves)


class Collector:
    """Notes what is saved where, and when it is let go of, in one step; a watcher of the runtime.

    Owns the weak references and notes of that step; tensors belong to the graphs.
    """

    def __init__(self, model: nn.Module, partition: Partition):
        self._model, self._partition = model, partition
        self._weights = WeightStorages(model)
        self._forward: Action | None = None
        self._inside: tuple[int | None, str] | None = None  # layer and part
        self._storages: list[_Storage] = []
        self._numbers: dict[int, int] = {}  # a storage's address as an object -> its number
        self._saves: list[Save] = []
        self._events: list[tuple[bool, int]] = []  # a save came, or went

    def began(self, action: Action) -> None:
        """See `forebay.pipeline.runtime.Watcher`."""
        if not self._events:
            self._weights.add(self._model)  # gathered by now
        first = action.parts[0] if action.parts else action
        self._forward = first if first.kind == FORWARD else None

    def ended(self, action: Action) -> None:
        """See `forebay.pipeline.runtime.Watcher`."""
        self._forward = None

    @contextmanager
    def region(self, path: str) -> Iterator[None]:
        """Around a managed region. Of the cut layers' parts, only the attention half is told by it."""
        if self._inside is None or not path.endswith(".self_attn"):
            yield
            return
        with self._within(self._inside[0], "attention"):
            yield

    def around(self, number: int, stage: Stage) -> Stage:
        """The same stage, whose parts say that they run."""
        layers = [
            _Named(layer, n, self._within)
            for n, layer in zip(self._partition.layers[number], stage.layers, strict=True)
        ]
        prologue, epilogue = (
            None if fn is None else _inside(fn, lambda part=part: self._within(None, part))  # type: ignore[misc]
            for fn, part in ((stage.prologue, "embedding"), (stage.epilogue, "head"))
        )
        return replace(stage, layers=layers, prologue=prologue, epilogue=epilogue)

    def pack(self, tensor: Tensor) -> _TrackedTensor:
        """For `saved_tensors_hooks`."""
        # A detached alias and never the tensor itself: a node that owns its own output is a cycle no collector breaks.
        if self._forward is None or self._inside is None:
            return _TrackedTensor(tensor.detach(), [], self._events)
        place = Place(self._forward.stage, *self._inside)
        saves = [self._save(part, place, self._forward.microbatch) for part in plain_parts(tensor)]
        return _TrackedTensor(tensor.detach(), saves, self._events)

    def unpack(self, packed: _TrackedTensor) -> Tensor:
        """For `saved_tensors_hooks`."""
        return packed.tensor

    def profile(self, plan: PipelinePlan, rank: int) -> PipelineProfile:
        """Of the step that was run."""
        weights = frozenset(n for n, storage in enumerate(self._storages) if storage.weak in self._weights)
        sizes = [storage.nbytes for storage in self._storages]
        return summed_up(plan, rank, sizes, weights, self._saves, self._events)

    def _save(self, tensor: Tensor, place: Place, microbatch: int) -> int:
        weak = StorageWeakRef(tensor.untyped_storage())
        if weak.cdata not in self._numbers:
            self._numbers[weak.cdata] = len(self._storages)
            self._storages.append(_Storage(weak, allocated_bytes(tensor)))
        self._saves.append(Save(self._numbers[weak.cdata], place, microbatch))
        return len(self._saves) - 1

    @contextmanager
    def _within(self, layer: int | None, part: str) -> Iterator[None]:
        before, self._inside = self._inside, (layer, part)
        try:
            yield
        finally:
            self._inside = before


def _inside(fn: Callable[..., Any], around: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with around():
            return fn(*args)

    return run


class _Named:
    """A `forebay.pipeline.sublayer.Layer` whose parts run inside `within(number, part)`."""

    def __init__(self, layer: Layer, number: int, within: Callable[[int, str], AbstractContextManager[None]]):
        self.dispatcher: TokenDispatcher | None = layer.dispatcher
        self.experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor] | None = None
        if layer.experts is not None:
            self.experts = _inside(layer.experts, lambda: within(number, "experts"))
        self.stage1 = _inside(layer.stage1, lambda: within(number, "front"))
        self._whole = _inside(layer, lambda: within(number, "dense"))

    def __call__(self, x: Tensor) -> Tensor:
        return self._whole(x)


def summed_up(
    plan: PipelinePlan,
    rank: int,
    sizes: list[int],
    weights: frozenset[int],
    saves: list[Save],
    events: Iterable[tuple[bool, int]],
) -> PipelineProfile:
    """A profile of what was noted.

    Args:
        sizes: bytes of each storage.
        weights: numbers of the storages that are weights.
        saves: in their order.
        events: (True, save) when it was made, (False, save) when it was let go of.
    """
    of: dict[int, set[int]] = {}
    for save in saves:
        of.setdefault(save.storage, set()).add(save.microbatch)
    shared = {n for n, microbatches in of.items() if len(microbatches) > 1} - weights
    own, held = Counter[tuple[Place, int]](), Counter[tuple[Place, int]]()
    seen: set[tuple[int, int]] = set()
    for save in saves:
        own[save.place, save.microbatch] += 0
        if save.storage not in shared and (save.storage, save.microbatch) not in seen:
            seen.add((save.storage, save.microbatch))
            (held if save.storage in weights else own)[save.place, save.microbatch] += sizes[save.storage]
    parts = ("embedding", "attention", "dense", "front", "experts", "head")
    order = {place: n for n, place in enumerate(sorted({s.place for s in saves}, key=lambda p: _along(p, parts)))}
    alive = _Alive([0 if n in shared or n in weights else size for n, size in enumerate(sizes)], plan.stages(rank))
    for came, number in events:
        alive.note(saves[number], 1 if came else -1)
    return PipelineProfile(
        plan.name,
        rank,
        len(plan.actions),
        plan.microbatches,
        tuple(
            Saved(place, microbatch, own[place, microbatch], held[place, microbatch])
            for place, microbatch in sorted(own, key=lambda key: (order[key[0]], key[1]))
        ),
        sum(sizes[n] for n in shared),
        alive.in_flight,
        alive.peak,
        alive.peak_in_flight,
    )


def _along(place: Place, parts: tuple[str, ...]) -> tuple[int, int, int]:
    """Sorts places along the forward."""
    at = {"embedding": -1, "head": 1}.get(place.part, 0)
    return place.stage, at, (0 if place.layer is None else place.layer * len(parts)) + parts.index(place.part)


class _Alive:
    """What is held now, and was at most. Storages of 0 bytes hold nothing."""

    def __init__(self, sizes: list[int], stages: tuple[int, ...]):
        self.in_flight = dict.fromkeys(stages, 0)
        self.peak_in_flight = dict.fromkeys(stages, 0)
        self.peak = 0
        self._sizes, self._now = sizes, 0
        self._of_storage: Counter[int] = Counter()
        self._of_microbatch: dict[int, Counter[int]] = {stage: Counter() for stage in stages}

    def note(self, save: Save, change: int) -> None:
        """A save came (1) or went (-1)."""
        size = self._sizes[save.storage]
        if not size:
            return
        before = self._of_storage[save.storage]
        self._of_storage[save.storage] += change
        self._now += size * ((before + change > 0) - (before > 0))
        stage = save.place.stage
        held = self._of_microbatch[stage]
        held[save.microbatch] += change
        if not held[save.microbatch]:
            del held[save.microbatch]
        self.in_flight[stage] = max(self.in_flight[stage], len(held))
        if self._now > self.peak:
            self.peak = self._now
            self.peak_in_flight = {s: len(microbatches) for s, microbatches in self._of_microbatch.items()}


def _runs(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first, last, size) of neighbouring microbatches that are alike."""
    first = 0
    for number in range(1, len(sizes) + 1):
        if number == len(sizes) or sizes[number] != sizes[first]:
            yield first, number - 1, sizes[first]
            first = number


def _numbers(first: int, last: int) -> str:
    return f"microbatch {first}" if first == last else f"microbatches {first} to {last}"
