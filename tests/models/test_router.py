"""Router outputs: recorded once, the loss of transformers, DeepSeek-V3's bias, and tokens that are not routed."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from forebay.models.blocks import install_sublayers
from forebay.models.hf_experts import register
from forebay.models.router import RouterOutput, RouterStats, balance_loss
from tests.models.conftest import build_tiny


@pytest.fixture
def model():
    return build_tiny("qwen3_moe", mlp_only_layers=[])


def test_records_what_transformers_collect(model, tokens):
    stats = RouterStats(model)
    with stats.recording():
        out = model(tokens, output_router_logits=True)
    assert [r.path for r in stats.records] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    for record, logits in zip(stats.records, out.router_logits, strict=True):
        assert torch.equal(record.logits, logits) and record.logits.requires_grad
        assert torch.equal(record.ids, logits.softmax(-1).topk(4).indices)
    model(tokens)
    assert len(stats.records) == 2, "recorded outside of recording()"
    with stats.recording():
        pass
    assert stats.records == []
    hooks = [len(m._forward_hooks) for m in model.modules()]
    with pytest.raises(RuntimeError, match="on purpose"), stats.recording():
        assert [len(m._forward_hooks) for m in model.modules()] != hooks
        raise RuntimeError("on purpose")
    assert [len(m._forward_hooks) for m in model.modules()] == hooks, "hooks are gone after an exception"


@pytest.mark.parametrize("how", ["sublayers", "checkpointed sublayers", "gradient checkpointing"])
def test_a_recomputation_is_not_recorded(how, model, tokens):
    stats = RouterStats(model)
    with stats.recording():
        model(tokens)
    expected, load = stats.records, stats.load()
    stats.reset_counts()
    if how == "gradient checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        sublayers = install_sublayers(model)
    runs = []
    if how == "checkpointed sublayers":
        for site in sublayers.values():
            site.wrap(lambda fn: partial(checkpoint, fn, use_reentrant=False))
    model.model.layers[0].mlp.gate.register_forward_pre_hook(lambda *_: runs.append(1))
    with stats.recording():
        loss = model(tokens, labels=tokens).loss + stats.load_balancing_loss()
        loss.backward()
    assert len(stats.records) == len(expected) == 2
    for record, wanted in zip(stats.records, expected, strict=True):
        assert record.path == wanted.path
        assert torch.equal(record.logits, wanted.logits) and torch.equal(record.ids, wanted.ids)
    assert torch.equal(stats.load(), load)
    assert len(runs) == (1 if how == "sublayers" else 2)


def test_compiled_sublayers_are_recorded(tokens, no_codegen):
    model = build_tiny("deepseek_v3", first_k_dense_replace=0)
    model.set_experts_implementation("eager")
    stats = RouterStats(model)
    with stats.recording():
        model(tokens)
    expected, load = stats.records, stats.load()
    model.set_experts_implementation(register())
    install_sublayers(model, compile=True)
    stats.reset_counts()
    with stats.recording():
        model(tokens, labels=tokens).loss.backward()
    assert [r.path for r in stats.records] == [r.path for r in expected]
    for record, wanted in zip(stats.records, expected, strict=True):
        assert torch.allclose(record.logits, wanted.logits, atol=1e-5) and record.logits.requires_grad
        assert torch.equal(record.ids.sort().values, wanted.ids.sort().values)
    assert torch.equal(stats.load(), load)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_loss_and_gradient_are_those_of_transformers(family, tokens):
    model = build_tiny(family)
    stats = RouterStats(model)

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    out = model(tokens, output_router_logits=True)
    expected = load_balancing_loss_func(out.router_logits, model.num_experts, model.num_experts_per_tok)
    wanted = gradients(expected)
    with stats.recording():
        model(tokens)
    # Not to the bit: transformers sums choice by choice.
    loss = stats.load_balancing_loss()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    got = gradients(loss)
    assert len(got) == len(wanted) > 0
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-8)


def test_loss_of_several_forwards_is_that_of_all_their_tokens(model, tokens):
    stats = RouterStats(model)
    with pytest.raises(ValueError, match="recording"):
        stats.load_balancing_loss()
    with stats.recording():
        model(tokens)
    together = stats.load_balancing_loss()
    with stats.recording():
        model(tokens[:1])
        model(tokens[1:])
    assert len(stats.records) == 4
    assert torch.allclose(stats.load_balancing_loss(), together)
    stats.clear()
    with pytest.raises(ValueError, match="recording"):
        stats.load_balancing_loss()


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_bias_follows_the_counts_of_all_microbatches(family, tokens):
    model = build_tiny(family)
    stats = RouterStats(model)
    assert stats.has_bias
    router = model.model.layers[1].mlp.gate
    router.e_score_correction_bias.uniform_(-0.1, 0.1)
    before = router.e_score_correction_bias.clone()
    counts = torch.zeros(64)
    for batch in (tokens[:1], tokens[1:]):
        with stats.recording():
            model(batch, labels=batch).loss.backward()
        counts += torch.bincount(stats.records[0].ids.reshape(-1), minlength=64)
    assert torch.equal(stats.load(), counts[None].long())
    others = counts.roll(1).long()  # stand for another process's
    stats.sum_counts(lambda load: load + others)
    counts += others
    assert torch.equal(stats.load(), counts[None].long())
    stats.update_bias(0.01)
    expected = before + 0.01 * torch.sign(counts.mean() - counts)
    assert torch.equal(router.e_score_correction_bias, expected)
    assert not torch.equal(expected, before)
    assert not stats.load().any(), "counts go on from zero after an update"
    stats.update_bias(0.01)  # nothing counted: nothing to balance
    assert torch.equal(router.e_score_correction_bias, expected)


def test_models_that_cannot_be_balanced_are_named(model):
    with pytest.raises(ValueError, match="Linear"):
        RouterStats(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        RouterStats(build_tiny("qwen3"))
    assert not RouterStats(model).has_bias
    with pytest.raises(ValueError, match=r"Qwen3MoeSparseMoeBlock.*load_balancing_loss"):
        RouterStats(model).update_bias(0.001)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.*bfloat16"):  # such a bias would not move
        RouterStats(build_tiny("deepseek_v3").to(torch.bfloat16)).update_bias(0.001)


def routed(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    logits = torch.randn(7, 4, requires_grad=True)
    return logits, logits.detach().topk(2).indices


def test_padding_does_not_count_in_the_balance() -> None:
    logits, ids = routed()
    keep = torch.tensor([True, False, True, True, False, True, True])
    padded = torch.where(keep[:, None], ids, -1)
    loss = balance_loss([(logits, padded)])
    (found,) = torch.autograd.grad(loss, logits)
    expected = balance_loss([(logits[keep], ids[keep])])
    torch.testing.assert_close(loss, expected)
    (wanted,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, wanted)
    assert not found[~keep].any()


def test_a_single_choice_of_none() -> None:
    logits, ids = routed()
    one = ids.clone()
    one[3, 1] = -1
    chosen = torch.zeros(4).index_add(0, one[one >= 0], torch.ones(13)) / 7
    expected = 4 * (chosen * logits.softmax(-1).mean(0)).sum()
    torch.testing.assert_close(balance_loss([(logits, one)]), expected)


@pytest.mark.parametrize("together", [1, 3, 11])
def test_layers_that_are_computed_together_count_alike(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """Of several lengths, the longest with 7 tokens. Within 1e-5 of fp64: sums of 60 tokens in fp32."""
    monkeypatch.setattr("forebay.models.router._JOINED_BYTES", together * 4 * 7 * 4)
    parts = [routed(seed) for seed in range(11)]
    parts = [(logits.detach()[: 4 + n % 4].requires_grad_(), ids[: 4 + n % 4]) for n, (logits, ids) in enumerate(parts)]
    parts[3][1][2] = -1
    exact = [logits.detach().double().requires_grad_() for logits, _ in parts]
    shares, ids = torch.cat(exact).softmax(-1), torch.cat([ids for _, ids in parts])
    live = ids[:, 0] >= 0
    chosen = torch.bincount(ids[live].reshape(-1), minlength=4) / live.sum()
    expected = 4 * (chosen * shares[live].mean(0)).sum()
    loss = balance_loss(parts)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    found = torch.autograd.grad(loss, [logits for logits, _ in parts])
    for got, want in zip(found, torch.autograd.grad(expected, exact), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-8)


def test_no_tokens_balance() -> None:
    logits, ids = routed()
    for output in ((logits[:0], ids[:0]), (logits, torch.full_like(ids, -1))):
        loss = balance_loss([output])
        assert loss == 0.0
        (grad,) = torch.autograd.grad(loss, logits)
        assert not grad.any()
    both = balance_loss([(logits[:0], ids[:0]), (logits, ids)])
    assert torch.equal(both, balance_loss([(logits, ids)]))
    with pytest.raises(ValueError, match="of no router"):
        balance_loss([])
    with pytest.raises(ValueError, match="a router has 3 experts, the first one 4"):
        balance_loss([(logits, ids), (logits[:, :3], ids)])
    with pytest.raises(ValueError, match="choices a token"):
        balance_loss([(logits, ids), (logits, ids[:, :1])])


def test_counts_leave_out_what_is_not_routed(model, tokens) -> None:
    stats = RouterStats(model)
    router = model.model.layers[0].mlp.gate
    handle = router.register_forward_hook(lambda m, i, o: (*o[:2], torch.where(o[2] < 32, -1, o[2])))
    with stats.counting():
        model(tokens)
    handle.remove()
    load = stats.load()
    assert not load[0, :32].any() and 0 < load[0].sum() < load[1].sum() == 4 * tokens.numel()


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    model = build_tiny("deepseek_v3").cuda()
    stats = RouterStats(model)
    block = stats._blocks[0]
    logits = torch.randn(32, 64, device="cuda", requires_grad=True)
    ids = logits.topk(4).indices
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats._record(block, block.router, None, (logits, None, ids))
        stats.load_balancing_loss().backward()
        stats.load()
        stats.update_bias(0.001)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(stats.records[0], RouterOutput)
