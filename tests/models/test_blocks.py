"""Decoder layers as two sublayers give bitwise the layers' results, and leave nothing behind."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forebay.managed import manage
from forebay.memory.hooks import Manager
from forebay.memory.overrides import setting
from forebay.models.blocks import install_sublayers
from forebay.models.families import has_decoder_layers
from forebay.models.hf_experts import register
from forebay.moe.dispatch import LocalDispatcher
from tests.models.conftest import FAMILIES, HIDDEN, build_tiny, equal, loss_and_gradients


def _state(model):
    return {path: dict(module.__dict__) for path, module in model.named_modules()}


@pytest.mark.parametrize("family", FAMILIES)
def test_bitwise_the_original_also_checkpointed_and_gone_afterwards(family, tokens):
    model = build_tiny(family)
    expected = loss_and_gradients(model, tokens)
    before = _state(model)
    sublayers = install_sublayers(model)
    assert list(sublayers) == [f"model.layers.{i}.{sublayer}" for i in (0, 1) for sublayer in ("self_attn", "mlp")]
    called = []
    for path, site in sublayers.items():
        site.wrap(lambda fn, path=path: lambda *a, **k: (called.append(path), fn(*a, **k))[1])
    assert equal(loss_and_gradients(model, tokens), expected)
    assert called == list(sublayers)
    for site in sublayers.values():
        site.wrap(lambda fn: partial(checkpoint, fn, use_reentrant=False))
    assert equal(loss_and_gradients(model, tokens), expected)
    assert len(called) == 3 * len(sublayers), "each sublayer runs once more forward and once again in backward"
    sublayers.uninstall()
    assert _state(model) == before
    assert equal(loss_and_gradients(model, tokens), expected)
    assert len(called) == 3 * len(sublayers), "an uninstalled sublayer was called"


def test_padding_reaches_the_attention_also_under_transformers_own_checkpointing(tokens):
    model = build_tiny("qwen3_moe")
    mask = torch.ones_like(tokens)
    mask[1, 10:] = 0
    expected = loss_and_gradients(model, tokens, attention_mask=mask)
    assert not equal(loss_and_gradients(model, tokens), expected)
    install_sublayers(model)
    assert equal(loss_and_gradients(model, tokens, attention_mask=mask), expected)
    model.gradient_checkpointing_enable()
    assert equal(loss_and_gradients(model, tokens, attention_mask=mask), expected)


def test_a_positional_call_of_a_layer():
    model = build_tiny("mixtral")  # the family whose layers take the position embeddings second
    layer = model.model.layers[0]
    x = torch.randn(2, 16, HIDDEN)
    embeddings = model.model.rotary_emb(x, torch.arange(16)[None])
    expected = layer(x, embeddings, None)
    install_sublayers(model)
    assert torch.equal(layer(x, embeddings, None), expected)


def test_a_cache_takes_the_original_forward(tokens):
    model = build_tiny("qwen3_moe").eval()
    generation = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    with torch.no_grad():
        expected = model(tokens, use_cache=True)
        generated = model.generate(tokens[:, :4], **generation)
    for site in install_sublayers(model).values():
        site.wrap(lambda fn: pytest.fail)
    with torch.no_grad():
        got = model(tokens, use_cache=True)
        assert torch.equal(got.logits, expected.logits)
        assert got.past_key_values.get_seq_length() == 16
        assert torch.equal(model.generate(tokens[:, :4], **generation), generated)
    with pytest.warns(UserWarning, match="use_cache=False"):
        model.train()(tokens, use_cache=True)


@pytest.mark.parametrize("how", ["argument", "config"])
def test_attention_weights_take_the_original_forward(how, tokens):
    model = build_tiny("qwen3_moe")
    model.set_attn_implementation("eager")
    expected = model(tokens, output_attentions=True).attentions
    install_sublayers(model)
    model.config.output_attentions = how == "config"
    got = model(tokens, **({"output_attentions": True} if how == "argument" else {})).attentions
    assert equal(got, expected) and len(got) == 2


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "olmoe", "qwen3_moe"])
def test_transformers_own_capture_still_works(family, tokens):
    model = build_tiny(family, router_aux_loss_coef=0.5)
    more = {"output_router_logits": True, "output_hidden_states": True}
    expected, out = loss_and_gradients(model, tokens, **more), model(tokens, **more)
    assert not equal(loss_and_gradients(model, tokens), expected)
    install_sublayers(model)
    assert equal(loss_and_gradients(model, tokens, **more), expected)
    got = model(tokens, **more)
    assert equal(got.router_logits, out.router_logits) and len(got.router_logits) > 0
    assert equal(got.hidden_states, out.hidden_states)


def test_restore_puts_the_bare_sublayer_back():
    model = build_tiny("qwen3_moe")
    assert all(site.light_recompute is None for site in install_sublayers(build_tiny("qwen3_moe")).values())
    model.set_experts_implementation(register())
    experts = model.model.layers[1].mlp.experts
    site = install_sublayers(model)["model.layers.1.mlp"]
    bare = site.call
    site.wrap(lambda fn: lambda *a: fn(*a))
    site.wrap(lambda fn: lambda *a: fn(*a))
    site.light_recompute(True)
    assert site.call is not bare and setting(experts, "forebay_save_h") is False
    site.restore()
    assert site.call is bare and setting(experts, "forebay_save_h") is None and "_forebay" not in vars(experts)
    assert site.module is model.model.layers[1]


def test_uninstall_leaves_what_was_put_on_top_and_may_be_repeated(tokens):
    model = build_tiny("qwen3_moe")
    sublayers = install_sublayers(model)
    called = []
    sublayers["model.layers.1.mlp"].wrap(lambda fn: lambda *a: (called.append(1), fn(*a))[1])
    layer = model.model.layers[1]
    ours = layer.forward
    theirs = layer.forward = lambda *a, **k: ours(*a, **k)
    expected = model(tokens).logits
    sublayers.uninstall()
    sublayers.uninstall()
    assert layer.forward is theirs and called == [1]
    assert torch.equal(model(tokens).logits, expected) and called == [1]
    layer.forward = ours
    again = install_sublayers(model)
    assert torch.equal(model(tokens).logits, expected)
    again.uninstall()
    assert all("forward" not in m.__dict__ for m in model.modules())


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_unknown_layer_is_named():
    from transformers import CohereConfig, CohereForCausalLM

    model = CohereForCausalLM(CohereConfig(**FAMILIES["llama"][1]))  # attention and MLP of one norm, side by side
    with pytest.raises(ValueError, match=r"'model.layers.0' is a CohereDecoderLayer.*not two sublayers"):
        install_sublayers(model)
    assert has_decoder_layers(model)
    with pytest.raises(ValueError, match=r"Sequential has no decoder layers"):
        install_sublayers(nn.Sequential(nn.TransformerDecoderLayer(8, 2), nn.Linear(8, 8)))


def test_an_unknown_mlp_is_called_as_it_is_and_named_if_compiled(tokens):
    model = build_tiny("qwen3_moe")
    model.model.layers[1].mlp = nn.Linear(HIDDEN, HIDDEN)
    expected = loss_and_gradients(model, tokens)
    with pytest.raises(ValueError, match=r"'model.layers.1.mlp' is a Linear.*not a class of transformers"):
        install_sublayers(model, compile=True)
    assert "forward" not in model.model.layers[0].__dict__, "one layer installed after an error"
    install_sublayers(model)
    assert equal(loss_and_gradients(model, tokens), expected)


@pytest.mark.parametrize("which", ["model.layers.1", "model.layers.1.mlp"])
def test_a_replaced_forward_is_named(which):
    model = build_tiny("qwen3_moe")
    module = model.get_submodule(which)
    module.forward = partial(type(module).forward, module)
    with pytest.raises(ValueError, match=f"forward of {which!r}.*replaced"):
        install_sublayers(model, compile=True)


def test_a_subclass_with_its_own_forward_is_refused_and_one_without_is_not(tokens):
    model = build_tiny("qwen3_moe")
    layer = model.model.layers[1]
    kind = type(layer)
    expected = model(tokens).logits
    layer.__class__ = type("Sharded", (kind,), {})  # what FSDP2 does
    sublayers = install_sublayers(model)
    with pytest.raises(ValueError, match=r"model.layers.0.*managed already"):
        install_sublayers(model)
    sublayers.uninstall()
    assert torch.equal(model(tokens).logits, expected)
    layer.__class__ = type("Patched", (kind,), {"forward": lambda self, x, **_: x})
    with pytest.raises(ValueError, match=r"Patched.*replaced"):
        install_sublayers(model)


def test_router_jitter_is_the_blocks_own_and_refused_in_compiled_sublayers(tokens):
    model = build_tiny("mixtral", router_jitter_noise=0.1)
    torch.manual_seed(5)
    expected = model(tokens).logits
    with pytest.raises(ValueError, match="router_jitter_noise"):
        install_sublayers(model, compile=True)
    install_sublayers(model)
    torch.manual_seed(5)
    assert torch.equal(model(tokens).logits, expected)


def test_the_experts_alone_make_something_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Light recomputation is of the call that has the experts, not of what an engine calls before and after them."""
    seen: list[bool] = []
    original = Manager._run

    def run(
        self: Any, region: Any, forward: Any, checkpointed: Any, has_experts: bool, *given: Any, **more: Any
    ) -> Any:
        seen.append(has_experts)
        return original(self, region, forward, checkpointed, has_experts, *given, **more)

    monkeypatch.setattr(Manager, "_run", run)
    model = build_tiny("afmoe")
    with manage(model, {"*.mlp": "recompute"}, dispatcher=LocalDispatcher(8)) as memory:
        (site,) = (layer.mlp for layer in memory.sublayers.layers if layer.mlp.back is not None)
        assert site.front is not None and site.experts is not None and site.back is not None
        front = site.front(torch.randn(1, 4, HIDDEN))
        sums = site.experts(front.rows, front.ids, front.weights, None)
        site.back(front.rest, sums, *front.held)
    assert seen == [False, True, False]
