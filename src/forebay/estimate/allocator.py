"""CUDA's caching allocator of torch 2.11: the segments it takes from the driver for a sequence of allocations.

Input: `malloc` and `free` in the order in which a process calls them. Output: `reserved` and `allocated` bytes, their
peaks, and the segments. A GPU runs out of memory when segments no longer fit, however little of them is in use. A
`Block` that `malloc` returns is the caller's until `free`. `forebay.estimate.expandable` has the rules of expandable segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable

from forebay.estimate.types import GPU_BLOCK

SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_REQUEST = 10 << 20
ROUND_SEGMENT = 2 << 20
_ADDRESS_RANGE = 32 << 20
ROLES = ("parameters", "gradients", "optimizer", "activations", "transient")
"""Roles of blocks. Activations are saved for backward; the running operation alone needs transient blocks."""
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TRANSIENT = 0, 1, 2, 3, 4
ADDRESS_BITS = 48  # a key is (size, address) in one integer, which compares twice as fast as a pair


class Block:
    """A piece of a segment.

    Attributes:
        address, size: bytes; the size is rounded up and may be larger than the request.
        role: what it holds; one of `ROLES`.
        mapped: it has memory; see `forebay.estimate.expandable`.
    """

    __slots__ = ("address", "after", "before", "in_use", "mapped", "pool", "role", "size")

    def __init__(self, pool: FreeBlocks, address: int, size: int):
        self.pool, self.address, self.size = pool, address, size
        self.before: Block | None = None
        self.after: Block | None = None
        self.in_use, self.mapped = False, True
        self.role = TRANSIENT

    def split(self, size: int) -> Block:
        """Keep the lower `size` bytes; returns the rest."""
        rest = Block(self.pool, self.address + size, self.size - size)
        after = rest.after = self.after
        if after is not None:
            after.before = rest
        rest.before, self.after, self.size = self, rest, size
        return rest

    def join(self, after: Block) -> None:
        """Take over the block that follows."""
        self.size += after.size
        follows = self.after = after.after
        if follows is not None:
            follows.before = self


class FreeBlocks:
    """The free blocks of one stream and one kind, in the order of size and address.

    Attributes:
        keys, blocks: ascending, and the block of each.
        least_rest: bytes that a request has to leave of a block for the rest to stay free.
    """

    __slots__ = ("blocks", "keys", "least_rest", "small")

    def __init__(self, small: bool, least_rest: int):
        self.small, self.least_rest = small, least_rest
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def drop(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]


class CachingAllocator:
    """The rules of torch's documentation ("CUDA semantics", memory management) and of the comments in `c10/cuda`.

    - A request is rounded up to 512 bytes. Up to 1 MiB it is small, else large. Each stream has free blocks of either kind; so
      has each CUDA graph, whose segments serve no other request and are not released before the graph is gone.
    - The smallest free block that fits is taken, of equal ones that at the lowest address. The request is its lower end; the rest
      stays free if it has at least 512 bytes (small), or more than 1 MiB (large). Otherwise the whole block is allocated.
    - If no block fits, a segment is allocated: 2 MiB for a small request, 20 MiB for one below 10 MiB, else the request rounded
      up to 2 MiB.
    - A freed block is merged with its free neighbors in its segment.

    Not modeled: blocks that `record_stream` names, which no plan has; that cached segments are released where a new one does not
    fit; and what is off by default: `max_split_size_mb`, garbage collection by threshold, rounding to divisions of powers of two.

    Args:
        granule: bytes to which a request is rounded up; 1 to count what is allocated on a CPU.

    Attributes:
        reserved, allocated: bytes of segments, and of blocks in use; `by_role` are the latter by role.
        peak_reserved, peak_allocated: their peaks, the latter since `take_peak`.
        segments: address to bytes.
    """

    def __init__(self, granule: int = GPU_BLOCK):
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0
        self.by_role, self._at_peak = [0] * len(ROLES), [0] * len(ROLES)
        self.segments: dict[int, int] = {}
        self._granule = granule
        self._pools: dict[Hashable, tuple[FreeBlocks, FreeBlocks]] = {}  # large and small blocks by stream
        self._outside, self._in_graph = self._pools, dict[Hashable, tuple[FreeBlocks, FreeBlocks]]()
        self._lowest = 1 << ADDRESS_BITS - 1
        self._holes: list[tuple[int, int]] = []  # address, bytes

    def malloc(self, size: int, stream: Hashable = 0, role: int = TRANSIENT) -> Block:
        granule = self._granule
        size = (size + granule - 1) & -granule or granule
        pools = self._pools.get(stream)
        if pools is None:
            pools = self._pools[stream] = self._new_pools()
        pool = pools[size <= SMALL]
        block = self._take(pool, size)
        if block.size - size >= pool.least_rest:
            pool.add(block.split(size))
        block.in_use = True
        block.role = role
        self.by_role[role] += block.size
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
            self._at_peak = self.by_role.copy()
        return block

    def set_role(self, block: Block, role: int) -> None:
        """The block holds something else from here on, such as an output that is saved."""
        self.by_role[block.role] -= block.size
        self.by_role[role] += block.size
        block.role = role

    def free(self, block: Block) -> None:
        """Raises ValueError if the block was freed before."""
        if not block.in_use:
            raise ValueError(f"the block at {block.address} was freed before")
        self.allocated -= block.size
        self.by_role[block.role] -= block.size
        self._merge(block)

    def free_all(self, blocks: Iterable[Block]) -> None:
        for block in list(blocks):
            self.free(block)

    def clear(self, blocks: list[Block]) -> None:
        """Free all blocks of a list, and empty it."""
        self.free_all(blocks)
        blocks.clear()

    def empty_cache(self) -> list[int]:
        """Release every segment that is wholly free, except those of graphs. Returns their addresses."""
        return [address for pools in self._outside.values() for pool in pools for address in self._release(pool)]

    def begin_graph(self) -> None:
        """Serve requests from the pool of the CUDA graph from here on."""
        self._pools = self._in_graph

    def end_graph(self) -> None:
        self._pools = self._outside

    def take_peak(self) -> list[int]:
        """Bytes by role at the peak since the last call; the peak of allocated bytes begins anew."""
        found = self._at_peak
        self.peak_allocated, self._at_peak = self.allocated, self.by_role.copy()
        return found

    def _new_pools(self) -> tuple[FreeBlocks, FreeBlocks]:
        granule = self._granule
        return FreeBlocks(False, SMALL + 1 if granule == GPU_BLOCK else granule), FreeBlocks(True, granule)

    def _take(self, pool: FreeBlocks, size: int) -> Block:
        at = bisect_left(pool.keys, size << ADDRESS_BITS)
        return pool.blocks.pop(pool.keys.pop(at)) if at < len(pool.keys) else self._segment(pool, size)

    def _segment(self, pool: FreeBlocks, size: int) -> Block:
        if pool.small:
            length = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            length = LARGE_SEGMENT
        else:
            length = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        address = self._place(length)
        self.segments[address] = length
        self._reserve(length)
        return Block(pool, address, length)

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _place(self, length: int) -> int:
        """The address of a new segment: the lowest hole that is large enough, else below all others.

        The driver takes ranges of multiples of 32 MiB from above, as in all recorded histories. What is left of one is a
        hole, as is what was released.
        """
        for i, (address, size) in enumerate(self._holes):
            if size >= length:
                self._holes[i : i + 1] = [(address + length, size - length)] if size > length else []
                return address
        whole = -(-length // _ADDRESS_RANGE) * _ADDRESS_RANGE
        self._lowest -= whole
        if whole > length:
            insort(self._holes, (self._lowest + length, whole - length))
        return self._lowest

    def _merge(self, block: Block) -> Block:
        """Put a block into its pool, merged with its free neighbors; returns what it is a part of then."""
        block.in_use = False
        pool = block.pool
        before, after = block.before, block.after
        if before is not None and not before.in_use:
            pool.drop(before)
            before.join(block)
            block = before
        if after is not None and not after.in_use:
            pool.drop(after)
            block.join(after)
        pool.add(block)
        return block

    def _release(self, pool: FreeBlocks) -> list[int]:
        given = []
        for key in list(pool.keys):
            block = pool.blocks[key]
            if block.before is None and block.after is None:
                pool.drop(block)
                given.append(block.address)
                self.reserved -= self.segments.pop(block.address)
                insort(self._holes, (block.address, block.size))
        return given
