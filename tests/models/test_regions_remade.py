"""Experts that make their first product again inside an offloaded half: not a bit changes, h neither stays nor travels, and
nothing stays behind."""

import pytest
import torch

import forebay
from forebay.memory.regions import setting
from forebay.moe.dispatch import LocalDispatcher
from forebay.policy import PolicyError

BOTH = {"*.self_attn": "offload", "*.mlp": "offload"}


def experts_of(model):
    return [m for path, m in model.named_modules() if path.endswith(".experts")]


def test_h_of_chosen_layers_does_not_travel(tiny, tokens, losses_and_gradients) -> None:
    model = tiny("qwen3_moe")
    dispatcher = LocalDispatcher(64)
    chosen = {**BOTH, "model.layers.1.mlp.experts": "recompute"}
    experts = model.get_submodule("model.layers.1.mlp.experts")
    moved, results, profiles = [], [], []
    for policy in (BOTH, chosen):
        with forebay.manage(model, policy, dispatcher=dispatcher, offload="all", compile=False) as mem:
            for _ in range(2):  # the first one measures
                got = losses_and_gradients(model, tokens)
            results.append(got)
            report = mem.report()
            moved.append(report.moved_bytes)
            again = [path for path, placement in mem.placements.items() if placement == "recompute"]
            assert again == ([] if policy is BOTH else ["model.layers.1.mlp.experts"])
            assert report.recomputed == len(again)
            assert mem.placements["model.layers.1.mlp"] == "offload"
            profiles.append(mem.profile(lambda: model(tokens, labels=tokens).loss).activation_bytes)
            assert (setting(experts, "forebay_save_h") is False) == bool(again), (
                "what a profile switches it switches back"
            )
    mem.profile(lambda: model(tokens, labels=tokens).loss)  # of a model that is let go of too
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert profiles[0] == profiles[1], "placements are off in a profile"
    width = experts.gate_up_proj.shape[1]
    slots = tokens.numel() * model.config.num_experts_per_tok
    assert moved[0] - moved[1] == slots * width * experts.gate_up_proj.element_size()
    assert not any(setting(m, "forebay_save_h") is False for m in experts_of(model))


def test_only_in_the_light_way(tiny) -> None:
    model = tiny("qwen3_moe")
    policy = {**BOTH, "*.mlp.experts": "recompute"}
    with pytest.raises(PolicyError, match=r"cannot be nested.*if they are Forebay's, recompute is 'light'"):
        forebay.manage(model, policy, dispatcher=LocalDispatcher(64), recompute="full")
    assert not any(setting(m, "forebay_save_h") is False for m in experts_of(model))
