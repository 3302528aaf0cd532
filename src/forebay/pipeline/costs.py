"""What every decoder layer of a model costs, read from its shapes: the figures that stages of a pipeline are balanced by.

In: a transformers ``*ForCausalLM`` with all its layers, on any device (the meta device will do: only shapes are read), the
tokens of a microbatch. Out: `Costs`. Nothing is run, changed or kept.

Time is seconds of forward and backward of one microbatch on an H200; what counts is how layers compare with each other and
with the head. FLOPs alone would not do: a head multiplies at nearly twice the speed of an MoE layer. So (fitted to
layers and heads of Qwen3-30B-A3B and DeepSeek-V2-Lite at 4096 tokens, within 20 %):

    FLOPs                 700 TFLOP/s, of routed experts 400
    bytes saved           2.2 ms a GB: norms, rotation, activation and permutation read and write them several times
    parameters            12 bytes each at 4 TB/s: each microbatch's gradient is written, and added into a sum in fp32

FLOPs are:

    weights     6 a parameter and token: 2 forward, 2 for the input's gradient, 2 for the weight's (Kaplan et al. 2020,
                arXiv:2001.08361, section 2.1). Routed experts count K / E of theirs; biases, norms and the embedding's
                look-up nothing
    attention   7 products of a query-key pair and a head's width where forward has 2: FlashAttention's backward makes 5,
                as it makes the scores again (Dao 2023, arXiv:2307.08691). A causal mask leaves S (S + 1) / 2 pairs of a
                sequence, a sliding window those within it

Memory is bytes saved for backward of one microbatch in bf16, by layers as `forebay.models.blocks` runs them uncompiled, with
Forebay's experts. A token, a part at a time (H hidden, K experts of width I, each saved tensor counted once):

    RMSNorm of width n    6 n: the input in fp32 and what the weight multiplies, in GPT-OSS's 8 n (transformers' own RMSNorm)
    linear layers         2 a input's width; those that read the same tensor share it
    attention             queries, keys, values and output, 2 bytes an element, and fp32 log-sum-exp of each head; "eager"
                          repeats keys and values for each head and keeps the probabilities, 6 bytes a pair and head (GPT-OSS's
                          2)
    latent attention      keys of every head, and values together with the part of the keys they are made with. Here and in GLM
                          the output twice: as attention and as the projection want it, for rotary halves are concatenated
    routed experts        2 H + 4 K I (`forebay.moe.experts_op`), and 20 K for the routing
    router                probabilities in fp32, 4 E; DeepSeek's and GLM's input in fp32, 4 H, and weight in fp32, 4 E H once
    dense, shared MLP     8 a unit of width: gate, its activation, up, and their product
    embedding             8: the token's number
    head                  the final norm, and 4 H a token and 4 V H once: the gradients that `forebay.models.fused_loss` keeps
                          in fp32

`tests/pipeline/test_costs.py` holds them against what autograd saves, in every family: within 3 %.
An estimate, then, and of saved tensors alone: weights, gradients and the memory of a running operation are not in it.
`forebay profile` measures what one forward pass saves.
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
# Seconds a FLOP of dense products and of routed experts, a byte saved, a parameter whose gradient is summed.
_DENSE, _ROUTED, _SAVED, _SUMMED = 1 / 700e12, 1 / 400e12, 2.2e-12, 12 / 4e12
_SLOT = 20  # bytes a token and expert: weight (fp32), id (int64), order and inverse (int32)
# Router -> bytes saved a token for each expert of the layer and for each element of its input, where not (4, 0): fp32
# probabilities, the mask of a group-limited choice, the input in fp32.
_ROUTERS: Mapping[str, tuple[int, int]] = {
    "DeepseekV2TopkRouter": (5, 4),
    "DeepseekV3TopkRouter": (4, 4),
    "Glm4MoeTopkRouter": (4, 4),
    "GptOssTopKRouter": (0, 0),  # softmax over the chosen alone
}
# Norms that multiply by their weight in fp32, and attention whose eager probabilities are made in bf16.
_F32_NORMS = frozenset({"GptOssRMSNorm"})
_BF16_SCORES = frozenset({"GptOssAttention"})
# Attention whose queries come out of a concatenation, head by head; fused kernels give the output their layout.
_BY_HEAD = frozenset({"DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeAttention"})


@dataclass(frozen=True)
class PartCost:
    """Of one microbatch in one part of a model.

    Attributes:
        dense, routed: FLOPs of forward and backward; the latter in routed experts.
        saved: bytes saved for backward.
        weights, expert_weights: parameters that get a gradient; the latter in routed experts, over all processes.
    """

    dense: int
    routed: int
    saved: int
    weights: int
    expert_weights: int = 0

    @property
    def flops(self) -> int:
        """Of forward and backward."""
        return self.dense + self.routed

    def cost(self, ep: int) -> LayerCost:
        """Seconds and bytes, on one of `ep` processes that share the experts. They share the rows too, so FLOPs stay."""
        summed = self.weights + self.expert_weights / ep
        time = self.dense * _DENSE + self.routed * _ROUTED + self.saved * _SAVED + summed * _SUMMED
        return LayerCost(time, self.saved)


@dataclass(frozen=True)
class Costs:
    """Of one microbatch. `layers` in the order of the forward, `work` what they are made of."""

    layers: tuple[LayerCost, ...]
    embedding: LayerCost
    head: LayerCost
    work: tuple[PartCost, ...]
    head_work: PartCost


def model_costs(model: nn.Module, sequence: int, microbatch: int, attention: str | None = None, ep: int = 1) -> Costs:
    """The costs of a model's parts, for `microbatch` sequences of `sequence` tokens.

    Args:
        attention: the implementation that will run, such as "sdpa"; None is the model's own.
        ep: processes that share the experts.

    Raises:
        ValueError: layers of a family that Forebay does not know, or a model without an output embedding.
    """
    if not has_known_layers(model):
        raise ValueError(
            f"{type(model).__name__} has no decoder layers that Forebay knows; those are {', '.join(LAYERS)}"
        )
    eager = (attention or model.config._attn_implementation) == "eager"  # type: ignore[union-attr]
    work = tuple(_layer(path, layer, sequence, microbatch, eager) for path, layer in decoder_layers(model))
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embedding; costs are of a *ForCausalLM")
    tokens = sequence * microbatch
    vocabulary, hidden = head.weight.shape
    loss = _F32 * hidden * (tokens + vocabulary)
    head_work = PartCost(6 * vocabulary * hidden * tokens, 0, tokens * (_F32 + _BF16) * hidden + loss, 0)
    return Costs(
        tuple(w.cost(ep) for w in work),
        LayerCost(0, 8 * tokens),
        # Its product runs over all rows at once, and what it keeps it writes once.
        LayerCost(head_work.flops * _DENSE, head_work.saved),
        work,
        head_work,
    )


def _layer(path: str, layer: Any, sequence: int, microbatch: int, eager: bool) -> PartCost:
    tokens, hidden = sequence * microbatch, layer.input_layernorm.weight.shape[0]
    block = moe_block(f"{path}.mlp", layer.mlp)
    mlp = _dense(layer.mlp) if block is None else _moe(block)
    attention = layer.self_attn
    queries, values = _widths(attention)
    pairs = _pairs(attention, sequence)
    weights = _matrices(attention.parameters()) + mlp.parameters
    flops = 6 * tokens * weights + 7 * microbatch * pairs * (queries + values)
    saved = _eager(attention, sequence) if eager else _fused(attention)
    # The norms before attention and MLP, whose outputs all projections share, and those inside of attention.
    saved += _inner_norms(attention) + 2 * (_norm(layer.input_layernorm, hidden) + _BF16 * hidden)
    routed = 6 * tokens * mlp.routed
    return PartCost(flops, routed, tokens * (saved + mlp.saved) + mlp.saved_once, weights, mlp.expert_weights)


def _is_latent(attention: Any) -> bool:
    """DeepSeek's: the keys and values of all heads are made of one narrow vector."""
    return hasattr(attention, "kv_b_proj")


