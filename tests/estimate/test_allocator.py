"""The model of the caching allocator: each rule by hand, and what holds after any order of requests."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.estimate.allocator import Block, CachingAllocator
from forebay.estimate.expandable import ExpandableAllocator

KIB, MIB = 1 << 10, 1 << 20


def test_requests_are_rounded_to_512_bytes() -> None:
    allocator = CachingAllocator()
    assert [allocator.malloc(n).size for n in (1, 512, 513, 1000)] == [512, 512, 1024, 1024]
    assert allocator.allocated == 3072 and allocator.reserved == 2 * MIB


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
    allocator = CachingAllocator()
    allocator.malloc(request_)
    assert allocator.reserved == segment


def test_the_rest_of_a_large_block_is_split_above_1_mib() -> None:
    for rest, split in ((MIB, False), (MIB + 512, True)):
        allocator = CachingAllocator()
        allocator.free(allocator.malloc(20 * MIB))
        block = allocator.malloc(20 * MIB - rest)
        assert (block.size == 20 * MIB - rest) is split
        assert allocator.allocated == block.size and allocator.reserved == 20 * MIB


def test_a_small_block_is_split_to_the_last_512_bytes() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(MIB) for _ in range(2)]
    assert allocator.reserved == 2 * MIB
    allocator.free(blocks[0])
    assert allocator.malloc(MIB - 512).size == MIB - 512
    assert allocator.malloc(512).address == blocks[0].address + MIB - 512
    assert allocator.reserved == 2 * MIB


def test_small_and_large_requests_have_segments_of_their_own() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(MIB)
    assert allocator.reserved == 32 * MIB


def test_the_best_fit_then_the_lowest_address() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.malloc(n * MIB) for n in (30, 12, 12))
    for block in (third, first, second):
        allocator.free(block)
    assert allocator.malloc(12 * MIB).address == second.address
    assert allocator.malloc(11 * MIB).address == third.address
    assert allocator.malloc(11 * MIB).address == first.address
    assert allocator.reserved == 54 * MIB


def test_free_neighbors_become_one() -> None:
    """Two of the blocks of 8 MiB are in the first segment of 20: 16 MiB fit there when both are free."""
    allocator = CachingAllocator()
    blocks = [allocator.malloc(8 * MIB) for _ in range(4)]
    assert allocator.reserved == 40 * MIB
    for n in (1, 0):
        allocator.free(blocks[n])
    assert allocator.malloc(16 * MIB).address == blocks[0].address and allocator.reserved == 40 * MIB


def test_fragments_do_not_add_up() -> None:
    """20 MiB are free in holes of 10, and 20 MiB need a segment."""
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(40 * MIB))
    blocks = [allocator.malloc(10 * MIB) for _ in range(4)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.malloc(20 * MIB)
    assert (allocator.allocated, allocator.reserved) == (40 * MIB, 60 * MIB)


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB, "side"))
    allocator.malloc(30 * MIB)
    assert allocator.reserved == 60 * MIB


def test_empty_cache_releases_whole_segments_only() -> None:
    allocator = CachingAllocator()
    whole, sublayer = allocator.malloc(30 * MIB), allocator.malloc(8 * MIB)
    allocator.free(whole)
    assert allocator.empty_cache() == [whole.address]
    assert allocator.reserved == 20 * MIB and allocator.peak_reserved == 50 * MIB
    allocator.free(sublayer)
    allocator.empty_cache()
    assert allocator.reserved == 0 and not allocator.segments


def test_a_graph_has_a_pool_of_its_own() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.begin_graph()
    inside = allocator.malloc(30 * MIB)
    assert allocator.reserved == 60 * MIB
    allocator.end_graph()
    allocator.free(inside)
    assert allocator.malloc(30 * MIB).address != inside.address
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB


@pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])
def test_a_block_is_freed_once(kind: type[CachingAllocator]) -> None:
    allocator = kind()
    block = allocator.malloc(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="before"):
        allocator.free(block)


SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB))
ORDERS = st.lists(st.tuples(st.sampled_from("aaaffe"), SIZES, st.integers(0, 2)), max_size=120)


@settings(max_examples=200, deadline=None)
@given(ORDERS)
def test_what_holds_after_any_order(order: list[tuple[str, int, int]]) -> None:
    """Blocks tile their segments, no two free ones are neighbors, and sums are those of the blocks."""
    allocator = CachingAllocator()
    live: list[Block] = []
    known: dict[int, Block] = {}  # a block leads to the others of its segment
    for what, size, number in order:
        if what == "a":
            block = allocator.malloc(size, number)
            assert block.size >= size and all(b is not block for b in live)
            live.append(block)
            known[id(block)] = block
        elif what == "f" and live:
            allocator.free(live.pop(size % len(live)))
        elif what == "e":
            allocator.empty_cache()
            known = {id(b): b for b in live}
        _check(allocator, live, list(known.values()))


def _check(allocator: CachingAllocator, live: list[Block], known: list[Block]) -> None:
    assert allocator.allocated == sum(b.size for b in live) <= allocator.reserved == sum(allocator.segments.values())
    assert allocator.peak_reserved >= allocator.reserved and allocator.peak_allocated >= allocator.allocated
    spans = sorted(allocator.segments.items())
    assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
    for block in live:
        first = block
        while first.before is not None:
            first = first.before
        at, segment = first.address, allocator.segments[first.address]
        chain, here = [], first
        while here is not None:  # type: ignore[redundant-expr]
            assert here.address == at and here.pool is first.pool
            chain.append(here)
            at += here.size
            here = here.after  # type: ignore[assignment]
        assert at == first.address + segment
        assert not any(not a.in_use and not b.in_use for a, b in pairwise(chain))


def test_segments_lie_where_the_driver_puts_them() -> None:
    """The first large segments of a recorded history of an OLMoE on an H100, in MiB below the first. Each takes an address range
    of a multiple of 32 MiB below the others; the third 20 MiB are in what 66 MiB leave of 96."""
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MIB) for size in (152, 20, 132, 66, 20, 132, 66, 20)]
    first = blocks[0].address
    assert [(first - b.address) // MIB for b in blocks] == [0, 0x20, 0xC0, 0x120, 0xDE, 0x1C0, 0x220, 0x1DE]
    for older, newer in ((2, 5), (3, 6)):  # of equal free blocks the lowest is taken, which is the newest
        size = blocks[older].size
        allocator.free(blocks[older])
        allocator.free(blocks[newer])
        assert allocator.malloc(size).address == blocks[newer].address
