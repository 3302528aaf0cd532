"""Attention with sinks on flex_attention: its numbers, its masks, what it saves, and models that keep their own attention."""

import copy
import warnings
from functools import partial

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

import forebay
from forebay.models import compile as compile_module
from forebay.models import sinks
from forebay.models.masked_attention import under_dense_mask
from forebay.models.sinks import BlockMasks, MaskRequest, has_eager_sinks, sink_attention
from forebay.models.structure import sinks_of
from forebay.policy import PolicyError
from tests.helpers import saved_storages, storage_bytes
from tests.models.conftest import HEAD, HEADS, HIDDEN, KV_HEADS, VOCABULARY, build_tiny, equal, loss_and_gradients

BF16, FP32 = 2, 4
WINDOW = 8  # of the tiny models


# --- numbers ----------------------------------------------------------------------------------------------------------


def allowed_pairs(length: int, window: int | None, padded: int = 0) -> Tensor:
    """[2, 1, S, S]: causal, within the window, and not the first `padded` keys of the first sequence."""
    q, k = torch.arange(length)[:, None], torch.arange(length)
    allowed = (k <= q) & (k > q - (window or length))
    real = torch.stack([k >= padded, k >= 0])
    return allowed & real[:, None, None]


def block_mask_of(allowed: Tensor) -> BlockMask:
    batch, _, length, _ = allowed.shape
    return create_block_mask(lambda b, h, q, k: allowed[b, 0, q, k], batch, None, length, length, allowed.device)


def reference(q: Tensor, k: Tensor, v: Tensor, s: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """The definition, as GPT-OSS has it: a softmax over the scores and the sink, of which only the scores have values."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~allowed, float("-inf"))
    scores = torch.cat([scores, s[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2)


def drawn(length: int, heads: tuple[int, int], head: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """q, k, v, sinks, and the gradient of the output."""
    shapes = [(2, n, length, head) for n in (heads[0], heads[1], heads[1])] + [(heads[0],), (2, length, heads[0], head)]
    return [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference over the largest element, of all pairs."""
    return max(
        float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max().clamp(min=1e-30))
        for a, b in zip(found, expected, strict=True)
    )


def outputs_and_gradients(attend, tensors: list[Tensor]) -> list[Tensor]:
    *inputs, dy = tensors
    out = attend(*inputs)
    return [out, *torch.autograd.grad(out, inputs, dy.detach())]


