"""What a run shows and writes: a line a step, ``metrics.jsonl``, TensorBoard, the moving line, the closing table.

In: a `StepRecord` a step and, at the end, a `Summary`. Out: text on the console and files in the run's folder. Nothing
here computes; units are in the names.
"""

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from forebay.errors import UsageError
from forebay.policy import format_bytes
from forebay.train.capacity_retry import CapacityRetry
from forebay.train.durable import replace_text

_BY_RANK: Mapping[str, str] = {"rank_peaks": "peak_bytes_by_rank", "rank_reserved": "reserved_bytes_by_rank"}


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: 1-based number.
        seconds: wall time from the first forward to the end of the optimizer, of the slowest process.
        cross_entropy_loss: mean over the step's target tokens of all processes, in nats.
        load_balance_loss: the router's, mean over microbatches of all processes, before its coefficient; perfectly balanced
            is top_k. 0 for a model without routers.
        learning_rate, gradient_norm: of this step; the norm is before clipping.
        tokens_per_second: input tokens of all processes over `seconds`.
        peak_bytes: device memory allocated at most in this step, or the largest resident size on a CPU; of the process that
            has most.
        on_gpu: which of the two `peak_bytes` is.
        rerun: why the step was run again, exactly; None if it was not. `seconds` has both attempts.
        rank_peaks: `peak_bytes` by pipeline rank, of the process that has most.
        rank_reserved: what the caching allocator held at most, likewise; empty on a CPU.
    """

    step: int
    seconds: float
    cross_entropy_loss: float
    load_balance_loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    peak_bytes: int
    on_gpu: bool
    rerun: CapacityRetry | None = None
    rank_peaks: tuple[int, ...] = ()
    rank_reserved: tuple[int, ...] = ()


def step_line(record: StepRecord, steps: int) -> str:
    """The line of one step, in a form that is stable for those who parse it. GB are 10**9 bytes."""
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


def retry_line(step: int, steps: int, rerun: CapacityRetry) -> str:
    """The line of a step that was run again: what it lacked, and what would have been enough."""
    lacked = []
    if rerun.rows:
        enough = f", of which {rerun.factor:g} would have been enough" if rerun.factor is not None else ""
        lacked.append(f"rows went over parallel.capacity_factor{enough}")
    if rerun.pages:
        lacked.append("the stash had too few pages, and has more now")
    return f"step {step:08d}/{steps:08d} | run again exactly: {'; '.join(lacked)}"


def peak_bytes(device: torch.device) -> int:
    """Peak allocated bytes of a CUDA device since the last reset, or the process's largest resident size so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def reserved_bytes(device: torch.device) -> int:
    """What the caching allocator of a CUDA device held at most since the last reset; 0 elsewhere."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


class Reporter:
    """Owns the console's moving line and the metric files of a run; a context manager that closes them.

    Args:
        folder: the run's folder.
        console: where lines go.
        steps: number of the last step.
        after: step that the run resumes after; records of later steps, from a run that was killed, are dropped.
        tensorboard: also write events to ``<folder>/tensorboard``.
        progress: "on", "off", or "auto": on a terminal.

    Raises:
        UsageError: TensorBoard is asked for and not installed.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        steps: int,
        after: int = 0,
        tensorboard: bool = False,
        progress: str = "auto",
    ):
        self.console, self.steps = console, steps
        self._events = _event_writer(folder / "tensorboard", after) if tensorboard else None
        folder.mkdir(parents=True, exist_ok=True)
        _drop_after(folder / "metrics.jsonl", after)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._bar = _progress(console) if progress == "on" or (progress == "auto" and console.is_terminal) else None
        self._task = self._bar.add_task("training", total=steps, completed=after, loss="") if self._bar else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        self._file.close()
        if self._events:
            self._events.close()

    def step(self, record: StepRecord) -> None:
        """Show and write one step."""
        if record.rerun is not None:
            self.say(retry_line(record.step, self.steps, record.rerun))
        self.say(step_line(record, self.steps))
        values = asdict(record)
        del values["on_gpu"], values["rerun"]
        by_rank = {name: values.pop(key) for key, name in _BY_RANK.items()}
        values["run_again"] = int(record.rerun is not None)
        if record.rerun is not None and record.rerun.factor is not None:
            values["enough_capacity_factor"] = record.rerun.factor
        self.write(values, {name: figures for name, figures in by_rank.items() if figures})
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=record.step, loss=f"{record.cross_entropy_loss:.4f}")

    def validation(self, step: int, loss: float) -> None:
        """Show and write the validation loss, in nats a token, after a step."""
        self.say(f"step {step:08d}/{self.steps:08d} | validation-loss {loss:.4f}")
        self.write({"step": step, "validation_loss": loss})

    def say(self, text: str) -> None:
        """A plain line: no wrapping, no colours, whatever it holds."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def write(self, values: Mapping[str, float], lists: Mapping[str, Sequence[float]] = MappingProxyType({})) -> None:
        """One line of ``metrics.jsonl``, on disk when this returns to the operating system, and its TensorBoard scalars, of
        which `lists` are none."""
        self._file.write(json.dumps({**values, **lists}) + "\n")
        self._file.flush()
        if self._events:
            for name in values.keys() - {"step"}:
                self._events.add_scalar(name, values[name], int(values["step"]))


class SilentReporter(Reporter):
    """What processes other than the main one report to: it shows and writes nothing."""

    def __init__(self) -> None:
        """No folder, no console."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nothing to close."""

    def __enter__(self) -> Self:
        return self

    def step(self, record: StepRecord) -> None:
        """Nothing."""

    def validation(self, step: int, loss: float) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def write(self, values: Mapping[str, float], lists: Mapping[str, Sequence[float]] = MappingProxyType({})) -> None:
        """Nothing."""


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


