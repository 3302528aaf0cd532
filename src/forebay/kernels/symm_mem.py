"""Symmetric memory of the P ranks of one host: its layout, and the device functions by which their kernels synchronise.

Each rank has one byte tensor with the regions of `PeerLayout`; a kernel reaches rank p's copy at the same place plus `offsets[p]`
bytes. An operation has programs that fill memory and programs that drain it, in one launch; flags in memory say which chunks are
filled. Flags and counters live on the device, so a CUDA graph can be replayed. `PeerMemory` owns the tensors.
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

# Memory that P ranks of one host hold alike and reach in each other, and how their kernels wait for one another.
#
# Each rank has one byte tensor of the same size, with the regions of `PeerLayout`. A kernel gets its own tensor as an argument
# and reaches rank p's copy at the same place plus `offsets[p]`, the distance of the two in bytes: so every pointer is derived
# from an argument, its alignment is known to the compiler, and tensors of one process can stand for ranks in a test.
#
# An *operation* has two roles, and programs for each, the same on all ranks and in the same order:
#
#     fill    write to the own memory or the peers', chunk by chunk; after each chunk the last program to finish it tells all
#             ranks, by a flag in their memory
#     drain   wait until the ranks have told a chunk; read the own memory or the peers'
#
# Both are one launch, so that what is done at the own end hides behind the link. Filling programs wait for nobody, and draining
# ones are numbered after them, by a draw: a draining program never holds a place that a filling one needs. `peer_sync` has the
# waiting and telling.
#
# A flag holds the number of operations in which its chunk was told. Flags only grow and are never reset. The count itself is on
# the device (`state`), so a captured CUDA graph can be replayed. What an operation fills lies twice, in two halves used in turn:
# every drain waits for at least one flag of each rank, so who fills for operation n + 2 has seen all ranks in n + 1, and they
# began that after draining n.
#
# Needs a link with atomics between the GPUs, such as NVLink. Neither NVLink multicast nor NVSHMEM is used.

# Elements of `PeerMemory.state`: operations done; programs begun and done in the running one; 1 + the rank that did not come in
# time (0: none); for each chunk the programs that finished it; then what the parts of the lists count.
EPOCH, BEGUN, DONE, LATE, TICKETS, LISTS = 0, 1, 2, 3, 4, 16
_CHUNKS = 8
# Tokens that one program lists for one rank: two for each thread of 8 warps.
LIST_BLOCK = 512
# Regions begin on cache lines.
_LINE = 128
# A row is moved in blocks of at most 1024 words, 4 KiB; a program moves 4096 words at once, 16 bytes a thread and load.
_BLOCK_WORDS = 1024
_TILE_WORDS = 4096
_TILE_ROWS = 128


@dataclass(frozen=True)
class PeerLayout:
    """Where things lie in each rank's memory, in bytes. T tokens at most, P ranks, K slots a token.

    Once: `flags_at` [chunks + 1, P] int64 (rank p's; the last row is of the lists) and `needs_at` [P] int64 (rank p's largest
    need of a dispatch under a capacity). Twice, `half` bytes apart: `rows_at` [T] rows, `ids_at` [T, K] int32, `weights_at` [T,
    K] of up to 4 bytes, `lists_at` [P, T] int32 (tokens that rank p sends here), `counts_at` [P, 2] int32 (rank p's rows and
    live slots for this rank), `landing_at` [T, P] rows and `narrow_at` [T, P, K] of up to 4 bytes (what rank p sends back).

    Attributes:
        ranks, tokens, slots: P, T, K.
        row_bytes: of one row, a multiple of 16.
        chunk_bytes: rows are told in chunks of about as many, at most 8: shorter than what is still to come, longer than
            telling takes.

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

    @property
    def words(self) -> int:
        """32-bit words of a row."""
        return self.row_bytes // 4

    @property
    def flags_at(self) -> int:
        return 0

    @property
    def needs_at(self) -> int:
        return _lines(8 * self.ranks * (_CHUNKS + 1))

    @property
    def rows_at(self) -> int:
        return self.needs_at + _lines(8 * self.ranks)

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
        return LISTS + self.ranks * self.list_lanes()

    @property
    def chunk_tokens(self) -> int:
        """Tokens, or positions in a list of tokens, of a chunk; a multiple of a tile's rows."""
        chunks = max(1, min(_CHUNKS, self.tokens * self.row_bytes // self.chunk_bytes))
        return -(-self.tokens // (chunks * _TILE_ROWS)) * _TILE_ROWS

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.chunk_tokens)

    def list_lanes(self) -> int:
        """Parts of LIST_BLOCK tokens, up to a power of two."""
        return triton.next_power_of_2(triton.cdiv(self.tokens, LIST_BLOCK))

    def block_words(self) -> int:
        """Columns a program moves at once: a power of two of words."""
        return column_block(self.words, _BLOCK_WORDS)

    def block_rows(self) -> int:
        """Rows a program moves at once."""
        return min(_TILE_ROWS, _TILE_WORDS // self.block_words())


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """One rank's view of the memory of all.

    Attributes:
        base: [layout.total] uint8, this rank's memory; zero before the first operation of any rank.
        offsets: [P] int64 on the device: bytes from `base` to each rank's memory; 0 for this rank.
        state: [layout.state_size] int64 on the device, zero at first; see EPOCH and following.
        rank: of this memory among the P.
        timeout_ns: how long `wait` waits. After one rank was late nothing waits any more, until `state[LATE]` is zeroed.
        programs: the unit of how many programs a role has, one for each multiprocessor: they go through the rows in turn.
        meet: None on GPUs, where programs wait. In Triton's interpreter they cannot: fill and drain are two launches there,
            and this is called between, to return when all ranks have filled.
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
        """
        Raises:
            ValueError: a tensor that is not contiguous, or of another size.
        """
        needed = {"base": self.layout.total, "offsets": self.layout.ranks, "state": self.layout.state_size}
        for name, size in needed.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dim() != 1 or tensor.shape[0] < size or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous with {size} elements, got {list(tensor.shape)}, strides {tensor.stride()}"
                )


def aligned(name: str, rows: Tensor, peers: PeerMemory) -> Tensor:
    """[N, H] contiguous and on a 16-byte boundary: a copy only where it is neither.

    Raises:
        ValueError: rows of other bytes than the layout's, or on another device.
    """
    at = peers.layout
    if rows.dim() != 2 or rows.shape[1] * rows.element_size() != at.row_bytes or rows.device != peers.base.device:
        raise ValueError(
            f"{name} must be rows of {at.row_bytes} bytes on {peers.base.device}, got {list(rows.shape)} {rows.dtype} on "
            f"{rows.device}"
        )
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


def moved(name: str, values: Tensor, peers: PeerMemory, rows: int) -> Tensor:
    """[N, K] as integers of its size, contiguous: values that are moved and not computed with.

    Raises:
        ValueError: another shape, device or size of an element.
    """
    words = {2: torch.int16, 4: torch.int32}
    shape = (rows, peers.layout.slots)
    if values.shape != shape or values.element_size() not in words or values.device != peers.base.device:
        raise ValueError(
            f"{name} must be {list(shape)} of 2 or 4 bytes on {peers.base.device}, got {list(values.shape)} {values.dtype} on "
            f"{values.device}"
        )
    return values.contiguous().view(words[values.element_size()])


# How programs of P ranks' kernels wait for each other: the device functions of `peer_memory`'s operations.
#
#     epoch = load(state)            operations done before this one
#     program = draw(state)          its number, in the order in which programs begin
#     tell(..., chunk, ...)          a filling program is done with a chunk; the last one tells all ranks
#     wait(..., chunk, ...)          a draining program needs a chunk of all ranks
#     leave(...)                     every program, last: the operation is over with the last program to leave
#
# Memory order: each program's writes, also those to peers, are released with its ticket; the last program acquires them all and
# releases them with the flags; who waits acquires a flag. The scope is the system's, because the readers are other GPUs. Programs
# finish chunks in their order, so a flag stands for the chunks before it as well.

_EPOCH = tl.constexpr(EPOCH)
_BEGUN = tl.constexpr(BEGUN)
_DONE = tl.constexpr(DONE)
_LATE = tl.constexpr(LATE)
_TICKETS = tl.constexpr(TICKETS)


@triton.jit
def peer_of(base_ptr, offsets_ptr, peer):
    """Rank `peer`'s memory."""
    return base_ptr + tl.multiple_of(tl.load(offsets_ptr + peer), 16)


@triton.jit
def half_of(epoch, half):
    """Bytes to the half that an operation uses."""
    return (epoch & 1) * half


@triton.jit
def draw(state_ptr):
    """This program's number. Programs with lower ones have begun, which `program_id` does not promise."""
    return tl.atomic_add(state_ptr + _BEGUN, 1, sem="relaxed").to(tl.int32)


@triton.jit
def tell(
    base_ptr, offsets_ptr, state_ptr, flags_at, chunk, rank, epoch, tellers, RANKS: tl.constexpr, LANES: tl.constexpr
):
    """This program is done with `chunk`; the last of `tellers` tells all ranks."""
    tl.debug_barrier()  # the ticket is drawn by one thread, for what all threads of the program wrote
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
    """Return when every rank has told `chunk`, or at the time limit, with LATE set. No more waiting once it is set.

    Every thread waits for itself, on flags in the own memory: no two threads need to agree inside the loop.
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
    """The last one to leave makes the state ready for the next launch; if ADVANCE, of the next operation."""
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
    """Copy rows of WORDS 32-bit words; row numbers are int64 vectors, widths the words from one row to the next."""
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
    """[P, 2] int32 on the device: rows and live slots from each rank. Between fill and drain, where they are two launches."""
    at = peers.layout
    counts = torch.empty((at.ranks, 2), dtype=torch.int32, device=peers.base.device)
    if peers.meet is not None:
        peers.meet()
    with on_device_of(counts):
        _counts_kernel[(1,)](
            counts, peers.base, peers.state, peers.timeout_ns, at.half, at.flags_at, at.counts_at,
            RANKS=at.ranks, LANES=triton.next_power_of_2(2 * at.ranks), CHUNKS=at.chunks, WAIT=peers.meet is None,
            num_warps=1,
        )  # fmt: skip
    return counts
