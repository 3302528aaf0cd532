"""What operations ask of a GPU, counted by hand, and against torch's own FLOP formulas on whole models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from forebay.estimate.device import load
from forebay.estimate.layer_time import Clock
from forebay.estimate.op_costs import _attention_padding
from forebay.estimate.op_recorder import OpRecorder
from forebay.estimate.planned_dispatch import PlannedDispatcher
from forebay.estimate.routing import EvenRouting
from forebay.estimate.trace import trace_model
from forebay.estimate.types import ModelTrace, OpCost, Shape
from forebay.kernels.cross_entropy import scale
from forebay.models.linear_cross_entropy import linear_cross_entropy
from forebay.models.masked_attention import attend
from tests.models.conftest import EXPERTS, HIDDEN, TOP_K, VOCABULARY, WIDTH, build_tiny

SEQUENCE = 32
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def costs(
    run: Callable[..., Tensor], *shapes: tuple[int, ...], fused: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[OpCost, ...]:
    with FakeTensorMode(), OpRecorder(1, fused=fused) as recorder:
        given = [torch.empty(shape, dtype=dtype) for shape in shapes]
        for tensor in given:
            recorder.mark_input(tensor)
        recorder.tally.take()
        return recorder.tally.take([run(*given)])


def test_a_fused_run_reads_once_and_writes_once() -> None:
    """Compiled, 1.3 times the bytes, because Inductor splits runs."""
    one = OpCost("pointwise", 0, 800)
    assert costs(lambda x: (x + 1) * 2, (10, 10)) == (one, one)
    assert costs(lambda x: (x + 1) * 2 + x, (10, 10), fused=True) == (replace(one, bytes=1040),)


def test_views_and_empty_memory_cost_nothing() -> None:
    assert costs(lambda x: x.view(5, 20).t()[1:].unsqueeze(0), (10, 10)) == ()
    assert costs(torch.empty_like, (10, 10), fused=True) == ()


@pytest.mark.parametrize(
    ("run", "shapes", "expected"),
    [
        (lambda x, y: x + y, [(8, 8), (8, 8)], OpCost("pointwise", 0, 3 * 256)),
        # One column for all.
        (
            lambda x, y: x + y,
            [(8, 8), (8, 1)],
            OpCost("pointwise", 0, 2 * 256 + 32, loads=128 + 8),
        ),
        (lambda x, y: x + y.t(), [(8, 8), (8, 8)], OpCost("pointwise", 0, 3 * 256, loads=3 * 64)),
        (lambda x: x[:, :4] * 2, [(8, 8)], OpCost("pointwise", 0, 2 * 128, loads=2 * 32)),
        (lambda x: torch.cat([x, x]), [(8, 8)], OpCost("pointwise", 0, 4 * 256)),
        (lambda x: torch.cat([x[:, :4], x], -1), [(8, 8)], OpCost("pointwise", 0, 3 * 256, loads=2 * 3 * 64)),
        # Parts that are not whole vectors.
        (lambda x, y: torch.cat([x, y], -1), [(8, 8), (8, 1)], OpCost("pointwise", 0, 2 * (256 + 32), loads=4 * 72)),
        # Only written.
        (torch.zeros_like, [(8, 8)], OpCost("pointwise", 0, 256)),
        (lambda x: x.new_zeros(16, 8), [(8, 8)], OpCost("pointwise", 0, 512)),
        (lambda x: x.clone().zero_(), [(8, 8)], OpCost("pointwise", 0, 256)),
        # In place, one of each row: indices, values, and what is written.
        (
            lambda x, y: x.scatter(1, torch.zeros(8, 1, dtype=torch.int64), y),
            [(8, 8), (8, 1)],
            OpCost("pointwise", 0, 64 + 2 * 32, loads=128 // 4),
        ),
        (lambda x: x.to(torch.bfloat16), [(8, 8)], OpCost("pointwise", 0, 256 + 128)),
        # Not vectorized, which takes twice as long as the bytes.
        (lambda x: x.to(torch.float64), [(8, 8)], OpCost("pointwise", 0, 2 * (256 + 512))),
        # As slow as it gets.
        (
            lambda x: x[:, :4].to(torch.float64),
            [(8, 8)],
            OpCost("pointwise", 0, 128 + 256, loads=3 * 32),
        ),
        (lambda x: x.pow(2), [(8, 8)], OpCost("pointwise", 0, 2 * 256)),
        # Threads of a row wait for each other.
        (
            lambda x: x.mean(-1),
            [(8, 8)],
            OpCost("pointwise", 0, 256 + 32, loads=200 * 8),
        ),
        # And blocks, where rows are added.
        (
            lambda x: x.sum(0),
            [(8, 8)],
            OpCost("pointwise", 0, 256 + 32, loads=64 + 8 + 6_700_000),
        ),
        # And indices, in int64.
        (
            lambda x: x.max(-1)[0],
            [(8, 8)],
            OpCost("pointwise", 0, 256 + 32 + 64, loads=64 + 8 + 16),
        ),
        (lambda x, y: x * y.sum(), [(8, 8), (2,)], OpCost("pointwise", 0, 2 * 256 + 4)),  # a scalar has no layout
        (
            lambda x: x * torch.empty(8, 8, dtype=torch.bfloat16),
            [(8, 8)],
            OpCost("pointwise", 0, 2 * 256 + 128, loads=5 * 64),
        ),
        # `forebay.kernels.cross_entropy.scale` writes into given memory: fp32 read, bf16 written, at the speed of a copy.
        (lambda x: scale(x, torch.empty(()), torch.bfloat16), [(8, 8)], OpCost("pointwise", 0, 256 + 4 + 128)),
    ],
)
def test_uncompiled_kernels_are_vectorized_over_equal_layouts(run: Any, shapes: Any, expected: OpCost) -> None:
    assert costs(run, *shapes)[-1] == expected


def test_long_topk_and_many_small_products_take_what_was_measured() -> None:
    """On an H200. Products with a copy of k for each token are left out: that copy is an operation of its own."""
    rows = json.loads((RESULTS / "sparse_attention.json").read_text())["rows"]
    clock = Clock(load("h200"))
    for row in rows:
        shape = row["shape"]
        if row["what"] == "topk" and shape[1] > 256:
            for name, is_sorted in (("sorted us", True), ("unsorted us", False)):
                found = costs(lambda x, k=shape[2], s=is_sorted: x.topk(k, -1, sorted=s)[0], shape[:2])
                assert sum(map(clock.seconds, found)) == pytest.approx(1e-6 * row[name], rel=0.25), (shape, name)
        if row["what"] == "product" and shape[0] == 1:
            b, s, h, d = shape
            found = costs(lambda q, k: torch.matmul(q, k.mT.unsqueeze(1)), (b, s, h, d), (b, s, d))
            assert sum(map(clock.seconds, found)) == pytest.approx(1e-6 * row["us"], rel=0.25), shape


def test_topk_takes_its_rows_in_waves() -> None:
    """4224 blocks run at once: 14 microseconds for 1024 rows on an H200, 46 for 16,384, compiled or not."""
    for fused in (False, True):
        few, many = (costs(lambda x: x.topk(3)[0], (rows, 8), fused=fused)[0] for rows in (1024, 16384))
        assert few.kind == many.kind == "pointwise"
        assert many.loads - few.loads == pytest.approx(3 * 11.7e6, rel=0.1)


def test_gemms_of_unaligned_rows() -> None:
    """Rows of 9 numbers, the first 8 of which are used: as GPT-OSS's scores, one of which is the sink's."""
    shapes, half = ((2, 4, 9), (2, 8, 16)), torch.bfloat16
    (unaligned,) = costs(lambda x, y: torch.bmm(x[..., :8], y), *shapes, dtype=half)
    moved = 2 * 2 * (4 * 8 + 8 * 16 + 4 * 16)  # and whole tiles of the result are computed
    assert unaligned == OpCost("gemm_unaligned", 2 * 2 * 4 * 8 * 16, moved, padding=128 / 4 * 128 / 16)
    assert costs(torch.bmm, (2, 4, 8), (2, 8, 16), dtype=half) == (replace(unaligned, kind="gemm", padding=1.0),)


def test_products_in_fp32_have_a_rate_of_their_own() -> None:
    """A router's. Rows of 36 bytes are not unaligned: no tensor cores load them."""
    assert [op.kind for op in costs(torch.matmul, (4, 9), (9, 3))] == ["gemm_fp32"]