def _event_writer(folder: Path, after: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise UsageError("log.tensorboard = true needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(folder), purge_step=after + 1 if after else None)


def _drop_after(file: Path, step: int) -> None:
    """Keep the records up to `step`; a last line cut off by a kill goes too."""
    if not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    replace_text(file, "".join(kept))


@dataclass(frozen=True)
class Summary:
    """What the closing tables say. Bytes and figures of copies are those of one cycle of the manager.

    Attributes:
        cycle: what that is: "one microbatch", or on a pipeline "one step of pipeline rank 0".
        placements: region path to placement.
        saved_bytes: what the regions' forward left for their backward, by where it waited: "keep" (on the device),
            "offload" (in the host store), "recompute" (what stays of regions that run again: their inputs).
        moved_bytes: bytes copied to the host store.
        d2h_gbps, h2d_gbps: GB/s of copies out and back; None where there is no copy engine.
        wait_ms: time the compute stream waited for copies; None likewise.
        first_loss, last_loss: of this process's first and last step.
        tokens_per_second: median over the steps after the first.
        peak_bytes: largest of all steps.
        on_gpu: the model was on a GPU.
        folder: the run's folder.
        steps_run_again: steps that went over a capacity and were run again, exactly.
        capacity_factor: in force; None without one.
        enough_capacity_factor: the smallest with which no row of any step would have gone over; None if it was not measured.
    """

    cycle: str
    placements: Mapping[str, str]
    saved_bytes: Mapping[str, int]
    moved_bytes: int
    d2h_gbps: float | None
    h2d_gbps: float | None
    wait_ms: float | None
    first_loss: float
    last_loss: float
    tokens_per_second: float
    peak_bytes: int
    on_gpu: bool
    folder: Path
    steps_run_again: int = 0
    capacity_factor: float | None = None
    enough_capacity_factor: float | None = None


def summary_tables(summary: Summary) -> list[Table]:
    """Where the saved bytes were, and what came of the run."""
    where = Table(title=f"Saved for backward in {summary.cycle}", title_justify="left")
    where.add_column("placement")
    where.add_column("regions", justify="right")
    where.add_column("saved", justify="right")
    where.add_column("where it waited for backward")
    for placement in dict.fromkeys(("keep", "recompute", "offload", *summary.placements.values())):
        regions = sum(chosen == placement for chosen in summary.placements.values())
        held = summary.saved_bytes.get(placement, 0)
        if regions or held:
            where.add_row(placement, str(regions), format_bytes(held), _where(placement, summary))
    result = Table(title="Result", title_justify="left", show_header=False)
    for row in _result_rows(summary):
        result.add_row(*row)
    return [where, result]


def _where(placement: str, summary: Summary) -> str:
    if placement == "recompute" and not summary.saved_bytes.get(placement):
        return "nowhere: experts made their first product again, and the rest is their halves'"
    if placement == "recompute":
        return "nowhere: all but this, the regions' inputs, was made again in backward"
    if placement == "stash":
        return "pages, as many as its rows filled"
    if placement != "offload":
        return "GPU memory" if summary.on_gpu else "memory"
    store = (
        "pinned host memory"
        if summary.on_gpu
        else "the host store; on a CPU that is ordinary memory, so nothing is won"
    )
    copied = (
        ("out at", summary.d2h_gbps, "GB/s"),
        ("back at", summary.h2d_gbps, "GB/s"),
        ("waited", summary.wait_ms, "ms"),
    )
    figures = [f"{name} {value:.1f} {unit}" for name, value, unit in copied if value is not None]
    return ", ".join([store, *figures])


def _result_rows(summary: Summary) -> list[tuple[str, str]]:
    change = summary.last_loss - summary.first_loss
    return [
        ("loss first -> last", f"{summary.first_loss:.4f} -> {summary.last_loss:.4f} ({change:+.4f} nats a token)"),
        ("tokens per second", f"{summary.tokens_per_second:,.0f} (median)"),
        ("recomputed", _paths(summary, "recompute")),
        ("offloaded", f"{_paths(summary, 'offload')}; {format_bytes(summary.moved_bytes)} moved in {summary.cycle}"),
        (f"peak {'GPU' if summary.on_gpu else 'host'} memory", f"{summary.peak_bytes / 1e9:.2f} GB"),
        *([("run again", _run_again(summary))] if summary.steps_run_again or summary.capacity_factor else []),
        ("run", str(summary.folder)),
    ]


def _run_again(summary: Summary) -> str:
    """How many steps went over a capacity, and what the capacity factor should have been."""
    count, now, enough = summary.steps_run_again, summary.capacity_factor, summary.enough_capacity_factor
    said = f"{count or 'no'} step{'s' if count > 1 else ''}"
    if now is None or enough is None:
        return said
    if enough == now or (enough > now and not count):  # capacities are rounded up
        return f"{said}; parallel.capacity_factor = {now:g} was just enough"
    return f"{said}; parallel.capacity_factor = {now:g}, and {enough:g} would have been enough"


def _paths(summary: Summary, placement: str) -> str:
    found = [p for p, where in summary.placements.items() if where == placement]
    if len(found) > 4:
        return f"{found[0]} ... {found[-1]} ({len(found)} regions)"
    return ", ".join(found) or "nothing"
