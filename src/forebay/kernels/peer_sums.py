"""Rows back to the ranks they came from, written into the owners' memory and summed there: combine, and dispatch's gradient.

    push_rows   rows [C, H] (, narrow [C, K]), source, starts   -> the landing place of (token, this rank) at each owner
    sum_rows    own memory, places [T, P]                       -> y [T, H] (, [T, K])

    y[t] = init[t] + sum over p of landing[t, p], where places[t, p] >= 0

One operation of `peer_memory`: the first call fills, the second drains. `source`, `starts` and `places` are those of
`peer_rows`. Sums are in fp32, begin with init, run in the order of ranks and are rounded once: bitwise those of
`permute.combine_rows` over the same rows.

Bytes, each rank: R rows over the link; R landed rows read again and T written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import column_block, on_device_of
from forebay.kernels.peer_memory import PeerMemory, as_words, copy_rows, half_of, peer_of, tell, wait

_WARPS = 8
_SUM_WARPS = 4
# Of a sum: up to 2048 columns of a token on 4 warps, two 16-byte loads a thread for each rank.
_SUM_COLUMNS = 2048
# Small programs, more of them.
_SUM_PROGRAMS = 4


@triton.jit(do_not_specialize=["rank", "tokens_max"])
def _push_kernel(
    rows_ptr, narrow_ptr, source_ptr, starts_ptr, base_ptr, offsets_ptr, state_ptr,
    rank, tokens_max, half, flags_at, landing_at, narrow_at,
    WITH_NARROW: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, LANES_K: tl.constexpr,
    WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Tiles of the P owners in turn, from the next rank on, so that all links are busy from begin to end."""
    epoch = tl.load(state_ptr)
    here = half_of(epoch, half)
    most = 0
    for p in tl.static_range(RANKS):
        most = tl.maximum(most, tl.load(starts_ptr + p + 1) - tl.load(starts_ptr + p))
    tile = tl.program_id(0)
    while tile < tl.cdiv(most, BLOCK_R) * RANKS:
        peer = (tile + rank + 1) % RANKS
        begin, end = tl.load(starts_ptr + peer), tl.load(starts_ptr + peer + 1)
        theirs = peer_of(base_ptr, offsets_ptr, peer) + here
        row = begin + (tile // RANKS) * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = row < end
        token = tl.load(source_ptr + row, mask=inside, other=0) - peer * tokens_max
        token = tl.where(inside, token, 0).to(tl.int64)
        row = row.to(tl.int64)
        # Of a token's P landing rows, the one for this rank.
        landing = (theirs + landing_at).to(tl.pointer_type(tl.int32)) + rank * WORDS
        copy_rows(rows_ptr, row, landing, token, inside, WORDS, WORDS, RANKS * WORDS, BLOCK_W)
        if WITH_NARROW:
            choice = tl.arange(0, LANES_K)[None, :]
            chosen = inside[:, None] & (choice < K)
            values = tl.load(narrow_ptr + row[:, None] * K + choice, mask=chosen)
            at = (theirs + narrow_at).to(narrow_ptr.dtype) + rank * K
            tl.store(at + token[:, None] * (RANKS * K) + choice, values, mask=chosen)
        tile += tl.num_programs(0)
    tell(base_ptr, offsets_ptr, state_ptr, flags_at, rank, epoch, RANKS, LANES)


@triton.jit
def _sum_ranks(total, landing_ptr, landed, places_ptr, place, exists, inside, WIDTH: tl.constexpr, RANKS: tl.constexpr):
    """total + the rows that landed for a token or a column of tokens; `landed`, `place`: where those of rank 0 are."""
    # Unrolled: the P places and then the P rows are in flight together.
    for p in tl.static_range(RANKS):
        came = tl.load(places_ptr + place + p, mask=exists, other=-1) >= 0
        values = tl.load(landing_ptr + landed + p * WIDTH, mask=inside & came, other=0.0)
        total += values.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["n_tokens", "timeout_ns"])
