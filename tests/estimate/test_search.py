"""Searches against brute force over functions that are known."""

from __future__ import annotations

import random

import pytest

from forebay.estimate.search import Candidate, MeshShape, divisors, largest, meshes, ranked


@pytest.mark.parametrize("seed", range(200))
def test_the_largest_of_a_falling_headroom(seed: int) -> None:
    """Lines, curves and steps: what brute force finds, in fewer looks than bisecting everything twice."""
    rng = random.Random(seed)
    values = sorted(rng.sample(range(1, 10_000), rng.randint(1, 600)))
    power, scale, budget = rng.choice([0.3, 1, 2, 3]), rng.randint(1, 100), rng.randint(-100, 10**7)
    step = rng.choice([1, 1, 50])

    def headroom(value: int) -> int:
        return budget - scale * int((value // step * step) ** power)

    found = largest(values, headroom)
    fitting = [v for v in values if headroom(v) >= 0]
    assert (found.found.value if found.found else None) == (fitting[-1] if fitting else None)
    rest = values[len(fitting) :]
    assert (found.next.value if found.next else None) == (rest[0] if rest else None)
    assert len({t.value for t in found.tried}) == len(found.tried) <= 4 * len(values).bit_length() + 2
    assert all(t.headroom == headroom(t.value) for t in found.tried)


@pytest.mark.parametrize("seed", range(100))
def test_what_is_found_holds_whatever_the_headroom_does(seed: int) -> None:
    """It fits, and its successor was looked at and does not, even of noise."""
    rng = random.Random(seed)
    rooms = [rng.randint(-5, 5) for _ in range(rng.randint(1, 60))]
    found = largest(range(len(rooms)), rooms.__getitem__)
    if found.found is None:
        assert rooms[0] < 0 and found.next is not None and found.next.value == 0
    else:
        at = found.found.value
        assert rooms[at] >= 0
        assert at == len(rooms) - 1 if found.next is None else (found.next.value == at + 1 and rooms[at + 1] < 0)


@pytest.mark.parametrize("seed", range(100))
def test_without_monotony_the_largest_of_all_is_found(seed: int) -> None:
    rng = random.Random(seed)
    rooms = [rng.randint(-5, 1) for _ in range(rng.randint(1, 30))]
    found = largest(range(len(rooms)), rooms.__getitem__, monotone=False)
    fitting = [n for n, room in enumerate(rooms) if room >= 0]
    assert (found.found.value if found.found else None) == (fitting[-1] if fitting else None)


@pytest.mark.parametrize("gpus", [1, 6, 7, 8, 24])
def test_meshes_are_all_there_are(gpus: int) -> None:
    every = {
        (pp, ep, fsdp)
        for pp in range(1, gpus + 1)
        for ep in range(1, gpus + 1)
        for fsdp in range(1, gpus + 1)
        if pp * ep * fsdp == gpus
    }
    found = list(meshes(gpus))
    assert {(m.pp, m.ep, m.fsdp) for m in found} == every and len(found) == len(every)
    assert [len(divisors(n)) for n in (1, 7, 12)] == [1, 2, 6]


def candidate(name: int, peak: int, fits: bool | None, seconds: float | None = None) -> Candidate:
    return Candidate(MeshShape(name, 1, 1), peak, 0, fits, seconds)


def order(*candidates: Candidate) -> list[int]:
    return [c.mesh.pp for c in ranked(candidates)]


def test_meshes_in_order() -> None:
    """What fits comes first, then what is fast, then what is small; of what does not fit, what is nearest to it."""
    assert order(candidate(1, 30, True), candidate(2, 50, False), candidate(3, 20, True)) == [3, 1, 2]
    assert order(candidate(1, 20, True, 2.0), candidate(2, 30, True, 1.0), candidate(3, 40, False, 0.1)) == [2, 1, 3]
    assert order(candidate(1, 60, False, 0.1), candidate(2, 50, False, 9.0)) == [2, 1]
    assert order(candidate(1, 30, None), candidate(2, 20, None)) == [2, 1]
