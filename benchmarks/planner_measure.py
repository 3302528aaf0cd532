"""Measures runs of the trainer on the GPUs of this machine: hands them to worker processes, and watches those.

Input: entries as of `benchmarks/planner_grid.py`, perhaps with a limit on what torch may reserve. Output: a line of
JSON for each in OUT/NAME.jsonl, written as it comes, so that nothing is lost if this ends; allocator histories and
workers' logs in OUT/NAME.tar.gz. Runs of one GPU run on all GPUs at once, those of two in pairs, and so on, the runs of
most GPUs first: a `Group` is the GPUs that share a run. The processes of a run are killed when it ends, fails or takes
too long.

As a script, this is one worker process. It imports everything at once, and touches a GPU only when it gets its run: a
line of JSON on standard input (`Job`), the rank in the environment as torchrun has it. It writes PARTS/PID.json
with this rank's figures, or its error, and ends: each run has new processes, as a user's run has, and leaves nothing
for the next. They wait with everything imported while the run before is on the GPU.

Figures, in bytes of this rank's GPU; None on a CPU:

    build_peak, built   allocated and reserved: the most until the trainer is built, and what is held then
    warm_peaks          the same, the most, of each step before the timed ones
    base                allocated and reserved before a timed step
    peak_allocated      of the timed steps, with what a replayed graph takes, which the allocator does not count
    peak_reserved       of the timed steps
    life_allocated, life_reserved   from before the build on; the latter has to fit, with what is outside of torch
    outside             of the whole device, less what torch reserved: context, kernels, NCCL, symmetric memory.
                        `outside_before` is that before this run's process group
    settled             untimed steps, until the manager measures and plans no more and a graph is captured
    seconds             of each timed step
    launch              of the host for an operation, when all else is done: see `forebay.estimate.calibrate.launch`
    skew                rows of the fullest rank's experts over a rank's mean: largest and mean of all layers and
                        microbatches of a step
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import balanced_ids, by_host, environment_of_rank, force_routing, outside, popular_ids, popularity_of
from planner_grid import Entry

from forebay.config import Config, from_mapping
from forebay.estimate.calibrate import launch
from forebay.estimate.layers import plan_layers
from forebay.models.families import moe_blocks
from forebay.train.data import load_mixture
from forebay.train.distributed import Mesh
from forebay.train.parallel import experts_in
from forebay.train.tokenizer import load_tokenizer
from forebay.train.trainer import Trainer

# Seconds that a run may take, and one that compiles, once its processes have imported everything.
SECONDS, COMPILING = 90, 180
NO_TIME = "no time was left"  # the error of what has not run
GRACE = 5  # seconds for the other ranks of a group to write their figures after one has failed
PORTS = 29650
# Steps: before timing at least and at most (`auto` tries plans for 40), timed, and with a recorded allocator history.
WARM, MOST, TIMED, TRACED = 2, 64, 7, 3
# Inductor would take all cores to compile, beside steps on another GPU that are being timed.
_QUIET = {"TORCHINDUCTOR_COMPILE_THREADS": "8"}


class Workers:
    """Processes that have imported everything and wait for a run, one for each GPU of each run.

    They are all there before the first run: processes that import beside a called step make it longer (GPT-OSS with EP 2 on two
    H200s: 246 ms alone, 308 beside two imports).

    Args:
        folder: gets ``parts/``, with a row of each process, and ``logs/``, with what it prints.
        script: is called as ``SCRIPT worker PARTS``, and calls `work`.
    """

    def __init__(self, number: int, folder: Path, script: str = __file__):
        self.parts, self._logs = folder / "parts", folder / "logs"
        self.parts.mkdir()
        self._logs.mkdir()
        self._waiting = [self._process(n, script) for n in range(number)]

    def _process(self, number: int, script: str) -> subprocess.Popen[str]:
        command = [sys.executable, script, "worker", str(self.parts)]
        with (self._logs / f"process-{number}.log").open("a") as out:
            environment = {**_QUIET, **os.environ, "PYTHONUNBUFFERED": "1"}
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=environment, text=True
            )

    def wait(self, ends: float) -> None:
        """Until all have imported everything or have ended, or the clock says `ends`."""
        while time.monotonic() < ends and not all(self._is_ready(p) or p.poll() is not None for p in self._waiting):
            time.sleep(0.1)

    def _is_ready(self, process: subprocess.Popen[str]) -> bool:
        return (self.parts / f"{process.pid}.ready").exists()

    def begin(self, job: dict[str, Any]) -> subprocess.Popen[str]:
        """Hand a waiting process its job: JSON, with the variables of its environment in `environment`."""
        process = self._waiting.pop()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process is gone, and has no row
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        return process

    def row(self, process: subprocess.Popen[str]) -> dict[str, Any] | None:
        """What a process has written, once it has."""
        path = self.parts / f"{process.pid}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def close(self) -> None:
        end(self._waiting)


def end(processes: list[subprocess.Popen[str]]) -> None:
    """Kill processes and wait for them, so that GPU memory is free."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    processes.clear()


