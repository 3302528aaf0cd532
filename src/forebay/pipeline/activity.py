"""What the ranks of a pipeline ran in a step: a recorder, a picture, a trace for Perfetto, and the idle share of each rank.

Input: the runtime's calls around each action (`ActionRecorder`), then `Ran` records of all ranks on one clock. Output: a PNG
(`draw`), Chrome trace JSON (`perfetto`) and fractions (`bubble`). `ActionRecorder` owns the CUDA events of one step.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forebay.errors import UsageError
from forebay.pipeline.schedule import Action

# What a pipeline did in a step: a picture, a trace for Perfetto, and how long each rank stood still.
#
# In: `Ran` records of all ranks, on one clock. Out: a PNG (`draw`), Chrome trace JSON (`perfetto`), fractions (`bubble`).
# Nothing is kept, and no device is touched.
#
#     draw       above, one row a rank and one box an action, with its microbatch's number where it fits; an overlapped forward
#                and backward is one box in two halves. White numbers are of a rank's first stage, black ones of its others.
#                Below, every rank's memory over time
#     perfetto   one process a rank: a track of computation, one of communication, and a counter of memory
#     bubble     0.25 for a rank that computes in three quarters of the time between the first start and the last end of all
#
# Worked example, times in ms: rank 0 runs F 0-1 and B 3-5, rank 1 F 1-2 and B 2-4. The span is 0 to 5; rank 0 computes for 3 of
# it and rank 1 for 3: bubbles of 0.4 and 0.4.

COMPUTE = ("F", "B", "I", "W", "OVERLAP_F_B")
_COLOURS: Mapping[str, str] = {
    "F": "#4c8dd6",
    "B": "#3a9d5d",
    "I": "#8fcf9f",
    "W": "#e3b23c",
}
_OTHER = "#9a9a9a"  # sends, receives and whatever else a schedule does
_MEANING: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward of the input",
    "W": "backward of the weights",
}
_PART = re.compile(r"(\d+)([A-Z_]+?)(\d+)(?![0-9])")  # "0F3": stage, kind, microbatch
_DPI, _WIDTH, _ROW, _MEMORY, _AROUND = 100, 16.0, 0.5, 2.6, 1.5  # inches; the picture's height follows the ranks
_CHARACTER = 7.0  # pixels of a digit in the boxes' font


@dataclass(frozen=True)
class Ran:
    """One action that a rank ran.

    Attributes:
        rank: in the pipeline.
        kind: as torch names it: "F", "B", "I" (input's backward), "W" (weights' backward), "OVERLAP_F_B", "SEND_F", ...
        label: the action's own name, such as "0F3": stage, kind, microbatch; of an overlap "(0F3;7B1)OVERLAP_F_B".
        start_ms, end_ms: on a clock that all ranks share.
        memory_bytes: the rank's memory at the action's end.
    """

    rank: int
    kind: str
    label: str
    start_ms: float
    end_ms: float
    memory_bytes: int


def bubble(records: Iterable[Ran]) -> dict[int, float]:
    """By rank, the share of the span of all ranks in which it computes nothing.

    Time in which two of a rank's actions overlap counts once. Waiting for a message is no computation.

    Raises:
        ValueError: no records, or one that ends before it starts.
    """
    ranks = _by_rank(records)
    begin, end = _span(ranks)
    span = end - begin
    return {rank: 1.0 - _covered(ran) / span if span else 0.0 for rank, ran in ranks.items()}


def perfetto(records: Iterable[Ran], path: Path) -> None:
    """Write a trace that https://ui.perfetto.dev and chrome://tracing open. Time 0 is the first start.

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
            place = {"pid": rank, "tid": 0 if record.kind in COMPUTE else 1}
            events.append(
                {
                    "ph": "X",
                    "name": record.label,
                    "cat": record.kind,
                    "ts": start,
                    "dur": round(end - start, 3),
                    **place,
                }
            )
            events.append({"ph": "C", "name": "memory", "pid": rank, "ts": end, "args": {"bytes": record.memory_bytes}})
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")


