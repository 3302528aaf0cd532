"""The caching allocator on paper: every rule by a hand count, and what must hold after any order of requests."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.estimate.allocator import Block, CachingAllocator, OutOfMemory

KIB, MIB = 1 << 10, 1 << 20


def test_requests_are_rounded_to_512_bytes() -> None:
    paper = CachingAllocator()
    assert [paper.malloc(n).size for n in (1, 512, 513, 1000)] == [512, 512, 1024, 1024]
    assert paper.allocated == 3072 and paper.reserved == 2 * MIB


@pytest.mark.parametrize(
    ("request_", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_sizes_of_segments(request_: int, segment: int) -> None:
    paper = CachingAllocator()
    paper.malloc(request_)
    assert paper.reserved == segment


def test_a_small_rest_of_a_large_block_is_handed_out_with_it() -> None:
    """1 MiB is too little to split off, one block more is enough."""
    for rest, split in ((MIB, False), (MIB + 512, True)):
        paper = CachingAllocator()
        paper.free(paper.malloc(20 * MIB))
        block = paper.malloc(20 * MIB - rest)
        assert (block.size == 20 * MIB - rest) is split
        assert paper.allocated == block.size and paper.reserved == 20 * MIB


def test_a_small_block_is_split_to_the_last_512_bytes() -> None:
    paper = CachingAllocator()
    blocks = [paper.malloc(MIB) for _ in range(2)]
    assert paper.reserved == 2 * MIB
    paper.free(blocks[0])
    assert paper.malloc(MIB - 512).size == MIB - 512
    assert paper.malloc(512).address == blocks[0].address + MIB - 512
    assert paper.reserved == 2 * MIB


def test_small_and_large_requests_have_segments_of_their_own() -> None:
    paper = CachingAllocator()
    paper.free(paper.malloc(30 * MIB))
    paper.malloc(MIB)
    assert paper.reserved == 32 * MIB


def test_the_best_fit_then_the_lowest_address() -> None:
    paper = CachingAllocator()
    first, second, third = (paper.malloc(n * MIB) for n in (30, 12, 12))
    for block in (third, first, second):
        paper.free(block)
    assert paper.malloc(12 * MIB).address == second.address
    assert paper.malloc(11 * MIB).address == third.address
    assert paper.malloc(11 * MIB).address == first.address
    assert paper.reserved == 54 * MIB


def test_free_neighbours_become_one() -> None:
    """Three blocks of 8 MiB lie in two segments of 20: with the middle ones free, 16 MiB fit into the first again."""
    paper = CachingAllocator()
    blocks = [paper.malloc(8 * MIB) for _ in range(4)]
    assert paper.reserved == 40 * MIB
    for n in (1, 0):
        paper.free(blocks[n])
    assert paper.malloc(16 * MIB).address == blocks[0].address and paper.reserved == 40 * MIB


def test_fragments_do_not_add_up() -> None:
    """20 MiB are free in holes of 10, and 20 MiB need a segment: this is what a sum of live bytes does not see."""
    paper = CachingAllocator()
    paper.free(paper.malloc(40 * MIB))
    blocks = [paper.malloc(10 * MIB) for _ in range(4)]
    paper.free(blocks[0])
    paper.free(blocks[2])
    paper.malloc(20 * MIB)
    assert (paper.allocated, paper.reserved) == (40 * MIB, 60 * MIB)


def test_streams_do_not_share_blocks() -> None:
    paper = CachingAllocator()
    paper.free(paper.malloc(30 * MIB, "side"))
    paper.malloc(30 * MIB)
    assert paper.reserved == 60 * MIB


def test_a_recorded_stream_holds_a_block_until_it_is_done() -> None:
    paper = CachingAllocator()
    block = paper.malloc(30 * MIB)
    paper.record_stream(block, "side")
    paper.free(block)
    assert paper.allocated == 0
    other = paper.malloc(30 * MIB)
    assert other.address != block.address and paper.reserved == 60 * MIB
    paper.done("another")
    paper.free(other)
    assert paper.malloc(30 * MIB).address == other.address
    paper.done("side")
    assert paper.malloc(30 * MIB).address == block.address and paper.reserved == 60 * MIB


def test_recording_its_own_stream_changes_nothing() -> None:
    paper = CachingAllocator()
    block = paper.malloc(30 * MIB, "x")
    paper.record_stream(block, "x")
    paper.free(block)
    assert paper.malloc(30 * MIB, "x").address == block.address


def test_empty_cache_gives_back_whole_segments_alone() -> None:
    paper = CachingAllocator()
    whole, sublayer = paper.malloc(30 * MIB), paper.malloc(8 * MIB)
    paper.free(whole)
    assert paper.empty_cache() == [whole.address]
    assert paper.reserved == 20 * MIB and paper.peak_reserved == 50 * MIB
    paper.free(sublayer)
    paper.empty_cache()
    assert paper.reserved == 0 and not paper.segments


def test_over_the_limit_what_is_cached_goes_first() -> None:
    paper = CachingAllocator(limit=64 * MIB)
    paper.free(paper.malloc(30 * MIB))
    kept = paper.malloc(30 * MIB, "side")
    paper.malloc(34 * MIB)
    assert paper.reserved == 64 * MIB
    with pytest.raises(OutOfMemory, match="limit"):
        paper.malloc(2 * MIB)
    paper.free(kept)
    paper.malloc(2 * MIB)
    assert paper.reserved == 54 * MIB


def test_a_graph_has_a_pool_of_its_own() -> None:
    paper = CachingAllocator()
    paper.free(paper.malloc(30 * MIB))
    paper.begin_graph("g")
    inside = paper.malloc(30 * MIB)
    assert paper.reserved == 60 * MIB
    paper.end_graph()
    paper.free(inside)
    assert paper.malloc(30 * MIB).address != inside.address
    paper.empty_cache()
    assert paper.reserved == 60 * MIB


def test_a_block_is_freed_once() -> None:
    paper = CachingAllocator()
    block = paper.malloc(1)
    paper.free(block)
    with pytest.raises(ValueError, match="before"):
        paper.free(block)


SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB))
ORDERS = st.lists(st.tuples(st.sampled_from("aaaffre"), SIZES, st.integers(0, 2)), max_size=120)


@settings(max_examples=200, deadline=None)
@given(ORDERS)
def test_what_holds_after_any_order(order: list[tuple[str, int, int]]) -> None:
    """Blocks tile their segments, none overlap, no two free ones are neighbours, and sums are those of the blocks."""
    paper = CachingAllocator()
    live: list[Block] = []
    known: dict[int, Block] = {}  # any block that was handed out leads to its segment's others
    for what, size, number in order:
        if what == "a":
            block = paper.malloc(size, number)
            assert block.size >= size and all(b is not block for b in live)
            live.append(block)
            known[id(block)] = block
        elif what == "f" and live:
            paper.free(live.pop(size % len(live)))
        elif what == "r" and live:
            paper.record_stream(live[size % len(live)], number)
            paper.done((number + 1) % 3)
        elif what == "e":
            paper.empty_cache()
            known = {id(b): b for b in live}
        _check(paper, live, list(known.values()))


def _check(paper: CachingAllocator, live: list[Block], known: list[Block]) -> None:
    assert paper.allocated == sum(b.size for b in live) <= paper.reserved == sum(paper.segments.values())
    assert paper.peak_reserved >= paper.reserved and paper.peak_allocated >= paper.allocated
    spans = sorted(paper.segments.items())
    assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
    for block in live:
        first = block
        while first.before is not None:
            first = first.before
        at, segment = first.address, paper.segments[first.address]
        chain, here = [], first
        while here is not None:  # type: ignore[redundant-expr]
            assert here.address == at and here.pool is first.pool
            chain.append(here)
            at += here.size
            here = here.after  # type: ignore[assignment]
        assert at == first.address + segment
        assert not any(not a.in_use and not b.in_use for a, b in pairwise(chain))


def test_it_is_fast_enough_for_a_whole_step() -> None:
    """At least 100000 requests a second on a busy machine; 300000 to 600000 on an idle one."""
    numbers = random.Random(1)
    sizes = [numbers.choice([4 * KIB, 300 * KIB, 8 * MIB, 16 * MIB, 96 * MIB]) for _ in range(20000)]
    paper, live = CachingAllocator(), [None] * 64
    began = time.process_time()
    for n, size in enumerate(sizes):
        held = live[n % 64]
        if held is not None:
            paper.free(held)
        live[n % 64] = paper.malloc(size)  # type: ignore[call-overload]
    assert 2 * len(sizes) / (time.process_time() - began) > 100_000
