"""Cost of every decoder layer of a model, from its shapes, to balance the stages of a pipeline; and the partition they give.

Input: a transformers ``*ForCausalLM`` on any device, also meta, because only shapes are read, and the tokens of a
microbatch. Output: `Costs`: seconds of forward and backward on an H200 and bytes saved for backward, of one microbatch.
These are estimates to compare layers with each other and with the head. They count saved tensors only, not weights,
gradients or temporary memory; `forebay profile` measures what a forward saves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from forebay.config import Config
from forebay.errors import UsageError, first_line
from forebay.models.families import LAYERS, MoeBlock, decoder_layers, has_known_layers, moe_block
from forebay.pipeline.partition import LayerCost, Partition, even_partition, of_counts, partition_layers, with_costs

_BF16, _F32 = 2, 4
# Fitted to layers and heads of Qwen3-30B-A3B and DeepSeek-V2-Lite at 4096 tokens on an H200, within 20 %. FLOPs alone would not
# do: a head multiplies at nearly twice the speed of an MoE layer.
_DENSE, _ROUTED = 1 / 700e12, 1 / 400e12  # seconds a FLOP of dense products and of routed experts
_SAVED = 2.2e-12  # seconds a saved byte: norms, rotation, activation and permutation read and write them several times
_SUMMED = 12 / 4e12  # seconds a parameter: each microbatch's gradient is written, and added into a sum in fp32
_FORWARD_AND_BACKWARD = 6  # FLOPs a parameter and token: 2 each for the output, the input's and the weight's gradient
# (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
_ATTENTION = (
    7  # products of a query-key pair where forward has 2: FlashAttention's backward has 5, because it computes the
)
# scores again (Dao 2023, arXiv:2307.08691).
_SLOT = 20  # bytes a token and expert: weight (fp32), id (int64), order and inverse (int32)
# Router -> bytes saved a token for each expert of the layer and for each element of its input, where not (4, 0): fp32
# probabilities, the mask of a group-limited choice, the input in fp32.
_ROUTERS: Mapping[str, tuple[int, int]] = {
    "DeepseekV2TopkRouter": (5, 4),
    "DeepseekV3TopkRouter": (4, 4),
    "Glm4MoeTopkRouter": (4, 4),
    "GptOssTopKRouter": (0, 0),  # softmax over the chosen experts only
}
# Norms that multiply by their weight in fp32, and attention whose eager probabilities are in bf16.
_F32_NORMS = frozenset({"GptOssRMSNorm"})
_BF16_SCORES = frozenset({"GptOssAttention"})
# Attention that concatenates its queries head by head, for the rotary halves. Fused kernels give the output that layout, so it is
# saved twice: as the attention's output and as the projection's input.
_BY_HEAD = frozenset({"DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeAttention"})


@dataclass(frozen=True)
class PartCost:
    """Cost of one microbatch in one part of a model.

    Attributes:
        dense, routed: FLOPs of forward and backward; `routed` are those of routed experts.
        saved: bytes saved for backward.
        weights, expert_weights: parameters that get a gradient; `expert_weights` are those of routed experts, over all processes.
    """

    dense: int
    routed: int
    saved: int
    weights: int
    expert_weights: int = 0

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward."""
        return self.dense + self.routed

    def cost(self, ep: int) -> LayerCost:
        """Seconds and bytes on one of `ep` processes that share the experts. They also share the rows, so FLOPs stay."""
        summed = self.weights + self.expert_weights / ep
        time = self.dense * _DENSE + self.routed * _ROUTED + self.saved * _SAVED + summed * _SUMMED
        return LayerCost(time, self.saved)


@dataclass(frozen=True)
class Costs:
    """Costs of one microbatch; `work` and `head_work` are what `layers`, in forward order, and `head` are made of."""

    layers: tuple[LayerCost, ...]
    embedding: LayerCost
    head: LayerCost
    work: tuple[PartCost, ...]
    head_work: PartCost