def _widths(attention: Any) -> tuple[int, int]:
    """Elements of a token's queries and of its attention output, over all heads."""
    q = getattr(attention, "q_b_proj", None) or attention.q_proj
    return q.out_features, attention.o_proj.in_features


def _heads(attention: Any) -> int:
    return _widths(attention)[0] // (attention.qk_head_dim if _is_latent(attention) else attention.head_dim)


def _fused(attention: Any) -> int:
    """Bytes a token of queries, keys, values, output and log-sum-exp."""
    queries, values = _widths(attention)
    if _is_latent(attention):
        elements = 2 * queries + attention.kv_b_proj.out_features + values
    else:
        elements = queries + values + (queries + values) // attention.num_key_value_groups
    if type(attention).__name__ in _BY_HEAD:
        elements += values
    return _BF16 * elements + _F32 * _heads(attention)


def _eager(attention: Any, sequence: int) -> int:
    """Bytes a token of queries, keys and values of every head, output, and a row of probabilities for each head."""
    score = _BF16 if type(attention).__name__ in _BF16_SCORES else _F32 + _BF16
    return _BF16 * 2 * sum(_widths(attention)) + score * _heads(attention) * sequence


def _inner_norms(attention: Any) -> int:
    """Of queries and keys, once a head or over all heads; or of DeepSeek's narrow vectors, which a projection reads then."""
    queries, _ = _widths(attention)
    saved = 0
    for name, child in attention.named_children():
        if name in ("q_norm", "k_norm"):
            saved += _norm(child, queries if name == "q_norm" else queries // attention.num_key_value_groups)
        elif name.endswith("norm"):
            saved += _norm(child, child.weight.shape[0]) + _BF16 * child.weight.shape[0]
    return saved


def _pairs(attention: Any, sequence: int) -> int:
    """Query-key pairs of a sequence that a causal mask, or a sliding window, leaves."""
    window = min(getattr(attention, "sliding_window", None) or sequence, sequence)
    return window * (window + 1) // 2 + (sequence - window) * window


@dataclass(frozen=True)
class _Mlp:
    """Parameters that multiply every token, and of routed experts those that multiply a token; bytes saved a token besides the
    block's input; bytes saved whatever the tokens; parameters of all routed experts."""

    parameters: int
    saved: int
    saved_once: int = 0
    routed: int = 0
    expert_weights: int = 0


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
        per_input * n_experts * hidden,
        stacked * top_k // n_experts,
        stacked,
    )


