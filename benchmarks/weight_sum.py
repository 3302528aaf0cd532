"""Experts' weight gradients and their fp32 sum: made in bf16 and then added, against added where they are made.

Rows of tokens are gathered in both. `separate`: gather, `F.grouped_mm`, and autograd's addition of the bf16 result to fp32.
`together`: gather and `forebay.kernels.grouped_wgrad`. Shapes are of two models' gate_up and down, with all experts or a share of
them, routed at random. Each is compared with the other before it is timed, and the arms take turns.

    TB/s    of `together`, 8 bytes an element of the sum and the rows once, without the gather
    TFLOP/s of `together`, without the gather

    python benchmarks/weight_sum.py            # half a minute on one H200
"""

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from common import median_ms, write

from forebay.kernels.grouped_wgrad import add_rows_by_rows
from forebay.kernels.permute import gather_rows
from forebay.moe.experts_op import rows_by_rows
from forebay.moe.routing import route

TURNS, REPEATS = 5, 4


@dataclass(frozen=True)
class Shape:
    """A weight [E, M, N], `tokens` with `choices` each; `tokens_first`: M is the tokens' side."""

    name: str
    experts: int
    m: int
    n: int
    tokens_first: bool
    tokens: int
    choices: int


SHAPES = (
    Shape("DeepSeek-V2-Lite gate_up", 64, 2816, 2048, False, 4096, 6),
    Shape("DeepSeek-V2-Lite down", 64, 2048, 1408, True, 4096, 6),
    Shape("gate_up, half of the experts", 32, 2816, 2048, False, 4096, 6),
    Shape("gate_up, 4 x the tokens", 64, 2816, 2048, False, 16384, 6),
    Shape("Qwen3-30B-A3B gate_up", 128, 1536, 2048, False, 4096, 8),
    Shape("Qwen3-30B-A3B down", 128, 2048, 768, True, 4096, 8),
)


def measure(shape: Shape) -> dict[str, Any]:
    ids = torch.rand(shape.tokens, shape.experts, device="cuda").topk(shape.choices, 1).indices
    order, _, offs = route(ids, shape.experts)
    sides = (shape.m, shape.n) if shape.tokens_first else (shape.n, shape.m)
    tokens = torch.randn(shape.tokens, sides[0], device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(ids.numel(), sides[1], device="cuda", dtype=torch.bfloat16)
    total = torch.randn(shape.experts, shape.m, shape.n, device="cuda")

    def operands() -> tuple[torch.Tensor, torch.Tensor]:
        token_rows = gather_rows(tokens, order, offs, shape.choices)
        return (token_rows, rows) if shape.tokens_first else (rows, token_rows)

    left, right = operands()
    product = rows_by_rows(left, right, offs)
    fresh = torch.zeros_like(total)
    add_rows_by_rows(fresh, left, right, offs)
    if not (fresh - product).abs().max() <= 2**-7 * product.abs().max():
        raise SystemExit(f"{shape.name}: wrong, not timed")
    del fresh
    arms = {
        "gather": operands,
        "grouped_mm": lambda: rows_by_rows(left, right, offs),
        "addition": lambda: total.add_(product),
        "separate": lambda: total.add_(rows_by_rows(*operands(), offs)),
        "together": lambda: add_rows_by_rows(total, *operands(), offs),
        "kernel": lambda: add_rows_by_rows(total, left, right, offs),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(TURNS + 1):
        for name, arm in arms.items():
            ms, _ = median_ms(arm, REPEATS)
            if turn:  # the first turn warms up
                times[name].append(ms)
    ms = {name: statistics.median(each) for name, each in times.items()}
    moved = 8 * total.numel() + left.nbytes + right.nbytes
    return {
        "weight": shape.name,
        "E, M, N": f"{shape.experts}, {shape.m}, {shape.n}",
        "rows": ids.numel(),
        **{f"{name} ms": value for name, value in ms.items()},
        "together over separate": ms["together"] / ms["separate"],
        "TB/s": moved / ms["kernel"] / 1e9,
        "TFLOP/s": 2 * ids.numel() * shape.m * shape.n / ms["kernel"] / 1e9,
    }


def main() -> None:
    torch.manual_seed(0)
    write("weight_sum", [measure(shape) for shape in SHAPES], turns=TURNS, repeats=REPEATS)


if __name__ == "__main__":
    main()
