"""A model's parameters by shape, how processes share them, and what CUDA and NCCL take besides the allocator.

Input: a model on any device (`weight_shapes`), and figures of a run. Output: `WeightShapes`, a `Sharing`, and bytes of rank 0,
whose shards are the largest. Nothing is kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from forebay.communicators import DEFAULT, FEW, PIPELINE, SINGLE
from forebay.models.families import decoder_layers, sublayer_modules
from forebay.pipeline.partition import StageLayer
from forebay.train.parallel import even_dimension
from forebay.train.weights_in_place import is_split

SAME_HOST = 8
"""GPUs of one host, which reach each other's memory: `dispatch = "auto"` asks for that."""
CONTEXT = 850 << 20
"""Bytes of a CUDA context (0.60 GiB before anything ran) with the kernels of torch, cuBLAS, cuDNN and Triton (0.80 to 0.82 GiB
after some steps). This and the next are measured on H200s, torch 2.11, CUDA 13, NCCL 2.28: what the device has in use besides
what torch reserved."""
NCCL, NCCL_ALONE = 260 << 20, 110 << 20
"""Bytes of NCCL itself and its kernels: with several processes, and with one."""
CHANNEL, CHANNEL_RING = 6 << 20, 12 << 20
"""Bytes of a communicator's channel, and what it takes more with the first collective."""
CHANNEL_SEND, CHANNEL_RECEIVE = 2 << 20, 10 << 20
"""Bytes that a channel takes more with the first message to a rank, and from one."""
MESSAGES = 62 << 20
"""Bytes of NCCL's kernels that send messages to one rank."""
DTYPE_BYTES = MappingProxyType({"float32": 4, "bfloat16": 2})
"""Bytes of an element of the dtypes that are planned."""
_DTYPES = MappingProxyType({size: getattr(torch, name) for name, size in DTYPE_BYTES.items()})
PEER = 384 << 20
"""Bytes that an all-to-all through NCCL takes for each peer on the host: 0.35 GiB with one, 1.10 with three."""


class Weight(NamedTuple):
    """A parameter: its name within its layer (or the model), its shape, whether it belongs to a layer's experts, whether it is
    not trained, and whether it belongs to a layer's first sublayer."""

    name: str
    shape: tuple[int, ...]
    experts: bool = False
    frozen: bool = False
    attention: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightShapes:
    """A model's parameters.

    Attributes:
        head: of the head and the norm before it, without a weight that is tied to the embedding.
        layers: of each layer.
        divisible: every weight of a layer belongs to one of its sublayers, so that stages may end between them.
    """

    embedding: tuple[Weight, ...]
    head: tuple[Weight, ...]
    layers: tuple[tuple[Weight, ...], ...]
    tied: bool
    divisible: bool = False

    def of(self, layer: StageLayer) -> tuple[Weight, ...]:
        """A layer's parameters that a stage has."""
        every = self.layers[layer.number]
        return every if layer.is_whole else tuple(w for w in every if w.attention == layer.attention)

    @property
    def total(self) -> int:
        return sum(n for n, _ in self.sizes)

    @property
    def sizes(self) -> list[tuple[int, bool]]:
        """Elements of each, and whether it belongs to experts."""
        return [
            (weight.elements, weight.experts) for part in (self.embedding, self.head, *self.layers) for weight in part
        ]


@dataclass(frozen=True)
class Sharing:
    """How the processes of one pipeline stage share their layers.

    Attributes:
        data: processes of a replica that its layers are sharded over.
        ep: those of them that share the experts of a layer.
        pp: pipeline ranks.
        replicate: replicas. If nothing is sharded, DistributedDataParallel reduces their gradients.
        sharded: FSDP2 is used, because there are several processes or two dtypes.
        parameter, compute, summed: bytes of an element of parameters (also of moments and of shards of gradients), of unsharded
            parameters, and of gradients that are summed and reduced.
        frozen: bytes of an element of parameters that are not trained.
        engine: one of `forebay.pipeline` runs the steps (pipelines, overlap, graphs): parameters are unsharded for a step; else
            module by module.
        reshard: see `[parallel]`.
        apart: FSDP2 gathers a layer's experts apart from the rest of the layer.
        sums: gradients of several microbatches are summed before they are reduced.
        gpu: there is a CUDA context, and the allocator rounds.
        fused: AdamW is one kernel; else its temporaries are as large as the shard.
        random: parameters are whole on the device for a moment, one by one: they are initialized there, not loaded.
        trainer: `forebay train` runs the steps; else transformers' `Trainer`.
        slot_bytes: of a rank into which pipeline ranks of its host copy packets (`forebay.pipeline.peer_links`); 0 if packets
            travel through NCCL.
    """

    data: int = 1
    ep: int = 1
    pp: int = 1
    replicate: int = 1
    sharded: bool = False
    parameter: int = 4
    compute: int = 4
    summed: int = 4
    frozen: int = 4
    engine: bool = False
    reshard: bool = True
    apart: bool = False
    sums: bool = True
    gpu: bool = True
    fused: bool = True
    random: bool = True
    trainer: bool = True
    slot_bytes: int = 0

    @property
    def gathers_experts(self) -> bool:
        """Whether an engine gathers the experts for each use, and everything else for a step."""
        return self.engine and self.reshard and self.apart

    def splits(self, elements: int, processes: int) -> bool:
        """Whether a weight of `elements`, of which `processes` of a replica have parts, is split in its shard's memory; see
        `forebay.train.weights_in_place`."""
        return self._in_place(processes) and is_split(elements, _DTYPES[self.parameter], _DTYPES[self.compute])

    def lends(self, elements: int, processes: int) -> bool:
        """Whether such a weight is computed with in its shard's memory, split or not."""
        return self._in_place(processes) and (self.parameter == self.compute or self.splits(elements, processes))

    def _in_place(self, processes: int) -> bool:
        return self.engine and self.sharded and self.fused and self.trainer and processes == 1

    @property
    def batch(self) -> int:
        """Processes that share the batch."""
        return self.data * self.replicate

    @property
    def world(self) -> int:
        return self.batch * self.pp

    @property
    def ddp(self) -> bool:
        """DistributedDataParallel reduces gradients."""
        return self.replicate > 1 and not self.sharded

    @property
    def adds_in_place(self) -> bool:
        """An engine adds the experts' weight gradients to wider sums as they are made (`forebay.kernels.grouped`), and sums the
        vocabulary's itself."""
        return self.engine and self.sharded and self.summed != self.compute


