"""Attention under a dense mask, with sinks, whose heads may be as wide as 512 numbers and share keys and values.

Input: queries q [B, Hq, S, Dk], keys k [B, Hkv, T, Dk], values v [B, Hkv, T, Dv] or the keys themselves, what is added to the
scores [B or 1, S, T], and a sink, one logit, for each head, or none. With group = Hq / Hkv,

    s = scale * q @ k[head // group].T + mask
    out = exp(s) @ v / (sum of exp(s) + exp(sink))

A mask is in most places so low that nothing is left of a score: -98304, or half of its dtype's lowest number, and less counts as
minus infinity, and a query that has no key has the output 0. (Without a sink, transformers gives such a query the mean of all
values.) Output: out [B, S, Hq, Dv], and lse [B, S, Hq] in fp32, the logarithm of the denominator to base 2. Backward makes the
scores again from lse (FlashAttention, arXiv:2205.14135), so neither holds more scores than those of a tile. A tile has the
queries of some tokens and of several heads that share keys, so that these are read once for all of them. Tiles in which the mask
leaves no score are skipped. Nothing is added by atomics: results are the same bits every time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import Backend, cdiv, launch, next_power_of_2, use_triton

WIDEST = 512
"""Widths of a head up to which tiles fit shared memory of compute capability 9.0."""
_LOG2E = 1.4426950408889634  # log2(e)
_MORE_JOBS = 512  # of the kernel for keys, besides one for each tile: a few for each multiprocessor
# Numbers of a mask up to this one take a score away. Above -1e5 as bf16 rounds it (-99840), which has to count. Beside numbers
# further from 0, lse in fp32 has no digits left for the sum of weights.
_LEAST = -98304.0


@triton.jit
def _tile(at, rows, stride, n, columns, width):
    """Rows [ROWS, COLUMNS] of a matrix with `n` rows of `width`; 0 outside of it."""
    inside = (rows < n)[:, None] & (columns < width)[None, :]
    return tl.load(at + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _rows(block, part, shared_by, S, group, QUERIES: tl.constexpr, MEMBERS: tl.constexpr):
    """The token and the head of each row of a tile of queries, and whether there is such a row."""
    row = tl.arange(0, QUERIES * MEMBERS)
    query = block * QUERIES + row // MEMBERS
    member = part * MEMBERS + row % MEMBERS
    return query, shared_by * group + member, (query < S) & (member < group)


@triton.jit
def _tiles_kernel(
    mask_ptr, counts_ptr, lists_ptr, n, others, blocks, batch_stride, stride, other_stride,
    SIZE: tl.constexpr, OTHER_SIZE: tl.constexpr, AT_ONCE: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Lists those tiles of a row of tiles, of `n` tokens or keys, that the mask leaves a score in: those of the `others`."""
    rows = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    batch = tl.program_id(1).to(tl.int64)
    entry = batch * tl.num_programs(0) + tl.program_id(0)
    row_at = mask_ptr + batch * batch_stride + rows.to(tl.int64)[:, None] * stride
    count = tl.zeros([], dtype=tl.int32)
    for first in range(0, blocks, AT_ONCE):
        columns = first * OTHER_SIZE + tl.arange(0, AT_ONCE * OTHER_SIZE)
        inside = (rows < n)[:, None] & (columns < others)[None, :]
        added = tl.load(row_at + columns.to(tl.int64)[None, :] * other_stride, mask=inside, other=float("-inf"))
        left = tl.max((added.to(tl.float32) > LOWEST).to(tl.int32), 0)
        left = tl.max(tl.reshape(left, [AT_ONCE, OTHER_SIZE]), 1)
        at = lists_ptr + entry * blocks + count + tl.cumsum(left, 0) - 1
        tl.store(at, first + tl.arange(0, AT_ONCE), mask=left > 0)
        count += tl.sum(left, 0)
    tl.store(counts_ptr + entry, count)


