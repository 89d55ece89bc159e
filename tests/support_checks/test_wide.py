"""Which combinations of settings are tried in every run."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest

from support.wide import covering


def values(size: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz{"[:size]


SIZES = [(6, 3, 2), (2, 2, 2, 2, 3), (5,), (27, 2), (1, 4, 1)]


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_combination_of_so_many_columns_is_kept(
    sizes: tuple[int, ...], strength: int
) -> None:
    rows = [*product(*map(values, sizes))]
    kept = [rows[each] for each in covering(rows, strength=strength)]
    for columns in combinations(range(len(sizes)), min(strength, len(sizes))):
        seen = {tuple(row[each] for each in columns) for row in kept}
        assert seen == {*product(*(values(sizes[each]) for each in columns))}


def test_no_more_are_kept_than_the_longest_columns_need() -> None:
    rows = [*product("abcdef", "abc", "ab")]
    assert len(covering(rows, strength=1)) == 6
    assert 18 <= len(covering(rows, strength=2)) <= 20


def test_rows_that_lack_combinations_keep_what_they_have() -> None:
    rows = [("a", "a"), ("b", "b"), ("c", "b")]
    assert covering(rows, strength=1) == {0, 1, 2}


def test_values_take_turns() -> None:
    """Not the first of all other parameters beside each value of the longest."""
    rows = [*product("abcdef", "abc", "ab")]
    kept = [rows[each] for each in covering(rows, strength=1)]
    for column, most in ((1, 2), (2, 3)):
        assert max(Counter(row[column] for row in kept).values()) == most


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(3))
@pytest.mark.wide(1)
def test_the_rest_is_slow(request: pytest.FixtureRequest, first: int, second: int) -> None:
    """Four of these twelve are run beside this one's others."""
    siblings = [
        item
        for item in request.session.items
        if item.nodeid.startswith(request.node.nodeid.partition("[")[0])
    ]
    kept = [item for item in siblings if item.get_closest_marker("slow") is None]
    assert len(kept) == 4
    assert {item.callspec.params["second"] for item in kept} == {0, 1, 2}  # type: ignore[attr-defined]
