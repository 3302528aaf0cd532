"""Sizes of a configuration that do not go together are named before any weight is made."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forebay.config import Model
from forebay.errors import UsageError
from forebay.models.catalog import PUBLISHED
from forebay.train import hf_io

SIZES = [
    (
        "qwen3_moe",
        {"num_attention_heads": 5},
        r"num_attention_heads = 5 .*hidden_size = 64 .*valid are 2, 4, 8, 16, 32",
    ),
    ("qwen3_moe", {"num_key_value_heads": 3}, r"num_key_value_heads = 3 .*num_attention_heads = 4 .*valid are 1, 2, 4"),
    ("gpt_oss", {"num_attention_heads": 5, "head_dim": 16}, r"num_key_value_heads = 2 .*heads = 5 .*valid are 1, 5"),
    ("gpt_oss", {"head_dim": 7}, r"head_dim = 7 .*must be even, such as 6 or 8"),
    ("mixtral", {"hidden_size": 60}, r"num_attention_heads = 4 .*15 numbers.*valid are 1, 2, 3, 5, 6, 10, 15, 30"),
    ("mixtral", {"num_experts_per_tok": 5}, r"num_experts_per_tok = 5 .*4 experts; valid are 1 to 4"),
    ("olmoe", {"num_experts_per_tok": 0}, r"num_experts_per_tok = 0 .*valid are 1 to 4"),
    ("olmoe", {"num_attention_heads": 0}, r"num_attention_heads = 0 .*at least 1"),
    ("qwen3_moe", {"num_hidden_layers": -1}, r"num_hidden_layers = -1 .*at least 1"),
    ("qwen3_moe", {"hidden_act": "sillu"}, r"hidden_act = 'sillu' .*nearest valid activation is 'silu'"),
    ("deepseek_v3", {"num_key_value_heads": 2}, r"num_key_value_heads = 2 .*must be num_attention_heads = 4"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, r"qk_rope_head_dim = 7 .*must be even"),
    ("glm4_moe", {"n_group": 3}, r"n_group = 3 .*valid are 1, 2"),
    ("glm4_moe", {"n_group": 4}, r"n_group = 4 .*valid are 1, 2"),
    ("glm4_moe", {"n_group": 2, "topk_group": 3}, r"topk_group = 3 .*valid are 1 to 2"),
    ("glm4_moe", {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}, r"topk_group = 1 .*valid are 2 to 2"),
]
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4},
    "olmoe": {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, **LATENT},
    "deepseek_v2": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, **LATENT},
}


def sized(family: str, change: dict[str, Any]) -> Model:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Model(family=family, config={**sizes, "num_experts_per_tok": 2, **FAMILIES[family], **change})


@pytest.mark.parametrize(("family", "change", "message"), SIZES)
def test_sizes_that_do_not_go_together(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=r"model\.config\." + message):
        hf_io.configuration(sized(family, change), 257)


def test_sizes_that_do() -> None:
    for family in FAMILIES:
        hf_io.configuration(sized(family, {}), 257)
    hf_io.configuration(sized("deepseek_v3", {"num_key_value_heads": 128}), 257)  # transformers' default
    for name in PUBLISHED:
        hf_io.configuration(Model(family=name), 257)
    for name in ("llama", "qwen3", "gpt2", "mamba", "gemma2", "phi3", "deepseek_v3", "qwen3_next"):
        with suppress(ImportError):
            hf_io.configuration(Model(family=name), 257)


def test_sizes_of_a_folder_are_named_by_its_file(tmp_path: Path) -> None:
    about = hf_io.configuration(sized("mixtral", {}), 257).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**about, "num_key_value_heads": 3}))
    with pytest.raises(UsageError, match=rf"{tmp_path}/config\.json.*num_key_value_heads = 3"):
        hf_io.configuration(Model(path=str(tmp_path)), 257)
