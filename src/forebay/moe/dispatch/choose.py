"""An exchange by name."""

from __future__ import annotations

import torch
import torch.distributed as dist

from forebay.moe.dispatch.exchange import Exchange
from forebay.moe.dispatch.local import LocalExchange

BACKENDS = ("auto", "nccl", "symmetric", "deepep")


def make_exchange(
    backend: str,
    group: dist.ProcessGroup | None,
    num_experts: int,
    *,
    tokens: int,
    hidden: int,
    slots_per_token: int,
    dtype: torch.dtype,
    capacity_factor: float = 2.0,
) -> Exchange:
    """The exchange of a group."""
    if backend not in BACKENDS:
        raise ValueError(f"dispatch backend {backend!r} is unknown; valid are {', '.join(BACKENDS)}")
    if group is None or group.size() == 1:
        return LocalExchange(num_experts)
    if backend == "symmetric":
        from forebay.moe.dispatch.symmetric import SymmetricExchange

        return SymmetricExchange(
            group,
            num_experts,
            tokens=tokens,
            hidden=hidden,
            slots_per_token=slots_per_token,
            dtype=dtype,
            capacity_factor=capacity_factor,
        )
    from forebay.moe.dispatch.nccl import NcclExchange

    return NcclExchange(group, num_experts)