@pytest.fixture
def uncompiled(monkeypatch):
    """`flex_attention` computes all scores in plain operations, and has a backward on a CPU."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize(
    ("length", "window", "heads", "padded"),
    [
        (1, None, (1, 1), 0),  # one token: all it sees is itself and its sink
        (1, 8, (6, 2), 0),  # a window larger than the sequence
        (37, 64, (6, 2), 0),
        (37, 1, (4, 4), 0),
        (129, None, (6, 2), 0),  # one more than a block; heads that are no power of two
        (129, 16, (8, 1), 0),
        (130, 32, (4, 2), 70),  # whole queries without keys: only their sinks are left
    ],
)
def test_against_the_definition_in_fp64(length, window, heads, padded, uncompiled):
    allowed = allowed_pairs(length, window, padded)
    tensors = drawn(length, heads, 16, torch.float32)

    def ours(q, k, v, s):
        return sink_attention(torch.nn.Identity(), q, k, v, block_mask_of(allowed), scaling=0.3, s_aux=s)[0]

    found = outputs_and_gradients(ours, tensors)
    double = [t.detach().double().requires_grad_() for t in tensors]
    expected = outputs_and_gradients(partial(reference, allowed=allowed, scale=0.3), double)
    assert found[0].shape == (2, length, heads[0], 16)
    assert worst(found, expected) < 2e-6  # fp32 has 1.2e-7; sums of up to 130 terms
    if padded:
        assert not found[0][0, :padded].any() and not found[1][0, :, :padded].any()


def test_large_logits_do_not_overflow(uncompiled):
    """Scores and sinks of hundreds, of which exponentials are not finite in fp32."""
    allowed = allowed_pairs(20, None)
    tensors = drawn(20, (4, 2), 16, torch.float32)
    tensors[3] = (300 * torch.randn(4)).requires_grad_()

    def ours(q, k, v, s):
        return sink_attention(torch.nn.Identity(), q, k, v, block_mask_of(allowed), scaling=50.0, s_aux=s)[0]

    found = outputs_and_gradients(ours, tensors)
    double = [t.detach().double().requires_grad_() for t in tensors]
    expected = outputs_and_gradients(partial(reference, allowed=allowed, scale=50.0), double)
    assert all(t.isfinite().all() for t in found)
    assert worst(found[:1], expected[:1]) < 1e-4  # scores of 300 are exact to 3e-5 in fp32


# --- masks ------------------------------------------------------------------------------------------------------------


def requests(model, batch: int, length: int, **more: object) -> list[MaskRequest]:
    """What transformers asks for full and sliding attention."""
    x = torch.zeros(batch, length, HIDDEN)
    given = {"config": model.config, "inputs_embeds": x, "attention_mask": None, "past_key_values": None, **more}
    sinks.ALL_MASK_ATTENTION_FUNCTIONS.register(sinks.NAME, sinks.request_mask)
    with sinks._implementation([model.config], sinks.NAME):
        return [create_causal_mask(**given), create_sliding_window_causal_mask(**given)]


def dense(mask: BlockMask, batch: int, length: int) -> Tensor:
    return flex.create_mask(mask.mask_mod, batch, 1, length, length, "cpu")


def test_masks_are_transformers_own_and_made_once():
    model, masks = build_tiny("gpt_oss"), BlockMasks()
    first = [masks.of(request) for request in requests(model, 2, 200)]
    for mask, window in zip(first, (None, WINDOW), strict=True):
        assert torch.equal(dense(mask, 2, 200), allowed_pairs(200, window))
        assert mask.shape[0] == 1  # one for all sequences
    assert all(masks.of(r) is mask for r, mask in zip(requests(model, 2, 200), first, strict=True))
    assert all(masks.of(r) is mask for r, mask in zip(requests(model, 5, 200), first, strict=True))
    ones = torch.ones(2, 200, dtype=torch.int64)
    assert all(masks.of(r) is mask for r, mask in zip(requests(model, 2, 200, attention_mask=ones), first, strict=True))
    assert all(masks.of(r) is not mask for r, mask in zip(requests(model, 2, 199), first, strict=True))
    with sinks._implementation([model.config], "sdpa"):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "eager"


def test_masks_of_padded_and_packed_sequences():
    model, masks = build_tiny("gpt_oss"), BlockMasks()
    padding = torch.ones(2, 140, dtype=torch.int64)
    padding[0, :131] = 0  # a whole block
    request = requests(model, 2, 140, attention_mask=padding)[1]
    mask = masks.of(request)
    assert torch.equal(dense(mask, 2, 140), allowed_pairs(140, WINDOW, 131))
    assert masks.of(request) is mask and not masks._made  # for all layers of this forward, and no other
    places = torch.cat([torch.arange(50), torch.arange(90)]).expand(2, -1)
    packed = dense(masks.of(requests(model, 2, 140, position_ids=places)[0]), 2, 140)
    document = torch.arange(140) >= 50
    assert torch.equal(packed, allowed_pairs(140, None) & (document[:, None] == document)) and not masks._made


def test_masks_made_without_gradients_serve_training():
    masks = BlockMasks()
    with torch.inference_mode():
        mask = masks.of(requests(build_tiny("gpt_oss"), 1, 30)[0])
    assert not mask.kv_indices.is_inference()


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """Attention is traced and cut as on a GPU, and runs operation by operation. Inductor has no backward of flex for a CPU."""
    from torch._dynamo.backends.common import aot_autograd

    def as_they_are(graph, inputs):
        call = graph.forward

        def boxed(arguments):
            return call(*arguments)

        boxed._boxed_call = True
        return boxed

    def backend(graph, inputs):
        if not any("flex_attention" in str(node.target) for node in graph.graph.nodes):
            return graph.forward
        with torch._functorch.config.patch(dict(compile_module._PARTITIONER_CONFIG)):
            return aot_autograd(
                fw_compiler=as_they_are,
                bw_compiler=as_they_are,
                decompositions=select_decomp_table(),
                partition_fn=compile_module._SaveFewTensors(),
            )(graph, inputs)

    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(sinks, "_TRAINS_ON", ("cpu",))
    monkeypatch.setattr(compile_module, "_inductor", backend)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def close(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, expected, strict=True))


def test_a_managed_model_trains_as_its_own_and_is_given_back(flex_on_cpu, tokens):
    """Also padded, with graphs for each kind of layer and no more, and bitwise the same when recomputed."""
    model = build_tiny("gpt_oss")
    padding = torch.ones_like(tokens)
    padding[0, :5] = 0
    expected = loss_and_gradients(model, tokens)
    padded = loss_and_gradients(model, tokens, attention_mask=padding)
    with forebay.manage(model, compile=True, loss=None) as memory:
        got = loss_and_gradients(model, tokens)
        assert close(got, expected)
        assert "sinks" in [
            n.rpartition(".")[2] for n, p in model.named_parameters() if p.grad is not None and p.grad.any()
        ]
        before = graphs()
        assert equal(loss_and_gradients(model, tokens), got) and graphs() == before
        assert close(loss_and_gradients(model, tokens, attention_mask=padding), padded)
        before = graphs()  # another padding is no other graph
        assert (
            close(loss_and_gradients(model, tokens, attention_mask=padding.flip(0)), loss_and_gradients(model, tokens))
            is False
        )
        assert graphs() == before
        independent = copy.deepcopy(model)
        for site in memory.sublayers.values():
            site.wrap(lambda fn: partial(checkpoint, fn, use_reentrant=False))
        assert equal(loss_and_gradients(model, tokens), got)
    assert equal(loss_and_gradients(model, tokens), expected)
    assert equal(loss_and_gradients(independent, tokens), expected)
    policy = {"*.0.self_attn": "offload", "*.1.self_attn": "recompute"}
    with forebay.manage(model, policy, compile=True, loss=None, offload="all") as memory:
        assert equal(loss_and_gradients(model, tokens), got)
        assert equal(loss_and_gradients(model, tokens), got) and memory.report().planned_bytes
    assert model.config._attn_implementation == "eager" and not hasattr(model.model.layers[0].self_attn, "_forebay")


def test_the_attention_sublayer_saves_these_bytes(flex_on_cpu, tokens):
    """Its input, q and k after rotation, v, the output of flex_attention, and sums: of the norm, and lse."""
    model = build_tiny("gpt_oss", torch.bfloat16, num_hidden_layers=1)
    found: dict[int, Tensor] = {}
    with forebay.manage(model, compile=True, loss=None) as memory:

        def watched(fn):
            def run(x, **kwargs):
                with saved_storages(*model.parameters(), *model.buffers(), *kwargs["position_embeddings"]) as saved:
                    out = fn(x, **kwargs)
                found.update(saved)
                return out

            return run

        memory.sublayers["model.layers.0.self_attn"].wrap(watched)
        model(tokens, labels=tokens)
    token = BF16 * HIDDEN + FP32 + BF16 * HEAD * (HEADS + 2 * KV_HEADS) + (BF16 * HEAD + FP32) * HEADS
    assert storage_bytes(t for t in found.values() if t.is_floating_point()) == tokens.numel() * token


def test_mixed_dtypes_under_autocast(flex_on_cpu, tokens):
    """Rotary tables are in fp32 there, and so are queries and keys, but not values."""
    model = build_tiny("gpt_oss", num_hidden_layers=1)
    with forebay.manage(model, compile=True, loss=None), torch.autocast("cpu", torch.bfloat16):
        found = loss_and_gradients(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_and_gradients(model, tokens)
    assert abs(found[0] - expected[0]) < 0.01 and all(t.isfinite().all() for t in found)


def test_a_dense_mask_runs_eagerly_and_says_so(flex_on_cpu, tokens):
    model = build_tiny("gpt_oss")
    mask = torch.where(allowed_pairs(16, None), 0.0, torch.finfo(torch.float32).min)
    expected = loss_and_gradients(model, tokens, attention_mask=mask)
    with forebay.manage(model, compile=True, loss=None):
        with pytest.warns(UserWarning, match=r"runs eagerly and saves all scores: .*shape \(2, 1, 16, 16\)"):
            assert close(loss_and_gradients(model, tokens, attention_mask=mask), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_and_gradients(model, tokens, attention_mask=mask)


DENSE = ("deepseek_v4", "hy_v4", "mimo_v2_flash")  # families whose masks stay dense


def scores_saved(model, tokens: Tensor, **options: object) -> int:
    """How many saved tensors have a score of each head, query and key, or more."""
    batch, length = tokens.shape
    with forebay.manage(model, compile=True, loss=None, **options), saved_storages(*model.parameters()) as saved:
        model(tokens, labels=tokens)
    rows = batch, model.config.num_attention_heads, length
    return sum(t.shape[:3] == rows and t.shape[-1] >= length for t in saved.values())


@pytest.mark.parametrize("family", DENSE)
def test_families_under_dense_masks_train_as_their_own_and_are_given_back(flex_on_cpu, family):
    """Also padded; bitwise the same when recomputed or offloaded, and no scores are saved."""
    model = build_tiny(family)
    ids = torch.randint(1, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(2))
    padding = torch.ones_like(ids)
    # Some layers of MiMo-V2 have no sinks: transformers gives queries without keys the mean of all values.
    padding[0, slice(40, None) if family == "mimo_v2_flash" else slice(33)] = 0
    expected = loss_and_gradients(model, ids)
    padded = loss_and_gradients(model, ids, attention_mask=padding)
    with forebay.manage(model, compile=True, loss=None) as memory:
        assert memory.sublayers.layers[-1].masks is not None
        got = loss_and_gradients(model, ids)
        assert close(got, expected) and equal(loss_and_gradients(model, ids), got)
        assert close(loss_and_gradients(model, ids, attention_mask=padding), padded)
        independent = copy.deepcopy(model)
    assert equal(loss_and_gradients(model, ids), expected) and equal(loss_and_gradients(independent, ids), expected)
    for policy in ("recompute", "offload"):
        with forebay.manage(model, policy, compile=True, loss=None):
            assert equal(loss_and_gradients(model, ids), got)
    assert not scores_saved(model, ids) and scores_saved(model, ids, attention=None)


@pytest.mark.parametrize("length", [3, 130])
def test_compressed_keys_beside_those_of_a_window(flex_on_cpu, length):
    """Layers of DeepSeek-V4 with 4 and with 128 tokens a compressed key: with 130 tokens there are more keys than tokens."""
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    model = build_tiny("deepseek_v4", layer_types=kinds, index_topk=4)
    # With seed 2 a token's experts tie within float32.
    ids = torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(3))
    expected = loss_and_gradients(model, ids)
    with forebay.manage(model, compile=True, loss=None):
        assert close(loss_and_gradients(model, ids), expected)


@pytest.mark.parametrize("family", ["deepseek_v4", "mimo_v2_flash"])
def test_masks_without_a_row_for_each_query_run_eagerly(flex_on_cpu, tokens, family):
    model = build_tiny(family)
    mask = torch.zeros(2, 1, 1, tokens.shape[1])
    expected = loss_and_gradients(model, tokens, attention_mask=mask)
    with forebay.manage(model, compile=True, loss=None):
        assert close(loss_and_gradients(model, tokens, attention_mask=mask), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_a_call_for_attention_weights(flex_on_cpu, tokens, reentrant):
    """The second run in the backward is eager, as the first one was."""
    model = build_tiny("mimo_v2_flash")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    expected = loss_and_gradients(model, tokens, output_attentions=True)
    with forebay.manage(model, compile=True, loss=None):
        assert close(loss_and_gradients(model, tokens, output_attentions=True), expected)
        assert close(loss_and_gradients(model, tokens), expected)


@pytest.mark.parametrize("family", ["gpt_oss", *DENSE])
def test_caches_and_attention_weights_run_the_models_own(flex_on_cpu, tokens, family):
    model = build_tiny(family).eval()
    with torch.inference_mode():
        expected = model(tokens, output_attentions=True)
        words = model.generate(tokens[:, :4], max_new_tokens=3, do_sample=False, use_cache=True)
        with forebay.manage(model, compile=True, loss=None):
            got = model(tokens, output_attentions=True)
            assert close([got.logits, *got.attentions], [expected.logits, *expected.attentions])
            again = model.generate(tokens[:, :4], max_new_tokens=3, do_sample=False, use_cache=True)
            assert close([model(tokens).logits], [expected.logits])
    assert torch.equal(again, words)


def test_what_the_kernels_do_not_take_runs_eagerly():
    """Dropout, wider heads, no mask, and one for each head."""
    q, k, mask = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 5, 16), torch.zeros(1, 1, 5, 5)
    called: list[object] = []

    def eager(*args: object, **kwargs: object) -> str:
        called.append(kwargs["dropout"])
        return "eager"

    attend = under_dense_mask(eager)
    wide = torch.randn(1, 1, 5, 600)
    for given, dropout in (((q, k, k, mask), 0.5), ((wide, wide, wide, mask), 0.0), ((q, k, k, None), 0.0)):
        assert attend(torch.nn.Identity(), *given, scaling=0.25, dropout=dropout) == "eager" and called.pop() == dropout
    assert attend(torch.nn.Identity(), q, k, k, mask.expand(1, 2, 5, 5), scaling=0.25) == "eager"
    called.clear()
    out, weights = attend(torch.nn.Identity(), q, k, k, mask)
    assert out.shape == (1, 5, 2, 16) and weights is None and not called


def test_who_keeps_the_attention_of_the_model(flex_on_cpu, monkeypatch):
    def managed(model, **options: object) -> bool:
        with forebay.manage(model, compile=True, loss=None, **options) as memory:
            return memory.sublayers.layers[0].masks is not None

    assert managed(build_tiny("gpt_oss")) and managed(build_tiny("granitemoe_swa"))
    assert not managed(build_tiny("gpt_oss"), attention=None)
    assert not managed(build_tiny("qwen3_moe"))
    chosen = build_tiny("gpt_oss")
    chosen.config._attn_implementation = "flex_attention"  # transformers' own
    assert not managed(chosen) and chosen.config._attn_implementation == "flex_attention"
    with forebay.manage(build_tiny("gpt_oss"), loss=None) as memory:  # uncompiled
        assert memory.sublayers.layers[0].masks is None
    with pytest.warns(UserWarning, match="attention_dropout is 0.1, which the fused kernels do not have"):
        assert not managed(build_tiny("gpt_oss", attention_dropout=0.1))
    with pytest.warns(UserWarning, match="heads have 1024 numbers, and the kernels take up to 512"):
        assert not managed(build_tiny("deepseek_v4", head_dim=1024))
    monkeypatch.setattr(sinks, "_TRAINS_ON", ("cuda",))
    assert not managed(build_tiny("gpt_oss"))
    with pytest.raises(PolicyError, match="attention='flash' is unknown; valid are 'flex' and None"):
        forebay.manage(build_tiny("gpt_oss"), attention="flash")


def test_sinks_are_found_in_the_source():
    attention = {
        name: build_tiny(name).model.layers[-1].self_attn for name in ("gpt_oss", "granitemoe_swa", "mimo_v2_flash")
    }
    assert all(map(has_eager_sinks, attention.values()))
    assert not has_eager_sinks(build_tiny("qwen3_moe").model.layers[0].self_attn)
    flexible = sinks_of(type(attention["gpt_oss"]).forward)
    assert flexible is not None and "_choose" in flexible.__code__.co_varnames
    assert not transformers.MiMoV2FlashForCausalLM._supports_flex_attn


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("length", "window", "heads"),
    [(1, None, (64, 8)), (200, 128, (64, 8)), (1023, 128, (64, 8)), (2048, None, (64, 8)), (257, 4096, (12, 4))],
)
def test_on_the_gpu_bf16_is_no_worse_than_eager(length, window, heads):
    """Compiled as in a sublayer, forward and every gradient against fp64, beside the definition in bf16."""
    allowed = allowed_pairs(length, window).cuda()
    tensors = drawn(length, heads, 64, torch.bfloat16, "cuda")
    mask = block_mask_of(allowed)

    def plain(q, k, v, s, mask):
        return sink_attention(torch.nn.Identity(), q, k, v, mask, scaling=0.125, s_aux=s)[0]

    compiled = compile_module.compile_sublayer(plain, attention=True)
    found = outputs_and_gradients(partial(compiled, mask=mask), tensors)
    double = [t.detach().double().requires_grad_() for t in tensors]
    expected = outputs_and_gradients(partial(reference, allowed=allowed, scale=0.125), double)
    eager = outputs_and_gradients(partial(reference, allowed=allowed, scale=0.125), tensors)
    for name, ours, theirs, truth in zip(("out", "dq", "dk", "dv", "dsinks"), found, eager, expected, strict=True):
        error, limit = worst([ours], [truth]), worst([theirs], [truth])
        assert error <= max(1.1 * limit, 2e-2), f"{name}: {error:.2e}, eager {limit:.2e}"


@pytest.mark.gpu
def test_on_the_gpu_a_model_trains_placements_change_no_bit_and_it_saves_the_floor():
    """GPT-OSS with heads of 64, a window, and an odd length."""
    model = build_tiny("gpt_oss", torch.bfloat16, head_dim=64, sliding_window=128).cuda()
    ids = torch.randint(1, VOCABULARY, (2, 1001), generator=torch.Generator().manual_seed(2)).cuda()
    expected = loss_and_gradients(model.float(), ids)
    model.bfloat16()
    found, saved = {}, {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for policy in ("keep", "keep again", "offload", "recompute"):
            with forebay.manage(
                model, policy.split()[0], compile=True, loss=None, offload="all", min_bytes=0
            ) as memory:
                assert memory.sublayers.layers[0].masks is not None
                for _ in range(3):
                    found[policy] = loss_and_gradients(model, ids)
                if policy == "keep":
                    profile = memory.profile(lambda: model(input_ids=ids, labels=ids).loss)
                    saved = {p: n for p, n in profile.by_region.items() if p.endswith("1.self_attn")}
    finally:
        torch.use_deterministic_algorithms(False)
    assert abs(found["keep"][0] - expected[0]) < 0.02
    for policy, tensors in found.items():
        different = [n for n, a, b in zip(range(999), tensors, found["keep"], strict=False) if not torch.equal(a, b)]
        assert not different, f"{policy}: {different}"
    token = BF16 * HIDDEN + FP32 + BF16 * 64 * (HEADS + 2 * KV_HEADS) + (BF16 * 64 + FP32) * HEADS
    (attention,) = saved.values()
    assert ids.numel() * token <= attention <= 1.02 * ids.numel() * token + 8192  # and the mask's blocks
