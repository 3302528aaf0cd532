"""The exchange over a process group's all-to-all: NCCL on GPUs, gloo on CPUs.

    ids -> who goes where (on the device) -> counts to all ranks -> ONE copy to the host -> rows, and slots beside them

The host has to know the splits, because the collective takes them as integers: that copy is the one host synchronisation of a
layer, forward and backward together. The handle carries the splits on, as a tensor on the CPU.

Handle, with S rows sent:

    sent [S] int32          token of each row sent, ordered by receiving rank, then by token
    places [T, P] int32     row in `sent` of token t for rank p; -1 if it does not go there
    splits [2P + 1] int64   on the CPU: rows sent to each rank, rows received from each, live slots received

Bytes on the wire, each way: 2H a row in bf16, and 4K + (2 or 4)K for its slots; at H = 2048, K = 8 that is 4096 + 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forebay.kernels.permute import combine_rows
from forebay.moe.dispatch.exchange import Exchange, Handle, aligned, host_int


class NcclExchange(Exchange):
    """Dispatch by `all_to_all_single` with exact splits.

    Args:
        group: the expert-parallel process group; NCCL or gloo. Ids of its ranks are group ranks.
        num_experts: E, a multiple of the group's size.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int):
        super().__init__(group.rank(), group.size(), num_experts)
        self._group: Any = group

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """See `Exchange.dispatch`."""
        goes, per_rank = who_goes(ids, self.num_experts, self.size)
        counts = torch.stack([goes.sum(0), per_rank], 1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        # The one host synchronisation of the layer.
        splits = torch.cat([counts[:, 0], received[:, 0], received[:, 1].sum(0, keepdim=True)]).cpu()
        out, back = self._splits(splits)
        sent, places = order_by_rank(goes, sum(out))
        handle = [sent, places, splits]
        rows = self.spread(x, handle, aligned(sum(back)))
        slots = torch.cat([ids.to(torch.int32), _as_int32(weights)], 1)
        row_slots = self.spread(slots, handle, rows.shape[0])
        k = ids.shape[1]
        local_ids = _local_ids(row_slots[:, :k], self.rank * self.local_experts, self.local_experts, sum(back))
        row_weights = _from_int32(row_slots[:, k:], weights.dtype)
        return rows, local_ids, row_weights, handle

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        """See `Exchange.spread`."""
        sent, _, splits = handle
        out, back = self._splits(splits)
        rows = values.new_empty((n_rows, values.shape[1]))
        dist.all_to_all_single(rows[: sum(back)], values[sent], back, out, group=self._group)
        return rows

    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Exchange.collect`."""
        wide = self._return(rows, handle, init)
        return wide, None if narrow is None else self._return(narrow, handle, None)

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int:
        """The exact number of live slots, rounded up to `ALIGNMENT`."""
        return aligned(host_int(handle[2][-1]))

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int | None, Handle]:
        """See `Exchange.fake_handle`; R and S are known on the device only."""
        sent = torch.empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int32, device=device)
        places = torch.empty((tokens, self.size), dtype=torch.int32, device=device)
        return None, [sent, places, torch.empty(2 * self.size + 1, dtype=torch.int64)]

    def _return(self, rows: Tensor, handle: Sequence[Tensor], init: Tensor | None) -> Tensor:
        _, places, splits = handle
        out, back = self._splits(splits)
        returned = rows.new_empty((sum(out), rows.shape[1]))
        dist.all_to_all_single(returned, rows[: sum(back)].contiguous(), out, back, group=self._group)
        return combine_rows(returned, places, init=init)

    def _splits(self, splits: Tensor) -> tuple[list[int], list[int]]:
        """Rows sent to each rank, and rows received from each."""
        numbers = splits.tolist()
        return numbers[: self.size], numbers[self.size : 2 * self.size]


def who_goes(ids: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """(goes [T, P] bool, slots [P] int64): which ranks each token goes to, and how many live slots each rank gets.

    K comparisons instead of a scatter: no atomics, no host synchronisation. Ids outside [0, E) go nowhere.
    """
    owner = torch.where((ids >= 0) & (ids < num_experts), ids // (num_experts // ranks), -1)
    at = owner.unsqueeze(2) == torch.arange(ranks, device=ids.device)
    return at.any(1), at.sum((0, 1))


def order_by_rank(goes: Tensor, n_sent: int) -> tuple[Tensor, Tensor]:
    """(sent [S] int32, places [T, P] int32) of the module docstring, on the device; S is known to the caller."""
    tokens, ranks = goes.shape
    flat = goes.t().reshape(-1)
    place = flat.cumsum(0, dtype=torch.int32) - 1
    token = torch.arange(tokens, device=goes.device, dtype=torch.int32).repeat(ranks)
    # Entries that go nowhere all write into one spare element behind the last.
    sent = token.new_empty(n_sent + 1).scatter_(0, torch.where(flat, place, n_sent).long(), token)[:n_sent]
    return sent, place.masked_fill(~flat, -1).view(ranks, tokens).t().contiguous()


def _local_ids(ids: Tensor, first: int, count: int, n_live: int) -> Tensor:
    local = ids - first
    local = local.masked_fill((local < 0) | (local >= count), -1)
    local[n_live:] = -1
    return local


def _as_int32(weights: Tensor) -> Tensor:
    """Weights [T, K] as int32 words beside the ids, bit for bit."""
    if weights.element_size() < 4:
        weights = weights.float()
    return weights.detach().contiguous().view(torch.int32)


def _from_int32(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_as_int32`: [R, K] in `dtype`, new memory."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return words.contiguous().view(wide).to(dtype)
