"""Shows and records a run: a line per step, ``metrics.jsonl``, a progress bar and the closing tables.

Input: a `StepRecord` per step and a `Summary` at the end. Output: text on the console, a file in the run's folder, and figures
for the loggers of `forebay.train.loggers`. Units are part of the names.
"""

import io
import json
import math
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from forebay.errors import RunError
from forebay.memory.step import StepReport
from forebay.policy import format_bytes
from forebay.train.capacity_retry import CapacityRetry
from forebay.train.durable import replace_text
from forebay.train.health import StepHealth
from forebay.train.loggers import Logger


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        seconds: wall time from the first forward to the end of the optimizer on the slowest process, both attempts included.
        cross_entropy_loss: mean over the target tokens of all processes, in nats.
        load_balance_loss: router loss before its coefficient, mean over the microbatches of all processes. Perfect balance gives
            top_k; a model without routers gives 0.
        peak_bytes: peak of allocated device memory in this step, or the resident size on a CPU; largest over processes.
    """

    step: int  # from 1
    seconds: float
    cross_entropy_loss: float
    load_balance_loss: float
    learning_rate: float
    gradient_norm: float  # before clipping
    tokens_per_second: float  # input tokens of all processes over `seconds`
    peak_bytes: int
    on_gpu: bool  # whether `peak_bytes` is device memory
    retry: CapacityRetry | None = None  # why the step was repeated
    health: StepHealth | None = None  # every `log.health` steps
    peak_bytes_by_rank: tuple[int, ...] = ()  # of each pipeline rank
    reserved_bytes_by_rank: tuple[int, ...] = ()  # peak of each pipeline rank's caching allocator; empty on a CPU


def step_line(record: StepRecord, steps: int) -> str:
    """The line of one step. The format is stable, so that scripts can parse it. GB are 10**9 bytes."""
    return " | ".join(
        (
            f"step {record.step:08d}/{steps:08d}",
            f"step-time {record.seconds:.3f} sec",
            f"cross-entropy-loss {record.cross_entropy_loss:.4f}",
            f"load-balance-loss {record.load_balance_loss:.4f}",
            f"learning-rate {record.learning_rate:.6e}",
            f"gradient-norm {record.gradient_norm:.4f}",
            f"tokens-per-second {record.tokens_per_second:,.0f}",
            f"peak-{'gpu' if record.on_gpu else 'host'}-memory {record.peak_bytes / 1e9:.2f} GB",
        )
    )


def retry_line(step: int, steps: int, retry: CapacityRetry) -> str:
    """The line of a step that was repeated: what it exceeded, and what would have been enough."""
    reasons = []
    if retry.rows:
        enough = f", of which {retry.factor:g} would have been enough" if retry.factor is not None else ""
        reasons.append(f"rows went over parallel.capacity_factor{enough}")
    if retry.pages:
        reasons.append("the stash had too few pages, and has more now")
    return f"step {step:08d}/{steps:08d} | run again exactly: {'; '.join(reasons)}"


def peak_bytes(device: torch.device) -> int:
    """Peak allocated bytes of a CUDA device since the last reset; elsewhere the process's peak resident size."""
    if device.type == "cuda":
        return allocator_bytes(device, "allocated", "peak")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def reserved_bytes(device: torch.device) -> int:
    """Peak reserved bytes of a CUDA device since the last reset; 0 elsewhere."""
    return allocator_bytes(device, "reserved", "peak") if device.type == "cuda" else 0


def allocator_bytes(device: torch.device, what: str, when: str) -> int:
    """A figure of torch's caching allocator for a CUDA device.

    `torch.cuda.memory_allocated` and its kin flatten all of the allocator's statistics for one of them, which takes half a
    millisecond; a step asks for three while the device waits.

    Args:
        what: "allocated" or "reserved".
        when: "current", or "peak" since the last reset.
    """
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats[f"{what}_bytes"]["all"][when]) if stats else 0


def usable_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that this process holds or could have: without those of other processes and of CUDA's context."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


