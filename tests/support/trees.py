"""Trees of draft tokens, as parents by token. Does not import the packages under test."""

from __future__ import annotations

from collections.abc import Sequence

from bench.verify_tree import PARENTS
from hypothesis import strategies as st

CHAIN = list(range(-1, 63))
BUSHY = PARENTS


@st.composite
def parent_lists(draw: st.DrawFn, *, smallest: int = 0, largest: int = 64) -> list[int]:
    """Parents of the tokens of deep and of bushy trees; -1 for a root."""
    follow, size = draw(st.integers(0, 3)), draw(st.integers(smallest, largest))
    return [
        node - 1 if draw(st.integers(1, 4)) <= follow else draw(st.integers(-1, node - 1))
        for node in range(size)
    ]


def way_to(parents: Sequence[int], node: int) -> list[int]:
    """The path from the root to a token."""
    way = []
    while node >= 0:
        way.append(node)
        node = parents[node]
    return way[::-1]


def ways_to_leaves(parents: Sequence[int]) -> list[list[int]]:
    """All paths from a root to a leaf."""
    leaves = set(range(len(parents))) - set(parents)
    return [way_to(parents, leaf) for leaf in sorted(leaves)]
