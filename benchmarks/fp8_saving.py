"""What ``precision="fp8"`` saves, and what it costs: bytes and time of a step, and the loss of a run.

`saving`: decoder layers at Qwen3-30B-A3B's widths, compiled, bf16; two models with the same weights, one with exact saving and
one with "fp8", take turns step by step, so that both see the same GPU. Columns: bytes of what regions save for backward, where
they wait (`StepReport.saved_bytes_by_placement`); of the experts' first product alone; copied to the host; memory after forward
and peak over what is held before a step; the median step and its ratio to exact saving.

`loss`: `forebay train PRESET` twice, with the same seed and data, all else equal: both loss curves, and the ratio of their means
over the last tenth. How far two runs with exact saving differ is measured by `--again`.

    python benchmarks/fp8_saving.py saving            # about 40 s on an H200
    python benchmarks/fp8_saving.py loss              # about 2 minutes: 300 steps of quickstart-gpu, twice
    python benchmarks/fp8_saving.py saving --quick    # on a CPU, tiny
    python benchmarks/fp8_saving.py loss --preset quickstart --set model.dtype=bfloat16 --steps 30
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import GIB, MIB, MODELS, results_folder, write
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import forebay
from forebay.kernels.row_fp8 import encoded_width

_PRECISIONS = ("exact", "fp8")
_TINY = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
         "num_experts_per_tok": 2, "moe_intermediate_size": 64}  # fmt: skip


class Arm:
    """A managed model that takes steps on one batch."""

    def __init__(self, policy: str, offload: str, precision: str, options: argparse.Namespace):
        widths = {**MODELS["qwen3-30b-a3b"]["config"], **(_TINY if options.quick else {})}
        widths |= {"num_hidden_layers": options.layers, "vocab_size": 8192}
        torch.manual_seed(0)
        self.gpu = torch.cuda.is_available()
        device = "cuda" if self.gpu else "cpu"
        with torch.device(device):
            config = Qwen3MoeConfig(**widths, use_cache=False)
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        generator = torch.Generator(device=device).manual_seed(1)
        size = (options.batch, options.sequence)
        self.ids = torch.randint(0, widths["vocab_size"], size, device=device, generator=generator)
        self.mem = forebay.manage(self.model, policy, offload=offload, precision=precision, compile=not options.quick)
        rows = self.ids.numel() * widths["num_experts_per_tok"]
        width = 2 * widths["moe_intermediate_size"]
        self.product_bytes = options.layers * rows * (encoded_width(width) if precision == "fp8" else 2 * width)
        self.precision, self.times = precision, list[float]()

    def step(self) -> torch.Tensor:
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return loss.detach()

    def timed(self) -> None:
        began = time.perf_counter()
        if self.gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.step()
            end.record()
            torch.cuda.synchronize()
            self.times.append(begin.elapsed_time(end))
        else:
            self.step()
            self.times.append(1e3 * (time.perf_counter() - began))

    def memory(self) -> dict[str, float | None]:
        """GiB after forward and at the peak of a step, over what is held before it."""
        if not self.gpu:
            return {"after forward GiB": None, "peak GiB": None}
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        out = self.model(input_ids=self.ids, labels=self.ids).loss
        after = torch.cuda.memory_allocated() - base
        out.backward()
        return {"after forward GiB": after / GIB, "peak GiB": (torch.cuda.max_memory_allocated() - base) / GIB}


def saving(options: argparse.Namespace) -> None:
    rows = []
    for policy, offload in (("keep", "fit"), ("offload", "fit"), ("offload", "all")):
        arms = [Arm(policy, offload, precision, options) for precision in _PRECISIONS]
        losses = [[float(arm.step()) for _ in range(6)] for arm in arms]
        assert losses[0] == losses[1], "the loss of a step does not depend on what is saved"
        for round_ in range(options.steps):
            for arm in arms if round_ % 2 == 0 else arms[::-1]:
                arm.timed()
        found = [row(f"{policy}, {offload}" if policy == "offload" else policy, arm) for arm in arms]
        for name in ("saved MiB", "first product MiB", "ms"):
            found[1][f"{name} to exact"] = found[1][name] / found[0][name]
        rows += found
        for each in found:
            print(each, flush=True)
        del arms, arm
        gc.collect()
    write("fp8_saving" + ("_quick" if options.quick else ""), rows, layers=options.layers, steps=options.steps)


def row(name: str, arm: Arm) -> dict[str, Any]:
    report = arm.mem.report()
    return {
        "arm": f"{name}, {arm.precision}",
        "saved MiB": sum(report.saved_bytes_by_placement.values()) / MIB,
        "first product MiB": arm.product_bytes / MIB,
        "moved MiB": report.moved_bytes / MIB,
        "ms": statistics.median(arm.times),
        "fastest ms": min(arm.times),
        "wait ms": report.wait_ms,
        **arm.memory(),
    }


def start(options: argparse.Namespace, precision: str, folder: Path) -> subprocess.Popen[bytes]:
    """A run of `precision` whose files are in `folder`."""
    sets = {
        "memory.precision": precision,
        "train.steps": options.steps,
        "train.batch": options.batch,
        "train.eval_every": 0,
        "checkpoint.every": 0,
        "checkpoint.last": "false",
        "log.folder": str(folder / "run"),
        "log.progress": "off",
        "log.profile": "false",
    }
    given = [f"{key}={value}" for key, value in sets.items()] + options.set
    command = [sys.executable, "-m", "forebay", "train", options.preset]
    return subprocess.Popen([*command, *(word for each in given for word in ("--set", each))])


def losses(folder: Path) -> list[float]:
    """Of the run in `folder`, step by step."""
    (metrics,) = folder.glob("run*/metrics.jsonl")
    rows = map(json.loads, metrics.read_text().splitlines())
    return [row["cross_entropy_loss"] for row in rows if "cross_entropy_loss" in row]  # others are of evaluations


def loss(options: argparse.Namespace) -> None:
    """Losses of all runs, which share the GPU: none is timed."""
    arms = {precision: precision for precision in _PRECISIONS} | ({"exact, again": "exact"} if options.again else {})
    with tempfile.TemporaryDirectory() as name:
        folders = {arm: Path(name, str(place)) for place, arm in enumerate(arms)}
        runs = [start(options, precision, folders[arm]) for arm, precision in arms.items()]
        if failed := [run.args for run in runs if run.wait()]:
            raise RuntimeError(f"failed: {failed}")
        curves = {arm: losses(folder) for arm, folder in folders.items()}
    last = max(options.steps // 10, 1)
    ends = {name: statistics.fmean(curve[-last:]) for name, curve in curves.items()}
    rows = [
        {
            "arm": name,
            "first loss": curves[name][0],
            "last loss": curves[name][-1],
            f"mean of the last {last}": end,
            "to exact": end / ends["exact"],
        }
        for name, end in ends.items()
    ]
    name = "fp8_loss" if options.preset == "quickstart-gpu" else f"fp8_loss_{options.preset}"
    write(name, rows, curves=curves, preset=options.preset, batch=options.batch, sets=options.set)
    print(results_folder() / f"{name}.json")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("saving", "loss"))
    parser.add_argument("--quick", action="store_true", help="saving: tiny widths, uncompiled")
    parser.add_argument("--steps", type=int, default=0, help="default: 30 timed steps, 300 of a run")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--sequence", type=int, default=0, help="saving: default 4096, 256 with --quick")
    parser.add_argument("--preset", default="quickstart-gpu")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="loss: further keys of both runs"
    )
    parser.add_argument("--again", action="store_true", help="loss: a second run with exact saving")
    options = parser.parse_args()
    options.steps = options.steps or {"saving": 30, "loss": 300}[options.part]
    options.sequence = options.sequence or (256 if options.quick else 4096)
    parts: dict[str, Callable[[argparse.Namespace], None]] = {"saving": saving, "loss": loss}
    parts[options.part](options)


if __name__ == "__main__":
    main()
