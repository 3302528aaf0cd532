"""What Forebay does not know or cannot do: it falls back with one warning, or says what to write."""

import copy
import warnings

import pytest
import torch
import transformers

import forebay
from forebay.models.experts import register

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def _build(family, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **more})
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


@pytest.fixture
def ids():
    return torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(2))


def _equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_an_unknown_family_falls_back_with_one_warning(policy, ids, losses_and_gradients):
    # Without a cache, as under management: Gemma's gradients differ in their last bits with one.
    model = _build("Gemma2", attn_implementation="eager", sliding_window=4, use_cache=False)
    expected = losses_and_gradients(model, ids)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with forebay.manage(model, policy, offload="all") as mem:
            assert list(mem.placements) == ["model.layers.0", "model.layers.1"]
            for _ in range(2):
                assert _equal(losses_and_gradients(model, ids), expected)
    (said,) = [str(w.message) for w in warned if w.category is UserWarning]
    assert "final_logit_softcapping" in said and "logits [tokens, vocabulary]" in said and "loss=None" in said


def test_known_layers_beside_unknown_ones(ids, losses_and_gradients):
    """Layers of a class that is not known, in a model whose others are."""
    model = _build("Qwen3")
    model.model.layers[1] = _build("Phi3").model.layers[0]
    model.model.layers[1].self_attn.layer_idx = 1
    expected = losses_and_gradients(model, ids)
    with pytest.warns(UserWarning, match=r"Phi3DecoderLayer.*whole decoder layers"):
        mem = forebay.manage(model, "offload", loss=None)
    assert list(mem.placements) == ["model.layers.0", "model.layers.1"]
    assert _equal(losses_and_gradients(model, ids), expected)
    with pytest.raises(ValueError, match=r"Phi3DecoderLayer"):
        mem.detach()
        forebay.manage(model, compile=True)


def test_neutral_multipliers_are_accepted(ids):
    model = _build("Granite", logits_scaling=1.0)
    expected = model(ids, labels=ids).loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with forebay.manage(model, "recompute"):
            got = model(ids, labels=ids)
    assert got.logits is None
    torch.testing.assert_close(got.loss, expected)
    with pytest.warns(UserWarning, match="logits_scaling=8"):
        forebay.manage(_build("Granite", logits_scaling=8.0))


def test_a_second_derivative_is_refused_by_name(tiny, tokens):
    model = tiny("qwen3_moe", num_experts=8)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # those of grouped_mm have no second derivative either
    weights = list(model.parameters())
    for loss, says in (("fused", "loss=None"), (None, r"experts.*differentiable once.*experts=None")):
        with forebay.manage(model, "keep", loss=loss), pytest.raises(RuntimeError, match=says):
            torch.autograd.grad(model(tokens, labels=tokens).loss, weights, create_graph=True, allow_unused=True)
    with forebay.manage(model, "keep", loss=None, experts=None):
        grads = torch.autograd.grad(model(tokens, labels=tokens).loss, weights, create_graph=True, allow_unused=True)
        sum(g.square().sum() for g in grads if g is not None).backward()
        assert weights[0].grad is not None


def test_torch_func_runs_the_models_own_experts_and_loss(tiny, tokens):
    model = tiny("qwen3_moe", num_experts=8)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (tokens,), {"labels": tokens}).loss

    model.set_experts_implementation("eager")
    expected = torch.func.grad(loss)(parameters)
    with forebay.manage(model, "keep"):
        got = torch.func.grad(loss)(parameters)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_torch_func_is_refused_by_name_where_there_is_nothing_else(tiny, tokens):
    model = tiny("qwen3_moe", num_experts=8)
    model.set_experts_implementation(register())
    with pytest.raises(RuntimeError, match=r"torch.func.*experts=None"):
        torch.func.vmap(lambda ids: model(ids[None]).logits)(tokens)
    with pytest.raises(RuntimeError, match=r"torch.func.*torch.autograd.grad"):
        torch.func.grad(
            lambda h: forebay.models.linear_cross_entropy.linear_cross_entropy(h, torch.ones(8, 4), torch.tensor([1]))
        )(torch.ones(1, 4))


def test_the_cache_is_off_in_training_only(tiny, tokens):
    model = tiny("qwen3_moe", num_experts=8)
    model.config.use_cache = True
    with forebay.manage(copy.deepcopy(model), "keep") as mem, warnings.catch_warnings():
        warnings.simplefilter("error")
        managed = mem._model
        assert managed(tokens, labels=tokens).past_key_values is None
        assert managed.config.use_cache
        with torch.no_grad():
            assert managed.eval()(tokens).past_key_values is not None
        assert managed.generate(tokens[:, :4], max_new_tokens=2, do_sample=False).shape == (2, 6)
