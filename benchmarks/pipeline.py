"""The trainer on a pipeline of N GPUs: tokens a second, bubble, activation memory, and how much of the all-to-alls is hidden.

Two models at their published widths, cut to 8 layers (`benchmarks/ep.py` has them) or to `--layers`, on a mesh of PP x EP = all
GPUs; sequence 4096, microbatch 1, global batch 64. Parameters and AdamW states are fp32 shards, compute is bf16, routing is
balanced (drawn afresh for each microbatch and layer), layers are on stages as `parallel.partition = "auto"` has them.

A step is forward and backward of all microbatches of the global batch, until the reduced gradients lie on the shards. Columns:

    tokens/s          of the global batch over its wall time on the slowest rank, median of the timed steps
    peak over base    the highest memory of a step over what is held before it with gradients set to None, so gradients and
                      gathered weights count; the largest of all ranks, and by pipeline rank
    activations       of that, what is neither gathered weights nor gradients: the peak less what is held when the last backward
                      is over; by pipeline rank
    bubble            share of the step in which a rank's compute stream has nothing of a stage to run; by pipeline rank
    hidden            share of the time of all-to-alls inside overlapped forward-backwards for which the compute stream does not
                      stand still, in the graph if there is one; the least of all ranks
    reserved          of the caching allocator over allocated, both peaks, without expandable segments; of a graph's memory
                      what its capture took at most is allocated
    waits for copies  of the compute stream, in a step that is called
    requested         activations as tensors asked for them: the allocator gives out more, up to 1 MiB a block, which differs from
                      step to step
    withheld          bytes freed while the step was captured that may not be used again before the capture's end, because another
                      stream was given them (`record_stream`, as NCCL's sends and receives may do)

    graph             whether forwards and backwards of the step were one CUDA graph, or why not
    offload           bytes of a step that go to the host and come back; how much the plan says that the peak falls, from and to;
                      against the same schedule without, in the same run: time (median of the steps' ratios, in order),
                      activations, and R, what fell over what was to, both of requested bytes; beside it of allocated ones

`--in-turn` keeps a model's arms in memory together and lets their steps take turns: arms one after the other differ by up to 1 %
from one GPU clock to the next. What is reserved is then nobody's own, and no arm has AdamW states: three arms of PP 2 do not fit
into 140 GiB.

    torchrun --nproc-per-node 4 benchmarks/pipeline.py                                   # both models, the default arms
    torchrun --nproc-per-node 4 benchmarks/pipeline.py --models qwen3-30b-a3b --arms dualpipev zbv --pp 4
    torchrun --nproc-per-node 4 benchmarks/pipeline.py --models deepseek-v2-lite --layers 27 --pp 4 --batch 128
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import GIB, results_folder, settle_memory, write
from ep import MODELS, force_balance

from forebay.config import from_mapping
from forebay.memory.offload_plan import plan_interleaved
from forebay.memory.recorder import requested
from forebay.pipeline.activity import ActionRecorder, bubble, draw, perfetto
from forebay.pipeline.runtime import _RuntimeStep
from forebay.pipeline.schedule import Action

_INNER = "model.layers.[1-6]"  # of 8 layers those that share no pipeline rank with the head, which has time to spare with PP 4
# Arm -> sections of the configuration beside the mesh.
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
UNTIMED = 50  # steps at most before the timed ones
DEFAULT = ("dualpipev", "dualpipev, bf16 sums", "zbv", "interleaved-1f1b", "1f1b")


def settings(args: argparse.Namespace, model: str, arm: str, world: int) -> Any:
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
    return from_mapping(sections, origin="benchmarks/pipeline.py")


class Running:
    """An arm whose step has settled, and what is measured of it. `alone`: no other arm is in memory."""

    def __init__(self, args: argparse.Namespace, name: str, arm: str, alone: bool, stack: ExitStack):
        from forebay.train.distributed import Mesh
        from forebay.train.trainer import Trainer

        config = settings(args, name, arm, dist.get_world_size())
        self.args, self.name, self.arm, self.alone = args, name, arm, alone
        self.mesh = stack.enter_context(Mesh.open(config))
        self.trainer = stack.enter_context(Trainer(config, self.mesh))
        self.engine: Any = self.trainer._gradients
        self.steps: list[tuple[float, float, float, float, float]] = []
        self.ends: list[tuple[int, int]] = []  # of the untimed steps
        self._number = 0
        self._settle()

    def step(self, number: int) -> None:
        """One that is timed, of a number that is no untimed one's."""
        self.steps.append(timed(self.trainer, self.engine, UNTIMED + number))

    def row(self) -> dict[str, Any]:
        """Behind the timed steps; runs one more."""
        args, mesh, trainer, steps = self.args, self.mesh, self.trainer, self.steps
        reserved = reserved_over_allocated(trainer) if self.alone else 0.0
        picture = watched(args, trainer, self.engine, UNTIMED + len(steps), f"{self.name}-{self.arm}")
        peaks, waited = planned_peaks(trainer.memory), trainer.memory.report().wait_ms or 0.0
        graph = None if trainer.captured is None else trainer.captured.why_not or "yes"
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
                **picture,
            },
        )
        of: Callable[[str], list[float]] = lambda key: [max(r[key] for r in row) for row in by_rank]  # noqa: E731
        return {
            "model": self.name,
            "arm": self.arm,
            "mesh": f"PP {mesh.pp} x EP {mesh.ep}",
            "layers by stage": "-".join(map(str, map(len, self.engine.partition.layers))),
            "tokens/s": args.batch * args.sequence / statistics.median(seconds),
            "steps s": ", ".join(f"{s:.4f}" for s in seconds),
            "peak over base GiB": max(of("peak")),
            "by pipeline rank GiB": ", ".join(f"{v:.2f}" for v in of("peak")),
            "activations GiB": ", ".join(f"{v:.4f}" for v in of("activations")),
            "requested GiB": ", ".join(f"{v:.4f}" for v in of("requested")),  # R is made of them
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
            trainer.step(self._next())  # makes AdamW's states, which belong to what is held
        with noting_ends(self.engine._gathered, self.ends):
            for _ in range(self.args.warm):
                self._untimed()
            while self._number < UNTIMED - 1:
                if trainer.captured is None or trainer.captured.captured or trainer.captured.why_not:
                    break
                self._untimed()
        settle_memory()  # what called steps left is in the way of the next arm

    def _untimed(self) -> None:
        self.trainer.gradients(self._next())
        self.trainer.optimizer.zero_grad(set_to_none=True)


def measure(args: argparse.Namespace, name: str, arms: list[str]) -> list[dict[str, Any]]:
    """Rows of arms that are in memory together, and whose steps take turns."""
    with ExitStack() as stack:
        running = [Running(args, name, arm, len(arms) == 1, stack) for arm in arms]
        for number in range(args.steps):
            for one in running:
                one.step(number)
        return [one.row() for one in running]


def planned_peaks(memory: Any) -> dict[str, float]:
    """GiB of this rank over a step's base by the plan's own figures: with everything kept, as planned, and the difference."""
    keep = peak = 0.0
    if memory.plan is not None and memory.timeline is not None:
        keep = plan_interleaved(memory.timeline, frozenset()).peak_bytes / GIB
        peak = memory.plan.peak_bytes / GIB
    return {"planned keep": keep, "planned peak": peak, "fall": keep - peak}


def compare(rows: list[dict[str, Any]]) -> None:
    """Of arms that offload, against the same without in the same run: time, and R = peak that fell / peak that was to fall."""
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
            # With experts made again it falls by what is not saved too, of which an offload's plan does not know.
            row[column] = "-" if "again" in row["arm"] else ", ".join(fell)


def timed(trainer: Any, engine: Any, number: int) -> tuple[float, float, float, float, float]:
    """Seconds of the slowest rank; peak over base and activations of this one, bytes; seconds until its host was through; of a
    step that is called, activations as tensors asked for them."""
    trainer.optimizer.zero_grad(set_to_none=True)
    gathered_step, device = engine._gathered, trainer.device
    held = []
    end = gathered_step.end
    gathered_step.end = lambda count: (held.append((torch.cuda.memory_allocated(), requested(device)[0])), end(count))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    dist.barrier()
    torch.cuda.synchronize()
    started = time.perf_counter()
    try:
        trainer.gradients(number)
    finally:
        del gathered_step.end
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    slowest = torch.tensor(time.perf_counter() - started, device="cuda", dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if trainer.captured is not None and trainer.captured.captured:
        # The allocator counted when the step was captured. Gathered weights, which stay, are counted as in the other arms.
        taken = trainer.captured.peak_bytes
        return float(slowest), taken + gathered_bytes(gathered_step), taken - trainer.captured.left_bytes, host, 0.0
    peak, asked = torch.cuda.max_memory_allocated(), requested(device)[1]
    return float(slowest), peak - base, peak - held[0][0], host, float(asked - held[0][1])


def reserved_over_allocated(trainer: Any) -> float:
    """Peaks of the steps since `settle_memory`."""
    allocated = torch.cuda.max_memory_allocated()
    if trainer.captured is not None and trainer.captured.captured:
        left = torch.cuda.memory_allocated() - trainer.captured.left_bytes  # held before a step
        allocated = max(allocated, left + trainer.captured.peak_bytes)
    return torch.cuda.max_memory_reserved() / allocated


@contextmanager
def noting_ends(gathered_step: Any, found: list[tuple[int, int]]) -> Iterator[None]:
    """Within, of each step that is called or captured (the last one is captured): by how much what tensors asked for was above
    what is held when the last backward is over; and what is freed and not free yet behind all."""
    end = gathered_step.end

    def noting(count: Any) -> None:
        now, most = requested(torch.device("cuda"))
        end(count)
        stats = torch.cuda.memory_stats()
        found.append((most - now, stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]))

    gathered_step.end = noting
    try:
        yield
    finally:
        del gathered_step.end


def gathered_bytes(gathered_step: Any) -> int:
    """Of the weights that are whole during a step."""
    held = [h for group in gathered_step._groups() for h in group.fsdp_params]
    return sum(t.untyped_storage().nbytes() for h in held for t in h.all_gather_outputs)


def watched(args: argparse.Namespace, trainer: Any, engine: Any, number: int, name: str) -> dict[str, float]:
    """One more step, called, with events around everything: bubble of this rank; the picture, from rank 0."""
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
    if dist.get_rank() == 0 and args.pictures:
        stem = results_folder() / f"pipeline-{name.replace(', ', '-').replace(' ', '-')}"
        perfetto(everything, Path(f"{stem}.trace.json"))
        draw(everything, Path(f"{stem}.png"), name)
    return {"bubble": bubble(everything)[trainer.mesh.pp_rank]}


def hidden_share(trainer: Any, engine: Any) -> dict[str, float]:
    """Of this rank's all-to-alls inside overlapped actions, in a step like the timed ones: if they were a graph's replays, it is
    captured anew with events in it."""
    if trainer.mesh.ep == 1:
        return {"hidden": 1.0, "transfers": 0.0, "waits": 0.0}
    meter = engine._runtime.context.meter
    captured = trainer.captured if trainer.captured is not None and trainer.captured.captured else None
    if captured is not None:
        captured.release()
    with metering_overlap(meter):
        for _ in range(UNTIMED):
            trainer.optimizer.zero_grad(set_to_none=True)
            meter.forget()
            trainer.gradients(UNTIMED)
            if captured is None or captured.captured:
                break
    for _ in range(2 if captured is not None else 0):
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.gradients(UNTIMED)
    transfers, waits = meter.milliseconds()
    if captured is not None:
        captured.release()  # before its events go
    meter.forget()
    return {"hidden": 1 - waits / transfers if transfers else 1.0, "transfers": transfers, "waits": waits}


@contextmanager
def metering_overlap(meter: Any) -> Iterator[None]:
    """Within, `meter` is on inside overlapped actions."""
    together = _RuntimeStep._together

    def metered(self: Any, forward: Action, backward: Action) -> None:
        meter.on = True
        try:
            together(self, forward, backward)
        finally:
            meter.on = False

    _RuntimeStep._together = metered  # type: ignore[method-assign]
    try:
        yield
    finally:
        _RuntimeStep._together = together  # type: ignore[method-assign]


def by_stream() -> str:
    """What the caching allocator holds for each stream of this rank, largest first."""
    held: dict[int, int] = {}
    for segment in torch.cuda.memory_snapshot():
        held[segment["stream"]] = held.get(segment["stream"], 0) + segment["total_size"]
    return ", ".join(f"{n / GIB:.1f}" for n in sorted(held.values(), reverse=True))


def gathered(mesh: Any, figures: dict[str, float]) -> list[list[dict[str, float]]]:
    """Of all processes, by pipeline rank."""
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
        "--in-turn", action="store_true", help="a model's arms are in memory together; their steps take turns"
    )
    parser.add_argument("--pictures", action="store_true", help="draw each arm's pipeline, and write a Perfetto trace")
    parser.add_argument("--name", default="pipeline")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows: list[dict[str, Any]] = []
    for name in args.models:
        for arms in [args.arms] if args.in_turn else [[arm] for arm in args.arms]:
            rows += measure(args, name, arms)
            compare(rows)
            gc.collect()
            if dist.get_rank() == 0:
                write(args.name, rows, world=dist.get_world_size(), arms={a: ARMS[a] for a in args.arms})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
