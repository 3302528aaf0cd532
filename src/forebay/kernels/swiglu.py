"""Gated activation of the experts' rows with the routing weight applied, forward and backward.

Input: h [R, 2I], the first grouped GEMM's output with rows sorted by expert; the routing weights by slot (slot = token * K +
choice); `order` [R], row -> slot; `offs` [E], the end row of each expert. Output: new tensors that the caller owns. The forward
can also write h to pages (`forebay.kernels.paging`), from which the backward reads it, with bitwise the same results (if I is no
multiple of 8, a GPU adds up the weights' gradients in another order); or write it in 8 bits an element
(`forebay.kernels.row_fp8`), to pages or to a tensor: 2.06I bytes more a row in the forward, and 1.94I fewer in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import INDICES, Backend, cdiv, column_block, launch, packed, use_triton
from forebay.kernels.paging import PageTable, check_table, restore, row_places, stash
from forebay.kernels.row_fp8 import (
    GROUP,
    converts_natively,
    decode_rows,
    encode_rows,
    encoded_width,
    finite_magnitude,
    from_e4m3,
    group_scale,
    pair_to_e4m3,
    to_e4m3,
)

# Elements of a program's tile in the [R, I] plane, at most 512 columns wide: 8 a thread and operand on 4 warps. Swept on an H200
# (1024 to 4096 elements, 128 to 512 columns, 4 and 8 warps): backward moves 4.03 TB/s at I = 768, 4.10 at 1408, 3.85 interleaved
# at 2880; with 4096 elements 3.9, 4.0, 2.4. Not below 1024: with less than a vector a thread, Triton may let two threads load one
# element, and the backward that writes over its inputs would race.
_TILE = 1024
_MAX_COLUMNS = 512
_WARPS = 4
# Size of an element in bytes -> integers of its size and of a pair's.
_INTEGERS: Mapping[int, tuple] = {
    2: (tl.int16, tl.int32, torch.int32),
    4: (tl.int32, tl.int64, torch.int64),
}


@dataclass(frozen=True)
class Glu:
    """A gated activation of gate and up, which are halves of a row or interleaved pairs.

        swiglu:          silu(gate) * up
        limited_swiglu:  silu(g) * u                        g = min(gate, limit), u = clamp(up, -limit, limit)
        clamped_swiglu:  g * sigmoid(alpha * g) * (u + 1)   with the same g and u

    Raises:
        ValueError: an unknown `kind`.
    """

    kind: str = "swiglu"
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if self.kind not in (kinds := ("swiglu", "limited_swiglu", "clamped_swiglu")):
            raise ValueError(f"activation must be {kinds[0]!r}, {kinds[1]!r} or {kinds[2]!r}, got {self.kind!r}")

    @property
    def clamps(self) -> bool:
        """Whether `limit` is read."""
        return self.kind != "swiglu"

    @property
    def factor(self) -> float:
        """The number by which g is multiplied inside the sigmoid."""
        return self.alpha if self.kind == "clamped_swiglu" else 1.0

    @property
    def shift(self) -> float:
        """The number that is added to u before it is multiplied."""
        return 1.0 if self.kind == "clamped_swiglu" else 0.0


@triton.jit
def _unpack(words, ELEMENT: tl.constexpr, HALF: tl.constexpr):
    """The two elements of each word in fp32, the one at the lower address first."""
    BITS: tl.constexpr = HALF.primitive_bitwidth
    low = words.to(HALF).to(ELEMENT, bitcast=True)
    high = (words >> BITS).to(HALF).to(ELEMENT, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _pack(low, high, ELEMENT: tl.constexpr, HALF: tl.constexpr, WORD: tl.constexpr):
    """The inverse of `_unpack`, rounding to ELEMENT."""
    BITS: tl.constexpr = HALF.primitive_bitwidth
    MASK: tl.constexpr = (1 << BITS) - 1
    low = low.to(ELEMENT).to(HALF, bitcast=True).to(WORD) & MASK
    return (high.to(ELEMENT).to(HALF, bitcast=True).to(WORD) << BITS) | low


@triton.jit
def _load_h(h_ptr, row_at, cols, mask, N_INNER: tl.constexpr, INTERLEAVED: tl.constexpr):
    """h as stored, from the rows that begin at `row_at`: pairs (twice), or gate and up. Zero where masked."""
    at = h_ptr + row_at + cols
    if INTERLEAVED:
        # A pair is one word of twice the size: whole vectors, and no shuffle between threads.
        pairs = tl.load(at, mask=mask, other=0)
        return pairs, pairs
    else:
        gate = tl.load(at, mask=mask, other=0.0)
        up = tl.load(at + N_INNER, mask=mask, other=0.0)
        return gate, up


@triton.jit
def _numbers(first, second, INTERLEAVED: tl.constexpr, ELEMENT: tl.constexpr, HALF: tl.constexpr):
    """Gate and up in fp32, from the result of `_load_h`."""
    if INTERLEAVED:
        return _unpack(first, ELEMENT, HALF)
    else:
        return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _add_bias(
    gate, up, bias_ptr, expert, cols, mask,
    N_INNER: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr, ELEMENT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Gate and up [rows, cols] with the bias."""
    if HAS_BIAS:
        if INTERLEAVED:
            words = tl.load(bias_ptr + expert * N_INNER + cols, mask=mask, other=0)
            gate_bias, up_bias = _unpack(words, ELEMENT, HALF)
        else:
            at = bias_ptr + expert * (2 * N_INNER) + cols
            gate_bias = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            up_bias = tl.load(at + N_INNER, mask=mask, other=0.0).to(tl.float32)
        gate += gate_bias
        up += up_bias
    return gate, up


