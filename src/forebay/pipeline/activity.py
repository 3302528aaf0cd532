"""Actions that the ranks of a pipeline ran in a step: a recorder, a picture, a Perfetto trace, and each rank's idle share.

Input: the runtime's calls around each action (`ActionRecorder`), then the `ActionRecord`s of all ranks on one clock.
Output: fractions (`bubble`), Chrome trace JSON (`trace_json`) and a PNG (`draw`). `ActionRecorder` owns the CUDA events of
one step; the functions need no device.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.errors import UsageError
from forebay.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, COMPUTE, FORWARD, Action

MEANING: Mapping[str, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward of the input",
    BACKWARD_WEIGHT: "backward of the weights",
}
_COLORS: Mapping[str, str] = {
    FORWARD: "#4c8dd6",
    BACKWARD: "#3a9d5d",
    BACKWARD_INPUT: "#8fcf9f",
    BACKWARD_WEIGHT: "#e3b23c",
}
_OTHER = "#9a9a9a"  # sends and receives
_PART = re.compile(r"(\d+)([A-Z_]+?)(\d+)(?![0-9])")  # "0F3": stage, kind, microbatch
_DPI, _WIDTH, _ROW, _MEMORY, _AROUND = 100, 16.0, 0.5, 2.6, 1.5  # inches; the picture's height depends on the ranks
_CHARACTER = 7.0  # pixels of a digit in the boxes' font


@dataclass(frozen=True)
class ActionRecord:
    """One action that a rank ran.

    Attributes:
        rank: pipeline rank.
        kind: see `forebay.pipeline.schedule.Action`.
        label: the action as text, such as "0F3" (stage, kind, microbatch) or "(0F3;7B1)OVERLAP_F_B".
        start_ms, end_ms: on a clock that all ranks share.
        memory_bytes: memory of the rank at the end of the action.
    """

    rank: int
    kind: str
    label: str
    start_ms: float
    end_ms: float
    memory_bytes: int

    def parts(self) -> list[tuple[str, int, int]]:
        """(kind, stage, microbatch) of the action; two for an overlapped forward and backward."""
        return [(kind, int(stage), int(number)) for stage, kind, number in _PART.findall(self.label)]


def bubble(records: Iterable[ActionRecord]) -> dict[int, float]:
    """By rank, the share of time in which it computes nothing, between the first start and the last end of all ranks.

    Time in which two actions of a rank overlap counts once. Waiting for a message is not computing. Example, in ms: rank 0
    runs F 0-1 and B 3-5, rank 1 runs F 1-2 and B 2-4. Both compute for 3 of 5 ms: 0.4 and 0.4.

    Raises:
        ValueError: no records, or one that ends before it starts.
    """
    ranks = _by_rank(records)
    begin, end = _span(ranks)
    span = end - begin
    return {rank: 1.0 - _computing(ran) / span if span else 0.0 for rank, ran in ranks.items()}


def trace_json(records: Iterable[ActionRecord]) -> str:
    """A trace that https://ui.perfetto.dev and chrome://tracing open. Time 0 is the first start.

    Each rank is a process with a track of computation, one of communication, and a counter of memory.

    Raises:
        ValueError: as `bubble`.
    """
    ranks = _by_rank(records)
    begin, _ = _span(ranks)
    events: list[dict[str, Any]] = []
    for rank, ran in ranks.items():
        events += _tracks(rank)
        for record in ran:
            start, end = (round(1000 * (t - begin), 3) for t in (record.start_ms, record.end_ms))  # microseconds
            span = {"ts": start, "dur": round(end - start, 3), "pid": rank, "tid": 0 if record.kind in COMPUTE else 1}
            events.append({"ph": "X", "name": record.label, "cat": record.kind, **span})
            events.append({"ph": "C", "name": "memory", "pid": rank, "ts": end, "args": {"bytes": record.memory_bytes}})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _tracks(rank: int) -> list[dict[str, Any]]:
    """Names of a rank's process and of its two tracks, and its place among the others."""
    named: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {rank}"}),
        ("process_sort_index", 0, {"sort_index": rank}),
        ("thread_name", 0, {"name": "computation"}),
        ("thread_name", 1, {"name": "communication"}),
    ]
    return [{"ph": "M", "name": name, "pid": rank, "tid": tid, "args": args} for name, tid, args in named]


