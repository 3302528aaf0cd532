"""The tables of docs/scale.md: step times of published models on 8 to 4096 GPUs, and what else grows with the cluster.

    python -m benchmarks.scale_time            prints the tables
    python -m benchmarks.scale_time --write    puts them into docs/scale.md, between its marks

Input: `SWEEP` and `PUBLISHED`, each row a plan of the estimator, whose step time is a discrete-event run of the pipeline's
schedule; and published figures, with their sources. Output: Markdown. No GPU, no weights. tests/benchmarks/test_scale_time.py
makes a part of the tables again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.scale import GIB, Run, planned, show
from forebay.estimate.device import DeviceProfile, Figure, load
from forebay.estimate.layers import TraceCache
from forebay.estimate.plan import Fit

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
NODE = 8  # GPUs
SEQUENCE = 4096
# Weights stay gathered for a step: gathering experts again for each microbatch crosses the network.
GATHERED_ONCE = "parallel.reshard=false"
KEEP, RECOMPUTE = "memory.policy=keep", "memory.policy=recompute"
FLAT = (
    "parallel.dispatch=nccl"  # a token crosses the network once for each process with one of its experts, not each node
)
DEVICE = "h200"

# Sequences of a step at most, and pipeline ranks, of each model. DeepSeek-V3's is published (arXiv:2412.19437, section 4.2);
# Qwen3's is four times that of the runs of Megatron below.
LARGEST_BATCH = 15360, 8192
MICROBATCHES = 120, 64  # a pipeline's, below the largest batch: those of the published runs
SIZES = 8, 64, 256, 512, 1024, 2048, 4096

FAILURES = 419 / (54 * 16384)  # a GPU and day: unexpected interruptions of Llama 3, arXiv:2407.21783, section 3.3.4
STATE = 12  # bytes of a parameter in a checkpoint: the weight and two moments, all fp32
DISK = 50e9  # bytes/s of the cluster's shared storage: an assumption
RESTART = 600  # seconds from a failure to the first step: an assumption


def sweep() -> tuple[Run, ...]:
    """Experts inside a node and pipeline stages across nodes; with fewer than 8 x PP GPUs, shorter pipelines."""
    runs = []
    for model, longest, batch, count in zip(
        ("deepseek-v3", "qwen3-235b-a22b"), (16, 8), LARGEST_BATCH, MICROBATCHES, strict=True
    ):
        for gpus in SIZES:
            pp = min(longest, gpus // NODE)
            size = min(batch, count * gpus // pp)
            runs.append(Run(model, gpus, pp, NODE, (f"train.batch={size}", GATHERED_ONCE)))
    return tuple(runs)


SWEEP = sweep()


@dataclass(frozen=True)
class Published:
    """A published step time, and the nearest plan.

    Attributes:
        seconds: of a step.
        run, device: the plan; a name for `profile`.
    """

    name: str
    seconds: float
    run: Run
    device: str
    source: str


_DEEPSEEK = 180e3 * 3600 / 2048 / (1e12 / (15360 * SEQUENCE))
_V3 = ("train.batch=15360", RECOMPUTE, GATHERED_ONCE)
_V3_SOURCE = (
    "arXiv:2412.19437, sections 1, 3.2 and 4.2: 180K H800 hours for 10^12 tokens, 15360 sequences of 4096 tokens"
)
_QWEN = ("train.batch=2048", GATHERED_ONCE)
_MEGATRON = "yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3"
PUBLISHED = (
    Published(
        "DeepSeek-V3, PP 16, EP 64", _DEEPSEEK, Run("deepseek-v3", 2048, 16, 64, (*_V3, FLAT)), "h800", _V3_SOURCE
    ),
    Published("the same, once a node", _DEEPSEEK, Run("deepseek-v3", 2048, 16, 64, _V3), "h800", _V3_SOURCE),
    Published("Qwen3-235B, PP 8, EP 32, TP 2", 17.6, Run("qwen3-235b-a22b", 256, 8, 32, _QWEN), "h100", _MEGATRON),
    Published(
        "Qwen3-235B, EP 8, FSDP, TP 2, recomputed",
        17.6,
        Run("qwen3-235b-a22b", 256, 1, 8, ("train.batch=2048", "train.microbatch=4", RECOMPUTE)),
        "h100",
        _MEGATRON,
    ),
)


def profile(name: str) -> DeviceProfile:
    """The profile of a device; "h800" is an H100 with NVLink's rates times 400 / 900, GB/s of their data sheets."""
    if name != "h800":
        return load(name)
    h100 = load("h100")
    slower = {n: _scaled(h100.figures[n], 400 / 900) for n in ("all_to_all", "all_gather", "reduce_scatter")}
    return replace(h100, name="h800", title="NVIDIA H800 SXM", figures={**h100.figures, **slower})