@triton.jit
def _top(x, GROUP_COLS: tl.constexpr):
    """The largest `finite_magnitude` [rows, groups] of a tile's groups of columns."""
    return tl.max(tl.reshape(finite_magnitude(x), [x.shape[0], x.shape[1] // GROUP_COLS, GROUP_COLS]), 2)


@triton.jit
def _spread(scales, COLS: tl.constexpr):
    """Scales [rows, groups] for each of the columns."""
    wide = tl.broadcast_to(scales[:, :, None], [scales.shape[0], scales.shape[1], COLS // scales.shape[1]])
    return tl.reshape(wide, [scales.shape[0], COLS])


@triton.jit
def _group_places(start, bytes_at, N_INNER: tl.constexpr, GROUP_COLS: tl.constexpr, BLOCK_I: tl.constexpr):
    """Places of the scales [rows, groups] of a tile that begins at column `start`, and which groups exist. `bytes_at` [rows, 1]:
    where the compressed rows begin. Interleaved pairs, and the gates of halves, have the first scales of a row."""
    groups = start // GROUP_COLS + tl.arange(0, BLOCK_I // GROUP_COLS)[None, :]
    return bytes_at + 2 * N_INNER + groups, groups < N_INNER // GROUP_COLS


@triton.jit
def _save_compressed(
    words_ptr, bytes_ptr, words_at, bytes_at, start, gate, up, saved,
    N_INNER: tl.constexpr, INTERLEAVED: tl.constexpr, NATIVE: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Write a tile to compressed rows. `words_ptr`, `words_at` in pairs if interleaved, else in bytes; `saved` [rows, 1]."""
    GROUP_COLS: tl.constexpr = 16 if INTERLEAVED else 32
    cols = start + tl.arange(0, BLOCK_I)[None, :]
    place, exists = _group_places(start, bytes_at, N_INNER, GROUP_COLS, BLOCK_I)
    inside = saved & (cols < N_INNER)
    at = words_ptr + words_at + cols
    if INTERLEAVED:
        scales = group_scale(tl.maximum(_top(gate, GROUP_COLS), _top(up, GROUP_COLS)))
        spread = _spread(scales, BLOCK_I)
        tl.store(at, pair_to_e4m3(gate, up, spread, NATIVE), mask=inside)
    else:
        scales = group_scale(_top(gate, GROUP_COLS))
        up_scales = group_scale(_top(up, GROUP_COLS))
        tl.store(at, to_e4m3(gate, _spread(scales, BLOCK_I), NATIVE).to(tl.uint8), mask=inside)
        tl.store(at + N_INNER, to_e4m3(up, _spread(up_scales, BLOCK_I), NATIVE).to(tl.uint8), mask=inside)
        tl.store(bytes_ptr + place + N_INNER // GROUP_COLS, up_scales.to(tl.uint8), mask=saved & exists)
    tl.store(bytes_ptr + place, scales.to(tl.uint8), mask=saved & exists)


@triton.jit
def _load_compressed(
    words_ptr, bytes_ptr, words_at, bytes_at, start, has_h,
    N_INNER: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Gate and up in fp32 of a tile of compressed rows; see `_save_compressed`. Zero where a row has no h."""
    GROUP_COLS: tl.constexpr = 16 if INTERLEAVED else 32
    cols = start + tl.arange(0, BLOCK_I)[None, :]
    place, exists = _group_places(start, bytes_at, N_INNER, GROUP_COLS, BLOCK_I)
    inside = has_h & (cols < N_INNER)
    at = words_ptr + words_at + cols
    scales = _spread(tl.load(bytes_ptr + place, mask=has_h & exists, other=0).to(tl.int32), BLOCK_I)
    first = tl.load(at, mask=inside, other=0).to(tl.int32)
    if INTERLEAVED:
        return from_e4m3(first, scales), from_e4m3(first >> 8, scales)
    else:
        second = tl.load(at + N_INNER, mask=inside, other=0).to(tl.int32)
        place += N_INNER // GROUP_COLS
        up_scales = _spread(tl.load(bytes_ptr + place, mask=has_h & exists, other=0).to(tl.int32), BLOCK_I)
        return from_e4m3(first, scales), from_e4m3(second, up_scales)


@triton.jit
def _glu_parts(gate, up, alpha, limit, CLAMPED: tl.constexpr, SHIFT: tl.constexpr):
    """The silu-like factor, its derivative, the up factor, and the derivative of that."""
    if CLAMPED:
        # tl.minimum drops a NaN; torch.clamp keeps it.
        gate_passes = ~(gate > limit)
        up_passes = ~((up > limit) | (up < -limit))
        gate = tl.where(gate_passes, gate, limit)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + SHIFT
        sig = tl.sigmoid(alpha * gate)
        slope = sig * (1.0 + alpha * gate * (1.0 - sig))
        return gate * sig, tl.where(gate_passes, slope, 0.0), up, tl.where(up_passes, 1.0, 0.0)
    else:
        sig = tl.sigmoid(gate)
        return gate * sig, sig * (1.0 + gate * (1.0 - sig)), up, tl.full((), 1.0, tl.float32)


@triton.jit(do_not_specialize=["device_pages", "host_at"])
def _forward_kernel(
    h_ptr, weights_ptr, order_ptr, n_live_ptr, bias_ptr, row_expert_ptr, act_ptr, saved_ptr, bytes_ptr, pages_ptr,
    n_rows, alpha, limit, device_pages, host_at: tl.int64,
    N_INNER: tl.constexpr, CLAMPED: tl.constexpr, SHIFT: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    PAGED: tl.constexpr, COMPRESSED: tl.constexpr, NATIVE: tl.constexpr, PAGE_WORDS: tl.constexpr, SAVED_WORDS: tl.constexpr,
    WORDS_IN_16: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_R, BLOCK_I] tile of act. A row of h takes SAVED_WORDS where it is saved; `bytes_ptr` is `saved_ptr` in bytes."""
    # Scalar arguments are fp32 in eager Triton and fp64 under Inductor.
    alpha = tl.cast(alpha, tl.float32)
    limit = tl.cast(limit, tl.float32)
    n_live = tl.load(n_live_ptr)
    # A row's tiles run one after the other: compressed rows, whose ends fall inside of sectors of 32 bytes, would otherwise reach
    # the memory in pieces of those.
    row_block = tl.program_id(0) // tl.cdiv(N_INNER, BLOCK_I)
    start = (tl.program_id(0) - row_block * tl.cdiv(N_INNER, BLOCK_I)) * BLOCK_I
    first_row = row_block.to(tl.int64) * BLOCK_R  # R * 2I passes 2**31 for 1M rows of 1536: row offsets are 64-bit
    if first_row >= n_live:  # sentinels: with the capacity of two ranks half of all rows
        return
    rows = first_row + tl.arange(0, BLOCK_R)
    cols = start + tl.arange(0, BLOCK_I)[None, :]
    live = rows < n_live
    slot = tl.load(order_ptr + rows, mask=live, other=0)
    w = tl.load(weights_ptr + slot, mask=live, other=0.0).to(tl.float32)
    expert = rows * 0
    if HAS_BIAS:
        expert += tl.load(row_expert_ptr + rows, mask=live, other=0)
    inside = cols < N_INNER
    ROW_WORDS: tl.constexpr = N_INNER if INTERLEAVED else 2 * N_INNER
    mask = live[:, None] & inside
    first, second = _load_h(h_ptr, rows[:, None] * ROW_WORDS, cols, mask, N_INNER, INTERLEAVED)
    gate, up = _numbers(first, second, INTERLEAVED, act_ptr.dtype.element_ty, HALF)
    place, saved = rows * SAVED_WORDS, live
    if PAGED:
        place, has_page = row_places(
            pages_ptr, rows, rows < n_rows, device_pages, host_at, PAGE_WORDS, SAVED_WORDS, WORDS_IN_16,
        )  # fmt: skip
        saved = live & has_page
    if COMPRESSED:
        bytes_at = (place * 2 if INTERLEAVED else place)[:, None]
        _save_compressed(
            saved_ptr, bytes_ptr, place[:, None], bytes_at, start, gate, up, saved[:, None],
            N_INNER, INTERLEAVED, NATIVE, BLOCK_I,
        )  # fmt: skip
    elif PAGED:
        at = saved_ptr + place[:, None] + cols
        tl.store(at, first, mask=mask & saved[:, None])
        if not INTERLEAVED:
            tl.store(at + N_INNER, second, mask=mask & saved[:, None])
    gate, up = _add_bias(
        gate, up, bias_ptr, expert[:, None], cols, mask, N_INNER, INTERLEAVED, HAS_BIAS, act_ptr.dtype.element_ty, HALF,
    )  # fmt: skip
    silu, _, up, _ = _glu_parts(gate, up, alpha, limit, CLAMPED, SHIFT)
    act = (silu * up * w[:, None]).to(act_ptr.dtype.element_ty)
    tl.store(act_ptr + rows[:, None] * N_INNER + cols, act, mask=mask)


@triton.jit(do_not_specialize=["device_pages", "host_at"])
def _backward_kernel(
    h_ptr, bytes_ptr, da_ptr, weights_ptr, order_ptr, n_live_ptr, bias_ptr, row_expert_ptr, dh_ptr, act_ptr, dw_ptr, pages_ptr,
    n_rows, alpha, limit, device_pages, host_at: tl.int64,
    N_INNER: tl.constexpr, CLAMPED: tl.constexpr, SHIFT: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    PAGED: tl.constexpr, COMPRESSED: tl.constexpr, PAGE_WORDS: tl.constexpr, SAVED_WORDS: tl.constexpr,
    WORDS_IN_16: tl.constexpr, WRITE_DH: tl.constexpr,
    WRITE_ACT: tl.constexpr, WRITE_DW: tl.constexpr, HALF: tl.constexpr, WORD: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """BLOCK_R whole rows, so that dw needs neither a second pass nor an atomic.

    dh may be h and act may be da: a tile is read before the same tile is written. If PAGED, h_ptr is the arena; `bytes_ptr` is
    h_ptr in bytes.
    """
    alpha = tl.cast(alpha, tl.float32)
    limit = tl.cast(limit, tl.float32)
    n_live = tl.load(n_live_ptr)
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_R
    rows = first_row + tl.arange(0, BLOCK_R)
    live = rows < n_live
    # A sentinel's slot is read too: its dw is zero, and each slot belongs to exactly one row.
    slot = tl.load(order_ptr + rows, mask=rows < n_rows, other=0)
    if first_row >= n_live:
        if WRITE_DW:
            tl.store(dw_ptr + slot, tl.zeros((BLOCK_R,), tl.float32), mask=rows < n_rows)
        return
    w = tl.load(weights_ptr + slot, mask=live, other=0.0).to(tl.float32)[:, None]
    expert = rows * 0
    if HAS_BIAS:
        expert += tl.load(row_expert_ptr + rows, mask=live, other=0)
    row_live = live[:, None]
    row_at = rows[:, None] * SAVED_WORDS
    has_h = row_live
    if PAGED:
        place, has_page = row_places(
            pages_ptr, rows, rows < n_rows, device_pages, host_at, PAGE_WORDS, SAVED_WORDS, WORDS_IN_16,
        )  # fmt: skip
        row_at = place[:, None]
        has_h = has_h & has_page[:, None]
    dw = tl.zeros((BLOCK_R, BLOCK_I), tl.float32)
    for start in range(0, N_INNER, BLOCK_I):
        cols = start + tl.arange(0, BLOCK_I)[None, :]
        inside = row_live & (cols < N_INNER)
        at = rows[:, None] * N_INNER + cols
        da = tl.load(da_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if COMPRESSED:
            gate, up = _load_compressed(
                h_ptr, bytes_ptr, row_at, row_at * 2 if INTERLEAVED else row_at, start, has_h,
                N_INNER, INTERLEAVED, BLOCK_I,
            )  # fmt: skip
        else:
            first, second = _load_h(h_ptr, row_at, cols, inside & has_h, N_INNER, INTERLEAVED)
            gate, up = _numbers(first, second, INTERLEAVED, da_ptr.dtype.element_ty, HALF)
        gate, up = _add_bias(
            gate, up, bias_ptr, expert[:, None], cols, inside,
            N_INNER, INTERLEAVED, HAS_BIAS, da_ptr.dtype.element_ty, HALF,
        )  # fmt: skip
        silu, slope, up, up_slope = _glu_parts(gate, up, alpha, limit, CLAMPED, SHIFT)
        glu = silu * up
        if WRITE_DW:
            dw += da * glu
        if WRITE_DH:
            wda = w * da
            d_gate = wda * up * slope
            d_up = wda * silu * up_slope
            if INTERLEAVED:
                words = _pack(d_gate, d_up, da_ptr.dtype.element_ty, HALF, WORD)
                tl.store(dh_ptr + at, words, mask=inside)
            else:
                dh_at = dh_ptr + rows[:, None] * (2 * N_INNER) + cols
                tl.store(dh_at, d_gate.to(dh_ptr.dtype.element_ty), mask=inside)
                tl.store(dh_at + N_INNER, d_up.to(dh_ptr.dtype.element_ty), mask=inside)
        if WRITE_ACT:
            tl.store(act_ptr + at, (glu * w).to(act_ptr.dtype.element_ty), mask=inside)
    if WRITE_DW:
        tl.store(dw_ptr + slot, tl.sum(dw, 1), mask=rows < n_rows)


def swiglu_forward(
    h: Tensor,
    weights: Tensor,
    order: Tensor,
    offs: Tensor,
    glu: Glu,
    *,
    bias: Tensor | None = None,
    row_expert: Tensor | None = None,
    saved: PageTable | Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """act[r] = weights[order[r]] * glu(h[r] + bias[expert of r]): [R, I] in h's dtype; rows of sentinels are not written.

    The mathematics is in fp32 (fp64 for fp64 tensors) with one rounding to the output's dtype. In bf16 the kernel moves 6I bytes
    a row (R = 131072, I = 768: 0.60 GB, 0.15 ms at 4 TB/s), and 4I or 2.06I more to save h.

    Args:
        h: [R, 2I], any strides.
        weights: [N] (or [T, K] with T*K = N) by slot, N >= R, any floating dtype.
        order: [R] int32 or int64, row -> slot, each slot at most once.
        offs: [E] int32 on h's device, end row of each expert. Rows from offs[-1] <= R on are sentinels and are not read.
        bias: [E, 2I] in h's dtype, in the column layout of h.
        row_expert: [R] int32 or int64, the expert of each live row; needed with `bias`.
        saved: where h's live rows are also written, without the bias. Pages for rows of h (their `live` is offs[-1]; rows without
            a page are lost), or for compressed ones, of `encoded_width(2I)` bytes, or a contiguous tensor of those, uint8
            [R, encoded_width(2I)], from an even offset. See `compresses`.

    Raises:
        ValueError: shapes or devices that do not fit, bias without row_expert, or compressed rows that `compresses` rules out.
        TypeError: weights or h that are not floating point, bias in another dtype than h, indices that are not int32 or int64.
    """
    h = packed("h", h, h, [None, None])
    weights, order, offs, bias, row_expert = _prepare(h, h.shape, weights, order, offs, bias, row_expert)
    rows, inner = h.shape[0], h.shape[1] // 2
    compressed = saved is not None and _check_saved(saved, h.shape, h.dtype)
    if not use_triton(backend, h):
        if saved is not None:
            _save_reference(h, saved, compressed)
        live = _live(h, offs)
        silu, _, up, _ = _reference_parts(h, glu, bias, row_expert, live)
        w = weights[order.long()].to(silu.dtype).unsqueeze(1)
        return torch.where(live, silu * up * w, 0.0).to(h.dtype)
    act = torch.empty((rows, inner), dtype=h.dtype, device=h.device)
    if act.numel() == 0:
        return act
    block_r, block_i = _tile(inner)
    words, half, _ = _words(h.dtype, glu)
    place = _place(saved, h.dtype, inner, glu)
    launch(
        _forward_kernel, (cdiv(rows, block_r) * cdiv(inner, block_i),),
        words(h), weights, order, offs[-1:], words(bias), row_expert, act, place.words, place.bytes_,
        place.pages, rows, glu.factor, glu.limit, **place.sizes, NATIVE=compressed and converts_natively(h.device),
        N_INNER=inner, CLAMPED=glu.clamps, SHIFT=glu.shift, INTERLEAVED=glu.interleaved, HAS_BIAS=bias is not None,
        HALF=half, BLOCK_R=block_r, BLOCK_I=block_i, num_warps=_WARPS,
    )  # fmt: skip
    return act


def swiglu_backward(
    h: Tensor | PageTable,
    da: Tensor,
    weights: Tensor,
    order: Tensor,
    offs: Tensor,
    glu: Glu,
    *,
    bias: Tensor | None = None,
    row_expert: Tensor | None = None,
    need_dh: bool = True,
    need_act: bool = True,
    need_dw: bool = True,
    over_h: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dh [R, 2I] in h's dtype, act [R, I] in da's dtype, dw [N] fp32 by slot); None if not needed.

        dh[r] = w * da[r] * glu'(h[r])                  w = weights[order[r]], da = dL / d act[r]
        act[r], recomputed for the down projection's weight gradient
        dw[order[r]] = sum_i da[r, i] * glu[r, i]       the routing weight's gradient; zero for a slot without a row

    Rows of sentinels are not written, but dw is. In bf16 the kernel moves 12I bytes a row (R = 131072, I = 768: 1.21 GB, 0.30 ms
    at 4 TB/s).

    Args:
        h: [R, 2I], any strides, or where `swiglu_forward` wrote it: pages, of which rows without a page count as zeros, or
            compressed rows.
        da: [R, I], the gradient of act, in h's dtype. If contiguous, it is written over by act.
        over_h: write dh over h, which has to be a tensor [R, 2I]. Lowers the peak by 4RI bytes (bf16).
        others: as in `swiglu_forward`.

    Raises:
        ValueError: shapes or devices that do not fit, bias without row_expert, or an h to be written over that is not
            contiguous or starts at an odd element of its storage.
        TypeError: as in `swiglu_forward`, and da in another dtype than h.
    """
    if over_h:
        _check_written_over(h)
    source, shape, dtype = _source_of_h(h, da, backend)
    rows, inner = shape[0], shape[1] // 2
    if da.shape != (rows, inner):
        raise ValueError(f"da must be {(rows, inner)} for h {tuple(shape)}, got {tuple(da.shape)}")
    da = packed("da", da, da, [rows, inner], [dtype])
    weights, order, offs, bias, row_expert = _prepare(da, shape, weights, order, offs, bias, row_expert)
    new_dh = source if over_h and isinstance(source, Tensor) else torch.empty(shape, dtype=dtype, device=da.device)
    dh = new_dh if need_dh else None
    act = da if need_act else None
    every_slot_has_a_row = weights.shape[0] == rows
    new_dw = torch.empty if every_slot_has_a_row else torch.zeros
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    dw = new_dw(weights.shape[0], dtype=compute, device=da.device) if need_dw else None
    if not use_triton(backend, da):
        assert isinstance(source, Tensor)
        _backward_reference(source, da, weights, order, offs, glu, bias, row_expert, dh, act, dw)
        return dh, act, dw
    if rows == 0:
        return dh, act, dw
    block_r, block_i = _tile(inner)
    words, half, word = _words(dtype, glu)
    place = _place(source, dtype, inner, glu)
    launch(
        _backward_kernel, (cdiv(rows, block_r),),
        place.words, place.bytes_, da, weights, order, offs[-1:], words(bias), row_expert, words(dh), act, dw,
        place.pages, rows, glu.factor, glu.limit, **place.sizes, N_INNER=inner, CLAMPED=glu.clamps, SHIFT=glu.shift,
        INTERLEAVED=glu.interleaved, HAS_BIAS=bias is not None, WRITE_DH=need_dh, WRITE_ACT=need_act,
        WRITE_DW=need_dw, HALF=half, WORD=word, BLOCK_R=block_r, BLOCK_I=block_i, num_warps=_WARPS,
    )  # fmt: skip
    return dh, act, dw


def _check_written_over(h: Tensor | PageTable) -> None:
    if isinstance(h, PageTable) or h.dtype is torch.uint8:
        raise ValueError("h in pages or in 8 bits cannot be written over: over_h needs a tensor [R, 2I]")
    if not h.is_contiguous() or h.storage_offset() % 2:
        raise ValueError("h to be written over must be contiguous, from an even offset")


def _source_of_h(
    h: Tensor | PageTable, da: Tensor, backend: Backend
) -> tuple[Tensor | PageTable, Sequence[int], torch.dtype]:
    """Where the backward reads h, and h's shape and dtype. The plain form reads a tensor [R, 2I]."""
    if isinstance(h, Tensor) and h.dtype is not torch.uint8:
        return packed("h", h, da, [None, None]), h.shape, h.dtype
    shape = (h.rows if isinstance(h, PageTable) else h.shape[0], 2 * da.shape[1])
    compressed = _check_saved(h, shape, da.dtype)
    if use_triton(backend, da):
        return h, shape, da.dtype  # the kernel finds the rows
    if isinstance(h, PageTable):
        kind = torch.uint8 if compressed else da.dtype
        rows = torch.zeros((h.rows, h.row_bytes // kind.itemsize), dtype=kind, device=da.device)
        restore([h], [rows], backend="reference")
        h = rows
    return decode_rows(h, shape[1], backend="reference") if compressed else h, shape, da.dtype


def _tile(inner: int) -> tuple[int, int]:
    block_i = column_block(inner, _MAX_COLUMNS)
    return _TILE // block_i, block_i


def _words(dtype: torch.dtype, glu: Glu) -> tuple[Callable[[Tensor | None], Tensor | None], Any, Any]:
    """A function that views h, bias and dh as the kernel takes them, and the integers of an element's and a pair's size.

    Interleaved pairs become words of twice the size. A tensor that starts at an odd element of its storage has no such view and
    is copied, except dh, which is new or checked.
    """
    half, word, torch_word = _INTEGERS[dtype.itemsize]
    if not glu.interleaved:
        return (lambda t: t), half, word

    def words(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        # A single row is contiguous whatever its stride, which the view to other words would refuse.
        return (t.clone() if t.storage_offset() % 2 else t).view(-1).view(torch_word)

    return words, half, word


class _Place(NamedTuple):
    """Where the kernels read or write h: the memory in their words and in bytes, the table of pages, and the kernels' arguments
    about them."""

    words: Tensor | None
    bytes_: Tensor | None
    pages: Tensor | None
    sizes: dict[str, int | bool]


def _place(where: PageTable | Tensor | None, dtype: torch.dtype, inner: int, glu: Glu) -> _Place:
    """`where` is checked, and h is of `dtype`."""
    compressed = _is_compressed(where, inner)
    word = torch.int16 if compressed else _INTEGERS[dtype.itemsize][2]  # a pair
    if not glu.interleaved:
        word = torch.uint8 if compressed else dtype
    row_bytes = encoded_width(2 * inner) if compressed else 2 * inner * dtype.itemsize
    sizes = {"COMPRESSED": compressed, "SAVED_WORDS": row_bytes // word.itemsize, "PAGED": False}
    if not isinstance(where, PageTable):
        if where is not None and where.storage_offset() % 2:
            where = where.clone()
        words = None if where is None else where.view(-1).view(word)
        unpaged = {"device_pages": 0, "host_at": 0, "PAGE_WORDS": 0, "WORDS_IN_16": 0}
        return _Place(words, where if compressed else None, None, {**sizes, **unpaged})
    arena = where.arena
    paged = {
        "PAGED": True,
        "device_pages": arena.device_pages,
        "host_at": arena.host_at,
        "PAGE_WORDS": arena.page_bytes // word.itemsize,
        "WORDS_IN_16": 16 // word.itemsize,
    }
    return _Place(arena.device.view(word), arena.device if compressed else None, where.pages, {**sizes, **paged})


def compresses(dtype: torch.dtype, inner: int) -> bool:
    """Whether h [R, 2 * inner] of this dtype can be saved in 8 bits an element: groups may not cross from gates to ups."""
    return dtype is torch.bfloat16 and inner % GROUP == 0


def _is_compressed(where: PageTable | Tensor | None, inner: int) -> bool:
    if isinstance(where, PageTable):
        return where.row_bytes == encoded_width(2 * inner)
    return where is not None and where.dtype is torch.uint8


def _check_saved(where: PageTable | Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Check pages or compressed rows for h; returns whether they are compressed."""
    rows, row_bytes, small = shape[0], shape[1] * dtype.itemsize, encoded_width(shape[1])
    if isinstance(where, PageTable):
        check_table(where)
        if where.rows != rows or where.row_bytes not in (row_bytes, small):
            raise ValueError(
                f"pages for h {tuple(shape)} in {dtype} must be for {rows} rows of {row_bytes} bytes, or {small} in 8 bits, "
                f"got {where.rows} of {where.row_bytes}"
            )
    elif (
        where.dtype is not torch.uint8
        or where.shape != (rows, small)
        or not where.is_contiguous()
        or where.storage_offset() % 2  # pairs are words
    ):
        raise ValueError(
            f"compressed rows for h {tuple(shape)} must be contiguous uint8 {[rows, small]} from an even offset, got "
            f"{list(where.shape)} {where.dtype}, strides {where.stride()}, offset {where.storage_offset()}"
        )
    compressed = _is_compressed(where, shape[1] // 2)
    if compressed and not compresses(dtype, shape[1] // 2):
        raise ValueError(
            f"h {tuple(shape)} in {dtype} cannot be saved in 8 bits: that takes bf16, and I a multiple of 32"
        )
    return compressed


def _save_reference(h: Tensor, saved: PageTable | Tensor, compressed: bool) -> None:
    rows = encode_rows(h, backend="reference") if compressed else h
    if isinstance(saved, PageTable):
        stash([rows], [saved], backend="reference")
    else:
        saved.copy_(rows)


def _prepare(
    like: Tensor,
    shape: Sequence[int],
    weights: Tensor,
    order: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    row_expert: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Weights by slot and the other arguments, checked against h's shape, and `like`'s dtype and device; contiguous."""
    if len(shape) != 2 or shape[1] % 2:
        raise ValueError(f"h must be [R, 2I], got {tuple(shape)}")
    rows = shape[0]
    if weights.numel() < rows or order.shape != (rows,):
        raise ValueError(
            f"h {tuple(shape)} needs at least {rows} weights and order [{rows}], "
            f"got {tuple(weights.shape)} and {tuple(order.shape)}"
        )
    if bias is not None and row_expert is None:
        raise ValueError("bias needs row_expert, the expert of each row")
    return (
        packed("weights", weights.reshape(-1), like, [None]),
        packed("order", order, like, [rows], INDICES),
        packed("offs", offs, like, [None], INDICES),
        None if bias is None else packed("bias", bias, like, [None, shape[1]], [like.dtype]),
        None if row_expert is None else packed("row_expert", row_expert, like, [rows], INDICES),
    )


def _live(h: Tensor, offs: Tensor) -> Tensor:
    return (torch.arange(h.shape[0], device=h.device) < offs[-1]).unsqueeze(1)


def _halves(t: Tensor, glu: Glu) -> tuple[Tensor, Tensor]:
    """Views of gate and up in a [R, 2I] tensor."""
    if glu.interleaved:
        return t[:, ::2], t[:, 1::2]
    half = t.shape[1] // 2
    return t[:, :half], t[:, half:]


def _reference_parts(
    h: Tensor, glu: Glu, bias: Tensor | None, row_expert: Tensor | None, live: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The plain PyTorch form of `_gate_up` and `_glu_parts`."""
    h = torch.where(live, h.to(torch.float64 if h.dtype == torch.float64 else torch.float32), 0.0)
    if bias is not None and row_expert is not None:
        # A sentinel has no expert: its index is clamped, and its row is masked.
        h = h + bias[row_expert.long().clamp(0, bias.shape[0] - 1)].to(h.dtype)
    gate, up = _halves(h, glu)
    if not glu.clamps:
        sig = torch.sigmoid(gate)
        return gate * sig, sig * (1 + gate * (1 - sig)), up, torch.ones_like(up)
    gate_passes, up_passes = ~(gate > glu.limit), ~(up.abs() > glu.limit)
    gate = gate.clamp(max=glu.limit)
    sig = torch.sigmoid(glu.factor * gate)
    slope = sig * (1 + glu.factor * gate * (1 - sig)) * gate_passes
    return gate * sig, slope, up.clamp(-glu.limit, glu.limit) + glu.shift, up_passes.to(h.dtype)


def _backward_reference(
    h: Tensor,
    da: Tensor,
    weights: Tensor,
    order: Tensor,
    offs: Tensor,
    glu: Glu,
    bias: Tensor | None,
    row_expert: Tensor | None,
    dh: Tensor | None,
    act: Tensor | None,
    dw: Tensor | None,
) -> None:
    """The plain PyTorch form of `_backward_kernel`."""
    live = _live(h, offs)
    silu, slope, up, up_slope = _reference_parts(h, glu, bias, row_expert, live)
    w = weights[order.long()].to(silu.dtype).unsqueeze(1)
    da = torch.where(live, da.to(silu.dtype), 0.0)
    if dw is not None:
        dw[order.long()] = torch.where(live, da * silu * up, 0.0).sum(1)
    if act is not None:
        act.copy_(torch.where(live, silu * up * w, 0.0))
    if dh is not None:
        gate_out, up_out = _halves(dh, glu)
        d_up = torch.where(live, w * da * silu * up_slope, 0.0)
        gate_out.copy_(torch.where(live, w * da * up * slope, 0.0))
        up_out.copy_(d_up)
