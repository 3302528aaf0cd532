"""Tokens to rows in expert order and back: a stable counting sort of routed slots, a gather, and a sum.

Input: ids [T, K], the expert of each slot (slot = token * K + choice), and tokens [T, H] or rows [R, H]. Output: new tensors that
the caller owns. Nothing synchronizes with the host, there are no atomics, and results are the same bits every time. Each copy
is the gradient of the other. Example, K = 2, two experts, ids = [[1, 0], [1, 7]]: order = [1, 0, 2, 3], inverse = [[1, 0],
[2, -1]], offs = [1, 3], and `gather_rows` returns [x0, x0, x1, ?].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import INDICES, Backend, cdiv, column_block, launch, next_power_of_2, packed, use_triton

# The sort compares all pairs of a chunk. Longer chunks compare more, shorter ones make the cumulative sum longer. To count, each
# warp passes all bins through shared memory, so few warps count; to place, a thread has a slot (see `_place_kernel`). On an H200
# 12,288 to 196,608 slots of 48 to 128 experts take 8 to 17 microseconds so, 64 slots a chunk about as long, and 256 up to 1.4
# times (benchmarks/results/sort_slots.json).
CHUNK_SLOTS = 128  # that a program of the sort counts, and then places
_COUNT_WARPS = 1
_PLACE_WARPS = CHUNK_SLOTS // 32
# Swept on an H200 at H = 2048, K = 8, bf16 (a device copy there moves 4.24 TB/s). gather_rows: 2048 elements, 512 columns: 5.4
# TB/s of logical traffic (the cache serves some of a token's K reads); 1024 columns 4.8, 2048 columns 4.5. combine_rows: 1024
# columns of one token, one 16-byte load a thread for each of its K rows: 4.35; 512 columns 4.31.
_GATHER_TILE = 2048
_GATHER_COLUMNS = 512
_COLUMNS = 1024
_WARPS = 4


@triton.jit
def _keys(ids_ptr, slots, n_slots, n_experts):
    """The expert of each slot, `n_experts` for sentinels and for slots beyond the last."""
    exists = slots < n_slots
    ids = tl.load(ids_ptr + slots, mask=exists, other=0)
    return tl.where(exists & (ids >= 0) & (ids < n_experts), ids, n_experts).to(tl.int32)


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, n_slots, n_experts, n_chunks, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """Column `program_id(0)` of counts [n_experts + 1, n_chunks]."""
    chunk = tl.program_id(0)
    keys = _keys(ids_ptr, chunk * CHUNK + tl.arange(0, CHUNK), n_slots, n_experts)
    bins = tl.arange(0, BINS)
    # Slots beyond the last count as sentinels. They are in the last chunk, so no begin depends on them.
    counts = tl.histogram(keys, BINS)
    tl.store(counts_ptr + bins.to(tl.int64) * n_chunks + chunk, counts, mask=bins <= n_experts)


@triton.jit
def _place_kernel(
    ids_ptr, ends_ptr, order_ptr, inverse_ptr, offs_ptr,
    n_slots, n_experts, n_chunks,
    BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Rows of CHUNK slots; the first program also writes offs."""
    chunk = tl.program_id(0)
    places = tl.arange(0, CHUNK)
    slots = chunk * CHUNK + places
    exists = slots < n_slots
    keys = _keys(ids_ptr, slots, n_slots, n_experts)
    at = keys.to(tl.int64) * n_chunks + chunk
    begin = tl.load(ends_ptr + at - 1, mask=exists & (at > 0), other=0)
    # A slot is a column: Triton gives a thread one column, which it sums in registers. A row would lie across all threads, and
    # each sum be a reduction over them: 1416 instructions instead of 664 (SASS for sm_90, 128 slots, Triton 3.6).
    before = places[:, None] < places[None, :]
    equal = keys[:, None] == keys[None, :]
    rows = begin + tl.sum((before & equal).to(tl.int32), 0)
    tl.store(order_ptr + rows, slots, mask=exists)
    tl.store(inverse_ptr + slots, tl.where(keys == n_experts, -1, rows), mask=exists)
    if chunk == 0:
        bins = tl.arange(0, BINS)
        inside = bins < n_experts
        last = bins.to(tl.int64) * n_chunks + n_chunks - 1
        tl.store(offs_ptr + bins, tl.load(ends_ptr + last, mask=inside, other=0), mask=inside)


