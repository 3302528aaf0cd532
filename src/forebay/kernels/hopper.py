"""Products of the experts on a Hopper GPU, by the optional package `quack-kernels` (`pip install forebay[hopper]`).

Its grouped GEMMs gather tokens while they load them and apply the activation where a product leaves the registers, so neither
gathered tokens nor the gradient of act are ever in memory. Input and output are as in `forebay.moe.experts_op`, with one
difference: h and dh [R, 2I] alternate gate and up columns although the weights have two halves. All results are the same bits
every time, nothing waits for the device, and rows from offs[-1] on are neither read nor written.

The first call of a kernel compiles it, which takes the host 5 to 10 s; the package keeps the result on disk.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.launch import cdiv, launch, next_power_of_2


class Tiles(NamedTuple):
    """How a product is cut into tiles; two warp groups share a tile, or take turns (`pingpong`)."""

    m: int
    n: int
    pingpong: bool
    cluster_m: int = 2
    cluster_n: int = 1


# The package's defaults.
GATED = ACTIVATION = INPUT = WEIGHT = Tiles(128, 192, True)


@functools.cache
def is_installed() -> bool:
    return importlib.util.find_spec("quack") is not None and importlib.util.find_spec("cutlass") is not None


def handles(x: Tensor, gate_up: Tensor) -> bool:
    """Whether these kernels take experts of stacks [E, 2I, H] and [E, H, I] for tokens of `x`'s dtype and device."""
    if x.device.type != "cuda" or not x.dtype == gate_up.dtype == torch.bfloat16 or not is_installed():
        return False
    widths = gate_up.shape[1] // 2, gate_up.shape[2]
    return torch.cuda.get_device_capability(x.device) == (9, 0) and all(w and w % 8 == 0 for w in widths)


class Rows(NamedTuple):
    """A routing as the kernels read it.

    tokens: [R] int32, the token of each row.
    bounds: [E + 1] int32, the first row of each expert, and the end.
    weights: [R] fp32, the routing weight of each row.
    """

    tokens: Tensor
    bounds: Tensor
    weights: Tensor


