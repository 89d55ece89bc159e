"""Compiled choosing and grouping of pairs: what numpy makes of the same, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.batch import HostHidden, Pairs, RoutedBatch, slice_tokens
from dflash_protocol.ids import AnyArray, F32Array, I32Array, Phase
from dflash_protocol.ring import compiled as ring_native
from support.examples import examples

Choose = tuple[I32Array, F32Array, AnyArray]


@st.composite
def choices(draw: st.DrawFn) -> Choose:
    """Ids and weights [T, K], of which some experts [E] are wanted."""
    num_tokens, num_used = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    num_experts = draw(st.integers(num_used, 9))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    order = random.random((num_tokens, num_experts)).argsort(axis=1)
    weights = random.random((num_tokens, num_used), dtype=np.float32)
    return order[:, :num_used].astype(np.int32), weights, random.random(num_experts) < 0.5


@examples(150)
@given(choices())
def test_chosen_pairs_are_those_of_wanted_experts_in_order(choice: Choose) -> None:
    ids, weights, is_wanted = choice
    num_used = ids.shape[1]
    tokens, chosen_ids = np.full((2, ids.size), -7, np.int32)
    chosen_weights = np.empty(ids.size, np.float32)
    counts = np.full(is_wanted.size, 5, np.int64)
    found = ring_native.kernels().choose_pairs(
        ids.reshape(-1),
        weights.reshape(-1),
        num_used,
        is_wanted.view(np.uint8),
        tokens,
        chosen_ids,
        chosen_weights,
        counts,
    )
    places = np.flatnonzero(is_wanted[ids])
    num_pairs = found >> ring_native.COUNT_BITS
    assert num_pairs == places.size
    np.testing.assert_array_equal(tokens[:num_pairs], places // num_used)
    np.testing.assert_array_equal(chosen_ids[:num_pairs], ids.reshape(-1)[places])
    np.testing.assert_array_equal(chosen_weights[:num_pairs], weights.reshape(-1)[places])
    assert found & (1 << 32) - 1 == is_wanted[ids].all(axis=1).sum()
    np.testing.assert_array_equal(
        counts, 5 + np.bincount(ids.reshape(-1), minlength=is_wanted.size)
    )


@pytest.mark.parametrize("bad", [-1, 3, 1 << 30, -(1 << 31)])
def test_an_expert_that_there_is_not_is_refused(bad: int) -> None:
    ids = np.array([0, 1, bad, 2], np.int32)
    out = np.empty((2, 4), np.int32)
    choose = ring_native.kernels().choose_pairs
    some, weights = np.ones(3, np.uint8), np.ones(4, np.float32)
    given = ids, weights, 2, some, *out, np.empty(4, np.float32)
    assert choose(*given, np.zeros(3, np.int64)) == ring_native.OUT_OF_RANGE


def test_arrays_that_are_too_short_are_not_written_to() -> None:
    kernels = ring_native.kernels()
    four, three = np.zeros(4, np.int32), np.zeros(3, np.int32)
    weights, shorter = np.zeros(4, np.float32), np.zeros(3, np.float32)
    some, counts = np.ones(3, np.uint8), np.zeros(3, np.int64)
    for bad in (
        (four, shorter, 2, some, four, four, weights, counts),
        (four, weights, 3, some, four, four, weights, counts),
        (four, weights, 0, some, four, four, weights, counts),
        (four, weights, 2, some, three, four, weights, counts),
        (four, weights, 2, some, four, three, weights, counts),
        (four, weights, 2, some, four, four, shorter, counts),
        (four, weights, 2, some, four, four, weights, counts[:2]),
    ):
        assert kernels.choose_pairs(*bad) == ring_native.BAD_ARRAYS
    good: list[Any] = [four, four, weights, 5, np.zeros((4, 5), np.int32), weights, four.copy()]
    for place, bad_one in (
        (1, three), (2, shorter), (4, np.zeros((3, 5), np.int32)), (4, np.zeros((4, 4), np.int32)),
        (5, shorter),
    ):  # fmt: skip
        given_ = [*good]
        given_[place] = bad_one
        assert kernels.group_pairs(*given_) == ring_native.BAD_ARRAYS
    assert kernels.group_pairs(*good) >= 0


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """With compiled code, and without."""
    ring_native.kernels()
    assert ring_native.if_compiled() is not None
    with pytest.MonkeyPatch.context() as patch:
        fast = make()
        patch.setattr(ring_native, "if_compiled", lambda: None)
        return fast, make()


@examples(150)
@given(
    choices(),
    st.integers(1, 12),
    st.sampled_from([1, 1000, 4000, 1 << 20]),
    st.sampled_from([0.0, 0.75, 1.0]),
)
def test_batches_are_the_same_whatever_groups_them(
    choice: Choose, max_tokens: int, factor: int, share: float
) -> None:
    """Also with ids that there would be no counts for, and cut into pieces afterwards."""
    ids, weights, is_wanted = choice
    num_tokens = ids.shape[0]
    places = np.flatnonzero(is_wanted[ids])
    tokens = (places // ids.shape[1]).astype(np.int32)
    pairs = Pairs(tokens, ids.reshape(-1)[places] * factor, weights.reshape(-1)[places])
    numbers = np.repeat(np.arange(num_tokens, dtype=np.float32)[:, None], 4, axis=1)
    whole_from = math.ceil(share * num_tokens)

    def make() -> list[AnyArray]:
        batch, used = RoutedBatch.group_used(
            Phase.PREFILL, HostHidden(numbers), pairs, whole_from=whole_from
        )
        expected = np.unique(tokens)
        assert (used is None) == (expected.size >= whole_from)
        if used is None:
            expected = np.arange(num_tokens, dtype=np.int32)
        else:
            assert used.dtype == np.int32
            np.testing.assert_array_equal(used, expected)
        np.testing.assert_array_equal(batch.hidden[:, 0], expected)
        pieces: list[Any] = [batch, *(piece for _, piece in slice_tokens(batch, max_tokens))]
        for each in pieces:
            each.check(hidden_size=4, num_experts=10 * factor)
        return [
            array
            for each in pieces
            for array in (
                each.hidden,
                each.expert_ids,
                each.group_starts,
                each.token_indices,
                each.weights,
            )
        ]

    for one, other in zip(*both(make), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


@pytest.mark.parametrize("tokens", [[1, 0], [0, 2, 1], [-1, 0]])
def test_tokens_that_do_not_ascend_are_not_grouped(tokens: list[int]) -> None:
    count = len(tokens)
    found = ring_native.kernels().group_pairs(
        np.array(tokens, np.int32),
        np.zeros(count, np.int32),
        np.zeros(count, np.float32),
        count,
        np.empty((4, count + 1), np.int32),
        np.empty(count, np.float32),
        np.empty(1, np.int32),
    )
    assert found == ring_native.OUT_OF_RANGE
