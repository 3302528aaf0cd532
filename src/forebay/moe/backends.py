"""Which token dispatcher a process group gets: the one asked for, or the best for where its ranks run.

Input: a process group and the shapes of a layer. Output: a `TokenDispatcher`, which the caller closes. A node is what one
torchrun agent started: agents that share a machine count as several nodes.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from forebay.moe.deepep import DeepEpDispatcher
from forebay.moe.dispatch import LocalDispatcher, NcclDispatcher, TokenDispatcher, aligned
from forebay.moe.hierarchical import HierarchicalDispatcher
from forebay.moe.symmetric import DTYPES, SymmetricDispatcher

BACKENDS = ("auto", "nccl", "symmetric", "hierarchical", "deepep")


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
    timeout: timedelta | None = None,
) -> TokenDispatcher:
    """Make the dispatcher of a group. Collective: all ranks call it with the same arguments, and each closes the result.

    "auto" is "symmetric" where the group's GPUs can read each other's memory. Over several nodes of more than one rank it is
    "deepep" where that is installed and takes these rows, else "hierarchical". Otherwise it is "nccl".

    Args:
        backend: "nccl" (gloo on CPUs), "symmetric", "hierarchical", "deepep", or "auto".
        group: None, or a group of one rank, gives a `LocalDispatcher`.
        num_experts: E, over all ranks.
        tokens: T, the most that a rank sends at once.
        hidden, slots_per_token, dtype: H, K, and the rows' dtype.
        capacity_factor: for "symmetric": receive up to this times the even load without host synchronization; None for exact
            sizes, with one host synchronization a layer.
        timeout: how long the kernels of "symmetric" and the process groups that "hierarchical" makes wait for other ranks; None
            is their own.

    Raises:
        ValueError: an unknown backend, a capacity factor below 1, experts that the ranks do not divide, shapes that the
            backend does not support, "hierarchical" on nodes with different numbers of ranks.
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
    why, topology = "as asked for", None
    if backend == "auto":
        backend, why, topology = _choose(group, hidden, dtype)
    made: TokenDispatcher
    if backend == "symmetric":
        made = SymmetricDispatcher(
            group,
            num_experts,
            tokens=tokens,
            hidden=hidden,
            slots_per_token=slots_per_token,
            dtype=dtype,
            capacity_factor=capacity_factor,
            **({} if timeout is None else {"timeout_s": timeout.total_seconds()}),
        )
    elif backend == "deepep":
        made = DeepEpDispatcher(group, num_experts, hidden=hidden, dtype=dtype)
    elif backend == "hierarchical":
        topology = topology or topology_of(group)
        if topology.count == 1 or topology.per_node in (None, 1):
            raise ValueError(
                "hierarchical needs several nodes with the same number of ranks, 2 or more, which are neighbors; this group "
                f"has {topology}; valid are auto and nccl"
            )

        def inside(ranks: dist.ProcessGroup, experts: int, nodes: int) -> TokenDispatcher:
            return make_dispatcher(
                "auto",
                ranks,
                experts,
                tokens=aligned(nodes * tokens),
                hidden=hidden,
                slots_per_token=slots_per_token,
                dtype=dtype,
                timeout=timeout,
            )

        made = HierarchicalDispatcher(group, num_experts, topology.per_node, inside, timeout)
        why = f"{why}: {topology}, {made.about}" if why == "as asked for" else f"{why}, {made.about}"
    else:
        made = NcclDispatcher(group, num_experts)
    made.about = f"{backend} ({why})"
    return made


def _choose(group: dist.ProcessGroup, hidden: int, dtype: torch.dtype) -> tuple[str, str, Topology | None]:
    """The backend that "auto" is for a group, why, and the group's topology if that was asked for. Collective."""
    if symmetric_takes(hidden, dtype) and peers_are_reachable(group):
        return "symmetric", "its GPUs read each other's memory", None
    topology = topology_of(group)
    if topology.count == 1:
        why = (
            "its ranks cannot read each other's memory"
            if symmetric_takes(hidden, dtype)
            else f"symmetric takes no rows of {hidden} in {dtype}"
        )
        return "nccl", f"one node, {why}", topology
    deepep = topology.has_deepep and topology.per_node == 8  # DeepEP's own number of GPUs a host
    if deepep and dtype == torch.bfloat16 and not hidden % 8 and "nccl" in dist.get_backend_config(group):
        return "deepep", f"{topology}, and deep_ep is installed", topology
    if topology.per_node in (None, 1):
        return "nccl", str(topology), topology
    return "hierarchical", str(topology), topology


def symmetric_takes(hidden: int, dtype: torch.dtype) -> bool:
    """Whether the kernels of "symmetric" take rows of this width."""
    return dtype in DTYPES and hidden * dtype.itemsize % 16 == 0


def peers_are_reachable(group: dist.ProcessGroup) -> bool:
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


@dataclass(frozen=True)
class Topology:
    """The nodes of P ranks.

    Attributes:
        nodes: node of each rank, numbered from 0 as they first appear.
        has_deepep: whether all ranks find the package `deep_ep`.
    """

    nodes: tuple[int, ...]
    has_deepep: bool = False

    @property
    def count(self) -> int:
        """N, the number of nodes."""
        return len(set(self.nodes))

    @property
    def per_node(self) -> int | None:
        """L, if each node has the same number of ranks, and they are neighbors; else None."""
        per_node, rest = divmod(len(self.nodes), self.count)
        even = not rest and self.nodes == tuple(p // per_node for p in range(len(self.nodes)))
        return per_node if even else None

    def __str__(self) -> str:
        """For example ``2 nodes of 8 ranks``, or ``2 nodes of 3 and 1 ranks``."""
        sizes = [n for _, n in sorted(Counter(self.nodes).items())]
        each = str(sizes[0]) if len(set(sizes)) == 1 else " and ".join(map(str, sizes))
        scattered = "" if self.per_node or len(set(sizes)) > 1 else ", not neighbors"
        return f"{len(sizes)} node{'s' * (len(sizes) > 1)} of {each} ranks{scattered}"


def topology_of(group: dist.ProcessGroup) -> Topology:
    """The topology of a group. Collective."""
    seen: list[Any] = [None] * group.size()
    dist.all_gather_object(seen, (node_name(os.environ), importlib.util.find_spec("deep_ep") is not None), group=group)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in seen))}
    return Topology(tuple(numbers[name] for name, _ in seen), all(has for _, has in seen))


def node_name(environment: Mapping[str, str]) -> str:
    """The machine, and the agent of torchrun on it.

    torchrun numbers agents by GROUP_RANK. Where only LOCAL_WORLD_SIZE is set, all nodes have that many consecutive ranks.
    """
    agent = environment.get("GROUP_RANK")
    if agent is None and "RANK" in environment and "LOCAL_WORLD_SIZE" in environment:
        agent = str(int(environment["RANK"]) // int(environment["LOCAL_WORLD_SIZE"]))
    return f"{os.uname().nodename}, agent {agent or 0}"