@triton.jit
def _rows_kernel(
    order_ptr, offs_ptr, weights_ptr, tokens_ptr, bounds_ptr, row_weights_ptr,
    n_rows, n_experts, slots_per_token,
    BLOCK: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < n_rows
    slot = tl.load(order_ptr + rows, mask=mask, other=0)
    tl.store(tokens_ptr + rows, slot // slots_per_token, mask=mask)
    tl.store(row_weights_ptr + rows, tl.load(weights_ptr + slot, mask=mask, other=0.0).to(tl.float32), mask=mask)
    if tl.program_id(0) == 0:
        at = tl.arange(0, BOUNDS)
        end = tl.load(offs_ptr + at - 1, mask=(at > 0) & (at <= n_experts), other=0)
        tl.store(bounds_ptr + at, end, mask=at <= n_experts)


def rows_of(order: Tensor, offs: Tensor, weights: Tensor) -> Rows:
    """The routing of `forebay.moe.routing.route` for weights [T, K]."""
    n, experts = order.shape[0], offs.shape[0]
    tokens, bounds = torch.empty_like(order), offs.new_empty(experts + 1)
    row_weights = torch.empty(n, dtype=torch.float32, device=order.device)
    launch(
        _rows_kernel, (cdiv(n, 1024),),
        order, offs, weights.contiguous(), tokens, bounds, row_weights, n, experts, weights.shape[1],
        BLOCK=1024, BOUNDS=next_power_of_2(experts + 1), num_warps=4,
    )  # fmt: skip
    return Rows(tokens, bounds, row_weights)


@triton.jit
def _slot_sums_kernel(partial_ptr, inverse_ptr, out_ptr, n_slots, width, BLOCK: tl.constexpr):
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(inverse_ptr + slots, mask=slots < n_slots, other=-1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(width):
        total += tl.load(partial_ptr + row * width + i, mask=row >= 0, other=0.0)
    tl.store(out_ptr + slots, total, mask=slots < n_slots)


def slot_sums(partial: Tensor, inverse: Tensor) -> Tensor:
    """[T*K] fp32: the sum of each slot's row of partial [R, *] fp32; 0 for a slot without a row."""
    out = torch.empty(inverse.numel(), dtype=torch.float32, device=inverse.device)
    launch(
        _slot_sums_kernel, (cdiv(out.numel(), 512),),
        partial, inverse, out, out.numel(), partial.shape[1], BLOCK=512, num_warps=4,
    )  # fmt: skip
    return out


def gated_product(
    x: Tensor, rows: Rows, gate_up: Tensor, tiles: Tiles = GATED, *, gather: bool = True
) -> tuple[Tensor, Tensor]:
    """(h [R, 2I] alternating, silu(gate) * up [R, I]) of h = gather(x) @ gate_up.T; x is the gathered rows if not `gather`."""
    from quack.gemm_act import gemm_gated

    n, width = rows.tokens.shape[0], gate_up.shape[1]
    h, glu = x.new_empty((n, width)), x.new_empty((n, width // 2))
    gemm_gated(
        x, gate_up, h, None, glu, None, "swiglu", *_cut(tiles),
        cu_seqlens_m=rows.bounds, A_idx=rows.tokens if gather else None, concat_layout=("B",),
    )  # fmt: skip
    return h, glu


def activation_gradient(
    dy: Tensor,
    rows: Rows,
    down: Tensor,
    h: Tensor,
    tiles: Tiles = ACTIVATION,
    *,
    gather: bool = True,
    over_h: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh [R, 2I] alternating, act [R, I], partial sums [R, *] of the routing weights' gradient) of da = gather(dy) @ down.

    act is w * silu(gate) * up. dh is h if `over_h`: a tile of h is read before the same tile is written.
    """
    from quack.gemm_dact import gemm_dgated

    n, inner = h.shape[0], down.shape[2]
    act = h.new_empty((n, inner))
    dh = h if over_h else torch.empty_like(h)
    partial = torch.empty((n, cdiv(inner, tiles.n)), dtype=torch.float32, device=h.device)
    gemm_dgated(
        dy, down.mT, dh, h, act, None, "swiglu", *_cut(tiles), colvec_scale=rows.weights, colvec_reduce=partial,
        cu_seqlens_m=rows.bounds, A_idx=rows.tokens if gather else None,
    )  # fmt: skip
    return dh, act, partial


def product(
    rows_in: Tensor, rows: Rows, matrices: Tensor, tiles: Tiles = INPUT, *, alternating: bool = False
) -> Tensor:
    """rows_in[rows of e] @ matrices[e], for matrices [E, M, N]. If `alternating`, the columns of rows_in do, and M has halves."""
    from quack.gemm import gemm

    out = rows_in.new_empty((rows_in.shape[0], matrices.shape[2]))
    gemm(
        rows_in, matrices.mT, out, None, None, *_cut(tiles), cu_seqlens_m=rows.bounds,
        concat_layout=("B",) if alternating else None,
    )  # fmt: skip
    return out


def weight_gradient(
    tokens: Tensor, rows: Rows, others: Tensor, tiles: Tiles = WEIGHT, *,
    tokens_first: bool, alternating: bool = False, gather: bool = True,
) -> Tensor:  # fmt: skip
    """gather(tokens).T @ others of each expert: [E, H, *] if `tokens_first`, else its transpose [E, *, H].

    Args:
        alternating: the columns of `others`, unlike the rows [E, *, H] of the result.
        gather: `tokens` are gathered here; else they are rows already.
    """
    from quack.gemm import gemm

    experts, h, width = rows.bounds.shape[0] - 1, tokens.shape[1], others.shape[1]
    out = tokens.new_empty((experts, h, width) if tokens_first else (experts, width, h))
    gemm(
        tokens.t(), others.t(), out if tokens_first else out.mT, None, None, *_cut(tiles), cu_seqlens_k=rows.bounds,
        A_idx=rows.tokens if gather else None, concat_layout=("out",) if alternating else None,
    )  # fmt: skip
    return out


def _cut(tiles: Tiles) -> tuple[Any, ...]:
    return tiles.m, tiles.n, tiles.cluster_m, tiles.cluster_n, tiles.pingpong


@triton.jit
def _halves_kernel(
    h_ptr, da_ptr, weights_ptr, n_live_ptr, dh_ptr, partial_ptr, N_INNER: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """BLOCK_R whole rows: gate and up alternate in h, and dh over it has them as halves."""
    n_live = tl.load(n_live_ptr)
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    if first >= n_live:
        return
    rows = first + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_I)[None, :]
    live = rows < n_live
    inside = live[:, None] & (cols < N_INNER)
    at = rows[:, None] * N_INNER + cols
    pairs = tl.load(h_ptr + at, mask=inside, other=0)
    da = tl.load(da_ptr + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weights_ptr + rows, mask=live, other=0.0)[:, None]
    gate = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
    up = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
    sig = tl.sigmoid(gate)
    silu = gate * sig
    glu = silu * up
    tl.store(partial_ptr + rows, tl.sum(da * glu, 1), mask=live)
    # Trap: dh's columns are elsewhere in the row than h's, so all of the row is read before any of it is written.
    tl.debug_barrier()
    dh_at = dh_ptr + rows[:, None] * (2 * N_INNER) + cols
    tl.store(dh_at, (w * da * up * (sig * (1.0 + gate * (1.0 - sig)))).to(tl.bfloat16), mask=inside)
    tl.store(dh_at + N_INNER, (w * da * silu).to(tl.bfloat16), mask=inside)
    tl.store(da_ptr + at, (glu * w).to(tl.bfloat16), mask=inside)


def activation_gradient_halves(da: Tensor, rows: Rows, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`activation_gradient` of a da [R, I] that exists, over which act is written. dh, over h, has its columns as halves."""
    n, inner = da.shape
    partial = torch.empty((n, 1), dtype=torch.float32, device=h.device)
    block_i = next_power_of_2(inner)
    block_r = max(1, 2048 // block_i)
    launch(
        _halves_kernel, (cdiv(n, block_r),),
        h.view(torch.int32), da, rows.weights, rows.bounds[-1:], h, partial,
        N_INNER=inner, BLOCK_R=block_r, BLOCK_I=block_i, num_warps=4,
    )  # fmt: skip
    return h, da, partial
