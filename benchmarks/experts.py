"""The experts of one layer, and each of their row kernels against the copy bandwidth.

The default is Qwen3-30B-A3B's layer: T = 16384 tokens, K = 8, H = 2048, I = 768, E = 128, bf16. Each kernel is compared
with its reference before it is timed. Bytes are those that the kernel has to move (docstrings of `forebay.kernels`);
`copy` is a device copy of 1 GiB, read and write. The last rows are the whole operation: forward, forward + backward,
its GEMMs' FLOPs over all of the time, and the peak of allocated memory over inputs and parameters.

    python benchmarks/experts.py
    python benchmarks/experts.py --gpt-oss -K 4 -H 2880 -I 2880 -E 32
    python benchmarks/experts.py --low-rank 16      # updates of this rank on frozen experts
    python benchmarks/experts.py --sonic            # against SonicMoE at the shapes of three models

With ``--low-rank``, each product of the updates is timed beside the grouped GEMM and the additions that it stands for
("grouped_mm"), and the operation without updates, with gate_up and down frozen, beside the operation with them.

With ``--sonic``, outputs and gradients are compared before anything is timed; "held" is what a forward leaves allocated for its
backward, "peak" the most that both together allocate, and the ratios are Forebay's figure over SonicMoE's. Forebay is measured
with its own kernels, and with those of quack-kernels where the package is installed and the GPU is a Hopper ("forebay, hopper").
"""

import argparse
from collections.abc import Callable
from typing import Any
from unittest import mock

import sonic
import torch
from common import GIB, median_ms, peak_of, save, settle_memory, write

