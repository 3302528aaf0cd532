"""How programs of P ranks' kernels wait for each other: the device functions of `peer_memory`'s operations.

    epoch = load(state)            operations done before this one
    program = draw(state)          its number, in the order in which programs begin
    tell(..., chunk, ...)          a filling program is done with a chunk; the last one tells all ranks
    wait(..., chunk, ...)          a draining program needs a chunk of all ranks
    leave(...)                     every program, last: the operation is over with the last program to leave

Memory order: each program's writes, also those to peers, are released with its ticket; the last program acquires them all and
releases them with the flags; who waits acquires a flag. The scope is the system's, because the readers are other GPUs. Programs
finish chunks in their order, so a flag stands for the chunks before it as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from forebay.kernels.launch import on_device_of
from forebay.kernels.peer_memory import BEGUN, DONE, EPOCH, LATE, TICKETS, PeerMemory

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
