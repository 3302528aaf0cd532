"""Costs by layer: bytes against what autograd saves, FLOPs against torch's own counter and a model counted by hand."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from forebay.memory.profiler import Profiler
from forebay.models.families import decoder_layers
from forebay.models.hf_experts import register
from forebay.pipeline.costs import model_costs
from tests.models.conftest import build_tiny

HIDDEN, SEQUENCE, BATCH = 128, 64, 2  # hidden size unlike any other width of the tiny models
TOKENS = SEQUENCE * BATCH
FAMILIES = "deepseek_v2 deepseek_v3 glm4_moe gpt_oss llama mixtral olmoe qwen3 qwen3_moe".split()


def built(family: str, attention: str, **fields: object) -> nn.Module:
    model = build_tiny(family, torch.bfloat16, hidden_size=HIDDEN, **fields)
    model.set_attn_implementation(attention)  # type: ignore[operator]
    if family not in ("llama", "qwen3"):
        register()
        model.set_experts_implementation("forebay")  # type: ignore[operator]
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_what_autograd_saves(family: str, attention: str) -> None:
    """Every layer, in bf16: within 3 %, and not above. A few bytes a token (reciprocals of norms) are not counted."""
    if (family, attention) == ("gpt_oss", "sdpa"):
        pytest.skip("gpt_oss has no sdpa")
    model = built(family, attention)
    paths = [path for path, _ in decoder_layers(model)]
    ids = torch.randint(1, 97, (BATCH, SEQUENCE))
    saved = Profiler(model).run(lambda: model(ids, labels=ids).loss, paths).by_region
    costs = model_costs(model, SEQUENCE, BATCH).layers
    for path, cost in zip(paths, costs, strict=True):
        assert 0.97 * saved[path] < cost.memory <= saved[path], path


@pytest.mark.parametrize("family", FAMILIES)
def test_matrix_flops_are_what_torch_counts(family: str) -> None:
    """Three times those of forward; attention scores apart, which torch counts without the mask."""
    model = built(family, "eager").eval()
    ids = torch.randint(1, 97, (BATCH, SEQUENCE))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    counts = counter.get_flop_counts()
    for path, layer in decoder_layers(model):
        products = counts[f"{type(model).__name__}.{path}"]
        scores = products.get(torch.ops.aten.bmm, 0)
        number = int(path.rsplit(".", 1)[1])
        ours = model_costs(model, SEQUENCE, BATCH).work[number].flops
        window = min(getattr(layer.self_attn, "sliding_window", None) or SEQUENCE, SEQUENCE)
        kept = (window * (window + 1) / 2 + (SEQUENCE - window) * window) / SEQUENCE**2  # by the mask
        assert ours == pytest.approx(3 * (sum(products.values()) - scores) + 3.5 * scores * kept, rel=1e-9), path


def test_qwen3_moe_by_hand() -> None:
    """Qwen3-30B-A3B's layer, without its weights: 4096 tokens."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        num_hidden_layers=2,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        vocab_size=151936,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    tokens = 4096
    costs = model_costs(model, tokens, 1)
    attention = 2048 * 128 * (32 + 4 + 4 + 32)
    experts, router = 8 * 3 * 2048 * 768, 128 * 2048
    scores = 7 * (tokens * (tokens + 1) // 2) * 2 * 32 * 128
    assert costs.work[0].flops == 6 * tokens * (attention + experts + router) + scores
    assert costs.layers[0] == costs.layers[1] and len(costs.layers) == 2
    residual = 2 * 2048 + 4 * 8 * 768  # of the experts: 28 KiB a token
    assert residual == 28 * 1024
    norms = 2 * 6 * 2048 + 6 * 128 * (32 + 4)
    flash = 2 * 128 * (32 + 4 + 4 + 32) + 4 * 32
    first_norm_output, routing, probabilities = 2 * 2048, 20 * 8, 4 * 128
    by_hand = norms + first_norm_output + flash + residual + routing + probabilities
    assert costs.layers[0].memory == tokens * by_hand
    assert costs.embedding.time == 0 and costs.embedding.memory == 8 * tokens
    assert costs.head_work.flops == 6 * 151936 * 2048 * tokens
    assert costs.head.memory == 4 * 151936 * 2048 + tokens * (4 + 6) * 2048
    # Measured on an H200: a layer 6.9 ms, the head 10.2 ms.
    assert costs.layers[0].time == pytest.approx(6.9e-3, rel=0.2) and costs.head.time == pytest.approx(10.2e-3, rel=0.2)


def test_costs_follow_the_microbatch_and_the_processes() -> None:
    model = built("qwen3_moe", "sdpa")
    one, two, long = (model_costs(model, *shape) for shape in ((64, 1), (64, 2), (128, 1)))
    assert two.work[1].flops == 2 * one.work[1].flops and two.layers[1].memory == 2 * one.layers[1].memory
    assert one.layers[1].time < two.layers[1].time < 2 * one.layers[1].time  # gradients are summed once a microbatch
    assert long.layers[1].memory == two.layers[1].memory
    assert long.layers[1].time > two.layers[1].time  # more pairs of tokens, as many tokens
    named = model_costs(model, 64, 1, attention="eager")
    assert named.layers[1].memory > one.layers[1].memory and named.work[1].flops == one.work[1].flops
    shared = model_costs(model, 64, 1, ep=4)  # experts on 4 processes: fewer gradients to sum, the same rows
    assert shared.layers[1].time < one.layers[1].time and shared.layers[1].memory == one.layers[1].memory


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="no output embedding; a \\*ForCausalLM is needed"):
        model_costs(build_tiny("llama").model, 8, 1)  # type: ignore[arg-type]
