"""Peaks of events and of logs."""

from collections.abc import Sequence

from forebay.estimate.types import AllocEvent, Freed, Mark, Op


def peak_of(events: Sequence[AllocEvent | Op | Freed | Mark], begin: int = 0) -> int:
    """How far live bytes rise above their level before entry `begin`, from there on; of a part's events, or of a log."""
    sizes: dict[int, int] = {}
    base = peak = 0
    for at, entry in enumerate(events):
        if at == begin:
            base = peak = sum(sizes.values())
        if isinstance(entry, Op):
            sizes |= {m.number: m.size for m in entry.made}
        elif isinstance(entry, Freed) or (not isinstance(entry, Mark) and not entry[1]):
            sizes.pop(entry[0], None)
        elif not isinstance(entry, Mark) and entry[0] >= 0:
            sizes[entry[0]] = entry[1]
        peak = max(peak, sum(sizes.values()))
    return peak - base
