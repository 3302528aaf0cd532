"""LoRA fine-tuning on one GPU: transformers with PEFT, with gradient checkpointing, with Liger's loss, and Forebay.

The model is Qwen3-MoE at the widths of Qwen3-30B-A3B in bf16 with random weights, all frozen but the adapters (r = 16, on q, k, v
and o; with ``--experts`` on the experts' stacked weights too, which PEFT calls `target_parameters`). A step is forward and
backward. The base (memory held before a step) holds weights, adapters and the adapters' gradients.

Columns: median step time by CUDA events and its ratio to the first arm, memory after forward and peak over the base, reserved
memory, loss of the first step. Arms named by a budget get that share of checkpointing's peak. With ``--profile`` every arm prints
where the GPU's time goes, how long it idles and what the host does meanwhile (`step_profile.py`).

``--longest`` finds the longest sequence of each arm, with attention that allocates and computes nothing (`hollow_attention.py`);
``--hollow`` shows that a table's peaks are the same with it.

    python benchmarks/lora.py                       # 6 layers, vocabulary 32768, 4 x 4096 tokens
    python benchmarks/lora.py --experts             # adapters on the experts as well
    python benchmarks/lora.py --experts --profile --only keep
    python benchmarks/lora.py --layers 48 --vocabulary 151936 --batch 1 --sequence 16384 --memory 79 --name lora_30b
    python benchmarks/lora.py --layers 48 --vocabulary 151936 --batch 1 --longest --name lora_30b_longest
"""

import argparse
import gc
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from common import GIB, median_ms, memory_figures, settle_memory, sized, until_settled, write
from hollow_attention import hollow_attention
from peft import LoraConfig, get_peft_model
from step_profile import print_profile
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import forebay
from forebay.policy import BudgetError

LIGHT = {"*": "keep", "*.mlp": "recompute"}
LAYERS = {"model.layers.*": "recompute"}
HOST_LAYERS = {"model.layers.*": "recompute+offload"}
HEADS, KV_HEADS, WIDTH = 32, 4, 128  # of Qwen3-30B-A3B
STEP = 8192
"""``--longest`` tries multiples of this many tokens."""


@dataclass(frozen=True)
class Arm:
    """How a step holds its activations: options of `forebay.manage`, or transformers' own means."""

    name: str
    manage: dict[str, Any] | None = None
    budget_share: float | None = None
    """The budget, as a share of checkpointing's peak."""
    checkpointing: bool = False
    liger: bool = False


def arms(shares: list[float]) -> list[Arm]:
    found = [
        Arm("transformers + PEFT"),
        Arm("the same, gradient checkpointing", checkpointing=True),
        Arm("forebay keep", {"policy": "keep"}),
        Arm("forebay, experts recomputed", {"policy": LIGHT}),
        Arm("forebay offload", {"policy": "offload"}),
        Arm("forebay, layers recomputed", {"policy": LAYERS}),
        Arm("forebay, layers recomputed from the host", {"policy": HOST_LAYERS, "offload": "all"}),
        *(Arm(f"forebay auto, {s:g} of checkpointing's peak", {"policy": "auto"}, s) for s in shares),
    ]
    if importlib.util.find_spec("liger_kernel") is not None:
        found.insert(2, Arm("checkpointing, Liger's loss", checkpointing=True, liger=True))
    return found


