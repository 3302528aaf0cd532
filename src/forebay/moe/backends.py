"""Choice of a token dispatcher: by name, or the fastest that works here.

Input: a backend's name, the expert-parallel process group and the shapes of a layer. Output: a `TokenDispatcher` that the caller
closes.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from forebay.moe.deepep import DeepEpDispatcher
from forebay.moe.dispatch import LocalDispatcher, NcclDispatcher, TokenDispatcher
from forebay.moe.symmetric import DTYPES, SymmetricDispatcher

BACKENDS = ("auto", "nccl", "symmetric", "deepep")


def make_dispatcher(
    backend: str,
    group: dist.ProcessGroup | None,
    num_experts: int,
    *,
    tokens: int,
    hidden: int,
    slots_per_token: int,
    dtype: torch.dtype,
    capacity_factor: float | None = None,
) -> TokenDispatcher:
    """Make the dispatcher of a group. Collective: all ranks call it with the same arguments, and each closes the result.

    Args:
        backend: "nccl" (gloo on CPUs), "symmetric", "deepep", or "auto": symmetric where the group's GPUs can read each other's
            memory, else nccl.
        group: None, or a group of one rank, gives a `LocalDispatcher`.
        num_experts: E, over all ranks.
        tokens: T, the most that a rank sends at once.
        hidden, slots_per_token, dtype: H, K, and the rows' dtype.
        capacity_factor: for "symmetric": receive up to this times the even load without host synchronization; None for exact
            sizes, with one host synchronization a layer.

    Raises:
        ValueError: an unknown backend, a capacity factor below 1, experts that the ranks do not divide, shapes that the
            backend does not support.
        RuntimeError: the backend is not available here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"dispatch backend {backend!r} is unknown; valid are {', '.join(BACKENDS)}")
    if capacity_factor is not None and not capacity_factor >= 1:
        raise ValueError(
            f"capacity_factor must be at least 1 (an even load), or None for exact sizes; got {capacity_factor}"
        )
    if group is None or group.size() == 1:
        return LocalDispatcher(num_experts)
    if backend == "auto":
        fits = dtype in DTYPES and hidden * dtype.itemsize % 16 == 0
        backend = "symmetric" if fits and _peers_are_reachable(group) else "nccl"
    if backend == "symmetric":
        return SymmetricDispatcher(
            group,
            num_experts,
            tokens=tokens,
            hidden=hidden,
            slots_per_token=slots_per_token,
            dtype=dtype,
            capacity_factor=capacity_factor or 1.0,
            exact=capacity_factor is None,
        )
    if backend == "deepep":
        return DeepEpDispatcher(group, num_experts, hidden=hidden, dtype=dtype)
    return NcclDispatcher(group, num_experts)


def _peers_are_reachable(group: dist.ProcessGroup) -> bool:
    """Whether each rank has its own GPU of one host and can read the memory of the others. Collective."""
    if not torch.cuda.is_available() or "cuda:nccl" not in dist.get_backend_config(group):
        return False
    own = torch.cuda.current_device()
    seen: list[tuple[str, int] | None] = [None] * group.size()
    dist.all_gather_object(seen, (os.uname().nodename, own), group=group)
    hosts, devices = {s[0] for s in seen if s}, [s[1] for s in seen if s]
    fine = len(hosts) == 1 and len(set(devices)) == len(devices)
    fine = fine and all(d == own or torch.cuda.can_device_access_peer(own, d) for d in devices)
    answers: list[bool] = [False] * group.size()
    dist.all_gather_object(answers, fine, group=group)
    return all(answers)
