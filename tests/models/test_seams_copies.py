"""Copies and pickles of a managed model: unmanaged, independent, with the model's own results; the original is not touched."""

import copy
import gc
import io
import weakref
from types import MethodType

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import forebay
from forebay.memory.regions import setting
from forebay.moe.dispatch import LocalDispatcher

PLACEMENTS = ("keep", "offload", "recompute", {"*.0.self_attn": "offload", "*.1.mlp": "recompute", "model": "keep"})


SMALL = {
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_attention_heads": 2,
    "mlp_only_layers": [],
}


@pytest.fixture
def model(tiny):
    return tiny("qwen3_moe", **SMALL)


def _equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def _saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    assert b"forebay." not in file.getvalue(), "a pickle that needs Forebay to be read"
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _saved_and_loaded, lambda m: AveragedModel(m).module])
@pytest.mark.parametrize("policy", PLACEMENTS, ids=str)
def test_a_copy_after_a_step(policy, copied, model, tokens, losses_and_gradients):
    config = model.config.to_dict()
    own = losses_and_gradients(model, tokens)
    with forebay.manage(model, policy) as mem:
        managed = losses_and_gradients(model, tokens)
        graph = model(tokens, labels=tokens).loss  # tickets are out while it is copied
        twin = copied(model)
        graph.backward()
        assert twin.config.to_dict() == config and model.config.to_dict() == config
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-3)
        assert not _equal(losses_and_gradients(model, tokens), managed)
        gradients = [p.grad for p in model.parameters()]
        assert _equal(losses_and_gradients(twin, tokens), own)
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)), (
            "the original's were touched"
        )
        with forebay.manage(twin, policy):
            assert _equal(losses_and_gradients(twin, tokens), managed)
        assert _equal(losses_and_gradients(twin, tokens), own)
        mem.detach()
    assert not any({"forward", "_forebay"} & set(vars(m)) for m in model.modules())


def test_a_copy_does_not_keep_the_original_alive(tiny, tokens, losses_and_gradients):
    model = tiny("qwen3_moe", **SMALL)
    mem = forebay.manage(model, "offload", budget="1GiB")
    losses_and_gradients(model, tokens)
    twin = copy.deepcopy(model)
    gone = weakref.ref(model), weakref.ref(model.model.layers[0]), weakref.ref(mem)
    del model, mem
    gc.collect()
    assert not any(ref() is not None for ref in gone)
    losses_and_gradients(twin, tokens)


def test_pages_and_weight_gradient_stores_stay_with_the_original(tiny, tokens, losses_and_gradients):
    model = tiny("qwen3_moe")
    with forebay.manage(model, "stash", dispatcher=LocalDispatcher(64)):
        losses_and_gradients(model, tokens)
        twin = _saved_and_loaded(copy.deepcopy(model))
        assert all(setting(block.mlp.experts, "forebay_pages") is not None for block in model.model.layers[1:])
        assert all(setting(block.mlp.experts, "forebay_pages") is None for block in twin.model.layers[1:])


def test_a_forward_that_was_there_before_is_copied_too():
    class Twice(nn.Linear):
        pass

    def twice(self, x):
        return 2 * nn.Linear.forward(self, x)

    model = nn.Sequential(Twice(4, 4), nn.Linear(4, 4))
    model[0].forward = MethodType(twice, model[0])
    x = torch.randn(3, 4)
    expected = model(x)
    with forebay.manage(model, "recompute"):
        assert torch.equal(model(x), expected)
        twin = copy.deepcopy(model)
    assert model[0].forward.__func__ is twice and torch.equal(model(x), expected)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(twin(x), expected)