@triton.jit
def _scores(a, b, added_at, inside, scale, LOWEST: tl.constexpr):
    """Scores of a tile to base 2, [rows of a, rows of b], of queries and keys or of keys and queries; minus infinity where the
    mask takes them away."""
    added = tl.load(added_at, mask=inside, other=float("-inf")).to(tl.float32)
    s = tl.dot(a, tl.trans(b), input_precision="ieee") * scale + added * 1.4426950408889634
    return tl.where(added > LOWEST, s, float("-inf"))


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, sink_ptr, counts_ptr, lists_ptr, out_ptr, lse_ptr,
    S, T, heads, group, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_row, list_batch,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, V_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, MEMBERS: tl.constexpr, KEYS: tl.constexpr, LOWEST: tl.constexpr, SHARED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    parts = tl.cdiv(group, MEMBERS)
    shared_by = tl.program_id(1) // parts
    batch = tl.program_id(2).to(tl.int64)
    query, head, real = _rows(block, tl.program_id(1) % parts, shared_by, S, group, QUERIES, MEMBERS)
    columns = tl.arange(0, COLUMNS)
    v_columns = tl.arange(0, V_COLUMNS)
    q_at = q_ptr + batch * q_batch + head.to(tl.int64) * q_head + query.to(tl.int64) * q_row
    q = tl.load(q_at[:, None] + columns[None, :], mask=real[:, None] & (columns < WIDTH)[None, :], other=0.0)
    k_at = k_ptr + batch * k_batch + shared_by.to(tl.int64) * k_head
    v_at = v_ptr + batch * v_batch + shared_by.to(tl.int64) * v_head
    largest = tl.full([QUERIES * MEMBERS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES * MEMBERS], dtype=tl.float32)
    if SINKS:
        largest = tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    out = tl.zeros([QUERIES * MEMBERS, V_COLUMNS], dtype=tl.float32)
    added_at = mask_ptr + batch * mask_batch + query.to(tl.int64)[:, None] * mask_row
    entry = batch * list_batch + block
    list_at = lists_ptr + entry * tl.cdiv(T, KEYS)
    for i in range(tl.load(counts_ptr + entry)):
        keys = tl.load(list_at + i) * KEYS + tl.arange(0, KEYS)
        k = _tile(k_at, keys, k_row, T, columns, WIDTH)
        s = _scores(q, k, added_at + keys[None, :], real[:, None] & (keys < T)[None, :], scale, LOWEST)
        new = tl.maximum(largest, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - base[:, None])
        shrunk = tl.exp2(largest - base)
        total = total * shrunk + tl.sum(p, 1)
        v = k if SHARED else _tile(v_at, keys, v_row, T, v_columns, V_WIDTH)
        out = out * shrunk[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        largest = new
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(total > 0, largest + tl.log2(total), float("inf"))
    result = (batch * S + query) * heads + head
    tl.store(lse_ptr + result, lse, mask=real)
    at = out_ptr + result[:, None] * V_WIDTH + v_columns[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (v_columns < V_WIDTH)[None, :])


@triton.jit
def _queries_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, counts_ptr, lists_ptr, out_ptr, lse_ptr, dy_ptr, dq_ptr, delta_ptr,
    S, T, heads, group, scale, factor,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_row, list_batch,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, V_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, MEMBERS: tl.constexpr, KEYS: tl.constexpr, LOWEST: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, and delta, the sum of dy * out of each row."""
    block = tl.program_id(0)
    parts = tl.cdiv(group, MEMBERS)
    shared_by = tl.program_id(1) // parts
    batch = tl.program_id(2).to(tl.int64)
    query, head, real = _rows(block, tl.program_id(1) % parts, shared_by, S, group, QUERIES, MEMBERS)
    columns = tl.arange(0, COLUMNS)
    v_columns = tl.arange(0, V_COLUMNS)
    inside = real[:, None] & (columns < WIDTH)[None, :]
    v_inside = real[:, None] & (v_columns < V_WIDTH)[None, :]
    q_offset = batch * q_batch + head.to(tl.int64) * q_head + query.to(tl.int64) * q_row
    q = tl.load(q_ptr + q_offset[:, None] + columns[None, :], mask=inside, other=0.0)
    result = (batch * S + query) * heads + head
    y_offset = result[:, None] * V_WIDTH + v_columns[None, :]
    dy = tl.load(dy_ptr + y_offset, mask=v_inside, other=0.0)
    delta = tl.sum(dy.to(tl.float32) * tl.load(out_ptr + y_offset, mask=v_inside, other=0.0).to(tl.float32), 1)
    tl.store(delta_ptr + result, delta, mask=real)
    lse = tl.load(lse_ptr + result, mask=real, other=float("inf"))
    k_at = k_ptr + batch * k_batch + shared_by.to(tl.int64) * k_head
    v_at = v_ptr + batch * v_batch + shared_by.to(tl.int64) * v_head
    dq = tl.zeros([QUERIES * MEMBERS, COLUMNS], dtype=tl.float32)
    added_at = mask_ptr + batch * mask_batch + query.to(tl.int64)[:, None] * mask_row
    entry = batch * list_batch + block
    list_at = lists_ptr + entry * tl.cdiv(T, KEYS)
    for i in range(tl.load(counts_ptr + entry)):
        keys = tl.load(list_at + i) * KEYS + tl.arange(0, KEYS)
        k = _tile(k_at, keys, k_row, T, columns, WIDTH)
        v = k if SHARED else _tile(v_at, keys, v_row, T, v_columns, V_WIDTH)
        s = _scores(q, k, added_at + keys[None, :], real[:, None] & (keys < T)[None, :], scale, LOWEST)
        ds = tl.exp2(s - lse[:, None]) * (tl.dot(dy, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    at = dq_ptr + q_offset[:, None] + columns[None, :]
    tl.store(at, (dq * factor).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _keys_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, jobs_ptr, lists_ptr, lse_ptr, dy_ptr, delta_ptr, sums_ptr,
    S, T, heads, group, scale, factor,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_row, list_batch, job_batch,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, V_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, MEMBERS: tl.constexpr, KEYS: tl.constexpr, LOWEST: tl.constexpr, SHARED: tl.constexpr,
    OF_VALUES: tl.constexpr,
):  # fmt: skip
    """What job `program_id(0)` adds to the gradients of a tile of keys, or of values, in fp32.

    Not to both in one program: two sums of 64 x 512 numbers do not fit registers, and Triton 3.6 gives the first of two products
    that are added to one sum a layout in which each half of the warps holds all of it.
    """
    n_shared = heads // group
    shared_by = tl.program_id(1) % n_shared
    batch = (tl.program_id(1) // n_shared).to(tl.int64)
    job_at = jobs_ptr + (batch * job_batch + tl.program_id(0)) * 3
    block = tl.load(job_at)
    first = tl.load(job_at + 1)
    last = tl.load(job_at + 2)
    keys = block * KEYS + tl.arange(0, KEYS)
    columns = tl.arange(0, COLUMNS)
    v_columns = tl.arange(0, V_COLUMNS)
    k = _tile(k_ptr + batch * k_batch + shared_by.to(tl.int64) * k_head, keys, k_row, T, columns, WIDTH)
    v_at = v_ptr + batch * v_batch + shared_by.to(tl.int64) * v_head
    v = k if SHARED or OF_VALUES else _tile(v_at, keys, v_row, T, v_columns, V_WIDTH)
    total = tl.zeros([KEYS, V_COLUMNS if OF_VALUES else COLUMNS], dtype=tl.float32)
    list_at = lists_ptr + (batch * list_batch + block) * tl.cdiv(S, QUERIES)
    members = tl.cdiv(group, MEMBERS)
    # One loop, not two: Triton loads ahead in the innermost one only, which would often run once.
    for i in range(first, last):
        query, head, real = _rows(tl.load(list_at + i // members), i % members, shared_by, S, group, QUERIES, MEMBERS)
        q_at = q_ptr + batch * q_batch + head.to(tl.int64) * q_head + query.to(tl.int64) * q_row
        q = tl.load(q_at[:, None] + columns[None, :], mask=real[:, None] & (columns < WIDTH)[None, :], other=0.0)
        result = (batch * S + query) * heads + head
        dy_at = dy_ptr + result[:, None] * V_WIDTH + v_columns[None, :]
        dy = tl.load(dy_at, mask=real[:, None] & (v_columns < V_WIDTH)[None, :], other=0.0)
        lse = tl.load(lse_ptr + result, mask=real, other=float("inf"))
        added_at = mask_ptr + batch * mask_batch + query.to(tl.int64)[None, :] * mask_row + keys[:, None]
        # [KEYS, rows]: weights lie in registers as the next product takes them.
        p = tl.exp2(_scores(k, q, added_at, real[None, :] & (keys < T)[:, None], scale, LOWEST) - lse[None, :])
        if OF_VALUES:
            total += tl.dot(p.to(dy.dtype), dy, input_precision="ieee")
        else:
            delta = tl.load(delta_ptr + result, mask=real, other=0.0)
            ds = p * (tl.dot(v, tl.trans(dy), input_precision="ieee") - delta[None, :]) * factor
            total += tl.dot(ds.to(q.dtype), q, input_precision="ieee")
    if first < last:
        at = sums_ptr + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * KEYS * total.shape[1]
        inner = tl.arange(0, KEYS)[:, None] * total.shape[1] + tl.arange(0, total.shape[1])[None, :]
        tl.store(at + inner, total)


@triton.jit
def _sum_kernel(
    sums_ptr, more_ptr, ends_ptr, out_ptr, T, width, n_shared, ends_batch,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """Add up what the jobs of a tile of keys found, those of `more` too."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    inner = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    end_at = ends_ptr + (row // n_shared).to(tl.int64) * ends_batch + block
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    first = tl.load(end_at).to(tl.int64)
    for job in range(first, tl.load(end_at + 1).to(tl.int64)):
        at = (job * tl.num_programs(1) + row) * KEYS * COLUMNS + inner[:, None] * COLUMNS + columns[None, :]
        total += tl.load(sums_ptr + at)
        if MORE:
            total += tl.load(more_ptr + at)
    keys = block * KEYS + inner
    at = (row.to(tl.int64) * T + keys)[:, None] * width + columns[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(keys < T)[:, None] & (columns < width)[None, :])


@dataclass(frozen=True)
class _Tiles:
    """Sizes of tiles: `queries` tokens times `members` heads, and `keys`; and how many warps and loads at a time there are."""

    queries: int
    members: int
    keys: int
    warps: int
    stages: int

    @classmethod
    def of(cls, kernel: Any, q: Tensor, group: int, columns: int, v_columns: int, shared: bool) -> _Tiles:
        """The first of `_SIZES` whose sums fit the registers, and its tiles shared memory."""
        limit = _shared_memory(q.device)
        of_key = columns if shared else columns + v_columns
        of_row = columns if kernel is _forward_kernel else columns + v_columns
        sizes = _SIZES[kernel.fn.__name__]
        for rows, keys, warps, stages in sizes[-1:] if q.element_size() > 2 else sizes:
            held, passed = (keys * of_key, rows * of_row) if kernel is _keys_kernel else (rows * of_row, keys * of_key)
            summed = (keys if kernel is _keys_kernel else rows) * max(columns, v_columns)
            loaded = (held + stages * passed + rows * keys) * q.element_size() + _SLACK
            if loaded <= limit and summed <= _SUMS * warps:
                break
        members = min(rows, next_power_of_2(group))
        return cls(rows // members, members, keys, warps, stages)


# Rows, keys, warps and stages, the fastest first; on an H200, bf16, of widths 512, and 192 with 128.
_SIZES: Mapping[str, tuple[tuple[int, int, int, int], ...]] = {
    "_forward_kernel": (
        (128, 64, 8, 2),
        (64, 64, 8, 2),
        (64, 64, 8, 1),
        (64, 32, 4, 1),
        (32, 32, 4, 1),
        (16, 16, 4, 1),
    ),
    "_queries_kernel": ((128, 64, 8, 2), (64, 64, 8, 1), (64, 32, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    "_keys_kernel": ((64, 128, 8, 2), (32, 64, 8, 2), (32, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
}
_LOOKED_AT = 8192  # numbers of a mask that a program looks at together
_SUMS = 4096  # numbers that the threads of a warp sum up, 128 each
_SLACK = 8 << 10  # of shared memory


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; those of an H200 without a GPU."""
    if device.type != "cuda":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@dataclass(frozen=True)
class _Launch:
    """The tiles of one kernel, and what its launches say of the shapes and strides of the tensors."""

    tiles: _Tiles
    sizes: tuple[int, int, int, int]
    strides: tuple[int, ...]
    constants: Mapping[str, int | float | bool]

    @classmethod
    def of(cls, kernel: Any, q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor) -> _Launch:
        width, group = q.shape[3], q.shape[1] // k.shape[1]
        values = k if v is None else v
        v_width = values.shape[3]
        columns, v_columns = (max(16, next_power_of_2(n)) for n in (width, v_width))
        tiles = _Tiles.of(kernel, q, group, columns, v_columns, v is None)
        per_batch = mask.stride(0) if mask.shape[0] > 1 else 0
        strides = (*q.stride()[:3], *k.stride()[:3], *values.stride()[:3], per_batch, mask.stride(1))
        constants = {
            "WIDTH": width,
            "V_WIDTH": v_width,
            "COLUMNS": columns,
            "V_COLUMNS": v_columns,
            "QUERIES": tiles.queries,
            "MEMBERS": tiles.members,
            "KEYS": tiles.keys,
            "LOWEST": _lowest(mask),
            "SHARED": v is None,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }
        return cls(tiles, (q.shape[2], k.shape[2], q.shape[1], group), strides, constants)

    def grid_of_queries(self, batch: int) -> tuple[int, int, int]:
        length, _, heads, group = self.sizes
        return cdiv(length, self.tiles.queries), heads // group * cdiv(group, self.tiles.members), batch

    def tiles_with_keys(self, mask: Tensor, of_keys: bool = False) -> tuple[Tensor, Tensor]:
        """The tiles that leave a score of the mask, [B, S, T]: of each tile of queries (of keys, if `of_keys`) how many there
        are, [B, tiles], and their numbers in ascending order, [B, tiles, tiles of the other kind]; what follows those is
        undefined. Both int32."""
        sides = [(self.sizes[0], self.tiles.queries, mask.stride(1)), (self.sizes[1], self.tiles.keys, mask.stride(2))]
        (n, size, stride), (others, other_size, other_stride) = reversed(sides) if of_keys else sides
        rows, blocks = cdiv(n, size), cdiv(others, other_size)
        counts = mask.new_empty((mask.shape[0], rows), dtype=torch.int32)
        lists = mask.new_empty((mask.shape[0], rows, blocks), dtype=torch.int32)
        at_once = max(1, min(next_power_of_2(blocks), _LOOKED_AT // (size * other_size)))
        launch(
            _tiles_kernel, (rows, mask.shape[0]), mask, counts, lists, n, others, blocks, mask.stride(0), stride, other_stride,
            SIZE=size, OTHER_SIZE=other_size, AT_ONCE=at_once, LOWEST=_lowest(mask), num_warps=8,
        )  # fmt: skip
        return counts, lists


def _lowest(mask: Tensor) -> float:
    return max(_LEAST, torch.finfo(mask.dtype).min / 2)


def _jobs(counts: Tensor, members: int, n: int) -> tuple[Tensor, Tensor]:
    """Shares what there is to do for each tile of keys among `n` jobs, so that none does much more than another.

    A tile that all queries attend to takes several jobs. Nothing of it is known on the host, but that `n` are enough.

    Args:
        counts: [B, blocks], how many tiles of queries each tile of keys is multiplied by.
        members: how many times each.
        n: more than there are blocks.

    Returns:
        [B, n, 3], a job's tile of keys, and the first of its products and the last, which is not its own; and [B, blocks + 1],
        the jobs before those of each tile, and all. Both int32.
    """
    todo = counts.long() * members
    blocks = todo.shape[1]
    spare = n - blocks
    each = ((todo.sum(1, keepdim=True) + spare - 1) // spare).clamp(min=1)
    parts = (todo + each - 1) // each
    ends = parts.cumsum(1)
    job = torch.arange(n, device=counts.device).expand(len(counts), n).contiguous()
    block = torch.searchsorted(ends, job, right=True)
    idle, block = block == blocks, block.clamp(max=blocks - 1)
    first = (job - (ends - parts).gather(1, block)) * each
    last = torch.minimum(first + each, todo.gather(1, block))
    jobs = torch.stack([block, first.masked_fill(idle, 0), last.masked_fill(idle, 0)], -1)
    return jobs.int(), torch.nn.functional.pad(ends, (1, 0)).int()


def _n_jobs(blocks: int, rows: int) -> int:
    return blocks + cdiv(_MORE_JOBS, rows)


def _shapes_of_sums(made: _Launch, rows: int) -> list[tuple[int, ...]]:
    """What the jobs for keys, and for values, write: [jobs, B * Hkv, keys, columns]."""
    jobs = _n_jobs(cdiv(made.sizes[1], made.tiles.keys), rows)
    return [(jobs, rows, made.tiles.keys, int(made.constants[name])) for name in ("COLUMNS", "V_COLUMNS")]


def bytes_of_lists(q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor) -> list[int]:
    """Bytes of the lists of tiles that the Triton forms make: in forward, and in backward for queries and for keys."""
    made = [_Launch.of(kernel, q, k, v, mask) for kernel in (_forward_kernel, _queries_kernel, _keys_kernel)]
    tiles = [cdiv(m.sizes[0], m.tiles.queries) * cdiv(m.sizes[1], m.tiles.keys) for m in made]
    return [4 * mask.shape[0] * n for n in tiles]


def bytes_of_sums(q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor) -> list[int]:
    """Bytes that the Triton form of `masked_attention_backward` sums gradients up in, for keys and for values."""
    made = _Launch.of(_keys_kernel, q, k, v, mask)
    return [4 * math.prod(shape) for shape in _shapes_of_sums(made, q.shape[0] * k.shape[1])]


def _added(like: Tensor, ends: Tensor, sums: Tensor, more: Tensor | None = None) -> Tensor:
    """The sums of all jobs, [B, Hkv, T, D], in the dtype of `like`."""
    _, rows, keys, columns = sums.shape
    total = like.new_empty(like.shape)
    _, n_shared, n_keys, width = like.shape
    at_once = max(1, min(keys, 8192 // columns))
    grid = cdiv(n_keys, keys), rows, keys // at_once
    launch(
        _sum_kernel, grid, sums, more, ends, total, n_keys, width, n_shared, ends.shape[1] if len(ends) > 1 else 0,
        KEYS=keys, COLUMNS=columns, ROWS=at_once, MORE=more is not None, num_warps=4,
    )  # fmt: skip
    return total


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    mask: Tensor,
    sinks: Tensor | None,
    scale: float,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention under a dense mask.

    Args:
        q: [B, Hq, S, Dk], fp32, bf16 or fp16 (fp64 by the reference), with any strides.
        k: [B, Hkv, T, Dk] in the dtype of `q`; Hq is a multiple of Hkv.
        v: [B, Hkv, T, Dv]; None for the keys.
        mask: [B or 1, S, T], any floating dtype: added to the scores.
        sinks: [Hq], any floating dtype; None for none.
        scale: of the products of queries and keys.

    Returns:
        out, [B, S, Hq, Dv] in the dtype of `q`, and lse, [B, S, Hq], fp32 (fp64 for fp64): the logarithm to base 2 of what
        weights were divided by; infinite for a query without keys and sink.

    Raises:
        ValueError: shapes that do not fit, or heads wider than `WIDEST`.
        TypeError: dtypes that do not fit.
    """
    _check(q, k, v, mask, sinks)
    if not use_triton(backend, q) or not k.shape[2]:
        return _forward_reference(q, k, v, mask, sinks, scale)
    q, k, mask = _in_rows(q), _in_rows(k), _in_rows(mask)
    v, sinks = None if v is None else _in_rows(v), None if sinks is None else _finite(sinks)
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, (k if v is None else v).shape[-1])
    lse = q.new_empty(batch, length, heads, dtype=torch.float32)
    if not out.numel():
        return out, lse
    made = _Launch.of(_forward_kernel, q, k, v, mask)
    found = made.tiles_with_keys(mask)
    launch(
        _forward_kernel, made.grid_of_queries(batch), q, k, k if v is None else v, mask, sinks, *found, out, lse,
        *made.sizes, scale * _LOG2E, *made.strides, found[0].shape[1] if mask.shape[0] > 1 else 0,
        **made.constants, SINKS=sinks is not None,
    )  # fmt: skip
    return out, lse


def masked_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    mask: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `masked_attention`.

    Args:
        dy: gradient of `out`, [B, S, Hq, Dv].
        out, lse: what `masked_attention` returned; the others are what it was given.

    Returns:
        The gradients of q, k, v and sinks, each in the dtype and shape of what it is of; None for None. That of shared keys and
        values is of both together. All are contiguous.
    """
    if not use_triton(backend, q):
        return _backward_reference(dy, q, k, v, mask, sinks, out, lse, scale)
    q, k, mask, dy = q.contiguous(), _in_rows(k), _in_rows(mask), dy.contiguous()  # dq has the strides of q
    v = None if v is None else _in_rows(v)
    delta, dq = torch.empty_like(lse), torch.empty_like(q)
    batch = q.shape[0]
    if not dy.numel() or not k.shape[2]:
        return dq.zero_(), torch.zeros_like(k), None if v is None else torch.zeros_like(v), _zeros_like(sinks)
    values, scales, per_batch = k if v is None else v, (scale * _LOG2E, scale), mask.shape[0] > 1
    made = _Launch.of(_queries_kernel, q, k, v, mask)
    found = made.tiles_with_keys(mask)
    launch(
        _queries_kernel, made.grid_of_queries(batch), q, k, values, mask, *found, out, lse, dy, dq, delta,
        *made.sizes, *scales, *made.strides, found[0].shape[1] if per_batch else 0, **made.constants,
    )  # fmt: skip
    made = _Launch.of(_keys_kernel, q, k, v, mask)
    counts, lists = made.tiles_with_keys(mask, of_keys=True)
    blocks, rows = counts.shape[1], batch * k.shape[1]
    n_jobs = _n_jobs(blocks, rows)
    jobs, ends = _jobs(counts, cdiv(q.shape[1] // k.shape[1], made.tiles.members), n_jobs)
    sums = []
    for of_values, shape in zip((False, True), _shapes_of_sums(made, rows), strict=True):
        sums.append(q.new_empty(shape, dtype=torch.float32))
        launch(
            _keys_kernel, (n_jobs, rows), q, k, values, mask, jobs, lists, lse, dy, delta, sums[-1],
            *made.sizes, *scales, *made.strides, *((blocks, n_jobs) if per_batch else (0, 0)),
            **made.constants, OF_VALUES=of_values,
        )  # fmt: skip
    if v is None:
        dk, dv = _added(k, ends, *sums), None
    else:
        dk, dv = _added(k, ends, sums[0]), _added(v, ends, sums[1])
    dsinks = None
    if sinks is not None:
        share = torch.exp2(_finite(sinks) * _LOG2E - lse)
        dsinks = (share * delta).sum((0, 1)).neg().to(sinks.dtype)
    return dq, dk, dv, dsinks


def _zeros_like(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor)


def _finite(sinks: Tensor) -> Tensor:
    """Sinks in fp32, contiguous; a sink of minus infinity would make the lse of a query without keys one too."""
    return sinks.float().clamp(min=-1e30).contiguous()


def _in_rows(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it, whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] < 2 else tensor.contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor, sinks: Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or not q.is_floating_point():
        raise ValueError(f"q and k must be [B, H, S, D] and floating point, got {list(q.shape)} and {list(k.shape)}")
    batch, heads, length, width = q.shape
    if not (heads and width and k.shape[1] and (v is None or v.shape[-1])):
        raise ValueError(
            f"there are no heads, or heads of no width: {list(q.shape)} and {list((k if v is None else v).shape)}"
        )
    if k.shape[0] != batch or k.shape[3] != width or heads % k.shape[1]:
        raise ValueError(f"k must be [{batch}, a divisor of {heads}, any, {width}], got {list(k.shape)}")
    if v is not None and (v.dim() != 4 or v.shape[:3] != k.shape[:3]):
        raise ValueError(f"v must be [{', '.join(map(str, k.shape[:3]))}, any], got {list(v.shape)}")
    if mask.dim() != 3 or mask.shape[0] not in (1, batch) or mask.shape[1:] != (length, k.shape[2]):
        raise ValueError(f"mask must be [{batch} or 1, {length}, {k.shape[2]}], got {list(mask.shape)}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}], got {list(sinks.shape)}")
    if max(width, width if v is None else v.shape[3]) > WIDEST:
        raise ValueError(f"heads are {max(width, width if v is None else v.shape[3])} wide; at most {WIDEST} fit")
    if any(t is not None and t.dtype != q.dtype for t in (k, v)):
        raise TypeError(f"k and v must be {q.dtype} as q is, got {k.dtype} and {k.dtype if v is None else v.dtype}")
    if not mask.is_floating_point():
        raise TypeError(f"mask must be floating point, what is added to the scores, got {mask.dtype}")


# --- reference --------------------------------------------------------------------------------------------------------


def _forward_reference(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor, sinks: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """In fp32 (fp64 for fp64), with all scores at once."""
    scores, values = _scores_reference(q, k, v, mask, scale)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(scores.dtype)[:, None])
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    out = (scores - lse[..., None]).exp() @ values
    return out.transpose(1, 2).contiguous().to(q.dtype), (lse * _LOG2E).transpose(1, 2).contiguous()


def _backward_reference(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    mask: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    scores, values = _scores_reference(q, k, v, mask, scale)
    dy, lse = dy.to(scores.dtype).transpose(1, 2), lse.transpose(1, 2) / _LOG2E
    p = (scores - lse[..., None]).exp()
    delta = (dy * out.to(scores.dtype).transpose(1, 2)).sum(-1)
    ds = p * (dy @ values.transpose(2, 3) - delta[..., None]) * scale
    dq = ds @ _for_each_head(k, q).to(scores.dtype)
    dk = _of_each_group(ds.transpose(2, 3) @ q.to(scores.dtype), k)
    dv = _of_each_group(p.transpose(2, 3) @ dy, k)
    dsinks = None
    if sinks is not None:
        dsinks = ((sinks.to(scores.dtype)[:, None] - lse).exp() * delta).sum((0, 2)).neg().to(sinks.dtype)
    if v is None:
        return dq.to(q.dtype), (dk + dv).to(q.dtype), None, dsinks
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dsinks


def _scores_reference(q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scores, [B, Hq, S, T], minus infinity where the mask takes them away, and the values of each head."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = _for_each_head(k, q).to(dtype)
    values = keys if v is None else _for_each_head(v, q).to(dtype)
    scores = q.to(dtype) @ keys.transpose(2, 3) * scale + mask[:, None].to(dtype)
    return scores.masked_fill((mask <= _lowest(mask))[:, None], -math.inf), values


def _for_each_head(of_groups: Tensor, q: Tensor) -> Tensor:
    return of_groups.repeat_interleave(q.shape[1] // of_groups.shape[1], 1)


def _of_each_group(of_heads: Tensor, k: Tensor) -> Tensor:
    return of_heads.unflatten(1, (k.shape[1], -1)).sum(2)
