"""Sorts routed slots by expert on the device, without a host synchronization.

Input: `ids` [T, K], the experts that a router chose. Output: a `Routing` of int32 tensors that the caller owns. A slot is a
position in ids.view(-1) (token * K + choice); a row is a position after the stable sort by expert. Ids outside [0, E) are
sentinels: no expert computes them, and their rows come last. All shapes are known beforehand and there are no atomics, so
everything is deterministic and can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forebay.kernels.permute import check_integers, sort_slots


class Routing(NamedTuple):
    """Slots sorted by expert.

    order: [R] int32, row -> slot, sentinels' slots last; a permutation if R = T*K.
    inverse: [T, K] int32, slot -> row; -1 for a sentinel.
    offs: [E] int32, end row of each expert; offs[-1] is the number of live rows.
    """

    order: Tensor
    inverse: Tensor
    offs: Tensor


def check_tensors(**given: object) -> None:
    """TypeError that names the first argument that is no tensor."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def check_routed(x: Tensor, ids: Tensor, weights: Tensor) -> None:
    """TypeError unless x and weights are floating point and ids integers, ValueError unless x is [T, H], and ids and weights are
    [T, K]."""
    check_tensors(x=x, ids=ids, weights=weights)
    for name, tensor in (("x", x), ("weights", weights)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}")
    check_integers(ids)
    if x.dim() != 2 or ids.dim() != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"x [T, H], ids and weights [T, K] do not fit: {tuple(x.shape)}, {tuple(ids.shape)}, {tuple(weights.shape)}"
        )


def route(ids: Tensor, num_experts: int, max_rows: int | None = None) -> Routing:
    """Sort the slots of `ids` [T, K] (any integer dtype) by expert.

    Args:
        max_rows: keep R = min(T*K, max_rows) rows, where most slots are sentinels as under expert parallelism. Live rows beyond
            it are dropped without a message: the caller checks the bound.

    Raises:
        ValueError: ids not [T, K], no experts, or too many slots for int32 row numbers.
    """
    if ids.dim() != 2 or num_experts < 1:
        raise ValueError(f"ids must be [T, K] and experts >= 1: {tuple(ids.shape)}, {num_experts}")
    if ids.numel() >= 2**31 - 2**10:
        raise ValueError(f"{ids.numel()} slots do not fit int32 row numbers")
    order, inverse, offs = sort_slots(ids, num_experts)
    if max_rows is None or max_rows >= order.shape[0]:
        return Routing(order, inverse, offs)
    # Cloned: a view would keep all T*K entries alive for backward.
    return Routing(order[:max_rows].clone(), inverse.masked_fill_(inverse >= max_rows, -1), offs.clamp_(max=max_rows))


def row_experts(offs: Tensor, n_rows: int) -> Tensor:
    """[R] int32: the expert of each row, E for the sentinels from offs[-1] on."""
    rows = torch.arange(n_rows, device=offs.device, dtype=torch.int32)
    return torch.searchsorted(offs, rows, right=True, out_int32=True)


def slot_experts(routing: Routing, row_expert: Tensor, num_experts: int) -> Tensor:
    """[T, K] int64: the expert of each slot, `num_experts` for a sentinel."""
    if row_expert.numel() == 0:
        return torch.full_like(routing.inverse, num_experts, dtype=torch.int64)
    experts = row_expert[routing.inverse.long().clamp(min=0)].long()
    return experts.masked_fill(routing.inverse < 0, num_experts)


def routing_map(weights: Tensor, slot_expert: Tensor, num_experts: int) -> Tensor:
    """[T, E] fp32 (fp64 for fp64): the sum of token t's weights for expert e, in the order of k.

    K comparisons instead of a scatter: no atomics, and a token that names an expert twice keeps both weights.
    """
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    experts = torch.arange(num_experts, device=weights.device)
    result = torch.zeros((weights.shape[0], num_experts), dtype=dtype, device=weights.device)
    for k in range(weights.shape[1]):
        chosen = slot_expert[:, k, None] == experts
        result += torch.where(chosen, weights[:, k, None].to(dtype), 0.0)
    return result