import forebay.kernels.hopper as hopper
from forebay.kernels.grouped import rows_by_matrix, rows_by_rows
from forebay.kernels.low_rank import Gathered, add_widened, narrow_rows, sum_outer
from forebay.kernels.permute import combine_rows, gather_rows
from forebay.kernels.swiglu import Glu, swiglu_backward, swiglu_forward
from forebay.moe.experts import experts
from forebay.moe.low_rank import LowRank
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
        "gather_rows": (lambda b: (gather_rows(x, order, offs, k, backend=b),), 4 * rows * hidden),
        "combine_rows": (lambda b: (combine_rows(wide, inverse, backend=b),), 2 * (rows + tokens) * hidden),
        "swiglu_forward": (lambda b: (swiglu_forward(h, weights, order, offs, glu, backend=b),), 6 * rows * inner),
        "swiglu_backward": (
            # It writes over its second argument; what is timed need not begin from the same values.
            lambda b: swiglu_backward(h, da if b == "auto" else da.clone(), weights, order, offs, glu, backend=b)[:2],
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
            table.append({**row, "peak MiB": peak_of(call) / 2**20})
    return table


def low_rank_products(args: argparse.Namespace) -> list[dict]:
    """The products of updates of gate_up and down, each against the grouped GEMMs and additions that it stands for.

    Results are compared before anything is timed. "all products" is a forward and backward.
    """
    tokens, k, hidden, inner, num, rank = args.T, args.K, args.H, args.I, args.E, args.low_rank
    rows = tokens * k
    order, inverse, offs = route(torch.rand(tokens, num, device="cuda").topk(k).indices, num)
    x, low, narrow = randn(tokens, hidden), randn(rows, rank), {}
    gathered, x_rows = Gathered(x, order, k), gather_rows(x, order, offs, k)
    wide = {width: randn(rows, width) for width in (hidden, 2 * inner, inner)}
    for width in wide:
        narrow[width] = randn(num, rank, width, scale=0.1)
    sums = {width: torch.empty(num, rank, width, device="cuda") for width in wide}

    def gather() -> torch.Tensor:
        return gather_rows(x, order, offs, k)

    def narrowed(source: torch.Tensor) -> torch.Tensor:
        return rows_by_matrix(source, narrow[source.shape[1]].transpose(1, 2), offs)

    def low_of(source: Any, width: int, **more: Any) -> torch.Tensor:
        return narrow_rows(source, narrow[width], offs, **more)[0]

    def widened(width: int) -> torch.Tensor:
        return rows_by_matrix(low, narrow[width], offs)

    def outer(source: Any, width: int) -> torch.Tensor:
        sum_outer(source, low, offs, sums[width])
        return sums[width]

    def add(to: torch.Tensor) -> torch.Tensor:
        add_widened(to, low, narrow[to.shape[1]], offs)
        return to

    def add_and_combine(width: int) -> torch.Tensor:
        return combine_rows(add(torch.zeros_like(wide[width])), inverse)

    h, both = hidden, 2 * inner
    # name; how many of it; bytes that the one kernel moves; before; now; now for the comparison, if another.
    products: list[tuple[str, int, int, Callable[[], Any], Callable[[], Any], Callable[[], Any] | None]] = [
        ("gather, low", 2, 4 * h, lambda: narrowed(gather()), lambda: low_of(gathered, h, keep_rows=True), None),
        ("low of x", 1, 2 * h, lambda: narrowed(x_rows), lambda: low_of(gathered, h), None),
        ("dlow of dh", 1, 2 * both, lambda: narrowed(wide[both]), lambda: low_of(wide[both], both), None),
        ("low of act", 2, 2 * inner, lambda: narrowed(wide[inner]), lambda: low_of(wide[inner], inner), None),
        ("h +=", 1, 4 * both, lambda: wide[both].add_(widened(both)), lambda: add(wide[both]), None),
        ("da +=", 1, 4 * inner, lambda: wide[inner].add_(widened(inner)), lambda: add(wide[inner]), None),
        ("y +=, dx +=", 2, 4 * h, lambda: combine_rows(widened(h), inverse), lambda: add(wide[h]), lambda: add_and_combine(h)),
        ("x by low", 1, 2 * h, lambda: rows_by_rows(low, gather(), offs), lambda: outer(gathered, h), None),
        ("dy by low", 1, 2 * h, lambda: rows_by_rows(low, x_rows, offs), lambda: outer(gathered, h), None),
        ("dh by low", 1, 2 * both, lambda: rows_by_rows(low, wide[both], offs), lambda: outer(wide[both], both), None),
        ("act by low", 1, 2 * inner, lambda: rows_by_rows(low, wide[inner], offs), lambda: outer(wide[inner], inner), None),
    ]  # fmt: skip
    table: list[dict] = []
    totals = [0.0, 0.0]
    for name, count, moved, before, now, compared in products:
        kept = {width: t.clone() for width, t in wide.items()}
        want = before().float()
        wide.update(kept)
        error = ((compared or now)().float() - want).abs().max() / want.abs().max()
        if not error < 2e-2:
            raise SystemExit(f"{name} is wrong, not timed: off by {error:.3g} of the largest value")
        pair = [timed(f"{name}: grouped_mm", before), timed(f"{name}: one kernel", now, moved * rows)]
        totals = [total + count * row["ms"] for total, row in zip(totals, pair, strict=True)]
        table += pair
    return [
        *table,
        *({"what": f"all products: {n}", "ms": t} for n, t in zip(("grouped_mm", "one kernel"), totals, strict=True)),
    ]


def low_rank_operation(args: argparse.Namespace) -> list[dict]:
    """Forward and backward of `experts` with frozen stacks, without updates and with them (fp32 factors, laid out as PEFT's)."""
    tokens, k, hidden, inner, num, rank = args.T, args.K, args.H, args.I, args.E, args.low_rank
    x, weights, dy = randn(tokens, hidden), torch.rand(tokens, k, device="cuda"), randn(tokens, hidden)
    ids = torch.rand(tokens, num, device="cuda").topk(k).indices
    gate_up, down = randn(num, 2 * inner, hidden, scale=0.02), randn(num, hidden, inner, scale=0.02)
    factors = {
        name: (torch.randn(num * rank, inputs, device="cuda"), torch.randn(outputs, rank * num, device="cuda") * 0.01)
        for name, inputs, outputs in (("gate_up", hidden, 2 * inner), ("down", inner, hidden))
    }
    updates = {
        f"{name}_update": LowRank(
            a.requires_grad_().view(num, rank, -1), b.requires_grad_().view(-1, rank, num).permute(2, 0, 1), 2.0
        )
        for name, (a, b) in factors.items()
    }
    for t in (x, weights):
        t.requires_grad_()
    table = []
    for name, given in (("without updates", {}), ("with updates", updates)):
        trained = [x, weights, *(t for pair in factors.values() for t in pair if given)]
        for save_h in (True, False):

            def step(given: Any = given, trained: Any = trained, save_h: bool = save_h) -> None:
                y = experts(x, ids, weights, gate_up, down, save_h=save_h, **given)
                torch.autograd.grad(y, trained, dy)

            row = timed(f"experts {name}{'' if save_h else ', h made again'}", step)
            table.append({**row, "peak MiB": peak_of(step) / 2**20})
    return table


SONIC_SHAPES = {
    "qwen3-30b-a3b": (16384, 8, 2048, 768, 128),
    "deepseek-v2-lite": (16384, 6, 2048, 1408, 64),
    "olmoe": (16384, 8, 2048, 1024, 64),
}
"""Routed experts of published models: tokens, experts a token, hidden, width of an expert, experts."""


def measure_whole(forward: Callable[[], torch.Tensor], trained: list[torch.Tensor], dy: torch.Tensor) -> dict:
    def step() -> None:
        torch.autograd.grad(forward(), trained, dy)

    both = timed("", step)["ms"]
    row = {"forward ms": timed("", forward)["ms"], "forward + backward ms": both}
    settle_memory()
    base = torch.cuda.memory_allocated()
    y = forward()
    row["held MiB"] = (torch.cuda.memory_allocated() - base) / 2**20
    torch.autograd.grad(y, trained, dy)
    row["peak MiB"] = (torch.cuda.max_memory_allocated() - base) / 2**20
    return row


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


HOPPER = "forebay, hopper"
SONIC_COMPILES_WITHIN = 300.0
"""Seconds, after which the arm is left out: a first call that hangs must not take the other figures with it."""


def arm_of(arm: str, given: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A forward of these experts. "forebay" leaves the kernels of `forebay.kernels.hopper` unused."""
    if arm == "sonicmoe":
        return sonic.experts(*given)
    if arm == HOPPER and not hopper.handles(*given[3:]):
        raise RuntimeError("the kernels for Hopper GPUs are not ready")

    def forward() -> torch.Tensor:
        if arm == HOPPER:
            return experts(*given)
        with mock.patch.object(hopper, "handles", return_value=False):
            return experts(*given)

    return forward


def measure_arm(arm: str, shape: sonic.Shape, wanted: tuple[torch.Tensor, ...] | None) -> tuple[dict, tuple]:
    """A row, after a comparison with the results `wanted`, and the results themselves."""
    torch.manual_seed(0)
    given, dy = sonic.inputs(shape)
    trained = [t for t in given if t.requires_grad]
    forward = arm_of(arm, given)
    y = forward()
    got = (y.detach(), *torch.autograd.grad(y, trained, dy))
    del y
    row: dict[str, Any] = {}
    if wanted is not None:
        row["largest relative error"] = max(map(relative_error, got, wanted))
        if not row["largest relative error"] < 0.05:
            raise RuntimeError(f"results differ by {row['largest relative error']:.3g}, not timed")
        got = ()
    return row | measure_whole(forward, trained, dy), got


def against_sonic() -> None:
    """Rows of all arms for each shape, written as they come; one that fails says why."""
    missing = ""
    table: list[dict] = []
    results: dict[str, tuple[torch.Tensor, ...]] = {}
    # SonicMoE comes last: what was measured before it is written, whatever it does.
    for arm in ("forebay", *([HOPPER] if hopper.is_installed() else []), "sonicmoe"):
        if arm == "sonicmoe":
            missing = sonic.wait(sonic.compile_ahead(SONIC_SHAPES.values()), SONIC_COMPILES_WITHIN)
        for name, shape in SONIC_SHAPES.items():
            row: dict[str, Any] = {"shape": name, "arm": arm}
            try:
                if arm == "sonicmoe" and missing:
                    raise RuntimeError(f"its kernels were not compiled: {missing}")
                more, got = measure_arm(arm, shape, results.get(name))
                row |= more
                results.setdefault(name, got)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            table.append(row)
            print(row, flush=True)
            save("experts-sonic", table)
    rows = {(row["shape"], row["arm"]): row for row in table if "peak MiB" in row}
    for name in SONIC_SHAPES:
        for arm in ("forebay", HOPPER):
            if (own := rows.get((name, arm))) and (other := rows.get((name, "sonicmoe"))):
                figures = ("forward ms", "forward + backward ms", "held MiB", "peak MiB")
                table.append(
                    {"shape": name, "arm": f"{arm} / sonicmoe"} | {key: own[key] / other[key] for key in figures}
                )
    write("experts-sonic", table)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("T", 16384), ("K", 8), ("H", 2048), ("I", 768), ("E", 128)):
        parser.add_argument(f"-{name}", type=int, default=default)
    parser.add_argument("--gpt-oss", action="store_true", help="biases, interleaved, clamped")
    parser.add_argument("--low-rank", type=int, metavar="R", help="updates of this rank instead")
    parser.add_argument("--sonic", action="store_true", help="against SonicMoE instead")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.sonic:
        against_sonic()
        return
    if args.low_rank:
        write("experts-low-rank", low_rank_products(args) + low_rank_operation(args))
        return
    write("experts-gpt-oss" if args.gpt_oss else "experts", kernels(args) + operation(args))


if __name__ == "__main__":
    main()
