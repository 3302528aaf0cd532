"""The experts of one layer, and each of their row kernels against the copy bandwidth.

Qwen3-30B-A3B's layer by default: T = 16384 tokens, K = 8, H = 2048, I = 768, E = 128, bf16. Each kernel is
compared with its plain form before it is timed. Bytes are what the kernel has to move (docstrings of
`forebay.kernels`); `copy` is a device copy of 1 GiB, read and write counted. The last rows are the whole
operation: forward, forward + backward, TFLOP/s of the grouped GEMMs over the whole time, and the peak of
allocated memory over inputs and parameters.

    python benchmarks/experts.py
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from common import GIB, median_ms, settle_memory, write

from forebay.kernels.permute import combine_rows, gather_rows
from forebay.kernels.swiglu import Glu, swiglu_backward, swiglu_forward
from forebay.moe.experts import experts
from forebay.moe.grouped import rows_by_matrix, rows_by_rows
from forebay.moe.routing import route


def timed(name: str, call: Callable[[], Any], moved: float = 0.0, flops: float = 0.0) -> dict:
    """One row of the table: `moved` bytes and `flops` a call; 0 leaves the column empty."""
    for _ in range(3):
        call()
    ms, _ = median_ms(call, 20)
    return {
        "what": name,
        "ms": ms,
        "TB/s": moved / ms / 1e9 if moved else None,
        "TFLOP/s": flops / ms / 1e9 if flops else None,
    }


def check(name: str, call: Callable[..., Any]) -> None:
    """Triton and plain PyTorch on the same inputs: one bf16 rounding apart at most."""
    for got, want in zip(_tuple(call("triton")), _tuple(call("reference")), strict=True):
        try:
            torch.testing.assert_close(got, want, atol=2e-2, rtol=8e-3)
        except AssertionError as error:
            raise SystemExit(f"{name} is wrong, not timed: {error}") from error


def _tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("T", 16384), ("K", 8), ("H", 2048), ("I", 768), ("E", 128)):
        parser.add_argument(f"-{name}", type=int, default=default)
    parser.add_argument("--gpt-oss", action="store_true", help="biases, interleaved, clamped")
    args = parser.parse_args()
    tokens, k, hidden, inner, num = args.T, args.K, args.H, args.I, args.E
    rows = tokens * k
    torch.manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale

    glu = Glu("clamped_swiglu", True) if args.gpt_oss else Glu()
    x, weights = randn(tokens, hidden), torch.rand(tokens, k, device="cuda")
    ids = torch.rand(tokens, num, device="cuda").topk(k).indices
    order, inverse, offs = route(ids, num)
    h, da, wide = randn(rows, 2 * inner), randn(rows, inner), randn(rows, hidden)

    check("gather_rows", lambda b: gather_rows(x, order, offs, k, backend=b))
    check("combine_rows", lambda b: combine_rows(wide, inverse, backend=b))
    check("swiglu_forward", lambda b: swiglu_forward(h, weights, order, offs, glu, backend=b))
    check(
        "swiglu_backward",
        lambda b: swiglu_backward(h, da, weights, order, offs, glu, backend=b)[:2],
    )

    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    table = [timed("copy", lambda: target.copy_(source), 2 * GIB)]
    del source, target
    table += [
        timed("route", lambda: route(ids, num)),
        timed("gather_rows", lambda: gather_rows(x, order, offs, k), 4 * rows * hidden),
        timed(
            "combine_rows",
            lambda: combine_rows(wide, inverse),
            2 * rows * hidden + 2 * tokens * hidden,
        ),
        timed(
            "swiglu_forward",
            lambda: swiglu_forward(h, weights, order, offs, glu),
            6 * rows * inner,
        ),
        timed(
            "swiglu_backward",
            lambda: swiglu_backward(h, da, weights, order, offs, glu),
            12 * rows * inner,
        ),
    ]

    shapes = (num, 2 * inner, hidden), (num, hidden, inner)
    if args.gpt_oss:
        shapes = (num, hidden, 2 * inner), (num, inner, hidden)
    gate_up, down = (randn(*s, scale=0.02).requires_grad_() for s in shapes)
    first, second = gate_up.detach(), down.detach()
    if not args.gpt_oss:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    one = 2 * rows * hidden * inner
    table += [
        timed("gate_up GEMM", lambda: rows_by_matrix(wide, first, offs), flops=2 * one),
        timed("down GEMM", lambda: rows_by_matrix(da, second, offs), flops=one),
        timed("d_gate_up GEMM", lambda: rows_by_rows(h, wide, offs), flops=2 * one),
        timed("d_down GEMM", lambda: rows_by_rows(wide, da, offs), flops=one),
    ]
    del h, da, wide

    extra: dict[str, Any] = {}
    if args.gpt_oss:
        extra = {
            "gate_up_bias": randn(num, 2 * inner).requires_grad_(),
            "down_bias": randn(num, hidden).requires_grad_(),
            "activation": glu.kind, "interleaved": True, "transposed": True,
        }  # fmt: skip
    x.requires_grad_()
    weights.requires_grad_()
    dy = torch.randn_like(x)
    trained = [x, weights, gate_up, down, *(t for t in extra.values() if torch.is_tensor(t))]
    for save_h in (True, False):

        def forward(save_h: bool = save_h) -> torch.Tensor:
            return experts(x, ids, weights, gate_up, down, save_h=save_h, **extra)

        def step(forward: Callable[[], torch.Tensor] = forward) -> None:
            torch.autograd.grad(forward(), trained, dy)

        name = "experts" if save_h else "experts, h made again"
        for part, call, flops in (
            ("forward", forward, 3 * one),
            ("forward + backward", step, 9 * one),
        ):
            row = timed(f"{name}: {part}", call, flops=flops)
            settle_memory()
            base = torch.cuda.memory_allocated()
            call()
            row["peak MiB"] = (torch.cuda.max_memory_allocated() - base) / 2**20
            table.append(row)
    write("experts-gpt-oss" if args.gpt_oss else "experts", table)


if __name__ == "__main__":
    main()