def model_costs(model: nn.Module, sequence: int, microbatch: int, attention: str | None = None, ep: int = 1) -> Costs:
    """The costs of a model's parts, for `microbatch` sequences of `sequence` tokens.

    Args:
        attention: the implementation that will run, such as "sdpa"; None is the model's own.
        ep: number of processes that share the experts.

    Raises:
        ValueError: layers of an unknown family, or a model without an output embedding.
    """
    if not has_known_layers(model):
        raise ValueError(
            f"{type(model).__name__} has no decoder layers that Forebay knows; known are {', '.join(LAYERS)}"
        )
    eager = (attention or model.config._attn_implementation) == "eager"  # type: ignore[union-attr]
    work = tuple(_layer(path, layer, sequence, microbatch, eager) for path, layer in decoder_layers(model))
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embedding; a *ForCausalLM is needed")
    tokens = sequence * microbatch
    vocabulary, hidden = head.weight.shape
    loss = _F32 * hidden * (tokens + vocabulary)  # gradients that `forebay.models.fused_loss` keeps in fp32
    saved = tokens * (_F32 + _BF16) * hidden + loss  # with the final norm
    head_work = PartCost(_FORWARD_AND_BACKWARD * vocabulary * hidden * tokens, 0, saved, 0)
    return Costs(
        tuple(w.cost(ep) for w in work),
        LayerCost(0, 8 * tokens),  # token ids
        # The head multiplies all rows at once and writes what it saves once, so that costs no extra time.
        LayerCost(head_work.flops * _DENSE, head_work.saved),
        work,
        head_work,
    )


# Bytes saved for backward in bf16, by layers as `forebay.models.blocks` runs them uncompiled with Forebay's experts; each saved
# tensor is counted once. tests/pipeline/test_costs.py holds them against what autograd saves in every family: within 3 %.


def _layer(path: str, layer: Any, sequence: int, microbatch: int, eager: bool) -> PartCost:
    tokens, hidden = sequence * microbatch, layer.input_layernorm.weight.shape[0]
    block = moe_block(f"{path}.mlp", layer.mlp)
    mlp = _dense(layer.mlp) if block is None else _moe(block)
    attention = layer.self_attn
    queries, values = _widths(attention)
    pairs = _pairs(attention, sequence)
    weights = _matrices(attention.parameters()) + mlp.parameters
    flops = _FORWARD_AND_BACKWARD * tokens * weights + _ATTENTION * microbatch * pairs * (queries + values)
    saved = _eager(attention, sequence) if eager else _fused(attention)
    # The norms inside of attention; those before attention and MLP, and their outputs, which all projections share.
    saved += _inner_norms(attention) + 2 * (_norm(layer.input_layernorm, hidden) + _BF16 * hidden)
    routed = _FORWARD_AND_BACKWARD * tokens * mlp.routed
    return PartCost(flops, routed, tokens * (saved + mlp.saved) + mlp.saved_once, weights, mlp.expert_weights)


def _is_latent(attention: Any) -> bool:
    """Whether the keys and values of all heads are made from one narrow vector, as DeepSeek's are."""
    return hasattr(attention, "kv_b_proj")


def _widths(attention: Any) -> tuple[int, int]:
    """Elements of a token's queries and of its attention output, over all heads."""
    q = getattr(attention, "q_b_proj", None) or attention.q_proj
    return q.out_features, attention.o_proj.in_features


def _heads(attention: Any) -> int:
    return _widths(attention)[0] // (attention.qk_head_dim if _is_latent(attention) else attention.head_dim)


def _fused(attention: Any) -> int:
    """Bytes a token: queries, keys, values, output, and fp32 log-sum-exp of each head."""
    queries, values = _widths(attention)
    if _is_latent(attention):  # keys of every head, and values together with the part of the keys they are made with
        elements = 2 * queries + attention.kv_b_proj.out_features + values
    else:
        elements = queries + values + (queries + values) // attention.num_key_value_groups
    if type(attention).__name__ in _BY_HEAD:
        elements += values
    return _BF16 * elements + _F32 * _heads(attention)


def _eager(attention: Any, sequence: int) -> int:
    """Bytes a token: queries, output, keys and values repeated for every head, and a row of probabilities of each head."""
    score = _BF16 if type(attention).__name__ in _BF16_SCORES else _F32 + _BF16
    return _BF16 * 2 * sum(_widths(attention)) + score * _heads(attention) * sequence


