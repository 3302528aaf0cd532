"""A plan that recomputes experts lightly and offloads what is left: the items that leave are those that it means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from forebay.managed import manage
from forebay.memory import autotune
from forebay.memory.timeline import Assignment, Plan, Timeline, simulate


def light_and_offload(timeline: Timeline, *_: Any) -> Plan:
    """Every MoE half recomputed, and of what is left all but the smallest item offloaded."""
    light = {i: c for i, c in enumerate(timeline.calls) if c.light_recompute}
    assert light
    rest = {i: [o for o, n in enumerate(c.items) if n and o != c.largest] for i, c in light.items()}
    smallest = {i: min(items, key=lambda o: light[i].items[o]) for i, items in rest.items()}
    offload = {i: frozenset(o for o in items if o != smallest[i]) for i, items in rest.items()}
    return simulate(timeline, Assignment(offload, frozenset(c.key[0] for c in light.values())))


def test_what_leaves_is_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "under_budget", light_and_offload)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=4,
            moe_intermediate_size=48,
            vocab_size=31,
        )
    )
    ids = torch.randint(0, 31, (2, 16))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with manage(model, policy="recompute"):
        truth = gradients()
    with manage(model, policy="auto", budget=1 << 40) as mem:
        for _ in range(3):
            found = gradients()
        assert mem.plan is not None and mem.plan.planned_bytes > 0
        plan, moved = mem.plan, mem.report().moved_bytes
        gradients()
        assert mem.plan is plan  # nothing has outgrown it
    assert moved == plan.planned_bytes
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
