"""One GPU, one model, every way to hold its activations, side by side in one run.

The model is `qwen3-moe-6l`: Qwen3-MoE, hidden 2048, 6 layers, 32 heads, 4 KV heads of 128, 128 experts top-8 of width
768, vocabulary 32768, bf16, batch 4 x 4096. With ``--model gpt-oss`` it is GPT-OSS at the widths of its 20B: hidden 2880, 4
layers, 64 heads, 8 KV heads of 64, 32 experts top-4 of width 2880, windows of 128 in every other layer, the same vocabulary,
batch 2 x 4096; transformers runs it eagerly, and in one more arm on its own flex_attention. ``mixtral`` and ``deepseek-v2-lite``
are 2 and 6 layers at those models' widths, batch 4 x 4096; ``deepseek-v4`` is 4 layers at DeepSeek-V4-Flash's, but 32 experts of
1024, batch 1 x 4096. A step is forward and backward.
Gradients stay allocated between steps, so the base (memory held before a step) holds weights and gradients, and every arm
adds to the same buffers.

Columns: median step time by CUDA events, its ratio to the first arm, memory after forward over the base, peak over the
base, reserved memory, loss of the first step on freshly seeded weights. R is (peak of keep - peak) / planned bytes. The
keep and offload arms run twice, each for four times the steps, because they differ by less than the noise of ten steps.

With ``--stacks`` each arm without Forebay is compared with Forebay's fastest arm of at most the same peak; `auto` is given the
peak of the fastest of those arms, and the lowest of their peaks. The last row has the largest of the ratios.

    python benchmarks/single_gpu.py            # the table
    python benchmarks/single_gpu.py --model gpt-oss --quick --budgets checkpointing
    python benchmarks/single_gpu.py --stacks   # against SonicMoE, Liger, selective checkpointing (`stacks.py`)
    python benchmarks/single_gpu.py --pairs    # keep against offload, in turn on one model
    python benchmarks/single_gpu.py --check    # gradients, bit for bit, between placements (deterministic kernels)
"""

import argparse
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import sonic
import stacks
import torch
from common import GIB, median_ms, memory_figures, save, settle_memory, sized, until_settled, write
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV4Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

import forebay

Arm = tuple[str, Callable[[Any], AbstractContextManager[Any]], bool]
"""Its name; what is entered; whether it is entered around each forward, and not around the whole run."""


MODELS = {"qwen3-moe": (6, 4), "gpt-oss": (4, 2), "mixtral": (2, 4), "deepseek-v2-lite": (6, 4), "deepseek-v4": (4, 1)}
"""Default layers and batch."""


def config(model: str, layers: int) -> PreTrainedConfig:
    if model == "gpt-oss":
        return GptOssConfig(num_hidden_layers=layers, num_local_experts=32, vocab_size=32768, use_cache=False)
    if model == "mixtral":  # the defaults of transformers are Mixtral-8x7B's widths
        return MixtralConfig(num_hidden_layers=layers, vocab_size=32768, use_cache=False)
    if model == "deepseek-v4":  # so are these, but for the experts
        few = {"n_routed_experts": 32, "moe_intermediate_size": 1024, "vocab_size": 32768, "use_cache": False}
        return DeepseekV4Config(num_hidden_layers=layers, **few)
    kind, widths = {
        "deepseek-v2-lite": (DeepseekV2Config, "deepseek-v2-lite"),
        "qwen3-moe": (Qwen3MoeConfig, "qwen3-30b-a3b"),
    }[model]
    return kind(**sized(widths, num_hidden_layers=layers, vocab_size=32768))


def build(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config(options.model, options.layers), dtype=torch.bfloat16)
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


class Batches:
    """Four different batches, drawn once and taken in turn."""

    def __init__(self, batch: int, sequence: int):
        generator = torch.Generator(device="cuda").manual_seed(1)
        self._all = [torch.randint(0, 32768, (batch, sequence), device="cuda", generator=generator) for _ in range(4)]
        self._next = 0

    def take(self) -> torch.Tensor:
        self._next = (self._next + 1) % len(self._all)
        return self._all[self._next]


