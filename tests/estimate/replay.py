"""A measured history of the caching allocator, run again on paper: are the segments the same, one by one?

In: the events that torch recorded (`torch.cuda.memory._record_memory_history`, the `device_traces` of a snapshot), as mappings
with `action`, `addr`, `size`, `stream`, or as such tuples. Out: a `Replay`: each real segment beside the one that
`forebay.estimate.allocator` takes for the same requests, both peaks, and where they first differ. Nothing is kept.

What the real one decides and paper is told: which requests come, on which stream, when a block is asked to be freed and when
other streams let go of it, and where the driver puts a segment. What paper decides: which block serves a request, whether it is
split, and when a segment is needed, of what size. So equal segments say that the rules are the real ones, whatever the model is.

A history that begins in the middle of a run frees what it never saw allocated: those events are counted and left out.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.estimate.allocator import Block, CachingAllocator

_ELSEWHERE = 1 << 46  # addresses of segments that the real run did not have: above any that it has


@dataclass(frozen=True)
class Difference:
    """An event at which paper and the real allocator part: `real` and `paper` are bytes of a new segment, or None for none."""

    event: int
    real: int | None
    paper: int | None


@dataclass(frozen=True)
class Replay:
    """What came of it.

    Attributes:
        segments: of the real run, their number; `equal` of them paper takes at the same event with the same size.
        differences: at all other events, in their order.
        moved: requests that paper serves from another address.
        unknown: events of blocks that were allocated before the history began.
        real_peak, paper_peak: bytes reserved at most, from the history's begin.
        real_allocated, paper_allocated: the same of bytes in use.
    """

    segments: int
    equal: int
    differences: tuple[Difference, ...]
    moved: int
    unknown: int
    real_peak: int
    paper_peak: int
    real_allocated: int
    paper_allocated: int


def read_history(path: Path) -> list[tuple[str, int, int, int]]:
    """The events of a file that `benchmarks/planner.py measure` wrote: gzipped JSON with columns of numbers into `actions`,
    `addresses` and `streams`, and sizes."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    columns = (content[name] for name in ("action", "addr", "size", "stream"))
    actions, addresses, streams = content["actions"], content["addresses"], content["streams"]
    return [(actions[a], addresses[b], size, streams[c]) for a, b, size, c in zip(*columns, strict=True)]


def replay(history: Iterable[Mapping[str, Any] | Sequence[Any]]) -> Replay:
    """Run a history again.

    Raises:
        ValueError: an event that is neither a mapping nor a tuple (action, addr, size, stream).
    """
    run = _ReplayRun()
    for number, event in enumerate(history):
        run.event(number, *_fields(event))
    return run.done()


def _fields(event: Mapping[str, Any] | Sequence[Any]) -> tuple[str, int, int, int]:
    if isinstance(event, Mapping):
        return event["action"], event["addr"], event["size"], event.get("stream", 0)
    if len(event) < 4:
        raise ValueError(f"an event is (action, addr, size, stream), this one has {len(event)} fields")
    return event[0], event[1], event[2], event[3]


class _ReplayRun:
    def __init__(self) -> None:
        self._paper = CachingAllocator(place=self._place)
        self._blocks: dict[int, Block] = {}  # by the real address
        self._leaving: dict[int, Block] = {}  # freed, and perhaps still read by other streams
        self._arrived: list[tuple[int, int]] = []  # real segments that the next request was given: address, bytes
        self._made: list[int] = []  # bytes of paper's segments for this request
        self._segments: dict[int, int] = {}
        self._dropped: set[int] = set()  # paper's segments, given back in this run of the real ones
        self._elsewhere = _ELSEWHERE
        self._differences: list[Difference] = []
        self._count = self._equal = self._moved = self._unknown = 0
        self._real = self._real_peak = self._live = self._live_peak = 0

    def event(self, number: int, action: str, address: int, size: int, stream: int) -> None:
        if action != "segment_free":
            self._dropped.clear()
        match action:
            case "segment_alloc":
                self._arrived.append((address, size))
                self._segments[address] = size
                self._count += 1
                self._real += size
                self._real_peak = max(self._real_peak, self._real)
            case "segment_free":
                self._give_back(number, address)
            case "alloc":
                self._alloc(number, address, size, stream)
            case "free_requested":
                self._requested(address)
            case "free_completed":
                self._completed(address)

    def done(self) -> Replay:
        return Replay(
            self._count,
            self._equal,
            tuple(self._differences),
            self._moved,
            self._unknown,
            self._real_peak,
            self._paper.peak_reserved,
            self._live_peak,
            self._paper.peak_allocated,
        )

    def _alloc(self, number: int, address: int, size: int, stream: int) -> None:
        block = self._paper.malloc(size, stream)
        self._blocks[address] = block
        self._live += block.size
        self._live_peak = max(self._live_peak, self._live)
        self._moved += block.address != address
        real = [size for _, size in self._arrived]
        if real == self._made:
            self._equal += len(real)
        else:
            self._differences.append(Difference(number, sum(real) or None, sum(self._made) or None))
        self._arrived, self._made = [], []

    def _requested(self, address: int) -> None:
        block = self._blocks.pop(address, None)
        if block is None:
            self._unknown += 1
            return
        self._live -= block.size
        # The block is handed back when the event says so: as if another stream read it.
        self._paper.record_stream(block, ("until completed", address))
        self._paper.free(block)
        self._leaving[address] = block

    def _completed(self, address: int) -> None:
        if self._leaving.pop(address, None) is not None:
            self._paper.done(("until completed", address))

    def _give_back(self, number: int, address: int) -> None:
        size = self._segments.pop(address, None)
        if size is None:
            self._unknown += 1
            return
        self._real -= size
        if not self._dropped:
            self._dropped = {-1, *self._paper.empty_cache()}
        if address not in self._dropped and address in self._paper.segments:
            self._differences.append(Difference(number, size, None))

    def _place(self, size: int, _: Any) -> int:
        self._made.append(size)
        for address, real in self._arrived:
            if real == size:
                return address
        self._elsewhere += size
        return self._elsewhere - size
