"""Parts of every family: the names of the whole, all of it together, and what Forebay does to a model also done to a part."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import forebay
from forebay.memory.overrides import is_managed
from forebay.models.families import (
    LocalLayers,
    absent_layers,
    all_layers,
    decoder_layers,
    keep_part,
    moe_blocks,
    why_whole,
)
from forebay.models.hf_experts import keep_local_experts, uses_forebay
from forebay.models.router import RouterStats
from forebay.models.structure import RoutedForward, halves_of, routing_of
from forebay.moe.dispatch import LocalDispatcher
from tests.helpers import no_warnings
from tests.models.conftest import (
    FAMILIES,
    IN_ONE_STAGE,
    MOE_FAMILIES,
    MORE_FAMILIES,
    WITH_BACK,
    build_tiny,
    equal,
    loss_and_gradients,
)

# Of 5 layers: (indices, embedding, head). Two pipeline ranks of one stage each; and of two, which is a V.
CHAIN = ((range(2), True, False), (range(2, 5), False, True))
V = (((0, 4), True, True), ((1, 2, 3), False, False))


def on_meta(family: str, **fields: object) -> Any:
    with torch.device("meta"):
        return build_tiny(family, num_hidden_layers=5, **fields)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", [CHAIN, V], ids=["chain", "v"])
def test_the_parts_are_the_whole(family: str, cut: Any) -> None:
    whole = on_meta(family)
    shapes = {name: tuple(p.shape) for name, p in whole.named_parameters()}
    kinds = [type(m) for m in whole.model.layers]
    found: dict[str, Any] = {}
    blocks, layers = [], []
    for numbers, embedding, head in cut:
        part = on_meta(family)
        keep_part(part, numbers, embedding, head)
        own = {name: tuple(p.shape) for name, p in part.named_parameters()}
        assert not own.keys() & found.keys()
        found |= own
        blocks += [b.path for b in moe_blocks(part)]
        mine = [parts.path for parts in decoder_layers(part)]
        assert mine == [f"model.layers.{n}" for n in numbers]
        layers += mine
        assert ("model.embed_tokens.weight" in own) == embedding == (part.get_input_embeddings() is not None)
        assert ("lm_head.weight" in own) == ("model.norm.weight" in own) == head
        kept = part.model.layers
        assert isinstance(kept, LocalLayers) and tuple(map(int, kept)) == tuple(numbers)
        assert [type(m) for m in kept.everything] == [type(m) for m in all_layers(part)] == kinds
        assert all(kept[str(n)] is kept.everything[n] for n in numbers)
        if not embedding and not head:  # what is left out gets no memory
            part.to_empty(device="cpu")
            part.tie_weights()
            assert not any(t.is_meta for t in [*part.parameters(), *part.buffers()])
            assert all(p.is_meta for n in (0, 4) for p in kept.everything[n].parameters())
        with pytest.raises(ValueError, match="is a part already"):
            keep_part(part, [0], True, True)
    assert found == shapes
    assert sorted(blocks) == sorted(b.path for b in moe_blocks(whole))
    assert sorted(layers) == sorted(parts.path for parts in decoder_layers(whole))
    assert all_layers(whole) == tuple(whole.model.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_cut_in_two(family: str) -> None:
    """Each part has the weights of one sublayer, under their names, and no memory for the others, which still show their
    structure."""
    whole = on_meta(family)
    shapes = {name: tuple(p.shape) for name, p in whole.named_parameters()}
    first, second = (on_meta(family) for _ in range(2))
    keep_part(first, [0, 1], True, False, without_mlp=[1])
    keep_part(second, [1, 2, 3, 4], False, True, without_attention=[1])
    found = [{name: tuple(p.shape) for name, p in part.named_parameters()} for part in (first, second)]
    assert found[0] | found[1] == shapes and not found[0].keys() & found[1].keys()
    for part, number, absent in ((first, 1, "mlp"), (second, 0, "self_attn")):
        parts = list(decoder_layers(part))[number]
        assert (parts.has_attention, parts.has_mlp) == (absent == "mlp", absent == "self_attn")
        paths = [path for path, _ in absent_layers(part)]
        assert f"model.layers.1.{absent}" in paths and "model.layers.1" not in paths
        assert parts.block_path not in [block.path for block in moe_blocks(part)] or absent != "mlp"
        part.to_empty(device="cpu")
        assert not any(t.is_meta for t in [*part.parameters(), *part.buffers()])
        assert all(p.is_meta for p in getattr(parts.module, absent).parameters())
        with forebay.manage(part, {"model.layers.*": "keep", "model.layers.1.*": "recompute"}, loss="fused") as memory:
            assert f"model.layers.1.{absent}" not in memory.sublayers
            assert len(memory.sublayers) == 2 * len(memory.sublayers.layers) - 1


def test_a_layer_with_weights_of_its_own_is_not_cut_in_two() -> None:
    model = on_meta("qwen3_moe")
    model.model.layers[1].scale = nn.Parameter(torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match="a Qwen3MoeDecoderLayer cannot be cut in two"):
        keep_part(model, [0, 1], True, False, without_mlp=[1])
    assert isinstance(model.model.layers, nn.ModuleList)  # left as it was


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_is_managed_and_its_layers_run(family: str, tokens: Tensor) -> None:
    """The layers of two parts, one after the other, give the hidden states of the whole, bit for bit."""
    whole = build_tiny(family, num_hidden_layers=5, attn_implementation="eager")
    hidden: list[Tensor] = []
    given: list[dict[str, Any]] = []
    for layer in whole.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs), with_kwargs=True)
        layer.register_forward_hook(lambda _, args, output: hidden.append(output.detach()))
    with torch.no_grad(), forebay.manage(whole, loss=None):  # hooks are module hooks: the sublayers run inside
        whole.model(tokens, use_cache=False)
    for numbers, embedding, head in CHAIN:
        part: Any = build_tiny(family, num_hidden_layers=5, attn_implementation="eager")
        keep_part(part, numbers, embedding, head)
        with forebay.manage(part, {"*.mlp": "recompute"}, loss="fused") as memory, torch.no_grad():
            paths = [f"model.layers.{n}.{sublayer}" for n in numbers for sublayer in ("self_attn", "mlp")]
            assert list(memory.sublayers) == paths and memory.placements[paths[-1]] == "recompute"
            x = part.model.embed_tokens(tokens) if embedding else hidden[numbers[0] - 1]
            for n in numbers:
                x = part.model.layers[str(n)](x, **given[n])
                assert torch.equal(x, hidden[n]), n


@pytest.mark.parametrize("family", [*MOE_FAMILIES, *MORE_FAMILIES])
def test_every_family_is_managed_in_full(family: str, tokens: Tensor) -> None:
    """Sublayers change no bit. Forebay's experts and loss round differently: 1e-5 of a gradient's largest value, in fp32."""
    model = build_tiny(family)
    expected = loss_and_gradients(model, tokens)
    assert (
        all(g.isfinite().all() for g in expected) and sum(g.count_nonzero() > 0 for g in expected) > len(expected) // 3
    )
    with no_warnings(), forebay.manage(model, "recompute", experts=None, loss=None) as memory:
        assert len(memory.sublayers) == 4
        assert equal(loss_and_gradients(model, tokens), expected)
        assert [site.calls for site in memory.sublayers.values()] == [1] * 4
    with no_warnings(), forebay.manage(model, "keep"):
        assert moe_blocks(model) and all(uses_forebay(block.experts) for block in moe_blocks(model))
        for got, want in zip(loss_and_gradients(model, tokens), expected, strict=True):
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        assert model(input_ids=tokens, labels=tokens).logits is None
        plain = loss_and_gradients(model, tokens)
    dispatcher = LocalDispatcher(moe_blocks(model)[0].experts.num_experts)  # type: ignore[arg-type]
    with no_warnings(), forebay.manage(model, "keep", dispatcher=dispatcher):
        staged = loss_and_gradients(model, tokens)
        for got, want in zip(staged, expected, strict=True):
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    if family in WITH_BACK and family != "ernie4_5_moe":  # the gradient of ERNIE's router is added in another order
        assert equal(staged, plain)
    assert equal(loss_and_gradients(model, tokens), expected)


def test_experts_that_are_not_called_between_two_parts_have_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """No family is refused. What refuses one leaves no layer managed, nor the dense ones before it."""
    monkeypatch.setattr(RoutedForward, "stages", lambda *_: None)
    model: Any = build_tiny("afmoe")
    dispatcher = LocalDispatcher(moe_blocks(model)[0].experts.num_experts)  # type: ignore[arg-type]
    assert [parts.has_stages for parts in decoder_layers(model)] == [True, False]
    dispatcher.size = 2
    keep_local_experts(model, dispatcher)
    with pytest.raises(ValueError, match="does not call its experts once between what comes before and after them"):
        forebay.manage(model, "keep", dispatcher=dispatcher)
    assert not [name for name, module in model.named_modules() if is_managed(module)]


def test_routers_that_return_other_things(tokens: Tensor) -> None:
    """Granite returns its logits last, Jamba's router returns them alone."""
    model = build_tiny("granitemoe")
    stats = RouterStats(model)
    with forebay.manage(model, "keep"), stats.recording():
        model(tokens)
    assert [tuple(r.logits.shape) for r in stats.records] == [(32, 8)] * 2
    for record in stats.records:
        assert torch.equal(record.logits.topk(2).indices.sort().values, record.ids.sort().values)
    jamba = build_tiny("jamba")
    alone = moe_blocks(jamba)[0].routing.outputs == ("logits",)  # until transformers 5.23
    refusal = pytest.raises(ValueError, match=r"feed_forward' \(Linear\) does not return logits and ids")
    with refusal if alone else nullcontext():
        RouterStats(jamba)