def test_a_run_ends_at_a_gemm() -> None:
    """x [4, 8] is read and relu(x) written; the GEMM; its result is read, and twice of it written."""
    found = costs(lambda x, w: 2 * (F.relu(x) @ w), (4, 8), (8, 16), fused=True)
    product = OpCost("gemm_fp32", 2 * 4 * 8 * 16, 4 * (4 * 8 + 8 * 16 + 4 * 16))
    runs = [OpCost("pointwise", 0, round(1.3 * 2 * 4 * elements)) for elements in (32, 64)]
    assert found == (runs[0], product, runs[1])


def test_backward_recomputes_a_forwards_run() -> None:
    """exp(x) + 1 is needed for the GEMM's weight gradient; compiled code saves x, and recomputes it."""
    with FakeTensorMode(), OpRecorder(1, fused=True) as recorder:
        x, w = torch.empty(4, 8), torch.empty(8, 16, requires_grad=True)
        recorder.mark_input(x)
        recorder.mark_input(w)
        recorder.tally.take()
        y = (x.exp() + 1) @ w
        recorder.tally.take([y])
        y.backward(torch.empty_like(y))
        found = recorder.tally.take()
    assert [op.flops for op in found if op.kind == "gemm_fp32"] == [2 * 4 * 8 * 16]