@dataclass
class Group:
    """The `gpus` of one run after the other, and the processes of the current run. Owns the processes."""

    gpus: tuple[int, ...]
    workers: Workers
    entry: Entry | None = None
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    began: float = 0.0
    limit: float = 0.0
    reserved: int | None = None

    def give(self, entry: Entry, port: int, seconds: float | None, reserved: int | None) -> None:
        """Begin a run; `answer` ends it."""
        self.entry, self.began, self.reserved = entry, time.monotonic(), reserved
        usual = COMPILING if entry.sections["memory"].get("compile") else SECONDS
        self.limit = seconds if seconds is not None else usual
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))}
        for rank in range(len(self.gpus)):
            named = {**visible, **environment_of_rank(rank, len(self.gpus), port)}
            self.processes.append(self.workers.begin(asdict(Job(entry, named, reserved))))

    def answer(self) -> dict[str, Any] | None:
        """The row of the current run, once there is one; its processes have ended then."""
        gone = [p.poll() for p in self.processes]  # polled before the files are read: a process writes, then ends
        there = [self.workers.row(p) for p in self.processes]
        late = time.monotonic() - self.began > self.limit
        silent = [r for r, (row, code) in enumerate(zip(there, gone, strict=True)) if row is None and code is not None]
        failed = bool(silent) or any(row is not None and "error" in row for row in there)
        if None in there and not late:
            if not failed:
                return None
            self.limit = min(self.limit, time.monotonic() - self.began + GRACE)
            return None
        row = self._row(there, gone)
        self.stop()
        return row

    def _row(self, there: list[Any], gone: list[int | None]) -> dict[str, Any]:
        assert self.entry is not None
        e = self.entry
        row: dict[str, Any] = {
            "name": e.name,
            "group": e.group,
            "placement": e.placement,
            "gpus": e.gpus,
            "asked_skew": e.skew,
        }
        if self.reserved is not None:
            row["limit"] = self.reserved
        row |= {"seconds": round(time.monotonic() - self.began, 2), "ranks": there}
        errors = [r["error"] for r in there if r is not None and "error" in r]
        if errors:
            row |= {"error": errors[0], "oom": any(r is not None and r.get("oom", False) for r in there)}
        elif None in there:
            ended = {rank: code for rank, code in enumerate(gone) if code is not None}
            row |= {
                "error": f"processes ended: {ended}" if ended else f"took longer than {self.limit:.0f} s",
                "oom": False,
            }
        return row

    def stop(self) -> None:
        end(self.processes)
        self.entry = None


