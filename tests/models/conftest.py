"""Tiny random models of every family, for the tests of what Forebay does to them."""

import pytest
import torch
from torch import Tensor, nn

HIDDEN, HEADS, KV_HEADS, HEAD, EXPERTS, TOP_K, WIDTH, VOCABULARY = 64, 8, 2, 16, 64, 4, 24, 97

_COMMON = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
    "use_cache": False,
}
_MOE = {**_COMMON, "num_experts_per_tok": TOP_K, "head_dim": HEAD}
_SHARED = {
    **_COMMON,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": WIDTH,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    **_SHARED,
    "num_key_value_heads": HEADS,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
# Family -> (configuration class, its fields). Where a family can mix them, layer 0 is dense.
FAMILIES: dict[str, tuple[str, dict]] = {
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "glm4_moe": ("Glm4MoeConfig", {**_SHARED, "head_dim": HEAD, "use_qk_norm": True}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_MOE,
            "num_local_experts": EXPERTS,
            "intermediate_size": WIDTH,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama": ("LlamaConfig", _COMMON),
    "mixtral": ("MixtralConfig", {**_COMMON, "num_local_experts": 8}),
    "olmoe": (
        "OlmoeConfig",
        {**_COMMON, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "intermediate_size": WIDTH},
    ),
    "qwen3": ("Qwen3Config", {**_COMMON, "head_dim": HEAD}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_MOE, "num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "mlp_only_layers": [0]},
    ),
}
MOE_FAMILIES = sorted(FAMILIES.keys() - {"llama", "qwen3"})
# Families that are built for the test of all families only. Where a family can mix them, layer 0 is dense or has another mixer.
_FEW = {**_COMMON, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
_LOCAL = {**_COMMON, "num_local_experts": 8, "num_experts_per_tok": 2}
_GRANITE = {**_LOCAL, "logits_scaling": 6.0, "residual_multiplier": 0.3, "embedding_multiplier": 2.0}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {
    **_HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_GATED = {**_FEW, "shared_expert_intermediate_size": 32}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
_SPARSE = {**_LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
_STREAMS = {"mlp_layer_types": ["dense", "sparse"], "swiglu_limit": 1.0}
MORE_FAMILIES: dict[str, tuple[str, dict]] = {
    "afmoe": ("AfmoeConfig", {**_FEW, "num_dense_layers": 1}),
    "axk1": ("AXK1Config", _LATENT),
    "axk2": ("AXK2Config", _LATENT),
    "deepseek_v32": ("DeepseekV32Config", _SPARSE),
    "deepseek_v4": (
        "DeepseekV4Config",
        {
            **_SHARED,
            "num_key_value_heads": 1,
            "head_dim": HEAD,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 16,
            "mlp_layer_types": ["hash_moe", "moe"],
            "swiglu_limit": 1.0,
            "hc_sinkhorn_iters": 2,
            "initializer_range": 0.1,
        },
    ),
    "dots1": ("Dots1Config", {**_SHARED, "head_dim": HEAD}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {**_COMMON, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": WIDTH, "moe_num_shared_experts": 1},
    ),
    "exaone_moe": ("ExaoneMoeConfig", {**_FEW, "num_shared_experts": 1}),
    "flex_olmo": ("FlexOlmoConfig", {**_FEW, "num_key_value_heads": HEADS}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _LATENT),
    "glm5_next": (
        "Glm5NextConfig",
        {
            "text_config": {
                **_SPARSE,
                **_STREAMS,
                "qk_rope_head_dim": 0,
                "index_kpool": 4,
                "linear_head_dim": 8,
                "linear_num_heads": 2,
                "hc_sinkhorn_iters": 2,
                "layer_types": ["linear_attention", "deepseek_sparse_attention"],
            },
            "vision_config": {**_VISION, "image_size": 16, "projection_intermediate_size": 16},
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**_SPARSE, "indexer_types": ["full", "shared"]}),
    "glm4v_moe": (
        "Glm4vMoeConfig",
        {
            "text_config": {**_SHARED, "head_dim": HEAD, "rope_parameters": _SECTIONS},
            "vision_config": {**_VISION, "image_size": 16},
        },
    ),
    "granitemoe": ("GraniteMoeConfig", _GRANITE),
    "granitemoe_swa": ("GraniteMoeSWAConfig", _GRANITE),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_GRANITE,
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "granitemoeshared": ("GraniteMoeSharedConfig", {**_GRANITE, "shared_intermediate_size": 32}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {**_COMMON, "head_dim": HEAD, "num_experts": 8, "moe_topk": 2}),
    "hy_v3": ("HYV3Config", {**_FEW, "head_dim": HEAD}),
    "hy_v4": ("HYV4Config", {**_SPARSE, **_STREAMS, "indexer_types": ["full", "shared"]}),
    "jamba": (
        "JambaConfig",
        {
            **_FEW,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_LATENT,
            **_HYBRID,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
            "linear_head_dim": 8,
            "linear_num_heads": 2,
            "model_max_length": 64,
        },
    ),
    "laguna": ("LagunaConfig", {**_FEW, "head_dim": HEAD}),
    "lfm2_moe": ("Lfm2MoeConfig", {**_FEW, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}),
    "mellum": ("MellumConfig", {**_FEW, "head_dim": HEAD}),
    "mimo_v2_flash": ("MiMoV2FlashConfig", {**_SHARED, "head_dim": HEAD}),
    "minimax": ("MiniMaxConfig", {**_LOCAL, **_HYBRID, "head_dim": HEAD, "block_size": 8}),
    "minimax_m2": ("MiniMaxM2Config", {**_LOCAL, "head_dim": HEAD}),
    "minimax_m3_vl": ("MiniMaxM3VLTextConfig", {**_LOCAL, "head_dim": HEAD, "swiglu_limit": 1.0}),
    "phimoe": ("PhimoeConfig", {**_LOCAL, "input_jitter_noise": 0.0, "router_jitter_noise": 0.0}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_GATED, "mlp_only_layers": [0]}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_GATED, **_DELTA, "head_dim": HEAD}),
    "qwen3_next": ("Qwen3NextConfig", {**_GATED, **_DELTA, "head_dim": HEAD}),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {
            "text_config": {**_FEW, "head_dim": HEAD},
            "vision_config": {**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
    ),
    "solar_open": ("SolarOpenConfig", {**_SHARED, "head_dim": HEAD}),
}
# Their sublayers have a stage 5: the experts' sum is scaled, normed, mixed, or added under a condition.
WITH_BACK = (
    "afmoe",
    "axk1",
    "deepseek_v4",
    "ernie4_5_moe",
    "flex_olmo",
    "glm5_next",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hy_v3",
    "hy_v4",
    "laguna",
    "minimax",
    "minimax_m3_vl",
)
# Their layers hand on more than hidden states, or several streams of them: no pipeline takes them.
IN_ONE_STAGE = ("deepseek_v4", "glm_moe_dsa", "hy_v4")
# With the families of which Forebay knows the loss alone.
CAUSAL_LMS: dict[str, tuple[str, dict]] = {
    **FAMILIES,
    "granite": ("GraniteConfig", _COMMON),
    "mistral": ("MistralConfig", {**_COMMON, "head_dim": HEAD}),
    "qwen2": ("Qwen2Config", _COMMON),
}


def build_tiny(family: str, dtype: torch.dtype = torch.float32, **fields: object) -> nn.Module:
    """A `*ForCausalLM` in training mode, seeded."""
    import transformers

    name, defaults = {**CAUSAL_LMS, **MORE_FAMILIES}[family]
    config = getattr(transformers, name)(**{**defaults, **fields})
    torch.manual_seed(1)
    kind = (
        transformers.AutoModelForImageTextToText if "vision_config" in defaults else transformers.AutoModelForCausalLM
    )
    model = kind.from_config(config, dtype=dtype).train()
    for name, table in model.named_buffers():
        if name.endswith(".tid2eid"):  # DeepSeek-V4's experts of each token, which are all 0 without a checkpoint
            table.copy_(torch.rand(len(table), EXPERTS).topk(table.shape[1]).indices)
    return model


@pytest.fixture
def tokens() -> Tensor:
    """`token_ids`."""
    return token_ids()


def token_ids() -> Tensor:
    """[2, 16] int64."""
    return torch.randint(1, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(2))


def loss_and_gradients(model: nn.Module, ids: Tensor, **more: object) -> list[Tensor]:
    """[loss, gradient of each parameter (zeros for none)]."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, **more).loss
    loss.backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return [loss.detach(), *(g.clone() for g in grads)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Equal to the bit."""
    return len(a) == len(b) and all(map(torch.equal, a, b))
