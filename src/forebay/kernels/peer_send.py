"""What a rank sends, as parts of `peer_rows`' kernel: lists of tokens for each rank, and its rows in its own memory.

`list_tokens`: ids [T, K] of any integer dtype -> for one rank: the tokens with at least one expert of that rank, ascending, how
many rows and live slots that makes, and its column of places (position in the list, -1 for none). Example, the rank holds experts
0 and 1, K = 1, ids = [3, 0, 1, 2]: list [1, 2], places [-1, 0, 1, -1], 2 rows, 2 slots.

One program lists LIST_BLOCK tokens for one rank. It tells how many it has and adds up what the programs before it told. For 32768
tokens on an H200 a single program that goes through all of them took 115 us, longer than copying their rows.

`stage`: rows and slots -> the own memory, told chunk by chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.peer_sync import copy_rows, tell


@triton.jit
def list_tokens(
    ids_ptr, places_ptr, lists_ptr, counts_ptr, chunks_ptr, peer, chunk, n_tokens, local_experts, epoch,
    RANKS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Tokens of one chunk in the list for `peer`, in its memory, and in column `peer` of places.

    A chunk says how many it has, then sums up what the chunks before it said: they have lower program numbers, so they run
    or have run. A word holds rows (20 bits), slots (20 bits), and the operation that it is of, never 0.
    """
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    exists = tokens < n_tokens
    n_here = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(K):
        ids = tl.load(ids_ptr + tokens.to(tl.int64) * K + k, mask=exists, other=-1)
        n_here += ((ids >= peer * local_experts) & (ids < (peer + 1) * local_experts)).to(tl.int32)
    goes = (n_here > 0).to(tl.int32)
    rows = tl.sum(goes, 0)
    slots = tl.sum(n_here, 0)
    tag = (epoch % 0x3FFFFF) + 1
    tl.atomic_xchg(chunks_ptr + chunk, (tag << 40) + (slots.to(tl.int64) << 20) + rows, sem="relaxed")
    lanes = tl.arange(0, LANES)
    earlier = lanes < chunk
    words = tl.load(chunks_ptr + lanes, mask=earlier, other=0, volatile=True)
    while tl.sum((earlier & (words >> 40 != tag)).to(tl.int32), 0) > 0:
        words = tl.load(chunks_ptr + lanes, mask=earlier, other=0, volatile=True)
    begin = tl.sum((words & 0xFFFFF).to(tl.int32), 0)
    place = begin + tl.cumsum(goes, 0) - goes
    tl.store(lists_ptr + place, tokens, mask=goes > 0)
    tl.store(places_ptr + tokens.to(tl.int64) * RANKS + peer, tl.where(goes > 0, place, -1), mask=exists)
    if (chunk + 1) * BLOCK >= n_tokens:
        tl.store(counts_ptr, begin + rows)
        tl.store(counts_ptr + 1, tl.sum(((words >> 20) & 0xFFFFF).to(tl.int32), 0) + slots)


@triton.jit
def stage(
    x_ptr, ids_ptr, weights_ptr, own_ptr, base_ptr, offsets_ptr, state_ptr,
    worker, workers, rank, epoch, n_tokens, chunk_tokens, flags_at, rows_at, ids_at, weights_at,
    WITH_SLOTS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr,
    WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, SLOT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots, then rows chunk by chunk, to the own memory."""
    if WITH_SLOTS:
        staged_ids = (own_ptr + ids_at).to(tl.pointer_type(tl.int32))
        staged_weights = (own_ptr + weights_at).to(weights_ptr.dtype)
        n_slots = n_tokens * K
        tile = worker
        while tile < tl.cdiv(n_slots, SLOT_BLOCK):
            slots = tile * SLOT_BLOCK + tl.arange(0, SLOT_BLOCK)
            exists = slots < n_slots
            ids = tl.load(ids_ptr + slots, mask=exists, other=-1)
            tl.store(staged_ids + slots, ids.to(tl.int32), mask=exists)
            tl.store(staged_weights + slots, tl.load(weights_ptr + slots, mask=exists), mask=exists)
            tile += workers
    staged = (own_ptr + rows_at).to(tl.pointer_type(tl.int32))
    chunk = 0
    while chunk < CHUNKS:
        tile = worker
        while tile < tl.cdiv(tl.minimum(chunk_tokens, n_tokens - chunk * chunk_tokens), BLOCK_R):
            tokens = (chunk * chunk_tokens + tile * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
            copy_rows(x_ptr, tokens, staged, tokens, tokens < n_tokens, WORDS, WORDS, WORDS, BLOCK_W)
            tile += workers
        tell(base_ptr, offsets_ptr, state_ptr, flags_at, chunk, rank, epoch, workers, RANKS, LANES)
        chunk += 1
