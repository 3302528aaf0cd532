"""Rows from the ranks that have them to the ranks that want them, read out of the senders' memory: dispatch and spread.

    send_tokens     x [T, H], ids and weights [T, K]  -> own memory; to each rank the list of tokens it gets, and how many
    receive_tokens  peers' memory                     -> rows [C, H], ids, weights [C, K], source [C], starts [P + 1]
    send_values     values [T, H]                     -> own memory
    receive_values  peers' memory, source, starts     -> rows [C, H]

Each pair is one operation of `peer_memory`: the first call fills, the second drains. The gather by token happens while the
row crosses the link, so nothing is permuted before or after. A token goes once to each rank with at least one of its
experts; rows arrive ordered by sending rank, then by token. C is a number of the host's choosing:

    source [C] int32       p * T_max + t: row r is token t of rank p; -1 behind the last row received
    starts [P + 1] int32   where the rows of each sending rank begin, and the end; none beyond C
    places [T, P] int32    position of token t among those for rank p; -1 if it does not go there (`send_tokens` returns it)

Example, two ranks with two experts each, K = 1, T_max = 4: rank 0 has ids [3, 0, 2], rank 1 has [1]. Rank 0 receives its
token 1 and rank 1's token 0: source = [1, 4, -1, ...], starts = [0, 1, 2]. Rank 0's places are [[-1, 0], [0, -1], [-1, 1]].

Rows and weights behind the last row received are uninitialised, ids are -1 there. More live slots than allowed: the rows
that do not fit are left out, and every rank's `needs` word for this rank says how many slots were needed.

Bytes, each rank: T rows copied (2 T H read and written in bf16), R rows over the link, R written. For other dtypes alike:
rows travel as 32-bit words, and all results are bitwise those of `dispatch_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import on_device_of
from forebay.kernels.peer_lists import LIST_BLOCK, list_tokens
from forebay.kernels.peer_memory import CHUNKS, PeerMemory, as_words, copy_rows, half_of, peer_of, tell, wait

_WARPS = 8
_SLOT_BLOCK = 1024


@triton.jit
def _stage_rows(
    x_ptr, staged_ptr, worker, workers, n_tokens, WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr
):
    staged = staged_ptr.to(tl.pointer_type(tl.int32))
    tile = worker
    while tile < tl.cdiv(n_tokens, BLOCK_R):
        tokens = (tile * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        copy_rows(x_ptr, tokens, staged, tokens, tokens < n_tokens, WORDS, WORDS, WORDS, BLOCK_W)
        tile += workers


@triton.jit
def _stage_slots(
    ids_ptr, weights_ptr, staged_ids_ptr, staged_weights_ptr, worker, workers, n_slots, BLOCK: tl.constexpr
):
    staged_ids = staged_ids_ptr.to(tl.pointer_type(tl.int32))
    staged_weights = staged_weights_ptr.to(weights_ptr.dtype)
    tile = worker
    while tile < tl.cdiv(n_slots, BLOCK):
        slots = tile * BLOCK + tl.arange(0, BLOCK)
        exists = slots < n_slots
        ids = tl.load(ids_ptr + slots, mask=exists, other=-1)
        tl.store(staged_ids + slots, ids.to(tl.int32), mask=exists)
        tl.store(staged_weights + slots, tl.load(weights_ptr + slots, mask=exists), mask=exists)
        tile += workers


# Numbers that change, or that may be 1, which Triton would make a constant of.
@triton.jit(do_not_specialize=["rank", "n_tokens", "tokens_max", "local_experts", "lists"])
def _send_kernel(
    x_ptr, ids_ptr, weights_ptr, places_ptr, base_ptr, offsets_ptr, state_ptr,
    rank, n_tokens, tokens_max, local_experts, lists, half, flags_at, rows_at, ids_at, weights_at, lists_at, counts_at,
    WITH_SLOTS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, CHUNKS_AT: tl.constexpr,
    CHUNK_LANES: tl.constexpr, WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
    LIST_BLOCK: tl.constexpr, SLOT_BLOCK: tl.constexpr,
):  # fmt: skip
    """The first `lists` programs make the lists, if WITH_SLOTS; the others copy rows and slots to the own memory."""
    epoch = tl.load(state_ptr)
    here = half_of(epoch, half)
    own = base_ptr + here
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if not WITH_SLOTS:
        _stage_rows(x_ptr, own + rows_at, program, programs, n_tokens, WORDS, BLOCK_R, BLOCK_W)
    elif program < lists:
        peer = peer_of(base_ptr, offsets_ptr, program % RANKS) + here
        list_tokens(
            ids_ptr,
            places_ptr,
            (peer + lists_at).to(tl.pointer_type(tl.int32)) + rank * tokens_max,
            (peer + counts_at).to(tl.pointer_type(tl.int32)) + rank * 2,
            state_ptr + CHUNKS_AT + (program % RANKS) * CHUNK_LANES,
            program % RANKS, program // RANKS, n_tokens, local_experts, epoch, RANKS, K, LIST_BLOCK, CHUNK_LANES,
        )  # fmt: skip
    else:
        worker, workers = program - lists, programs - lists
        _stage_rows(x_ptr, own + rows_at, worker, workers, n_tokens, WORDS, BLOCK_R, BLOCK_W)
        _stage_slots(ids_ptr, weights_ptr, own + ids_at, own + weights_at, worker, workers, n_tokens * K, SLOT_BLOCK)
    tell(base_ptr, offsets_ptr, state_ptr, flags_at, rank, epoch, RANKS, LANES)


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
    """Write starts; if there are more live slots than `slots_max`, tell every rank how many."""
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


@triton.jit(do_not_specialize=["rank", "tokens_max", "capacity", "slots_max", "local_experts", "timeout_ns"])
def _receive_kernel(
    out_ptr, ids_out_ptr, weights_out_ptr, source_ptr, starts_ptr, base_ptr, offsets_ptr, state_ptr,
    rank, tokens_max, capacity, slots_max, local_experts, timeout_ns,
    half, flags_at, needs_at, rows_at, ids_at, weights_at, lists_at, counts_at,
    WITH_SLOTS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, LANES_K: tl.constexpr,
    WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, TAIL: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Tiles of the P senders in turn, from the next rank on, so that all links are busy from begin to end."""
    epoch = tl.load(state_ptr)
    wait(base_ptr, state_ptr, flags_at, epoch, timeout_ns, RANKS, WAIT)
    here = half_of(epoch - 1, half)
    counts_ptr = (base_ptr + here + counts_at).to(tl.pointer_type(tl.int32))
    lists_ptr = (base_ptr + here + lists_at).to(tl.pointer_type(tl.int32))
    choice = tl.arange(0, LANES_K)[None, :]
    program = tl.program_id(0)
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
        if program == 0:
            _bounds(counts_ptr, starts_ptr, base_ptr, offsets_ptr, needs_at, rank, capacity, slots_max, RANKS, LANES)
    tile = program
    while tile < tl.cdiv(most, BLOCK_R) * RANKS:
        peer = (tile + rank + 1) % RANKS
        if WITH_SLOTS:
            begin, end = _span(counts_ptr, peer, capacity, RANKS)
        else:
            begin, end = tl.load(starts_ptr + peer), tl.load(starts_ptr + peer + 1)
        theirs = peer_of(base_ptr, offsets_ptr, peer) + here
        place = (tile // RANKS) * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = place < end - begin
        row = (begin + place).to(tl.int64)
        if WITH_SLOTS:
            token = tl.load(lists_ptr + peer * tokens_max + place, mask=inside, other=0)
        else:
            token = tl.load(source_ptr + row, mask=inside, other=0) - peer * tokens_max
        token = tl.where(inside, token, 0).to(tl.int64)
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
        tile += tl.num_programs(0)
    if WITH_SLOTS:
        tile = program
        while tile < tl.cdiv(capacity - last, TAIL):
            row = (last + tile * TAIL + tl.arange(0, TAIL)).to(tl.int64)
            inside = row < capacity
            none = tl.full((TAIL, LANES_K), -1, tl.int32)
            tl.store(ids_out_ptr + row[:, None] * K + choice, none, mask=inside[:, None] & (choice < K))
            tl.store(source_ptr + row, tl.full((TAIL,), -1, tl.int32), mask=inside)
            tile += tl.num_programs(0)


def send_tokens(x: Tensor, ids: Tensor, weights: Tensor, local_experts: int, peers: PeerMemory) -> Tensor:
    """Fill with a rank's tokens and slots. Returns places [T, P].

    Args:
        x: [T, H], rows of the layout's bytes; T up to the layout's.
        ids: [T, K], any integer dtype; an id outside [0, P * local_experts) goes nowhere.
        weights: [T, K] of 2 or 4 bytes.
        local_experts: of each rank.
    """
    layout = peers.layout
    places = torch.empty((x.shape[0], layout.ranks), dtype=torch.int32, device=x.device)
    _send(x, ids.contiguous(), _raw(weights), places, local_experts, peers)
    return places


def send_values(values: Tensor, peers: PeerMemory) -> None:
    """Fill with rows alone."""
    _send(values, None, None, None, 0, peers)


def _send(
    x: Tensor, ids: Tensor | None, weights: Tensor | None, places: Tensor | None, local_experts: int, peers: PeerMemory
) -> None:
    at = peers.layout
    block_rows = at.block_rows()
    workers = min(peers.programs, max(1, triton.cdiv(x.shape[0], block_rows)))
    lists = 0 if ids is None else at.ranks * max(1, triton.cdiv(x.shape[0], LIST_BLOCK))
    with on_device_of(x):
        _send_kernel[(lists + workers,)](
            as_words(x), ids, weights, places, peers.base, peers.offsets, peers.state,
            peers.rank, x.shape[0], at.tokens, local_experts, lists,
            at.half, at.flags_at, at.rows_at, at.ids_at, at.weights_at, at.lists_at, at.counts_at,
            WITH_SLOTS=ids is not None, RANKS=at.ranks, LANES=triton.next_power_of_2(at.ranks),
            K=at.slots, CHUNKS_AT=CHUNKS, CHUNK_LANES=at.list_lanes(),
            WORDS=at.words, BLOCK_R=block_rows, BLOCK_W=at.block_words(), LIST_BLOCK=LIST_BLOCK, SLOT_BLOCK=_SLOT_BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip


def receive_tokens(
    capacity: int, slots_max: int, width: int, dtype: torch.dtype, weights_dtype: torch.dtype, local_experts: int,
    peers: PeerMemory,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Drain what all ranks' `send_tokens` filled: (rows [C, H], ids [C, K] int32, weights [C, K], source, starts).

    Args:
        capacity: C, of the rows.
        slots_max: how many live slots there may be; C is no smaller than the rows that as many slots can have.
        width, dtype: H and dtype of the rows.
        weights_dtype: as sent.
    """
    device, k = peers.base.device, peers.layout.slots
    out = torch.empty((capacity, width), dtype=dtype, device=device)
    ids = torch.empty((capacity, k), dtype=torch.int32, device=device)
    weights = torch.empty((capacity, k), dtype=weights_dtype, device=device)
    source = torch.empty(capacity, dtype=torch.int32, device=device)
    starts = torch.empty(peers.layout.ranks + 1, dtype=torch.int32, device=device)
    _receive(out, ids, _raw(weights), source, starts, slots_max, local_experts, peers)
    return out, ids, weights, source, starts


def receive_values(source: Tensor, starts: Tensor, width: int, dtype: torch.dtype, peers: PeerMemory) -> Tensor:
    """Drain what all ranks' `send_values` filled, along `source` and `starts`: rows [C, H]."""
    out = torch.empty((source.shape[0], width), dtype=dtype, device=peers.base.device)
    _receive(out, None, None, source, starts, 0, 0, peers)
    return out


def _receive(
    out: Tensor, ids: Tensor | None, weights: Tensor | None, source: Tensor, starts: Tensor, slots_max: int,
    local_experts: int, peers: PeerMemory,
) -> None:  # fmt: skip
    at = peers.layout
    block_rows = at.block_rows()
    tiles = at.ranks * triton.cdiv(min(out.shape[0], at.tokens), block_rows)
    wait_in_kernel = peers.before_drain()
    with on_device_of(out):
        _receive_kernel[(max(1, min(peers.programs, tiles)),)](
            out.view(torch.int32), ids, weights, source, starts, peers.base, peers.offsets, peers.state,
            peers.rank, at.tokens, out.shape[0], slots_max, local_experts, peers.timeout_ns,
            at.half, at.flags_at, at.needs_at, at.rows_at, at.ids_at, at.weights_at, at.lists_at, at.counts_at,
            WITH_SLOTS=ids is not None, RANKS=at.ranks, LANES=triton.next_power_of_2(at.ranks),
            K=at.slots, LANES_K=triton.next_power_of_2(at.slots),
            WORDS=at.words, BLOCK_R=block_rows, BLOCK_W=at.block_words(), TAIL=128, WAIT=wait_in_kernel,
            num_warps=_WARPS,
        )  # fmt: skip


def _raw(weights: Tensor) -> Tensor:
    """The same memory as integers: weights are moved, not computed with."""
    return weights.contiguous().view({2: torch.int16, 4: torch.int32}[weights.element_size()])


def dispatch_reference(
    x: Sequence[Tensor],
    ids: Sequence[Tensor],
    weights: Sequence[Tensor],
    rank: int,
    local_experts: int,
    tokens_max: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The plain form: (rows, ids, weights, source) that `rank` receives of all ranks' tokens, without a capacity."""
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
