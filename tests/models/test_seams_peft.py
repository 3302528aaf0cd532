"""PEFT before and after `forebay.manage`: adapters are used and trained as without Forebay."""

import copy
import warnings

import pytest
import torch

import forebay

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.integration

TARGETS = {
    "experts": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "router": {"target_modules": [], "target_parameters": ["mlp.gate.weight"]},
    "attention": {"target_modules": ["q_proj", "o_proj"]},
    "shared experts": {"target_modules": ["shared_experts.down_proj", "q_a_proj"]},
}
SMALL = {"num_experts": 8, "num_attention_heads": 2}


@pytest.fixture
def model(tiny):
    return tiny("qwen3_moe", **SMALL)


def _adapted(model, **targets):
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **targets))


def _step(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _close(got, want):
    assert got[1].keys() == want[1].keys() and len(want[1]) > 0
    torch.testing.assert_close(got[0], want[0])
    for name, gradient in want[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def _equal(got, want):
    return torch.equal(got[0], want[0]) and all(torch.equal(got[1][n], g) for n, g in want[1].items())


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("name", TARGETS)
def test_either_order(name, policy, model, tiny, tokens):
    if name == "shared experts":
        model = tiny("deepseek_v3", n_routed_experts=8)
    want = _step(_adapted(copy.deepcopy(model), **TARGETS[name]), tokens)
    later, before = copy.deepcopy(model), _adapted(model, **TARGETS[name])
    with forebay.manage(later, policy), forebay.manage(before, policy) as mem, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(mem.placements.values()) == {policy}
        later = _adapted(later, **TARGETS[name])
        results = [_step(m, tokens) for m in (later, later, before)]
        _close(results[0], want)
        assert all(_equal(other, results[0]) for other in results[1:])
        assert mem.report().saved_bytes_by_placement
        if policy == "offload":
            assert mem.report().moved_bytes > 0
    assert _equal(_step(later, tokens), want) and _equal(_step(before, tokens), want)


def test_own_experts_and_loss_are_bitwise_pefts(model, tokens):
    want = _step(_adapted(copy.deepcopy(model), **TARGETS["experts"]), tokens)
    with forebay.manage(model, "offload", experts=None, loss=None):
        assert _equal(_step(_adapted(model, **TARGETS["experts"]), tokens), want)


def test_experts_that_are_recomputed_alone(model, tokens):
    """Where a recomputation would leave the adapters out, it says so; where it need not, it is right."""
    policy = {"*.mlp.experts": "recompute"}
    want = _step(_adapted(copy.deepcopy(model), **TARGETS["experts"]), tokens)
    first = _adapted(copy.deepcopy(model), **TARGETS["experts"])
    with forebay.manage(first, policy, recompute="full"):
        _close(_step(first, tokens), want)
    with forebay.manage(model, policy):
        _close(_step(_adapted(model, **TARGETS["experts"]), tokens), want)


def test_a_full_recomputation_without_the_adapters_is_refused(model, tokens):
    forebay.manage(model, {"*.mlp.experts": "recompute"}, recompute="full")
    with pytest.raises(RuntimeError, match=r"parametrised.*get_peft_model"):
        _step(_adapted(model, **TARGETS["experts"]), tokens)


def test_adapters_on_the_head(model, tokens):
    head = {"target_modules": ["lm_head"]}
    want = _step(_adapted(copy.deepcopy(model), **head), tokens)
    before = _adapted(copy.deepcopy(model), **head)
    with pytest.warns(UserWarning, match=r"lm_head is a Linear.*logits"), forebay.manage(before):
        _close(_step(before, tokens), want)
    with forebay.manage(model):
        adapted = _adapted(model, **head)
        with pytest.warns(UserWarning, match="lm_head has become a Linear"):
            _close(_step(adapted, tokens), want)


def test_patterns_may_have_the_wrappers_prefix(model):
    adapted = _adapted(model, **TARGETS["attention"])
    prefix = "base_model.model."
    with forebay.manage(adapted, {f"{prefix}model.layers.0.self_attn": "offload"}) as mem:
        assert mem.placements["model.layers.0.self_attn"] == "offload"


@pytest.mark.parametrize("recompute", ["light", "full"])
def test_two_forwards_before_a_backward(recompute, model, tokens):
    """PEFT writes to the weights in each forward; their values stay."""

    def both(adapted):
        adapted.zero_grad()
        losses = [adapted(input_ids=t, labels=t).loss for t in (tokens, tokens.flip(1))]
        (losses[0] + losses[1]).backward()
        grads = {n: p.grad.clone() for n, p in adapted.named_parameters() if p.grad is not None}
        return losses[0].detach() + losses[1].detach(), grads

    want = both(_adapted(copy.deepcopy(model), **TARGETS["experts"]))
    with forebay.manage(model, "recompute", recompute=recompute):
        adapted = _adapted(model, **TARGETS["experts"])
        for _ in range(2):
            _close(both(adapted), want)


def test_adapters_on_parameters_do_not_compile(model, tokens):
    forebay.manage(model, compile=True)
    with pytest.raises(RuntimeError, match=r"target_parameters.*without compile"):
        _step(_adapted(model, **TARGETS["experts"]), tokens)
