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

    name, defaults = CAUSAL_LMS[family]
    config = getattr(transformers, name)(**{**defaults, **fields})
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


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
