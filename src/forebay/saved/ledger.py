"""The ledger: live bytes and tickets, by region and microbatch; what is held, and by whom.

In: each ticket a region call creates. Out: counts, computed on demand from weak references. The ledger owns nothing:
asking it never keeps memory alive, and a test that finds it empty has found that nothing leaked.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from forebay.stores.base import Ticket

_SWEEP = 256  # entries of dead tickets that may gather, beside as many as are alive


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
        # A list and no weak dictionary: that would hash a ticket and call back when it dies, thousands of times a step.
        self._entries: list[tuple[weakref.ref[Ticket], str, int]] = []
        self._sweep_at = _SWEEP

    def enter(self, ticket: Ticket, path: str, call: int) -> None:
        self._entries.append((weakref.ref(ticket), path, call))
        if len(self._entries) >= self._sweep_at:
            self._entries = [entry for entry in self._entries if entry[0]() is not None]
            self._sweep_at = 2 * len(self._entries) + _SWEEP

    @property
    def live_tickets(self) -> int:
        return sum(1 for _ in self._live())

    @property
    def live_bytes(self) -> int:
        """Bytes of the live tickets, wherever they are."""
        return sum(ticket.nbytes for ticket, _, _ in self._live())

    @property
    def device_bytes(self) -> int:
        """Bytes of the live tickets that have device memory now."""
        return sum(ticket.nbytes for ticket, _, _ in self._live() if ticket.device_bytes is not None)

    def holdings(self) -> list[Holding]:
        """Every live ticket, largest first."""
        rows = [Holding(path, call, t.nbytes, t.state.value) for t, path, call in self._live()]
        return sorted(rows, key=lambda row: -row.nbytes)

    def by_region(self) -> dict[str, int]:
        """Live bytes by region path."""
        totals: Counter[str] = Counter()
        for ticket, path, _ in self._live():
            totals[path] += ticket.nbytes
        return dict(totals)

    def _live(self) -> Iterator[tuple[Ticket, str, int]]:
        for ref, path, call in self._entries:
            ticket = ref()
            if ticket is not None:
                yield ticket, path, call
