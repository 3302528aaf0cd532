"""What a policy does to experts: they recompute their first product inside an offloaded sublayer, or stash their rows."""

import pytest

import forebay
from forebay.memory.overrides import setting
from forebay.models.families import keep_part, moe_blocks
from forebay.moe.dispatch import LocalDispatcher
from forebay.policy import PolicyError
from tests.models.conftest import build_tiny, equal, loss_and_gradients

BOTH = {"*.self_attn": "offload", "*.mlp": "offload"}


def settings(model, name):
    return [setting(block.experts, name) for block in moe_blocks(model)]


def test_the_first_product_of_chosen_layers_does_not_travel(tokens) -> None:
    model = build_tiny("qwen3_moe")
    chosen = {**BOTH, "model.layers.1.mlp.experts": "recompute"}
    experts = model.get_submodule("model.layers.1.mlp.experts")
    moved, results, profiles = [], [], []
    for policy in (BOTH, chosen):
        with forebay.manage(model, policy, dispatcher=LocalDispatcher(64), offload="all") as mem:
            for _ in range(2):  # the first one measures
                got = loss_and_gradients(model, tokens)
            results.append(got)
            report = mem.report()
            moved.append(report.moved_bytes)
            again = [path for path, placement in mem.placements.items() if placement == "recompute"]
            assert again == ([] if policy is BOTH else ["model.layers.1.mlp.experts"])
            assert report.recomputed == len(again)
            assert mem.placements["model.layers.1.mlp"] == "offload"
            profiles.append(mem.profile(lambda: model(tokens, labels=tokens).loss).activation_bytes)
            switched = setting(experts, "forebay_save_h") is False
            assert switched == bool(again), "what a profile switches it switches back"
    mem.profile(lambda: model(tokens, labels=tokens).loss)  # also of a model that is detached
    assert equal(*results)
    assert profiles[0] == profiles[1], "placements are off in a profile"
    width = experts.gate_up_proj.shape[1]
    slots = tokens.numel() * model.config.num_experts_per_tok
    assert moved[0] - moved[1] == slots * width * experts.gate_up_proj.element_size()
    assert not any(saved is False for saved in settings(model, "forebay_save_h"))


def test_only_light_recomputation_may_be_nested() -> None:
    model = build_tiny("qwen3_moe")
    with pytest.raises(PolicyError, match=r"cannot be nested.*if they are Forebay's, recompute is 'light'"):
        forebay.manage(model, {**BOTH, "*.mlp.experts": "recompute"}, dispatcher=LocalDispatcher(64), recompute="full")
    assert not any(saved is False for saved in settings(model, "forebay_save_h"))


@pytest.mark.parametrize(
    "policy", ["stash", {"*.mlp.experts": "stash"}, {"model.layers.1.mlp": "stash", "*.self_attn": "offload"}]
)
def test_experts_get_their_pages_and_lose_them(policy, tokens) -> None:
    model = build_tiny("qwen3_moe")
    with forebay.manage(model, dispatcher=LocalDispatcher(64)):
        expected = loss_and_gradients(model, tokens)
    with forebay.manage(model, policy, dispatcher=LocalDispatcher(64)) as mem:
        stashed = [path for path, placement in mem.placements.items() if placement == "stash"]
        assert stashed == [f"{block.path}.experts" for block in moe_blocks(model)] != []
        assert equal(loss_and_gradients(model, tokens), expected)
        assert mem.pages is not None
        assert mem.pages.live_tickets == 0
        assert mem.pages.end_step().bytes_out > 0
        assert mem.report().saved_bytes_by_placement["stash"] > 0
    assert not any(settings(model, "forebay_pages"))


@pytest.mark.parametrize(
    ("family", "policy", "options", "says"),
    [
        ("olmoe", {"*.mlp.experts": "stash"}, {}, ["'*.mlp.experts'", "without expert parallelism", "'offload'"]),
        ("olmoe", "stash", {}, ["without expert parallelism"]),
        (
            "olmoe",
            {"*.self_attn": "stash"},
            {"dispatcher": LocalDispatcher(64)},
            ["no paged region", "such as model.layers.0.mlp.experts"],
        ),
        ("olmoe", {"lm_head": "stash"}, {"dispatcher": LocalDispatcher(64)}, ["'lm_head'", "no paged region"]),
        ("llama", {"*.mlp": "stash"}, {}, ["this model has none"]),
        ("qwen3_moe", "keep", {"pages": "1GiB"}, ["'stash' on, and there is none"]),
    ],
)
def test_what_cannot_be_stashed(family, policy, options, says) -> None:
    model = build_tiny(family)
    with pytest.raises(PolicyError) as error:
        forebay.manage(model, policy, **options)
    for part in says:
        assert part in str(error.value)
    assert not any(settings(model, "forebay_pages"))


def test_a_part_without_moe_layers_has_nothing_to_stash() -> None:
    """One of a pipeline's ranks may have dense layers alone: what the others carry out is no error there."""
    model = build_tiny("qwen3_moe")
    keep_part(model, [0], embedding=True, head=True)
    with forebay.manage(model, "stash", dispatcher=LocalDispatcher(64)) as mem:
        assert set(mem.placements.values()) == {"keep"}
        assert mem.pages is None
