"""One process of `benchmarks/planner.py measure`: builds the trainers of configurations that it is told, one after the other.

In: a line of JSON on the standard input for each (`Job`), the process's rank in the environment as torchrun has it, its GPUs in
CUDA_VISIBLE_DEVICES. Out: for each a file PARTS/NAME.RANK.json with this rank's figures, or with what went wrong. A process that
failed, or holds memory when a trainer is gone, ends: the next configuration gets a fresh one, as a user's run would. So does
one of several ranks on GPUs: torch's symmetric memory knows groups by name, and takes the next of a name for the one before.

Figures, bytes of this rank's GPU; None on a CPU:

    build_peak, built   allocated and reserved: at most until the trainer is built, and held then
    warm_peaks       the same, at most, of each step before the timed ones
    base             allocated and reserved before a timed step
    peak_allocated   of the timed steps; with what a replayed graph takes, which the allocator does not see
    peak_reserved    of the timed steps
    life_allocated, life_reserved   from before the build on; the latter is what has to fit, with what is outside of torch
    outside          of the whole device, less what torch reserved: context, kernels, NCCL, symmetric memory. `outside_before`
                     is that before the process group of this configuration: a context, and what earlier ones left
    settled          steps until the manager measures and plans no more and a graph is captured; they are not timed
    seconds          of each timed step
    skew             slots that the fullest rank's experts received over a rank's mean, largest and mean of all layers and
                     microbatches of one more step
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import math
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ep import balanced_ids
from planner_grid import GRID, Entry, tiny

from forebay.config import Config, from_mapping
from forebay.models.families import moe_blocks
from forebay.train.distributed import Mesh
from forebay.train.trainer import Trainer

# Steps: before timing at least and at most (`auto` tries plans for 40), timed, and whose allocations are recorded.
WARM, MOST, TIMED, TRACED = 2, 64, 3, 3
LEFT = (
    32 << 20
)  # bytes that a trainer may leave behind without the process being given up: cuBLAS's workspaces come and go


@dataclass(frozen=True)
class Job:
    """`port` is where the ranks meet. `limit`: bytes that torch may reserve on each GPU; None for all there is."""

    name: str
    port: int
    limit: int | None = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    entries = {e.name: e for e in (tiny() if options.tiny else GRID)}
    rank, world = (int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1)))
    for line in sys.stdin:
        job = Job(**json.loads(line))
        os.environ["MASTER_PORT"] = str(job.port)
        trace = options.parts / f"{job.name}.trace.gz"
        try:
            row = measure(entries[job.name], job.limit, trace if rank == 0 else None)
            row["left"] = left = clean()
            row["ends"] = left > LEFT or (world > 1 and torch.cuda.is_available())
        except Exception as error:  # whatever it is, it is this configuration's result
            row = failure(error)
        path = options.parts / f"{job.name}.{rank}.json"
        path.with_suffix(".partial").write_text(json.dumps(row))
        path.with_suffix(".partial").rename(path)
        if row["ends"]:
            os._exit(0)  # destroying a group whose other ranks hang would wait for them


def failure(error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    text = " ".join(str(error).split())
    oom = isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower()
    row: dict[str, Any] = {"error": f"{type(error).__name__}: {text[:600]}", "oom": oom, "ends": True}
    if torch.cuda.is_available():
        row |= {"peak_reserved": torch.cuda.max_memory_reserved(), "outside": outside()}
    return row


def measure(entry: Entry, limit: int | None, trace: Path | None) -> dict[str, Any]:
    """A trainer's life, in figures. It is gone when this returns."""
    config = from_mapping(entry.sections, origin=entry.name)
    started = time.perf_counter()
    gpu = config.device.type != "cpu" and torch.cuda.is_available()
    memory = Memory() if gpu else NoMemory()
    memory.limit(limit)
    history = History(trace) if trace is not None and entry.trace and gpu else None
    row: dict[str, Any] = {"outside_before": memory.outside()}
    with Mesh.open(config) as mesh, Trainer(config, mesh) as trainer:
        loads = Loads(trainer.model, config, entry.skew) if config.parallel.ep > 1 else None
        row |= {
            "build_peak": memory.saw(),
            "built": memory.held(),
            "build_seconds": time.perf_counter() - started,
            "pp_rank": mesh.pp_rank,
        }
        if history:
            history.mark("built")
        peaks = []
        number, least = 1, TRACED if entry.trace else WARM  # of all ranks alike
        while number <= least or (not agreed(mesh, settled(trainer)) and number <= MOST):
            trainer.step(number)
            peaks.append(memory.saw(graph_bytes(trainer)))
            if history and number <= TRACED:
                history.mark(f"step {number}")
            number += 1
        if history:
            row["trace_entries"] = history.write()
        row |= {"settled": number - 1, "is_settled": settled(trainer), "warm_peaks": peaks}
        row |= timed(trainer, memory, number)
        row |= {"life_allocated": memory.most[0], "life_reserved": memory.most[1], "outside": memory.outside()}
        row |= memory.counts() | about(trainer)
        if loads is not None:
            row |= loads.of_a_step(trainer, mesh, number + TIMED)
        row["wall"] = time.perf_counter() - started
    return row


