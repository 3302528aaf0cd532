"""Replays of histories: made by hand, made by the model itself, and one that does not follow its rules."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from benchmarks.planner_replay import Difference, LateExpandableAllocator, PlacedAllocator, read_history, replay
from forebay.estimate.allocator import Block

MIB = 1 << 20


def test_a_history_by_hand() -> None:
    """Two requests in one segment of 20 MiB, one in its own; a freed block is reused; the last segment is released. Blocks from
    before the history are ignored."""
    found = replay(
        [
            ("free_requested", 5, 512, 0),
            ("free_completed", 5, 512, 0),
            ("segment_free", 5, MIB, 0),
            ("segment_alloc", 1000, 20 * MIB, 0),
            ("alloc", 1000, 8 * MIB, 0),
            ("alloc", 1000 + 8 * MIB, 8 * MIB, 0),
            ("segment_alloc", 10**9, 12 * MIB, 0),
            ("alloc", 10**9, 12 * MIB - 5, 0),
            ("free_requested", 10**9, 12 * MIB, 0),
            ("free_completed", 10**9, 12 * MIB, 0),
            ("alloc", 10**9, 11 * MIB, 0),
            ("free_requested", 10**9, 11 * MIB, 0),
            ("free_completed", 10**9, 11 * MIB, 0),
            ("segment_free", 10**9, 12 * MIB, 0),
        ]
    )
    assert (found.segments, found.equal, found.differences, found.moved, found.unknown) == (2, 2, (), 0, 2)
    assert found.real_peak == found.model_peak == 32 * MIB
    assert found.model_allocated == 28 * MIB


def test_a_history_that_breaks_the_rules() -> None:
    """It takes a segment although 20 MiB are free, and later takes none."""
    found = replay(
        [
            ("segment_alloc", 0, 20 * MIB, 0),
            ("alloc", 0, 20 * MIB, 0),
            ("free_requested", 0, 20 * MIB, 0),
            ("free_completed", 0, 20 * MIB, 0),
            ("segment_alloc", 10**9, 20 * MIB, 0),
            ("alloc", 10**9, 20 * MIB, 0),
            ("alloc", 0, 20 * MIB, 0),
        ]
    )
    assert found.differences == (Difference(5, 20 * MIB, None), Difference(6, None, 20 * MIB))
    assert found.equal == 1 and found.moved == 2


def test_a_block_that_another_stream_reads_is_not_used_before_it_is_completed() -> None:
    events = [
        ("segment_alloc", 0, 30 * MIB, 0),
        ("alloc", 0, 30 * MIB, 0),
        ("free_requested", 0, 30 * MIB, 0),
        ("segment_alloc", 10**9, 30 * MIB, 0),
        ("alloc", 10**9, 30 * MIB, 0),
        ("free_completed", 0, 30 * MIB, 0),
        ("alloc", 0, 30 * MIB, 0),
    ]
    found = replay(events)
    assert found.segments == found.equal == 2 and not found.differences and not found.moved


@pytest.mark.parametrize("seed", range(2))
def test_the_allocators_own_histories_come_out_equal(seed: int) -> None:
    """Written by one model, replayed by another from requests and addresses."""
    numbers = random.Random(seed)
    events: list[tuple[str, int, int, int]] = []
    places = numbers.sample(range(1, 1000), 999)

    def place(size: int) -> int:
        address = places.pop() * (1 << 32)
        events.append(("segment_alloc", address, size, 0))
        return address

    first = PlacedAllocator(place)
    live: list[Block] = []
    for _ in range(400):
        if live and numbers.random() < 0.45:
            block = live.pop(numbers.randrange(len(live)))
            for action in ("free_requested", "free_completed"):
                events.append((action, block.address, block.size, 0))
            first.free(block)
            first.complete(block)
        elif numbers.random() < 0.01:
            events += [("segment_free", a, 0, 0) for a in first.empty_cache()]
        else:
            size, stream = int(2 ** numbers.uniform(8, 26)), numbers.choice([0, 0, 7])
            live.append(first.malloc(size, stream))
            events.append(("alloc", live[-1].address, size, stream))
    found = replay(events)
    assert found.differences == () and found.moved == 0 and found.equal == found.segments > 8
    assert found.real_peak == found.model_peak == first.peak_reserved
    assert found.model_allocated == first.peak_allocated


def test_a_history_of_a_segment_that_grows() -> None:
    """The free 4 MiB before its end serve the third request with 10 more; a page of 20 MiB that is free is unmapped."""
    start = 1 << 40
    events = [
        ("segment_map", start, 40 * MIB, 0),
        ("alloc", start, 36 * MIB, 0),
        ("free_requested", start, 36 * MIB, 0),
        ("free_completed", start, 36 * MIB, 0),
        ("alloc", start, 36 * MIB, 0),
        ("segment_map", start + 40 * MIB, 20 * MIB, 0),
        ("alloc", start + 36 * MIB, 14 * MIB, 0),
        ("free_requested", start, 36 * MIB, 0),
        ("free_completed", start, 36 * MIB, 0),
        ("segment_unmap", start, 20 * MIB, 0),
        ("alloc", start + 20 * MIB, 16 * MIB, 0),
        ("segment_map", start, 20 * MIB, 0),
        ("alloc", start, 20 * MIB, 0),
    ]
    found = replay(events)
    assert (found.segments, found.equal, found.differences, found.moved) == (3, 3, (), 0)
    assert found.real_peak == found.model_peak == 60 * MIB
    broken = replay(
        [*events[:5], ("segment_map", start + 40 * MIB, 40 * MIB, 0), ("alloc", start + 40 * MIB, 14 * MIB, 0)]
    )
    assert broken.differences == (Difference(6, 40 * MIB, 20 * MIB),) and broken.moved == 1


@pytest.mark.parametrize("seed", range(2))
def test_a_growing_segments_own_history_comes_out_equal(seed: int) -> None:
    numbers = random.Random(seed)
    events: list[tuple[str, int, int, int]] = []
    first, starts = (
        LateExpandableAllocator(),
        {(s, small): (1 << 45) * (2 * s + small + 1) for s in (0, 7) for small in (False, True)},
    )
    live: list[tuple[Block, int]] = []
    for _ in range(400):
        if live and numbers.random() < 0.45:
            block, address = live.pop(numbers.randrange(len(live)))
            events += [(action, address, block.size, 0) for action in ("free_requested", "free_completed")]
            first.free(block)
            first.complete(block)
        elif numbers.random() < 0.02:
            before = first.reserved
            first.empty_cache()
            events += [("segment_unmap", 0, before - first.reserved, 0)] if before > first.reserved else []
        else:
            size, stream = int(2 ** numbers.uniform(8, 26)), numbers.choice([0, 0, 7])
            block = first.malloc(size, stream)
            live.append((block, starts[stream, block.pool.small] + block.address))
            events += [("segment_map", 0, grown, stream) for grown in first.made]
            first.made.clear()
            events.append(("alloc", live[-1][1], size, stream))
    found = replay(events)
    assert found.differences == () and found.moved == 0 and found.equal == found.segments > 8
    assert found.real_peak == found.model_peak == first.peak_reserved


def test_a_file_of_columns_is_read(tmp_path: Path) -> None:
    content = {
        "actions": ["alloc", "segment_alloc"],
        "addresses": [1000],
        "streams": [0, 7],
        "action": [1, 0],
        "addr": [0, 0],
        "size": [2 * MIB, 512],
        "stream": [1, 1],
    }
    path = tmp_path / "x.trace.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    events = read_history(path)
    assert events == [("segment_alloc", 1000, 2 * MIB, 7), ("alloc", 1000, 512, 7)]
    assert replay(events).equal == 1