def draw(records: Iterable[Ran], path: Path, title: str = "") -> None:
    """Write the picture as a PNG, 1600 pixels wide and 410 high plus 50 for every rank.

    Raises:
        ValueError: as `bubble`.
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError(
            "a picture of the pipeline needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    ranks = _by_rank(records)
    begin, end = _span(ranks)
    figure = Figure(figsize=(_WIDTH, _AROUND + _MEMORY + _ROW * len(ranks)), dpi=_DPI, layout="constrained")
    rows, memory = figure.subplots(2, 1, sharex=True, height_ratios=(_ROW * len(ranks) + 0.4, _MEMORY))
    rows.set_xlim(0.0, (end - begin) or 1.0)
    pixels = _WIDTH * _DPI * 0.93 / ((end - begin) or 1.0)  # of a millisecond; the rest is the axis' labels
    _draw_rows(rows, ranks, begin, pixels)
    _draw_memory(memory, ranks, begin)
    rows.set_title(title, loc="left")
    figure.savefig(path, format="png")


def _draw_rows(axes: Any, ranks: Mapping[int, Sequence[Ran]], begin: float, pixels: float) -> None:
    for row, ran in enumerate(ranks.values()):
        first = min((box.stage for record in ran for box in _boxes(record)), default=0)
        for record in ran:
            left, width = record.start_ms - begin, record.end_ms - record.start_ms
            for box in _boxes(record):
                place = row + box.low, box.height
                axes.broken_barh([(left, width)], place, facecolors=box.colour, edgecolors="white", linewidth=0.4)
                if box.text and len(box.text) * _CHARACTER <= width * pixels:
                    middle = left + width / 2, row + box.low + box.height / 2
                    colour = "white" if box.stage == first else "black"
                    axes.text(*middle, box.text, ha="center", va="center", fontsize=7, color=colour)
    idle = bubble(record for ran in ranks.values() for record in ran)
    axes.set_yticks(
        [row + 0.5 for row in range(len(ranks))], [f"rank {r}\n{idle[r]:.1%} idle" for r in ranks], fontsize=7
    )
    axes.set_ylim(len(ranks), 0)
    from matplotlib.patches import Patch

    kinds = [Patch(color=_COLOURS[kind], label=meaning) for kind, meaning in _MEANING.items()]
    axes.legend(handles=[*kinds, Patch(color=_OTHER, label="other")], loc="lower right", ncols=5, fontsize=7,
                bbox_to_anchor=(1.0, 1.0), frameon=False)  # fmt: skip


def boxes_of(record: Ran) -> list[tuple[str, int, int]]:
    """What an action computes: (kind, stage, microbatch), two of an overlap and one else."""
    return [(kind, int(stage), int(number)) for stage, kind, number in _PART.findall(record.label)]


class _DrawnBox(NamedTuple):
    low: float  # from the row's upper edge, whose height is 1
    height: float
    colour: str
    text: str = ""
    stage: int = -1


def _boxes(record: Ran) -> list[_DrawnBox]:
    """An action's box; an overlap has one for each of its parts, one above the other."""
    parts = [(int(stage), kind, number) for stage, kind, number in _PART.findall(record.label)]
    if record.kind == "OVERLAP_F_B" and parts:
        height = 0.8 / len(parts)
        return [
            _DrawnBox(0.1 + i * height, height, _COLOURS.get(kind, _OTHER), number, stage)
            for i, (stage, kind, number) in enumerate(parts)
        ]
    stage, _, number = parts[0] if parts else (-1, "", "")
    if record.kind not in _COLOURS:
        return [_DrawnBox(0.92, 0.08, _OTHER, stage=stage)]  # below the computation that it runs beside
    return [_DrawnBox(0.1, 0.8, _COLOURS[record.kind], number, stage)]


