"""Plain data of the estimator: what a trace is asked (`Shape`), what it answers (`ModelTrace`), and allocation events.

`forebay.estimate.op_recorder` writes a `Log` of operations on fake tensors, `forebay.estimate.events` turns it into
`PartEvents`, and `forebay.estimate.trace` collects them. Nothing is run or kept here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from forebay.pipeline.partition import StageLayer

AllocEvent = tuple[int, int]
"""(storage, bytes) allocates, (storage, 0) frees, (-1, mark) marks a place. Storages are numbers that are never used again."""


class Mark(IntEnum):
    """A place in a log or among events."""

    ALL_TO_ALL_BEGIN, ALL_TO_ALL_END = 0, 1  # before and after an operation of the token dispatcher
    # Before each matrix product of a log. In events, only after the result of a part's first one, which takes cuBLAS's workspace.
    MATMUL = 2
    # After the last norm, where the base model's own forward returns, and before its backward.
    FINAL_NORM_END, FINAL_NORM_BACKWARD = 3, 7
    PAGES = 4  # where pages are taken (forward) or read (backward); see `forebay.estimate.parts`
    # Where the experts write dh over a saved h, and before the operation that makes gate_up's gradient.
    DH, GATE_UP_GRAD = 5, 6
    # Before and after an operation of the experts between stages of a MoE sublayer, see `Shape.stages`.
    EXPERTS_BEGIN, EXPERTS_END = 8, 9
    WEIGHT_GRADS = 10  # in the experts' backward, before weight gradients that wait until dispatch' is under way


GPU_BLOCK = 512
"""Bytes to which CUDA's caching allocator rounds (torch `c10/core/AllocatorConfig.h`, kMinBlockSize)."""
PAGE = 256 << 10
"""Bytes of a page of `forebay.memory.page_store`, which the estimator does not import."""
MULTIPROCESSORS = 132
"""The number that an H100 and an H200 have. Plans for other GPUs, which have 108 to 148, use it too."""


class NewStorage(NamedTuple):
    """A storage that an operation makes; `recomputable` from its `origins`: compiled code fuses the operation into its readers,
    and runs it again in backward."""

    number: int
    size: int
    recomputable: bool
    origins: frozenset[int]


class Op(NamedTuple):
    """An operation: whether compiled code fuses it, the storages it reads, and those it makes."""

    fused: bool
    reads: tuple[int, ...]
    made: tuple[NewStorage, ...]


class Freed(NamedTuple):
    """A storage that no tensor refers to any more."""

    number: int


Log = list[Op | Freed | Mark]


def made_in(log: Iterable[Op | Freed | Mark]) -> dict[int, NewStorage]:
    """The storages that the operations of a log make, by number."""
    return {m.number: m for entry in log if isinstance(entry, Op) for m in entry.made}


@dataclass(frozen=True)
class PartEvents:
    """The allocations and frees of one microbatch in one part, in the order of a real run, and the storages that others name.

    The input, the output and their gradients outlive the part: they have numbers, and the caller allocates or frees them where
    the events do not. Numbers are -1 for none.

    Attributes:
        forward, backward: of x, output, gradient and dx, `backward` has frees at most.
        forward_no_grad: forward that saves nothing, such as the first run of a recomputed part.
        x, output, gradient, dx: numbers of the input, the output, the output's gradient and the input's.
        weight_grads: by the number of a weight's gradient the weight's name (`forebay.estimate.state.Weight`), in the order in
            which they are made.
        transferred: storages that the token dispatcher makes, on a stream of its own if there is one.
        saved: storages that last from forward to backward, in the order in which they are saved; in a compiled sublayer, in which
            they are made.
        experts_x, experts_h: the experts' rows and their first product.
        front_x: in a MoE sublayer, nothing reads x after the front: the residual sum has the shared experts' results already.
        head_sum: storages of the head's weight gradient, from the loss to the gradient itself.
        at_once: its backward is one node of autograd's graph, which takes all that was saved before it computes.
        reused, reused_in_backward: by a storage that compiled code frees, the later one that takes its memory.
    """

    x: int
    output: int
    gradient: int
    dx: int
    weight_grads: Mapping[int, str]
    saved: tuple[int, ...]
    transferred: frozenset[int]
    experts_x: int = -1
    experts_h: int = -1
    front_x: bool = False
    forward: tuple[AllocEvent, ...] = ()
    backward: tuple[AllocEvent, ...] = ()
    forward_no_grad: tuple[AllocEvent, ...] = ()
    head_sum: frozenset[int] = frozenset()
    at_once: bool = False
    reused: Mapping[int, int] = field(default_factory=dict)
    reused_in_backward: Mapping[int, int] = field(default_factory=dict)

    @property
    def saves_x(self) -> bool:
        return self.x in self.saved


