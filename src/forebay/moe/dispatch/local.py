"""The exchange of one rank: nothing travels, and nothing is copied.

Rows are the tokens themselves: what the methods return are their arguments. An operation of torch.library may not do that, so
`forebay.moe.dispatch.ops` goes around its operations for one rank; callers need not ask how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.moe.dispatch.exchange import Exchange, Handle


class LocalExchange(Exchange):
    """One rank with all E experts. Its handles are empty lists."""

    def __init__(self, num_experts: int):
        super().__init__(0, 1, num_experts)

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """The arguments."""
        return x, ids, weights, []

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        """The values."""
        return values

    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The rows, on top of `init`."""
        return rows if init is None else init + rows, narrow

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int | None:
        """None: every slot is this rank's."""
        return None

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int | None, Handle]:
        """As many rows as tokens."""
        return tokens, []

    def watch(self, handle: Handle) -> None:
        """There is nothing to watch."""