def _dense(mlp: Any) -> _Mlp:
    """A gated MLP."""
    return _Mlp(_matrices(mlp.parameters()), 4 * _BF16 * mlp.down_proj.in_features)


def _matrices(parameters: Iterable[Any]) -> int:
    return sum(p.numel() for p in parameters if p.dim() == 2)


def _norm(norm: nn.Module, width: int) -> int:
    return (2 * _F32 if type(norm).__name__ in _F32_NORMS else _F32 + _BF16) * width


def partition_of(config: Config, declared: Any, sharing: int, costs: Costs | None = None) -> Partition:
    """Which layers each stage has, as ``parallel.partition`` says; the same on every process. With costs by rank.

    Args:
        declared: the Hugging Face configuration.
        sharing: processes that share the batch, those of one stage.
        costs: `costs_of` the same, where they are known already.

    Raises:
        UsageError: the model's layers cannot be cut so, or are of a family that Forebay does not know.
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
    """What the layers of the model cost, for one microbatch of each of `sharing` processes.

    Raises:
        UsageError: a family that Forebay does not know.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # Every family has eager attention, which needs no package; what it saves is counted by `model.attention`.
        # transformers writes that into the configuration: hence the copy.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(declared), attn_implementation="eager")
    try:
        return model_costs(
            model, config.train.sequence, config.microbatch(sharing), config.model.attention, config.parallel.ep
        )
    except ValueError as error:
        raise UsageError(f"the layers of this model cannot be planned: {first_line(error)}") from error


def pipeline_shape(config: Config, sharing: int) -> tuple[str, int, int, int]:
    """Schedule, ranks, chunks and microbatches; without a pipeline that is one stage, which runs one after the other."""
    p = config.parallel
    microbatches = config.train.batch // sharing // config.microbatch(sharing)
    return (p.schedule if p.pp > 1 else "1f1b"), p.pp, p.chunks, microbatches


def priced(partition: Partition, costs: Costs, schedule: str, microbatches: int) -> Partition:
    return with_costs(
        partition,
        costs.layers,
        schedule,
        embedding=costs.embedding,
        head=costs.head,
        microbatches=microbatches,
    )
