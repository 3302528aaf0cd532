"""The tables of benchmarks/README.md: plans of published models on 8 to 2048 GPUs.

    python -m benchmarks.scale            prints the tables
    python -m benchmarks.scale --write    puts them into benchmarks/README.md, between its marks

Input: `RUNS`, each a line of ``forebay plan``. Output: Markdown. No GPU, no weights. tests/benchmarks/test_scale.py
makes a part of the tables again.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.estimate.device import DeviceProfile
from forebay.estimate.layers import LayerPlan, TraceCache, plan_layers
from forebay.estimate.plan import Fit, ask, fit_run

PAGE = Path(__file__).with_name("README.md")
GIB = 1 << 30


@dataclass(frozen=True)
class Run:
    """One plan: a published model, GPUs, pipeline ranks, processes that share experts, and other settings."""

    model: str
    gpus: int
    pp: int
    ep: int
    others: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command line."""
        settings = " ".join(f"--set {text}" for text in (f"parallel.ep={self.ep}", *self.others))
        return f"forebay plan {self.model} --gpus {self.gpus} --pp {self.pp} {settings}"


RECOMPUTE = ("memory.policy=recompute",)
RUNS = (
    Run("deepseek-v2-lite", 8, 1, 8),
    Run("qwen3-30b-a3b", 8, 1, 8),
    Run("mixtral-8x7b", 16, 1, 8),
    Run("glm-4.5-air", 64, 1, 8),
    Run("qwen3-235b-a22b", 64, 8, 8),
    Run("qwen3-235b-a22b", 128, 8, 16),
    Run("deepseek-v3", 256, 16, 16),
    Run("deepseek-v3", 512, 16, 32),
    Run("deepseek-v3", 1024, 16, 64),
    Run("deepseek-v3", 2048, 16, 64),
    Run("deepseek-v3", 2048, 16, 64, RECOMPUTE),
)
PUBLISHED_RUN = Run("deepseek-v3", 2048, 16, 64)  # the mesh of arXiv:2412.19437


def planned(run: Run, traces: TraceCache, device: DeviceProfile | None = None) -> tuple[LayerPlan, Fit]:
    """The plan of a run, with the time of a step on `device`. `traces` holds those of earlier runs."""
    given = [f"parallel.pp={run.pp}", f"parallel.ep={run.ep}", *run.others]
    config = ask(run.model, given, run.gpus).config
    plan = plan_layers(config, run.gpus, traces)
    return plan, fit_run(config, plan, run.gpus, traces=traces, device=device)


def row(run: Run, fit: Fit) -> str:
    """One row: the process that uses most, in GiB."""
    most = fit.fullest
    parts = (most.parameters, most.gradients, most.optimizer, most.activations, most.transient, most.other, most.total)
    mesh = f"{run.pp} x {run.ep} x {run.gpus // run.pp // run.ep}"
    name = f"{run.model}{', recompute' * (run.others == RECOMPUTE)}"
    return f"| {name} | {run.gpus} | {mesh} | {' | '.join(f'{size / GIB:.1f}' for size in parts)} |"


def scale(runs: Sequence[Run] = RUNS) -> str:
    """The table of plans."""
    traces = TraceCache()
    lines = [
        "| model | GPUs | PP x EP x FSDP | parameters | gradients | optimizer | activations | transient | other | total |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(row(run, planned(run, traces)[1]) for run in runs)])


def published() -> str:
    """The table of published figures that a plan can be compared with."""
    traces = TraceCache()
    plan, fit = planned(PUBLISHED_RUN, traces)
    _, small = planned(Run("qwen3-30b-a3b", 8, 1, 8), traces)
    stages = len(plan.partition.layers)
    flights = {sum(plan.in_flight[s] for s in plan.partition.stages(rank)) for rank in range(PUBLISHED_RUN.pp)}
    rank = small.ranks[0]
    states = 8 * (rank.parameters + rank.gradients + rank.optimizer) / small.parameters
    lines = [
        "| figure | published | planned | source |",
        "|---|---|---|---|",
        f"| DeepSeek-V3, parameters | 671 B | {fit.parameters / 1e9:.1f} B | technical report, arXiv:2412.19437 |",
        f"| Qwen3-30B-A3B, parameters | 30.5 B | {small.parameters / 1e9:.1f} B | technical report, arXiv:2505.09388 |",
        f"| DualPipeV with {stages} stages on {PUBLISHED_RUN.pp} ranks: microbatches that a rank holds of a stage | "
        f"PP + 1 = {stages + 1} | {' or '.join(map(str, sorted(flights)))} | README of deepseek-ai/DualPipe |",
        f"| Qwen3-30B-A3B on 8 GPUs: bytes a parameter of weights, gradients and Adam, over all | 16 | {states:.2f} | "
        "ZeRO, arXiv:1910.02054, section 3.1 |",
    ]
    return "\n".join(lines)


def times(runs: Sequence[Run] = (RUNS[1], RUNS[7], RUNS[9])) -> str:
    """The table of CPU seconds of a plan, in a process that has imported torch and transformers."""
    lines = ["| plan | CPU seconds |", "|---|---|"]
    for run in runs:
        planned(run, TraceCache())  # fills imports and torch's caches
        begin = time.process_time()
        planned(run, TraceCache())
        lines.append(f"| `{run.command}` | {time.process_time() - begin:.1f} |")
    return "\n".join(lines)


def put(page: str, name: str, table: str) -> str:
    """`page` with `table` between the marks of `name`.

    Raises:
        ValueError: the page has no such marks.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    found = re.search(re.escape(begin) + ".*?" + re.escape(end), page, re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no marks of {name!r}")
    return page[: found.start()] + begin + table + "\n" + end + page[found.end() :]


def show(tables: Mapping[str, str], file: Path) -> None:
    """Print `tables`, or with ``--write`` put them into the page `file`."""
    if sys.argv[1:] == ["--write"]:
        page = file.read_text("utf-8")
        for name, table in tables.items():
            page = put(page, name, table)
        file.write_text(page, "utf-8")
    else:
        print("\n\n".join(tables.values()))


def main() -> None:
    show({"scale": scale(), "published": published(), "times": times()}, PAGE)


if __name__ == "__main__":
    main()