@pytest.mark.parametrize("heads", [3, 1])
def test_causal_attention_computes_half_the_pairs(heads: int) -> None:
    """Of all heads of queries, whose keys may have fewer: torch 2.11's formula raised AssertionError there."""
    with FakeTensorMode(), OpRecorder(1) as recorder:
        q, k, v = (torch.empty(2, n, 16, 8, dtype=torch.bfloat16) for n in (3, heads, heads))
        for causal in (False, True):
            torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        everything, half = recorder.tally.take()
    assert everything.kind == half.kind == "attention"
    assert everything.flops == 2 * (2 * 2 * 3 * 16 * 16 * 8) == 2 * half.flops


@pytest.mark.parametrize(
    ("heads", "length", "qk", "v", "longer"),
    [
        (128, 4096, 128, 128, 1.03),  # the rates are measured with it
        (102, 640, 128, 128, 1.42),  # 15 of 25 tiles are half of all pairs
        (128, 2560, 64, 64, 1.5),  # as many exponentials as heads of 128
        (4, 5120, 160, 64, 2.2),  # 160 blocks of queries for 132 multiprocessors: the last has 40 tiles
    ],
)
def test_attention_computes_whole_tiles(heads: int, length: int, qk: int, v: int, longer: float) -> None:
    """The last two took 1.53 and 2.1 times as long on an H200 as their FLOPs at the rate of the first."""
    with FakeTensorMode(), OpRecorder(1) as recorder:
        q, k = (torch.empty(1, heads, length, qk, dtype=torch.bfloat16) for _ in range(2))
        value = torch.empty(1, heads, length, v, dtype=torch.bfloat16)
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, value, None, True, 0.0, True)
        (cost,) = recorder.tally.take()
    assert cost.flops == heads * length * length * (qk + v)
    assert cost.padding == pytest.approx(longer, abs=0.05)


def test_attention_takes_what_it_took() -> None:
    """cuDNN's kernels of 18 shapes on H200s; those of less than 0.1 ms take a few microseconds more to begin."""
    file = RESULTS / "captured_kernels.json"
    device = load("h200")
    for shape in json.loads(file.read_text("utf-8"))["attention"]:
        size = shape["batch"], shape["heads"], shape["tokens"]
        query, value = (torch.empty(*size, shape[n], device="meta") for n in ("width", "value_width"))
        pairs = math.prod(size) * size[2]
        for way, columns, name in (
            ("forward", shape["width"] + shape["value_width"], "attention"),
            ("backward", 3 * shape["width"] + 2 * shape["value_width"], "attention_backward"),
        ):
            if took := shape[f"{way}_microseconds"]:
                padding = _attention_padding(query, value, causal=True, backward=way == "backward")
                found = pairs * columns * padding / device.at(name) * 1e6
                assert 0.83 * took - 6 < found < 1.17 * took, (shape, way, found)


