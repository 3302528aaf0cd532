"""Counting sort of routed slots by expert: stable, deterministic, no host synchronisation.

In: `ids` [T, K], the expert of each slot (slot = token * K + choice). Out, new and the caller's:

    order [T*K] int32     row -> slot: the slots sorted by expert, stably; sentinels last
    inverse [T, K] int32  slot -> row, -1 for a sentinel (an id outside [0, E))
    offs [E] int32        end row of each expert

Example, E = 2, ids = [[1, 0], [1, 7]]: order = [1, 0, 2, 3], inverse = [[1, 0], [2, -1]],
offs = [1, 3].

    1 every chunk of 512 slots counts its slots by expert     counts [E + 1, chunks]
    2 cumulative sum over (expert, chunk)                     where a chunk's slots of one end
    3 row = where they begin + equal slots before this one in the chunk

Step 3 compares a slot with the 511 others of its chunk: no atomics, and so the order is the same
every time. Reads the ids twice and writes 8 bytes a slot: 3 MB for 131072 slots, so the time is
that of five short launches (torch.sort on int16 keys and the arithmetic around it are fourteen).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import Backend, on_device_of, use_triton

# A chunk is compared in blocks of 128 x 128 on 4 warps: 128 comparisons a thread at a time, in
# registers. Longer chunks compare more, shorter ones make the cumulative sum longer.
_BLOCK = 128
_BLOCKS_PER_CHUNK = 4
_CHUNK = _BLOCK * _BLOCKS_PER_CHUNK


@triton.jit
def _keys(ids_ptr, slots, n_slots, n_experts):
    """The expert of each slot, `n_experts` for a sentinel and for slots behind the last."""
    exists = slots < n_slots
    ids = tl.load(ids_ptr + slots, mask=exists, other=0)
    return tl.where(exists & (ids >= 0) & (ids < n_experts), ids, n_experts).to(tl.int32)


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, n_slots, n_experts, n_chunks, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """Column `program_id(0)` of counts [n_experts + 1, n_chunks]."""
    chunk = tl.program_id(0)
    keys = _keys(ids_ptr, chunk * CHUNK + tl.arange(0, CHUNK), n_slots, n_experts)
    bins = tl.arange(0, BINS)
    # Slots behind the last count as sentinels: of the last chunk, so that no begin depends on them.
    counts = tl.histogram(keys, BINS)
    tl.store(counts_ptr + bins.to(tl.int64) * n_chunks + chunk, counts, mask=bins <= n_experts)


@triton.jit
def _place_kernel(
    ids_ptr,
    counts_ptr,
    ends_ptr,
    order_ptr,
    inverse_ptr,
    offs_ptr,
    n_slots,
    n_experts,
    n_chunks,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PER_CHUNK: tl.constexpr,
):
    """Rows of BLOCK slots; the first program also writes offs."""
    chunk = tl.program_id(0) // BLOCKS_PER_CHUNK
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = _keys(ids_ptr, slots, n_slots, n_experts)
    rank = tl.zeros((BLOCK,), tl.int32)
    for block in tl.static_range(BLOCKS_PER_CHUNK):
        others = (chunk * BLOCKS_PER_CHUNK + block) * BLOCK + tl.arange(0, BLOCK)
        other_keys = _keys(ids_ptr, others, n_slots, n_experts)
        before = others[None, :] < slots[:, None]
        equal = other_keys[None, :] == keys[:, None]
        rank += tl.sum((before & equal).to(tl.int32), 1)
    exists = slots < n_slots
    at = keys.to(tl.int64) * n_chunks + chunk
    begin = tl.load(ends_ptr + at, mask=exists, other=0)
    begin -= tl.load(counts_ptr + at, mask=exists, other=0)
    rows = begin + rank
    tl.store(order_ptr + rows, slots, mask=exists)
    tl.store(inverse_ptr + slots, tl.where(keys == n_experts, -1, rows), mask=exists)
    if tl.program_id(0) == 0:
        bins = tl.arange(0, BINS)
        inside = bins < n_experts
        last = bins.to(tl.int64) * n_chunks + n_chunks - 1
        tl.store(offs_ptr + bins, tl.load(ends_ptr + last, mask=inside, other=0), mask=inside)


def sort_slots(ids: Tensor, num_experts: int, *, backend: Backend = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """(order, inverse, offs) of the module docstring.

    Args:
        ids: [T, K], any integer dtype and strides, fewer than 2**31 - 512 slots.

    Raises:
        ValueError: no [T, K], no expert, too many slots for int32.
        TypeError: ids that are no integers.
    """
    if ids.dim() != 2 or num_experts < 1 or ids.numel() >= 2**31 - _CHUNK:
        raise ValueError(
            f"ids must be [T, K] with fewer than {2**31 - _CHUNK} slots, for 1 expert or more; "
            f"got {list(ids.shape)} for {num_experts}"
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, got {ids.dtype}")
    if not use_triton(backend, ids) or ids.numel() == 0:
        return _sort_slots_reference(ids, num_experts)
    ids = ids.contiguous()
    n_slots = ids.numel()
    n_chunks = triton.cdiv(n_slots, _CHUNK)
    bins = triton.next_power_of_2(num_experts + 1)
    counts = torch.empty((num_experts + 1, n_chunks), dtype=torch.int32, device=ids.device)
    order = torch.empty(n_slots, dtype=torch.int32, device=ids.device)
    inverse = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    offs = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    with on_device_of(ids):
        _count_kernel[(n_chunks,)](ids, counts, n_slots, num_experts, n_chunks, BINS=bins, CHUNK=_CHUNK, num_warps=4)
        ends = counts.view(-1).cumsum(0, dtype=torch.int32)
        _place_kernel[(triton.cdiv(n_slots, _BLOCK),)](
            ids,
            counts,
            ends,
            order,
            inverse,
            offs,
            n_slots,
            num_experts,
            n_chunks,
            BINS=bins,
            BLOCK=_BLOCK,
            BLOCKS_PER_CHUNK=_BLOCKS_PER_CHUNK,
            num_warps=4,
        )
    return order, inverse, offs


def _sort_slots_reference(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The plain PyTorch form, on torch.sort: no host synchronisation either."""
    flat = ids.reshape(-1).long()
    keys = flat.masked_fill((flat < 0) | (flat >= num_experts), num_experts)
    sorted_keys, order = torch.sort(keys, stable=True)
    experts = torch.arange(num_experts, device=ids.device)
    offs = torch.searchsorted(sorted_keys, experts, right=True, out_int32=True)
    rows = torch.arange(flat.numel(), device=ids.device, dtype=torch.int32)
    rows = rows.masked_fill(sorted_keys == num_experts, -1)
    inverse = torch.empty_like(rows).scatter_(0, order, rows)
    return order.to(torch.int32), inverse.view(ids.shape), offs
