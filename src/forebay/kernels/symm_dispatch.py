"""Dispatch and combine of rows through the memory of the ranks of one host (`forebay.kernels.symm_mem`).

Dispatch: each rank reads the rows of its experts from the memory of the ranks that have them.

Input: tokens x [T, H], ids and weights [T, K]. Output: rows [C, H] with ids, weights and `source`, ordered by sending rank
and then by token; a token goes once to each rank with at least one of its experts. Nothing is permuted before or after,
because the gather by token happens while a row crosses the link. C is chosen by the host. Rows travel as 32-bit words, and
results are bitwise those of `dispatch_reference`:

    source [C] int32       p * T_max + t: row r is token t of rank p; -1 for unused rows
    starts [P + 1] int32   where the rows of each sending rank begin, and the end; at most C
    places [T, P] int32    position of token t among those for rank p; -1 if it does not go there

Example, two ranks with two experts each, K = 1, T_max = 4: rank 0 has ids [3, 0, 2], rank 1 has [1]. Rank 0 receives its
token 1 and rank 1's token 0: source = [1, 4, -1, ...], starts = [0, 1, 2]. Rank 0's places are [[-1, 0], [0, -1], [-1, 1]].
Traffic of each rank: T rows copied, R rows over the link, R written.

Combine: rows [C, H], and optionally values per slot `narrow` [C, K], are written to the memory of the ranks that own their
tokens, and summed there: y[t] = init[t] + the sum of token t's rows over the ranks, in their order, in fp32 and rounded once,
bitwise `permute.combine_rows` over the same rows. A rank's rows for its own tokens do not move.
Traffic of each rank: the rows of others over the link, R rows read again and T written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import cdiv, column_block, launch, next_power_of_2, packed
from forebay.kernels.symm_mem import (
    LIST_BLOCK,
    LISTS,
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

Received = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""rows [C, H], ids [C, K] int32, weights [C, K], source [C], starts [P + 1]."""
_WARPS = 8
_SLOT_BLOCK = 1024
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
# Programs of each role, in units of `PeerMemory.programs`. Four H200, 256 MiB a rank: 652 us; 2 and 2: 680.
_STAGERS = 1
_FETCHERS = 1
# The same for combine: 650 us; 1 and 1: 673; 2 and 2: 656.
_PUSHERS = 1
_ADDERS = 2
# Columns of a token that a sum handles at a time: one 16-byte load a thread for each rank.
_SUM_COLUMNS = 2048


