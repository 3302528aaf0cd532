"""The model of torch's allocator with expandable segments: its rules, one by one, and what holds after any order."""

from itertools import pairwise

import pytest
from hypothesis import given, settings

from forebay.errors import UsageError
from forebay.estimate.allocator import Block, CachingAllocator
from forebay.estimate.expandable import ExpandableAllocator
from tests.estimate.test_allocator import KIB, MIB, ORDERS


def test_pages_are_mapped_as_a_segment_grows() -> None:
    """20 MiB at a time, of small blocks 2; a request begins where the one before ends."""
    allocator = ExpandableAllocator()
    first, second = allocator.malloc(3 * MIB), allocator.malloc(30 * MIB)
    assert (second.address - first.address, second.size, allocator.reserved) == (3 * MIB, 30 * MIB, 40 * MIB)
    small = [allocator.malloc(n * KIB) for n in (1, 1024)]
    assert small[1].address - small[0].address == KIB and allocator.reserved == 42 * MIB


def test_what_no_address_space_holds_is_an_error_that_names_the_keys() -> None:
    allocator = ExpandableAllocator()
    with pytest.raises(UsageError, match=r"more than 128 TiB; valid is a smaller model, a shorter train\.sequence"):
        allocator.malloc(1 << 48)


def test_a_free_end_grows_to_what_is_asked() -> None:
    allocator, other = ExpandableAllocator(), CachingAllocator()
    for a in (allocator, other):
        a.malloc(20 * MIB)
        end = a.malloc(40 * MIB)
        a.free(end)
        assert a.malloc(60 * MIB).address == end.address or a is other
    assert (allocator.reserved, other.reserved) == (80 * MIB, 120 * MIB)


def test_what_is_left_stays_free_however_little() -> None:
    allocator = ExpandableAllocator()
    block = allocator.malloc(20 * MIB)
    allocator.free(block)
    assert allocator.malloc(20 * MIB - 1024).size == 20 * MIB - 1024
    assert allocator.malloc(513).pool.small and allocator.allocated == 20 * MIB


def test_a_block_before_unmapped_pages_counts_with_them() -> None:
    """6 MiB go into the free 30, although 10 are free at the end, which can grow."""
    allocator = ExpandableAllocator()
    hole = allocator.malloc(30 * MIB)
    allocator.malloc(20 * MIB)
    allocator.free(hole)
    assert allocator.reserved == 60 * MIB
    assert allocator.malloc(6 * MIB).address == hole.address


def test_releasing_the_cache_unmaps_whole_pages_and_they_are_mapped_again() -> None:
    allocator = ExpandableAllocator()
    blocks = [allocator.malloc(n * MIB) for n in (5, 50, 5)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    # Of 5 to 55 MiB the pages from 20 to 40 are whole.
    assert (allocator.allocated, allocator.reserved) == (10 * MIB, 40 * MIB)
    again = allocator.malloc(50 * MIB)
    assert again.address == blocks[1].address and allocator.reserved == 60 * MIB == allocator.allocated


def test_pages_are_mapped_at_the_lowest_addresses_that_do() -> None:
    allocator = ExpandableAllocator()
    blocks = [allocator.malloc(n * MIB) for n in (40, 20, 80, 20)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB
    assert [allocator.malloc(n * MIB).address for n in (60, 40, 20)] == [
        blocks[2].address,
        0,
        blocks[2].address + 60 * MIB,
    ]


def test_streams_and_graphs_have_segments_of_their_own() -> None:
    allocator = ExpandableAllocator()
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(20 * MIB, "side")
    allocator.begin_graph()
    inside = allocator.malloc(20 * MIB)
    allocator.end_graph()
    allocator.free(inside)
    assert allocator.reserved == 60 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB, "the graph's pages stay"


@settings(max_examples=200, deadline=None)
@given(ORDERS)
def test_what_holds_after_any_order(order: list[tuple[str, int, int]]) -> None:
    """Blocks tile their segment, neighbors are neither both free nor both unmapped, and sums are those of the blocks."""
    allocator = ExpandableAllocator()
    live: list[Block] = []
    for what, size, stream in order:
        if what == "a":
            live.append(allocator.malloc(size, stream))
            assert size <= live[-1].size < size + 512
        elif what == "f" and live:
            allocator.free(live.pop(size % len(live)))
        elif what == "e":
            allocator.empty_cache()
        _check(allocator, live)


def _check(allocator: ExpandableAllocator, live: list[Block]) -> None:
    mapped = 0
    used: set[int] = set()
    for pools in allocator._pools.values():
        for pool in pools:
            block: Block | None = pool.unmapped[-1]  # type: ignore[attr-defined]
            chain: list[Block] = []
            while block is not None:
                chain.insert(0, block)
                block = block.before
            assert chain[0].address == 0 and not chain[-1].mapped
            assert all(a.address + a.size == b.address for a, b in pairwise(chain))
            assert not any(not a.in_use and not b.in_use for a, b in pairwise(chain))
            assert not any(not a.mapped and not b.mapped for a, b in pairwise(chain))
            assert [b for b in chain if not b.mapped] == pool.unmapped  # type: ignore[attr-defined]
            assert {id(b) for b in chain if not b.in_use} == {id(b) for b in pool.blocks.values()}
            mapped += sum(b.size for b in chain if b.mapped)
            used |= {id(b) for b in chain if b.in_use and b.mapped}
    assert used == {id(b) for b in live}
    assert allocator.reserved == mapped >= allocator.allocated == sum(b.size for b in live)
