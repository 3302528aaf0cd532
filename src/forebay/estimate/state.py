"""What a rank holds besides activations: parameters, gradients, optimizer states, gathered weights, and what CUDA takes.

In: the shapes of a model's parameters (`weights_of`, on any device) and a `Sharing`: how processes share them, in which dtypes.
Out: a `RankState` for the decoder layers that a pipeline rank has. Exact where it is a matter of shapes; constants say where they
come from. Nothing is kept.

    parameters    the rank's shard, in the parameters' dtype
    optimizer     AdamW: two moments of the shard in its dtype, and a step count each (a block of the allocator)
    gradients     without a process group: every parameter's, in its dtype
                  gathered for a step (pipelines, overlap): whole, in the dtype they are summed in, from the step's begin
                  FSDP2, several microbatches summed before they are reduced: whole, in the dtype they are summed in
                  FSDP2 else: the shard's, in its dtype; while a layer is reduced, its own whole and in the dtype it is sent in
    gathered      what FSDP2 gathers, in the dtype that is computed in, while activations are there:
                  embedding, last norm and head for the whole step; layers too without `reshard`, or gathered for a step
                  with `reshard`: the layer that runs, the next one on its way, and the buffer it arrives in; of a step on
                  gathered weights, the experts of one layer and their buffer

FSDP2 cuts a parameter along its first dimension in pieces of the same length, so that rank 0's shard is ceil(n / N) rows of n; an
experts' parameter along the first dimension that N divides. Figures are rank 0's, the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from forebay.models.families import decoder_layers, moe_block

GPU_BLOCK = 512  # bytes; the CUDA caching allocator's rounding
CONTEXT = 960 << 20
"""Bytes of a CUDA context (0.60 GiB before anything ran) with the kernels of torch, cuBLAS, cuDNN and Triton (0.94 GiB behind
some steps). This and the next four: measured on H200s, torch 2.11, CUDA 13, NCCL of its wheel, as what the device has in use
beside what torch reserved."""
COMMUNICATOR = 660 << 20
"""Bytes of one NCCL communicator of two or four GPUs of a host: 1.57 GiB in all with FSDP2 on either."""
COMMUNICATOR_ALONE = 390 << 20
"""The same of one process."""
CHANNEL = 450 << 20
"""Bytes of a communicator of two pipeline ranks for messages of one kind one way; there are four between two neighbours."""
PEER = 384 << 20
"""Bytes that an all-to-all through NCCL takes for each peer on the host: 0.35 GiB with one, 1.10 with three."""


@dataclass(frozen=True)
class WeightShapes:
    """Shapes of parameters: of the embedding, of the head with the norm before it (without a weight that it shares with the
    embedding), and of every layer all but the experts' and the experts'."""

    embedding: tuple[tuple[int, ...], ...]
    head: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]], ...]
    tied: bool

    @property
    def total(self) -> int:
        """Number of parameters of the whole model."""
        every = [*self.embedding, *self.head, *(s for rest, experts in self.layers for s in (*rest, *experts))]
        return sum(math.prod(s) for s in every)


@dataclass(frozen=True)
class Sharing:
    """How the processes of one pipeline stage share their layers.

    Attributes:
        data: processes that share the batch.
        ep: of them, processes that share the experts of a layer.
        pp: groups of processes with different layers.
        sharded: FSDP2 is at work: there are several processes, or two dtypes.
        parameter, compute, summed: bytes of an element of parameters (and shards of gradients, and moments), of gathered weights,
            and of gradients that are summed and reduced.
        gathered: weights are gathered for a step (pipelines, overlap); else module by module.
        reshard: see `[parallel]`.
        sums: several microbatches' gradients are summed before they are reduced.
        gpu: there is a CUDA context, and the allocator rounds.
        fused: AdamW in one kernel; else its temporaries are as large as the shard.
    """

    data: int = 1
    ep: int = 1
    pp: int = 1
    sharded: bool = False
    parameter: int = 4
    compute: int = 4
    summed: int = 4
    gathered: bool = False
    reshard: bool = True
    sums: bool = True
    gpu: bool = True
    fused: bool = True

    @property
    def adds_in_place(self) -> bool:
        """An engine's experts add their weight gradients to sums that are wider where they make them:
        `forebay.kernels.grouped_wgrad`."""
        return self.gathered and self.sharded and self.summed != self.compute


@dataclass(frozen=True)
class RankState:
    """Bytes on one rank.

    Attributes:
        parameters, optimizer: for the whole run, from the first step's end on.
        gathered: at most, in a step.
        gradients: those of layers (by place), embedding and head, each from its part's first backward on; `at_once` from the
            step's begin.
        reducing: at most, while a layer's gradients are reduced.
        stepping: of the optimizer's step, besides parameters, moments and `sharded_gradients`.
        other: context, communicators.
    """

    parameters: int
    optimizer: int
    gathered: int
    layer_gradients: tuple[int, ...]
    embedding_gradient: int
    head_gradient: int
    at_once: bool
    reducing: int
    sharded_gradients: int
    stepping: int
    other: int

    @property
    def gradients(self) -> int:
        """All of them."""
        return sum(self.layer_gradients) + self.embedding_gradient + self.head_gradient


def weights_of(model: Any) -> WeightShapes:
    """The shapes of a `*ForCausalLM` with all its layers.

    Raises:
        ValueError: layers of a family that Forebay does not know.
    """
    base = model.get_submodule(model.base_model_prefix)
    layers, seen = [], set()
    for path, layer in decoder_layers(model):
        block = moe_block(f"{path}.mlp", layer.mlp)
        experts = list(block.experts.parameters()) if block is not None else []
        mine = {id(p) for p in experts}
        layers.append((_shapes(p for p in layer.parameters() if id(p) not in mine), _shapes(experts)))
        seen |= {id(p) for p in layer.parameters()}
    embedding = list(base.embed_tokens.parameters())
    seen |= {id(p) for p in embedding}
    rest = [p for p in model.parameters() if id(p) not in seen]
    tied = any(p is q for p in model.lm_head.parameters() for q in embedding)
    return WeightShapes(_shapes(embedding), _shapes(rest), tuple(layers), tied)


def state_of(weights: WeightShapes, layers: Sequence[int], embedding: bool, head: bool, sharing: Sharing) -> RankState:
    """The state of a rank that has these layers, in forward order, and embedding and head or not."""
    s = sharing
    pieces = [_Piece.of(*weights.layers[n], s) for n in layers]
    ends = {
        "embedding": _Piece.of(weights.embedding if embedding else (), (), s),
        "head": _Piece.of(weights.head if head else (), (), s),
    }
    every = [*pieces, *ends.values()]
    own = sum(p.own for p in every)
    largest = max((p.whole for p in pieces), default=0)
    outside = sum(p.whole for p in ends.values())
    gathered = reducing = 0
    if s.sharded:
        gathered = s.compute * (outside + _gathered_layers(pieces, s))
        if s.gathered or s.sums:
            reducing = s.summed * max((p.whole for p in every), default=0)
        else:
            reducing = (s.compute + s.summed) * max(largest, outside)
    whole = not s.sharded or s.gathered or s.sums
    gradients = [_gradient(piece, s, whole) for piece in (*pieces, *ends.values())]
    steps = sum(p.count for p in every) * (GPU_BLOCK if s.gpu else 4)
    return RankState(
        parameters=s.parameter * own,
        optimizer=2 * s.parameter * own + steps,
        gathered=gathered,
        layer_gradients=tuple(gradients[:-2]),
        embedding_gradient=gradients[-2],
        head_gradient=gradients[-1],
        at_once=s.sharded and s.gathered,
        reducing=reducing,
        sharded_gradients=s.parameter * own,
        stepping=0 if s.fused else s.parameter * own,
        other=_other(s),
    )


def _gathered_layers(pieces: Sequence[_Piece], s: Sharing) -> int:
    """Elements of layers that are whole at once, with the buffer in which they arrive."""
    largest = max((p.whole for p in pieces), default=0)
    if not s.reshard:  # gathered for a step, they have arrived before anything else is there
        return sum(p.whole for p in pieces) + (0 if s.gathered else largest)
    if s.gathered:
        experts = max((p.experts for p in pieces), default=0)
        return sum(p.whole - p.experts for p in pieces) + 2 * experts if experts else sum(p.whole for p in pieces)
    return min(3, len(pieces) + 1) * largest


def _gradient(piece: _Piece, s: Sharing, whole: bool) -> int:
    """Bytes of a part's gradients from its first backward to the optimizer's step."""
    if not s.sharded:
        return s.parameter * piece.whole
    if whole:
        return s.summed * piece.whole
    if s.ep > 1 and s.data == s.ep:  # these experts are this process's own: nothing is reduced, so they are summed
        return s.parameter * (piece.own - piece.own_experts) + s.summed * piece.experts
    return s.parameter * piece.own


@dataclass(frozen=True)
class _Piece:
    """Of a layer or an end: elements of the rank's shard and of the whole that it computes with, of its experts among both;
    number of parameters."""

    own: int
    own_experts: int
    whole: int
    experts: int
    count: int

    @staticmethod
    def of(rest: Iterable[tuple[int, ...]], experts: Iterable[tuple[int, ...]], s: Sharing) -> _Piece:
        rest, mine = list(rest), [(shape[0] // s.ep, *shape[1:]) for shape in experts]
        columns = s.data // s.ep
        spread = sum(map(math.prod, mine))
        if not s.sharded:
            own, own_experts = sum(map(math.prod, rest)), spread
        else:
            own = sum(_rows(shape, s.data) for shape in rest)
            own_experts = sum(_even(shape, columns) if s.ep > 1 else _rows(shape, s.data) for shape in mine)
        whole = sum(map(math.prod, rest)) + spread
        return _Piece(own + own_experts, own_experts, whole, spread, len(rest) + len(mine))


def shard_lengths(shape: tuple[int, ...], processes: int, experts: bool) -> int:
    """Elements of rank 0's shard of a parameter; experts spread over processes are cut where it comes out even."""
    return _even(shape, processes) if experts else _rows(shape, processes)


