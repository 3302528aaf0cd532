"""Compiled sublayers: right, one graph for all layers, and what they save, to the byte."""

import copy
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import forebay
from forebay.models import compile as compile_module
from forebay.models.blocks import install_sublayers
from forebay.models.compile import check_compiler, compile_sublayer
from forebay.models.hf_experts import register
from forebay.moe import wgrad
from forebay.moe.experts_op import experts_weight_backward_op
from tests.helpers import saved_storages, storage_bytes
from tests.models.conftest import (
    EXPERTS,
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    TOP_K,
    WIDTH,
    build_tiny,
    equal,
    loss_and_gradients,
)

BF16, FP32, INT64, INT32 = 2, 4, 8, 4
TOKENS = 2 * 16
# Graphs of an attention and an MoE sublayer and no more: the C++ compiler takes seconds for each.
ONE_LAYER = {"num_hidden_layers": 1, "mlp_only_layers": []}
ONE_OF = {"qwen3_moe": ONE_LAYER, "gpt_oss": {"num_hidden_layers": 1}, "granitemoe": {"num_hidden_layers": 1}}


def _graphs():
    return counters["stats"]["unique_graphs"]


def _compiled(model):
    model.set_experts_implementation(register())
    return install_sublayers(model, compile=True)


def _close(a, b):
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(a, b, strict=True))


@pytest.fixture
def saved_by(tokens):
    """saved_by(model, site) -> bytes saved by the site's sublayer, weights and the position embeddings left out."""

    def measure(model, site):
        found = {}

        def watched(fn):
            def run(x, **kwargs):
                embeddings = kwargs.get("position_embeddings", ())  # one for all layers
                apart = (embeddings,) if isinstance(embeddings, torch.Tensor) else embeddings
                with saved_storages(*model.parameters(), *model.buffers(), *apart) as saved:
                    out = fn(x, **kwargs)
                found.update(saved)
                return out

            return run

        site.wrap(watched)
        model(tokens, labels=tokens)
        site.restore()
        return storage_bytes(found.values())

    return measure


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe", "qwen3_moe"])
def test_close_to_the_original_and_bitwise_under_checkpoints(family, tokens):
    model = build_tiny(family, **ONE_OF.get(family, {"num_hidden_layers": 1, "first_k_dense_replace": 0}))
    expected = loss_and_gradients(model, tokens)
    sublayers = _compiled(model)
    got = loss_and_gradients(model, tokens)
    assert _close(got, expected)
    for site in sublayers.values():
        site.wrap(lambda fn: partial(checkpoint, fn, use_reentrant=False))
    assert equal(loss_and_gradients(model, tokens), got)
    sublayers.uninstall()
    model.set_experts_implementation("eager")
    assert _close(loss_and_gradients(model, tokens), expected)