def measure(
    entries: Sequence[Entry],
    out: Path,
    name: str,
    gpus: int,
    *,
    seconds: float | None = None,
    deadline: float = 540,
    limits: dict[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Measure all `entries` that `gpus` GPUs can run.

    Args:
        seconds: limit for a run; None for the usual.
        deadline: seconds after which no run begins, and running ones are killed.
        limits: by name, bytes that torch may reserve on each GPU.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    ends, ports = time.monotonic() + deadline, count(PORTS)
    with tempfile.TemporaryDirectory() as folder:
        todo = [e for e in entries if e.gpus <= gpus]
        workers, groups = Workers(sum(e.gpus for e in todo), Path(folder)), list[Group]()
        try:
            _make_corpus(entries[0])
            workers.wait(ends)
            for size in sorted({e.gpus for e in todo}, reverse=True):
                groups = [Group(g, workers) for g in split(gpus, size)]
                # Runs that compile take longest: they come first, and the others fill the other groups meanwhile.
                own = sorted((e for e in todo if e.gpus == size), key=lambda e: not e.sections["memory"].get("compile"))
                for row in _phase(own, groups, ports, seconds, ends, limits or {}):
                    rows.append(row)
                    with (out / f"{name}.jsonl").open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(f"{row['seconds']:7.1f} s  {row['name']}  {row.get('error', '')[:160]}", flush=True)
                pack(out / f"{name}.tar.gz", Path(folder))
        finally:
            for group in groups:
                group.stop()
            workers.close()
    return rows


def split(gpus: int, size: int) -> list[tuple[int, ...]]:
    return [tuple(range(first, first + size)) for first in range(0, gpus - size + 1, size)]


def _phase(
    todo: list[Entry],
    groups: list[Group],
    ports: Iterator[int],
    seconds: float | None,
    ends: float,
    limits: dict[str, int],
) -> Iterator[dict[str, Any]]:
    """Rows as they come, until nothing is left to do, or no time."""
    while todo or any(g.entry is not None for g in groups):
        if time.monotonic() > ends:
            for entry in [*(g.entry for g in groups if g.entry is not None), *todo]:
                yield {"name": entry.name, "gpus": entry.gpus, "seconds": 0.0, "error": NO_TIME, "oom": False}
            for group in groups:
                group.stop()
            return
        for group in groups:
            if group.entry is not None and (row := group.answer()) is not None:
                yield row
            if group.entry is None and todo:
                entry = todo.pop(0)
                group.give(entry, next(ports), seconds, limits.get(entry.name))
        time.sleep(0.02)


def _make_corpus(entry: Entry) -> None:
    """Tokenize the data once; all trainers read it from the cache."""
    data = from_mapping(entry.sections).data
    load_mixture(data, load_tokenizer(data.tokenizer))


def pack(path: Path, folder: Path) -> None:
    """Histories and logs of `Workers` in `folder`."""
    partial = path.with_suffix(".partial")
    with tarfile.open(partial, "w:gz") as archive:
        for file in sorted([*folder.glob("parts/*.trace.gz"), *folder.glob("logs/*")]):
            archive.add(file, arcname=file.name)
    partial.rename(path)


@dataclass(frozen=True)
class Job:
    """A run. `environment`: variables of its process. `limit`: bytes that torch may reserve on each GPU; None for all."""

    entry: Entry
    environment: dict[str, str]
    limit: int | None = None


def work(parts: Path, run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Wait for a job on standard input, and write the row that `run` makes of it to PARTS/PID.json."""
    own = parts / f"{os.getpid()}.json"
    own.with_suffix(".ready").touch()
    job = json.loads(sys.stdin.readline() or "null")
    if job is None:
        return  # there was no run left
    os.environ |= job["environment"]  # imports have not asked for the GPUs yet
    try:
        row = run(job)
    except Exception as error:  # any error is this run's result
        row = failure(error)
    own.with_suffix(".partial").write_text(json.dumps(row))
    own.with_suffix(".partial").rename(own)
    os._exit(0)  # destroying the process group would wait for ranks that hang


def _run(parts: Path, given: dict[str, Any]) -> dict[str, Any]:
    job = Job(**{**given, "entry": Entry(**given["entry"])})
    if "RANK" in job.environment:
        torch.set_num_threads(1)  # as torchrun has it
    trace = parts / f"{job.entry.name}.trace.gz"
    return measured(job.entry, job.limit, trace if int(os.environ.get("RANK", 0)) == 0 else None)


def failure(error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    text = " ".join(str(error).split())
    oom = isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower()
    row: dict[str, Any] = {"error": f"{type(error).__name__}: {text[:600]}", "oom": oom}
    if torch.cuda.is_available():
        row |= {"peak_reserved": torch.cuda.max_memory_reserved(), "outside": outside()}
    return row


def measured(entry: Entry, limit: int | None, trace: Path | None) -> dict[str, Any]:
    """The figures of a trainer's life. It is gone when this returns."""
    config = from_mapping(by_host(entry.sections), origin=entry.name)
    started = time.perf_counter()
    gpu = config.device.type != "cpu" and torch.cuda.is_available()
    memory = Memory() if gpu else NoMemory()
    memory.limit(limit)
    history = History(trace) if trace is not None and entry.trace and gpu else None
    row: dict[str, Any] = {"outside_before": memory.outside()}
    partition = plan_layers(config, entry.gpus).partition if config.parallel.pp > 1 else None
    with Mesh.open(config) as mesh, Trainer(config, mesh, partition) as trainer:
        loads = Loads(trainer.model, trainer.config, mesh, entry.skew)
        row |= {
            "build_peak": memory.saw(),
            "built": memory.held(),
            "build_seconds": time.perf_counter() - started,
            "pp_rank": mesh.pp_rank,
        }
        if history:
            history.mark("built")
        peaks = []
        number, least = 1, TRACED if entry.trace else WARM  # the same on all ranks
        while number <= least or (not mesh.all(settled(trainer)) and number <= MOST):
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
        row |= loads.of_a_step(trainer, mesh, number + TIMED)
    row |= {"launch": launch(torch.device("cuda")) if gpu else None, "wall": time.perf_counter() - started}
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
    """Bytes that a replayed step takes besides what is held between steps."""
    captured = trainer.cuda_graph
    return captured.peak_bytes - captured.result_bytes if captured is not None and captured.is_captured else 0


def settled(trainer: Trainer) -> bool:
    captured = trainer.cuda_graph
    return trainer.memory.settled and (captured is None or captured.is_captured or captured.eager_reason is not None)


def about(trainer: Trainer) -> dict[str, Any]:
    """What the trainer reports."""
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
        "keys": asdict(trainer.config.step),
        "graph": trainer.graph_status,
        "is_captured": trainer.cuda_graph is not None and trainer.cuda_graph.is_captured,
        "graph_bytes": graph_bytes(trainer),
        "exchange": type(trainer.dispatcher).__name__,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "layers": None if trainer.pipeline is None else list(trainer.pipeline.partition.counts),
        "expandable": trainer.config.device.expandable_segments,
        "links": None if trainer.pipeline is None else trainer.pipeline.links,
    }


class Memory:
    """Figures of this process's GPU. `trainer.step` resets the allocator's peaks; `most` is the maximum over all `saw`."""

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
        """Limit what torch may reserve; a request beyond it is an out-of-memory error."""
        if nbytes is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / torch.cuda.mem_get_info()[1]))

    def saw(self, graph: int = 0) -> tuple[int, int]:
        """Allocated and reserved peaks since the last reset. `graph`: see `graph_bytes`."""
        self.wait()
        peak = max(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated() + graph)
        now = peak, torch.cuda.max_memory_reserved()
        self.most = max(self.most[0], now[0]), max(self.most[1], now[1])
        return now

    def held(self) -> dict[str, int]:
        return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}

    def counts(self) -> dict[str, int]:
        """How often the allocator emptied its cache to serve a request, and how often that was not enough."""
        stats = torch.cuda.memory_stats()
        return {"retries": stats.get("num_alloc_retries", 0), "ooms": stats.get("num_ooms", 0)}

    def outside(self) -> int:
        return outside()

    def wait(self) -> None:
        torch.cuda.synchronize()