@dataclass(frozen=True)
class Shape:
    """The microbatch of one rank, as a trace runs it.

    Attributes:
        sequence, microbatch: tokens of a sequence, sequences.
        experts, loss: see `[model]`.
        stages: MoE sublayers are split at the token dispatcher (expert parallelism, pipelines, overlap).
        ep, skew, capacity_factor: see `forebay.estimate.planned_dispatch.PlannedDispatcher`.
        compiled: sublayers are compiled (`memory.compile`).
        balance: the load-balancing loss has a weight, so its graph is saved.
        block: bytes to which the allocator rounds; 1 on a CPU.
        gpu: attention saves what a GPU's kernels save; else what this CPU's do, to compare with a run on it.
        deferred_weight_grads: the experts' weight gradients are made after all others of their backward.
        autocast: forwards run under bf16 autocast.
        flex: attention with sinks runs as `forebay.models.sinks` runs it on a GPU.
        rounds: `memory.precision = "fp8"`. Experts save their first product in 8 bits; other rows count as copied to the host in
            full, so that a run offloads more than is planned.
        checkpointed_experts: the experts, and nothing else of their sublayer, run again as a whole in backward.
    """

    sequence: int
    microbatch: int
    experts: str = "forebay"
    loss: str = "fused"
    stages: bool = False
    ep: int = 1
    skew: float = 1.0
    capacity_factor: float = 0.0
    compiled: bool = False
    balance: bool = False
    block: int = GPU_BLOCK
    gpu: bool = True
    deferred_weight_grads: bool = False
    autocast: bool = False
    flex: bool = False
    rounds: bool = False
    checkpointed_experts: bool = False

    def without_experts(self) -> Shape:
        """The shape without that on which only MoE sublayers depend."""
        one = replace(self, ep=1, skew=1.0, capacity_factor=0.0)
        return replace(one, deferred_weight_grads=False, rounds=False, checkpointed_experts=False)


@dataclass(frozen=True)
class OpCost:
    """What one operation, or one fused run of operations, asks of a GPU; see `forebay.estimate.op_costs`.

    Attributes:
        kind: "gemm", "gemm_fp32" (of a router, mostly), "gemm_sum" (a weight's gradient, added to a sum in fp32),
            "gemm_unaligned" (rows do not begin at multiples of 16 bytes), "grouped" (experts), "grouped_weights" (their weight
            gradients), "attention", "attention_backward", "pointwise" (moves memory only), or "all_to_all".
        flops: that are really made: under a causal mask, half of attention's pairs.
        bytes: read from and written to device memory; for an all-to-all, those that leave the GPU.
        launches: kernels.
        padding: what is computed besides, because kernels compute whole tiles, as a multiple of `flops`: 1 for none.
        matrices: those of the bytes that are experts' matrices.
        tiles: of all experts' results, as two multiprocessors compute them together; `small` ones or large.
        depth: elements that each element of such a tile is a sum of.
        loads: elements that an unvectorized pointwise kernel reads and writes one by one; also waits that take as long.
    """

    kind: str
    flops: int
    bytes: int
    launches: int = 1
    padding: float = 1.0
    matrices: int = 0
    tiles: int = 0
    depth: int = 0
    loads: int = 0
    small: bool = False


