"""Cutting of pairs into requests against the plain dictionary of the pairs; choosing a mode: the
faster one is found, kept, and never costs much to doubt."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import Phase
from dflash_runtime.experts.remote.pieces import (
    Cut,
    Cutter,
    ExecutionMode,
    Limits,
    ModeChooser,
    slices,
)
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


BATCHED, STREAM = ExecutionMode.BATCHED, ExecutionMode.STREAM
PAIRS = 1000


class World:
    """Batches that take as long as `cost_s` says, with some noise."""

    def __init__(self, cost_s: Callable[[ExecutionMode], float], *, noise: float = 0.02) -> None:
        self.chooser = ModeChooser()
        self.cost_s = cost_s
        self.spent_s = 0.0
        self.modes: list[ExecutionMode] = []
        self._noise = noise
        self._random = random.Random(7)

    def run(self, num_batches: int) -> None:
        for _ in range(num_batches):
            mode = self.chooser.next_mode()
            elapsed_s = self.cost_s(mode) * (1 + self._noise * self._random.random())
            self.chooser.note(mode, elapsed_s=elapsed_s, num_pairs=PAIRS)
            self.modes.append(mode)
            self.spent_s += elapsed_s


def test_both_are_tried_in_turn_before_one_is_kept() -> None:
    world = World({BATCHED: 0.01, STREAM: 0.02}.__getitem__)
    world.run(12)
    assert world.modes == [BATCHED, STREAM] * 2 + [BATCHED] * 8


@pytest.mark.parametrize("slower", [BATCHED, STREAM])
@pytest.mark.parametrize("factor", [1.2, 3.0, 30.0])
def test_doubts_cost_less_than_three_percent(slower: ExecutionMode, factor: float) -> None:
    world = World(lambda mode: 0.01 * (factor if mode is slower else 1.0))
    world.run(4)
    world.spent_s = 0.0
    world.run(2000)
    assert world.spent_s < 0.01 * 2000 * 1.03 * 1.02
    assert world.modes.count(slower) >= 3, "it is tried again now and then"


def test_a_change_is_noticed() -> None:
    costs = {BATCHED: 0.01, STREAM: 0.02}
    world = World(costs.__getitem__)
    world.run(200)
    assert world.chooser.favourite is BATCHED
    costs[BATCHED] = 0.05
    world.run(200)
    assert world.chooser.favourite is STREAM
    assert world.modes[-20:].count(STREAM) >= 19


def test_equal_modes_stay_near_either() -> None:
    world = World(lambda mode: 0.01, noise=0.2)
    world.run(500)
    assert world.spent_s < 0.01 * 500 * 1.2


def test_streaming_is_given_up_only_once_it_can_be_compared() -> None:
    chooser = ModeChooser()
    assert chooser.stream_limit_s() is None
    chooser.note(BATCHED, elapsed_s=0.01, num_pairs=PAIRS)
    limit_s = chooser.stream_limit_s()
    assert limit_s is not None
    assert 1.2e-5 < limit_s < 2e-5
