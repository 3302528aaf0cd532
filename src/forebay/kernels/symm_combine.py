"""Combine: rows are written to the memory of the ranks that own their tokens, and summed there.

Input: rows [C, H], optionally values per slot `narrow` [C, K], and `source`, `starts`, `places` of
`forebay.kernels.symm_dispatch`. Output: y[t] = init[t] + the sum of token t's rows over the ranks, in their order, in fp32
and rounded once: bitwise `permute.combine_rows` over the same rows. A rank's rows for its own tokens do not move. `push_rows`
fills and `sum_rows` drains (see `forebay.kernels.symm_mem`). Traffic of each rank: the rows of others over the link, R rows
read again and T written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import column_block, on_device_of, packed
from forebay.kernels.symm_mem import (
    PeerMemory,
    aligned_rows,
    as_integers,
    copy_rows,
    draw,
    half_of,
    leave,
    peer_of,
    tell,
    wait,
)

_WARPS = 8
# Columns of a token that a sum handles at a time: one 16-byte load a thread for each rank.
_SUM_COLUMNS = 2048
# Programs of each role, in units of `PeerMemory.programs`. Four H200, 256 MiB a rank: 650 us; 1 and 1: 673; 2 and 2: 656.
_PUSHERS = 1
_ADDERS = 2


@triton.jit
def _push(
    rows_ptr, narrow_ptr, source_ptr, starts_ptr, base_ptr, offsets_ptr, state_ptr,
    worker, workers, rank, epoch, tokens_max, chunk_tokens, half, flags_at, landing_at, narrow_at,
    WITH_NARROW: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, LANES_K: tl.constexpr,
    CHUNKS: tl.constexpr, WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Tiles of the P - 1 other owners in turn, from the next rank on, so that all links are always busy.

    A chunk is a range of positions among the rows of one owner (`places` at the owner), whose tokens ascend.
    """
    here = half_of(epoch, half)
    most = 0
    for p in tl.static_range(RANKS):
        most = tl.maximum(most, tl.load(starts_ptr + p + 1) - tl.load(starts_ptr + p))
    chunk = 0
    while chunk < CHUNKS:
        tile = worker
        while tile < tl.cdiv(tl.minimum(chunk_tokens, most - chunk * chunk_tokens), BLOCK_R) * (RANKS - 1):
            peer = (tile % (RANKS - 1) + rank + 1) % RANKS
            begin, end = tl.load(starts_ptr + peer), tl.load(starts_ptr + peer + 1)
            theirs = peer_of(base_ptr, offsets_ptr, peer) + here
            row = begin + chunk * chunk_tokens + (tile // (RANKS - 1)) * BLOCK_R + tl.arange(0, BLOCK_R)
            inside = row < end
            token = tl.load(source_ptr + row, mask=inside, other=0) - peer * tokens_max
            token = tl.where(inside, token, 0).to(tl.int64)
            row = row.to(tl.int64)
            # This rank's one of a token's P landing rows.
            landing = (theirs + landing_at).to(tl.pointer_type(tl.int32)) + rank * WORDS
            copy_rows(rows_ptr, row, landing, token, inside, WORDS, WORDS, RANKS * WORDS, BLOCK_W)
            if WITH_NARROW:
                choice = tl.arange(0, LANES_K)[None, :]
                chosen = inside[:, None] & (choice < K)
                values = tl.load(narrow_ptr + row[:, None] * K + choice, mask=chosen)
                at = (theirs + narrow_at).to(narrow_ptr.dtype) + rank * K
                tl.store(at + token[:, None] * (RANKS * K) + choice, values, mask=chosen)
            tile += workers
        tell(base_ptr, offsets_ptr, state_ptr, flags_at, chunk, rank, epoch, workers, RANKS, LANES)
        chunk += 1


@triton.jit
def _sum_ranks(
    total, own_ptr, own_begin, own_end, landing_ptr, places_ptr, token, cols, rank, exists, inside,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """total + the rows of one token, or of a column of tokens: landed ones, and this rank's own from `own_ptr`."""
    to_landing = tl.multiple_of(landing_ptr.to(tl.int64) - own_ptr.to(tl.int64), ALIGNED)
    own_bytes = own_ptr.to(tl.pointer_type(tl.uint8))
    # Unrolled: the P places and then the P rows are in flight together.
    for p in tl.static_range(RANKS):
        place = tl.load(places_ptr + token * RANKS + p, mask=exists, other=-1)
        # Above the capacity, `places` has more rows than were received.
        place = tl.where((p == rank) & (own_begin + place >= own_end), -1, place)
        row = tl.where(p == rank, (own_begin + place).to(tl.int64), token * RANKS + p)
        rows_ptr = (own_bytes + tl.multiple_of(tl.where(p == rank, 0, to_landing), ALIGNED)).to(landing_ptr.dtype)
        values = tl.load(rows_ptr + row * WIDTH + cols, mask=inside & (place >= 0), other=0.0)
        total += values.to(tl.float32)
    return total


@triton.jit
def _sum(
    rows_ptr, narrow_ptr, starts_ptr, places_ptr, init_ptr, y_ptr, narrow_y_ptr, base_ptr, state_ptr,
    worker, workers, rank, epoch, n_tokens, chunk_tokens, timeout_ns, half, flags_at, landing_at, narrow_at,
    WITH_INIT: tl.constexpr, WITH_NARROW: tl.constexpr, RANKS: tl.constexpr, K: tl.constexpr, LANES_K: tl.constexpr,
    CHUNKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, NARROW_T: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One token at a time, then the narrow rows of NARROW_T tokens at a time."""
    own = base_ptr + half_of(epoch, half)
    landing = (own + landing_at).to(y_ptr.dtype)
    wait(base_ptr, state_ptr, flags_at, 0, epoch, timeout_ns, RANKS, WAIT)
    ready = 1
    own_begin, own_end = tl.load(starts_ptr + rank), tl.load(starts_ptr + rank + 1)
    token = worker.to(tl.int64)
    while token < n_tokens:
        chunk = 0
        for p in tl.static_range(RANKS):
            chunk = tl.maximum(chunk, tl.load(places_ptr + token * RANKS + p) // chunk_tokens)
        if chunk >= ready:
            wait(base_ptr, state_ptr, flags_at, chunk, epoch, timeout_ns, RANKS, WAIT)
            ready = chunk + 1
        for column in tl.static_range(0, WIDTH, BLOCK_H):
            cols = column + tl.arange(0, BLOCK_H)
            inside = cols < WIDTH
            total = tl.zeros((BLOCK_H,), tl.float32)
            if WITH_INIT:
                total += tl.load(init_ptr + token * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
            total = _sum_ranks(
                total, rows_ptr, own_begin, own_end, landing, places_ptr, token, cols, rank, token < n_tokens, inside,
                WIDTH, RANKS, 16,
            )  # fmt: skip
            tl.store(y_ptr + token * WIDTH + cols, total.to(y_ptr.dtype.element_ty), mask=inside)
        token += workers
    if WITH_NARROW:
        wait(base_ptr, state_ptr, flags_at, CHUNKS - 1, epoch, timeout_ns, RANKS, WAIT)
        landing = (own + narrow_at).to(narrow_y_ptr.dtype)
        tile = worker
        while tile < tl.cdiv(n_tokens, NARROW_T):
            tokens = (tile * NARROW_T + tl.arange(0, NARROW_T)).to(tl.int64)[:, None]
            cols = tl.arange(0, LANES_K)[None, :]
            exists = tokens < n_tokens
            inside = exists & (cols < K)
            total = tl.zeros((NARROW_T, LANES_K), tl.float32)
            total = _sum_ranks(
                total, narrow_ptr, own_begin, own_end, landing, places_ptr, tokens, cols, rank, exists, inside,
                K, RANKS, 2,
            )  # fmt: skip
            tl.store(narrow_y_ptr + tokens * K + cols, total.to(narrow_y_ptr.dtype.element_ty), mask=inside)
            tile += workers


@triton.jit(do_not_specialize=["rank", "tokens_max", "n_tokens", "pushers", "chunk_tokens", "timeout_ns"])
def _sums_kernel(
    words_ptr, narrow_words_ptr, rows_ptr, narrow_ptr, source_ptr, starts_ptr, places_ptr, init_ptr, y_ptr, narrow_y_ptr,
    base_ptr, offsets_ptr, state_ptr, rank, tokens_max, n_tokens, pushers, chunk_tokens, timeout_ns,
    half, flags_at, landing_at, narrow_at,
    FILL: tl.constexpr, DRAIN: tl.constexpr, WITH_INIT: tl.constexpr, WITH_NARROW: tl.constexpr, RANKS: tl.constexpr,
    LANES: tl.constexpr, K: tl.constexpr, LANES_K: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, NARROW_T: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """`pushers` programs write to all ranks' memory, the others sum what landed in this rank's."""
    epoch = tl.load(state_ptr)
    program = draw(state_ptr)
    if FILL:  # noqa: SIM102, the compiler decides this one, the program the next
        if program < pushers:
            _push(
                words_ptr, narrow_words_ptr, source_ptr, starts_ptr, base_ptr, offsets_ptr, state_ptr,
                program, pushers, rank, epoch, tokens_max, chunk_tokens, half, flags_at, landing_at, narrow_at,
                WITH_NARROW, RANKS, LANES, K, LANES_K, CHUNKS, WORDS, BLOCK_R, BLOCK_W,
            )  # fmt: skip
    if DRAIN:  # noqa: SIM102, as above
        if program >= pushers:
            _sum(
                rows_ptr, narrow_ptr, starts_ptr, places_ptr, init_ptr, y_ptr, narrow_y_ptr, base_ptr, state_ptr,
                program - pushers, tl.num_programs(0) - pushers, rank, epoch, n_tokens, chunk_tokens, timeout_ns,
                half, flags_at, landing_at, narrow_at,
                WITH_INIT, WITH_NARROW, RANKS, K, LANES_K, CHUNKS, WIDTH, BLOCK_H, NARROW_T, WAIT,
            )  # fmt: skip
    leave(state_ptr, epoch, DRAIN)


def push_rows(rows: Tensor, narrow: Tensor | None, source: Tensor, starts: Tensor, peers: PeerMemory) -> None:
    """Write rows to the landing places of their owners.

    Args:
        rows: [C, H], rows of the layout's bytes; those from starts[-1] on are not read.
        narrow: [C, K] of 2 or 4 bytes.
        source, starts: [C] and [P + 1] int32, from `receive_tokens`.
    """
    _launch(peers, rows, narrow, source, starts)


def sum_rows(
    rows: Tensor, narrow: Tensor | None, starts: Tensor, places: Tensor, init: Tensor | None, peers: PeerMemory
) -> tuple[Tensor, Tensor | None]:
    """Sum what landed here: y [T, H] in rows' dtype, and [T, K] in narrow's.

    Args:
        rows, narrow, starts: as pushed; this rank's rows for itself are read from there.
        places: [T, P] int32, from `send_tokens`; landing places without a place are not read.
        init: [T, H] in any floating dtype except fp64, added first.
    """
    sums = _empty(rows, narrow, places)
    if peers.meet is not None:
        peers.meet()
    _launch(peers, rows, narrow, None, starts, drain=(places, init, *sums))
    return sums


def return_rows(
    rows: Tensor,
    narrow: Tensor | None,
    source: Tensor,
    starts: Tensor,
    places: Tensor,
    init: Tensor | None,
    peers: PeerMemory,
) -> tuple[Tensor, Tensor | None]:
    """`push_rows` and `sum_rows` in one launch."""
    if peers.meet is not None:
        push_rows(rows, narrow, source, starts, peers)
        return sum_rows(rows, narrow, starts, places, init, peers)
    sums = _empty(rows, narrow, places)
    _launch(peers, rows, narrow, source, starts, drain=(places, init, *sums))
    return sums


def _empty(rows: Tensor, narrow: Tensor | None, places: Tensor) -> tuple[Tensor, Tensor | None]:
    n_tokens = places.shape[0]
    y = rows.new_empty((n_tokens, rows.shape[1]))
    return y, None if narrow is None else narrow.new_empty((n_tokens, narrow.shape[1]))


def _launch(
    peers: PeerMemory,
    rows: Tensor,
    narrow: Tensor | None,
    source: Tensor | None,
    starts: Tensor,
    drain: tuple[Tensor, Tensor | None, Tensor, Tensor | None] | None = None,
) -> None:
    """One launch, which pushes if `source` is given and sums if `drain` is.

    Raises:
        ValueError: more tokens than the layout has; a tensor of another shape, element size or device.
        TypeError: a tensor of another dtype.
    """
    at = peers.layout
    block_rows = at.block_rows()
    rows = aligned_rows("rows", rows, peers)
    narrow = None if narrow is None else narrow.contiguous()
    words = None if narrow is None else as_integers("narrow", narrow, peers, rows.shape[0])
    places, init, y, narrow_y = drain or (None, None, None, None)
    n_tokens, width = (0 if y is None else y.shape[0]), rows.shape[1]
    if n_tokens > at.tokens:
        raise ValueError(f"{n_tokens} tokens for memory of {at.tokens}")
    if source is not None:
        source = packed("source", source, peers.base, [rows.shape[0]], [torch.int32])
    starts = packed("starts", starts, peers.base, [at.ranks + 1], [torch.int32])
    if places is not None:
        places = packed("places", places, peers.base, [n_tokens, at.ranks], [torch.int32])
    if init is not None:
        init = packed("init", init, peers.base, [n_tokens, width])
    tiles = (at.ranks - 1) * triton.cdiv(min(rows.shape[0], at.chunk_tokens), block_rows)
    pushers = 0 if source is None else max(1, min(_PUSHERS * peers.programs, tiles))
    adders = 0 if y is None else max(1, min(_ADDERS * peers.programs, n_tokens))
    with on_device_of(peers.base):
        _sums_kernel[(pushers + adders,)](
            rows.view(torch.int32), words, rows, narrow, source, starts,
            places, init, y, narrow_y, peers.base, peers.offsets, peers.state,
            peers.rank, at.tokens, n_tokens, pushers, at.chunk_tokens, peers.timeout_ns,
            at.half, at.flags_at, at.landing_at, at.narrow_at,
            FILL=source is not None, DRAIN=drain is not None, WITH_INIT=init is not None, WITH_NARROW=narrow is not None,
            RANKS=at.ranks, LANES=triton.next_power_of_2(at.ranks), K=at.slots, LANES_K=triton.next_power_of_2(at.slots),
            CHUNKS=at.chunks, WORDS=at.words, BLOCK_R=block_rows, BLOCK_W=at.block_words(),
            WIDTH=width, BLOCK_H=column_block(width, _SUM_COLUMNS), NARROW_T=128, WAIT=peers.meet is None,
            num_warps=_WARPS,
        )  # fmt: skip