def timed(trainer: Trainer, memory: Memory | NoMemory, number: int) -> dict[str, Any]:
    seconds, bases, peaks = [], [], []
    for n in range(number, number + TIMED):
        bases.append(memory.held())
        memory.wait()
        started = time.perf_counter()
        trainer.step(n)
        memory.wait()
        seconds.append(time.perf_counter() - started)
        peaks.append(memory.saw(graph_bytes(trainer)))
    tokens = trainer.config.train.batch * trainer.config.train.sequence
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / sorted(seconds)[TIMED // 2],
        "base": bases[-1],
        "peak_allocated": max(p[0] for p in peaks),
        "peak_reserved": max(p[1] for p in peaks),
    }


def graph_bytes(trainer: Trainer) -> int:
    """What a replayed step takes beside what is held between steps."""
    captured = trainer.cuda_graph
    return captured.peak_bytes - captured.result_bytes if captured is not None and captured.is_captured else 0


def settled(trainer: Trainer) -> bool:
    captured = trainer.cuda_graph
    return trainer.memory.settled and (captured is None or captured.is_captured or captured.eager_reason is not None)


def agreed(mesh: Mesh, here: bool) -> bool:
    (wrong,) = mesh.max(not here)
    return not wrong


def about(trainer: Trainer) -> dict[str, Any]:
    """What the trainer says of itself."""
    report, pages = trainer.memory.report(), trainer.memory.pages
    placements = list(trainer.memory.placements.values())
    return {
        "planned_bytes": report.planned_bytes,
        "moved_bytes": report.moved_bytes,
        "gbps": [report.d2h_gbps, report.h2d_gbps],
        "wait_ms": report.wait_ms,
        "saved_bytes": report.saved_bytes_by_placement,
        "placements": {p: placements.count(p) for p in sorted(set(placements))},
        "host_bytes": trainer.memory.host_bytes,
        "pages_bytes": pages.device_bytes if pages is not None else 0,
        "graph": trainer.graph_status,
        "graph_bytes": graph_bytes(trainer),
        "exchange": type(trainer.dispatcher).__name__,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "layers": None if trainer.pipeline is None else [len(stage) for stage in trainer.pipeline.partition.layers],
    }


class Memory:
    """Figures of this process's GPU. `trainer.step` begins the allocator's peaks anew each time: `most` is over all `saw`."""

    def __init__(self) -> None:
        torch.cuda.set_device(
            int(os.environ.get("LOCAL_RANK", 0))
        )  # or all ranks would have a context on the first GPU
        torch.zeros((), device="cuda")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        self.most = (0, 0)

    def limit(self, nbytes: int | None) -> None:
        """What torch may reserve; a request beyond it is an out-of-memory error."""
        if nbytes is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / torch.cuda.mem_get_info()[1]))

    def saw(self, graph: int = 0) -> tuple[int, int]:
        """Peaks, allocated and reserved, since they were begun. `graph`: see `graph_bytes`."""
        self.wait()
        peak = max(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated() + graph)
        now = peak, torch.cuda.max_memory_reserved()
        self.most = max(self.most[0], now[0]), max(self.most[1], now[1])
        return now

    def held(self) -> dict[str, int]:
        return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}

    def counts(self) -> dict[str, int]:
        """How often the allocator gave back what it cached to serve a request, and how often that was not enough."""
        stats = torch.cuda.memory_stats()
        return {"retries": stats.get("num_alloc_retries", 0), "ooms": stats.get("num_ooms", 0)}

    def outside(self) -> int:
        return outside()

    def wait(self) -> None:
        torch.cuda.synchronize()


class NoMemory:
    """On a CPU."""

    most = (None, None)

    def limit(self, nbytes: int | None) -> None:
        pass

    def saw(self, graph: int = 0) -> tuple[int, int]:
        return 0, 0

    def held(self) -> None:
        return None

    def counts(self) -> dict[str, int]:
        return {}

    def outside(self) -> None:
        return None

    def wait(self) -> None:
        pass


