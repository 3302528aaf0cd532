"""CUDA's caching allocator of torch 2.11 with expandable segments: the pages it takes from the driver.

Input and output are those of `forebay.estimate.allocator`, but what is reserved are pages, not segments. The rules are those of
the note "Expandable Segments" in `c10/cuda/CUDACachingAllocator.cpp`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from forebay.errors import UsageError
from forebay.estimate.allocator import ADDRESS_BITS, LARGE_SEGMENT, SMALL_SEGMENT, Block, CachingAllocator, FreeBlocks
from forebay.estimate.types import GPU_BLOCK

_ADDRESSES = 1 << ADDRESS_BITS - 1  # of a segment; torch takes 9/8 of the GPU's memory


class _ExpandableBlocks(FreeBlocks):
    """The free blocks of one stream and one kind, all in one segment.

    Attributes:
        page: bytes that are mapped and unmapped together: 20 MiB, of small blocks 2 MiB.
        unmapped: blocks without memory, by address. They are `in_use`, so that no free block is merged with them.
    """

    __slots__ = ("page", "unmapped")

    def __init__(self, small: bool):
        super().__init__(small, GPU_BLOCK)
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.unmapped: list[Block] = []
        self.unmap(Block(self, 0, _ADDRESSES))

    def room(self, key: int) -> int:
        """The size to which the free block of `key` can grow."""
        block = self.blocks[key]
        after = block.after
        return block.size if after is None or after.mapped else block.size + after.size

    def unmap(self, block: Block) -> None:
        """`block` is whole pages, and in no list."""
        block.mapped, block.in_use = False, True
        before, after = block.before, block.after
        if before is not None and not before.mapped:
            self.unmapped.remove(before)
            before.join(block)
            block = before
        if after is not None and not after.mapped:
            self.unmapped.remove(after)
            block.join(after)
        insort(self.unmapped, block, key=attrgetter("address"))


class ExpandableAllocator(CachingAllocator):
    """Where it differs from `CachingAllocator`:

    - Each stream has one segment for large and one for small blocks, a range of addresses; so has each stream of a CUDA
      graph. Pages of it get memory as they are needed.
    - A request takes the smallest free block that fits, but one that unmapped pages follow counts with them. What is left of a
      block stays free, however small.
    - If no block fits, pages are mapped at the lowest address where free and unmapped blocks in a row are large enough.
    - Releasing the cache unmaps all whole pages of free blocks.

    `segments` is empty.
    """

    def _new_pools(self) -> tuple[FreeBlocks, FreeBlocks]:
        return _ExpandableBlocks(False), _ExpandableBlocks(True)

    def _take(self, pool: FreeBlocks, size: int) -> Block:
        assert isinstance(pool, _ExpandableBlocks)
        keys = pool.keys
        at = bisect_left(keys, size << ADDRESS_BITS)
        if at == len(keys):
            return self._grow(pool, size)
        after = pool.blocks[keys[at]].after
        if after is not None and not after.mapped:  # any other has no more room than the next larger one
            while at + 1 < len(keys) and pool.room(keys[at + 1]) < pool.room(keys[at]):
                at += 1
        return pool.blocks.pop(keys.pop(at))

    def _grow(self, pool: _ExpandableBlocks, size: int) -> Block:
        places = (found for gap in pool.unmapped if _room_from(found := _first_free(gap), size) >= size)
        block = next(places, None)
        if block is None:
            raise UsageError(
                f"a process would need more than {_ADDRESSES >> 40} TiB; valid is a smaller model, a shorter train.sequence "
                "or a smaller train.microbatch"
            )
        if not block.mapped:
            block = self._map(pool, block, size)
        while block.size < size:
            assert block.after is not None
            block = self._map(pool, block.after, size - block.size)
        pool.drop(block)
        return block

    def _map(self, pool: _ExpandableBlocks, gap: Block, size: int) -> Block:
        """Give the lower end of an unmapped block memory; returns the free block that it is a part of then."""
        length = min(gap.size, -(-size // pool.page) * pool.page)
        pool.unmapped.remove(gap)
        rest = gap.split(length) if length < gap.size else None
        gap.mapped, gap.in_use = True, False
        if rest is not None:
            pool.unmap(rest)
        self._reserve(length)
        return self._merge(gap)

    def _release(self, pool: FreeBlocks) -> list[int]:
        assert isinstance(pool, _ExpandableBlocks)
        page = pool.page
        for block in list(pool.blocks.values()):
            first, end = -(-block.address // page) * page, (block.address + block.size) // page * page
            if first >= end:
                continue
            pool.drop(block)
            if block.address + block.size > end:
                pool.add(block.split(end - block.address))
            if block.address < first:
                pages = block.split(first - block.address)
                pool.add(block)
                block = pages
            self.reserved -= block.size
            pool.unmap(block)
        return []


def _first_free(gap: Block) -> Block:
    """The free block before an unmapped one; without one, the unmapped one."""
    before = gap.before
    return gap if before is None or before.in_use else before


def _room_from(block: Block, size: int) -> int:
    """Bytes of the free and unmapped blocks from this one on, counted until they are at least `size`."""
    found, last = 0, block
    while found < size and (not last.in_use or not last.mapped):
        found += last.size
        if last.after is None:
            break
        last = last.after
    return found
