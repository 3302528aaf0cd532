"""What tests ask of pools and ledgers beyond their own interface, and lanes that are kept busy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def used_bytes(pool: Any) -> int:
    """Bytes of all slots that are out."""
    pool._sort_given()
    holes = sum(size for slab in pool._slabs for _, size in slab.holes)
    return pool.reserved_bytes - holes - sum(slot.length for slots in pool._returned.values() for slot in slots)


@dataclass(frozen=True)
class Holding:
    """One live ticket: `call` counts the calls of its region since the last quiet moment (the microbatch, usually)."""

    path: str
    call: int
    nbytes: int
    state: str


def holdings(ledger: Any) -> list[Holding]:
    """Every live ticket, largest first."""
    rows = [Holding(path, call, t.nbytes, t.state.value) for t, path, call in ledger._live()]
    return sorted(rows, key=lambda row: -row.nbytes)


def delayed(lane: Any, cycles: int) -> Callable[[], None]:
    """A function that keeps `lane` busy for `cycles` GPU clock ticks: tests use it to provoke races."""

    def sleep() -> None:
        if lane is not None:
            with torch.cuda.stream(lane):
                torch.cuda._sleep(cycles)

    return sleep