def _scaled(figure: Figure, share: float) -> Figure:
    return replace(figure, value=tuple((size, rate * share) for size, rate in figure.value))


def fitting(run: Run, traces: TraceCache) -> tuple[Run, Fit]:
    """The plan that keeps everything, or the one that recomputes everything if that does not fit the device."""
    device = load(DEVICE)
    for policy in (KEEP, RECOMPUTE):
        tried = replace(run, others=(*run.others, policy))
        _, fit = planned(tried, traces, device)
        if fit.fullest.headroom(device.at("memory")) >= 0:
            break
    return tried, fit


def row(run: Run, traces: TraceCache) -> str:
    """A line of the sweep."""
    run, fit = fitting(run, traces)
    step, most = fit.step, fit.fullest
    assert step is not None
    batch = int(run.others[0].partition("=")[2])
    mesh = f"{run.pp} x {run.ep} x {run.gpus // run.pp // run.ep}"
    lead = (
        f"| {run.model} | {run.gpus} | {mesh} | {batch} | {run.others[-1].partition('=')[2]} | {most.total / GIB:.0f} |"
    )
    if most.headroom(load(DEVICE).at("memory")) < 0:
        return f"{lead} does not fit | | | | |"
    bubble = 1 - sum(step.busy) / len(step.busy) / step.schedule
    exposed = max(step.exposed) / step.seconds
    outside = (step.gather + step.reduce + step.optimizer) / step.seconds
    shares = f"{100 * bubble:.0f} % | {100 * exposed:.0f} % | {100 * outside:.0f} %"
    return f"{lead} {step.seconds:.1f} | {step.tokens_per_second / run.gpus:,.0f} | {shares} |"


def steps(runs: Sequence[Run] = SWEEP) -> str:
    """The table of step times."""
    traces = TraceCache()
    lines = [
        "| model | GPUs | PP x EP x FSDP | sequences | policy | GiB | s a step | tokens/s a GPU | bubble | exposed | outside |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(row(run, traces) for run in runs)])


def published(rows: Sequence[Published] = PUBLISHED) -> str:
    """The table of published step times."""
    traces = TraceCache()
    lines = ["| run | published, s | planned, s | planned / published | GiB | source |", "|---|---|---|---|---|---|"]
    for r in rows:
        _, fit = planned(r.run, traces, profile(r.device))
        assert fit.step is not None
        seconds, size = fit.step.seconds, fit.fullest.total / GIB
        name = f"{r.name}, {r.run.gpus} {r.device.upper()}"
        lines.append(
            f"| {name} | {r.seconds:.1f} | {seconds:.1f} | {seconds / r.seconds:.2f} | {size:.0f} | {r.source} |"
        )
    return "\n".join(lines)


def clusters() -> str:
    """The table of what grows with the cluster, whatever a step takes."""
    head = ("model", "GPUs", "checkpoint, TB", "GB a GPU", "s to the host", "s to storage", "failures a day")
    lines = [f"| {' | '.join(head)} | lost, saves wait | lost, saves do not |", "|---" * (len(head) + 2) + "|"]
    copies = load(DEVICE).at("host_out", NODE)
    for model, parameters in (("deepseek-v3", 671.03e9), ("qwen3-235b-a22b", 235.09e9)):
        size = STATE * parameters
        written = size / DISK
        for gpus in SIZES[2:]:
            staged, failures = size / gpus / copies, FAILURES * gpus
            cells = f"{size / 1e12:.1f} | {size / gpus / 1e9:.1f} | {staged:.2f} | {written:.0f} | {failures:.2f}"
            waiting, beside = lost(written, written, failures), lost(staged, written, failures)
            lines.append(f"| {model} | {gpus} | {cells} | {100 * waiting:.1f} % | {100 * beside:.1f} % |")
    return "\n".join(lines)


def lost(stops: float, written: float, failures: float) -> float:
    """Share of time that is lost to saves, to steps that are computed again, and to restarts.

    The interval is the best one, sqrt(2 x stops x seconds between failures) (Young 1974), or as long as a save is written.

    Args:
        stops: seconds for which a save stops training.
        written: seconds until it is in storage.
        failures: a day.
    """
    rate = failures / 86400
    interval = max(math.sqrt(2 * stops / rate), written)
    again = interval / 2 + (
        0 if stops == written else written
    )  # a failure during a write loses the interval before, too
    return stops / interval + rate * (again + RESTART)


def main() -> None:
    show({"steps": steps(), "published": published(), "clusters": clusters()}, PAGE)


if __name__ == "__main__":
    main()