def _draw_memory(axes: Any, ranks: Mapping[int, Sequence[Ran]], begin: float) -> None:
    for rank, ran in ranks.items():
        ordered = sorted(ran, key=lambda record: record.end_ms)
        times = [record.end_ms - begin for record in ordered]
        axes.step(times, [r.memory_bytes / 2**30 for r in ordered], where="post", linewidth=1, label=f"rank {rank}")
    axes.set_ylabel("memory, GiB")
    axes.set_xlabel("ms")
    axes.legend(fontsize=7, ncols=2, loc="upper right")


def _tracks(rank: int) -> list[dict[str, Any]]:
    """Names of a rank's process and of its two tracks, and its place among the others."""
    named: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {rank}"}),
        ("process_sort_index", 0, {"sort_index": rank}),
        ("thread_name", 0, {"name": "computation"}),
        ("thread_name", 1, {"name": "communication"}),
    ]
    return [{"ph": "M", "name": name, "pid": rank, "tid": tid, "args": args} for name, tid, args in named]


def _by_rank(records: Iterable[Ran]) -> dict[int, list[Ran]]:
    ranks: dict[int, list[Ran]] = {}
    for record in records:
        if record.end_ms < record.start_ms:
            raise ValueError(
                f"{record.label} of rank {record.rank} ends at {record.end_ms} ms, before its start at {record.start_ms}"
            )
        ranks.setdefault(record.rank, []).append(record)
    if not ranks:
        raise ValueError("there are no records to show: nothing ran")
    return dict(sorted(ranks.items()))


def _span(ranks: Mapping[int, Sequence[Ran]]) -> tuple[float, float]:
    every = [record for ran in ranks.values() for record in ran]
    return min(r.start_ms for r in every), max(r.end_ms for r in every)


def _covered(ran: Sequence[Ran]) -> float:
    """Milliseconds in which at least one action computes."""
    total, reached = 0.0, float("-inf")
    for record in sorted((r for r in ran if r.kind in COMPUTE), key=lambda r: r.start_ms):
        total += max(record.end_ms - max(record.start_ms, reached), 0.0)
        reached = max(reached, record.end_ms)
    return total


# Records what a pipeline rank runs, as it runs: a watcher for `forebay.pipeline.runtime`.
#
# In: the runtime's calls around each action. Out: `Ran` records for `forebay.pipeline.activity`, on a clock that begins with the
# step.
#
# On a CUDA device times are those of the compute stream, by events; the host waits for nothing until `records` is asked. Ranks
# have a clock in common if they begin their steps together (a barrier).
#
# `ActionRecorder` owns the events of one step.


class ActionRecorder:
    """One step of one rank.

    Args:
        rank: in the pipeline.
        device: where it runs. Without a GPU, memory is 0.
    """

    def __init__(self, rank: int, device: torch.device):
        self._rank, self._gpu, self._device = rank, device.type == "cuda", device
        self._actions: list[tuple[Action, Any, Any, int]] = []
        self._open: Any = None
        self._zero = self._now()

    def began(self, action: Action) -> None:
        """See `forebay.pipeline.runtime.Watcher`."""
        self._open = self._now()

    def ended(self, action: Action) -> None:
        """See `forebay.pipeline.runtime.Watcher`."""
        held = torch.cuda.memory_allocated(self._device) if self._gpu else 0
        self._actions.append((action, self._open, self._now(), held))

    def records(self) -> list[Ran]:
        """The step so far. Waits for the device."""
        if self._gpu:
            torch.cuda.synchronize(self._device)
        return [
            Ran(self._rank, action.kind, str(action), self._since(began), self._since(ended), held)
            for action, began, ended, held in self._actions
        ]

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, moment: Any) -> float:
        return self._zero.elapsed_time(moment) if self._gpu else 1e3 * (moment - self._zero)