def outside() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def clean() -> int:
    """Give back all that a trainer left; bytes that are still held."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


class History:
    """What the caching allocator did, from now on, without stack traces: actions, addresses, sizes, streams, by moment.

    The file is JSON, gzipped: columns `action` (a number into `actions`), `addr` (a number for each different address, in the
    order of appearance, from `addresses` on), `size`, `stream` (likewise), and `marks`: name -> number of entries before it.
    """

    def __init__(self, path: Path):
        self._path = path
        self._marks: dict[str, int] = {}
        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=2_000_000)

    def mark(self, name: str) -> None:
        torch.cuda.synchronize()
        self._marks[name] = time.time_ns() // 1000

    def write(self) -> int:
        """End it; the number of entries."""
        device = torch.cuda.current_device()
        entries = torch.cuda.memory._snapshot()["device_traces"][device]
        torch.cuda.memory._record_memory_history(enabled=None)
        actions, streams, addresses = Numbers(), Numbers(), Numbers()
        columns = {
            "action": [actions[e["action"]] for e in entries],
            "addr": [addresses[e["addr"]] for e in entries],
            "size": [e["size"] for e in entries],
            "stream": [streams[e["stream"]] for e in entries],
        }
        times = [e["time_us"] for e in entries]
        marks = {name: sum(t <= mark for t in times) for name, mark in self._marks.items()}
        content = {
            "marks": marks,
            "actions": actions.names,
            "streams": streams.names,
            "addresses": addresses.names,
            **columns,
        }
        self._path.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode()))
        return len(entries)


class Numbers:
    """0, 1, 2 for things, in the order in which they are met."""

    def __init__(self) -> None:
        self._of: dict[Any, int] = {}

    def __getitem__(self, thing: Any) -> int:
        return self._of.setdefault(thing, len(self._of))

    @property
    def names(self) -> list[Any]:
        return list(self._of)


class Loads:
    """Puts drawn choices on the routers, if a skew is asked for, and counts on request what each rank's experts get.

    Compiled and captured code is not counted: it would be changed by it.
    """

    def __init__(self, model: Any, config: Config, skew: float | None):
        self._ep, self._skew, self._on = config.parallel.ep, skew, False
        self._counts: list[torch.Tensor] = []
        self._countable = not (config.memory.compile or config.memory.graph)
        for block in moe_blocks(model):
            self._wrap(block.router)

    def of_a_step(self, trainer: Trainer, mesh: Mesh, number: int) -> dict[str, Any]:
        """`skew` of one more step."""
        if not self._countable:
            return {"skew": None if self._skew is None else [self._skew, self._skew]}
        self._on = True
        trainer.step(number)
        self._on = False
        total = torch.stack(self._counts).double()
        dist.all_reduce(total, group=mesh.expert_group)
        skews = total.amax(1) / total.mean(1)
        return {"skew": [float(skews.max()), float(skews.mean())]}

    def _wrap(self, router: Any) -> None:
        original, ep, skew = router.forward, self._ep, self._skew
        popularity: dict[int, torch.Tensor] = {}

        def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, weights, ids = original(x)
            tokens, experts, k = logits.shape[0], logits.shape[1], ids.shape[1]
            if skew == 1:
                ids = balanced_ids(tokens, experts, k, logits.device)
            elif skew is not None:
                if experts not in popularity:
                    popularity[experts] = favoured(experts, k, ep, skew).to(logits.device)
                noise = -torch.empty(tokens, experts, device=logits.device).exponential_().log()
                ids = (popularity[experts] + noise).topk(k, sorted=False).indices
            if skew is not None:
                weights = logits.float().softmax(-1).gather(1, ids).to(weights.dtype)
            if self._on and torch.is_grad_enabled():
                ranks = (ids // (experts // ep)).flatten()
                counts = torch.zeros(ep, dtype=torch.int64, device=ids.device)
                self._counts.append(counts.index_add_(0, ranks, torch.ones_like(ranks)))
            return logits, weights, ids

        router.forward = forward


def favoured(experts: int, k: int, ep: int, skew: float) -> torch.Tensor:
    """Log-popularity [E], such that drawing K of E without putting back gives the first of `ep` ranks' experts `skew` times a
    rank's mean load, and all others the same."""
    noise = -torch.empty(4096, experts).exponential_(generator=torch.Generator().manual_seed(0)).log()
    first = (torch.arange(experts) < experts // ep).float()
    low, high = 0.0, 40.0
    for _ in range(30):
        middle = (low + high) / 2
        load = first[(middle * first + noise).topk(k).indices].mean().item()
        low, high = (middle, high) if load * ep < skew else (low, middle)
    assert math.isclose(load * ep, skew, rel_tol=0.02), (
        f"{ep} ranks of {experts} experts cannot be given a skew of {skew}"
    )
    return low * first


if __name__ == "__main__":
    main()
