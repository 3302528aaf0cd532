"""Symmetric memory of the P ranks of one host: its layout, and the device functions by which their kernels synchronize.

Each rank has a byte tensor with the regions of `PeerLayout`. A kernel gets its own tensor and reaches rank p's copy at
`offsets[p]` bytes from it, so the compiler knows the alignment, and tensors of one process can stand for ranks in a test. An
*operation* has two roles, in one launch, the same on all ranks and in the same order: programs that *fill* memory chunk by
chunk, and programs that *drain* it. Draining programs have higher numbers than filling ones (`draw`), so they never occupy a
place that a filling one needs. All of it needs atomics over the link between GPUs, such as NVLink; neither NVLink multicast
nor NVSHMEM is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from forebay.kernels.launch import cdiv, column_block, launch, next_power_of_2, on_16_bytes

# A flag in memory holds the number of operations in which its chunk was filled. Flags only grow and are never reset, and the
# count is on the device (`state`), so a captured CUDA graph can be replayed. Filled regions exist twice and are used in turn:
# each drain waits for at least one flag of each rank, so a rank that fills for operation n + 2 has seen all ranks in n + 1,
# which they began after draining n.

# Elements of `PeerMemory.state`: operations done; programs begun and done in the running one; 1 + the rank that was late (0:
# none); for each chunk the programs that finished it; then the counts of the chunks of the lists.
EPOCH, BEGUN, DONE, LATE, TICKETS, LISTS = 0, 1, 2, 3, 4, 16
_CHUNKS = 8
# Tokens that a program lists for a rank: two for each thread of 8 warps.
LIST_BLOCK = 512
# Regions begin on cache lines.
_LINE = 128
# Rows move in blocks of at most 1024 words, 4 KiB; a program moves 4096 words at once, 16 bytes a thread and load.
_BLOCK_WORDS = 1024
_TILE_WORDS = 4096
_TILE_ROWS = 128


@dataclass(frozen=True)
class PeerLayout:
    """Byte offsets of the regions in each rank's memory, for at most T tokens, P ranks and K slots a token.

    Once: `flags_at` [chunks + 1, P] int64 (of rank p; the last row is for the lists) and `needs_at` [P] int64 (rank p's largest
    need of a dispatch under a capacity). Twice, `half` bytes apart: `rows_at` [T] rows, `ids_at` [T, K] int32, `weights_at` [T,
    K] of up to 4 bytes, `lists_at` [P, T] int32 (tokens that rank p sends here), `counts_at` [P, 2] int32 (rank p's rows and
    live slots for this rank), `landing_at` [T, P] rows and `narrow_at` [T, P, K] of up to 4 bytes (what rank p sends back).

    Attributes:
        ranks, tokens, slots: P, T, K.
        row_bytes: of one row, a multiple of 16.
        chunk_bytes: approximate size of a chunk, of which there are at most 8. A chunk should take longer than its flag.

    Raises:
        ValueError: fewer than two ranks; rows that are no multiple of 16 bytes; more rows or slots than 32-bit numbers count.
    """

    ranks: int
    tokens: int
    slots: int
    row_bytes: int
    chunk_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"memory is shared by two ranks or more, got {self.ranks}")
        if self.row_bytes % 16 or self.row_bytes <= 0:
            raise ValueError(f"a row must be a multiple of 16 bytes, got {self.row_bytes}")
        if self.tokens * max(self.ranks, self.slots) >= 2**31:
            raise ValueError(
                f"{self.tokens} tokens of {self.slots} slots on {self.ranks} ranks: more than 2**31 rows or slots"
            )

    @cached_property
    def words(self) -> int:
        """32-bit words of a row."""
        return self.row_bytes // 4

    @cached_property
    def flags_at(self) -> int:
        return 0

    @cached_property
    def needs_at(self) -> int:
        return _lines(8 * self.ranks * (_CHUNKS + 1))

    @cached_property
    def rows_at(self) -> int:
        return self.needs_at + _lines(8 * self.ranks)

    @cached_property
    def ids_at(self) -> int:
        return self.rows_at + _lines(self.tokens * self.row_bytes)

    @cached_property
    def weights_at(self) -> int:
        return self.ids_at + _lines(4 * self.tokens * self.slots)

    @cached_property
    def lists_at(self) -> int:
        return self.weights_at + _lines(4 * self.tokens * self.slots)

    @cached_property
    def counts_at(self) -> int:
        return self.lists_at + _lines(4 * self.tokens * self.ranks)

    @cached_property
    def landing_at(self) -> int:
        return self.counts_at + _lines(8 * self.ranks)

    @cached_property
    def narrow_at(self) -> int:
        return self.landing_at + self.ranks * self.tokens * self.row_bytes

    @cached_property
    def half(self) -> int:
        return _lines(self.narrow_at + 4 * self.ranks * self.tokens * self.slots) - self.rows_at

    @cached_property
    def total(self) -> int:
        """Bytes to allocate on each rank."""
        return self.rows_at + 2 * self.half

    @cached_property
    def state_size(self) -> int:
        """Elements of `PeerMemory.state`."""
        return LISTS + self.ranks * self.list_lanes

    @cached_property
    def chunk_tokens(self) -> int:
        """Tokens, or positions in a list of tokens, per chunk; a multiple of a tile's rows."""
        chunks = max(1, min(_CHUNKS, self.tokens * self.row_bytes // self.chunk_bytes))
        return -(-self.tokens // (chunks * _TILE_ROWS)) * _TILE_ROWS

    @cached_property
    def chunks(self) -> int:
        return -(-self.tokens // self.chunk_tokens)

    @cached_property
    def list_lanes(self) -> int:
        """Blocks of LIST_BLOCK tokens, rounded up to a power of two."""
        return next_power_of_2(cdiv(self.tokens, LIST_BLOCK))

    @cached_property
    def block_words(self) -> int:
        """Words of a row that a program moves at once, a power of two."""
        return column_block(self.words, _BLOCK_WORDS)

    @cached_property
    def block_rows(self) -> int:
        """Rows that a program moves at once."""
        return min(_TILE_ROWS, _TILE_WORDS // self.block_words)


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """One rank's view of the memory of all ranks.

    Attributes:
        base: [layout.total] uint8, this rank's memory; zero before the first operation of any rank.
        offsets: [P] int64 on the device: bytes from `base` to each rank's memory; 0 for this rank.
        state: [layout.state_size] int64 on the device, zero at first; see EPOCH and following.
        rank: of this memory among the P.
        timeout_ns: how long `wait` waits. After one rank was late nothing waits until `state[LATE]` is zeroed.
        programs: unit of the number of programs of a role, one for each multiprocessor; they iterate over the rows.
        meet: None on GPUs. Programs of Triton's interpreter cannot wait: there, fill and drain are two launches, and this is
            called in between, to return when all ranks have filled.

    Raises:
        ValueError: a tensor that is not contiguous, or of another size.
    """

    base: Tensor
    offsets: Tensor
    state: Tensor
    rank: int
    layout: PeerLayout
    timeout_ns: int = 120 * 10**9
    programs: int = 4
    meet: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        needed = {"base": self.layout.total, "offsets": self.layout.ranks, "state": self.layout.state_size}
        for name, size in needed.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dim() != 1 or tensor.shape[0] < size or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous with {size} elements, got {list(tensor.shape)}, strides {tensor.stride()}"
                )


def aligned_rows(name: str, rows: Tensor, peers: PeerMemory) -> Tensor:
    """[N, H] contiguous on a 16-byte boundary, copied only if needed.

    Raises:
        ValueError: rows of another size than the layout's, or on another device.
    """
    at = peers.layout
    if rows.dim() != 2 or rows.shape[1] * rows.element_size() != at.row_bytes or rows.device != peers.base.device:
        raise ValueError(
            f"{name} must be rows of {at.row_bytes} bytes on {peers.base.device}, got {list(rows.shape)} {rows.dtype} on "
            f"{rows.device}"
        )
    return on_16_bytes(rows)


def as_integers(name: str, values: Tensor, peers: PeerMemory, rows: int) -> Tensor:
    """Contiguous values [N, K], viewed as integers of their size: they are moved, not computed with.

    Raises:
        ValueError: another shape, device or element size.
    """
    words = {2: torch.int16, 4: torch.int32}
    shape = (rows, peers.layout.slots)
    if values.shape != shape or values.element_size() not in words or values.device != peers.base.device:
        raise ValueError(
            f"{name} must be {list(shape)} of 2 or 4 bytes on {peers.base.device}, got {list(values.shape)} {values.dtype} on "
            f"{values.device}"
        )
    return values.contiguous().view(words[values.element_size()])


# How programs synchronize: each loads its operation's number (`state[EPOCH]`) and draws its own; a filling program calls
# `tell` after a chunk, a draining one `wait` before it reads one, and every program calls `leave` last. Memory order: each
# program's writes, also to peers, are released with its ticket; the last program acquires them all and releases them with the
# flags; a waiting program acquires a flag. The scope is the system, because the readers are other GPUs. Programs finish
# chunks in order, so a flag stands for the chunks before it as well.

_EPOCH = tl.constexpr(EPOCH)
_BEGUN = tl.constexpr(BEGUN)
_DONE = tl.constexpr(DONE)
_LATE = tl.constexpr(LATE)
_TICKETS = tl.constexpr(TICKETS)


@triton.jit
def peer_of(base_ptr, offsets_ptr, peer):
    """The memory of rank `peer`."""
    return base_ptr + tl.multiple_of(tl.load(offsets_ptr + peer), 16)


@triton.jit
def half_of(epoch, half):
    """Byte offset of the half that an operation uses."""
    return (epoch & 1) * half


@triton.jit
def draw(state_ptr):
    """This program's number. Programs with lower numbers have started, which `program_id` does not guarantee."""
    return tl.atomic_add(state_ptr + _BEGUN, 1, sem="relaxed").to(tl.int32)


@triton.jit
def tell(
    base_ptr, offsets_ptr, state_ptr, flags_at, chunk, rank, epoch, tellers, RANKS: tl.constexpr, LANES: tl.constexpr
):
    """Mark `chunk` as done by this program; the last of `tellers` sets the flags of all ranks."""
    tl.debug_barrier()  # one thread draws the ticket, for the writes of all threads of the program
    ticket = tl.atomic_add(state_ptr + _TICKETS + chunk, 1, sem="acq_rel", scope="sys")
    if ticket == tellers - 1:
        tl.store(state_ptr + _TICKETS + chunk, 0)
        peers = tl.arange(0, LANES)
        exists = peers < RANKS
        at = base_ptr + tl.load(offsets_ptr + peers, mask=exists, other=0) + flags_at
        flags = at.to(tl.pointer_type(tl.int64)) + chunk * RANKS + rank
        told = tl.zeros((LANES,), tl.int64) + (epoch + 1)
        tl.atomic_xchg(flags, told, mask=exists, sem="release", scope="sys")


@triton.jit
def _acquire(flag_ptr, PAUSE: tl.constexpr):
    return tl.inline_asm_elementwise(
        PAUSE + "ld.acquire.sys.global.b64 $0, [$1];",
        "=l,l,~{memory}",
        [flag_ptr.to(tl.int64)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait(base_ptr, state_ptr, flags_at, chunk, epoch, timeout_ns, RANKS: tl.constexpr, WAIT: tl.constexpr):
    """Return when every rank has filled `chunk`, or at the time limit with LATE set. Does not wait once LATE is set.

    Each thread waits on its own, on flags in this rank's memory: threads need not agree inside the loop.
    """
    if WAIT:
        flags = (base_ptr + flags_at).to(tl.pointer_type(tl.int64)) + chunk * RANKS
        begin = globaltimer()
        limit = tl.where(tl.load(state_ptr + _LATE) != 0, 0, timeout_ns)
        for p in tl.static_range(RANKS):
            told = _acquire(flags + p, "")
            waits = told <= epoch
            while waits:
                told = _acquire(flags + p, "nanosleep.u32 50; ")
                waits = (told <= epoch) & (globaltimer() - begin < limit)
            tl.store(state_ptr + _LATE, p + 1, mask=told <= epoch)
        tl.debug_barrier()


@triton.jit
def leave(state_ptr, epoch, ADVANCE: tl.constexpr):
    """The last program to leave resets the state for the next launch, and with ADVANCE begins the next operation."""
    tl.debug_barrier()
    done = tl.atomic_add(state_ptr + _DONE, 1, sem="acq_rel")
    if done == tl.num_programs(0) - 1:
        tl.store(state_ptr + _DONE, 0)
        tl.store(state_ptr + _BEGUN, 0)
        if ADVANCE:
            tl.store(state_ptr + _EPOCH, epoch + 1)


@triton.jit
def copy_rows(
    from_ptr, from_row, to_ptr, to_row, inside, WORDS: tl.constexpr, FROM_WIDTH: tl.constexpr, TO_WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Copy rows of WORDS 32-bit words. Row numbers are int64 vectors; widths are the words from one row to the next."""
    for column in tl.static_range(0, WORDS, BLOCK_W):
        cols = column + tl.arange(0, BLOCK_W)[None, :]
        mask = inside[:, None] & (cols < WORDS)
        values = tl.load(from_ptr + from_row[:, None] * FROM_WIDTH + cols, mask=mask)
        tl.store(to_ptr + to_row[:, None] * TO_WIDTH + cols, values, mask=mask)


@triton.jit(do_not_specialize=["timeout_ns"])
def _counts_kernel(
    out_ptr, base_ptr, state_ptr, timeout_ns, half, flags_at, counts_at,
    RANKS: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(state_ptr + _EPOCH)
    wait(base_ptr, state_ptr, flags_at, CHUNKS, epoch, timeout_ns, RANKS, WAIT)
    counts = (base_ptr + half_of(epoch, half) + counts_at).to(tl.pointer_type(tl.int32))
    lanes = tl.arange(0, LANES)
    inside = lanes < 2 * RANKS
    tl.store(out_ptr + lanes, tl.load(counts + lanes, mask=inside, other=0), mask=inside)


def read_counts(peers: PeerMemory) -> Tensor:
    """[P, 2] int32 on the device: rows and live slots from each rank, between a fill and a drain in two launches."""
    at = peers.layout
    counts = torch.empty((at.ranks, 2), dtype=torch.int32, device=peers.base.device)
    if peers.meet is not None:
        peers.meet()
    launch(
        _counts_kernel, (1,),
        counts, peers.base, peers.state, peers.timeout_ns, at.half, at.flags_at, at.counts_at,
        RANKS=at.ranks, LANES=next_power_of_2(2 * at.ranks), CHUNKS=at.chunks, WAIT=peers.meet is None,
        num_warps=1,
    )  # fmt: skip
    return counts
