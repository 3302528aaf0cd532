"""Turns: every computation once, and transfers hidden wherever there is something to hide them behind."""

from itertools import product

import pytest

from forebay.pipeline.schedule import turns

LISTS = [[bool(b) for b in bits] for n in range(1, 5) for bits in product((0, 1), repeat=n)]


@pytest.mark.parametrize("forward", LISTS)
def test_everybody_computes_as_often_as_there_is_to_compute(forward: list[bool]) -> None:
    for backward in LISTS:
        order = turns(forward, backward)
        assert order.count("F") == sum(2 if e else 1 for e in forward)
        assert order.count("B") == sum(3 if e else 1 for e in backward)
        assert order[0] == "F"


@pytest.mark.parametrize(("forward", "backward"), [(n, m) for n in range(1, 7) for m in range(1, 7)])
def test_transfers_are_hidden(forward: int, backward: int) -> None:
    """Layers with experts only: between two forward computations there is a backward's, and before the first of each backward
    layer a forward's, whenever there are enough of them."""
    text = "".join(turns([True] * forward, [True] * backward))
    if 2 * forward <= 3 * backward:
        assert "FF" not in text
    if 2 * forward >= backward:
        places = [i for i, c in enumerate(text) if c == "B"][::3]
        assert all(text[i - 1] == "F" for i in places)


def test_the_example() -> None:
    assert "".join(turns([True] * 2, [True] * 2)) == "FBBFBFBBFB"
