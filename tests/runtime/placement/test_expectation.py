"""Counts of chosen experts, against sums over all sets of experts."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import F64Array
from dflash_runtime.placement.expectation import (
    checked_shares,
    counts_by_owner,
    counts_in_prefixes,
    expected_longest,
)
from support.examples import examples


def sets_of(shares: F64Array, num_used: int) -> dict[tuple[int, ...], float]:
    """The probability of each set of experts. Shapes: shares [E]."""
    found = {}
    for chosen in combinations(range(len(shares)), num_used):
        inside = np.isin(np.arange(len(shares)), chosen)
        found[chosen] = float(np.where(inside, shares, 1.0 - shares).prod())
    total = sum(found.values())
    return {chosen: weight / total for chosen, weight in found.items()}


@st.composite
def layers(draw: st.DrawFn) -> tuple[F64Array, int]:
    num_experts = draw(st.integers(2, 6))
    num_used = draw(st.integers(1, num_experts))
    weights = draw(st.lists(st.floats(0.05, 5.0), min_size=num_experts, max_size=num_experts))
    shares = checked_shares(np.array([weights]), np.array([num_used]))
    return shares[0], num_used


@examples(60)
@given(layers(), st.data())
def test_the_slowest_owner(layer: tuple[F64Array, int], data: st.DataObject) -> None:
    shares, num_used = layer
    num_owners = data.draw(st.integers(1, 3))
    owners = np.array(data.draw(st.tuples(*[st.integers(0, num_owners - 1)] * len(shares))))
    times = np.array(
        data.draw(
            st.lists(
                st.lists(st.floats(0.0, 9.0), min_size=num_used + 1, max_size=num_used + 1),
                min_size=num_owners,
                max_size=num_owners,
            )
        )
    )
    expected = sum(
        weight * max(times[o, sum(owners[e] == o for e in chosen)] for o in range(num_owners))
        for chosen, weight in sets_of(shares, num_used).items()
    )
    counts = counts_by_owner(shares[None], owners[None], num_owners=num_owners, most=num_used)
    found = expected_longest(counts, times[:, None, :], np.array([num_used]))
    assert found[0] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@examples(60)
@given(layers())
def test_the_first_experts_of_a_layer(layer: tuple[F64Array, int]) -> None:
    shares, num_used = layer
    found = counts_in_prefixes(shares[None], np.array([num_used]))
    expected = np.zeros((len(shares) + 1, num_used + 1))
    for chosen, weight in sets_of(shares, num_used).items():
        for n in range(len(shares) + 1):
            expected[n, sum(e < n for e in chosen)] += weight
    np.testing.assert_allclose(found[:, 0, : num_used + 1], expected, atol=1e-12)


def test_layers_may_use_different_numbers_of_experts() -> None:
    shares = np.array([[0.5, 0.5, 0.0, 0.0], [0.75, 0.75, 0.75, 0.75]])
    found = counts_in_prefixes(shares, np.array([1, 3]))
    np.testing.assert_allclose(found[2, 0], [0.0, 1.0, 0.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(found[2, 1], [0.0, 0.5, 0.5, 0.0], atol=1e-12)


@examples(60)
@given(st.lists(st.floats(0.0, 1e6) | st.just(float("nan")), min_size=3, max_size=9))
def test_shares_get_the_right_sum(values: list[float]) -> None:
    found = checked_shares(np.array([values]), np.array([2]))
    assert (found >= 0.0).all()
    assert (found <= 1.0).all()
    if sum(value > 1e-3 for value in values) > 2:
        assert found.sum() == pytest.approx(2.0)


def test_shares_that_are_too_large_are_made_smaller() -> None:
    found = checked_shares(np.array([[1.0, 1.0], [9.0, 1.0]]), np.array([1, 1]))
    np.testing.assert_allclose(found, [[0.5, 0.5], [0.9, 0.1]])
