"""Replays recorded histories of CUDA's caching allocator on the estimator's model of it: are the segments the same?

    python -m benchmarks.planner_replay HISTORY.trace.gz...

Input: files that `planner.py measure` writes on a GPU, of the events of `torch.cuda.memory._record_memory_history`. Output: a
line for each. The history decides which requests come on which stream, when blocks and other streams release them, and where
the driver puts a segment. The model decides which block serves a request, whether it is split, and when a segment of what size
is needed, or how many pages of one that grows. Events of blocks that were allocated before the history began are counted and
ignored. A history does not say which requests come from a CUDA graph's pool, so what follows a capture is not comparable.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.estimate.allocator import Block, CachingAllocator
from forebay.estimate.expandable import ExpandableAllocator

Event = tuple[str, int, int, int]
"""(action, address, bytes, stream)"""
_ELSEWHERE = 1 << 46  # addresses of segments that the history does not have


class _LateAllocator(CachingAllocator):
    """Freed blocks are reused when they are complete: until then another stream may read them.

    Attributes:
        made: bytes that were reserved, in order; whoever reads it clears it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made = list[int]()
        self._freed = list[Block]()

    def complete(self, block: Block) -> None:
        if block in self._freed:
            self._freed.remove(block)
            super()._merge(block)

    def empty_cache(self) -> list[int]:
        for block in list(self._freed):
            self.complete(block)
        return super().empty_cache()

    def _merge(self, block: Block) -> Block:
        if not block.in_use:  # new pages
            return super()._merge(block)
        self._freed.append(block)
        return block

    def _reserve(self, size: int) -> None:
        self.made.append(size)
        super()._reserve(size)


class PlacedAllocator(_LateAllocator):
    """An allocator whose new segments have the addresses that `place` returns."""

    def __init__(self, place: Callable[[int], int]):
        super().__init__()
        self._address = place

    def _place(self, length: int) -> int:
        return self._address(length)


class LateExpandableAllocator(_LateAllocator, ExpandableAllocator):
    """The same with expandable segments, whose addresses begin at 0."""


@dataclass(frozen=True)
class Difference:
    """An event at which the two differ, with the bytes of their new segments, or None."""

    event: int
    real: int | None
    model: int | None


@dataclass(frozen=True)
class Replay:
    """A replay.

    Attributes:
        segments: of the history, or times that one grew; `equal` of them are the model's, at the same event and of the same size.
        differences: in order.
        moved: requests that the model serves from another address.
        unknown: events of blocks from before the history.
        real_peak, model_peak: peak bytes reserved.
        real_allocated, model_allocated: peak bytes in use.
    """

    segments: int
    equal: int
    differences: tuple[Difference, ...]
    moved: int
    unknown: int
    real_peak: int
    model_peak: int
    real_allocated: int
    model_allocated: int


def read_history(path: Path) -> list[Event]:
    """The events of a file of `benchmarks/planner.py measure`: gzipped JSON with columns of sizes and of numbers into `actions`,
    `addresses` and `streams`."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    columns = (content[name] for name in ("action", "addr", "size", "stream"))
    actions, addresses, streams = content["actions"], content["addresses"], content["streams"]
    return [(actions[a], addresses[b], size, streams[c]) for a, b, size, c in zip(*columns, strict=True)]


def replay(history: Sequence[Event]) -> Replay:
    run = _ReplayRun(any(action == "segment_map" for action, *_ in history))
    for number, event in enumerate(history):
        run.event(number, *event)
    return run.done()


class _ReplayRun:
    def __init__(self, expandable: bool):
        self._model = LateExpandableAllocator() if expandable else PlacedAllocator(self._place)
        self._starts: dict[Hashable, int] | None = {} if expandable else None  # real addresses of growing segments
        self._blocks: dict[int, Block] = {}  # by the real address
        self._leaving: dict[int, Block] = {}  # freed, and maybe read by other streams
        self._arrived: list[tuple[int, int]] = []  # the history's segments for the next request: address, bytes
        self._segments: dict[int, int] = {}
        self._dropped: set[int] = set()  # the model's segments that were released with the history's
        self._elsewhere = _ELSEWHERE
        self._differences: list[Difference] = []
        self._count = self._equal = self._moved = self._unknown = 0
        self._real = self._real_peak = self._live = self._live_peak = 0

    def event(self, number: int, action: str, address: int, size: int, stream: int) -> None:
        if action not in ("segment_free", "segment_unmap"):
            self._dropped.clear()
        match action:
            case "segment_alloc" | "segment_map":
                self._arrived.append((address, size))
                self._segments[address] = size
                self._count += 1
                self._real += size
                self._real_peak = max(self._real_peak, self._real)
            case "segment_free":
                self._give_back(number, address)
            case "segment_unmap":
                self._real -= size
                self._drop_cache()
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
            self._model.peak_reserved,
            self._live_peak,
            self._model.peak_allocated,
        )

    def _alloc(self, number: int, address: int, size: int, stream: int) -> None:
        block = self._model.malloc(size, stream)
        self._blocks[address] = block
        self._live += block.size
        self._live_peak = max(self._live_peak, self._live)
        start = (
            0 if self._starts is None else self._starts.setdefault((stream, block.pool.small), address - block.address)
        )
        self._moved += start + block.address != address
        real, made = [size for _, size in self._arrived], self._model.made
        if real == made:
            self._equal += len(real)
        else:
            self._differences.append(Difference(number, sum(real) or None, sum(made) or None))
        self._arrived, self._model.made = [], []

    def _requested(self, address: int) -> None:
        block = self._blocks.pop(address, None)
        if block is None:
            self._unknown += 1
            return
        self._live -= block.size
        self._model.free(block)
        self._leaving[address] = block

    def _completed(self, address: int) -> None:
        if (block := self._leaving.pop(address, None)) is not None:
            self._model.complete(block)

    def _give_back(self, number: int, address: int) -> None:
        size = self._segments.pop(address, None)
        if size is None:
            self._unknown += 1
            return
        self._real -= size
        self._drop_cache()
        if address not in self._dropped and address in self._model.segments:
            self._differences.append(Difference(number, size, None))

    def _drop_cache(self) -> None:
        """Once for each time that the history released all that was free."""
        if not self._dropped:
            self._dropped = {-1, *self._model.empty_cache()}

    def _place(self, size: int) -> int:
        for address, real in self._arrived:
            if real == size:
                return address
        self._elsewhere += size
        return self._elsewhere - size


def main() -> None:
    for name in sys.argv[1:]:
        found = replay(read_history(Path(name)))
        print(
            f"{name}: {found.equal} of {found.segments} segments equal, {found.moved} requests at other addresses; reserved "
            f"{found.model_peak} B, recorded {found.real_peak}"
        )


if __name__ == "__main__":
    main()
