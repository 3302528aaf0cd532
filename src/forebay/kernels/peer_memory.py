"""Memory that P ranks of one host hold alike and reach in each other, and how their kernels wait for one another.

Each rank has one byte tensor of the same size, with the regions of `PeerLayout`. A kernel gets its own tensor as an argument
and reaches rank p's copy at the same place plus `offsets[p]`, the distance of the two in bytes: so every pointer is derived
from an argument, its alignment is known to the compiler, and tensors of one process can stand for ranks in a test.

An *operation* is two launches, the same on all ranks and in the same order:

    fill    write to the own memory or the peers'; the last program of it tells all ranks (`tell`), by a flag in their memory
    drain   wait until all ranks have told (`wait`); read the own memory or the peers'

Flags hold the number of operations told so far. They only grow and are never reset. The count itself is on the device
(`state`), so a captured CUDA graph can be replayed. What an operation fills lies twice, in two halves used in turn: who
fills for operation n + 2 has waited in n + 1 until all ranks told, and they told after draining n. One wait an operation is
enough.

Needs a link with atomics between the GPUs, such as NVLink. Neither NVLink multicast nor NVSHMEM is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from forebay.kernels.launch import column_block, on_device_of
from forebay.kernels.peer_lists import LIST_BLOCK

# Elements of `PeerMemory.state`; from CHUNKS on, what the chunks of the lists count.
EPOCH, TICKET, LATE, CHUNKS = 0, 1, 2, 3
# Regions begin on cache lines.
_LINE = 128
# A row is moved in blocks of at most 1024 words, 4 KiB; a program moves 4096 words at once, 16 bytes a thread and load.
_BLOCK_WORDS = 1024
_TILE_WORDS = 4096


@dataclass(frozen=True)
class PeerLayout:
    """Where things lie in each rank's memory, in bytes. T tokens at most, P ranks, K slots a token.

    Once: `flags_at` [P] int64, `needs_at` [P] int64 (rank p's largest need beyond its capacity). Twice, `half` bytes apart:
    `rows_at` [T] rows, `ids_at` [T, K] int32, `weights_at` [T, K] of up to 4 bytes, `lists_at` [P, T] int32 (tokens that
    rank p sends here), `counts_at` [P, 2] int32 (rank p's rows and live slots for this rank), `landing_at` [T, P] rows and
    `narrow_at` [T, P, K] of up to 4 bytes (what rank p sends back).

    Attributes:
        ranks, tokens, slots: P, T, K.
        row_bytes: of one row, a multiple of 16.

    Raises:
        ValueError: rows that are no multiple of 16 bytes; more rows or slots than 32-bit numbers count.
    """

    ranks: int
    tokens: int
    slots: int
    row_bytes: int

    def __post_init__(self) -> None:
        if self.row_bytes % 16 or self.row_bytes <= 0:
            raise ValueError(f"a row must be a multiple of 16 bytes, got {self.row_bytes}")
        if self.tokens * max(self.ranks, self.slots) >= 2**31:
            raise ValueError(
                f"{self.tokens} tokens of {self.slots} slots on {self.ranks} ranks: more than 2**31 rows or slots"
            )

    @property
    def words(self) -> int:
        """32-bit words of a row."""
        return self.row_bytes // 4

    @property
    def flags_at(self) -> int:
        return 0

    @property
    def needs_at(self) -> int:
        return _lines(8 * self.ranks)

    @property
    def rows_at(self) -> int:
        return 2 * _lines(8 * self.ranks)

    @property
    def ids_at(self) -> int:
        return self.rows_at + _lines(self.tokens * self.row_bytes)

    @property
    def weights_at(self) -> int:
        return self.ids_at + _lines(4 * self.tokens * self.slots)

    @property
    def lists_at(self) -> int:
        return self.weights_at + _lines(4 * self.tokens * self.slots)

    @property
    def counts_at(self) -> int:
        return self.lists_at + _lines(4 * self.tokens * self.ranks)

    @property
    def landing_at(self) -> int:
        return self.counts_at + _lines(8 * self.ranks)

    @property
    def narrow_at(self) -> int:
        return self.landing_at + self.ranks * self.tokens * self.row_bytes

    @property
    def half(self) -> int:
        return _lines(self.narrow_at + 4 * self.ranks * self.tokens * self.slots) - self.rows_at

    @property
    def total(self) -> int:
        """Bytes to allocate on each rank."""
        return self.rows_at + 2 * self.half

    @property
    def state_size(self) -> int:
        """Elements of `PeerMemory.state`."""
        return CHUNKS + self.ranks * self.list_lanes()

    def list_lanes(self) -> int:
        """Chunks of LIST_BLOCK tokens, up to a power of two."""
        return triton.next_power_of_2(triton.cdiv(self.tokens, LIST_BLOCK))

    def block_words(self) -> int:
        """Columns a program moves at once: a power of two of words."""
        return column_block(self.words, _BLOCK_WORDS)

    def block_rows(self) -> int:
        """Rows a program moves at once."""
        return min(128, _TILE_WORDS // self.block_words())


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """One rank's view of the memory of all.

    Attributes:
        base: [layout.total] uint8, this rank's memory; zero before the first operation of any rank.
        offsets: [P] int64 on the device: bytes from `base` to each rank's memory; 0 for this rank.
        state: [layout.state_size] int64 on the device, zero at first: operations told, programs done with the running one,
            1 + the rank that did not come in time (0: none), and [P, list_lanes] chunk counts.
        rank: of this memory among the P.
        timeout_ns: how long `wait` waits. After one rank was late nothing waits any more, until `state[LATE]` is zeroed.
        programs: how many programs a launch has, a few for each multiprocessor: they go through the rows in turn.
        meet: None on GPUs, where kernels wait. In Triton's interpreter they cannot: this is called before every drain
            instead, and returns when all ranks have filled.
    """

    base: Tensor
    offsets: Tensor
    state: Tensor
    rank: int
    layout: PeerLayout
    timeout_ns: int = 120 * 10**9
    programs: int = 4
    meet: Callable[[], None] | None = None

    def before_drain(self) -> bool:
        """True if the kernel shall wait; otherwise all ranks have filled now."""
        if self.meet is not None:
            self.meet()
        return self.meet is None


@triton.jit
def peer_of(base_ptr, offsets_ptr, peer):
    """Rank `peer`'s memory."""
    return base_ptr + tl.multiple_of(tl.load(offsets_ptr + peer), 16)


@triton.jit
def half_of(epoch, half):
    """Bytes to the half of an operation that is the `epoch`-th, counting from 0."""
    return (epoch & 1) * half


@triton.jit
def tell(base_ptr, offsets_ptr, state_ptr, flags_at, rank, epoch, RANKS: tl.constexpr, LANES: tl.constexpr):
    """End of a fill: the last program of the launch tells all ranks. Every program calls it, once, last.

    Each program's writes, also those to peers, are released with its ticket, the last program acquires them all and releases
    them with the flags: the scope is the system's throughout, because the readers are other GPUs.
    """
    tl.debug_barrier()  # the ticket is drawn by one thread, for what all threads of the program wrote
    ticket = tl.atomic_add(state_ptr + 1, 1, sem="acq_rel", scope="sys")
    if ticket == tl.num_programs(0) - 1:
        # All programs have read the epoch before they drew their tickets.
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, epoch + 1)
        peers = tl.arange(0, LANES)
        exists = peers < RANKS
        at = base_ptr + tl.load(offsets_ptr + peers, mask=exists, other=0) + flags_at
        flags = at.to(tl.pointer_type(tl.int64)) + rank
        told = tl.zeros((LANES,), tl.int64) + (epoch + 1)
        tl.atomic_xchg(flags, told, mask=exists, sem="release", scope="sys")


@triton.jit
def _acquire(flag_ptr):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];",
        "=l,l,~{memory}",
        [flag_ptr.to(tl.int64)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait(base_ptr, state_ptr, flags_at, epoch, timeout_ns, RANKS: tl.constexpr, WAIT: tl.constexpr):
    """Begin of a drain: return when every rank has told `epoch` operations, or at the time limit, with LATE set.

    Every thread waits for itself, on flags in the own memory: no two threads need to agree inside the loop.
    """
    if WAIT:
        flags = (base_ptr + flags_at).to(tl.pointer_type(tl.int64))
        begin = globaltimer()
        limit = tl.where(tl.load(state_ptr + 2) != 0, 0, timeout_ns)
        for p in tl.static_range(RANKS):
            told = _acquire(flags + p)
            waits = told < epoch
            while waits:
                told = _acquire(flags + p)
                waits = (told < epoch) & (globaltimer() - begin < limit)
            tl.store(state_ptr + 2, p + 1, mask=told < epoch)
        tl.debug_barrier()


@triton.jit
def copy_rows(
    from_ptr, from_row, to_ptr, to_row, inside, WORDS: tl.constexpr, FROM_WIDTH: tl.constexpr, TO_WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Copy rows of WORDS 32-bit words; row numbers are int64 vectors, widths the words from one row to the next."""
    for column in tl.static_range(0, WORDS, BLOCK_W):
        cols = column + tl.arange(0, BLOCK_W)[None, :]
        mask = inside[:, None] & (cols < WORDS)
        values = tl.load(from_ptr + from_row[:, None] * FROM_WIDTH + cols, mask=mask)
        tl.store(to_ptr + to_row[:, None] * TO_WIDTH + cols, values, mask=mask)


@triton.jit(do_not_specialize=["timeout_ns"])
def _counts_kernel(
    out_ptr, base_ptr, state_ptr, timeout_ns, half, flags_at, counts_at,
    RANKS: tl.constexpr, LANES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(state_ptr)
    wait(base_ptr, state_ptr, flags_at, epoch, timeout_ns, RANKS, WAIT)
    counts = (base_ptr + half_of(epoch - 1, half) + counts_at).to(tl.pointer_type(tl.int32))
    lanes = tl.arange(0, LANES)
    inside = lanes < 2 * RANKS
    tl.store(out_ptr + lanes, tl.load(counts + lanes, mask=inside, other=0), mask=inside)


def read_counts(peers: PeerMemory) -> Tensor:
    """[P, 2] int32 on the device: rows and live slots from each rank, in the operation that all have filled last.

    A drain beside another of the same operation.
    """
    at = peers.layout
    counts = torch.empty((at.ranks, 2), dtype=torch.int32, device=peers.base.device)
    wait_in_kernel = peers.before_drain()
    with on_device_of(counts):
        _counts_kernel[(1,)](
            counts, peers.base, peers.state, peers.timeout_ns, at.half, at.flags_at, at.counts_at,
            RANKS=at.ranks, LANES=triton.next_power_of_2(2 * at.ranks), WAIT=wait_in_kernel, num_warps=1,
        )  # fmt: skip
    return counts


def as_words(rows: Tensor) -> Tensor:
    """[N, H] as [N, words] int32, contiguous and on a 16-byte boundary: a copy only where it is neither."""
    rows = rows.contiguous()
    if rows.data_ptr() % 16:
        rows = rows.clone()
    return rows.view(torch.int32)