@pytest.mark.parametrize("r", [0, pytest.param(4, marks=pytest.mark.integration)])
def test_qwen3_moe_saves_these_bytes(saved_by, r, no_codegen):
    """The attention sublayer: its input, q, k and v before norm and rotation, the output, and sums.

    With LoRA of rank r on the four projections and everything else frozen: the same, and for each its r numbers a token.
    """
    model = build_tiny("qwen3_moe", torch.bfloat16)
    if r:
        peft = pytest.importorskip("peft")
        peft.get_peft_model(model, peft.LoraConfig(r=r, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    sublayers = _compiled(model)
    attention = (
        BF16 * HIDDEN  # its input
        + FP32  # of the norm
        + (BF16 * HEAD + FP32) * (HEADS + KV_HEADS)  # q and k as projected, and of their norms
        + BF16 * HEAD * KV_HEADS  # v
        + (BF16 * HEAD + FP32) * HEADS  # attention's output and log-sum-exp
        + FP32 * 4 * r  # PEFT's factors are fp32
    )
    assert saved_by(model, sublayers["model.layers.1.self_attn"]) == TOKENS * attention
    moe = (
        BF16 * HIDDEN
        + FP32
        + BF16 * EXPERTS
        + 2 * FP32  # the router's logits; maximum and sum of its softmax
        + (INT64 + BF16) * TOP_K  # ids and weights
        + 2 * BF16 * WIDTH * TOP_K  # h
        + 2 * INT32 * TOP_K  # order and its inverse
    )
    ends = INT32 * EXPERTS  # where each expert's rows end
    assert saved_by(model, sublayers["model.layers.1.mlp"]) == TOKENS * moe + ends
    dense = BF16 * HIDDEN + FP32 + 2 * BF16 * 96  # gate and up
    assert saved_by(model, sublayers["model.layers.0.mlp"]) == TOKENS * dense


def test_deepseek_v3_saves_these_bytes(saved_by, no_codegen):
    """Keys and values come from one projection: that is saved, and neither of them."""
    model = build_tiny("deepseek_v3", torch.bfloat16)
    sublayers = _compiled(model)
    attention = (
        (BF16 * HIDDEN + FP32)
        + (BF16 * 24 + FP32)  # q's latent
        + (BF16 * (16 + 8) + FP32)  # kv's latent and the rotary key
        + BF16 * HEADS * 16  # q
        + BF16 * HEADS * (8 + 16)  # keys without position, and values
        + (BF16 * 16 + FP32) * HEADS  # output and log-sum-exp
    )
    assert saved_by(model, sublayers["model.layers.1.self_attn"]) == TOKENS * attention


def test_keys_and_values_of_a_latent_are_made_again(tokens, saved_by, no_codegen, monkeypatch):
    """The same bits, without their projection: its input is there already."""
    wide = {"kv_lora_rank": 256, "qk_nope_head_dim": 128, "v_head_dim": 128}

    def measured() -> tuple[int, list[torch.Tensor]]:
        model = build_tiny("deepseek_v3", torch.bfloat16, **wide)
        site = _compiled(model)["model.layers.1.self_attn"]
        return saved_by(model, site), loss_and_gradients(model, tokens)

    saved, got = measured()
    monkeypatch.setattr("forebay.models.compile.expands_latent", lambda inner, outer: False)
    more, expected = measured()
    assert more - saved == TOKENS * BF16 * HEADS * (128 + 128)
    assert equal(got, expected)


def test_h_can_be_left_out_at_the_price_of_one_more_graph(tokens, saved_by, no_codegen):
    model = build_tiny("qwen3_moe", mlp_only_layers=[])
    site = _compiled(model)["model.layers.1.mlp"]
    expected = loss_and_gradients(model, tokens)
    full, graphs = saved_by(model, site), _graphs()
    site.light_recompute(True)
    assert equal(loss_and_gradients(model, tokens), expected)
    assert _graphs() == graphs + 1
    with saved_storages(*model.parameters(), *model.buffers()) as saved:
        out = site.call(torch.randn(2, 16, HIDDEN, requires_grad=True))
    assert full - storage_bytes(saved.values()) == TOKENS * 2 * FP32 * WIDTH * TOP_K
    del out


@pytest.mark.parametrize(
    ("device", "kernel"),
    [
        ("cpu", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        pytest.param("cuda", "aten::_scaled_dot_product_cudnn_attention", marks=pytest.mark.gpu),
    ],
)
def test_experts_and_attention_run_once(device, kernel, tokens, no_codegen):
    cuda = {"dtype": torch.bfloat16, "head_dim": 64} if device == "cuda" else {}
    model = build_tiny("qwen3_moe", mlp_only_layers=[], **cuda).to(device)
    tokens = tokens.to(device)
    _compiled(model)
    model(tokens, labels=tokens).loss.backward()
    with torch.profiler.profile() as profile:
        model(tokens, labels=tokens).loss.backward()
    calls = {e.key: e.count for e in profile.key_averages()}
    assert calls["forebay::experts"] == calls[kernel] == 2


def test_layers_share_a_graph_and_steps_recompile_nothing(tokens, no_codegen):
    model = build_tiny("qwen3_moe", num_hidden_layers=5, mlp_only_layers=[0, 3], router_aux_loss_coef=0.1)
    sublayers = _compiled(model)
    before = _graphs()
    loss_and_gradients(model, tokens)
    assert _graphs() - before == 3, "attention, dense MLP, MoE: one graph each"
    for count in (29, 30, 31):
        loss_and_gradients(model, tokens, num_items_in_batch=count, output_router_logits=True)
    for site in sublayers.values():
        site.wrap(lambda fn: partial(checkpoint, fn, use_reentrant=False))
    loss_and_gradients(model, tokens)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss_and_gradients(model, tokens)
    assert _graphs() - before == 3


def test_backward_runs_twice_only_if_asked_for(tokens):
    """Zero-bubble schedules run it twice; else it may use up what was saved, and says so."""

    def gradients(loss, **more):
        return torch.autograd.grad(loss, model.model.layers[0].self_attn.q_proj.weight, **more)[0]

    model = build_tiny("qwen3_moe", **ONE_LAYER)
    sublayers = _compiled(model)
    with pytest.raises(RuntimeError, match="donated_buffer=False"):
        model(tokens, labels=tokens).loss.backward()
        gradients(model(tokens, labels=tokens).loss, retain_graph=True)
    sublayers.uninstall()
    with torch._functorch.config.patch(donated_buffer=False):
        install_sublayers(model, compile=True)
        loss = model(tokens, labels=tokens).loss
        assert torch.equal(gradients(loss, retain_graph=True), gradients(loss))


def test_the_backward_writes_over_h_and_adds_up_downs_gradient_before_it_makes_gate_ups(tokens, monkeypatch):
    """The operations of the compiled backward get what autograd saved, not a copy of it."""
    model = build_tiny("qwen3_moe", mlp_only_layers=[])
    _compiled(model)
    loss_and_gradients(model, tokens)
    experts = [layer.mlp.experts for layer in model.model.layers]
    shape, saved, calls = (TOKENS * TOP_K, 2 * WIDTH), set(), []

    def pack(t):
        if t.shape == shape:
            saved.add(t.data_ptr())
        return t

    def noting(x, dh, *rest):
        down = experts[len(experts) - 1 - len(calls)].down_proj
        calls.append((dh.data_ptr() in saved, down.grad is not None))
        return experts_weight_backward_op(x, dh, *rest)

    monkeypatch.setattr(wgrad, "experts_weight_backward_op", noting)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert len(saved) == len(experts)
    assert calls == [(True, True)] * len(experts)


def test_transformers_capture_and_router_hooks_get_the_outputs(tokens, no_codegen):
    model = build_tiny("qwen3_moe", router_aux_loss_coef=0.5)
    expected = loss_and_gradients(model, tokens, output_router_logits=True)
    assert not _close(loss_and_gradients(model, tokens), expected)
    logits = model(tokens, output_router_logits=True).router_logits
    router = model.model.layers[1].mlp.gate
    seen = []
    router.register_forward_hook(lambda module, args, output: seen.append((module, args, output)))
    _compiled(model)
    assert _close(loss_and_gradients(model, tokens, output_router_logits=True), expected)
    assert _close(model(tokens, output_router_logits=True).router_logits, logits)
    assert len(seen) == 2 and seen[0][0] is router and seen[0][1] == ()
    assert torch.equal(seen[0][2][2].sort().values, seen[1][2][2].sort().values)


@pytest.mark.parametrize("path", ["self_attn.v_proj", "mlp.experts"])
@pytest.mark.parametrize("late", [False, True], ids=["of one layer", "after a step"])
def test_hooks_inside_run_in_the_layer_that_has_them(path, late, tokens, no_codegen):
    """Layers share a graph, and a graph is used again."""

    def run(compiled):
        model = build_tiny("qwen3_moe", mlp_only_layers=[])
        if compiled:
            _compiled(model)
        first = loss_and_gradients(model, tokens) if late else []
        module = model.model.layers[1].get_submodule(path)
        module.register_forward_hook(lambda module, args, output: output * torch.arange(1.0, 1 + output.shape[-1]))
        module.register_forward_hook(lambda module, args, output: seen.append(output.shape))
        return [*first, *loss_and_gradients(model, tokens)]

    seen = []
    assert _close(run(True), run(False))
    assert len(seen) == 2 and seen[0] == seen[1]


@pytest.mark.parametrize(
    ("path", "hook"),
    [
        ("self_attn", "hook"),
        ("self_attn.q_proj", "pre_hook"),
        ("mlp", "hook"),
        ("mlp.gate", "pre_hook"),
        ("mlp.experts", "hook"),
    ],
)
def test_backward_hooks_inside_are_refused(path, hook, tokens, no_codegen):
    model = build_tiny("qwen3_moe", **ONE_LAYER)
    _compiled(model)
    model(tokens)
    getattr(model.model.layers[0].get_submodule(path), f"register_full_backward_{hook}")(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"without compile|compile=False"):
        model(tokens)


@pytest.mark.parametrize("kind", ["router_pre", "router_returns", "attention"])
def test_hooks_that_would_be_left_out_are_refused(kind, tokens, no_codegen):
    model = build_tiny("qwen3_moe", **ONE_LAYER)
    _compiled(model)
    layer = model.model.layers[0]
    if kind == "router_pre":
        layer.mlp.gate.register_forward_pre_hook(lambda *_: None)
    elif kind == "router_returns":
        layer.mlp.gate.register_forward_hook(lambda *_: 1)
    else:
        layer.self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"layers\.0\..*without compile"):
        model(tokens)


def test_inference_and_generation(tokens):
    model = build_tiny("qwen3_moe", **ONE_LAYER).eval()
    with torch.inference_mode():
        expected = model(tokens).logits
        words = model.generate(tokens[:, :4], max_new_tokens=3, do_sample=False, use_cache=True)
        _compiled(model)
        assert torch.allclose(model(tokens).logits, expected, rtol=1e-4, atol=1e-5)
        got = model.generate(tokens[:, :4], max_new_tokens=3, do_sample=False, use_cache=True)
    assert torch.equal(got, words)


def test_more_shapes_than_torchs_default_limit_and_caches_of_their_own(monkeypatch):
    monkeypatch.setattr(compile_module, "_inductor", lambda graph, inputs: graph.forward)

    def double(x):
        return x * 2

    one, other = compile_sublayer(double), compile_sublayer(double)
    before = _graphs()
    for n in range(2, 12):  # torch's limit is 8
        assert torch.equal(one(torch.ones(n)), torch.full((n,), 2.0))
    assert _graphs() - before == 10
    one(torch.ones(5))
    assert _graphs() - before == 10
    other(torch.ones(5))
    assert _graphs() - before == 11


def test_what_cannot_be_traced_is_an_error_that_says_what_to_do(tokens):
    model = build_tiny("qwen3_moe")
    projection = model.model.layers[0].self_attn.q_proj
    projection.forward = lambda x: torch.nn.functional.linear(x, projection.weight) * (1 if x.sum() > 0 else 2)
    with (
        forebay.manage(model, compile=True),
        pytest.raises(RuntimeError, match=r"attention_sublayer of Qwen3MoeDecoderLayer.*compile=False"),
    ):
        model(input_ids=tokens, labels=tokens)


def test_a_missing_compiler_is_named(monkeypatch):
    def none():
        raise compile_module.InvalidCxxCompiler

    monkeypatch.setattr(compile_module, "get_cpp_compiler", none)
    with pytest.raises(RuntimeError, match=r"C\+\+ compiler.*compile=False"):
        install_sublayers(build_tiny("qwen3_moe"), compile=True)
    monkeypatch.setattr(compile_module, "has_triton", lambda: False)
    with pytest.raises(RuntimeError, match=r"Triton.*'cuda'.*compile=False"):
        check_compiler("cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_transformers_experts_whose_rows_are_recomputed(device):
    """Of 33 tokens: transposed, the 66 rows of their gradients' products would not begin at multiples of 16 bytes."""
    config = GptOssConfig(hidden_size=64, num_local_experts=8, num_experts_per_tok=2, intermediate_size=32)
    config._experts_implementation = "grouped_mm"
    experts = GptOssExperts(config).to(device, torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    exact = copy.deepcopy(experts).double()
    exact.config._experts_implementation = "eager"
    x = torch.randn(33, 64, device=device, dtype=torch.bfloat16)
    weights, ids = torch.rand(33, 8, device=device).topk(2)

    def run(module, x, ids, weights):
        return module(x, ids, weights)

    def gradients(function, module, dtype):
        own = x.to(dtype).requires_grad_()
        y = function(module, own, ids, weights.to(dtype))
        y.backward(torch.ones_like(y))
        return [y, own.grad, *(p.grad for p in module.parameters())]

    wanted = gradients(run, exact, torch.float64)
    for got, right in zip(gradients(compile_sublayer(run), experts, torch.bfloat16), wanted, strict=True):
        assert (got - right).norm() <= 0.02 * right.norm()