@triton.jit
def list_tokens(
    ids_ptr, places_ptr, lists_ptr, counts_ptr, chunks_ptr, peer, chunk, n_tokens, local_experts, epoch,
    RANKS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Append the tokens of one chunk that `peer` needs to the list in its memory, and write column `peer` of places.

    Example, the peer holds experts 0 and 1, K = 1, ids = [3, 0, 1, 2]: list [1, 2], places [-1, 0, 1, -1], 2 rows, 2 slots. A
    chunk publishes its counts, then adds up those of the chunks before it, whose programs have lower numbers and so have
    started. A word holds rows (20 bits), slots (20 bits), and the operation's number, never 0. For 32768 tokens on an H200 a
    single program for all chunks took 115 us, longer than copying their rows.
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
    """Copy slots, then rows chunk by chunk, to this rank's memory."""
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


@triton.jit
def _span(counts_ptr, peer, capacity, RANKS: tl.constexpr):
    """(begin, end) of the rows from `peer` in an output of `capacity` rows."""
    before = 0
    count = 0
    for p in tl.static_range(RANKS):
        n = tl.load(counts_ptr + 2 * p)
        before += tl.where(p < peer, n, 0)
        count += tl.where(p == peer, n, 0)
    return tl.minimum(before, capacity), tl.minimum(before + count, capacity)


@triton.jit
def _bounds(
    counts_ptr, starts_ptr, base_ptr, offsets_ptr, needs_at, rank, capacity, slots_max,
    RANKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write starts; if there are more live slots than `slots_max`, write their number to every rank's `needs`."""
    slots = 0
    for p in tl.static_range(RANKS):
        begin, end = _span(counts_ptr, p, capacity, RANKS)
        tl.store(starts_ptr + p, begin)
        if p == RANKS - 1:
            tl.store(starts_ptr + RANKS, end)
        slots += tl.load(counts_ptr + 2 * p + 1)
    if slots > slots_max:
        peers = tl.arange(0, LANES)
        exists = peers < RANKS
        at = base_ptr + tl.load(offsets_ptr + peers, mask=exists, other=0) + needs_at
        need = tl.zeros((LANES,), tl.int64) + slots
        tl.atomic_max(at.to(tl.pointer_type(tl.int64)) + rank, need, mask=exists, scope="sys")


@triton.jit
def _fetch(
    out_ptr, ids_out_ptr, weights_out_ptr, source_ptr, starts_ptr, base_ptr, offsets_ptr, state_ptr,
    worker, workers, rank, epoch, tokens_max, capacity, slots_max, local_experts, chunk_tokens, timeout_ns,
    half, flags_at, needs_at, rows_at, ids_at, weights_at, lists_at, counts_at,
    WITH_SLOTS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, LANES_K: tl.constexpr,
    CHUNKS: tl.constexpr, WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, TAIL: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Tiles of the P senders in turn, from the next rank on, so that all links are always busy."""
    here = half_of(epoch, half)
    counts_ptr = (base_ptr + here + counts_at).to(tl.pointer_type(tl.int32))
    lists_ptr = (base_ptr + here + lists_at).to(tl.pointer_type(tl.int32))
    choice = tl.arange(0, LANES_K)[None, :]
    wait(base_ptr, state_ptr, flags_at, CHUNKS if WITH_SLOTS else 0, epoch, timeout_ns, RANKS, WAIT)
    ready = 0
    most = 0
    last = 0
    for p in tl.static_range(RANKS):
        if WITH_SLOTS:
            begin, end = _span(counts_ptr, p, capacity, RANKS)
        else:
            begin, end = tl.load(starts_ptr + p), tl.load(starts_ptr + p + 1)
        most = tl.maximum(most, end - begin)
        last = end
    if WITH_SLOTS:  # noqa: SIM102, the compiler decides this one, the program the next
        if worker == 0:
            _bounds(counts_ptr, starts_ptr, base_ptr, offsets_ptr, needs_at, rank, capacity, slots_max, RANKS, LANES)
    tile = worker
    while tile < tl.cdiv(most, BLOCK_R) * RANKS:
        peer = (tile + rank + 1) % RANKS
        if WITH_SLOTS:
            begin, end = _span(counts_ptr, peer, capacity, RANKS)
            list_ptr = lists_ptr + peer * tokens_max
            first = 0
        else:
            begin, end = tl.load(starts_ptr + peer), tl.load(starts_ptr + peer + 1)
            list_ptr = source_ptr + begin
            first = peer * tokens_max
        place = (tile // RANKS) * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = place < end - begin
        row = (begin + place).to(tl.int64)
        token = (tl.load(list_ptr + place, mask=inside, other=first) - first).to(tl.int64)
        # Tokens ascend: the last one's chunk is the last that the tile needs.
        highest = tl.minimum((tile // RANKS + 1) * BLOCK_R, end - begin) - 1
        chunk = (tl.load(list_ptr + highest, mask=highest >= 0, other=first) - first) // chunk_tokens
        if chunk >= ready:
            wait(base_ptr, state_ptr, flags_at, chunk, epoch, timeout_ns, RANKS, WAIT)
            ready = chunk + 1
        theirs = peer_of(base_ptr, offsets_ptr, peer) + here
        staged = (theirs + rows_at).to(tl.pointer_type(tl.int32))
        if WITH_SLOTS:
            slots = token[:, None] * K + choice
            chosen = inside[:, None] & (choice < K)
            ids = tl.load((theirs + ids_at).to(tl.pointer_type(tl.int32)) + slots, mask=chosen, other=-1)
            weights = tl.load((theirs + weights_at).to(weights_out_ptr.dtype) + slots, mask=chosen)
        copy_rows(staged, token, out_ptr, row, inside, WORDS, WORDS, WORDS, BLOCK_W)
        if WITH_SLOTS:
            ids -= rank * local_experts
            ids = tl.where((ids >= 0) & (ids < local_experts), ids, -1)
            tl.store(ids_out_ptr + row[:, None] * K + choice, ids, mask=chosen)
            tl.store(weights_out_ptr + row[:, None] * K + choice, weights, mask=chosen)
            tl.store(source_ptr + row, peer * tokens_max + token.to(tl.int32), mask=inside)
        tile += workers
    if WITH_SLOTS:
        tile = worker
        while tile < tl.cdiv(capacity - last, TAIL):
            row = (last + tile * TAIL + tl.arange(0, TAIL)).to(tl.int64)
            inside = row < capacity
            none = tl.full((TAIL, LANES_K), -1, tl.int32)
            tl.store(ids_out_ptr + row[:, None] * K + choice, none, mask=inside[:, None] & (choice < K))
            tl.store(source_ptr + row, tl.full((TAIL,), -1, tl.int32), mask=inside)
            tile += workers


# Numbers that change, or may be 1, which Triton would make a constant, are not specialized.
@triton.jit(
    do_not_specialize=[
        "rank", "n_tokens", "tokens_max", "capacity", "slots_max", "local_experts", "lists", "stagers", "chunk_tokens",
        "timeout_ns",
    ]
)  # fmt: skip
def _rows_kernel(
    x_ptr, ids_ptr, weights_ptr, places_ptr, out_ptr, ids_out_ptr, weights_out_ptr, source_ptr, starts_ptr,
    base_ptr, offsets_ptr, state_ptr, rank, n_tokens, tokens_max, capacity, slots_max, local_experts, lists, stagers,
    chunk_tokens, timeout_ns, half, flags_at, needs_at, rows_at, ids_at, weights_at, lists_at, counts_at,
    FILL: tl.constexpr, DRAIN: tl.constexpr, WITH_SLOTS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr,
    K: tl.constexpr, LANES_K: tl.constexpr, CHUNKS: tl.constexpr, LISTS_AT: tl.constexpr, LIST_LANES: tl.constexpr,
    WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, LIST_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr, TAIL: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """`lists` programs make the lists, `stagers` copy to this rank's memory, the others fetch from all ranks."""
    epoch = tl.load(state_ptr)
    here = half_of(epoch, half)
    program = draw(state_ptr)
    if FILL:
        if WITH_SLOTS:  # noqa: SIM102, as above
            if program < lists:
                peer = program % RANKS
                theirs = peer_of(base_ptr, offsets_ptr, peer) + here
                list_tokens(
                    ids_ptr,
                    places_ptr,
                    (theirs + lists_at).to(tl.pointer_type(tl.int32)) + rank * tokens_max,
                    (theirs + counts_at).to(tl.pointer_type(tl.int32)) + rank * 2,
                    state_ptr + LISTS_AT + peer * LIST_LANES,
                    peer, program // RANKS, n_tokens, local_experts, epoch, RANKS, K, LIST_BLOCK, LIST_LANES,
                )  # fmt: skip
                tell(base_ptr, offsets_ptr, state_ptr, flags_at, CHUNKS, rank, epoch, lists, RANKS, LANES)
        if (program >= lists) & (program < lists + stagers):
            stage(
                x_ptr, ids_ptr, weights_ptr, base_ptr + here, base_ptr, offsets_ptr, state_ptr,
                program - lists, stagers, rank, epoch, n_tokens, chunk_tokens, flags_at, rows_at, ids_at, weights_at,
                WITH_SLOTS, RANKS, LANES, K, CHUNKS, WORDS, BLOCK_R, BLOCK_W, SLOT_BLOCK,
            )  # fmt: skip
    if DRAIN:  # noqa: SIM102, as above
        if program >= lists + stagers:
            _fetch(
                out_ptr, ids_out_ptr, weights_out_ptr, source_ptr, starts_ptr, base_ptr, offsets_ptr, state_ptr,
                program - lists - stagers, tl.num_programs(0) - lists - stagers, rank, epoch, tokens_max, capacity,
                slots_max, local_experts, chunk_tokens, timeout_ns,
                half, flags_at, needs_at, rows_at, ids_at, weights_at, lists_at, counts_at,
                WITH_SLOTS, RANKS, LANES, K, LANES_K, CHUNKS, WORDS, BLOCK_R, BLOCK_W, TAIL, WAIT,
            )  # fmt: skip
    leave(state_ptr, epoch, DRAIN)


def send_tokens(x: Tensor, ids: Tensor, weights: Tensor, local_experts: int, peers: PeerMemory) -> Tensor:
    """Publish a rank's tokens and slots. Returns places [T, P].

    Args:
        x: [T, H], rows of the layout's bytes; T up to the layout's.
        ids: [T, K], any integer dtype; an id outside [0, P * local_experts) goes nowhere.
        weights: [T, K] of 2 or 4 bytes.
        local_experts: number of experts of each rank.
    """
    places = _places(x, peers)
    _launch_rows(peers, fill=(x, ids, weights, places), local_experts=local_experts)
    return places


def receive_tokens(
    capacity: int, slots_max: int, width: int, dtype: torch.dtype, weights_dtype: torch.dtype, local_experts: int,
    peers: PeerMemory,
) -> Received:  # fmt: skip
    """Receive what all ranks published with `send_tokens`. Ids of unused rows are -1; their rows and weights are uninitialized.

    Args:
        capacity: C; rows that do not fit are dropped.
        slots_max: a rank that needs more live slots writes their number to every rank's `needs`; 0 records every need.
        width, dtype: H and dtype of the rows.
        weights_dtype: as sent.
    """
    received = _empty_received(capacity, width, dtype, weights_dtype, peers)
    _launch_rows(peers, drain=received, slots_max=slots_max, local_experts=local_experts)
    return received


def exchange_tokens(
    x: Tensor, ids: Tensor, weights: Tensor, capacity: int, local_experts: int, peers: PeerMemory
) -> tuple[Tensor, Received]:
    """`send_tokens` and `receive_tokens` in one launch. Every need is recorded, which costs P words."""
    places, received = _places(x, peers), _empty_received(capacity, x.shape[1], x.dtype, weights.dtype, peers)
    fill = (x, ids, weights, places)
    _launch_rows(peers, fill=fill, drain=received, local_experts=local_experts)
    return places, received


def exchange_values(values: Tensor, source: Tensor, starts: Tensor, peers: PeerMemory) -> Tensor:
    """Send rows [T, H] without slots, in the places of an earlier `exchange_tokens`: [C, H], by its `source` and `starts`."""
    out = values.new_empty((source.shape[0], values.shape[1]))
    _launch_rows(peers, fill=(values, None, None, None), drain=(out, None, None, source, starts))
    return out


def _places(x: Tensor, peers: PeerMemory) -> Tensor:
    return torch.empty((x.shape[0], peers.layout.ranks), dtype=torch.int32, device=x.device)


def _empty_received(
    capacity: int, width: int, dtype: torch.dtype, weights_dtype: torch.dtype, peers: PeerMemory
) -> Received:
    device, k = peers.base.device, peers.layout.slots
    return (
        torch.empty((capacity, width), dtype=dtype, device=device),
        torch.empty((capacity, k), dtype=torch.int32, device=device),
        torch.empty((capacity, k), dtype=weights_dtype, device=device),
        torch.empty(capacity, dtype=torch.int32, device=device),
        torch.empty(peers.layout.ranks + 1, dtype=torch.int32, device=device),
    )


def _launch_rows(
    peers: PeerMemory,
    fill: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] | None = None,
    drain: tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor] | None = None,
    slots_max: int = 0,
    local_experts: int = 0,
) -> None:
    """One launch, which fills and drains as given; two in the interpreter, with `peers.meet` before the drain.

    Raises:
        ValueError: more tokens than the layout has; a tensor of another shape, element size or device.
        TypeError: a tensor of another dtype.
    """
    if peers.meet is not None and drain is not None:
        if fill is not None:
            _launch_rows(peers, fill=fill, local_experts=local_experts)
            fill = None
        peers.meet()
    at = peers.layout
    block_rows = at.block_rows
    x, ids, weights, places = fill or (None, None, None, None)
    out, ids_out, weights_out, source, starts = drain or (None, None, None, None, None)
    n_tokens, capacity = (0 if x is None else x.shape[0]), (0 if out is None else out.shape[0])
    if n_tokens > at.tokens:
        raise ValueError(f"{n_tokens} tokens for memory of {at.tokens}")
    if x is not None:
        x = aligned_rows("tokens", x, peers)
    if ids is not None:
        ids = packed("ids", ids, peers.base, [n_tokens, at.slots], _INTEGERS)
    if weights is not None:
        weights = as_integers("weights", weights, peers, n_tokens)
    if source is not None and starts is not None:
        source = packed("source", source, peers.base, [capacity], [torch.int32])
        starts = packed("starts", starts, peers.base, [at.ranks + 1], [torch.int32])
    lists = 0 if ids is None else at.ranks * max(1, cdiv(n_tokens, LIST_BLOCK))
    tiles = cdiv(min(n_tokens, at.chunk_tokens), block_rows)
    stagers = _programs(x, _STAGERS * peers.programs, tiles)
    tiles = at.ranks * cdiv(min(capacity, at.tokens), block_rows)
    fetchers = _programs(out, _FETCHERS * peers.programs, tiles)
    launch(
        _rows_kernel, (lists + stagers + fetchers,),
        None if x is None else x.view(torch.int32), ids, weights, places,
        None if out is None else out.view(torch.int32), ids_out,
        None if weights_out is None else as_integers("weights", weights_out, peers, capacity),
        source, starts, peers.base, peers.offsets, peers.state,
        peers.rank, n_tokens, at.tokens, capacity, slots_max, local_experts, lists, stagers,
        at.chunk_tokens, peers.timeout_ns,
        at.half, at.flags_at, at.needs_at, at.rows_at, at.ids_at, at.weights_at, at.lists_at, at.counts_at,
        FILL=fill is not None, DRAIN=drain is not None, WITH_SLOTS=ids is not None or ids_out is not None,
        RANKS=at.ranks, LANES=next_power_of_2(at.ranks), K=at.slots, LANES_K=next_power_of_2(at.slots),
        CHUNKS=at.chunks, LISTS_AT=LISTS, LIST_LANES=at.list_lanes,
        WORDS=at.words, BLOCK_R=block_rows, BLOCK_W=at.block_words, LIST_BLOCK=LIST_BLOCK, SLOT_BLOCK=_SLOT_BLOCK,
        TAIL=128, WAIT=peers.meet is None, num_warps=_WARPS,
    )  # fmt: skip


def _programs(rows: Tensor | None, most: int, tiles: int) -> int:
    """Programs that move rows: at most one for each tile, at least one if there are rows to move."""
    return 0 if rows is None else max(1, min(most, tiles))


def dispatch_reference(
    x: Sequence[Tensor], ids: Sequence[Tensor], weights: Sequence[Tensor], rank: int, local_experts: int, tokens_max: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The plain form: (rows, ids, weights, source) that `rank` receives from all ranks' tokens, without a capacity."""
    first = rank * local_experts
    parts: list[tuple[Tensor, ...]] = []
    for p, (rows, chosen, w) in enumerate(zip(x, ids, weights, strict=True)):
        here = (chosen >= first) & (chosen < first + local_experts)
        goes = here.any(1)
        local = torch.where(here, chosen - first, -1)[goes].to(torch.int32)
        source = (p * tokens_max + goes.nonzero()[:, 0]).to(torch.int32)
        parts.append((rows[goes], local, w[goes], source))
    rows, local, w, source = (torch.cat(part) for part in zip(*parts, strict=True))
    return rows, local, w, source


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


def return_rows(
    rows: Tensor,
    narrow: Tensor | None,
    source: Tensor,
    starts: Tensor,
    places: Tensor,
    init: Tensor | None,
    peers: PeerMemory,
) -> tuple[Tensor, Tensor | None]:
    """Write rows to the landing places of their owners, and sum what landed here.

    Args:
        rows: [C, H], rows of the layout's bytes; those from starts[-1] on are not read.
        narrow: [C, K] of 2 or 4 bytes.
        source, starts: [C] and [P + 1] int32, from `receive_tokens`.
        places: [T, P] int32, from `send_tokens`; landing places without a place are not read.
        init: [T, H] in any floating dtype except fp64, added first.

    Returns:
        The sums, [T, H] in rows' dtype, and [T, K] in narrow's.
    """
    sums = _empty_sums(rows, narrow, places)
    _launch_sums(peers, rows, narrow, source, starts, drain=(places, init, *sums))
    return sums


def _empty_sums(rows: Tensor, narrow: Tensor | None, places: Tensor) -> tuple[Tensor, Tensor | None]:
    n_tokens = places.shape[0]
    y = rows.new_empty((n_tokens, rows.shape[1]))
    return y, None if narrow is None else narrow.new_empty((n_tokens, narrow.shape[1]))


def _launch_sums(
    peers: PeerMemory,
    rows: Tensor,
    narrow: Tensor | None,
    source: Tensor | None,
    starts: Tensor,
    drain: tuple[Tensor, Tensor | None, Tensor, Tensor | None] | None = None,
) -> None:
    """One launch, which pushes if `source` is given and sums if `drain` is; see `_launch_rows`."""
    if peers.meet is not None and drain is not None:
        if source is not None:
            _launch_sums(peers, rows, narrow, source, starts)
            source = None
        peers.meet()
    at = peers.layout
    block_rows = at.block_rows
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
    tiles = (at.ranks - 1) * cdiv(min(rows.shape[0], at.chunk_tokens), block_rows)
    pushers = 0 if source is None else max(1, min(_PUSHERS * peers.programs, tiles))
    adders = 0 if y is None else max(1, min(_ADDERS * peers.programs, n_tokens))
    launch(
        _sums_kernel, (pushers + adders,),
        rows.view(torch.int32), words, rows, narrow, source, starts,
        places, init, y, narrow_y, peers.base, peers.offsets, peers.state,
        peers.rank, at.tokens, n_tokens, pushers, at.chunk_tokens, peers.timeout_ns,
        at.half, at.flags_at, at.landing_at, at.narrow_at,
        FILL=source is not None, DRAIN=drain is not None, WITH_INIT=init is not None, WITH_NARROW=narrow is not None,
        RANKS=at.ranks, LANES=next_power_of_2(at.ranks), K=at.slots, LANES_K=next_power_of_2(at.slots),
        CHUNKS=at.chunks, WORDS=at.words, BLOCK_R=block_rows, BLOCK_W=at.block_words,
        WIDTH=width, BLOCK_H=column_block(width, _SUM_COLUMNS), NARROW_T=128, WAIT=peers.meet is None,
        num_warps=_WARPS,
    )  # fmt: skip
