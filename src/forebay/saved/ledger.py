"""The ledger: live bytes and tickets, by region and microbatch; what is held, and by whom.

In: each ticket a region call creates. Out: counts, computed on demand from weak references. The ledger owns nothing:
asking it never keeps memory alive, and a test that finds it empty has found that nothing leaked.
"""

import weakref
from collections import Counter
from dataclasses import dataclass

from forebay.stores.base import Ticket


@dataclass(frozen=True)
class Holding:
    """One live ticket: `call` counts the calls of its region since the last quiet moment (the microbatch, usually)."""

    path: str
    call: int
    nbytes: int
    state: str


class Ledger:
    """Weak record of the live tickets of one manager."""

    def __init__(self) -> None:
        self._owners: weakref.WeakKeyDictionary[Ticket, tuple[str, int]] = weakref.WeakKeyDictionary()

    def enter(self, ticket: Ticket, path: str, call: int) -> None:
        self._owners[ticket] = (path, call)

    @property
    def live_tickets(self) -> int:
        return len(self._owners)

    @property
    def live_bytes(self) -> int:
        """Bytes of the live tickets, wherever they are."""
        return sum(ticket.nbytes for ticket in self._owners)

    @property
    def device_bytes(self) -> int:
        """Bytes of the live tickets that have device memory now."""
        return sum(ticket.nbytes for ticket in self._owners if ticket.device_bytes is not None)

    def holdings(self) -> list[Holding]:
        """Every live ticket, largest first."""
        rows = [Holding(path, call, t.nbytes, t.state.value) for t, (path, call) in self._owners.items()]
        return sorted(rows, key=lambda row: -row.nbytes)

    def by_region(self) -> dict[str, int]:
        """Live bytes by region path."""
        totals: Counter[str] = Counter()
        for ticket, (path, _) in self._owners.items():
            totals[path] += ticket.nbytes
        return dict(totals)