def _sum_kernel(
    places_ptr, init_ptr, y_ptr, narrow_y_ptr, base_ptr, state_ptr, n_tokens, timeout_ns,
    half, flags_at, landing_at, narrow_at,
    WITH_INIT: tl.constexpr, WITH_NARROW: tl.constexpr, RANKS: tl.constexpr, K: tl.constexpr, LANES_K: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, NARROW_T: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One token at a time, then the narrow rows of NARROW_T tokens at a time."""
    epoch = tl.load(state_ptr)
    wait(base_ptr, state_ptr, flags_at, epoch, timeout_ns, RANKS, WAIT)
    own = base_ptr + half_of(epoch - 1, half)
    landing = (own + landing_at).to(y_ptr.dtype)
    token = tl.program_id(0).to(tl.int64)
    while token < n_tokens:
        for column in tl.static_range(0, WIDTH, BLOCK_H):
            cols = column + tl.arange(0, BLOCK_H)
            inside = cols < WIDTH
            total = tl.zeros((BLOCK_H,), tl.float32)
            if WITH_INIT:
                total += tl.load(init_ptr + token * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
            landed = token * (RANKS * WIDTH) + cols
            total = _sum_ranks(
                total, landing, landed, places_ptr, token * RANKS, token < n_tokens, inside, WIDTH, RANKS
            )
            tl.store(y_ptr + token * WIDTH + cols, total.to(y_ptr.dtype.element_ty), mask=inside)
        token += tl.num_programs(0)
    if WITH_NARROW:
        landing = (own + narrow_at).to(narrow_y_ptr.dtype)
        tile = tl.program_id(0)
        while tile < tl.cdiv(n_tokens, NARROW_T):
            tokens = (tile * NARROW_T + tl.arange(0, NARROW_T)).to(tl.int64)[:, None]
            cols = tl.arange(0, LANES_K)[None, :]
            exists = tokens < n_tokens
            inside = exists & (cols < K)
            total = tl.zeros((NARROW_T, LANES_K), tl.float32)
            landed = tokens * (RANKS * K) + cols
            total = _sum_ranks(total, landing, landed, places_ptr, tokens * RANKS, exists, inside, K, RANKS)
            tl.store(narrow_y_ptr + tokens * K + cols, total.to(narrow_y_ptr.dtype.element_ty), mask=inside)
            tile += tl.num_programs(0)


def push_rows(rows: Tensor, narrow: Tensor | None, source: Tensor, starts: Tensor, peers: PeerMemory) -> None:
    """Fill the owners' landing places.

    Args:
        rows: [C, H], rows of the layout's bytes; those behind starts[-1] are not read.
        narrow: [C, K] of 2 or 4 bytes, sent beside them.
        source, starts: [C] and [P + 1] int32, from `receive_tokens`.
    """
    at = peers.layout
    block_rows = at.block_rows()
    tiles = at.ranks * triton.cdiv(min(rows.shape[0], at.tokens), block_rows)
    raw = (
        None if narrow is None else narrow.contiguous().view(torch.int16 if narrow.element_size() == 2 else torch.int32)
    )
    with on_device_of(rows):
        _push_kernel[(max(1, min(peers.programs, tiles)),)](
            as_words(rows), raw, source, starts, peers.base, peers.offsets, peers.state,
            peers.rank, at.tokens, at.half, at.flags_at, at.landing_at, at.narrow_at,
            WITH_NARROW=narrow is not None, RANKS=at.ranks, LANES=triton.next_power_of_2(at.ranks),
            K=at.slots, LANES_K=triton.next_power_of_2(at.slots),
            WORDS=at.words, BLOCK_R=block_rows, BLOCK_W=at.block_words(), num_warps=_WARPS,
        )  # fmt: skip


def sum_rows(
    places: Tensor, init: Tensor | None, dtype: torch.dtype, narrow_dtype: torch.dtype | None, peers: PeerMemory
) -> tuple[Tensor, Tensor | None]:
    """Drain the own landing places: (y [T, H] in `dtype`, [T, K] in `narrow_dtype`, or None).

    Args:
        places: [T, P] int32, from `send_tokens`: landing places without a place are not read.
        init: [T, H] in any floating dtype but fp64, added in fp32 before the rows.
        dtype: of the rows that were pushed.
        narrow_dtype: of the narrow rows, if they were.
    """
    at = peers.layout
    n_tokens, width = places.shape[0], at.row_bytes // dtype.itemsize
    y = torch.empty((n_tokens, width), dtype=dtype, device=places.device)
    narrow = None
    if narrow_dtype is not None:
        narrow = torch.empty((n_tokens, at.slots), dtype=narrow_dtype, device=places.device)
    wait_in_kernel = peers.before_drain()
    with on_device_of(y):
        _sum_kernel[(max(1, min(_SUM_PROGRAMS * peers.programs, n_tokens)),)](
            places, None if init is None else init.contiguous(), y, narrow, peers.base, peers.state, n_tokens,
            peers.timeout_ns, at.half, at.flags_at, at.landing_at, at.narrow_at,
            WITH_INIT=init is not None, WITH_NARROW=narrow is not None, RANKS=at.ranks, K=at.slots,
            LANES_K=triton.next_power_of_2(at.slots), WIDTH=width, BLOCK_H=column_block(width, _SUM_COLUMNS), NARROW_T=128,
            WAIT=wait_in_kernel, num_warps=_SUM_WARPS,
        )  # fmt: skip
    return y, narrow