@pytest.mark.parametrize("embedding", [True, False])
def test_a_weight_of_embedding_and_head_stays_on_one_rank(embedding: bool) -> None:
    part = on_meta("qwen3_moe", tie_word_embeddings=True)
    with pytest.raises(
        ValueError, match=r"one weight for embedding and head \(tie_word_embeddings\).*tie_word_embeddings = false"
    ):
        keep_part(part, [0], embedding, not embedding)
    assert isinstance(part.model.layers, nn.ModuleList)  # left as it was
    keep_part(part, [0], embedding, embedding)
    part.to_empty(device="cpu")
    part.tie_weights()
    names = {name for name, _ in part.named_parameters(remove_duplicate=False)}
    assert (
        {"lm_head.weight", "model.embed_tokens.weight"} <= names
        if embedding
        else not any("lm_head" in n for n in names)
    )
    if embedding:
        assert part.lm_head.weight is part.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([], "at least one of the 5 decoder layers"),
        ([4, 5], r"layers \[4, 5\] must be distinct and between 0 and 4"),
        ([-1], "must be distinct and between 0 and 4"),
        ([1, 1], "must be distinct and between 0 and 4"),
    ],
)
def test_numbers_that_are_no_layers(numbers: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        keep_part(on_meta("qwen3_moe"), numbers, True, True)


def _forward(source: str, folder: Path) -> Any:
    """A forward with this source, which `inspect` finds in a file."""
    path = folder / "layer.py"
    path.write_text(source)
    module: dict[str, Any] = {}
    exec(compile(source, str(path), "exec"), module)
    return module["forward"]


RESIDUAL = """
def forward(self, x, mask=None, tokens=7, **kwargs):
    dtype = x.dtype
    {before}
    x = x + self.attend(self.norm(x), mask, **kwargs)
    {between}
    return {after}
"""


@pytest.mark.parametrize(
    ("before", "between", "after", "found"),
    [
        ("", "", "x + self.feed(x)", ((), {}, False)),
        ("", "", "x + self.feed(x).to(dtype)", ((), {}, True)),
        ("", "", "x + self.feed(x, tokens=tokens)", ((), {"tokens": 7}, False)),
        ("chosen = self.choose(x)", "", "x + self.feed(x), chosen", (("chosen",), {}, False)),
        ("chosen = self.choose(x)", "", "x + self.feed(x, chosen), chosen", None),  # two tensors pass
        ("", "", "x + self.feed(x), self.choose(x)", None),  # made in the second half
        ("", "x += self.feed(x)", "x", None),  # it would write to what a rerun reads
        ("", "x[0] = self.feed(x)", "x", None),
        ("", "if mask is None: x += self.feed(x)", "x", None),
        ("", "residual = x; residual += self.feed(x)", "residual", None),
        ("", "x.add_(self.feed(x))", "x", None),
        ("", "residual = x; x = self.feed(x); x += 1", "residual + x", ((), {}, False)),  # of its own
        ("x = x.float()\n    dtype = x.dtype", "", "x + self.feed(x).to(dtype)", None),  # not the dtype that was given
        ("", "", "x + self.feed(x, **kwargs)", None),
    ],
)
def test_where_a_layer_is_cut(before: str, between: str, after: str, found: Any, tmp_path: Path) -> None:
    halves = halves_of(_forward(RESIDUAL.format(before=before, between=between, after=after), tmp_path))
    if found is None:
        assert halves is None
    else:
        assert (halves.passed, halves.given, halves.keeps_dtype) == found
        assert set(halves.first) >= {"attend", "norm"} and "feed" in halves.second
        assert halves.arguments_of({"tokens": 3, "mask": 1}) == ({"tokens": 3} if halves.given else {})


ROUTED = """
def forward(self, x, scale=2):
    shape = x.shape
    {before}
    logits, weights, ids = self.gate(x)
    {experts}
    return {after}
"""
CALL = "y = self.experts(x, ids, weights)"


@pytest.mark.parametrize(
    ("before", "experts", "after", "is_cut"),
    [
        ("", CALL, "y", True),
        ("", CALL, "(self.shared(y) * scale).view(shape), weights", True),
        ("", f"{CALL} * self.shared(x)", "y + x", True),
        ("", "", "self.shared(self.experts(x, ids, weights))", True),
        ("if self.has: z = self.shared(x)", CALL, "y + z if self.has else y", True),  # z may be absent
        ("x = x + 1", f"if self.has:\n        {CALL}\n    else:\n        y = x", "y + x", True),
        ("", "y = self.experts(x, ids, weights) if self.has else x", "y", False),
        ("", "y = sum(self.experts(x, ids, weights) for _ in range(2))", "y", False),
        ("", f"for _ in range(2): {CALL}", "y", False),
        ("if not self.has: return x", CALL, "y", False),
        ("", f"if self.has:\n        {CALL}\n    else:\n        return x", "y", False),
        ("z = sum(e for e in x)", CALL, "y + z + sum(e for e in x)", True),  # each e is its comprehension's
        ("z = (v := x) if self.has else x", CALL, "y + (v if self.has else z)", True),
        ("import math", CALL, "y + math.pi", False),
        ("", f"{CALL} + x.add_(1)", "y", False),  # of which the experts' arguments are evaluated first
        ("", f"{CALL}.mul_(2)", "y", False),  # a rerun would read it again
        ("z = x * 2", f"{CALL}\n    z += y", "z", False),
    ],
)
@pytest.mark.parametrize("has", [True, False])
def test_where_a_block_is_cut(before: str, experts: str, after: str, is_cut: bool, has: bool, tmp_path: Path) -> None:
    forward = _forward(ROUTED.format(before=before, experts=experts, after=after), tmp_path)
    block = SimpleNamespace(
        gate=lambda x: (x, x * 2, x * 3), experts=lambda x, ids, weights: x * ids - weights, shared=torch.sin, has=has
    )
    x = torch.randn(3)
    routing = routing_of(forward, ["gate"])
    assert routing is not None
    stages = routing.stages(direct=False)
    assert (stages is not None) == is_cut
    if stages is None:
        return
    opening, closing = stages
    if "else" in experts and not has:  # a block without experts has no stages
        with pytest.raises(RuntimeError, match="a block without experts has no stages"):
            opening(block, x)
        return
    live, (rows, ids, weights, logits) = opening(block, x)
    assert torch.equal(logits, x) or "x + 1" in before
    wanted, found = forward(block, x), closing(block, live, block.experts(rows, ids, weights))
    assert all(map(torch.equal, *((v if isinstance(v, tuple) else (v,)) for v in (wanted, found))))


def test_a_value_between_halves_may_have_any_name(tmp_path: Path) -> None:
    source = (
        "def forward(self, x):\n    h = x + self.attend(x)\n    y = self.feed(self.norm(h))\n    return h + y * 2\n"
    )
    halves = halves_of(_forward(source, tmp_path))
    stages = halves.stages("feed") if halves is not None else None
    assert halves is not None and stages is not None
    layer, h = SimpleNamespace(feed=torch.sin, norm=torch.cos), torch.randn(3)
    live, y = stages[0](layer, h, lambda block, x: block(x))
    assert torch.equal(stages[1](layer, live, y), halves.feed_forward()(layer, h))


def test_halves_in_another_dtype_are_refused(tokens: Tensor) -> None:
    """The second half would go on in the dtype that the first one made."""
    model: Any = build_tiny("hy_v4", num_hidden_layers=1, mlp_layer_types=["sparse"], indexer_types=["full"])
    layer = model.model.layers[0]
    layer.attn_hc.register_forward_hook(lambda *_: None)
    x = torch.randn(1, 4, model.config.hc_mult, model.config.hidden_size)
    with forebay.manage(model, "keep") as memory:
        (forward,) = memory.sublayers.layers
        forward.attention.call = lambda x, **_: (x.double(), None)
        with pytest.raises(
            RuntimeError, match=r"self_attn' made torch.float64 of hidden states in torch.float32.*one dtype"
        ):
            forward.attend(x)


@pytest.mark.parametrize("family", IN_ONE_STAGE)
def test_layers_that_hand_on_more_are_not_taken_apart(family: str) -> None:
    model = on_meta(family, **{k: v * 2 + v[:1] for k, v in MORE_FAMILIES[family][1].items() if k.endswith("_types")})
    with pytest.raises(ValueError, match=r"return .*(topk_indices|several residual streams).*send one stream"):
        keep_part(model, [0, 1], True, False)
    assert isinstance(model.model.layers, nn.ModuleList)  # left as it was


def test_layers_of_an_encoder_are_none_of_a_decoder() -> None:
    """Their attention has an argument for a cache as well."""
    sizes = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    config = transformers.WhisperConfig(**sizes, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=32, pad_token_id=0)
    with torch.device("meta"):
        model = transformers.WhisperForConditionalGeneration(config)
    assert list(decoder_layers(model.model.encoder)) == []


def test_models_that_cannot_be_cut_at_all_are_refused_elsewhere() -> None:
    """Gemma 4 has two norms beside its layers."""
    config = transformers.Gemma4TextConfig(
        hidden_size=32, num_hidden_layers=2, intermediate_size=32, vocab_size=32, head_dim=16, num_attention_heads=2,
        vocab_size_per_layer_input=32, hidden_size_per_layer_input=8,
    )  # fmt: skip
    with torch.device("meta"):
        assert why_whole(transformers.Gemma4ForCausalLM(config)) == ""
        assert why_whole(build_tiny("mixtral")) == ""
