"""Which tokens go to which rank: lists made on the device, by many programs at once, in the order of tokens.

A part of `peer_rows`' send kernel. In: ids [T, K] of any integer dtype. Out, for one rank: the tokens with at least one expert
of that rank, ascending, how many rows and live slots that makes, and its column of places (position in the list, -1 for none).

Example, the rank holds experts 0 and 1, K = 1, ids = [3, 0, 1, 2]: list [1, 2], places [-1, 0, 1, -1], 2 rows, 2 slots.

One program lists LIST_BLOCK tokens for one rank. It tells how many it has and adds up what the programs before it told. For 32768
tokens on an H200 a single program that goes through all of them took 115 us, longer than copying their rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Tokens that one program lists for one rank: two for each thread of 8 warps.
LIST_BLOCK = 512


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