class NoMemory:
    """The figures of a CPU: none."""

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


class History:
    """The caching allocator's history from now on, without stack traces: actions, addresses, sizes, streams, by time.

    The file is JSON, gzipped: columns `action` (a number into `actions`), `addr` (a number for each address, in the order of
    appearance, an index into `addresses`), `size`, `stream` (likewise), and `marks`: name -> number of entries before it.
    """

    def __init__(self, path: Path):
        self._path = path
        self._marks: dict[str, int] = {}
        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=2_000_000)

    def mark(self, name: str) -> None:
        torch.cuda.synchronize()
        self._marks[name] = time.time_ns() // 1000

    def write(self) -> int:
        """End the recording and write the file; returns the number of entries."""
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
    """Numbers things 0, 1, 2 in the order in which they are met."""

    def __init__(self) -> None:
        self._of: dict[Any, int] = {}

    def __getitem__(self, thing: Any) -> int:
        return self._of.setdefault(thing, len(self._of))

    @property
    def names(self) -> list[Any]:
        return list(self._of)


class Loads:
    """Forces drawn choices on the routers, if a skew is asked for, and counts on request what each rank's experts get.

    Compiled and captured code is not counted: counting would change it. An even choice is drawn once, for all routers.
    """

    def __init__(self, model: Any, config: Config, mesh: Mesh, skew: float | None):
        self._ep, self._skew, self._on = config.parallel.ep, skew, False
        self._counts: list[torch.Tensor] = []
        self._countable = self._ep > 1 and not (config.memory.compile or config.memory.graph)
        blocks = moe_blocks(model)
        if skew == 1:
            text, tokens = model.config.get_text_config(), config.microbatch(mesh.batch.size) * config.train.sequence
            even = balanced_ids(tokens, experts_in(text), text.num_experts_per_tok, mesh.device)
            force_routing([block.router for block in blocks], lambda *_: even.clone(), own_weights=True)
        for block in blocks:
            if skew not in (None, 1):
                force_routing([block.router], Favored(self._ep, skew))
            if self._countable:
                self._count(block.router)

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

    def _count(self, router: Any) -> None:
        original = router.forward

        def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, weights, ids = original(x)
            if self._on and torch.is_grad_enabled():
                owners = (ids // (logits.shape[1] // self._ep)).flatten()
                counts = torch.zeros(self._ep, dtype=torch.int64, device=ids.device)
                self._counts.append(counts.index_add_(0, owners, torch.ones_like(owners)))
            return logits, weights, ids

        router.forward = forward


class Favored:
    """Draws ids of which the first of `ep` ranks' experts get `skew` times a rank's mean load, and all others the same."""

    def __init__(self, ep: int, skew: float):
        self._ep, self._skew = ep, skew
        self._popularity: torch.Tensor | None = None

    def __call__(self, tokens: int, experts: int, k: int, device: torch.device) -> torch.Tensor:
        if self._popularity is None:
            self._popularity = self._found(experts, k).to(device)
        return popular_ids(self._popularity, tokens, k)

    def _found(self, experts: int, k: int) -> torch.Tensor:
        first = (torch.arange(experts) < experts // self._ep).float()

        def load(ids: torch.Tensor) -> torch.Tensor:
            return first[ids].mean() * self._ep

        popularity = popularity_of(load, first, k, self._skew, seed=0)
        if popularity.max() > 39:  # the end of the search
            raise ValueError(f"{self._ep} ranks of {experts} experts cannot have a skew of {self._skew}")
        return popularity


if __name__ == "__main__":
    _, folder = sys.argv[1:]
    work(Path(folder), partial(_run, Path(folder)))