def _inner_norms(attention: Any) -> int:
    """Bytes a token: norms of queries and keys, by head or over all heads; DeepSeek's norms with their projections' input."""
    queries, _ = _widths(attention)
    saved = 0
    for name, child in attention.named_children():
        if name in ("q_norm", "k_norm"):
            saved += _norm(child, queries if name == "q_norm" else queries // attention.num_key_value_groups)
        elif name.endswith("norm"):
            saved += _norm(child, child.weight.shape[0]) + _BF16 * child.weight.shape[0]
    return saved


def _pairs(attention: Any, sequence: int) -> int:
    """Query-key pairs of a sequence inside the causal mask, or the sliding window."""
    window = min(getattr(attention, "sliding_window", None) or sequence, sequence)
    return window * (window + 1) // 2 + (sequence - window) * window


@dataclass(frozen=True)
class _Mlp:
    parameters: int  # that multiply every token
    saved: int  # bytes a token, besides the block's input
    saved_once: int = 0  # bytes, whatever the tokens
    routed: int = 0  # parameters of routed experts that multiply a token
    expert_weights: int = 0  # parameters of all routed experts


def _moe(block: MoeBlock) -> _Mlp:
    experts: Any = block.experts
    router: Any = block.router
    (n_experts, hidden), top_k = router.weight.shape, router.top_k
    width = experts.down_proj.numel() // n_experts // hidden
    stacked = sum(p.numel() for p in experts.parameters() if p.dim() == 3)
    per_expert, per_input = _ROUTERS.get(type(router).__name__, (_F32, 0))
    saved = 2 * _BF16 * top_k * width + _SLOT * top_k + per_expert * n_experts + per_input * hidden
    shared = _Mlp(0, 0) if block.shared is None else _dense(block.shared)
    return _Mlp(
        _matrices(router.parameters()) + shared.parameters,
        saved + shared.saved,
        per_input * n_experts * hidden,  # the router's weight in fp32
        stacked * top_k // n_experts,
        stacked,
    )


def _dense(mlp: Any) -> _Mlp:
    """A gated MLP, which saves gate, its activation, up, and their product."""
    return _Mlp(_matrices(mlp.parameters()), 4 * _BF16 * mlp.down_proj.in_features)


def _matrices(parameters: Iterable[Any]) -> int:
    return sum(p.numel() for p in parameters if p.dim() == 2)


def _norm(norm: nn.Module, width: int) -> int:
    """Bytes a token: the input in fp32, and what the weight multiplies."""
    return (2 * _F32 if type(norm).__name__ in _F32_NORMS else _F32 + _BF16) * width


def partition_of(config: Config, declared: Any, sharing: int, costs: Costs | None = None) -> Partition:
    """The partition that ``parallel.partition`` names, with costs by rank; the same on every process.

    Args:
        declared: the Hugging Face configuration.
        sharing: number of processes that share the batch, which are those of one stage.
        costs: the result of `costs_of` for the same arguments, if known already.

    Raises:
        UsageError: the model's layers cannot be cut that way, or are of an unknown family.
    """
    costs = costs_of(config, declared, sharing) if costs is None else costs
    schedule, pp, chunks, microbatches = pipeline_shape(config, sharing)
    asked = config.parallel.partition
    try:
        if asked == "auto":
            return partition_layers(
                costs.layers,
                schedule,
                pp,
                embedding=costs.embedding,
                head=costs.head,
                microbatches=microbatches,
                chunks=chunks,
            )
        if isinstance(asked, str) or pp == 1:
            chosen = even_partition(len(costs.layers), schedule, pp, chunks)
        else:
            chosen = of_counts(asked, len(costs.layers), schedule, pp, chunks)
    except ValueError as error:
        raise UsageError(f"parallel.partition = {asked!r}: {error}") from error
    return priced(chosen, costs, schedule, microbatches)


def costs_of(config: Config, declared: Any, sharing: int) -> Costs:
    """Costs of the model's layers, for one microbatch on each of `sharing` processes.

    Raises:
        UsageError: an unknown family.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # Every family has eager attention, which needs no package; what runs and saves is `model.attention`, below.
        # transformers writes the implementation into the configuration: hence the copy.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(declared), attn_implementation="eager")
    try:
        return model_costs(
            model, config.train.sequence, config.microbatch(sharing), config.model.attention, config.parallel.ep
        )
    except ValueError as error:
        raise UsageError(f"the layers of this model cannot be planned: {first_line(error)}") from error


def pipeline_shape(config: Config, sharing: int) -> tuple[str, int, int, int]:
    """Schedule, ranks, chunks and microbatches. No pipeline is a single stage of 1f1b."""
    p = config.parallel
    microbatches = config.train.batch // sharing // config.microbatch(sharing)
    return (p.schedule if p.pp > 1 else "1f1b"), p.pp, p.chunks, microbatches


def priced(partition: Partition, costs: Costs, schedule: str, microbatches: int) -> Partition:
    """The same partition with time and memory of every rank."""
    return with_costs(
        partition,
        costs.layers,
        schedule,
        embedding=costs.embedding,
        head=costs.head,
        microbatches=microbatches,
    )
