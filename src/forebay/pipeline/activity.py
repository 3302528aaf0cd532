"""Actions that the ranks of a pipeline ran in a step: a recorder, a Perfetto trace, and each rank's idle share.

Input: the runtime's calls around each action (`ActionRecorder`), then the `ActionRecord`s of all ranks on one clock.
Output: fractions (`bubble`) and Chrome trace JSON (`trace_json`), which `forebay report` draws. `ActionRecorder` owns the CUDA
events of one step; the functions need no device.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forebay.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, COMPUTE, FORWARD, Action

MEANING: Mapping[str, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward of the input",
    BACKWARD_WEIGHT: "backward of the weights",
}
_PART = re.compile(r"(\d+)([A-Z_]+?)(\d+)(?![0-9])")  # "0F3": stage, kind, microbatch


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