def test_experts_compute_whole_tiles() -> None:
    """Of 256 x 256 and 64 elements of a sum, for each expert that has rows, or of 128 x 128 and 128 if these are few."""
    with FakeTensorMode(), OpRecorder(1) as recorder:
        rows, weights = torch.empty(2056, 32, dtype=torch.bfloat16), torch.empty(8, 32, 272, dtype=torch.bfloat16)
        ends = torch.empty(8, dtype=torch.int32)
        torch.ops.aten._grouped_mm(rows, weights, ends)
        torch.ops.aten._grouped_mm(rows[:2048], weights, ends)
        torch.ops.aten._grouped_mm(rows[:2], weights, ends)
        torch.ops.aten._grouped_mm(rows.t(), torch.empty(2056, 272, dtype=torch.bfloat16), ends)
        many, fewer, two, gradient = recorder.tally.take()
    matrices, moved = 2 * 8 * 32 * 272, 2 * 2056 * (32 + 272)
    one = OpCost("grouped", 2 * 2056 * 32 * 272, moved + matrices, matrices=matrices, tiles=8 * 2 * 2, depth=64)
    assert many == one
    assert (fewer.tiles, two.tiles, two.depth) == (8 * 2, 2 * 3, 128)
    assert replace(gradient, padding=1.0) == replace(one, kind="grouped_weights", tiles=8 * 3, depth=384, small=True)
    assert gradient.padding == pytest.approx(384 / 257)


@pytest.mark.parametrize("heads", [4, 1])
def test_kernels_around_attentions_backward(heads: int) -> None:
    """dO and O are read, the query's gradient is read in fp32 and written; fewer heads of keys sum theirs."""
    with FakeTensorMode(), OpRecorder(1) as recorder:
        q, k, v = (torch.empty(1, n, 256, 64, dtype=torch.bfloat16) for n in (4, heads, heads))
        y, lse, cum_q, cum_k, q_len, k_len, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True
        )
        recorder.tally.take()
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            torch.empty_like(y), q, k, v, y, lse, cum_q, cum_k, q_len, k_len, 0.0, True, seed, offset
        )
        (around,) = (op for op in recorder.tally.take() if op.kind == "pointwise")
    elements = q.numel()
    sums = 2 * (2 * elements + 2 * k.numel()) if heads < 4 else 0
    assert around == OpCost("pointwise", 0, round(1.3 * (2 * 2 * elements + 6 * elements + sums)), 0)