def check_integers(ids: Tensor) -> None:
    """TypeError unless `ids` are integers of any width."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, got {ids.dtype}")


def sort_slots(ids: Tensor, num_experts: int, *, backend: Backend = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Sort slots stably by expert; ids outside [0, num_experts) are sentinels.

    Chunks of 128 slots count their slots by expert, a cumulative sum over (expert, chunk) gives where each begins, and a slot's
    row is that begin plus the equal slots before it in its chunk. Two kernels and the cumulative sum. A slot moves 28 bytes, and
    its chunk 12 for each expert (131072 slots, 128 experts: 5.3 MB). Each slot is compared with all of its chunk.

    Args:
        ids: [T, K], any integer dtype and strides, fewer than 2**31 - 128 slots.

    Returns:
        order [T*K], row -> slot, sentinels last; inverse [T, K], slot -> row, -1 for a sentinel; offs [E], the end row of each
        expert. All int32.

    Raises:
        ValueError: ids not [T, K], no expert, too many slots for int32.
        TypeError: ids that are no integers.
    """
    if ids.dim() != 2 or num_experts < 1 or ids.numel() >= 2**31 - CHUNK_SLOTS:
        raise ValueError(
            f"ids must be [T, K] with fewer than {2**31 - CHUNK_SLOTS} slots, for 1 expert or more; "
            f"got {list(ids.shape)} for {num_experts}"
        )
    check_integers(ids)
    if not use_triton(backend, ids) or ids.numel() == 0:
        return _sort_slots_reference(ids, num_experts)
    ids = ids.contiguous()
    n_slots = ids.numel()
    n_chunks = cdiv(n_slots, CHUNK_SLOTS)
    bins = next_power_of_2(num_experts + 1)
    counts = torch.empty((num_experts + 1, n_chunks), dtype=torch.int32, device=ids.device)
    order = torch.empty(n_slots, dtype=torch.int32, device=ids.device)
    inverse = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    offs = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    launch(
        _count_kernel, (n_chunks,), ids, counts, n_slots, num_experts, n_chunks,
        BINS=bins, CHUNK=CHUNK_SLOTS, num_warps=_COUNT_WARPS,
    )  # fmt: skip
    ends = counts.view(-1).cumsum(0, dtype=torch.int32)
    launch(
        _place_kernel, (n_chunks,), ids, ends, order, inverse, offs, n_slots, num_experts, n_chunks,
        BINS=bins, CHUNK=CHUNK_SLOTS, num_warps=_PLACE_WARPS,
    )  # fmt: skip
    return order, inverse, offs


