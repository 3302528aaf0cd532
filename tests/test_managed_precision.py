"""`forebay.manage(precision="fp8")` on whole models: bytes, gradients, what it refuses, and that nothing of it is left."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import forebay
from forebay.kernels.row_fp8 import encoded_width
from forebay.memory.overrides import setting
from forebay.models.families import moe_blocks
from forebay.moe.dispatch import LocalDispatcher
from forebay.policy import PolicyError
from tests.models.conftest import build_tiny, token_ids

WIDTHS = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_attention_heads": 2}
EXPERTS = 8


def build(**more: Any) -> Any:
    return build_tiny("qwen3_moe", **WIDTHS, **more).bfloat16().train()


def step(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> float:
    """Of all gradients together, relative to their norm."""
    squares = sum(float((got[name] - want[name]).square().sum()) for name in want)
    return float((squares / sum(float(g.square().sum()) for g in want.values())) ** 0.5)


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        ("keep", 0.05),
        ("offload", 0.1),
        ("recompute", 0.05),
        ({"*.mlp.experts": "stash", "*.self_attn": "offload"}, 0.1),
    ],
)
def test_the_loss_is_exact_and_gradients_are_near(policy: Any, most: float) -> None:
    tokens = token_ids()
    results = []
    for precision in ("exact", "fp8"):
        model = build()
        dispatcher = LocalDispatcher(EXPERTS) if policy not in ("keep", "offload", "recompute") else None
        with forebay.manage(model, policy, precision=precision, offload="all", dispatcher=dispatcher) as mem:
            for _ in range(2):
                results.append(step(model, tokens))
                if mem.pages is not None:
                    mem.pages.end_step()
            if policy == "offload":
                report = mem.report()
                assert (report.moved_bytes < report.planned_bytes) is (precision == "fp8")
        assert not any(setting(block.experts, "forebay_precision", None) for block in moe_blocks(model))
    (loss, gradients), *_, (rounded_loss, rounded) = results
    assert torch.equal(loss, rounded_loss)
    assert distance(results[1][1], gradients) == 0
    # Light recomputation saves no h, and its inputs stay on the device.
    assert (distance(rounded, gradients) > 0) is (policy != "recompute") and distance(rounded, gradients) < most


def test_bytes_of_rows() -> None:
    """Of all that a compiled model of bf16 saves, rows are nearly all; here they are counted one by one."""
    tokens, saved = token_ids(), {}
    for precision in ("exact", "fp8"):
        model = build()
        with forebay.manage(model, "keep", precision=precision) as mem:
            step(model, tokens)
            saved[precision] = mem.report().saved_bytes_by_placement["keep"]
    rows = tokens.numel() * model.config.num_experts_per_tok * len(moe_blocks(model))
    width = 2 * WIDTHS["moe_intermediate_size"]
    assert saved["exact"] - saved["fp8"] == rows * (2 * width - encoded_width(width))
    assert encoded_width(width) <= 0.6 * 2 * width


def test_refusals() -> None:
    with pytest.raises(PolicyError, match="precision='half' is unknown; valid are exact, fp8"):
        forebay.manage(build(), precision="half")
    with pytest.raises(PolicyError, match="nothing to round"):
        forebay.manage(build(), "keep", experts=None, precision="fp8")
    model = build()
    with forebay.manage(model, "offload", experts=None, precision="fp8") as mem:
        step(model, token_ids())
        assert mem.report().moved_bytes > 0
