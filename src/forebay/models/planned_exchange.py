"""An exchange on paper: how many rows a rank would receive, for a trace on fake tensors. Nothing travels.

In: the shapes of expert parallelism, and how uneven the routing is. Out: an `Exchange` of rank 0 whose operations exist as fake
implementations only. It owns nothing.

T tokens of each of P ranks choose K of E experts, evenly and independently: a token comes to a rank with the probability that one
of its K is among the rank's E / P. `skew` multiplies that for the rank that is looked at:

    S = T K skew, live slots        at most P T min(K, E / P)
    R = P T (1 - C(E - E/P, K) / C(E, K)) skew, rows                at most min(P T, S)

both rounded up as the exchanges with exact sizes do. With a capacity (`forebay.moe.dispatch.symmetric`) buffers have its sizes,
whatever arrives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.moe.dispatch.exchange import Exchange, Handle, aligned


class PlannedExchange(Exchange):
    """See the module docstring.

    Args:
        size, num_experts: P and E.
        tokens, slots_per_token: T and K.
        skew: load of this rank over an even one; at least 1.
        capacity_factor: of the symmetric exchange; 0 is exact sizes.

    Attributes:
        tokens: T.
        rows, slots: R and S, of buffers.
        live_rows, live_slots: those that really come; the same with exact sizes.

    Raises:
        ValueError: experts that the ranks do not divide, or a skew below 1.
    """

    def __init__(
        self,
        size: int,
        num_experts: int,
        tokens: int,
        slots_per_token: int,
        skew: float = 1.0,
        capacity_factor: float = 0.0,
    ):
        super().__init__(0, size, num_experts)
        if not skew >= 1:
            raise ValueError(f"a skew of {skew} is no load over an even one; valid is at least 1")
        self.tokens, everything = tokens, size * tokens
        most = everything * min(slots_per_token, self.local_experts)
        slots = min(most, math.ceil(tokens * slots_per_token * skew))
        missed = math.comb(num_experts - self.local_experts, slots_per_token) / math.comb(num_experts, slots_per_token)
        rows = min(everything, slots, math.ceil(everything * (1 - missed) * skew))
        self.live_rows, self.live_slots = aligned(rows), aligned(slots)
        self.rows, self.slots = self.live_rows, self.live_slots
        if capacity_factor:
            self.slots = aligned(min(most, math.ceil(capacity_factor * tokens * slots_per_token)))
            self.rows = min(everything, self.slots)

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """Not on paper."""
        raise self._unsent()

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        """Not on paper."""
        raise self._unsent()

    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Not on paper."""
        raise self._unsent()

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int:
        """S."""
        return self.slots

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int, Handle]:
        """R, and tensors of the sizes that the exchange over symmetric memory hands out; NCCL's differ by a few bytes."""
        sizes = (self.rows,), (tokens, self.size), (self.size + 1,)
        return self.rows, [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]

    def _unsent(self) -> RuntimeError:
        return RuntimeError("a planned exchange sends nothing: it is for traces on fake tensors")
