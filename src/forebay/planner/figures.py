"""What a trace is asked and what it answers: plain figures.

`Shape` goes into `forebay.planner.trace`, `ModelTrace` comes out of it and goes into `forebay.planner.fit`. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

from forebay.planner.events import PartEvents

GPU_BLOCK = 512
"""Bytes to which CUDA's caching allocator rounds (torch `c10/core/AllocatorConfig.h`, kMinBlockSize)."""


@dataclass(frozen=True)
class Shape:
    """What a rank runs a microbatch of.

    Attributes:
        sequence, microbatch: tokens of a sequence, sequences.
        experts, loss: "forebay" or "transformers"; "fused" or "transformers".
        stages: MoE halves are cut where tokens travel (expert parallelism, pipelines, overlap).
        ep, skew, capacity_factor: see `forebay.models.planned_exchange`.
        compiled: halves are compiled (`memory.compile`).
        balance: the router's load-balancing loss has a weight, so its graph is saved.
        block: see `forebay.planner.live.Live`.
        gpu: attention as on a GPU; else as this CPU runs it, to compare with a run on it.
        later: the experts' weight gradients are made behind all others of their backward, as engines do.
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
    later: bool = False


@dataclass(frozen=True)
class OpCost:
    """What one operation, or one fused run of operations, asks of a GPU; see `forebay.planner.costs`.

    Attributes:
        kind: "gemm", and "gemm_odd" of matrices whose rows do not begin at 16 bytes; "grouped" and "grouped_weights", of experts
            and of their weights' gradients; "attention" and "attention_backward"; "pointwise", whatever only moves memory, and
            "walked", the same element by element; "exchange", an all-to-all.
        flops: that are really made: under a causal mask half of attention's pairs.
        bytes: read from and written to device memory; of an exchange those that leave the GPU.
        launches: kernels.
    """

    kind: str
    flops: int
    bytes: int
    launches: int = 1


@dataclass(frozen=True)
class PartTrace:
    """One microbatch in one part of a model. Bytes and FLOPs.

    Attributes:
        saved: for backward.
        inputs: of the part's input hidden states, which recomputing it keeps.
        forward: how far memory rises above forward's begin, its input held by others.
        backward: how far it rises above backward's begin, all that is saved held by others; the gradient that comes in is
            counted in.
        forward_flops, backward_flops: see `forebay.planner.live`.
        light: `saved` and `backward` where experts make their first product again, or None.
        stash: bytes of the experts' x and h in buffers of the capacity, and of their rows that came; see `forebay.moe.stash`.
            (0, 0) without expert parallelism.
        later: bytes that the experts' weight gradients need, if they are made later (`forebay.moe.weight_gradients`).
        forward_ops, backward_ops: what both ask of a GPU, in order.
        light_ops: `backward_ops` where experts make their first product again; empty where there is no such thing.
        token_rows: bytes of the rows of tokens that each of the experts' weight gradients is made of, for as long as it is made.
        events, light_events: in what order it allocates and frees; the second where experts make their first product again.
    """

    saved: int
    inputs: int
    forward: int
    backward: int
    forward_flops: int
    backward_flops: int
    light: tuple[int, int] | None = None
    stash: tuple[int, int] = (0, 0)
    later: int = 0
    token_rows: int = 0
    forward_ops: tuple[OpCost, ...] = ()
    backward_ops: tuple[OpCost, ...] = ()
    light_ops: tuple[OpCost, ...] = ()
    events: PartEvents | None = field(default=None, repr=False, compare=False)
    light_events: PartEvents | None = field(default=None, repr=False, compare=False)

    def remade(self) -> PartTrace:
        """The same where experts always make their first product again; itself where they cannot."""
        if self.light is None:
            return self
        saved, backward = self.light
        return replace(
            self, saved=saved, backward=backward, backward_ops=self.light_ops, events=self.light_events,
            light=None, light_ops=(), light_events=None,
        )  # fmt: skip


@dataclass(frozen=True)
class LayerTrace:
    """A decoder layer: `mlp` is its MoE or dense half."""

    attention: PartTrace
    mlp: PartTrace
    is_moe: bool

    @property
    def saved(self) -> int:
        """Bytes, both halves."""
        return self.attention.saved + self.mlp.saved


@dataclass(frozen=True)
class ModelTrace:
    """By part. `layers` has one entry a layer, those of a kind the same object.

    Attributes:
        shared: bytes that the first layer of a stage saves for all of them, such as rotary tables.
        balance: bytes that the load-balancing loss saves for each MoE layer.
        kinds: number of different layers.
        head_gradient: bytes of the head's `saved` that are its weight's gradient.
    """

    embedding: PartTrace
    layers: tuple[LayerTrace, ...]
    head: PartTrace
    shared: int
    balance: int
    kinds: int
    head_gradient: int

    def remade(self, numbers: Container[int]) -> ModelTrace:
        """The same where the experts of layers `numbers` always make their first product again."""
        made: dict[int, LayerTrace] = {}  # by kind
        layers = []
        for number, layer in enumerate(self.layers):
            if number in numbers:
                layer = made.setdefault(id(layer), replace(layer, mlp=layer.mlp.remade()))
            layers.append(layer)
        return replace(self, layers=tuple(layers), kinds=len({id(layer) for layer in layers}))
