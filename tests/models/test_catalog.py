"""Published models: their numbers give the published counts, and a small cut of each runs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forebay.models.catalog import PUBLISHED, find
from forebay.models.families import decoder_layers, moe_blocks

EXACT = {"qwen3-30b-a3b": 30_532_122_624, "mixtral-8x7b": 46_702_792_704}  # bytes of the bfloat16 safetensors, halved


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_numbers_give_the_published_counts(name: str) -> None:
    published = PUBLISHED[name]
    with torch.device("meta"):
        config = AutoConfig.for_model(published.family, **published.config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    total = sum(p.numel() for p in model.parameters())
    assert total == pytest.approx(published.total, rel=0.01)
    assert total == EXACT.get(name, total)
    blocks, top_k = moe_blocks(model), model.config.num_experts_per_tok
    inactive = sum(
        p.numel() * (b.experts.num_experts - top_k) // b.experts.num_experts
        for b in blocks
        for p in b.experts.parameters()
    )
    end = model.model.embed_tokens.weight.numel()
    # Papers count both ends of the model as active parameters, or one, or none of them.
    active = [total - inactive - ends * end for ends in (0, 1, 2)]
    assert any(a == pytest.approx(published.active, rel=0.03) for a in active), active
    layers = list(decoder_layers(model))  # of a class that Forebay knows
    assert len(layers) == published.config["num_hidden_layers"]
    assert len(blocks) == len(layers) - published.config.get("first_k_dense_replace", 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_takes_every_key(name: str) -> None:
    """A key that the configuration class does not know would be stored and say nothing."""
    config = AutoConfig.for_model(PUBLISHED[name].family)
    known = set(config.to_dict()) | {"rope_theta", "head_dim"} | set(getattr(type(config), "attribute_map", {}))
    unknown = set(PUBLISHED[name].config) - known
    assert unknown <= {"q_lora_rank", "n_group", "topk_group", "aux_loss_alpha"}  # read by the code of DeepSeek-V2
    assert not unknown or PUBLISHED[name].family == "deepseek_v2"


def test_names_in_any_case_and_with_an_organization() -> None:
    assert find("Qwen/Qwen3-30B-A3B") is find("QWEN3-30B-A3B") is PUBLISHED["qwen3-30b-a3b"]
    assert find("qwen3-30b") is None and find("") is None
    for published in PUBLISHED.values():
        assert published.source.count("/") == 1 and published.paper
