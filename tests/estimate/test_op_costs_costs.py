"""What operations ask of a GPU, counted by hand, and against torch's own FLOP formulas on whole models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from forebay.estimate.op_recorder import OpRecorder
from forebay.estimate.trace import PlannedDispatcher, trace_model
from forebay.estimate.types import ModelTrace, OpCost, Shape
from forebay.kernels.scale import scale

HIDDEN, WIDTH, EXPERTS, TOP_K, SEQUENCE = 64, 32, 8, 2, 32


def costs(run: Callable[..., Tensor], *shapes: tuple[int, ...], fused: bool) -> tuple[OpCost, ...]:
    with FakeTensorMode(), OpRecorder(1, fused=fused) as live:
        given = [torch.empty(shape) for shape in shapes]
        for tensor in given:
            live.mark_input(tensor)
        live.tally.take()
        return live.tally.take([run(*given)])


def test_uncompiled_operations_each_read_and_write() -> None:
    found = costs(lambda x: (x + 1) * 2, (10, 10), fused=False)
    assert found == (OpCost("pointwise", 0, 800), OpCost("pointwise", 0, 800))


def test_a_fused_run_reads_once_and_writes_once() -> None:
    assert costs(lambda x: (x + 1) * 2 + x, (10, 10), fused=True) == (OpCost("pointwise", 0, 800),)


def test_views_and_empty_memory_cost_nothing() -> None:
    assert costs(lambda x: x.view(5, 20).t()[1:].unsqueeze(0), (10, 10), fused=False) == ()
    assert costs(torch.empty_like, (10, 10), fused=True) == ()


@pytest.mark.parametrize(
    ("run", "shapes", "expected"),
    [
        (lambda x, y: x + y, [(8, 8), (8, 8)], OpCost("pointwise", 0, 3 * 256)),
        (lambda x, y: x + y, [(8, 8), (8, 1)], OpCost("unvectorized", 0, 2 * 256 + 32)),  # one column for all
        (lambda x, y: x + y.t(), [(8, 8), (8, 8)], OpCost("unvectorized", 0, 3 * 256)),
        (lambda x: x[:, :4] * 2, [(8, 8)], OpCost("unvectorized", 0, 2 * 128)),
        (lambda x: torch.cat([x, x]), [(8, 8)], OpCost("unvectorized", 0, 4 * 256)),
        (lambda x: x.to(torch.bfloat16), [(8, 8)], OpCost("pointwise", 0, 256 + 128)),
        (lambda x: x.pow(2), [(8, 8)], OpCost("pointwise", 0, 2 * 256)),
        (lambda x: x.mean(-1), [(8, 8)], OpCost("pointwise", 0, 256 + 32)),
        (lambda x: x.sum(0), [(8, 8)], OpCost("unvectorized", 0, 256 + 32)),
        (lambda x: x.max(-1)[0], [(8, 8)], OpCost("unvectorized", 0, 256 + 32 + 64)),  # and where it was, in int64
        (lambda x, y: x * y.sum(), [(8, 8), (2,)], OpCost("pointwise", 0, 2 * 256 + 4)),  # a scalar is no layout
    ],
)
def test_uncompiled_kernels_walk_over_what_does_not_lie_alike(run: Any, shapes: Any, expected: OpCost) -> None:
    assert costs(run, *shapes, fused=False)[-1] == expected


def test_two_dtypes_are_walked() -> None:
    def run(x: Tensor) -> Tensor:
        return x * torch.empty(8, 8, dtype=torch.bfloat16)

    assert costs(run, (8, 8), fused=False) == (OpCost("unvectorized", 0, 2 * 256 + 128),)


def test_what_a_kernel_writes_into_given_memory_is_counted() -> None:
    """`forebay.kernels.scale`: fp32 read, bf16 written, at the speed of a copy."""

    def run(x: Tensor) -> Tensor:
        return scale(x, torch.empty(()), torch.bfloat16)

    assert costs(run, (8, 8), fused=False) == (OpCost("pointwise", 0, 256 + 4 + 128),)


def test_products_of_rows_that_begin_anywhere() -> None:
    """Rows of 9 numbers, the first 8 of which are used: as GPT-OSS's scores, one of which is the sink's."""
    shapes = (2, 4, 9), (2, 8, 16)
    (odd,) = costs(lambda x, y: torch.bmm(x[..., :8], y), *shapes, fused=False)
    assert odd == OpCost("gemm_unaligned", 2 * 2 * 4 * 8 * 16, 4 * 2 * (4 * 8 + 8 * 16 + 4 * 16))
    (even,) = costs(torch.bmm, (2, 4, 8), (2, 8, 16), fused=False)
    assert even == replace(odd, kind="gemm")


def test_a_run_ends_at_a_product() -> None:
    """x [4, 8] is read and relu(x) written; the product; its result is read, and twice of it written."""
    found = costs(lambda x, w: 2 * (F.relu(x) @ w), (4, 8), (8, 16), fused=True)
    product = OpCost("gemm", 2 * 4 * 8 * 16, 4 * (4 * 8 + 8 * 16 + 4 * 16))
    assert found == (OpCost("pointwise", 0, 2 * 4 * 32), product, OpCost("pointwise", 0, 2 * 4 * 64))


def test_backward_makes_a_forwards_run_again() -> None:
    """exp(x) + 1 is saved for the product's weight gradient; compiled code saves x, and makes it again."""
    with FakeTensorMode(), OpRecorder(1, fused=True) as live:
        x, w = torch.empty(4, 8), torch.empty(8, 16, requires_grad=True)
        live.mark_input(x)
        live.mark_input(w)
        live.tally.take()
        y = (x.exp() + 1) @ w
        live.tally.take([y])
        y.backward(torch.empty_like(y))
        found = live.tally.take()
    assert Counter(op.kind for op in found)["gemm"] == 1
    product = next(op for op in found if op.kind == "gemm")
    assert product.flops == 2 * 4 * 8 * 16


