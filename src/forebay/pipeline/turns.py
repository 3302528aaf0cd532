"""In what order a forward and a backward compute when they run together, so that each hides the other's transfers.

In: which layers each of the two has, MoE or dense. Out: a list of turns, "F" or "B", one for each computation.

    forward   front, (dispatch) experts, (combine) front, ...           2 of an MoE layer, 1 of a dense one
    backward  experts', (dispatch') weights, front', (combine') ...     3 of an MoE layer, 1 of a dense one

A transfer, in brackets, lies before the computation that waits for it. Of a forward each needs a backward's computation in front
of it. A backward's dispatch' has the experts' weight gradients; its combine' needs a forward's. So a forward's computations go
where the backward needs them most: before a layer's first, then before its last, then between the first two; and evenly,
where there are fewer than places.

Worked example, both two MoE layers: F experts' weights F front' F experts' weights F front'.
"""

from __future__ import annotations

from collections.abc import Sequence


def turns(forward: Sequence[bool], backward: Sequence[bool]) -> list[str]:
    """ "F" and "B" in order; begins with a forward's computation, so that the backward's first transfer is hidden.

    Args:
        forward, backward: of each layer in the order in which it is computed, whether it has experts.
    """
    first: list[int] = []  # places in front of backward computations, by how much they need a forward's there
    before_last: list[int] = []
    between: list[int] = []
    count = 0
    for has_experts in backward:
        first.append(count)
        if has_experts:
            between.append(count + 1)
            before_last.append(count + 2)
        count += 3 if has_experts else 1
    left = sum(2 if has_experts else 1 for has_experts in forward)
    at = [0] * (count + 1)
    for places in (first, before_last, between):
        chosen = _spread(places, left)
        left -= len(chosen)
        for place in chosen:
            at[place] += 1
    at[count] += left  # a forward much longer than the backward: the rest runs alone
    order = ["F" * n + "B" for n in at[:count]]
    return list("".join(order) + "F" * at[count])


def _spread(places: Sequence[int], number: int) -> Sequence[int]:
    """`number` of the places, the first one always and the others evenly; all of them if there are no more."""
    if number >= len(places):
        return places
    return [places[i * len(places) // number] for i in range(number)]