class Reporter:
    """Writes the lines and metric files of a run. A context manager that owns the progress bar and the open files.

    Args:
        steps: number of the last step.
        after: step after which the run resumes. Records of later steps, which a killed run left, are dropped.
        loggers: receive the figures too, and are closed at the end.
        progress: progress bar: "on", "off", or "auto" (on a terminal).
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        steps: int,
        after: int = 0,
        loggers: Sequence[Logger] = (),
        progress: str = "auto",
    ):
        self.console, self.steps = console, steps
        self._loggers, self._reruns = loggers, 0
        folder.mkdir(parents=True, exist_ok=True)
        _drop_after(folder / "metrics.jsonl", after)
        self._file: TextIO = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._bar = _progress(console) if progress == "on" or (progress == "auto" and console.is_terminal) else None
        self._task = self._bar.add_task("training", total=steps, completed=after, loss="") if self._bar else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._bar:
            self._bar.stop()
        with nullcontext() if error is None else suppress(OSError):  # it still holds a line that could not be written
            self._file.close()
        for logger in self._loggers:
            logger.close(failed=error is not None)

    def step(self, record: StepRecord) -> None:
        if record.retry is not None:
            self.say(retry_line(record.step, self.steps, record.retry))
        self.say(step_line(record, self.steps))
        values = asdict(replace(record, health=None))
        del values["on_gpu"], values["retry"], values["health"]
        by_rank = {name: values.pop(name) for name in ("peak_bytes_by_rank", "reserved_bytes_by_rank")}
        values["run_again"] = int(record.retry is not None)
        if record.retry is not None and record.retry.factor is not None:
            values["enough_capacity_factor"] = record.retry.factor
        self.write(values, {name: figures for name, figures in by_rank.items() if figures})
        self._reruns += record.retry is not None
        if record.health is not None:
            self.health(record.step, record.health)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=record.step, loss=f"{record.cross_entropy_loss:.4f}")

    def health(self, step: int, health: StepHealth) -> None:
        """Show and write how processes and experts were doing in a step."""
        if line := health.line():
            self.say(f"step {step:08d}/{self.steps:08d} | {line}")
        lists = health.lists()
        self.write({"step": step, "rerun_steps": self._reruns, **health.scalars()}, lists)
        for logger in self._loggers:
            logger.lists(step, lists)

    def validation(self, step: int, loss: float) -> None:
        """Show and write the validation loss after a step, in nats per token."""
        self.say(f"step {step:08d}/{self.steps:08d} | validation-loss {loss:.4f}")
        self.write({"step": step, "validation_loss": loss}, {})

    def say(self, text: str) -> None:
        """Print a plain line, without wrapping, markup or colors."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def write(self, values: Mapping[str, float], lists: Mapping[str, Sequence[float]]) -> None:
        """Append a line to ``metrics.jsonl`` and flush it; `values` go to the loggers too.

        A number that is not finite is null in the line: JSON has no NaN and no infinity.

        Raises:
            RunError: the line cannot be written.
        """
        line: dict[str, Any] = {name: _finite(value) for name, value in values.items()}
        line |= {name: [_finite(value) for value in figures] for name, figures in lists.items()}
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"{self._file.name} cannot be written: {error.strerror}; free some space, or set log.folder to another disk"
            ) from error
        scalars = {name: value for name, value in values.items() if name != "step"}
        for logger in self._loggers:
            logger.scalars(int(values["step"]), scalars)


class SilentReporter(Reporter):
    """The reporter of processes other than the main one: it prints and writes nothing."""

    def __init__(self) -> None:
        self.steps, self._bar, self._task, self._file = 0, None, None, io.StringIO()
        self._loggers, self._reruns = (), 0

    def say(self, text: str) -> None:
        """Do nothing."""

    def write(self, values: Mapping[str, float], lists: Mapping[str, Sequence[float]]) -> None:
        """Do nothing."""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _drop_after(file: Path, step: int) -> None:
    """Keep the records up to `step`. Lines that a kill or a power cut left damaged are dropped too."""
    if not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    replace_text(file, "".join(kept))


@dataclass(frozen=True)
class Summary:
    """The content of the closing tables."""

    period: str  # what bytes and copies count: "one microbatch", or with a pipeline "one step of pipeline rank 0"
    placements: Mapping[str, str]  # of each region, by its path
    report: StepReport  # of the last step's backward
    records: Sequence[StepRecord]  # of all steps
    folder: Path
    capacity_factor: float | None = None  # the configured one; None without a capacity
    enough_capacity_factor: float | None = None  # smallest factor that would have kept every row; None if not measured

    @property
    def on_gpu(self) -> bool:
        return self.records[-1].on_gpu

    @property
    def retried_steps(self) -> int:
        return sum(record.retry is not None for record in self.records)


