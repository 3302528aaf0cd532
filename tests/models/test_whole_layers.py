"""Decoder layers that are not two sublayers, compiled whole: attention and experts side by side, and routers that hand on their
hidden states."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import forebay
from forebay.policy import PolicyError
from tests.helpers import no_warnings
from tests.models.conftest import HEAD, HIDDEN, VOCABULARY, build_tiny, equal, loss_and_gradients, token_ids

_FEW = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_attention_heads": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2_moe": (
        "Cohere2MoeConfig",
        {
            **_FEW,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "num_experts": 8,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "zaya": (
        "ZayaConfig",
        {
            **_FEW,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": HEAD,
            "num_experts": 8,
            "moe_intermediate_size": 16,
            "router_hidden_size": 16,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
}


def build(family: str) -> nn.Module:
    name, fields = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**fields)).train()
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.1)
    return model


def managed(model: nn.Module, policy: Any = "keep") -> forebay.Managed:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*such as whole decoder layers")
        return forebay.manage(model, policy, compile=True)


@pytest.fixture(scope="module")
def cohere() -> Iterator[tuple[nn.Module, nn.Module, forebay.Managed]]:
    """A model and its managed copy, whose layers are compiled once for all tests."""
    own = build("cohere2_moe")
    model = copy.deepcopy(own)
    with managed(model) as mem:
        yield own, model, mem


def close(got: list[Tensor], expected: list[Tensor], exact: list[Tensor]) -> None:
    """As near as the model's own code is to the same in fp64, up to a factor; graphs add up in another order."""
    for a, b, c in zip(got, expected, exact, strict=True):
        own = (b - c).abs().max().item()
        assert (a - c).abs().max().item() <= 8 * own + 1e-6 * c.abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients(family: str, request: pytest.FixtureRequest) -> None:
    ids = token_ids()
    if family == "cohere2_moe":
        own, model, mem = request.getfixturevalue("cohere")
    else:
        own = build(family)
        model = copy.deepcopy(own)
        mem = managed(model)
    reference: Any = copy.deepcopy(own).double()
    reference.set_experts_implementation("eager")  # grouped products have no fp64
    exact = loss_and_gradients(reference, ids, use_cache=False)
    close(loss_and_gradients(model, ids), loss_and_gradients(own, ids, use_cache=False), exact)
    assert set(mem.placements.values()) == {"keep"} and all(p.count(".") == 2 for p in mem.placements)


def test_graphs_are_used_again_whatever_the_number_of_targets(cohere: Any) -> None:
    _, model, _ = cohere
    loss_and_gradients(model, token_ids())
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (3, 5):
            loss_and_gradients(model, token_ids(), num_items_in_batch=count)


def test_placements_have_the_same_bits() -> None:
    model, ids = build("cohere2_moe"), token_ids()
    found = []
    for policy in ("keep", "recompute", "offload"):
        with managed(model, policy) as mem:
            found.append([loss_and_gradients(model, ids) for _ in range(4)][-1])
            assert policy in mem.placements.values()
    assert equal(found[0], found[1]) and equal(found[0], found[2])


def test_own_code_runs_where_more_is_asked(cohere: Any) -> None:
    """A KV cache, outputs of modules inside, and gradient checkpointing, all with the bits of the model's own code."""
    own, model, _ = cohere
    ids = token_ids()
    kinds: list[dict[str, Any]] = [{"output_attentions": True}, {"output_hidden_states": True}]
    for more in kinds:
        with torch.no_grad():
            got, expected = (m.eval()(ids, use_cache=False, **more).logits for m in (model, own))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    words = [m.generate(ids[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0) for m in (model, own)]
    assert torch.equal(*words)
    model.train(), own.train()
    calls: list[str] = []
    handle = model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append("norm"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss_and_gradients(model, ids)
    assert calls == ["norm"] * 2, "once more in backward"
    model.gradient_checkpointing_disable()
    handle.remove()


def test_what_is_inside_is_no_region() -> None:
    model = build("cohere2_moe")
    with pytest.raises(PolicyError, match=r"'model.layers.0.mlp' runs inside 'model.layers.0'"):
        managed(model, {"*.mlp": "recompute"})
    assert "forward" not in vars(model.model.layers[0])


def test_detach_gives_the_forwards_back() -> None:
    model, ids = build("zaya"), token_ids()
    expected = loss_and_gradients(model, ids, use_cache=False)
    managed(model).detach()
    with no_warnings():
        assert equal(loss_and_gradients(model, ids, use_cache=False), expected)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="Linear has no decoder layers of transformers to compile"):
        forebay.manage(nn.Linear(2, 2), {"": "keep"}, compile=True, loss=None)
    model = build("cohere2_moe")
    layer = model.model.layers[1]
    layer.forward = lambda *args, **kwargs: args[0]
    with pytest.raises(ValueError, match=r"'model.layers.1'.*replaced"):
        managed(model)


def test_two_sublayers_stay_two(tokens: Tensor) -> None:
    with forebay.manage(build_tiny("mixtral"), "keep", compile=True) as mem:
        assert all(path.endswith((".self_attn", ".mlp")) for path in mem.placements)