@dataclass(frozen=True)
class PartTrace:
    """One microbatch in one part of a model: embedding, sublayer, or head with its loss. Figures are bytes.

    Attributes:
        inputs: of the input hidden states, which recomputing the part keeps.
        light: the part under light recomputation of the experts; None if it has none.
        stash: bytes of the experts' x and h in buffers of the capacity, and of pages with the rows that arrive; (0, 0) without
            expert parallelism.
        given: places in `SharedTables.given` of what it gets as an argument.
    """

    saved: int
    inputs: int
    light: PartTrace | None = None
    stash: tuple[int, int] = (0, 0)
    given: tuple[int, ...] = ()
    forward_ops: tuple[OpCost, ...] = ()
    backward_ops: tuple[OpCost, ...] = ()
    events: PartEvents | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class StageLayers:
    """The layers of a stage, and whether it has the ends."""

    layers: tuple[StageLayer, ...]
    embedding: bool
    head: bool

    @property
    def reader(self) -> tuple[int, bool]:
        """Layer of the sublayer that counts what all layers share, such as masks and tables, and whether it is an MLP: it is the
        first attention. A stage without attention makes them too."""
        numbers = (here.number for here in self.layers if here.attention)
        return next(((number, False) for number in numbers), (self.layers[0].number, True))


@dataclass(frozen=True)
class LayerTrace:
    """A decoder layer: its attention sublayer, or another mixer's, and its MoE or dense one. `names`: of the two in the layer."""

    attention: PartTrace
    mlp: PartTrace
    is_moe: bool
    names: tuple[str, str] = ("self_attn", "mlp")

    @property
    def sublayers(self) -> tuple[tuple[str, PartTrace], ...]:
        return tuple(zip(self.names, (self.attention, self.mlp), strict=True))

    def on(self, here: StageLayer) -> list[tuple[str, PartTrace]]:
        """The layer's sublayers that a stage has."""
        both = zip(self.sublayers, (here.attention, here.mlp), strict=True)
        return [sublayer for sublayer, is_here in both if is_here]


@dataclass(frozen=True)
class SharedTables:
    """Masks and rotary tables: a model makes them before its first layer, and all layers read them. Positions that a layer hands
    to the next one (GLM-5) count as one of them, for all layers.

    Attributes:
        events: in the order of a real run; what they do not free is held until all layers have run.
        saved: numbers of what the first layer of a stage saves for all of them.
        given: numbers of what layers get and none saves, such as masks of eager attention.
    """

    events: tuple[AllocEvent, ...] = ()
    saved: tuple[int, ...] = ()
    given: tuple[int, ...] = ()

    @property
    def saved_bytes(self) -> int:
        return sum(size for number, size in self.events if number in self.saved)


@dataclass(frozen=True)
class ModelTrace:
    """The traces of a model's parts; layers of the same kind are the same object.

    Attributes:
        tables: what its layers share.
        balance: bytes that the load-balancing loss saves for each MoE layer.
        router_loss: the load-balancing loss of all layers; None without a weight.
    """

    embedding: PartTrace
    layers: tuple[LayerTrace, ...]
    head: PartTrace
    tables: SharedTables
    balance: int
    router_loss: PartTrace | None = None

    def with_mlps(self, mlps: Sequence[PartTrace], numbers: Container[int]) -> ModelTrace:
        """The model with other MoE sublayers, of which `mlps` has one for each layer, in layers `numbers`."""
        by_kind: dict[int, LayerTrace] = {}
        layers = []
        for number, layer in enumerate(self.layers):
            if number in numbers:
                layer = by_kind.setdefault(id(layer), replace(layer, mlp=mlps[number]))
            layers.append(layer)
        return replace(self, layers=tuple(layers))
