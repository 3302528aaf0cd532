"""The combinations that `benchmarks/single_gpu.py --stacks` compares with, and the comparison."""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


class Counting(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


def gradients_and_backward(stacks: Any, checkpointing: str) -> tuple[list[torch.Tensor], Counter[str]]:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=32, vocab_size=128, use_cache=False,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    ids = torch.randint(0, 128, (2, 64))
    with stacks.entered(stacks.Stack("", checkpointing=checkpointing), model):
        loss = model(input_ids=ids, labels=ids).loss
        with Counting() as counting:
            loss.backward()
    return [p.grad for p in model.parameters()], counting.calls


def test_checkpointing_recomputes_what_its_name_says(benchmarks: Any) -> None:
    stacks = benchmarks("stacks")
    want, plain = gradients_and_backward(stacks, "")
    grouped, product, mean = "aten._grouped_mm.default", "aten.mm.default", "aten.mean.dim"
    assert plain[grouped] and plain[product] and not plain[mean]
    calls = {}
    for how in ("layers", "selective", "attention"):
        got, calls[how] = gradients_and_backward(stacks, how)
        assert all(map(torch.equal, got, want)), how
    assert calls["layers"][grouped] > plain[grouped] and calls["layers"][mean]
    assert calls["selective"][grouped] == plain[grouped] and calls["selective"][product] == plain[product]
    assert calls["selective"][mean], "norms are recomputed"
    assert calls["attention"][grouped] == plain[grouped] and calls["attention"][product] > plain[product]


def test_each_arm_is_compared_with_the_fastest_within_its_peak(benchmarks: Any) -> None:
    def row(arm: str, ms: float, peak: float) -> dict[str, Any]:
        return {"arm": arm, "ms": ms, "peak over base GiB": peak}

    rows = [row("transformers", 200.0, 9.0), row("SonicMoE", 160.0, 6.0), row("forebay keep", 100.0, 7.0)]
    rows += [row("forebay auto", 128.0, 6.0), {"arm": "Liger", "error": "not installed"}]
    done = benchmarks("single_gpu").compared(rows)
    by_arm = {row["arm"]: row for row in done}
    assert by_arm["transformers"]["forebay / it"] == 0.5 and by_arm["SonicMoE"]["forebay / it"] == 0.8
    assert "forebay / it" not in by_arm["forebay keep"] and "forebay / it" not in by_arm["Liger"]
    assert done[-1]["forebay / it"] == 0.8 and done[-1]["forebay within its peak"] == "SonicMoE"
    none = benchmarks("single_gpu").compared([row("SonicMoE", 160.0, 3.0), row("forebay keep", 100.0, 7.0)])
    assert none[0]["forebay within its peak"] == "none" and none[0]["forebay / it"] is None
