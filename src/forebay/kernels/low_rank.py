"""Products of the rows of each expert with a narrow matrix of its own, for low-rank updates: each wide tensor is touched once.

Input: rows [R, W] sorted by expert, or tokens [T, W] that a kernel gathers to rows as it reads them; stacked narrow matrices
[E, r, W]; `offs` [E], the end row of each expert. `narrow_rows` makes low [R, r] = rows @ matrix.T, `add_widened` adds
low @ matrix to rows in place, `sum_outer` makes the matrices' gradients, [E, r, W] = low.T @ rows. Rows from offs[-1] on are
neither read nor written. All is limited by memory: a row costs W elements for each read or write, 2rW FLOPs, and r elements of
low. Example with W = 2, r = 1 and one expert: rows [[1, 2], [3, 4]] and matrix [[1, 1]] narrow to low [[3], [7]];
`add_widened` makes the rows [[4, 5], [10, 11]]; `sum_outer` of the first rows and low is [[1*3 + 3*7, 2*3 + 4*7]] = [[24, 34]].
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import INDICES, Backend, cdiv, check_written, launch, next_power_of_2, packed, use_triton

# Chosen by the compiled code for an H100 (r = 16, bf16), not timed yet. Per multiprocessor three programs of narrow_rows or
# sum_outer fit, each with two or three tiles of 16 KiB on their way, and three of add_widened with 80 registers a thread (153 on
# 4 warps). A rank beyond _MOST_RANK takes several programs, each of which reads the rows.
_NARROW_ROWS = 128
_NARROW_COLUMN_BYTES = 128
_ADD_ROWS = 64
_ADD_COLUMNS = 128
_ADD_WARPS = 8
_OUTER_ROW_BYTES = 128  # of a column
_OUTER_COLUMNS = 128
_MOST_RANK = 64
_WARPS = 4
_STAGES = 4


class Gathered(NamedTuple):
    """Rows as tokens [T, W]: row r is ``tokens[order[r] // slots_per_token]``."""

    tokens: Tensor
    order: Tensor
    slots_per_token: int


@triton.jit
def _tile(offs_ptr, n_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """(expert, first row, end row of the expert) of this program; expert >= n_experts where there is no more tile.

    Tiles do not cross experts: an expert of n rows has cdiv(n, BLOCK).
    """
    experts = tl.arange(0, EXPERTS)
    exists = experts < n_experts
    ends = tl.load(offs_ptr + experts, mask=exists, other=0)
    begins = tl.load(offs_ptr + experts - 1, mask=exists & (experts > 0), other=0)
    tiles = (ends - begins + BLOCK - 1) // BLOCK
    after = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    own = experts == expert
    start = tl.sum(tl.where(own, begins + (tile - after + tiles) * BLOCK, 0), 0)
    return expert, start, tl.sum(tl.where(own, ends, 0), 0)


@triton.jit
def _narrow_kernel(
    source_ptr, order_ptr, matrices_ptr, offs_ptr, rows_ptr, low_ptr,
    width, rank, source_stride, slots_per_token, n_experts,
    GATHER: tl.constexpr, WRITE_ROWS: tl.constexpr, EXPERTS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """low[BLOCK_R rows of one expert, RANK columns]; the programs of the first columns also write the gathered rows."""
    expert, start, end = _tile(offs_ptr, n_experts, EXPERTS, BLOCK_R)
    if expert < n_experts:
        # R * W passes 2**31: row offsets are 64-bit.
        rows = start.to(tl.int64) + tl.arange(0, BLOCK_R)
        live = (rows < end)[:, None]
        source = rows
        if GATHER:
            slot = tl.load(order_ptr + rows, mask=rows < end, other=0)
            source = (slot // slots_per_token).to(tl.int64)
        ranks = tl.program_id(1) * RANK + tl.arange(0, RANK)
        matrix = matrices_ptr + (expert.to(tl.int64) * rank + ranks[:, None]) * width
        low = tl.zeros((BLOCK_R, RANK), tl.float32)
        for start_column in range(0, width, BLOCK_W):
            cols = start_column + tl.arange(0, BLOCK_W)[None, :]
            inside = cols < width
            tile = tl.load(source_ptr + source[:, None] * source_stride + cols, mask=live & inside, other=0.0)
            if WRITE_ROWS:
                first = tl.program_id(1) == 0
                tl.store(rows_ptr + rows[:, None] * width + cols, tile, mask=live & inside & first)
            part = tl.load(matrix + cols, mask=(ranks < rank)[:, None] & inside, other=0.0)
            low = tl.dot(tile, tl.trans(part), low, input_precision="ieee")
        at = low_ptr + rows[:, None] * rank + ranks[None, :]
        tl.store(at, low.to(low_ptr.dtype.element_ty), mask=live & (ranks < rank)[None, :])


@triton.jit
def _add_kernel(
    rows_ptr, low_ptr, matrices_ptr, offs_ptr,
    width, rank, n_experts,
    EXPERTS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """rows[BLOCK_R of one expert, BLOCK_W columns], in place."""
    expert, start, end = _tile(offs_ptr, n_experts, EXPERTS, BLOCK_R)
    if expert < n_experts:
        rows = start.to(tl.int64) + tl.arange(0, BLOCK_R)
        live = (rows < end)[:, None]
        cols = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
        at = rows_ptr + rows[:, None] * width + cols
        mask = live & (cols < width)
        before = tl.load(at, mask=mask, other=0.0)
        added = tl.zeros((BLOCK_R, BLOCK_W), tl.float32)
        for start_rank in range(0, rank, RANK):
            ranks = start_rank + tl.arange(0, RANK)
            low = tl.load(
                low_ptr + rows[:, None] * rank + ranks[None, :], mask=live & (ranks < rank)[None, :], other=0.0
            )
            matrix = matrices_ptr + (expert.to(tl.int64) * rank + ranks[:, None]) * width
            part = tl.load(matrix + cols, mask=(ranks < rank)[:, None] & (cols < width), other=0.0)
            added = tl.dot(low, part, added, input_precision="ieee")
        # Added at the end, not used as the initial value: a tensor core truncates small terms against a large sum.
        tl.store(at, (before.to(tl.float32) + added).to(rows_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _outer_kernel(
    source_ptr, order_ptr, low_ptr, offs_ptr, out_ptr,
    width, rank, source_stride, slots_per_token, scale, expert_stride, rank_stride, width_stride,
    GATHER: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """out[one expert, RANK, BLOCK_W columns]."""
    # Scalar arguments are fp32 in eager Triton and fp64 under Inductor.
    scale = tl.cast(scale, tl.float32)
    blocks = tl.cdiv(width, BLOCK_W)
    # The blocks of an expert run next to each other: its low stays in the cache.
    expert = tl.program_id(0) // blocks
    start = tl.load(offs_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs_ptr + expert)
    cols = (tl.program_id(0) % blocks) * BLOCK_W + tl.arange(0, BLOCK_W)
    ranks = tl.program_id(1) * RANK + tl.arange(0, RANK)[None, :]
    total = tl.zeros((BLOCK_W, RANK), tl.float32)
    for first in range(start, end, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        live = (rows < end)[:, None]
        source = rows.to(tl.int64)[:, None]
        if GATHER:
            slot = tl.load(order_ptr + rows, mask=rows < end, other=0)
            source = (slot // slots_per_token).to(tl.int64)[:, None]
        tile = tl.load(
            source_ptr + source * source_stride + cols[None, :], mask=live & (cols < width)[None, :], other=0.0
        )
        at = low_ptr + rows.to(tl.int64)[:, None] * rank + ranks
        low = tl.load(at, mask=live & (ranks < rank), other=0.0)
        total = tl.dot(tl.trans(tile), low, total, input_precision="ieee")
    at = out_ptr + expert.to(tl.int64) * expert_stride + ranks * rank_stride + cols[:, None] * width_stride
    tl.store(at, (total * scale).to(out_ptr.dtype.element_ty), mask=(cols < width)[:, None] & (ranks < rank))


def narrow_rows(
    rows: Tensor | Gathered, matrices: Tensor, offs: Tensor, *, keep_rows: bool = False, backend: Backend = "auto"
) -> tuple[Tensor, Tensor | None]:
    """(low [R, r], the gathered rows [R, W]): low = rows[rows of e] @ matrices[e].T for each expert e, summed in fp32.

    In bf16 the kernel reads 2RW bytes; with `keep_rows` it writes as many (R = 131072, W = 2048: 0.54 GB, 0.13 ms at 4 TB/s).

    Args:
        rows: [R, W] in any floating dtype, or tokens to gather.
        matrices: [E, r, W] in the rows' dtype.
        offs: [E] int32, the end row of each expert. The plain form, which handles fp64, reads it on the host.
        keep_rows: also return the rows, live ones only; None otherwise.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: another dtype of matrices, indices that are not int32 or int64.
    """
    source, order, slots = _source(rows)
    matrices, offs = _checked(source, matrices, offs)
    n_rows, width, rank = (source if order is None else order).shape[0], source.shape[1], matrices.shape[1]
    kept = source.new_empty((n_rows, width)) if keep_rows else None
    low = source.new_empty((n_rows, rank))
    if not use_triton(backend, source):
        _narrow_reference(source, order, slots, matrices, offs, kept, low)
        return low, kept
    if low.numel() and width:
        launch(
            _narrow_kernel, (_tiles(n_rows, offs, _NARROW_ROWS), cdiv(rank, _rank_block(rank))),
            source, order, matrices, offs, kept, low, width, rank, source.stride(0), slots, offs.shape[0],
            GATHER=order is not None, WRITE_ROWS=keep_rows, EXPERTS=next_power_of_2(offs.shape[0]),
            RANK=_rank_block(rank), BLOCK_R=_NARROW_ROWS, BLOCK_W=_NARROW_COLUMN_BYTES // source.element_size(),
            num_warps=_WARPS, num_stages=_STAGES,
        )  # fmt: skip
    return low, kept


def add_widened(rows: Tensor, low: Tensor, matrices: Tensor, offs: Tensor, *, backend: Backend = "auto") -> None:
    """rows[rows of e] += low[rows of e] @ matrices[e] for each expert e, summed in fp32 and rounded once.

    In bf16 the kernel moves 4RW bytes (R = 131072, W = 1536: 0.81 GB, 0.20 ms at 4 TB/s).

    Args:
        rows: [R, W], contiguous; written.
        low: [R, r] and matrices: [E, r, W] in the rows' dtype.
        offs: as in `narrow_rows`.

    Raises:
        ValueError: shapes, devices or strides that do not fit.
        TypeError: as in `narrow_rows`.
    """
    matrices, offs = _checked(rows, matrices, offs)
    low = packed("low", low, rows, [rows.shape[0], matrices.shape[1]], [rows.dtype])
    check_written("rows", rows)
    if not rows.is_contiguous():
        raise ValueError(f"rows must be contiguous, got strides {rows.stride()} for {list(rows.shape)}")
    if not use_triton(backend, rows):
        for e, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
            rows[start:end].addmm_(low[start:end], matrices[e])
        return
    if rows.numel() == 0:
        return
    (n_rows, width), rank = rows.shape, low.shape[1]
    launch(
        _add_kernel, (_tiles(n_rows, offs, _ADD_ROWS), cdiv(width, _ADD_COLUMNS)),
        rows, low, matrices, offs, width, rank, offs.shape[0],
        EXPERTS=next_power_of_2(offs.shape[0]), RANK=_rank_block(rank), BLOCK_R=_ADD_ROWS,
        BLOCK_W=_ADD_COLUMNS, num_warps=_ADD_WARPS, num_stages=1,
    )  # fmt: skip


def sum_outer(
    rows: Tensor | Gathered, low: Tensor, offs: Tensor, out: Tensor, *, scale: float = 1.0, backend: Backend = "auto"
) -> None:
    """out[e] = scale * low[rows of e].T @ rows[rows of e] for each expert e, summed in fp32; zero for an expert without rows.

    In bf16 the kernel reads 2RW bytes. One program sums a block of columns over all rows of an expert: the same bits every time.

    Args:
        rows, offs: as in `narrow_rows`.
        low: [R, r] in the rows' dtype.
        out: [E, r, W] in any floating dtype, any strides without overlap; written.

    Raises:
        ValueError: shapes or devices that do not fit, or an out that overlaps itself.
        TypeError: as in `narrow_rows`.
    """
    source, order, slots = _source(rows)
    n_rows, width = (source if order is None else order).shape[0], source.shape[1]
    low = packed("low", low, source, [n_rows, None], [source.dtype])
    offs = packed("offs", offs, source, [None], INDICES)
    check_written("out", out)
    rank = low.shape[1]
    if out.shape != (offs.shape[0], rank, width) or out.device != source.device:
        raise ValueError(
            f"out must be {[offs.shape[0], rank, width]} on {source.device}, got {list(out.shape)} on {out.device}"
        )
    if not use_triton(backend, source):
        _outer_reference(source, order, slots, low, offs, out, scale)
        return
    if out.numel() == 0:
        return
    launch(
        _outer_kernel, (offs.shape[0] * cdiv(width, _OUTER_COLUMNS), cdiv(rank, _rank_block(rank))),
        source, order, low, offs, out, width, rank, source.stride(0), slots, scale, *out.stride(),
        GATHER=order is not None, RANK=_rank_block(rank), BLOCK_R=_OUTER_ROW_BYTES // source.element_size(),
        BLOCK_W=_OUTER_COLUMNS, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip


def _source(rows: Tensor | Gathered) -> tuple[Tensor, Tensor | None, int]:
    """The tensor that is read, with contiguous rows; its order and slots per token if rows are gathered."""
    tokens, order, slots = rows if isinstance(rows, Gathered) else (rows, None, 1)
    if tokens.dim() != 2:
        raise ValueError(f"rows must be [R, W], got {list(tokens.shape)}")
    if order is not None:
        order = packed("order", order, tokens, [None], INDICES)
        if order.shape[0] > tokens.shape[0] * slots:
            raise ValueError(f"{tokens.shape[0]} tokens of {slots} slots have no {order.shape[0]} rows")
    return tokens if tokens.stride(1) == 1 else tokens.contiguous(), order, slots


def _checked(rows: Tensor, matrices: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    if rows.dim() != 2:
        raise ValueError(f"rows must be [R, W], got {list(rows.shape)}")
    offs = packed("offs", offs, rows, [None], INDICES)
    return packed("matrices", matrices, rows, [offs.shape[0], None, rows.shape[1]], [rows.dtype]), offs


def _tiles(n_rows: int, offs: Tensor, block: int) -> int:
    """The most tiles that any routing of so many rows has."""
    return min(n_rows, n_rows // block + offs.shape[0])


def _rank_block(rank: int) -> int:
    """16 at least, as `tl.dot` needs."""
    return min(_MOST_RANK, max(16, next_power_of_2(rank)))


def _rows_of(source: Tensor, order: Tensor | None, slots: int, start: int, end: int) -> Tensor:
    return source[start:end] if order is None else source[order[start:end].long() // slots]


def _narrow_reference(
    source: Tensor, order: Tensor | None, slots: int, matrices: Tensor, offs: Tensor, kept: Tensor | None, low: Tensor
) -> None:
    """The plain PyTorch form of `_narrow_kernel`."""
    for e, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
        rows = _rows_of(source, order, slots, start, end)
        torch.mm(rows, matrices[e].t(), out=low[start:end])
        if kept is not None:
            kept[start:end] = rows


def _outer_reference(
    source: Tensor, order: Tensor | None, slots: int, low: Tensor, offs: Tensor, out: Tensor, scale: float
) -> None:
    """The plain PyTorch form of `_outer_kernel`."""
    exact = torch.float64 if source.dtype == torch.float64 else torch.float32
    for e, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
        rows = _rows_of(source, order, slots, start, end)
        out[e] = low[start:end].to(exact).t() @ rows.to(exact) * scale