def summary_tables(summary: Summary) -> list[Table]:
    """Tables of the saved bytes by placement, and of the results."""
    where = Table(title=f"Saved for backward in {summary.period}", title_justify="left")
    where.add_column("placement")
    where.add_column("regions", justify="right")
    where.add_column("saved", justify="right")
    where.add_column("where it waited for backward")
    for placement in dict.fromkeys(("keep", "recompute", "offload", *summary.placements.values())):
        regions = sum(chosen == placement for chosen in summary.placements.values())
        held = summary.report.saved_bytes_by_placement.get(placement, 0)
        if regions or held:
            where.add_row(placement, str(regions), format_bytes(held), _where(placement, summary))
    result = Table(title="Result", title_justify="left", show_header=False)
    for row in _result_rows(summary):
        result.add_row(*row)
    return [where, result]


def _where(placement: str, summary: Summary) -> str:
    if placement == "recompute":
        if summary.report.saved_bytes_by_placement.get(placement):
            return "nowhere: recomputed in backward from the regions' inputs, counted here"
        return "nowhere: experts recomputed their first product; the rest belongs to their sublayers"
    if placement == "stash":
        return "pages, as many as the rows filled"
    if placement != "offload":
        return "GPU memory" if summary.on_gpu else "memory"
    on_cpu = "the host store; on a CPU that is ordinary memory, so nothing is saved"
    of = summary.report
    figures = copy_figures(of.d2h_gbps, of.h2d_gbps, of.wait_ms)
    return ", ".join(["pinned host memory" if summary.on_gpu else on_cpu, *figures])


def copy_figures(d2h_gbps: float | None, h2d_gbps: float | None, wait_ms: float | None) -> list[str]:
    """Those of `StepReport` that were measured, in words."""
    copied = ("out at", d2h_gbps, "GB/s"), ("back at", h2d_gbps, "GB/s"), ("waited", wait_ms, "ms")
    return [f"{name} {value:.1f} {unit}" for name, value, unit in copied if value is not None]


def _result_rows(summary: Summary) -> list[tuple[str, str]]:
    records = summary.records
    first, last = records[0].cross_entropy_loss, records[-1].cross_entropy_loss
    # The first step warms up.
    tokens_per_second = statistics.median(r.tokens_per_second for r in records[1:] or records)
    peak, moved = max(r.peak_bytes for r in records), format_bytes(summary.report.moved_bytes)
    return [
        ("loss first -> last", f"{first:.4f} -> {last:.4f} ({last - first:+.4f} nats a token)"),
        ("tokens per second", f"{tokens_per_second:,.0f} (median)"),
        ("recomputed", _paths(summary, "recompute")),
        ("offloaded", f"{_paths(summary, 'offload')}; {moved} moved in {summary.period}"),
        (f"peak {'GPU' if summary.on_gpu else 'host'} memory", f"{peak / 1e9:.2f} GB"),
        *([("run again", _retries(summary))] if summary.retried_steps or summary.capacity_factor else []),
        ("run", str(summary.folder)),
    ]


def _retries(summary: Summary) -> str:
    """The number of steps that exceeded a capacity, and the capacity factor that would have been enough."""
    count, now, enough = summary.retried_steps, summary.capacity_factor, summary.enough_capacity_factor
    steps = f"{count or 'no'} step{'s' if count > 1 else ''}"
    if now is None or enough is None:
        return steps
    if enough == now or (enough > now and not count):  # the dispatcher rounds capacities up
        return f"{steps}; parallel.capacity_factor = {now:g} was just enough"
    return f"{steps}; parallel.capacity_factor = {now:g}, and {enough:g} would have been enough"


def _paths(summary: Summary, placement: str) -> str:
    found = [p for p, where in summary.placements.items() if where == placement]
    if len(found) > 4:
        return f"{found[0]} ... {found[-1]} ({len(found)} regions)"
    return ", ".join(found) or "nothing"
