"""How a router spreads tokens over experts, ranks and nodes, if it chooses any experts alike.

Input: the Hugging Face configuration of a model. Output: an `EvenRouting`, with counts of rows. Plain data.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from forebay.train.parallel import experts_in


class EvenRouting(NamedTuple):
    """The experts of a layer, and those of a token; zeros for a dense model.

    Attributes:
        experts: of a layer; neighbors belong to one of `groups` of equal size.
        slots: experts of a token, all of them in `chosen` groups.
    """

    experts: int = 0
    slots: int = 0
    groups: int = 1
    chosen: int = 1

    @classmethod
    def of(cls, declared: Any) -> EvenRouting:
        text, experts = declared.get_text_config(), experts_in(declared)
        if not experts:
            return cls()
        groups, chosen = (getattr(text, name, None) or 1 for name in ("n_group", "topk_group"))
        limited = getattr(text, "topk_method", None) != "greedy" and experts % groups == 0 and chosen < groups
        return cls(experts, text.num_experts_per_tok, *((groups, chosen) if limited else ()))

    def reached(self, held: int) -> float:
        """The probability that one of a token's experts is among `held` neighbors: a part of a group, or whole groups."""
        size = self.experts // self.groups
        whole = max(1, held // size)
        own, room = min(held // whole, size), self.chosen * size
        found = 0.0
        for hit in range(1, min(whole, self.chosen) + 1):
            others = math.comb(self.groups - whole, self.chosen - hit)
            share = math.comb(whole, hit) * others / math.comb(self.groups, self.chosen)
            found += share * (1 - math.comb(room - hit * own, self.slots) / math.comb(room, self.slots))
        return found

    def between_nodes(self, ep: int, per_node: int, dispatch: str = "auto") -> float:
        """Rows of a token that leave its node, if `ep` neighbors share the experts.

        With 128 experts and 8 slots on 2 nodes of 8 that is 1.00, and 3.30 with "nccl".
        """
        nodes, uneven = divmod(ep, per_node)
        if uneven or per_node == 1 or dispatch in ("nccl", "symmetric"):
            # A group of processes may begin in the middle of a node, and then few share one: with 6 a node, 2 of a group of 4.
            elsewhere = ep - (per_node if not uneven else max(1, math.gcd(ep, per_node)))
            return elsewhere * self.reached(self.experts // ep)
        return (nodes - 1) * self.reached(self.experts // nodes)

    def crossing_share(self, ep: int, per_node: int, dispatch: str) -> float:
        """`between_nodes` as a share of that of "nccl"; 1 where experts are shared inside nodes, and for a dense model."""
        if ep <= per_node or not self.experts:
            return 1.0
        return self.between_nodes(ep, per_node, dispatch) / self.between_nodes(ep, per_node, "nccl")
