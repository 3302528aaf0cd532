"""The largest size that fits, and meshes in the order of their worth. Figures in, figures out.

In: values or meshes, and a function that says how much memory a value leaves. Out: a `Largest`, or a list in order. The function
is called as rarely as can be, for each call may be a trace; nothing is known here of what a value is, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tried:
    """A value that was looked at, and the bytes that it leaves of the budget; negative if it does not fit."""

    value: int
    headroom: int


@dataclass(frozen=True)
class Largest:
    """Of some values, in ascending order, the largest that fits.

    Attributes:
        found: it, or None if not even the first one fits.
        next: the value after it, which does not fit; None if `found` is the last.
        tried: all that were looked at, in that order.
    """

    found: Tried | None
    next: Tried | None
    tried: tuple[Tried, ...]


def largest(values: Sequence[int], headroom: Callable[[int], int], monotone: bool = True) -> Largest:
    """Search `values`.

    Whatever `headroom` does, `found` fits and `next` does not: both were looked at.

    Args:
        values: at least one, ascending.
        headroom: bytes that a value leaves.
        monotone: a larger value leaves less. Then few are looked at: twice as far each time until one does not fit, then between
            the two, where a straight line through them says or in the middle, in turn. Else from the largest down, until one
            fits.
    """
    tried: dict[int, int] = {}

    def left(place: int) -> int:
        if place not in tried:
            tried[place] = headroom(values[place])
        return tried[place]

    found = _bisect(len(values), left) if monotone else _down(len(values), left)
    seen = {place: Tried(values[place], room) for place, room in tried.items()}
    after = 0 if found is None else found + 1
    return Largest(None if found is None else seen[found], seen.get(after), tuple(seen.values()))


def _down(count: int, left: Callable[[int], int]) -> int | None:
    return next((place for place in reversed(range(count)) if left(place) >= 0), None)


def _bisect(count: int, left: Callable[[int], int]) -> int | None:
    if left(0) < 0:
        return None
    low, step = 0, 1
    while low < count - 1 and left(high := min(low + step, count - 1)) >= 0:
        low, step = high, 2 * step
    if low == count - 1:
        return low
    straight = True
    while high - low > 1:
        middle = (low + high) // 2
        if straight:
            middle = low + (high - low) * left(low) // (left(low) - left(high))
        middle = min(max(middle, low + 1), high - 1)
        low, high = (middle, high) if left(middle) >= 0 else (low, middle)
        straight = not straight
    return low


@dataclass(frozen=True)
class Mesh:
    """How GPUs share a model: `pp` pipeline ranks, each of `ep` x `fsdp` processes that share its layers, `ep` their experts."""

    pp: int
    ep: int
    fsdp: int

    def __str__(self) -> str:
        return f"PP {self.pp} x EP {self.ep} x FSDP {self.fsdp}"


@dataclass(frozen=True)
class Candidate:
    """A mesh that can be run.

    Attributes:
        peak: bytes of its fullest process.
        rank: the pipeline rank of that process.
        fits: whether that is within the budget; None without one.
        seconds: of a step, expected; None where nothing tells.
    """

    mesh: Mesh
    peak: int
    rank: int
    fits: bool | None
    seconds: float | None


def meshes(gpus: int) -> Iterator[Mesh]:
    """Every mesh of `gpus` GPUs, whatever a model says of it."""
    for pp in divisors(gpus):
        for ep in divisors(gpus // pp):
            yield Mesh(pp, ep, gpus // pp // ep)


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that fit first; among them the fastest; where time is not known, those with the lowest peak."""
    return sorted(
        candidates,
        key=lambda c: (
            c.fits is False,
            (0.0 if c.seconds is None else c.seconds) if c.fits is not False else 0.0,
            c.peak,
        ),
    )


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