def build(options: argparse.Namespace, sequence: int) -> Any:
    """The adapted model on the GPU, in training mode; B starts random, or the adapters' A would get no gradient."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": options.layers, "vocab_size": options.vocabulary, "max_position_embeddings": sequence}
    config = Qwen3MoeConfig(**sized("qwen3-30b-a3b", **sizes))
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
        stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if options.experts else None
        lora = LoraConfig(
            r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=stacks
        )
        model = get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return model.train()


@contextmanager
def installed(model: Any, arm: Arm, budget: int | None) -> Iterator[Any]:
    """`model` under the arm; yields the `forebay.Managed`, or None."""
    if arm.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe

        apply_liger_kernel_to_qwen3_moe(
            rope=False, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=False, swiglu=False,
            model=model.get_base_model(),
        )  # fmt: skip
    if arm.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if arm.manage is None:
        yield None
        return
    with forebay.manage(model, compile=True, budget=budget, **arm.manage) as managed:
        yield managed


def measure(arm: Arm, options: argparse.Namespace, sequence: int, budget: int | None) -> dict[str, Any]:
    model = build(options, sequence)
    generator = torch.Generator(device="cuda").manual_seed(1)
    size = (options.batch, sequence)
    batches = [torch.randint(0, options.vocabulary, size, device="cuda", generator=generator) for _ in range(4)]

    def forward() -> torch.Tensor:
        batches.append(batches.pop(0))
        loss: torch.Tensor = model(input_ids=batches[0], labels=batches[0]).loss
        return loss

    with installed(model, arm, budget) as managed:
        loss = forward()
        first = loss.item()
        loss.backward()
        del loss
        if managed is not None:
            until_settled(managed, lambda: forward().backward())
        for _ in range(3):
            forward().backward()
        base, memory = memory_figures(forward)
        ms, times = median_ms(lambda: forward().backward(), options.steps)
        if options.profile:
            print_profile(arm.name, lambda: forward().backward())
    return {
        "arm": arm.name,
        "tokens": options.batch * sequence,
        "ms": ms,
        "spread ms": max(times) - min(times),
        "tokens/s": options.batch * sequence / ms * 1e3,
        **memory,
        "base GiB": base / GIB,
        "loss": first,
    }


def _reclaimed(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` returns, or the error: out of memory, or a budget that cannot be met. Its memory is free afterwards."""
    failed = None
    try:
        return run()
    except (torch.OutOfMemoryError, BudgetError) as error:
        failed = {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        # Outside the `except`: its traceback holds the tensors of the failed step.
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return failed


def table(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    checkpointed: dict[str, Any] = {}
    for arm in arms(options.shares):
        if options.only and not any(word in arm.name for word in options.only):
            continue
        budget = None
        if arm.budget_share is not None:
            if "ms" not in checkpointed:
                continue
            budget = int(arm.budget_share * checkpointed["peak over base GiB"] * GIB)
        row = {"arm": arm.name, "tokens": options.batch * options.sequence}
        row |= _reclaimed(lambda arm=arm, budget=budget: measure(arm, options, options.sequence, budget))  # type: ignore[misc]
        if budget is not None:
            row["budget GiB"] = budget / GIB
        if arm.checkpointing and not arm.liger:
            checkpointed = row
        rows.append(row)
        for name, other in (("ratio", rows[0]), ("ratio to checkpointing", checkpointed)):
            if "ms" in row and "ms" in other:
                row[name] = row["ms"] / other["ms"]
        print(row, flush=True)
    return rows


def longest(options: argparse.Namespace) -> list[dict[str, Any]]:
    """For each arm the longest sequence that runs, in units of `STEP` tokens, without times: attention computes nothing."""
    rows = []
    with hollow_attention("cuda", HEADS, KV_HEADS, WIDTH):
        for arm in arms([]):
            if options.only and not any(word in arm.name for word in options.only):
                continue
            rows.append(_reclaimed(lambda arm=arm: _longest_of(arm, options)))  # type: ignore[misc]
            print(rows[-1], flush=True)
    return rows


def _longest_of(arm: Arm, options: argparse.Namespace) -> dict[str, Any]:
    model = build(options, options.most * STEP)
    room = options.memory * GIB if options.memory is not None else torch.cuda.mem_get_info()[1]
    with installed(model, arm, None) as managed:

        def peak(n: int) -> int | None:
            """Peak of allocated bytes of a step of n * STEP tokens; None if memory does not suffice."""
            try:
                return _peak(model, managed, options, n * STEP)
            except torch.OutOfMemoryError:
                return None
            finally:
                gc.collect()
                torch.cuda.empty_cache()

        best, tried = _longest(peak, room, options.most)
    peaks = {n * STEP: None if found is None else found / GIB for n, found in tried.items()}
    return {"arm": arm.name, "tokens": best * STEP, "peak GiB": peaks.get(best * STEP), "peaks GiB": peaks}


def _peak(model: Any, managed: Any, options: argparse.Namespace, sequence: int) -> int:
    def step() -> None:
        ids = torch.randint(0, options.vocabulary, (options.batch, sequence), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()

    step()
    if managed is not None:
        until_settled(managed, step)
    settle_memory()
    step()
    return torch.cuda.max_memory_allocated()


def _longest(peak: Callable[[int], int | None], room: float, most: int) -> tuple[int, dict[int, int | None]]:
    """(the largest n up to `most` for which `peak(n)` is not None, or 0; what was tried). Peaks rise linearly: the line through
    those of 1 and 2 says where to begin, then n moves by a thirty-second."""
    tried: dict[int, int | None] = {n: peak(n) for n in range(1, min(most, 2) + 1)}
    first, second = tried[1], tried.get(2)
    if first is None or second is None:
        return sum(found is not None for found in tried.values()), tried
    n = max(2, min(most, 2 + int((room - second) / max(second - first, 1))))
    while n <= most and n not in tried:
        tried[n] = peak(n)
        move = max(1, n // 32)
        n = min(n + move, most) if tried[n] is not None else n - move
    return max(n for n, found in tried.items() if found is not None), tried


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--experts", action="store_true", help="adapters on the experts as well")
    parser.add_argument("--shares", type=float, nargs="*", default=[1.0, 0.5, 0.35], help="of checkpointing's peak")
    parser.add_argument("--only", nargs="*", help="arms whose name contains one of these")
    parser.add_argument("--profile", action="store_true", help="where the steps of each arm spend their time")
    parser.add_argument("--longest", action="store_true", help="the longest sequence of each arm")
    parser.add_argument("--most", type=int, default=64, help=f"with --longest: in units of {STEP} tokens")
    parser.add_argument("--hollow", action="store_true", help="attention computes nothing: compare peaks, not times")
    parser.add_argument("--memory", type=float, help="GiB that this process may take, as on a smaller GPU")
    parser.add_argument("--name", dest="file", help="of the result file")
    options = parser.parse_args()
    if options.memory is not None:
        torch.cuda.set_per_process_memory_fraction(options.memory * GIB / torch.cuda.mem_get_info()[1])
    if options.longest:
        rows = longest(options)
    elif options.hollow:
        with hollow_attention("cuda", HEADS, KV_HEADS, WIDTH):
            rows = table(options)
    else:
        rows = table(options)
    write(options.file or ("lora_experts" if options.experts else "lora"), rows, **vars(options))


if __name__ == "__main__":
    main()
