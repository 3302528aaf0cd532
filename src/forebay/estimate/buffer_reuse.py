"""Which buffers of a compiled graph take the memory of freed ones.

Inductor does not free a buffer if a later one of as many bytes can have its memory: the one that was freed last, if the graph's
peak is not higher for it (`torch._inductor.codegen.wrapper.AllocateLine`). Nothing else gets that memory meanwhile. What autograd
saved is the backward graph's to give away, too (`torch._functorch.config.donated_buffer`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from forebay.estimate.types import AllocEvent, Mark

_PIECES = frozenset({Mark.ALL_TO_ALL_BEGIN, Mark.ALL_TO_ALL_END, Mark.EXPERTS_BEGIN, Mark.EXPERTS_END})
"""Where a compiled piece ends: another graph begins after it."""


def reused(events: Sequence[AllocEvent], saved: Mapping[int, int], others: Collection[int]) -> dict[int, int]:
    """By each freed storage the one that takes its memory.

    Args:
        events: of a graph, or of the pieces of one.
        saved: bytes of storages that are there before.
        others: storages that are no buffers of the graph: what opaque operations make, and what its caller frees.
    """
    sizes = {**saved, **{n: size for n, size in events if n >= 0 and size}}
    levels = list(accumulate((size or -sizes.get(n, 0)) * (n >= 0) for n, size in events))
    most = max(levels, default=0)
    found: dict[int, int] = {}
    free: dict[int, list[tuple[int, int]]] = {}  # by bytes: storages and where they are freed, the last one last
    for at, (number, size) in enumerate(events):
        if number < 0:
            if size in _PIECES:
                free = {}
        elif not size:
            if number in sizes and number not in others:
                free.setdefault(sizes[number], []).append((number, at))
        elif free.get(size) and number not in others:
            before, since = free[size][-1]
            if size + max(levels[since:at]) <= most:
                found[before] = number
                free[size].pop()
                levels[since:at] = [level + size for level in levels[since:at]]
    return found
