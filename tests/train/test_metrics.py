"""The step's line to the letter, the metric files, the closing tables."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from forebay.errors import RunError
from forebay.memory.step import StepReport
from forebay.train.capacity_retry import CapacityRetry
from forebay.train.metrics import Reporter, StepRecord, Summary, peak_bytes, retry_line, step_line, summary_tables
from tests.train.common import metrics, small_files

RECORD = StepRecord(11, 17.6913, 2.57701, 1.00123, 1e-6, 696.03551, 237_089.6, 58_310_000_000, True)


def test_step_line() -> None:
    assert step_line(RECORD, 15) == (
        "step 00000011/00000015 | step-time 17.691 sec | cross-entropy-loss 2.5770 | load-balance-loss 1.0012 | "
        "learning-rate 1.000000e-06 | gradient-norm 696.0355 | tokens-per-second 237,090 | peak-gpu-memory 58.31 GB"
    )
    assert step_line(replace(RECORD, on_gpu=False), 15).endswith("| peak-host-memory 58.31 GB")


def test_rerun_line() -> None:
    assert retry_line(7, 15, CapacityRetry(rows=True, pages=False, factor=1.375)) == (
        "step 00000007/00000015 | run again exactly: rows went over parallel.capacity_factor, of which 1.375 would have been "
        "enough"
    )
    both = retry_line(7, 15, CapacityRetry(rows=True, pages=True, factor=None))
    assert both.endswith("rows went over parallel.capacity_factor; the stash had too few pages, and has more now")


def console() -> Console:
    return Console(file=io.StringIO(), width=60)


def printed(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def test_lines_and_metrics(tmp_path: Path) -> None:
    """Lines are not wrapped; a step that ran twice says so."""
    out = console()
    with Reporter(tmp_path, out, 15) as report:
        report.step(RECORD)
        report.step(replace(RECORD, retry=CapacityRetry(rows=True, pages=False, factor=1.4)))
        report.validation(11, 3.5)
        first, second, third = metrics(tmp_path)
    line = step_line(RECORD, 15)
    assert printed(out).startswith(f"{line}\nstep 00000011/00000015 | run again exactly")
    assert printed(out).count(f"{line}\n") == 2 and printed(out).count("run again exactly") == 1
    assert first["cross_entropy_loss"] == 2.57701 and first["peak_bytes"] == 58_310_000_000
    assert (first["run_again"], second["run_again"], second["enough_capacity_factor"]) == (0, 1, 1.4)
    assert "enough_capacity_factor" not in first and "retry" not in second
    assert third == {"step": 11, "validation_loss": 3.5}


def test_resuming_drops_the_records_of_lost_steps(tmp_path: Path) -> None:
    with Reporter(tmp_path, console(), 15) as report:
        for step in (9, 10, 11):
            report.step(replace(RECORD, step=step))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'[]\nnull\n\0\xff\n{"step": 9, "cut o')  # as after a power cut
    with Reporter(tmp_path, console(), 15, after=10) as report:
        report.step(RECORD)
    assert [record["step"] for record in metrics(tmp_path)] == [9, 10, 11]


def test_every_line_is_json(tmp_path: Path) -> None:
    with Reporter(tmp_path, console(), 1) as reporter:
        reporter.write({"step": 1, "a": float("nan")}, {"b": [1.0, float("inf")]})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": null, "b": [1.0, null]}\n'


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match=r"metrics\.jsonl cannot be written: File too large; free some space"),
        small_files(10),
        Reporter(tmp_path, Console(file=io.StringIO()), steps=3) as reporter,
    ):
        reporter.write({"step": 1, "x": 1.0}, {})


def test_moving_line_only_on_a_terminal(tmp_path: Path) -> None:
    for choice, terminal, expected in (
        ("auto", True, True),
        ("auto", False, False),
        ("on", False, True),
        ("off", True, False),
    ):
        out = Console(file=io.StringIO(), force_terminal=terminal, width=80)
        with Reporter(tmp_path, out, 15, progress=choice) as report:
            report.step(RECORD)
            assert (report._bar is not None) is expected
        assert step_line(RECORD, 15) in printed(out)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_host_peak_is_this_process() -> None:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    high_water = int(line.split()[1]) * 1024
    assert peak_bytes(torch.device("cpu")) == pytest.approx(high_water, rel=0.05)


def summary(on_gpu: bool = False, retried: int = 0, copies: Any = (None, None, None), **changes: Any) -> str:
    """The tables of three steps."""
    saved = changes.pop("saved", {"keep": 3 << 20, "recompute": 1 << 20, "offload": 5 << 20})
    retries = [CapacityRetry(True, False, None)] * retried + [None] * (3 - retried)
    figures = ((5.5, 1.0, 10**9), (4.0, 12_345.6, 15 * 10**8), (2.25, 12_345.6, 10**9))
    records = [
        replace(RECORD, cross_entropy_loss=loss, tokens_per_second=speed, peak_bytes=peak, on_gpu=on_gpu, retry=retry)
        for (loss, speed, peak), retry in zip(figures, retries, strict=True)
    ]
    base = Summary(
        period="one step of pipeline rank 0",
        placements={"a": "keep", "b": "recompute", "c": "offload", "d": "offload"},
        report=StepReport(0, changes.pop("moved", 50 << 20), *copies, saved, 0),
        records=records,
        folder=Path("runs/x"),
    )
    out = Console(file=io.StringIO(), width=160)
    for table in summary_tables(replace(base, **changes)):
        out.print(table)
    return printed(out)


def test_summary() -> None:
    on_cpu = summary()
    for part in (
        "keep",
        "3.00 MiB",
        "recompute",
        "1.00 MiB",
        "recomputed in backward",
        "offload",
        "5.00 MiB",
        "1.50 GB",
        "50.00 MiB moved in one step of pipeline rank 0",
        "on a CPU that is ordinary memory",
        "c, d",
        "12,346",
        "5.5000 -> 2.2500 (-3.2500",
        "peak host",
    ):
        assert part in on_cpu  # fmt: skip
    on_gpu = summary(on_gpu=True, copies=(54.25, 55.0, 0.31))
    for part in ("pinned host memory, out at 54.2 GB/s, back at 55.0 GB/s, waited 0.3 ms", "GPU memory", "peak GPU"):
        assert part in on_gpu
    assert "ordinary memory" not in on_gpu
    kept = summary(placements={"a": "keep"}, saved={"keep": 1}, moved=0)
    assert "nothing" in kept and "recompute " not in kept


@pytest.mark.parametrize(
    ("steps", "now", "enough", "message"),
    [
        (0, 2.0, 1.37, "no step; parallel.capacity_factor = 2, and 1.37 would have been enough"),
        (1, 1.25, 1.37, "1 step; parallel.capacity_factor = 1.25, and 1.37 would have been enough"),
        (2, 2.0, 1.37, "2 steps; parallel.capacity_factor = 2, and 1.37 would have been enough"),  # for want of pages
        (0, 1.25, 1.26, "no step; parallel.capacity_factor = 1.25 was just enough"),
        (3, None, None, "3 steps"),
    ],
)
def test_summary_of_retried_steps(steps: int, now: float | None, enough: float | None, message: str) -> None:
    text = summary(retried=steps, capacity_factor=now, enough_capacity_factor=enough)
    assert "run again" in text and message in text
    assert "run again" not in summary()