def weight_name(name: str) -> str:
    """The name of a model's parameter within its layer, or within the model if no layer has it."""
    return re.sub(r"^.*?\blayers\.\d+\.", "", name)


def weight_shapes(model: Any) -> WeightShapes:
    """The parameters of a `*ForCausalLM`, on any device.

    Raises:
        ValueError: a family that Forebay does not know.
    """
    named = {
        id(p): Weight(weight_name(name), tuple(p.shape), frozen=not p.requires_grad)
        for name, p in model.named_parameters()
    }
    embedding = [id(p) for p in model.get_submodule(model.base_model_prefix).embed_tokens.parameters()]
    layers, seen, divisible = [], set(embedding), True
    for parts in decoder_layers(model):
        experts = {id(p) for p in parts.moe.experts.parameters()} if parts.moe is not None else set()
        modules = sublayer_modules(parts.module, parts.halves)
        divisible = divisible and modules is not None
        names = modules[0] if modules is not None else []
        first = {id(p) for name in names for p in getattr(parts.module, name).parameters()}
        mine = [id(p) for p in _in_fsdp_order(parts.module)]
        layers.append(tuple(named[p]._replace(experts=p in experts, attention=p in first) for p in mine))
        seen.update(mine)
    tied = any(id(p) in embedding for p in model.lm_head.parameters())
    rest = tuple(weight for p, weight in named.items() if p not in seen)
    return WeightShapes(tuple(named[p] for p in embedding), rest, tuple(layers), tied, divisible)


def _in_fsdp_order(module: nn.Module) -> Iterator[nn.Parameter]:
    """Children first: FSDP2 goes through gradients in this order (torch 2.11, `_get_managed_modules`)."""
    for child in module.children():
        yield from _in_fsdp_order(child)
    yield from module.parameters(recurse=False)


def shard_length(shape: tuple[int, ...], processes: int, experts: bool) -> int:
    """Elements of rank 0's shard, the largest. FSDP2 shards the first dimension, and experts along an even one."""
    dim = even_dimension(shape, processes) if experts else 0
    return -(-shape[dim] // processes) * math.prod(shape[:dim] + shape[dim + 1 :])


def outside_bytes(s: Sharing, both_ways: bool = False) -> int:
    """Bytes of a rank that are not the allocator's: CUDA's context and communicators, those of `forebay.train.distributed.Mesh`.

    Args:
        both_ways: hidden states travel between two pipeline ranks in both directions, because a rank has several stages.
    """
    if not s.gpu:
        return 0
    if s.world == 1:
        return CONTEXT + (NCCL_ALONE + _group_bytes(1)) * s.sharded
    parts = s.pp * s.replicate > 1 and not s.ddp
    groups = [_group_bytes(s.world, FEW if parts else DEFAULT)]
    if parts:
        groups.append(_group_bytes(s.data))
    if parts and s.replicate > 1:
        groups.append(_group_bytes(s.replicate))
    if s.ep > 1:
        groups += [_group_bytes(s.data // s.ep), _group_bytes(s.ep, FEW)]
    if s.pp > 1:
        used = (CHANNEL_SEND + CHANNEL_RECEIVE) * (1 + both_ways)
        messages = [MESSAGES, min(s.pp - 1, 2) * PIPELINE * (4 * CHANNEL + used)]
        groups += [_group_bytes(s.pp, FEW), *([s.slot_bytes] if s.slot_bytes else messages)]
    return CONTEXT + NCCL + sum(groups)


def _group_bytes(processes: int, channels: int = DEFAULT) -> int:
    """Bytes of a communicator that has run a collective."""
    return (SINGLE if processes == 1 else channels) * (CHANNEL + CHANNEL_RING)


def all_to_all_bytes(ranks: int) -> int:
    """Bytes of NCCL's all-to-all, more than of a group that only agrees on things. Beyond the ranks of one host it is not
    known."""
    return (DEFAULT - FEW) * CHANNEL + PEER * (min(ranks, SAME_HOST) - 1)


def symmetric_bytes(ranks: int, tokens: int, hidden: int, slots: int, element: int) -> int:
    """Bytes of symmetric memory of each rank of an expert group of P ranks with at most T tokens of K slots: two
    buffers of T rows to send, T P rows that return, and ids, weights and lists. `forebay.kernels.symm_mem.PeerLayout`
    has the layout, and pads each region to 128 bytes more."""
    row = hidden * element
    return 2 * tokens * (row + 8 * slots + 4 * ranks + ranks * (row + 4 * slots))
