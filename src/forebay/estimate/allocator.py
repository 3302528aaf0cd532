"""CUDA's caching allocator of torch 2.11, on paper: which segments it takes from the driver for an order of allocations.

In: `malloc` and `free`, in the order in which a process calls them. Out: `reserved` and `allocated` bytes, their peaks, and the
segments. What runs out on a GPU is what is reserved: segments, whole ones, whatever of them is in use.

The rules, as torch documents them (docs, "CUDA semantics", memory management, and the comments of `c10/cuda`):

    rounding     a request is rounded up to 512 bytes
    pools        up to 1 MiB is small, the rest large; each stream has its own blocks in each, and each graph's pool has its own
    search       the smallest free block of the pool and stream that is large enough; of equal ones that at the lowest address
    split        the request is the block's lower end; the rest becomes a free block if it is at least 512 bytes (small), or more
                 than 1 MiB (large). Else the whole block is handed out
    segment      if there is none: 2 MiB for a small request, 20 MiB for one below 10 MiB, else the request rounded up to 2 MiB
    free         a block is merged with its free neighbours in its segment
    streams      a block that `record_stream` named for another stream is reused only when that stream has done what it was given
                 until the free; the next request looks whether it has
    limit        where a segment would go over the device's memory, all segments that are wholly free go back to the driver, and
                 it is tried once more; then the request fails
    empty_cache  the same giving back, asked for
    graphs       while a CUDA graph is captured, requests are served from a pool of its own, whose segments no other request gets
                 and nothing gives back before the graph is gone

Not modelled, because they are off unless a user turns them on: expandable segments, `max_split_size_mb`, garbage collection by
threshold, rounding to divisions of powers of two.

Who owns what: a `Block` that `malloc` returned is the caller's until `free`. Addresses are made up, ascending, with the holes of
segments that were given back filled first, unless `place` says where a segment lies.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable

MIN_BLOCK = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_REQUEST = 10 << 20
ROUND_SEGMENT = 2 << 20
_ADDRESS_BITS = 48  # of the key (size, address) in one integer: comparing integers is twice as fast as comparing pairs
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class OutOfMemory(RuntimeError):
    """The limit leaves no room for a segment, also after everything cached was given back."""


class Block:
    """A piece of a segment.

    Attributes:
        address, size: bytes; the size is rounded, and may be more than was asked for.
        in_use: handed out, or freed and still read by another stream.
    """

    __slots__ = ("address", "after", "before", "in_use", "pool", "size", "streams")

    def __init__(self, pool: _FreeBlocks, address: int, size: int):
        self.pool, self.address, self.size = pool, address, size
        self.before: Block | None = None
        self.after: Block | None = None
        self.in_use = False
        self.streams: set[Hashable] | None = None


class _FreeBlocks:
    """The free blocks of one stream and one kind, by size and then address."""

    __slots__ = ("blocks", "keys", "least_rest", "owner", "small", "stream")

    def __init__(self, stream: Hashable, small: bool, owner: Hashable):
        self.stream, self.small, self.owner = stream, small, owner
        self.least_rest = MIN_BLOCK if small else SMALL + 1
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        key = block.size << _ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def drop(self, block: Block) -> None:
        key = block.size << _ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]


class CachingAllocator:
    """See the module docstring.

    Args:
        limit: bytes of segments that the device has room for; None for no limit.
        place: called with a new segment's size and stream; where it lies.

    Attributes:
        reserved, allocated: bytes of segments, and of blocks that are the callers'.
        peak_reserved, peak_allocated: the most of each since the begin or `reset_peaks`.
        segments: address -> bytes.
    """

    def __init__(self, limit: int | None = None, place: Callable[[int, Hashable], int] | None = None):
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0
        self.segments: dict[int, int] = {}
        self._limit, self._place = limit, place
        self._pools: dict[tuple[Hashable, bool, Hashable], _FreeBlocks] = {}
        self._graph: Hashable = None  # whose pool serves requests now
        self._waiting: list[Block] = []  # freed, and still read by other streams
        self._done: set[Hashable] = set()
        self._top = 1 << 32
        self._holes: list[tuple[int, int]] = []  # address, bytes

    def malloc(self, size: int, stream: Hashable = 0) -> Block:
        """A block of at least `size` bytes, at least 1.

        Raises:
            OutOfMemory: see the class.
        """
        if self._done:
            self._look()
        size = (size + MIN_BLOCK - 1) & -MIN_BLOCK or MIN_BLOCK
        small = size <= SMALL
        pool = self._pools.get((stream, small, self._graph))
        if pool is None:
            pool = self._pools[stream, small, self._graph] = _FreeBlocks(stream, small, self._graph)
        keys = pool.keys
        at = bisect_left(keys, size << _ADDRESS_BITS)
        block = pool.blocks.pop(keys.pop(at)) if at < len(keys) else self._segment(pool, size)
        rest = block.size - size
        if rest >= pool.least_rest:
            left = Block(pool, block.address + size, rest)
            after = left.after = block.after
            if after is not None:
                after.before = left
            left.before, block.after, block.size = block, left, size
            pool.add(left)
        block.in_use = True
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Give a block back.

        Raises:
            ValueError: it was given back before.
        """
        if not block.in_use:
            raise ValueError(f"the block at {block.address} was freed before")
        self.allocated -= block.size
        if block.streams:
            self._waiting.append(block)
        else:
            self._merge(block)

    def record_stream(self, block: Block, stream: Hashable) -> None:
        """Another stream than its own reads the block."""
        if stream != block.pool.stream:
            block.streams = (block.streams or set()) | {stream}

    def done(self, stream: Hashable) -> None:
        """The stream has done all that it was given; seen by the next request."""
        if self._waiting:
            self._done.add(stream)

    def empty_cache(self) -> list[int]:
        """Give every segment that is wholly free back to the driver, when all streams are done. Their addresses."""
        for block in self._waiting:
            block.streams = None
            self._merge(block)
        self._waiting, self._done = [], set()
        given: list[int] = []
        for pool in self._pools.values():
            if pool.owner is None:
                given += self._give_back(pool)
        return given

    def begin_graph(self, graph: Hashable) -> None:
        """From here on requests are served from this graph's own pool."""
        self._graph = graph

    def end_graph(self) -> None:
        """The capture is over: requests are served as before."""
        self._graph = None

    def reset_peaks(self) -> None:
        """Count peaks from here."""
        self.peak_reserved, self.peak_allocated = self.reserved, self.allocated

    def _segment(self, pool: _FreeBlocks, size: int) -> Block:
        """A new segment as one block that is not among the free ones."""
        if pool.small:
            length = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            length = LARGE_SEGMENT
        else:
            length = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        if self._limit is not None and self.reserved + length > self._limit:
            self.empty_cache()
            if self.reserved + length > self._limit:
                raise OutOfMemory(
                    f"{length} bytes more than the {self.reserved} that are reserved go over the limit of {self._limit}"
                )
        address = self._hole(length) if self._place is None else self._place(length, pool.stream)
        self.segments[address] = length
        self.reserved += length
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return Block(pool, address, length)

    def _hole(self, length: int) -> int:
        for i, (address, size) in enumerate(self._holes):
            if size >= length:
                self._holes[i : i + 1] = [(address + length, size - length)] if size > length else []
                return address
        self._top += length
        return self._top - length

    def _look(self) -> None:
        """What waits for streams that are done is free."""
        done, self._done = self._done, set()
        waiting, self._waiting = self._waiting, []
        for block in waiting:
            assert block.streams is not None
            block.streams -= done
            if block.streams:
                self._waiting.append(block)
            else:
                self._merge(block)

    def _merge(self, block: Block) -> None:
        """Put a block among the free ones, in one with its free neighbours."""
        block.in_use = False
        pool = block.pool
        before, after = block.before, block.after
        if before is not None and not before.in_use:
            pool.drop(before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and not after.in_use:
            pool.drop(after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        pool.add(block)

    def _give_back(self, pool: _FreeBlocks) -> list[int]:
        given = []
        for key in list(pool.keys):
            block = pool.blocks[key]
            if block.before is None and block.after is None:
                pool.drop(block)
                given.append(block.address)
                self.reserved -= self.segments.pop(block.address)
                if self._place is None:
                    insort(self._holes, (block.address, block.size))
        return given
