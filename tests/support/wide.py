"""Tests of every combination of several settings, of which `make test` runs a few.

``@pytest.mark.wide(1)`` on a test with parameters keeps so many of its combinations that each value
of each parameter is there, ``wide(2)`` that each pair of values of any two parameters is. The rest
is marked `slow`. Parameters of fixtures count too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Mark combinations `slow` that need not be tried in every run."""
    tests: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        is_wide = item.get_closest_marker("wide") and not item.get_closest_marker("slow")
        if isinstance(item, pytest.Function) and is_wide:
            tests[item.nodeid.partition("[")[0]].append(item)
    for members in tests.values():
        marker = members[0].get_closest_marker("wide")
        assert marker is not None
        (strength,) = marker.args
        rows = [tuple(item.callspec._idlist) for item in members]  # by decorator or fixture
        kept = covering(rows, strength=strength)
        for number, item in enumerate(members):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def covering(rows: Sequence[tuple[str, ...]], *, strength: int) -> set[int]:
    """Indices of rows that have between them every combination of values that any `strength`
    columns have in `rows`.

    Each time the row with the most that is new, of these the one whose values were chosen least.
    """
    found = [
        {(columns, *(row[each] for each in columns)) for columns in _columns(row, strength)}
        for row in rows
    ]
    missing = set().union(*found)
    uses = Counter[tuple[int, str]]()
    kept: set[int] = set()
    while missing:
        best = min(
            range(len(rows)),
            key=lambda each: (
                -len(found[each] & missing),
                sum(uses[place] for place in enumerate(rows[each])),
            ),
        )
        kept.add(best)
        missing -= found[best]
        uses.update(enumerate(rows[best]))
    return kept


def _columns(row: tuple[str, ...], strength: int) -> Iterable[tuple[int, ...]]:
    return combinations(range(len(row)), min(strength, len(row)))
