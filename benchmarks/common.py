"""What every benchmark shares: timing with CUDA events, memory over a base, and results that can be traced.

A result file holds the rows, the command, the hardware, the versions and the commit. Times are medians of warm steps.
"""

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30


def environment() -> dict[str, Any]:
    """Hardware, versions, commit and command of this run."""
    import transformers

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "commit": os.environ.get("FOREBAY_COMMIT") or _git("rev-parse", "HEAD"),
        "gpu": gpu.name if gpu else None,
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _git(*words: str) -> str | None:
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def results_folder() -> Path:
    """``benchmarks/results``, or where FOREBAY_RESULTS points."""
    folder = Path(os.environ.get("FOREBAY_RESULTS", Path(__file__).parent / "results"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Print the rows as a Markdown table and write them, with the environment, to ``results/NAME.json`` and ``.md``."""
    table = markdown(rows)
    print(table)
    payload = {"environment": environment(), **more, "rows": rows}
    (results_folder() / f"{name}.json").write_text(json.dumps(payload, indent=1) + "\n")
    (results_folder() / f"{name}.md").write_text(table + "\n")


def markdown(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def settle_memory() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def until_settled(mem: Any, step: Callable[[], Any], most: int = 60) -> int:
    """Call `step` until `mem` (a `forebay.Managed`) has measured, planned and tried; gives how often. Trials take 40 cycles at
    most, and there are a few before and behind them.

    Raises:
        RuntimeError: it did not settle in `most` steps.
    """
    for count in range(most):
        if count and mem.settled:
            return count
        step()
    if not mem.settled:
        raise RuntimeError(f"the manager is not settled after {most} steps")
    return most


def median_ms(step: Callable[[], Any], steps: int) -> tuple[float, list[float]]:
    """Median and all times of `steps` calls, each between two CUDA events on the current stream."""
    pairs = []
    for _ in range(steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairs]
    return statistics.median(times), times
