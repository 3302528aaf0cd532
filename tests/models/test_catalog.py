"""Published models: their numbers give the published counts, and a small cut of each runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay.models.catalog import PUBLISHED, find
from forebay.models.families import decoder_layers, moe_blocks

EXACT = {"qwen3-30b-a3b": 30_532_122_624, "mixtral-8x7b": 46_702_792_704}  # bytes of the bfloat16 safetensors, halved


def on_meta(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(PUBLISHED[name].family, **PUBLISHED[name].config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_numbers_give_the_published_counts(name: str) -> None:
    """Of active parameters papers count both ends of the model, or one, or none of them."""
    model, published = on_meta(name), PUBLISHED[name]
    total = sum(p.numel() for p in model.parameters())
    assert total == pytest.approx(published.total, rel=0.01)
    assert total == EXACT.get(name, total)
    blocks, top_k = moe_blocks(model), model.config.num_experts_per_tok
    resting = sum(
        p.numel() * (b.experts.num_experts - top_k) // b.experts.num_experts
        for b in blocks
        for p in b.experts.parameters()
    )
    end = model.model.embed_tokens.weight.numel()
    active = [total - resting - ends * end for ends in (0, 1, 2)]
    assert any(a == pytest.approx(published.active, rel=0.03) for a in active), active


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_takes_every_key(name: str) -> None:
    """A key that the configuration class does not know would be stored and say nothing."""
    from transformers import AutoConfig

    known = set(AutoConfig.for_model(PUBLISHED[name].family).to_dict()) | {"rope_theta", "head_dim"}
    aliases = set(getattr(type(AutoConfig.for_model(PUBLISHED[name].family)), "attribute_map", {}))
    unknown = set(PUBLISHED[name].config) - known - aliases
    assert unknown <= {"q_lora_rank", "n_group", "topk_group", "aux_loss_alpha"}  # read by the code of DeepSeek-V2
    assert not unknown or PUBLISHED[name].family == "deepseek_v2"


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_are_of_a_kind_that_forebay_runs(name: str) -> None:
    model, config = on_meta(name), PUBLISHED[name].config
    layers = list(decoder_layers(model))
    assert len(layers) == config["num_hidden_layers"]
    assert len(moe_blocks(model)) == len(layers) - config.get("first_k_dense_replace", 0)


def test_names_in_any_case_and_with_an_organisation() -> None:
    assert find("Qwen/Qwen3-30B-A3B") is find("QWEN3-30B-A3B") is PUBLISHED["qwen3-30b-a3b"]
    assert find("qwen3-30b") is None and find("") is None
    for published in PUBLISHED.values():
        assert published.source.count("/") == 1 and published.paper
