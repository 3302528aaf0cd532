"""Memory that compiled code hands from one buffer to the next: by hand, on random graphs, and in a walk."""

from __future__ import annotations

import random

import pytest

from forebay.estimate.buffer_reuse import reused
from forebay.estimate.types import AllocEvent, Mark

BIG, SMALL = 100, 1


def test_the_last_one_freed_hands_its_memory_on() -> None:
    """Scores (1), the kernel's sums (2), probabilities (4): as in Inductor's code of a GPT-OSS with eager attention."""
    events = [(1, BIG), (2, BIG), (3, SMALL), (2, 0), (1, 0), (4, BIG), (5, BIG), (6, BIG)]
    assert reused(events, {}, ()) == {1: 4, 2: 5}
    assert reused(events, {}, {1}) == {2: 4}  # an opaque operation's result, which the graph does not own
    assert reused(events, {}, {4, 5}) == {1: 6}  # opaque operations allocate theirs themselves


def test_memory_is_not_held_for_a_later_one_if_that_raises_the_peak() -> None:
    beside = [(1, BIG), (1, 0), (2, 3 * BIG), (2, 0), (3, BIG)]
    assert reused(beside, {}, ()) == {}
    assert reused([(4, BIG), (4, 0), *beside, (5, 3 * BIG)], {}, ()) == {4: 1, 1: 3, 2: 5}


def test_what_autograd_saved_is_handed_on_and_nothing_from_one_piece_to_the_next() -> None:
    events: list[AllocEvent] = [(7, 0), (1, BIG), (1, 0), (-1, Mark.EXPERTS_BEGIN), (2, BIG)]
    assert reused(events, {7: BIG}, ()) == {7: 1}
    assert reused(events[1:], {}, ()) == {}


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_have_the_same_peak(seed: int) -> None:
    rng = random.Random(seed)
    events: list[AllocEvent] = []
    live: list[int] = []
    sizes: dict[int, int] = {}
    for number in range(60):
        if live and rng.random() < 0.5:
            events.append((live.pop(rng.randrange(len(live))), 0))
        sizes[number] = rng.choice((1, 2, 4))
        live.append(number)
        events.append((number, sizes[number]))
    found = reused(events, {}, ())
    assert found and len(set(found.values())) == len(found)
    assert all(sizes[before] == sizes[after] for before, after in found.items())

    def peak(held: bool) -> int:
        level = most = 0
        for number, size in events:
            if size:
                level += 0 if held and number in found.values() else size
            elif not (held and number in found):
                level -= sizes[number]
            most = max(most, level)
        return most

    assert peak(held=True) == peak(held=False)
