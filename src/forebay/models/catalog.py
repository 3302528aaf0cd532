"""Published models by name: the numbers of their configurations, as data.

In: a name such as "qwen3-30b-a3b", in any case, with or without the organisation before it. Out: a `Published`: the family that
transformers calls it, the keys of that family's configuration, and the parameter counts that its authors give. No weights, and
nothing is fetched or kept.

Numbers are those of the `config.json` that each `source` has on Hugging Face, without what no shape depends on (dtypes,
quantisation, the stretching of positions beyond the length of pretraining). Multi-token prediction modules, which transformers
does not build, are not in them. `tests/models/test_catalog.py` holds them against the published counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Published:
    """One model.

    Attributes:
        family: model type in transformers.
        config: keys of that family's configuration.
        source: the Hugging Face repository whose config.json the numbers are of.
        total, active: parameters, and those that multiply a token, as published, rounded as published.
        paper: where the counts are published.
    """

    family: str
    config: Mapping[str, Any]
    source: str
    total: float
    active: float
    paper: str


PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {
        "qwen3-30b-a3b": Published(
            "qwen3_moe",
            MappingProxyType(
                {
                    "vocab_size": 151936,
                    "hidden_size": 2048,
                    "intermediate_size": 6144,
                    "num_hidden_layers": 48,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 4,
                    "head_dim": 128,
                    "num_experts": 128,
                    "num_experts_per_tok": 8,
                    "moe_intermediate_size": 768,
                    "norm_topk_prob": True,
                    "router_aux_loss_coef": 0.001,
                    "max_position_embeddings": 40960,
                    "rope_theta": 1e6,
                }
            ),
            "Qwen/Qwen3-30B-A3B",
            30.5e9,
            3.3e9,
            "Qwen3 Technical Report, arXiv:2505.09388; model card",
        ),
        "qwen3-235b-a22b": Published(
            "qwen3_moe",
            MappingProxyType(
                {
                    "vocab_size": 151936,
                    "hidden_size": 4096,
                    "intermediate_size": 12288,
                    "num_hidden_layers": 94,
                    "num_attention_heads": 64,
                    "num_key_value_heads": 4,
                    "head_dim": 128,
                    "num_experts": 128,
                    "num_experts_per_tok": 8,
                    "moe_intermediate_size": 1536,
                    "norm_topk_prob": True,
                    "router_aux_loss_coef": 0.001,
                    "max_position_embeddings": 40960,
                    "rope_theta": 1e6,
                }
            ),
            "Qwen/Qwen3-235B-A22B",
            235e9,
            22e9,
            "Qwen3 Technical Report, arXiv:2505.09388; model card",
        ),
        "deepseek-v2-lite": Published(
            "deepseek_v2",
            MappingProxyType(
                {
                    "vocab_size": 102400,
                    "hidden_size": 2048,
                    "intermediate_size": 10944,
                    "num_hidden_layers": 27,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 16,
                    "q_lora_rank": None,
                    "kv_lora_rank": 512,
                    "qk_rope_head_dim": 64,
                    "qk_nope_head_dim": 128,
                    "v_head_dim": 128,
                    "n_routed_experts": 64,
                    "n_shared_experts": 2,
                    "num_experts_per_tok": 6,
                    "moe_intermediate_size": 1408,
                    "first_k_dense_replace": 1,
                    "topk_method": "greedy",
                    "n_group": 1,
                    "topk_group": 1,
                    "routed_scaling_factor": 1.0,
                    "norm_topk_prob": False,
                    "aux_loss_alpha": 0.001,
                    "max_position_embeddings": 163840,
                }
            ),
            "deepseek-ai/DeepSeek-V2-Lite",
            15.7e9,
            2.4e9,
            "DeepSeek-V2, arXiv:2405.04434, appendix B",
        ),
        "deepseek-v3": Published(
            "deepseek_v3",
            MappingProxyType(
                {
                    "vocab_size": 129280,
                    "hidden_size": 7168,
                    "intermediate_size": 18432,
                    "num_hidden_layers": 61,
                    "num_attention_heads": 128,
                    "num_key_value_heads": 128,
                    "q_lora_rank": 1536,
                    "kv_lora_rank": 512,
                    "qk_rope_head_dim": 64,
                    "qk_nope_head_dim": 128,
                    "v_head_dim": 128,
                    "n_routed_experts": 256,
                    "n_shared_experts": 1,
                    "num_experts_per_tok": 8,
                    "moe_intermediate_size": 2048,
                    "first_k_dense_replace": 3,
                    "n_group": 8,
                    "topk_group": 4,
                    "routed_scaling_factor": 2.5,
                    "norm_topk_prob": True,
                    "max_position_embeddings": 163840,
                }
            ),
            "deepseek-ai/DeepSeek-V3",
            671e9,
            37e9,
            "DeepSeek-V3 Technical Report, arXiv:2412.19437",
        ),
        "gpt-oss-20b": Published(
            "gpt_oss",
            MappingProxyType(
                {
                    "vocab_size": 201088,
                    "hidden_size": 2880,
                    "intermediate_size": 2880,
                    "num_hidden_layers": 24,
                    "num_attention_heads": 64,
                    "num_key_value_heads": 8,
                    "head_dim": 64,
                    "num_local_experts": 32,
                    "num_experts_per_tok": 4,
                    "sliding_window": 128,
                }
            ),
            "openai/gpt-oss-20b",
            20.91e9,
            3.61e9,
            "gpt-oss model card, arXiv:2508.10925, table 1",
        ),
        "gpt-oss-120b": Published(
            "gpt_oss",
            MappingProxyType(
                {
                    "vocab_size": 201088,
                    "hidden_size": 2880,
                    "intermediate_size": 2880,
                    "num_hidden_layers": 36,
                    "num_attention_heads": 64,
                    "num_key_value_heads": 8,
                    "head_dim": 64,
                    "num_local_experts": 128,
                    "num_experts_per_tok": 4,
                    "sliding_window": 128,
                }
            ),
            "openai/gpt-oss-120b",
            116.83e9,
            5.13e9,
            "gpt-oss model card, arXiv:2508.10925, table 1",
        ),
        "mixtral-8x7b": Published(
            "mixtral",
            MappingProxyType(
                {
                    "vocab_size": 32000,
                    "hidden_size": 4096,
                    "intermediate_size": 14336,
                    "num_hidden_layers": 32,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 8,
                    "num_local_experts": 8,
                    "num_experts_per_tok": 2,
                    "router_aux_loss_coef": 0.02,
                    "max_position_embeddings": 32768,
                    "rope_theta": 1e6,
                }
            ),
            "mistralai/Mixtral-8x7B-v0.1",
            46.7e9,
            12.9e9,
            "Mistral AI, Mixtral of experts (announcement, December 2023); arXiv:2401.04088 rounds to 47 and 13",
        ),
        "olmoe-1b-7b": Published(
            "olmoe",
            MappingProxyType(
                {
                    "vocab_size": 50304,
                    "hidden_size": 2048,
                    "intermediate_size": 1024,
                    "num_hidden_layers": 16,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 16,
                    "num_experts": 64,
                    "num_experts_per_tok": 8,
                    "norm_topk_prob": False,
                    "router_aux_loss_coef": 0.01,
                    "max_position_embeddings": 4096,
                }
            ),
            "allenai/OLMoE-1B-7B-0924",
            6.92e9,
            1.3e9,
            "OLMoE, arXiv:2409.02060",
        ),
        "glm-4.5-air": Published(
            "glm4_moe",
            MappingProxyType(
                {
                    "vocab_size": 151552,
                    "hidden_size": 4096,
                    "intermediate_size": 10944,
                    "num_hidden_layers": 46,
                    "num_attention_heads": 96,
                    "num_key_value_heads": 8,
                    "head_dim": 128,
                    "attention_bias": True,
                    "use_qk_norm": False,
                    "n_routed_experts": 128,
                    "n_shared_experts": 1,
                    "num_experts_per_tok": 8,
                    "moe_intermediate_size": 1408,
                    "first_k_dense_replace": 1,
                    "n_group": 1,
                    "topk_group": 1,
                    "norm_topk_prob": True,
                    "routed_scaling_factor": 1.0,
                    "max_position_embeddings": 131072,
                    "rope_theta": 1e6,
                }
            ),
            "zai-org/GLM-4.5-Air",
            106e9,
            12e9,
            "GLM-4.5, arXiv:2508.06471",
        ),
    }
)


def find(name: str) -> Published | None:
    """The model of that name, whatever its case and with any organisation before a slash; None if it is not here."""
    return PUBLISHED.get(_plain(name))


def _plain(name: str) -> str:
    return name.strip().lower().rpartition("/")[2]
