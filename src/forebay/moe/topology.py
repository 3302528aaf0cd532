"""Where the ranks of a process group run: on which nodes, and which packages they have.

Input: a process group. Output: a `Topology`, the same on all ranks. A node is what one torchrun agent started: agents that
share a machine count as several nodes. Imports nothing of the dispatchers, which choose by it.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


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
        """Such as ``2 nodes of 8 ranks``, or ``2 nodes of 3 and 1 ranks``."""
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
