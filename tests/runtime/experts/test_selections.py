"""Counts of selections against numpy's, few at a time and many, and read while they are written."""

from __future__ import annotations

import threading
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_runtime.experts.telemetry import SelectionCounts

EXPERTS_PER_LAYER = {1: 5, 4: 3}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(EXPERTS_PER_LAYER)),
            st.integers(0, 300),
            st.integers(0, 2**32 - 1),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_every_selection_is_counted_where_it_belongs(
    batches: list[tuple[int, int, int, bool]],
) -> None:
    counts = SelectionCounts(EXPERTS_PER_LAYER)
    expected = {layer: np.zeros(num, np.int64) for layer, num in EXPERTS_PER_LAYER.items()}
    for layer_id, num_pairs, seed, is_counted in batches:
        random = np.random.default_rng(seed)
        ids = random.integers(0, EXPERTS_PER_LAYER[layer_id], num_pairs).astype(np.int32)
        np.add.at(expected[layer_id], ids, 1)
        if is_counted:
            counts.add_counts(layer_id, np.bincount(ids, minlength=EXPERTS_PER_LAYER[layer_id]))
        else:
            counts.add(layer_id, ids)
    assert counts.snapshot() == {layer: each.tolist() for layer, each in expected.items()}


def test_a_snapshot_stays_as_it_is() -> None:
    counts = SelectionCounts(EXPERTS_PER_LAYER)
    before = counts.snapshot()
    counts.add(1, np.array([2, 2, 4], np.int32))
    before[4][0] = 7
    assert before[1] == [0] * 5
    assert counts.snapshot() == {1: [0, 0, 2, 0, 1], 4: [0] * 3}


def test_counts_can_be_read_while_they_are_written() -> None:
    """One step adds an expert at a time, in order: no reader may see a later one ahead."""
    counts = SelectionCounts({0: 8})
    step = np.arange(8, dtype=np.int32)
    looked = threading.Event()
    num_steps = 0

    def write() -> None:
        nonlocal num_steps
        while not looked.is_set():
            counts.add(0, step)
            num_steps += 1

    writer = threading.Thread(target=write)
    writer.start()
    last, end_s = [0] * 8, time.monotonic() + 60.0
    try:
        for _ in range(50):  # until as many looks have found something new
            while (now := counts.snapshot()[0]) == last:
                assert time.monotonic() < end_s
            assert now[0] - 1 <= now[7] <= now[0]
            assert now == sorted(now, reverse=True)
            assert all(a <= b for a, b in zip(last, now, strict=True))
            last = now
    finally:
        looked.set()
        writer.join()
    assert counts.snapshot()[0] == [num_steps] * 8