def test_compiled_products_have_no_unaligned_rows() -> None:
    """Inductor copies them: 30 products of GPT-OSS's scores, whose rows have a sink, took 2.1 ms in all, not 4.7."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    half = torch.bfloat16
    assert [c.kind for c in costs(run, (8, 33), (33, 8), dtype=half)] == ["gemm_unaligned"]
    assert [c.kind for c in costs(run, (8, 33), (33, 8), fused=True, dtype=half)] == ["gemm"]


def test_compiled_passes_over_rows_take_longer_than_their_memory() -> None:
    """Forward: the softmax. Rows that begin anywhere are read element by element."""
    memory, extra = 2 * 4 * 4096, 9 * 4096
    aligned = costs(lambda x: x.softmax(-1), (64, 64), fused=True)
    assert aligned == (OpCost("pointwise", 0, round(1.3 * memory)), OpCost("pointwise", 0, extra, launches=0))
    unaligned = costs(lambda x: x.softmax(-1), (64, 65), fused=True)
    assert unaligned[1] == OpCost("pointwise", 0, 9 * 64 * 65, launches=0, loads=9 * 32 * 65)


@pytest.mark.parametrize(
    ("columns", "loads", "share"),
    [(64, 0.7, 0.56), (65, 1.25, 1.0), (1025, 2.4, 1.0), (1028, 1.68, 0.56), (8200, 0.7, 0.56)],
)
def test_an_uncompiled_softmax_is_one_kernel_and_its_backward_two(columns: int, loads: float, share: float) -> None:
    elements = 2 * 64 * columns
    forward = OpCost("pointwise", 0, 4 * elements, loads=round(loads * elements))
    assert costs(lambda x: x.softmax(-1), (64, columns)) == (forward,)

    def backward(out: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._softmax_backward_data(grad, out, -1, out.dtype)

    moved = 4 * 3 * 64 * columns
    expected = OpCost("pointwise", 0, 2 * moved, loads=round(0.7 * share * moved / 4))
    assert costs(backward, (64, columns), (64, columns)) == (expected,)


@pytest.mark.parametrize(
    ("length", "window", "keys"), [(1024, None, 512), (1024, 127, 256), (1024, 128, 256), (256, 127, 128)]
)
def test_a_window_computes_whole_blocks_of_keys(length: int, window: int | None, keys: int) -> None:
    """`flex_attention`: the block of the query and those that its window reaches, at most half of all pairs; backward computes
    seven products of forward's two."""
    aten = torch.ops.aten
    with FakeTensorMode(), OpRecorder(1) as recorder:
        q = torch.empty(2, length, 6, 16, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(2, length, 3, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        out, *_ = aten._flash_attention_forward(
            q, k, v, None, None, length, length, 0.0, True, False, window_size_left=window
        )
        (forward,) = recorder.tally.take()
        out.backward(torch.empty_like(out))
        backward = [op for op in recorder.tally.take() if op.kind == "attention_backward"]
    assert forward.kind == "attention" and forward.flops == 2 * (2 * 2 * length * 6 * keys * 16)
    assert [op.flops for op in backward] == [7 * (2 * 2 * length * 6 * keys * 16)]


@pytest.mark.parametrize(
    ("keys", "window", "pairs"), [(1024, 0, 512), (1024, 128, 192), (1024, 900, 512), (1280, 128, 192 + 128)]
)
def test_attention_under_a_dense_mask_computes_the_tiles_of_a_window_and_half_of_other_keys(
    keys: int, window: int, pairs: int
) -> None:
    """Two products forward and eight backward, each as long as 2.9 in flash attention; tiles are looked for once, and twice."""
    with FakeTensorMode(), OpRecorder(1) as recorder:
        q = torch.empty(2, 6, 1024, 16, dtype=torch.bfloat16, requires_grad=True)
        k = torch.empty(2, 1, keys, 16, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.empty(1, 1024, keys, dtype=torch.bfloat16)
        out, _ = attend(q, k, None, mask, None, 0.25, window)
        forward = recorder.tally.take()
        out.backward(torch.empty_like(out))
        backward = recorder.tally.take()
    product = 2 * 2 * 6 * 1024 * pairs * 16
    assert [(op.kind, op.flops, op.padding) for op in forward] == [("pointwise", 0, 1), ("attention", 2 * product, 2.9)]
    assert [(op.flops, op.padding) for op in backward if op.kind == "attention_backward"] == [(8 * product, 2.9)]
    assert [op.bytes for op in backward if op.launches == 30] == [2 * forward[0].bytes] == [2 * mask.nbytes]


def trace(**shape: Any) -> ModelTrace:
    with torch.device("meta"):
        model = build_tiny("qwen3_moe", torch.bfloat16, attn_implementation="sdpa")
    return trace_model(model, Shape(SEQUENCE, 1, **shape))


def flops(ops: tuple[OpCost, ...], *kinds: str) -> int:
    return sum(op.flops for op in ops if not kinds or op.kind in kinds)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_product_counts_once(compiled: bool) -> None:
    """A product has two in backward; causal attention, as half of all pairs, has two in forward and five in backward."""
    for layer in trace(compiled=compiled).layers:
        for part in (layer.attention, layer.mlp):
            ahead, back = (
                flops(ops, "gemm", "grouped", "grouped_weights") for ops in (part.forward_ops, part.backward_ops)
            )
            assert back == 2 * ahead > 0
        attention = layer.attention
        assert (
            2 * flops(attention.backward_ops, "attention_backward") == 5 * flops(attention.forward_ops, "attention") > 0
        )


def test_each_chunk_of_a_head_adds_to_an_fp32_sum() -> None:
    """7 tokens in chunks of 4: the second chunk reads the weight's gradient too."""
    with FakeTensorMode(), OpRecorder(1) as recorder:
        hidden, weight = (torch.empty(n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (7, 32))
        linear_cross_entropy(hidden, weight, torch.empty(7, dtype=torch.int64), chunk_tokens=4)
        sums = [op for op in recorder.tally.take() if op.kind == "gemm_sum"]
    assert [op.flops for op in sums] == 2 * [7 * 16 * 32]
    assert sum(op.bytes for op in sums) == pytest.approx(3 * 4 * 16 * 32 + 2 * 7 * (16 + 32), abs=2)


def test_experts_and_head_by_hand() -> None:
    """transformers' own experts run the same products with `F.grouped_mm`, for which torch has no formula."""
    found = trace()
    rows, moe = SEQUENCE * TOP_K, found.layers[1].mlp
    one = 2 * rows * HIDDEN * WIDTH
    assert flops(moe.forward_ops, "grouped") == 3 * one
    assert flops(moe.backward_ops, "grouped") == flops(moe.backward_ops, "grouped_weights") == 3 * one
    gate_up = next(op for op in moe.forward_ops if op.kind == "grouped")
    assert gate_up.bytes == 2 * (rows * HIDDEN + rows * 2 * WIDTH + EXPERTS * HIDDEN * 2 * WIDTH)
    assert flops(moe.light.backward_ops, "grouped") == (3 + 2) * one  # light recomputation: two of three parts
    logits = 2 * SEQUENCE * HIDDEN * VOCABULARY  # and two gradients, of which the weight's is a sum
    assert [flops(found.head.forward_ops, kind) for kind in ("gemm", "gemm_sum")] == [2 * logits, logits]
    theirs = trace(experts="transformers").layers[1].mlp
    assert flops(theirs.forward_ops, "grouped") == 3 * one
    assert flops(theirs.backward_ops, "grouped") == flops(theirs.backward_ops, "grouped_weights") == 3 * one


@pytest.mark.parametrize(("columns", "moved"), [(1 << 16, 2), ((1 << 16) + 4, 4)])
def test_a_loss_over_long_rows_reads_them_again(columns: int, moved: int) -> None:
    """Rows of more than 256 KiB leave the cache between the passes of a softmax's logarithm. The loss takes one of each row."""
    softmax, loss = costs(lambda x: F.cross_entropy(x, torch.empty(64, dtype=torch.int64)), (64, columns))
    assert softmax.bytes == 4 * moved * 64 * columns
    assert loss.bytes < 1024


def test_a_loss_is_never_compiled() -> None:
    def losses(compiled: bool) -> list[OpCost]:
        """Kernels that move a logit in fp32 twice or more: a cast, the logarithm of a softmax, and its backward."""
        head = trace(compiled=compiled, loss="transformers").head
        ops = (*head.forward_ops, *head.backward_ops)
        return [op for op in ops if op.kind == "pointwise" and op.bytes >= 2 * 4 * SEQUENCE * VOCABULARY]

    assert losses(compiled=True) == losses(compiled=False)
    assert len(losses(compiled=True)) == 3


def test_compiled_sublayers_move_less() -> None:
    def moved(found: ModelTrace) -> int:
        return sum(op.bytes for layer in found.layers for _, part in layer.sublayers
                   for op in (*part.forward_ops, *part.backward_ops) if op.kind == "pointwise")  # fmt: skip

    assert moved(trace(compiled=True)) < 0.7 * moved(trace())


@pytest.mark.parametrize("capacity", [0.0, 1.0, 3.0])
def test_transfers_are_of_live_rows_whatever_the_capacity(capacity: float) -> None:
    found = trace(stages=True, ep=4, capacity_factor=capacity).layers[1].mlp
    planned = PlannedDispatcher(4, EvenRouting(EXPERTS, TOP_K), SEQUENCE)
    for ops in (found.forward_ops, found.backward_ops):
        sent = [op.bytes for op in ops if op.kind == "all_to_all"]
        assert (
            sent == [planned.live_rows * HIDDEN * 2 * 3 // 4] * 2
        )  # dispatch and combine; three of four ranks are others
    live = 3 * 2 * planned.live_slots * HIDDEN * WIDTH
    assert flops(found.forward_ops, "grouped") == pytest.approx(live, rel=0.02)
