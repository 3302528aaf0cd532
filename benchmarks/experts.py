"""The experts of one layer, and each of their row kernels against the copy bandwidth.

The default is Qwen3-30B-A3B's layer: T = 16384 tokens, K = 8, H = 2048, I = 768, E = 128, bf16. Each kernel is compared
with its reference before it is timed. Bytes are those that the kernel has to move (docstrings of `forebay.kernels`);
`copy` is a device copy of 1 GiB, read and write. The last rows are the whole operation: forward, forward + backward,
its GEMMs' FLOPs over all of the time, and the peak of allocated memory over inputs and parameters.

    python benchmarks/experts.py
    python benchmarks/experts.py --gpt-oss -K 4 -H 2880 -I 2880 -E 32
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from common import GIB, median_ms, settle_memory, write

from forebay.kernels.permute import combine_rows, gather_rows
from forebay.kernels.swiglu import Glu, swiglu_backward, swiglu_forward
from forebay.moe.experts import experts
from forebay.moe.experts_op import rows_by_matrix, rows_by_rows
from forebay.moe.routing import route


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def timed(name: str, call: Callable[[], Any], moved: float = 0.0, flops: float = 0.0) -> dict:
    """One row of the table, with `moved` bytes and `flops` a call; 0 leaves a column empty."""
    for _ in range(3):
        call()
    ms, _ = median_ms(call, 20)
    return {
        "what": name,
        "ms": ms,
        "TB/s": moved / ms / 1e9 if moved else None,
        "TFLOP/s": flops / ms / 1e9 if flops else None,
    }


def check(name: str, call: Callable[..., tuple]) -> None:
    """Compare Triton with the reference on the same inputs: at most one bf16 rounding apart."""
    for got, want in zip(call("triton"), call("reference"), strict=True):
        try:
            torch.testing.assert_close(got, want, atol=2e-2, rtol=8e-3)
        except AssertionError as error:
            raise SystemExit(f"{name} is wrong, not timed: {error}") from error


def kernels(args: argparse.Namespace) -> list[dict]:
    """The copy, the row kernels and the grouped GEMMs of one layer."""
    tokens, k, hidden, inner, num = args.T, args.K, args.H, args.I, args.E
    rows = tokens * k
    glu = Glu("clamped_swiglu", True) if args.gpt_oss else Glu()
    x, weights = randn(tokens, hidden), torch.rand(tokens, k, device="cuda")
    ids = torch.rand(tokens, num, device="cuda").topk(k).indices
    order, inverse, offs = route(ids, num)
    h, da, wide = randn(rows, 2 * inner), randn(rows, inner), randn(rows, hidden)
    gate_up, down = randn(num, hidden, 2 * inner), randn(num, inner, hidden)
    if not args.gpt_oss:
        gate_up = gate_up.transpose(1, 2).contiguous().transpose(1, 2)
        down = down.transpose(1, 2).contiguous().transpose(1, 2)
    calls: dict[str, tuple[Callable[..., tuple], float]] = {
        "gather_rows": (
            lambda b: (gather_rows(x, order, offs, k, backend=b),),
            4 * rows * hidden,
        ),
        "combine_rows": (
            lambda b: (combine_rows(wide, inverse, backend=b),),
            2 * (rows + tokens) * hidden,
        ),
        "swiglu_forward": (
            lambda b: (swiglu_forward(h, weights, order, offs, glu, backend=b),),
            6 * rows * inner,
        ),
        "swiglu_backward": (
            lambda b: swiglu_backward(h, da, weights, order, offs, glu, backend=b)[:2],
            12 * rows * inner,
        ),
    }
    source, target = (torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    table = [timed("copy", lambda: target.copy_(source), 2 * GIB)]
    table.append(timed("route", lambda: route(ids, num)))
    for name, (call, moved) in calls.items():
        check(name, call)
        table.append(timed(name, lambda call=call: call("auto"), moved))
    one = 2 * rows * hidden * inner
    table += [
        timed("gate_up GEMM", lambda: rows_by_matrix(wide, gate_up, offs), flops=2 * one),
        timed("down GEMM", lambda: rows_by_matrix(da, down, offs), flops=one),
        timed("d_gate_up GEMM", lambda: rows_by_rows(h, wide, offs), flops=2 * one),
        timed("d_down GEMM", lambda: rows_by_rows(wide, da, offs), flops=one),
    ]
    return table


def operation(args: argparse.Namespace) -> list[dict]:
    """`experts` as a whole, with h saved and with h recomputed."""
    tokens, k, hidden, inner, num = args.T, args.K, args.H, args.I, args.E
    x, weights = randn(tokens, hidden), torch.rand(tokens, k, device="cuda")
    ids = torch.rand(tokens, num, device="cuda").topk(k).indices
    extra: dict[str, Any] = {}
    if args.gpt_oss:
        gate_up, down = randn(num, hidden, 2 * inner), randn(num, inner, hidden)
        extra = {
            "gate_up_bias": randn(num, 2 * inner),
            "down_bias": randn(num, hidden),
            "activation": "clamped_swiglu",
            "interleaved": True,
            "transposed": True,
        }
    else:
        gate_up, down = randn(num, 2 * inner, hidden), randn(num, hidden, inner)
    biases = [t for t in extra.values() if isinstance(t, torch.Tensor)]
    trained = [t.requires_grad_() for t in (x, weights, gate_up, down, *biases)]
    dy = randn(tokens, hidden)
    one = 2 * tokens * k * hidden * inner
    table = []
    for save_h in (True, False):

        def forward(save_h: bool = save_h) -> torch.Tensor:
            return experts(x, ids, weights, gate_up, down, save_h=save_h, **extra)

        def step(forward: Callable[[], torch.Tensor] = forward) -> None:
            torch.autograd.grad(forward(), trained, dy)

        name = "experts" if save_h else "experts, h made again"
        for part, call, flops in (("forward", forward, 3), ("forward + backward", step, 9)):
            row = timed(f"{name}: {part}", call, flops=flops * one)
            settle_memory()
            base = torch.cuda.memory_allocated()
            call()
            row["peak MiB"] = (torch.cuda.max_memory_allocated() - base) / 2**20
            table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("T", 16384), ("K", 8), ("H", 2048), ("I", 768), ("E", 128)):
        parser.add_argument(f"-{name}", type=int, default=default)
    parser.add_argument("--gpt-oss", action="store_true", help="biases, interleaved, clamped")
    args = parser.parse_args()
    torch.manual_seed(0)
    write("experts-gpt-oss" if args.gpt_oss else "experts", kernels(args) + operation(args))


if __name__ == "__main__":
    main()