def _sort_slots_reference(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The plain PyTorch form."""
    flat = ids.reshape(-1).long()
    keys = flat.masked_fill((flat < 0) | (flat >= num_experts), num_experts)
    sorted_keys, order = torch.sort(keys, stable=True)
    experts = torch.arange(num_experts, device=ids.device)
    offs = torch.searchsorted(sorted_keys, experts, right=True, out_int32=True)
    rows = torch.arange(flat.numel(), device=ids.device, dtype=torch.int32)
    rows = rows.masked_fill(sorted_keys == num_experts, -1)
    inverse = torch.empty_like(rows).scatter_(0, order, rows)
    return order.to(torch.int32), inverse.view(ids.shape), offs


@triton.jit
def _gather_kernel(
    x_ptr, order_ptr, n_live_ptr, out_ptr,
    width, x_stride, slots_per_token,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[BLOCK_R rows, BLOCK_H columns]."""
    n_live = tl.load(n_live_ptr)
    # R * H passes 2**31 at 1M rows of 2048: row offsets are 64-bit.
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    if first >= n_live:  # sentinels: with the capacity of two ranks half of all rows
        return
    rows = first + tl.arange(0, BLOCK_R)
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    live = rows < n_live
    slot = tl.load(order_ptr + rows, mask=live, other=0)
    token = (slot // slots_per_token).to(tl.int64)[:, None]
    inside = live[:, None] & (cols < width)
    values = tl.load(x_ptr + token * x_stride + cols, mask=inside, other=0.0)
    tl.store(out_ptr + rows[:, None] * width + cols, values, mask=inside)


@triton.jit
def _combine_kernel(
    rows_ptr, inverse_ptr, init_ptr, weights_ptr, y_ptr,
    n_tokens, width,
    HAS_INIT: tl.constexpr, HAS_WEIGHTS: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """y[BLOCK_T tokens, BLOCK_H columns]."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    exists = tokens < n_tokens
    inside = exists[:, None] & (cols < width)
    at = tokens[:, None] * width + cols
    total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    if HAS_INIT:
        total += tl.load(init_ptr + at, mask=inside, other=0.0).to(tl.float32)
    # Unrolled: the K row numbers and then the K rows are in flight together.
    for k in tl.static_range(K):
        row = tl.load(inverse_ptr + tokens * K + k, mask=exists, other=-1).to(tl.int64)[:, None]
        values = tl.load(rows_ptr + row * width + cols, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            values *= tl.load(weights_ptr + tokens * K + k, mask=exists, other=0.0).to(tl.float32)[:, None]
        total += values
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)


def gather_rows(x: Tensor, order: Tensor, offs: Tensor, slots_per_token: int, *, backend: Backend = "auto") -> Tensor:
    """[R, H] in x's dtype: row r is token `order[r] // slots_per_token`; sentinel rows are not written.

    In bf16 the kernel moves up to 4RH bytes (R = 131072, H = 2048: 1.07 GB, 0.27 ms at 4 TB/s).

    Args:
        x: [T, H]; a last dimension that is not contiguous is copied first.
        order: [R] int32 or int64, R <= T * slots_per_token.
        offs: [E] int32 on x's device, E >= 1, offs[-1] <= R; rows from offs[-1] on are sentinels.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: x not floating point, indices that are not int32 or int64.
    """
    if x.dim() != 2 or order.dim() != 1 or order.shape[0] > x.shape[0] * slots_per_token:
        raise ValueError(
            f"x {tuple(x.shape)} with {slots_per_token} slots a token needs order "
            f"[R], R <= {x.shape[0] * slots_per_token}, got {tuple(order.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    n_rows, width = order.shape[0], x.shape[1]
    order = packed("order", order, x, [n_rows], INDICES)
    n_live = packed("offs[-1:]", offs[-1:], x, [1], INDICES)
    if not use_triton(backend, x):
        live = torch.arange(n_rows, device=x.device) < n_live
        return x[order.long() // slots_per_token].masked_fill_(~live.unsqueeze(1), 0.0)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((n_rows, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block_h = column_block(width, _GATHER_COLUMNS)
    block_r = _GATHER_TILE // block_h
    launch(
        _gather_kernel, (cdiv(n_rows, block_r), cdiv(width, block_h)),
        x, order, n_live, out, width, x.stride(0), slots_per_token,
        BLOCK_R=block_r, BLOCK_H=block_h, num_warps=_WARPS,
    )  # fmt: skip
    return out


def combine_rows(
    rows: Tensor,
    inverse: Tensor,
    *,
    init: Tensor | None = None,
    weights: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """[T, H] in rows' dtype: `init` plus the sum of each token's rows, in the order of k, in fp32 (fp64 for fp64), rounded once.

    In bf16 the kernel moves 2RH + 2TH bytes (R = 131072, K = 8, H = 2048: 0.60 GB, 0.15 ms at 4 TB/s).

    Args:
        rows: [R, H]; rows that `inverse` does not name are not read.
        inverse: [T, K] int32 or int64, row of each slot, -1 to skip the slot.
        init: [T, H] in any floating dtype, added first.
        weights: [T, K] in any floating dtype: each row is multiplied by its slot's weight.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: rows, init or weights that are not floating point, indices that are not int32 or int64.
    """
    rows = packed("rows", rows, rows, [None, None])
    inverse = packed("inverse", inverse, rows, [None, None], INDICES)
    n_tokens, k = inverse.shape
    width = rows.shape[1]
    if init is not None:
        init = packed("init", init, rows, [n_tokens, width])
    if weights is not None:
        weights = packed("weights", weights, rows, [n_tokens, k])
    if not use_triton(backend, rows):
        compute = torch.float64 if rows.dtype == torch.float64 else torch.float32
        total = torch.zeros((n_tokens, width), dtype=compute, device=rows.device)
        if init is not None:
            total += init
        if rows.shape[0]:
            for i in range(k):
                row = inverse[:, i].long()
                picked = rows[row.clamp(min=0)].to(compute)
                if weights is not None:
                    picked = picked * weights[:, i, None].to(compute)
                total += torch.where((row >= 0).unsqueeze(1), picked, 0.0)
        return total.to(rows.dtype)
    y = torch.empty((n_tokens, width), dtype=rows.dtype, device=rows.device)
    if y.numel() == 0:
        return y
    block_h = column_block(width, _COLUMNS)
    block_t = _COLUMNS // block_h
    launch(
        _combine_kernel, (cdiv(n_tokens, block_t), cdiv(width, block_h)),
        rows, inverse, init, weights, y, n_tokens, width,
        HAS_INIT=init is not None, HAS_WEIGHTS=weights is not None, K=k, BLOCK_T=block_t, BLOCK_H=block_h, num_warps=_WARPS,
    )  # fmt: skip
    return y
