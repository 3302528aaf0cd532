"""A cut model computes what the whole one does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from forebay.managed import manage
from forebay.models.families import moe_blocks
from forebay.models.hf_experts import keep_local_experts
from forebay.moe.dispatch import NcclDispatcher, combine, dispatch
from forebay.pipeline.model import CutModel, Microbatch
from tests.models.conftest import FAMILIES, MORE_FAMILIES, VOCABULARY, build_tiny
from tests.ranks import run_ranks

GRANITE = {"logits_scaling": 6.0, "residual_multiplier": 0.3, "embedding_multiplier": 2.3}


def run(cut: CutModel, microbatch: Microbatch) -> torch.Tensor:
    x = cut.prologue(microbatch)
    for layer in cut.layers:
        if layer.dispatcher is None or layer.experts is None:
            whole = layer(x)
            x = whole if isinstance(whole, torch.Tensor) else whole[0]
            continue
        residual, rows, ids, weights, _ = layer.stage1(x)
        sent = dispatch(rows, ids, weights, layer.dispatcher)
        y = layer.experts(sent.rows, sent.ids, sent.weights, sent.max_rows)
        x = combine(y, sent.handle, residual).view(x.shape)
    return cut.epilogue(x, microbatch)


WITH_VISION = {"glm4v_moe", "glm5_next", "qwen3_vl_moe"}


@pytest.mark.parametrize("family", sorted({*FAMILIES, *MORE_FAMILIES, "granite"} - WITH_VISION))
def test_cut_is_whole(family: str) -> None:
    """Granite's embedding and logits have factors, LFM2's last norm another name; Ernie's block scales the sum of its experts."""
    model = build_tiny(family, **(GRANITE if family == "granite" else {}))
    ids = torch.randint(0, VOCABULARY, (2, 12))
    labels = ids.roll(-1, 1)
    with manage(model) as memory:
        whole = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=24).loss
        whole.backward()
        wanted = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        before = model.get_submodule(model.base_model_prefix).layers
        cut = CutModel(model, memory)
        loss = run(cut, Microbatch(ids, labels, 24))
        loss.backward()
        assert model.get_submodule(model.base_model_prefix).layers is before
    assert torch.equal(loss, whole)
    for (name, p), grad in zip(model.named_parameters(), wanted, strict=True):
        assert (p.grad is None) == (grad is None) and (grad is None or torch.equal(p.grad, grad)), name


def expert_parallel(rank: int, world: int) -> list[bool]:
    model = build_tiny("deepseek_v2")
    dispatcher = NcclDispatcher(dist.group.WORLD, moe_blocks(model)[0].experts.num_experts)
    keep_local_experts(model, dispatcher)
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(rank))
    labels = ids.roll(-1, 1)
    with manage(model, dispatcher=dispatcher) as memory:
        whole = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=24).loss
        loss = run(CutModel(model, memory), Microbatch(ids, labels, 24))
        dense, moe = CutModel(model, memory).layers
        return [torch.equal(loss, whole), dense.dispatcher is None, moe.dispatcher is dispatcher]


def test_cut_is_whole_with_experts_on_two_ranks() -> None:
    assert run_ranks(expert_parallel, 2) == [[True] * 3] * 2


@pytest.mark.parametrize(
    ("policy", "loss", "message"),
    [
        ("keep", None, "fused loss"),
        ({"model.layers.1": "recompute"}, "fused", r"name .*layers\.1\.self_attn and"),
        ({"model": "offload"}, "fused", "places 'model' as 'offload'"),
        ({"": "recompute"}, "fused", "places 'the whole model' as 'recompute'"),
    ],
)
def test_refusals(policy: Any, loss: str | None, message: str) -> None:
    """A loss that is not fused, and a placement of what contains sublayers."""
    model = build_tiny("qwen3_moe")
    with manage(model, policy, loss=loss) as memory, pytest.raises(ValueError, match=message):
        CutModel(model, memory)
