"""The token dispatcher of a trace: how many rows a rank would receive, without transfers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forebay.estimate.routing import EvenRouting
from forebay.moe.dispatch import Handle, TokenDispatcher, aligned


class PlannedDispatcher(TokenDispatcher):
    """The token dispatcher of rank 0 on fake tensors: how many rows the rank would receive. It transfers nothing.

    T tokens of each of P ranks choose K of E experts, evenly and independently. A token reaches a rank with the probability
    that one of its K experts is among the rank's E / P, p; `skew` multiplies that:

        S = T K skew, live slots                                    at most P T min(K, E / P)
        R = P T p skew, live rows       at most min(P T, S)         p = 1 - C(E - E/P, K) / C(E, K) without groups of experts

    both rounded up as the dispatchers with exact sizes do. With a capacity, buffers have the sizes of
    `forebay.moe.symmetric`, whatever arrives.

    Args:
        size, tokens: P and T.
        routing: has E and K.
        skew: load of this rank over an even one; at least 1.
        capacity_factor: of the symmetric dispatcher; 0 means exact sizes.

    Attributes:
        rows, slots: of buffers; R and S with exact sizes.
        live_rows, live_slots: R and S.

    Raises:
        ValueError: the ranks do not divide the experts, or the skew is below 1.
    """

    def __init__(self, size: int, routing: EvenRouting, tokens: int, skew: float = 1.0, capacity_factor: float = 0.0):
        super().__init__(0, size, routing.experts)
        if not skew >= 1:
            raise ValueError(f"a skew of {skew} is not a load over an even one; valid is at least 1")
        self.tokens, everything = tokens, size * tokens
        most = everything * min(routing.slots, self.local_experts)
        slots = math.ceil(min(most, tokens * routing.slots * skew))
        rows = math.ceil(min(everything, slots, everything * routing.reached(self.local_experts) * skew))
        self.live_rows, self.live_slots = aligned(rows), aligned(slots)
        self.rows, self.slots = self.live_rows, self.live_slots
        if capacity_factor:
            self.slots = aligned(min(most, math.ceil(capacity_factor * tokens * routing.slots)))
            self.rows = min(everything, self.slots)

    def dispatch(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a planned token dispatcher transfers nothing: it is for traces on fake tensors")

    spread = collect = dispatch

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int:
        return self.slots

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int, Handle]:
        """R, and tensors of the sizes that the symmetric dispatcher returns; NCCL's differ by a few bytes."""
        sizes = (self.rows,), (tokens, self.size), (self.size + 1,)
        return self.rows, [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]
