"""The trainer on a pipeline of N GPUs: tokens a second, bubble, activation memory, and hidden all-to-alls.

The models of `common.py`, cut to 8 layers or to `--layers`, on a mesh of PP x EP = all GPUs; sequence 4096, microbatch 1,
global batch 64. Parameters and AdamW states are fp32 shards, compute is bf16, routing is balanced, and
`parallel.partition = "auto"` assigns layers to stages. A step is forward and backward of all microbatches, until the
reduced gradients are on their shards. Columns, by pipeline rank where several figures stand in a cell:

    tokens/s          of the global batch over the median step of the slowest rank
    peak over base    over what is held before the step without gradients; gradients and unsharded weights count
    activations       the peak less what is held when the last backward is over (unsharded weights and gradients)
    requested         the same in bytes that tensors asked for: the allocator gives out up to 1 MiB a block more, which
                      differs from step to step
    bubble            share of the step in which the compute stream runs nothing of a stage
    hidden            share of the all-to-all time inside overlapped forward-backwards for which the compute stream does
                      not stall, in the graph if there is one; the least of all ranks
    reserved          peak reserved over peak allocated memory, without expandable segments; of a graph's memory what its
                      capture took at most counts as allocated
    withheld          bytes freed during the capture that cannot be used again before its end, because another stream got
                      them (`record_stream`, as NCCL's sends and receives may call)
    waits for copies  of the compute stream, in an eager step
    graph             whether forwards and backwards of the step were one CUDA graph, or why not
    offload           bytes of a step that go to the host and back; how much the plan says that the peak falls; against
                      the same schedule without offload in the same run: time (median of the steps' ratios, in order),
                      activations, and R (the measured fall over the planned one) in requested and in allocated bytes

`--in-turn` keeps a model's arms in memory together and lets their steps take turns, because arms one after the other differ
by up to 1 % from one GPU clock to the next. Reserved memory is not known per arm then, and no arm has AdamW states: three
arms of PP 2 do not fit into 140 GiB.

    torchrun --nproc-per-node 4 benchmarks/pipeline.py                                   # both models, default arms
    torchrun --nproc-per-node 4 benchmarks/pipeline.py --models qwen3-30b-a3b --arms dualpipev zbv --pp 4
    torchrun --nproc-per-node 4 benchmarks/pipeline.py --models deepseek-v2-lite --layers 27 --pp 4 --batch 128
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import GIB, MODELS, by_host, gathered_bytes, ranks, results_folder, settle_memory, timed_together, write
from ep import force_balance

from forebay import Managed
from forebay.config import Config, from_mapping
from forebay.estimate.layers import plan_layers
from forebay.memory.recorder import requested
from forebay.memory.solver import plan_interleaved
from forebay.pipeline.activity import ActionRecorder, bubble, trace_json
from forebay.pipeline.runtime import _RuntimeStep
from forebay.pipeline.schedule import Action
from forebay.pipeline.sublayer import ExecutionContext, Pending
from forebay.train.distributed import Mesh
from forebay.train.engines import PipelinedGradients
from forebay.train.trainer import Trainer
from forebay.train.unsharded_step import UnshardedStep

_INNER = "model.layers.[1-6]"  # of 8 layers, those on the ranks without the head, which idle under PP 4
# Arm -> sections of the configuration besides the mesh.
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "dualpipev": {},
    "dualpipev, bf16 sums": {"parallel": {"gradients": "compute"}},
    "dualpipev, reshard": {"parallel": {"reshard": True}},
    "dualpipev, recompute experts": {"memory": {"policy": {"*.mlp": "recompute"}}},
    "dualpipev, offload": {"memory": {"policy": "offload"}},
    "dualpipev, offload all": {"memory": {"policy": "offload", "offload": "all"}},
    "dualpipev, graph": {"memory": {"graph": True}},
    "dualpipev, graph, offload": {"memory": {"graph": True, "policy": "offload"}},
    "dualpipev, graph, offload all": {"memory": {"graph": True, "policy": "offload", "offload": "all"}},
    "dualpipev, graph, offload all, experts again": {
        "memory": {
            "graph": True,
            "offload": "all",
            "policy": {"*.self_attn": "offload", "*.mlp": "offload", f"{_INNER}.mlp.experts": "recompute"},
        }
    },
    "dualpipev, bf16 sums, graph": {"parallel": {"gradients": "compute"}, "memory": {"graph": True}},
    # The best partition of 8 DeepSeek-V2-Lite layers that cuts none of them in two.
    "dualpipev, bf16 sums, graph, whole layers": {
        "parallel": {"gradients": "compute", "partition": [2, 2, 3, 1]},
        "memory": {"graph": True},
    },
    "dualpipev, bf16 sums, graph, reshard": {
        "parallel": {"gradients": "compute", "reshard": True},
        "memory": {"graph": True},
    },
    "dualpipev, even": {"parallel": {"partition": "even"}},
    "zbv": {"parallel": {"schedule": "zbv"}},
    "1f1b": {"parallel": {"schedule": "1f1b"}},
    "interleaved-1f1b, graph": {"parallel": {"schedule": "interleaved-1f1b"}, "memory": {"graph": True}},
    "interleaved-1f1b, graph, offload": {
        "parallel": {"schedule": "interleaved-1f1b"},
        "memory": {"graph": True, "policy": "offload"},
    },
    "interleaved-1f1b, graph, offload all": {
        "parallel": {"schedule": "interleaved-1f1b"},
        "memory": {"graph": True, "policy": "offload", "offload": "all"},
    },
    "interleaved-1f1b": {"parallel": {"schedule": "interleaved-1f1b"}},
    "interleaved-1f1b, offload": {"parallel": {"schedule": "interleaved-1f1b"}, "memory": {"policy": "offload"}},
}
_ACTIVATIONS = ("activations GiB", "requested GiB")
UNTIMED = 50  # at most this many steps come before the timed ones
DEFAULT = ("dualpipev", "dualpipev, bf16 sums", "zbv", "interleaved-1f1b", "1f1b")


def settings(args: argparse.Namespace, model: str, arm: str, world: int) -> Config:
    own = ARMS[arm]
    ep = world // args.pp
    published = MODELS[model]
    cut = {**published["config"], "num_hidden_layers": args.layers}
    sections = {
        "model": {**published, "config": cut, "dtype": "float32", "compute": "bfloat16"},
        "train": {"steps": 100, "batch": args.batch, "microbatch": 1, "sequence": args.sequence},
        "memory": {"compile": True, **own.get("memory", {})},
        "parallel": {
            "pp": args.pp,
            "ep": ep,
            "reshard": False,
            "capacity_factor": 1.0 if ep > 1 else 0.0,
            **own.get("parallel", {}),
        },
        "log": {"folder": "/tmp/forebay-pipeline"},
    }
    return from_mapping(by_host(sections), origin="benchmarks/pipeline.py")


class Running:
    """An arm whose step has settled, and its measurements. `alone`: no other arm is in memory."""

    def __init__(self, args: argparse.Namespace, name: str, arm: str, alone: bool, stack: ExitStack):
        config = settings(args, name, arm, dist.get_world_size())
        self.args, self.name, self.arm, self.alone = args, name, arm, alone
        self.mesh = stack.enter_context(Mesh.open(config))
        partition = plan_layers(config, self.mesh.size).partition
        self.trainer = stack.enter_context(Trainer(config, self.mesh, partition))
        assert self.trainer.pipeline is not None
        self.engine = self.trainer.pipeline
        self.steps: list[tuple[float, float, float, float, float]] = []
        self.ends: list[tuple[int, int]] = []  # of the untimed steps
        self._number = 0
        self._settle()

    def step(self, number: int) -> None:
        """Run the `number`-th timed step."""
        self.steps.append(timed(self.trainer, self.engine, UNTIMED + number))

    def row(self) -> dict[str, Any]:
        """The row of the table, after the timed steps. Runs more steps, which are not timed."""
        args, mesh, trainer, steps = self.args, self.mesh, self.trainer, self.steps
        reserved = reserved_over_allocated(trainer) if self.alone else 0.0
        idle = watched(args, trainer, self.engine, UNTIMED + len(steps), f"{self.name}-{self.arm}")
        peaks, waited = planned_peaks(trainer.memory), trainer.memory.report().wait_ms or 0.0
        graph = None if trainer.cuda_graph is None else trainer.cuda_graph.eager_reason or "yes"
        segments = by_stream() if self.alone else None
        hidden = hidden_share(trainer, self.engine)
        seconds = [s[0] for s in steps]
        by_rank = gathered(
            mesh,
            {
                "peak": max(s[1] for s in steps) / GIB,
                "activations": max(s[2] for s in steps) / GIB,
                "reserved": reserved,
                "requested": (self.ends[-1][0] if graph == "yes" else max(s[4] for s in steps)) / GIB,
                "withheld": self.ends[-1][1] / GIB if self.ends else 0.0,
                "host": statistics.median(s[3] for s in steps),
                "copies": waited,
                **peaks,
                **hidden,
                "moved": (trainer.memory.plan.planned_bytes if trainer.memory.plan else 0) / GIB,
                **idle,
            },
        )
        of: Callable[[str], list[float]] = lambda key: [max(r[key] for r in row) for row in by_rank]  # noqa: E731
        return {
            "model": self.name,
            "arm": self.arm,
            "mesh": f"PP {mesh.pp} x EP {mesh.ep}",
            "layers by stage": "-".join(map(str, self.engine.partition.counts)),
            "tokens/s": args.batch * args.sequence / statistics.median(seconds),
            "steps s": ", ".join(f"{s:.4f}" for s in seconds),
            "peak over base GiB": max(of("peak")),
            "by pipeline rank GiB": ", ".join(f"{v:.2f}" for v in of("peak")),
            "activations GiB": ", ".join(f"{v:.4f}" for v in of("activations")),
            "requested GiB": ", ".join(f"{v:.4f}" for v in of("requested")),  # R is computed from them
            "bubble": ", ".join(f"{v:.3f}" for v in of("bubble")),
            "hidden": min((r["hidden"] for row in by_rank for r in row), default=0.0),
            "transfers, waits ms": "; ".join(
                f"{t:.0f}, {w:.0f}" for t, w in zip(of("transfers"), of("waits"), strict=True)
            ),
            "host s": ", ".join(f"{v:.2f}" for v in of("host")),
            "waits for copies ms": ", ".join(f"{v:.0f}" for v in of("copies")),
            "graph": graph,
            "reserved": max(of("reserved")) if self.alone else None,
            "withheld GiB": ", ".join(f"{v:.2f}" for v in of("withheld")),
            "segments of streams GiB": segments,
            "offloaded a step GiB": ", ".join(f"{v:.1f}" for v in of("moved")),
            "planned fall GiB": ", ".join(f"{v:.4f}" for v in of("fall")),
            "planned peaks, kept and offloaded GiB": "; ".join(
                f"{k:.2f}, {p:.2f}" for k, p in zip(of("planned keep"), of("planned peak"), strict=True)
            ),
        }

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _settle(self) -> None:
        trainer = self.trainer
        force_balance(trainer.model)
        if self.alone:
            trainer.step(self._next())  # makes AdamW's states, which are part of the base
        with noting_ends(self.engine._unsharded, self.ends):
            for _ in range(self.args.warm):
                self._untimed()
            while self._number < UNTIMED - 1:
                if trainer.cuda_graph is None or trainer.cuda_graph.is_captured or trainer.cuda_graph.eager_reason:
                    break
                self._untimed()
        settle_memory()  # the cache of eager steps is in the way of the next arm

    def _untimed(self) -> None:
        self.trainer.gradients(self._next())
        self.trainer.optimizer.zero_grad(set_to_none=True)


def measure(args: argparse.Namespace, name: str, arms: list[str]) -> list[dict[str, Any]]:
    """Rows of arms that are in memory together and whose steps take turns."""
    with ExitStack() as stack:
        running = [Running(args, name, arm, len(arms) == 1, stack) for arm in arms]
        for number in range(args.steps):
            for one in running:
                one.step(number)
        return [one.row() for one in running]


def planned_peaks(memory: Managed) -> dict[str, float]:
    """GiB of this rank over the base by the plan's own figures: everything kept, as planned, and the difference."""
    keep = peak = 0.0
    if memory.plan is not None and memory.manager.tuner.timeline is not None:
        keep = plan_interleaved(memory.manager.tuner.timeline, frozenset()).peak_bytes / GIB
        peak = memory.plan.peak_bytes / GIB
    return {"planned keep": keep, "planned peak": peak, "fall": keep - peak}


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to arms that offload: time, activations and R against the same arm without offload in the same run."""
    for row in rows:
        keeping = [r for r in rows if r["model"] == row["model"] and "offload" not in r["arm"]]
        shorter = [r for r in keeping if row["arm"].startswith(f"{r['arm']}, ")]
        base = max(shorter, key=lambda r: len(r["arm"]), default=None)
        if base is None or "R" in row or "offload" not in row["arm"]:
            continue
        allocated, asked = ([[float(v) for v in r[c].split(",")] for r in (base, row)] for c in _ACTIVATIONS)
        planned = [float(v) for v in row["planned fall GiB"].split(",")]
        kept, moved = ([float(v) for v in r["steps s"].split(",")] for r in (base, row))
        row["time over keep"] = f"{statistics.median(m / k for k, m in zip(kept, moved, strict=True)):.4f}"
        row["activations fell by"] = ", ".join(f"{1 - b / a:.3f}" for a, b in zip(*allocated, strict=True))
        for column, numbers in (("R", asked), ("R of allocated bytes", allocated)):
            fell = [f"{(a - b) / p:.4f}" if p else "-" for a, b, p in zip(*numbers, planned, strict=True)]
            # The offload plan does not know what recomputed experts take off the peak.
            row[column] = "-" if "again" in row["arm"] else ", ".join(fell)


def timed(trainer: Trainer, engine: PipelinedGradients, number: int) -> tuple[float, float, float, float, float]:
    """Seconds of the slowest rank; peak over base and activations of this rank, bytes; seconds until its host is through;
    activations in requested bytes, for an eager step."""
    trainer.optimizer.zero_grad(set_to_none=True)
    unsharded_step, device = engine._unsharded, trainer.device
    held = []
    end = unsharded_step.end
    unsharded_step.end = lambda count: (held.append((torch.cuda.memory_allocated(), requested(device)[0])), end(count))
    try:
        seconds, host, base = timed_together(lambda: trainer.gradients(number))
    finally:
        del unsharded_step.end
    graph = trainer.cuda_graph
    if graph is not None and graph.is_captured:
        # The allocator counted forwards and backwards when the step was captured; in a replay, only what the reduction adds to
        # their results. Unsharded weights, which stay, count as in the other arms.
        taken = max(graph.peak_bytes, torch.cuda.max_memory_allocated() - base + graph.result_bytes)
        return seconds, taken + gathered_bytes(engine), graph.peak_bytes - graph.result_bytes, host, 0.0
    peak, asked = torch.cuda.max_memory_allocated(), requested(device)[1]
    return seconds, peak - base, peak - held[0][0], host, float(asked - held[0][1])


def reserved_over_allocated(trainer: Trainer) -> float:
    """Reserved over allocated memory, both peaks since `settle_memory`."""
    allocated = torch.cuda.max_memory_allocated()
    if trainer.cuda_graph is not None and trainer.cuda_graph.is_captured:
        left = torch.cuda.memory_allocated() - trainer.cuda_graph.result_bytes  # held before a step
        allocated = max(allocated, left + trainer.cuda_graph.peak_bytes)
    return torch.cuda.max_memory_reserved() / allocated


@contextmanager
def noting_ends(unsharded_step: UnshardedStep, found: list[tuple[int, int]]) -> Iterator[None]:
    """Note two figures of every eager or captured step: by how much requested bytes rose above what is held when the last
    backward is over, and the bytes that are freed but not usable yet at its end."""
    end = unsharded_step.end

    def noting(count: Any) -> None:
        now, most = requested(torch.device("cuda"))
        end(count)
        stats = torch.cuda.memory_stats()
        found.append((most - now, stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]))

    unsharded_step.end = noting
    try:
        yield
    finally:
        del unsharded_step.end


def watched(
    args: argparse.Namespace, trainer: Trainer, engine: PipelinedGradients, number: int, name: str
) -> dict[str, float]:
    """Run one more step, eager, with events around everything: the bubble of this rank. Rank 0 writes the trace."""
    trainer.optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    torch.cuda.synchronize()
    recorder = ActionRecorder(trainer.mesh.pp_rank, trainer.device)
    with engine.watched(recorder):
        trainer.gradients(number)
    records = recorder.records()
    all_records: list[Any] = [None] * trainer.mesh.pp
    dist.all_gather_object(all_records, records, group=trainer.mesh.pipeline)
    everything = [r for ranks in all_records for r in ranks]
    if dist.get_rank() == 0 and args.traces:
        stem = results_folder() / f"pipeline-{name.replace(', ', '-').replace(' ', '-')}"
        Path(f"{stem}.trace.json").write_text(trace_json(everything))
    return {"bubble": bubble(everything)[trainer.mesh.pp_rank]}


def hidden_share(trainer: Trainer, engine: PipelinedGradients) -> dict[str, float]:
    """Time of this rank's all-to-alls inside overlapped actions, and of the waits for them. A graph is captured anew with
    events in it."""
    if trainer.mesh.ep == 1:
        return {"hidden": 1.0, "transfers": 0.0, "waits": 0.0}
    meter = TransferMeter()
    captured = trainer.cuda_graph if trainer.cuda_graph is not None and trainer.cuda_graph.is_captured else None
    if captured is not None:
        captured.release()
    with metering_overlap(meter):
        for _ in range(UNTIMED):
            trainer.optimizer.zero_grad(set_to_none=True)
            meter.forget()
            trainer.gradients(UNTIMED)
            if captured is None or captured.is_captured:
                break
    for _ in range(2 if captured is not None else 0):
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.gradients(UNTIMED)
    transfers, waits = meter.milliseconds()
    if captured is not None:
        captured.release()  # before its events go
    meter.forget()
    return {"hidden": 1 - waits / transfers if transfers else 1.0, "transfers": transfers, "waits": waits}


class TransferMeter:
    """Measures on a CUDA device how long transfers take, and how long the compute stream waits for them.

    Work that a CUDA graph captures while the meter is on is timed at each replay. The graph records into the meter's events,
    so the meter must outlive it.

    Attributes:
        on: whether to measure.
    """

    def __init__(self) -> None:
        self.on = False
        self._transfers: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []

    def transfer(self, stream: Any, run: Callable[..., Any], *args: Any) -> Any:
        """Time `run(*args)`, which enqueues a transfer on `stream`."""
        return self._around(self._transfers, stream, run, args)

    def wait(self, stream: Any, run: Callable[..., Any], *args: Any) -> Any:
        """Time `run(*args)`, which makes `stream` wait."""
        return self._around(self._waits, stream, run, args)

    def milliseconds(self) -> tuple[float, float]:
        """Time in transfers, and waiting for them, since `forget`; of a graph, in its last replay. Waits for the device."""
        torch.cuda.synchronize()
        sums = tuple(sum(a.elapsed_time(b) for a, b in pairs) for pairs in (self._transfers, self._waits))
        return sums[0], sums[1]

    def forget(self) -> None:
        """Start again from zero. No graph that was captured while the meter was on may be alive."""
        self._transfers, self._waits = [], []

    def _around(self, pairs: list[tuple[Any, Any]], stream: Any, run: Callable[..., Any], args: Any) -> Any:
        if not self.on:
            return run(*args)
        capturing = torch.cuda.is_current_stream_capturing()
        pair = tuple(torch.cuda.Event(enable_timing=True, external=capturing) for _ in range(2))
        pair[0].record(stream)
        result = run(*args)
        pair[1].record(stream)
        pairs.append(pair)
        return result


@contextmanager
def metering_overlap(meter: TransferMeter) -> Iterator[None]:
    """Measure transfers, and waits for them, inside overlapped actions."""
    together, launch, wait_for = _RuntimeStep._overlap_fwd_bwd, ExecutionContext.launch, ExecutionContext.wait_for

    def metered(self: _RuntimeStep, forward: Action, backward: Action) -> None:
        meter.on = True
        try:
            together(self, forward, backward)
        finally:
            meter.on = False

    def metered_launch(self: ExecutionContext, transfer: Callable[..., Any], *args: Any) -> Pending:
        return launch(self, partial(meter.transfer, self.comm, transfer), *args)

    def metered_wait(self: ExecutionContext, number: int) -> None:
        meter.wait(self.compute, wait_for, self, number)

    with (
        mock.patch.object(_RuntimeStep, "_overlap_fwd_bwd", metered),
        mock.patch.object(ExecutionContext, "launch", metered_launch),
        mock.patch.object(ExecutionContext, "wait_for", metered_wait),
    ):
        yield


def by_stream() -> str:
    """GiB that the caching allocator holds for each stream of this rank, largest first."""
    held: dict[int, int] = {}
    for segment in torch.cuda.memory_snapshot():
        held[segment["stream"]] = held.get(segment["stream"], 0) + segment["total_size"]
    return ", ".join(f"{n / GIB:.1f}" for n in sorted(held.values(), reverse=True))


def gathered(mesh: Mesh, figures: dict[str, float]) -> list[list[dict[str, float]]]:
    """Figures of all processes, by pipeline rank."""
    values: list[Any] = [None] * mesh.size
    dist.all_gather_object(values, figures)
    return [values[r * mesh.batch.size : (r + 1) * mesh.batch.size] for r in range(mesh.pp)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(DEFAULT))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--in-turn", action="store_true", help="keep a model's arms in memory together and let their steps take turns"
    )
    parser.add_argument("--traces", action="store_true", help="write a Perfetto trace of each arm")
    parser.add_argument("--name", default="pipeline")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ranks():
        for name in args.models:
            for arms in [args.arms] if args.in_turn else [[arm] for arm in args.arms]:
                rows += measure(args, name, arms)
                compare(rows)
                gc.collect()
                if dist.get_rank() == 0:
                    write(args.name, rows, world=dist.get_world_size(), arms={a: ARMS[a] for a in args.arms})


if __name__ == "__main__":
    main()