def draw(records: Iterable[ActionRecord], path: Path, title: str = "") -> None:
    """Write a picture as PNG, 1600 pixels wide, and 410 high plus 50 for every rank.

    Above, a row for each rank with a box for each action, and its microbatch's number where it fits. An overlapped forward
    and backward is one box in two parts. White numbers are of a rank's first stage, black ones of its others. Below, the
    memory of every rank over time.

    Raises:
        ValueError: as `bubble`.
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        advice = "a picture of the pipeline needs matplotlib, which is not installed: pip install 'forebay[plot]'"
        raise UsageError(advice) from error
    ranks = _by_rank(records)
    begin, end = _span(ranks)
    span = (end - begin) or 1.0
    figure = Figure(figsize=(_WIDTH, _AROUND + _MEMORY + _ROW * len(ranks)), dpi=_DPI, layout="constrained")
    rows, memory = figure.subplots(2, 1, sharex=True, height_ratios=(_ROW * len(ranks) + 0.4, _MEMORY))
    rows.set_xlim(0.0, span)
    per_ms = _WIDTH * _DPI * 0.93 / span  # pixels; the rest of the width has the axis' labels
    for row, ran in enumerate(ranks.values()):
        _draw_row(rows, row, ran, begin, per_ms)
    _label_rows(rows, ranks)
    _draw_memory(memory, ranks, begin)
    rows.set_title(title, loc="left")
    figure.savefig(path, format="png")


def _draw_row(axes: Any, row: int, ran: Sequence[ActionRecord], begin: float, per_ms: float) -> None:
    """A box for each computation, cut into two for an overlap; transfers are a line below the computation beside them."""
    first = min(stage for record in ran for _, stage, _ in record.parts())
    for record in ran:
        span = (record.start_ms - begin, record.end_ms - record.start_ms)
        if record.kind not in COMPUTE:
            axes.broken_barh([span], (row + 0.92, 0.08), facecolors=_OTHER, edgecolors="white", linewidth=0.4)
            continue
        parts = record.parts()
        height = 0.8 / len(parts)
        for n, (kind, stage, microbatch) in enumerate(parts):
            low, text = row + (0.1 + n * height), str(microbatch)
            axes.broken_barh([span], (low, height), facecolors=_COLORS[kind], edgecolors="white", linewidth=0.4)
            if len(text) * _CHARACTER <= span[1] * per_ms:
                middle = span[0] + span[1] / 2, low + height / 2
                color = "white" if stage == first else "black"
                axes.text(*middle, text, ha="center", va="center", fontsize=7, color=color)


def _label_rows(axes: Any, ranks: Mapping[int, Sequence[ActionRecord]]) -> None:
    from matplotlib.patches import Patch

    idle = bubble(record for ran in ranks.values() for record in ran)
    names = [f"rank {rank}\n{idle[rank]:.1%} idle" for rank in ranks]
    axes.set_yticks([row + 0.5 for row in range(len(ranks))], names, fontsize=7)
    axes.set_ylim(len(ranks), 0)
    kinds = [Patch(color=_COLORS[kind], label=meaning) for kind, meaning in MEANING.items()]
    axes.legend(handles=[*kinds, Patch(color=_OTHER, label="other")], loc="lower right", ncols=5, fontsize=7,
                bbox_to_anchor=(1.0, 1.0), frameon=False)  # fmt: skip


def _draw_memory(axes: Any, ranks: Mapping[int, Sequence[ActionRecord]], begin: float) -> None:
    for rank, ran in ranks.items():
        ordered = sorted(ran, key=lambda record: record.end_ms)
        times = [record.end_ms - begin for record in ordered]
        axes.step(times, [r.memory_bytes / 2**30 for r in ordered], where="post", linewidth=1, label=f"rank {rank}")
    axes.set_ylabel("memory, GiB")
    axes.set_xlabel("ms")
    axes.legend(fontsize=7, ncols=2, loc="upper right")


def _by_rank(records: Iterable[ActionRecord]) -> dict[int, list[ActionRecord]]:
    ranks: dict[int, list[ActionRecord]] = {}
    for record in records:
        if record.end_ms < record.start_ms:
            raise ValueError(
                f"{record.label} of rank {record.rank} ends at {record.end_ms} ms, before its start at {record.start_ms}"
            )
        ranks.setdefault(record.rank, []).append(record)
    if not ranks:
        raise ValueError("there are no records of actions")
    return dict(sorted(ranks.items()))


def _span(ranks: Mapping[int, Sequence[ActionRecord]]) -> tuple[float, float]:
    every = [record for ran in ranks.values() for record in ran]
    return min(r.start_ms for r in every), max(r.end_ms for r in every)


def _computing(ran: Sequence[ActionRecord]) -> float:
    """Milliseconds in which at least one action computes."""
    total, reached = 0.0, float("-inf")
    for record in sorted((r for r in ran if r.kind in COMPUTE), key=lambda r: r.start_ms):
        total += max(record.end_ms - max(record.start_ms, reached), 0.0)
        reached = max(reached, record.end_ms)
    return total


class ActionRecorder:
    """Records one step of one rank; a `forebay.pipeline.runtime.Watcher`.

    On a CUDA device, times are those of the compute stream, by events; the host does not wait before `records`. The clock
    begins with the recorder, so ranks share a clock if they make their recorders together, after a barrier.

    Args:
        rank: pipeline rank.
        device: where it runs. Without a GPU, memory is 0.
    """

    def __init__(self, rank: int, device: torch.device):
        self._rank, self._gpu, self._device = rank, device.type == "cuda", device
        self._actions: list[tuple[Action, Any, Any, int]] = []
        self._began: Any = None
        self._zero = self._now()

    def began(self, action: Action) -> None:
        self._began = self._now()

    def ended(self, action: Action) -> None:
        held = torch.cuda.memory_allocated(self._device) if self._gpu else 0
        self._actions.append((action, self._began, self._now(), held))

    def records(self) -> list[ActionRecord]:
        """The actions so far. Waits for the device."""
        if self._gpu:
            torch.cuda.synchronize(self._device)
        ms = self._milliseconds
        return [
            ActionRecord(self._rank, action.kind, str(action), ms(began), ms(ended), held)
            for action, began, ended, held in self._actions
        ]

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _milliseconds(self, time: Any) -> float:
        return self._zero.elapsed_time(time) if self._gpu else 1e3 * (time - self._zero)
