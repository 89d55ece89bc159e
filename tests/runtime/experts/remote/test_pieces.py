"""Cutting of pairs into requests against the plain dictionary of the pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import Phase
from dflash_runtime.experts.remote.pieces import Cut, Cutter, ExecutionMode, Limits, slices
from support.examples import examples
from support.routed_batches import HIDDEN_SIZE, batch_of, numbered_rows, pair_sets, pairs_of

PairSet = tuple[int, dict[tuple[int, int], float]]


@examples(120)
@given(pair_sets(max_tokens=11), st.lists(st.integers(1, 5), min_size=12, max_size=12), st.data())
def test_slices_hold_every_pair_once_and_name_their_rows(
    pair_set: PairSet, sizes: list[int], data: st.DataObject
) -> None:
    """However many rows are asked for each time."""
    num_tokens, pairs = pair_set
    whole_from = data.draw(st.none() | st.integers(0, num_tokens))
    batch = batch_of(num_tokens, pairs)
    used = sorted({token_idx for token_idx, _ in pairs})
    is_whole = len(used) >= (num_tokens if whole_from is None else whole_from)
    cut = Cut(data.draw(st.integers(1, 5)), whole_from)
    pieces = slices(cut, batch.rows, batch.pairs(), phase=batch.phase)
    assert (pieces is None) == ((num_tokens if is_whole else len(used)) <= cut.max_tokens)
    if pieces is None:
        return
    found: dict[tuple[int, int], float] = {}
    last = -1
    for size in sizes:
        cut.max_tokens = size
        piece = next(pieces, None)
        if piece is None:
            break
        rows, part = piece
        part.check(hidden_size=HIDDEN_SIZE, num_experts=5)
        names = np.arange(num_tokens)[rows].tolist()
        assert isinstance(rows, slice) == is_whole
        assert 0 < len(names) == part.num_tokens <= size
        assert names == sorted(names)
        assert names[0] > last
        last = names[-1]
        np.testing.assert_array_equal(part.hidden, batch.hidden[rows])
        own = {(names[row], e): weight for (row, e), weight in pairs_of(part).items()}
        assert own
        found |= own
    else:
        return  # there may be more
    assert found == pairs


def test_rows_of_slices_are_not_copied_if_all_are_used() -> None:
    batch = batch_of(4, {(token_idx, 1): 1.0 for token_idx in range(4)})
    pieces = slices(Cut(max_tokens=2), batch.rows, batch.pairs(), phase=batch.phase)
    assert pieces is not None
    for _, piece in pieces:
        assert np.shares_memory(piece.hidden, batch.hidden)


@pytest.mark.parametrize(
    ("num_tokens", "mode", "version", "is_cut"),
    [
        (1, ExecutionMode.STREAM, 2, False),
        (4, ExecutionMode.STREAM, 2, False),
        (5, ExecutionMode.STREAM, 2, True),
        (16, ExecutionMode.BATCHED, 2, False),
        (17, ExecutionMode.BATCHED, 2, True),
        (1, ExecutionMode.BATCHED, 1, True),
    ],
)
def test_a_batch_is_cut_if_its_mode_or_the_link_asks_for_it(
    num_tokens: int, mode: ExecutionMode, version: int, is_cut: bool
) -> None:
    """By the rows that are used; version 1 has a form of its own."""
    pairs = {(token_idx, 0): 1.0 for token_idx in range(num_tokens)}
    batch = batch_of(num_tokens + 3, pairs, hidden=numbered_rows(num_tokens + 3))
    cutter = Cutter(mode, stream_tokens=4)
    cut = cutter.cut(Limits(16, version), batch.rows, batch.pairs(), phase=Phase.PREFILL)
    assert (cut.pieces is not None) == is_cut
    verified = cutter.cut(Limits(16, version), batch.rows, batch.pairs(), phase=Phase.VERIFY)
    assert (verified.pieces is not None) == (version == 1 or num_tokens > 16)
