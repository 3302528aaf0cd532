"""Placement "stash": what it may be asked for, what it says where it may not, and that nothing stays behind."""

import pytest
import torch

import forebay
from forebay.memory.regions import setting
from forebay.models.families import keep_part
from forebay.moe.dispatch import LocalDispatcher
from forebay.policy import PolicyError


def experts_of(model):
    return [m for path, m in model.named_modules() if path.endswith(".experts")]


@pytest.mark.parametrize(
    "policy", ["stash", {"*.mlp.experts": "stash"}, {"model.layers.1.mlp": "stash", "*.self_attn": "offload"}]
)
def test_experts_are_told_their_pages_and_forget_them(policy, tiny, tokens, losses_and_gradients) -> None:
    model = tiny("qwen3_moe")
    blocks = len(experts_of(model))
    with forebay.manage(model, dispatcher=LocalDispatcher(64)):
        expected = losses_and_gradients(model, tokens)
    with forebay.manage(model, policy, dispatcher=LocalDispatcher(64)) as mem:
        stashed = [path for path, placement in mem.placements.items() if placement == "stash"]
        assert len(stashed) == blocks > 0
        assert all(path.endswith(".mlp.experts") for path in stashed)
        got = losses_and_gradients(model, tokens)
        assert mem.pages is not None
        assert mem.pages.live_tickets == 0
        assert mem.pages.end_step().pages_out > 0
        assert mem.report().saved_bytes_by_placement["stash"] > 0
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not any(setting(m, "forebay_pages") for m in experts_of(model))


@pytest.mark.parametrize(
    ("policy", "dispatcher", "said"),
    [
        ({"*.mlp.experts": "stash"}, None, ["'*.mlp.experts'", "without expert parallelism", "'offload'"]),
        ("stash", None, ["without expert parallelism"]),
        ({"*.self_attn": "stash"}, LocalDispatcher(64), ["no paged region", "such as model.layers.0.mlp.experts"]),
        ({"lm_head": "stash"}, LocalDispatcher(64), ["'lm_head'", "no paged region"]),
    ],
)
def test_what_cannot_be_stashed(policy, dispatcher, said, tiny) -> None:
    model = tiny("olmoe")
    with pytest.raises(PolicyError) as error:
        forebay.manage(model, policy, dispatcher=dispatcher)
    for part in said:
        assert part in str(error.value)
    assert not any(setting(m, "forebay_pages") for m in experts_of(model))


def test_a_dense_model_has_none(tiny) -> None:
    with pytest.raises(PolicyError, match="this model has none"):
        forebay.manage(tiny("llama"), {"*.mlp": "stash"})


def test_a_part_without_moe_layers_has_nothing_to_stash(tiny) -> None:
    """Of a pipeline's ranks, one may have dense layers alone: what the others carry out is no error there."""
    model = tiny("qwen3_moe")
    keep_part(model, [0], embedding=True, head=True)
    with forebay.manage(model, "stash", dispatcher=LocalDispatcher(64)) as mem:
        assert set(mem.placements.values()) == {"keep"}
        assert mem.pages is None


def test_room_for_pages_that_nobody_takes(tiny) -> None:
    with pytest.raises(PolicyError, match="'stash' on, and there is none"):
        forebay.manage(tiny("qwen3_moe"), pages="1GiB")
