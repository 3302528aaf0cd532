"""The fast rows of a product have every pair of values, and the slow ones are the rest of it."""

from itertools import combinations, product

from tests.products import cover, first, pairwise


def test_every_pair_is_in_a_fast_row() -> None:
    options = (["a", "b", "c"], [1, 2], [True, False], ["x", "y", "z"])
    rows = pairwise(*options)
    assert [row.values for row in rows] == list(product(*options))
    fast = [row.values for row in rows if not row.marks]
    assert 9 <= len(fast) <= 12
    for (i, those), (j, others) in combinations(enumerate(options), 2):
        assert {(row[i], row[j]) for row in fast} == set(product(those, others))


def test_the_first_ones_are_fast() -> None:
    assert [(row.values, bool(row.marks)) for row in first(1, "ab")] == [(("a",), False), (("b",), True)]
    assert first(1, [(1, 2)])[0].values == (1, 2)


def test_every_value_is_on_the_diagonal() -> None:
    rows = cover("abc", [1, 2])
    assert len(rows) == 6 and [row.values for row in rows if not row.marks] == [("a", 1), ("b", 2), ("c", 1)]