def test_causal_attention_makes_half_the_pairs() -> None:
    shape = (2, 3, 16, 8)
    with FakeTensorMode(), OpRecorder(1) as live:
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(3))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        flash(q, k, v, 0.0, False)
        flash(q, k, v, 0.0, True)
        everything, causal = live.tally.take()
    assert everything.kind == causal.kind == "attention"
    assert everything.flops == 2 * (2 * 2 * 3 * 16 * 16 * 8) == 2 * causal.flops


def model() -> Any:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=WIDTH,
        intermediate_size=96,
        mlp_only_layers=[0],
        vocab_size=97,
        use_cache=False,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def trace(**shape: Any) -> ModelTrace:
    return trace_model(model(), Shape(SEQUENCE, 1, **shape))


def flops(ops: tuple[OpCost, ...], *kinds: str) -> int:
    return sum(op.flops for op in ops if not kinds or op.kind in kinds)


@pytest.mark.parametrize("compiled", [False, True])
def test_flops_are_those_of_torchs_formulas(compiled: bool) -> None:
    """Every product of a model is in the list once; attention, causal, with half of what its formula says."""
    found = trace(compiled=compiled)
    for layer in found.layers:
        assert flops(layer.mlp.forward_ops) == layer.mlp.forward_flops > 0
        assert flops(layer.mlp.backward_ops) == layer.mlp.backward_flops > 0
        for ops, all_pairs in (
            (layer.attention.forward_ops, layer.attention.forward_flops),
            (layer.attention.backward_ops, layer.attention.backward_flops),
        ):
            assert flops(ops) + flops(ops, "attention", "attention_backward") == all_pairs


def test_experts_and_head_by_hand() -> None:
    found = trace()
    rows, moe = SEQUENCE * TOP_K, found.layers[1].mlp
    one = 2 * rows * HIDDEN * WIDTH
    assert flops(moe.forward_ops, "grouped") == 3 * one
    assert flops(moe.backward_ops, "grouped") == flops(moe.backward_ops, "grouped_weights") == 3 * one
    gate_up = next(op for op in moe.forward_ops if op.kind == "grouped")
    assert gate_up.bytes == 2 * (rows * HIDDEN + rows * 2 * WIDTH + EXPERTS * HIDDEN * 2 * WIDTH)
    # Recomputing makes the first product again: two of three parts.
    assert flops(moe.light_ops, "grouped") == (3 + 2) * one
    # Logits and two gradients.
    assert flops(found.head.forward_ops) == 3 * 2 * SEQUENCE * HIDDEN * 97


def test_transformers_own_experts_make_the_same_products() -> None:
    """They are `F.grouped_mm`, which torch counts as nothing."""
    ours, theirs = trace().layers[1].mlp, trace(experts="transformers").layers[1].mlp
    assert flops(theirs.forward_ops, "grouped") == flops(ours.forward_ops, "grouped")
    for kind in ("grouped", "grouped_weights"):
        assert flops(theirs.backward_ops, kind) == flops(ours.backward_ops, kind)


def test_compiled_halves_move_less() -> None:
    def moved(found: ModelTrace) -> int:
        return sum(op.bytes for layer in found.layers for part in (layer.attention, layer.mlp)
                   for op in (*part.forward_ops, *part.backward_ops) if op.kind == "pointwise")  # fmt: skip

    assert moved(trace(compiled=True)) < 0.7 * moved(trace())


@pytest.mark.parametrize("capacity", [0.0, 1.0, 3.0])
def test_what_travels_is_what_comes_not_what_there_is_room_for(capacity: float) -> None:
    found = trace(stages=True, ep=4, capacity_factor=capacity).layers[1].mlp
    rows = PlannedDispatcher(4, EXPERTS, SEQUENCE, TOP_K).live_rows
    sent = [op.bytes for op in found.forward_ops if op.kind == "all_to_all"]
    assert sent == [rows * HIDDEN * 2 * 3 // 4] * 2  # dispatch and combine, three of four ranks are others
    assert sent == [op.bytes for op in found.backward_ops if op.kind == "all_to_all"]
    slots = PlannedDispatcher(4, EXPERTS, SEQUENCE, TOP_K).live_slots
    assert flops(found.forward_ops, "grouped") == pytest.approx(3 * 2 * slots * HIDDEN * WIDTH, rel=0.02)