def _rows(shape: tuple[int, ...], processes: int) -> int:
    return -(-shape[0] // processes) * math.prod(shape[1:])


def _even(shape: tuple[int, ...], processes: int) -> int:
    """Along the first dimension that divides evenly; along the first one if none does."""
    if any(length % processes == 0 for length in shape):
        return math.prod(shape) // processes
    return _rows(shape, processes)


def _other(s: Sharing) -> int:
    if not s.gpu:
        return 0
    world = s.data * s.pp
    groups = (world > 1) + (s.pp > 1 and s.data > 1) + (s.ep > 1) + (s.ep > 1 and s.data > s.ep)
    alone = COMMUNICATOR_ALONE if s.sharded and world == 1 else 0
    return CONTEXT + groups * COMMUNICATOR + alone + 4 * min(s.pp - 1, 2) * CHANNEL


def all_to_all_bytes(ranks: int) -> int:
    """NCCL's buffers of an all-to-all of so many ranks; of those beyond one host nothing is known here."""
    return PEER * (min(ranks, 8) - 1)


def symmetric_bytes(ranks: int, tokens: int, hidden: int, slots: int, element: int) -> int:
    """Symmetric memory of each rank of an expert group, of P ranks with T tokens of K slots at most: two halves of T rows to
    send, T P rows that come back, and ids, weights and lists. `forebay.kernels.symm_mem.PeerLayout` also pads each region to
    128 bytes; that file is a kernel's, and not for a planner."""
    row = hidden * element
    return 2 * tokens * (row + 8 * slots + 4 * ranks + ranks * (row + 4 * slots))


def _shapes(parameters: Iterable[nn.Parameter]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(p.shape) for p in parameters)
