"""Routed batches against the plain dictionary of their pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.batch import (
    HostHidden,
    RoutedBatch,
    group_by_expert,
    slice_tokens,
)
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import I32Array, Phase
from support.examples import examples
from support.routed_batches import (
    HIDDEN_SIZE,
    assert_same_batch,
    batch_of,
    numbered_rows,
    pair_sets,
    pairs_of,
)

NUM_EXPERTS = 5

PairSet = tuple[int, dict[tuple[int, int], float]]


def check(batch: RoutedBatch) -> None:
    batch.check(hidden_size=HIDDEN_SIZE, num_experts=NUM_EXPERTS)


@examples(80)
@given(pair_sets(), st.sampled_from(list(Phase)), st.randoms(use_true_random=False))
def test_grouping_sorts_any_pairs_by_expert_and_token(
    pair_set: PairSet, phase: Phase, random: Random
) -> None:
    num_tokens, pairs = pair_set
    places = list(pairs)
    random.shuffle(places)
    batch = group_by_expert(
        numbered_rows(num_tokens),
        np.array([token_idx for token_idx, _ in places], dtype=np.int32),
        np.array([expert_id for _, expert_id in places], dtype=np.int32),
        weights=np.array([pairs[place] for place in places], dtype=np.float32),
        phase=phase,
    )
    check(batch)
    assert pairs_of(batch) == pairs
    assert_same_batch(batch, batch_of(num_tokens, pairs, phase=phase))
    assert (batch.num_tokens, batch.num_pairs) == (num_tokens, len(pairs))
    assert batch.num_groups == len({expert_id for _, expert_id in pairs})


@examples(80)
@given(pair_sets())
def test_rows_that_are_used_are_kept_once_and_named(pair_set: PairSet) -> None:
    num_tokens, pairs = pair_set
    batch = batch_of(num_tokens, pairs)
    compacted, rows = RoutedBatch.group_used(batch.phase, batch.rows, batch.pairs())
    check(compacted)
    used = sorted({token_idx for token_idx, _ in pairs})
    if rows is None:
        assert_same_batch(compacted, batch)
        assert used == list(range(num_tokens))
        return
    assert rows.tolist() == used
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(compacted.hidden, batch.hidden[used])
    back = {(int(rows[row]), e): weight for (row, e), weight in pairs_of(compacted).items()}
    assert back == pairs


@examples(80)
@given(pair_sets())
def test_pairs_of_a_batch_are_in_the_order_of_tokens(pair_set: PairSet) -> None:
    num_tokens, expected = pair_set
    batch = batch_of(num_tokens, expected)
    pairs = batch.pairs()
    places = zip(pairs.token_indices.tolist(), pairs.expert_ids.tolist(), strict=True)
    assert list(zip(places, pairs.weights.tolist(), strict=True)) == sorted(expected.items())
    assert_same_batch(RoutedBatch.group(batch.phase, batch.rows, pairs), batch)


@examples(80)
@given(pair_sets(max_tokens=11), st.integers(1, 12))
def test_slices_hold_every_pair_once_within_consecutive_rows(
    pair_set: PairSet, max_tokens: int
) -> None:
    num_tokens, pairs = pair_set
    batch = batch_of(num_tokens, pairs)
    found: dict[tuple[int, int], float] = {}
    end_of_last = 0
    for first, piece in slice_tokens(batch, max_tokens):
        check(piece)
        assert piece.phase is batch.phase
        assert piece.num_tokens <= max_tokens
        assert first >= end_of_last
        end_of_last = first + piece.num_tokens
        np.testing.assert_array_equal(piece.hidden, batch.hidden[first:end_of_last])
        own = {(first + row, e): weight for (row, e), weight in pairs_of(piece).items()}
        assert own or piece is batch
        assert not own.keys() & found.keys()
        found |= own
    assert found == pairs


def test_a_batch_that_fits_is_not_cut() -> None:
    batch = batch_of(4, {(0, 1): 1.0})
    assert list(slice_tokens(batch, 4)) == [(0, batch)]


def test_rows_are_not_copied_by_slicing() -> None:
    batch = batch_of(4, {(0, 1): 1.0, (3, 1): 1.0})
    assert all(piece.hidden.base is batch.hidden.base for _, piece in slice_tokens(batch, 2))


def test_no_tokens_and_no_pairs_are_legal_everywhere() -> None:
    for num_tokens in (0, 3):
        batch = batch_of(num_tokens, {})
        check(batch)
        assert batch.num_groups == batch.num_pairs == 0
        compacted, _ = RoutedBatch.group_used(batch.phase, batch.rows, batch.pairs())
        assert compacted.num_tokens == 0
        check(compacted)
        assert pairs_of(compacted) == {}
        assert [piece.num_pairs for _, piece in slice_tokens(compacted, 1)] == [0]
    assert list(slice_tokens(batch_of(3, {}), 1)) == []


GOOD_PAIRS = {(0, 1): 0.5, (2, 1): 0.25, (1, 4): 1.0, (2, 4): 0.75}


def int32(*values: int) -> I32Array:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda b: replace(b, rows=HostHidden(b.hidden[:, :2])), r"hidden .*\(3, 2\).* \[T, 3\]"),
        (lambda b: replace(b, rows=HostHidden(b.hidden.reshape(-1))), "hidden"),
        (lambda b: replace(b, rows=HostHidden(b.hidden[None])), "hidden"),
        (lambda b: replace(b, group_starts=int32(0, 4)), r"group_starts\b.*weights\b"),
        (lambda b: replace(b, group_starts=int32(0, 2, 3, 4)), r"group_starts\b.*weights\b"),
        (lambda b: replace(b, group_starts=int32()), r"group_starts\b.*weights\b"),
        (lambda b: replace(b, weights=b.weights[:3]), r"group_starts\b.*weights\b"),
        (lambda b: replace(b, group_starts=int32(1, 2, 4)), r"group_starts\b.* 0\b"),
        (lambda b: replace(b, group_starts=int32(0, 2, 3)), r"group_starts\b.* 0\b"),
        (lambda b: replace(b, group_starts=int32(0, 2, 5)), r"group_starts\b.* 0\b"),
        (lambda b: replace(b, group_starts=int32(0, 0, 4)), r"group_starts\b.* 0\b"),
        (lambda b: replace(b, group_starts=int32(0, 4, 4)), r"group_starts\b.* 0\b"),
        (lambda b: replace(b, group_starts=int32(0, 9, 4)), r"group_starts\b.* 0\b"),
        (lambda b: replace(b, group_starts=int32(0, -1, 4)), r"group_starts\b.* 0\b"),
        (lambda b: replace(b, expert_ids=int32(-1, 4)), r"expert ids\b.* 0\.\.4"),
        (lambda b: replace(b, expert_ids=int32(1, 5)), "expert ids"),
        (lambda b: replace(b, expert_ids=int32(4, 1)), "expert ids"),
        (lambda b: replace(b, expert_ids=int32(4, 4)), "expert ids"),
        (lambda b: replace(b, token_indices=int32(0, 3, 1, 2)), r"token indices\b.* 0\.\.2"),
        (lambda b: replace(b, token_indices=int32(-1, 2, 1, 2)), r"token indices\b.* 0\.\.2"),
        (lambda b: replace(b, rows=HostHidden(b.hidden[:0])), "token indices"),
        (lambda b: replace(b, token_indices=int32(2, 0, 1, 2)), r"token indices\b.* each expert"),
        (lambda b: replace(b, token_indices=int32(0, 2, 2, 2)), r"token indices\b.* each expert"),
        (lambda b: replace(b, expert_ids=int32(), group_starts=int32(0)), r"group_starts\b.* 0\b"),
        (lambda b: replace(b, expert_ids=int32(), group_starts=int32(4)), r"group_starts\b.* 0\b"),
    ],
)
def test_what_does_not_hold_together_is_refused(
    spoil: Callable[[RoutedBatch], RoutedBatch], reason: str
) -> None:
    good = batch_of(3, GOOD_PAIRS)
    with pytest.raises(ProtocolError, match=reason) as caught:
        check(spoil(good))
    assert len(str(caught.value).splitlines()) == 1
    check(good)


def is_sound(batch: RoutedBatch) -> bool:
    """`check`, element by element."""
    starts, ids, tokens = (
        array.tolist() for array in (batch.group_starts, batch.expert_ids, batch.token_indices)
    )
    if len(starts) != len(ids) + 1 or len(batch.weights) != len(tokens):
        return False
    if starts[0] != 0 or starts[-1] != len(tokens) or starts != sorted(set(starts)):
        return False
    if ids != sorted(set(ids)) or any(not 0 <= expert_id < NUM_EXPERTS for expert_id in ids):
        return False
    groups = [tokens[first:last] for first, last in pairwise(starts)]
    return all(
        group == sorted(set(group)) and all(0 <= row < batch.num_tokens for row in group)
        for group in groups
    )


def small_int32(max_size: int) -> st.SearchStrategy[I32Array]:
    numbers = st.integers(-1, 5) | st.sampled_from([2**31 - 1, -(2**31)])
    return st.lists(numbers, max_size=max_size).map(lambda values: int32(*values))


@examples(150)
@given(pair_sets(max_tokens=4), st.data())
def test_exactly_the_sound_batches_pass(pair_set: PairSet, data: st.DataObject) -> None:
    """Random arrays, mostly of a sound batch with one of them replaced."""
    batch = batch_of(*pair_set)
    names = ["expert_ids", "group_starts", "token_indices"]
    for name in data.draw(st.sets(st.sampled_from(names), max_size=3)):
        array = getattr(batch, name)
        if array.size and data.draw(st.booleans()):
            changed = array.copy()
            changed[data.draw(st.integers(0, array.size - 1))] = data.draw(st.integers(-1, 6))
        else:
            changed = data.draw(small_int32(5))
        batch = replace(batch, **{name: changed})
    if is_sound(batch):
        check(batch)
    else:
        with pytest.raises(ProtocolError):
            check(batch)