@contextmanager
def checkpointed(model: Any) -> Iterator[None]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    yield


@contextmanager
def on_flex_attention(model: Any) -> Iterator[None]:
    model.set_attn_implementation("flex_attention")
    yield


def trl_offload(model: Any) -> AbstractContextManager[Any]:
    from trl.models.activation_offloading import OffloadActivations

    return OffloadActivations()


@contextmanager
def managed(model: Any, **options: Any) -> Iterator[Any]:
    mem = forebay.manage(model, compile=True, **options)
    try:
        yield mem
    finally:
        mem.detach()


def measure(
    name: str, enter: Callable[[Any], AbstractContextManager[Any]], options: argparse.Namespace, per_step: bool
) -> dict[str, Any]:
    """Measure one arm on a new model. `per_step`: `enter` is entered around each forward, not around the whole run."""
    model = build(options)
    batches = Batches(options.batch, options.sequence)
    outer = nullcontext() if per_step else enter(model)
    inner = (lambda: enter(model)) if per_step else nullcontext
    with outer as mem:

        def forward() -> torch.Tensor:
            ids = batches.take()
            with inner():
                return model(input_ids=ids, labels=ids).loss

        first = forward()
        loss = first.item()
        first.backward()
        del first
        if isinstance(mem, forebay.Managed):
            until_settled(mem, lambda: forward().backward())
        for _ in range(5):
            forward().backward()
        _, memory = memory_figures(forward)
        steps = options.steps * (1 if per_step or not name.startswith("forebay") else 4)
        ms, times = median_ms(lambda: forward().backward(), steps)
        row = {
            "arm": name,
            "ms": ms,
            "spread ms": max(times) - min(times),
            **memory,
            "loss": loss,
        }
        if mem is not None and hasattr(mem, "report"):
            report = mem.report()
            row |= {
                "planned GiB": report.planned_bytes / GIB,
                "D2H GB/s": report.d2h_gbps,
                "H2D GB/s": report.h2d_gbps,
                "wait ms": report.wait_ms,
                "recomputed regions": report.recomputed,
            }
    return row


def arms(options: argparse.Namespace, peak_of_checkpointing: Callable[[], int]) -> list[Arm]:
    chosen: list[Arm] = [
        ("transformers", lambda m: nullcontext(), False),
        ("transformers, gradient checkpointing", checkpointed, False),
    ]
    if options.model == "gpt-oss":
        chosen.append(("transformers, its flex_attention", on_flex_attention, False))
    if not options.quick:
        chosen.append(
            ("save_on_cpu(pin_memory=True)", lambda m: torch.autograd.graph.save_on_cpu(pin_memory=True), True)
        )
        if importlib.util.find_spec("trl"):
            chosen.append(("TRL OffloadActivations", trl_offload, False))
        else:
            print("TRL is not installed; its arm is left out")
    chosen += [
        ("forebay keep", lambda m: managed(m, policy="keep"), False),
        ("forebay offload", lambda m: managed(m, policy="offload"), False),
        ("forebay keep, again", lambda m: managed(m, policy="keep"), False),
        ("forebay offload, again", lambda m: managed(m, policy="offload"), False),
    ]

    def auto(model: Any, budget: str) -> AbstractContextManager[Any]:
        size = peak_of_checkpointing() if budget == "checkpointing" else budget
        return managed(model, policy="auto", budget=size)

    for budget in options.budgets:
        chosen.append((f"forebay auto {budget}", lambda m, b=budget: auto(m, b), False))
    return chosen


