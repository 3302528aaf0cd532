"""Token dispatcher of a group over several nodes: a token crosses the network once for each node that has one of its experts.

Input and output are those of `forebay.moe.dispatch.TokenDispatcher`, in another order of rows and sums. N nodes have L ranks
each, and rank p = n L + l is number l of node n. Dispatch has two hops: across, to rank l of the other node, and inside that
node to the ranks of the experts. Combine goes the other way, and a node adds its ranks' rows before the sum crosses back:

    tokens [T, H] of (n, l)  --across-->  rows of (m, l), one a token and node  --inside-->  rows of (m, l')

A `HierarchicalDispatcher` owns a dispatcher of each hop, and their process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forebay.moe.dispatch import Handle, NcclDispatcher, TokenDispatcher

_ACROSS = 3  # tensors of an `NcclDispatcher`'s handle


class HierarchicalDispatcher(TokenDispatcher):
    """Dispatch and combine over N nodes of L ranks in two hops, with two host synchronizations a layer: one each.

    Received rows are ordered by l, then by node, then by token: other dispatchers order them by node first. A token's rows are
    summed inside each node, rounded to their dtype, and these sums are added up in the order of nodes. So in fp32 the results
    differ from those of `NcclDispatcher` by about 1e-7, and in bf16 by a rounding for each node; forward and backward of one
    dispatcher are the same bits every time. The handle is those of the hops, one after the other.

    Args:
        group: the expert-parallel process group. The constructor is collective in it.
        num_experts: E, a multiple of the group's size.
        per_node: L, the ranks of each node, which are neighbors in the group.
        make_inside: makes the dispatcher of a node's ranks, from their group, the E / N experts of the node, and the most rows
            that a rank of it passes on as a multiple of T.
        timeout: of the process groups that are made; None is torch's own.

    Raises:
        ValueError: nodes that do not divide the group, or ranks that do not divide the experts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        per_node: int,
        make_inside: Callable[[dist.ProcessGroup, int, int], TokenDispatcher],
        timeout: timedelta | None = None,
    ):
        super().__init__(group.rank(), group.size(), num_experts)
        if self.size % per_node:
            raise ValueError(f"nodes of {per_node} ranks do not divide a group of {self.size}")
        nodes, ranks = self.size // per_node, torch.arange(self.size, device="cpu").view(-1, per_node)
        self._groups = [_own_part(group, parts, timeout) for parts in (ranks.t().tolist(), ranks.tolist())]
        self._across = NcclDispatcher(self._groups[0], num_experts)
        self._inside = make_inside(self._groups[1], num_experts // nodes, nodes)
        self.about = f"inside a node {self._inside.about or type(self._inside).__name__}"

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        rows, node_ids, row_weights, across = self._across.dispatch(x, ids, weights)
        # Unused rows have no live id, so they stay here.
        rows, local_ids, row_weights, inside = self._inside.dispatch(rows, node_ids, row_weights)
        return rows, local_ids, row_weights, [*across, *inside]

    def spread(self, values: Tensor, handle: Sequence[Tensor], n_rows: int) -> Tensor:
        across, inside = handle[:_ACROSS], handle[_ACROSS:]
        return self._inside.spread(self._across.spread(values, across, _passed_on(inside)), inside, n_rows)

    def collect(
        self, rows: Tensor, narrow: Tensor | None, handle: Sequence[Tensor], n_tokens: int, init: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Sums inside each node come first; they are rounded to the rows' dtype."""
        across, inside = handle[:_ACROSS], handle[_ACROSS:]
        sums, thin = self._inside.collect(rows, narrow, inside, _passed_on(inside), None)
        return self._across.collect(sums, thin, across, n_tokens, init)

    def max_rows(self, handle: Sequence[Tensor], rows: int, slots_per_token: int) -> int | None:
        return self._inside.max_rows(handle[_ACROSS:], rows, slots_per_token)

    def fake_handle(self, tokens: int, slots_per_token: int, device: torch.device) -> tuple[int | None, Handle]:
        _, across = self._across.fake_handle(tokens, slots_per_token, device)
        passed_on: Any = torch.library.get_ctx().new_dynamic_size()
        rows, inside = self._inside.fake_handle(passed_on, slots_per_token, device)
        return rows, [*across, *inside]

    def late_flag(self) -> Tensor | None:
        return self._inside.late_flag()

    def check(self) -> None:
        self._inside.check()

    def close(self) -> None:
        """Close the dispatcher inside the node, and destroy the process groups that were split off. Collective.

        Others stay until the default group is destroyed. torch names them by their ranks and by how many groups there are: a
        later dispatcher's would have the same names, and find the addresses of these in the store.
        """
        self._inside.close()
        groups, self._groups = self._groups, []
        for group in groups:
            if dist.is_initialized() and _can_split(group):
                dist.destroy_process_group(group)


def _own_part(group: Any, parts: list[list[int]], timeout: timedelta | None) -> Any:
    """The process group of this rank's part of `group`, whose ranks `parts` divides. Collective in `group` alone."""
    # torch splits a communicator off that of all processes if they are bound to devices, and then all would have to call
    # `new_group`, even those of other expert groups.
    if _can_split(group):
        return dist.split_group(group, parts, timeout=timeout)
    ranks = dist.get_process_group_ranks(group)
    members = [ranks[p] for part in parts if group.rank() in part for p in part]
    backends = dist.get_backend_config(group)
    backend = None if backends == dist.get_backend_config() else backends
    return dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=True)


def _can_split(group: Any) -> bool:
    return dist.group.WORLD.bound_device_id is not None and "nccl" in dist.get_backend_config(group)  # type: ignore[union-attr]


def _passed_on(inside: Sequence[Tensor]) -> int:
    """Rows that this rank received from other nodes, unused ones included: as many as its places inside the node."""
    return inside[1].shape[0]