def attempt(arm: Arm, options: argparse.Namespace) -> dict[str, Any]:
    """The row of an arm; of one that fails, why."""
    name, enter, per_step = arm
    started = time.perf_counter()
    try:
        row = measure(name, enter, options, per_step)
    except Exception as error:
        if options.strict:
            raise
        row = {"arm": name, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    torch._dynamo.reset()
    settle_memory()
    row["seconds"] = time.perf_counter() - started
    print(row, flush=True)
    return row


def table(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []

    def peak_of_checkpointing() -> int:
        return int(GIB * next(row["peak over base GiB"] for row in rows if row["arm"].endswith("checkpointing")))

    for arm in arms(options, peak_of_checkpointing):
        rows.append(attempt(arm, options))
    first = rows[0]
    keeps = [r for r in rows if r["arm"].startswith("forebay keep") and "ms" in r]
    keep_ms = sum(r["ms"] for r in keeps) / max(len(keeps), 1)
    for row in rows:
        if "ms" in row and "ms" in first:
            row["ratio"] = row["ms"] / first["ms"]
            row["after-forward ratio"] = row["after forward GiB"] / first["after forward GiB"]
        if row.get("planned GiB") and keeps:
            if "offload" in row["arm"]:  # recomputed regions would lower the peak by more than the planned bytes
                row["R"] = (keeps[0]["peak over base GiB"] - row["peak over base GiB"]) / row["planned GiB"]
            row["ratio to keep"] = row["ms"] / keep_ms
    file = "single_gpu" if options.model == "qwen3-moe" else f"single_gpu_{options.model.replace('-', '_')}"
    write(file, rows, batch=options.batch, sequence=options.sequence, layers=options.layers, steps=options.steps)


def stack_arms(measured: list[dict[str, Any]], with_sonic: bool) -> Iterator[Arm]:
    """The arms of ``--stacks``. Those of Forebay's `auto` take their budgets from the rows `measured` until then."""

    def given(chosen: tuple[stacks.Stack, ...]) -> list[Arm]:
        return [(stack.name, functools.partial(stacks.entered, stack), False) for stack in chosen]

    yield from given(stacks.BEFORE_SONIC)
    yield ("forebay keep", lambda m: managed(m, policy="keep"), False)
    yield ("forebay offload", lambda m: managed(m, policy="offload"), False)
    if with_sonic:
        yield from given(stacks.WITH_SONIC)
    others = [row for row in measured if "ms" in row and not row["arm"].startswith("forebay")]
    fastest = min(others, key=lambda row: row["ms"])["peak over base GiB"]
    lowest = min(row["peak over base GiB"] for row in others)
    for budget in sorted({fastest, lowest}):
        yield (
            f"forebay auto {budget:.2f}GiB",
            lambda m, b=budget: managed(m, policy="auto", budget=int(b * GIB)),
            False,
        )
    if with_sonic:
        yield from given(stacks.COMPILED)


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `stack_arms` with the comparison that the module's docstring describes."""
    ours = [row for row in rows if "ms" in row and row["arm"].startswith("forebay")]
    done: list[dict[str, Any]] = []
    for row in rows:
        done.append(dict(row))
        if "ms" in row and not row["arm"].startswith("forebay"):
            within = [own for own in ours if own["peak over base GiB"] <= row["peak over base GiB"]]
            best = min(within, key=lambda own: own["ms"], default=None)
            done[-1]["forebay within its peak"] = best["arm"] if best else "none"
            done[-1]["forebay / it"] = best["ms"] / row["ms"] if best else None
    worst = max((row for row in done if row.get("forebay / it")), key=lambda row: row["forebay / it"], default=None)
    last = {"arm": "the largest ratio (bar: 0.85)"}
    return [
        *done,
        last | {"forebay within its peak": worst["arm"], "forebay / it": worst["forebay / it"]} if worst else last,
    ]


def against_stacks(options: argparse.Namespace) -> None:
    tokens = options.batch * options.sequence
    compiles = sonic.compile_ahead([(tokens, 8, 2048, 768, 128)]) if sonic.is_installed() else []
    if not compiles:
        print("sonic-moe and quack-kernels are not installed; their arms are left out")
    sizes = {"batch": options.batch, "sequence": options.sequence, "layers": options.layers, "steps": options.steps}
    rows: list[dict[str, Any]] = []
    for process in compiles:  # beside the arms they would slow their launches
        process.wait()
    for arm in stack_arms(rows, bool(compiles)):
        rows.append(attempt(arm, options))
        save("single_gpu_stacks", compared(rows), **sizes)
    write("single_gpu_stacks", compared(rows), **sizes)


def gradients(
    model: Any, options: argparse.Namespace, policy: Any, **more: Any
) -> tuple[torch.Tensor, list[torch.Tensor], int, int]:
    mem = forebay.manage(model, policy=policy, compile=True, **more)
    for step in range(64):
        if step >= 4 and mem.settled:  # the plan is tested, not the steps that measure and try
            break
        batches = Batches(options.batch, options.sequence)
        for parameter in model.parameters():
            parameter.grad.zero_()
        ids = batches.take()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    moved = mem.report()
    print(
        policy,
        more,
        "planned",
        moved.planned_bytes,
        "recomputed",
        moved.recomputed,
        set(mem.placements.values()),
        flush=True,
    )
    mem.detach()
    gradients = [p.grad.clone() for p in model.parameters()]
    return loss.detach(), gradients, moved.planned_bytes, moved.recomputed


def check(options: argparse.Namespace) -> None:
    """Compare loss and every gradient with those of keep; keep runs twice to show that it repeats itself."""
    torch.use_deterministic_algorithms(True)
    model = build(options)
    reference = gradients(model, options, "keep")
    rows = []
    for name, policy, more in (
        ("keep again", "keep", {}),
        ("offload", "offload", {}),
        ("offload all", "offload", {"offload": "all"}),
        ("recompute", "recompute", {}),
        ("auto", "auto", {"budget": options.budgets[0]}),
    ):
        loss, grads, planned, recomputed = gradients(model, options, policy, **more)
        different = [
            n
            for (n, _), a, b in zip(model.named_parameters(), grads, reference[1], strict=True)
            if not torch.equal(a, b)
        ]
        rows.append(
            {
                "arm": name,
                "loss equal": torch.equal(loss, reference[0]),
                "gradients": len(grads),
                "different": len(different),
            }
        )
        rows[-1] |= {"planned GiB": planned / GIB, "recomputed regions": recomputed}
        if different:
            print(name, different[:12])
        del grads
    write("single_gpu_bitwise", rows)


def pairs(options: argparse.Namespace) -> None:
    """Time keep and offload in turn on one model: they differ by less than two separate runs."""
    model = build(options)
    batches = Batches(options.batch, options.sequence)

    def step() -> None:
        ids = batches.take()
        model(input_ids=ids, labels=ids).loss.backward()

    rows = []
    pooled: dict[str, list[float]] = {"keep": [], "offload": []}
    for round_ in range(options.rounds):
        for policy in ("keep", "offload") if round_ % 2 == 0 else ("offload", "keep"):
            with managed(model, policy=policy) as mem:
                for _ in range(6):
                    step()
                torch.cuda.synchronize()
                ms, times = median_ms(step, 3 * options.steps)
                planned = mem.report().planned_bytes
            pooled[policy] += times
            rows.append({"round": round_, "arm": policy, "median ms": ms, "planned GiB": planned / GIB})
            print(rows[-1], flush=True)
    medians = {policy: statistics.median(times) for policy, times in pooled.items()}
    ratio = medians["offload"] / medians["keep"]
    rows.append({"round": "all", "arm": "offload / keep", "median ms": medians["offload"], "ratio": ratio})
    write("single_gpu_pairs", rows, steps=3 * options.steps, medians=medians, ratio=ratio)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="qwen3-moe")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=0, help="default: 6, of gpt-oss 4, of mixtral 2")
    parser.add_argument("--batch", type=int, default=0, help="default: 4, of gpt-oss 2")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument(
        "--budgets",
        nargs="*",
        default=["3.8GiB", "4GiB", "4.9GiB", "6GiB"],
        help="'checkpointing' is that arm's peak in this run",
    )
    parser.add_argument("--quick", action="store_true", help="leave out the arms that take seconds a step")
    parser.add_argument("--strict", action="store_true", help="stop at the first arm that fails")
    parser.add_argument("--stacks", action="store_true", help="against what users combine, without --budgets")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--pairs", action="store_true", help="keep against offload, in turn")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    layers, batch = MODELS[options.model]
    options.layers, options.batch = options.layers or layers, options.batch or batch
    run = check if options.check else pairs if options.pairs else against_stacks if options.stacks else table
    run(options)


if __name__ == "__main__":
    main()
