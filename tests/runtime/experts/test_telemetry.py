"""Telemetry: quantiles within a bucket's width, counts below bounds, one log line a generation;
selections against numpy's counts, few at a time and many, and read while they are written."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import Phase
from dflash_runtime.experts.telemetry import LatencyHistogram, PhaseStats, Profile, SelectionCounts
from support.examples import examples


def histogram_of(times_s: Iterable[float]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for seconds in times_s:
        histogram.add(seconds)
    return histogram


@examples(100)
@given(st.lists(st.floats(1e-8, 1000.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.99]))
def test_quantiles_are_right_within_an_eighth(times_s: list[float], share: float) -> None:
    histogram = histogram_of(times_s)
    exact = np.quantile(times_s, share, method="inverted_cdf")
    assert histogram.quantile_s(share) == pytest.approx(exact, rel=0.13)
    assert histogram.num_samples == len(times_s)


@pytest.mark.parametrize("seconds", [0.0, 1e-12, 1e-9, 7e-9, 1e5, 1e12])
def test_times_out_of_all_bounds_are_counted_too(seconds: float) -> None:
    histogram = LatencyHistogram()
    histogram.add(seconds)
    assert histogram.num_samples == 1
    assert 0.0 < histogram.quantile_s(0.5) < 1e5


DOUBLED_S = [2**power * 1e-9 for power in range(4, 42)]


@examples(100)
@given(st.lists(st.integers(0, 1 << 43), max_size=200))
def test_counts_below_bounds_that_are_doubled_are_exact(times_ns: list[int]) -> None:
    # Half a nanosecond more: floats must not decide on which side of a bound a time is.
    times_s = [(nanoseconds + 0.5) * 1e-9 for nanoseconds in times_ns]
    histogram = histogram_of(times_s)
    expected = [sum(seconds < bound_s for seconds in times_s) for bound_s in DOUBLED_S]
    assert histogram.cumulative(DOUBLED_S) == [*expected, len(times_s)]
    assert histogram.total_s == pytest.approx(sum(times_s))


@examples(100)
@given(
    st.lists(st.floats(1e-8, 1000.0), max_size=100),
    st.lists(st.floats(1e-10, 1e6), max_size=10).map(sorted),
)
def test_below_any_bound_is_counted_what_shares_no_bucket_with_it(
    times_s: list[float], bounds_s: list[float]
) -> None:
    *counts, num_samples = histogram_of(times_s).cumulative(bounds_s)
    assert num_samples == len(times_s)
    assert counts == sorted(counts)
    for bound_s, count in zip(bounds_s, counts, strict=True):
        assert count <= sum(seconds <= bound_s for seconds in times_s)
        if bound_s < 3600:
            assert count >= sum(seconds < bound_s / 1.13 - 2e-9 for seconds in times_s)


def test_what_is_longer_than_all_buckets_is_below_no_bound() -> None:
    assert histogram_of([1e9, 1e-6]).cumulative([1.0, 1e8]) == [1, 1, 2]


def test_counts_rise_and_agree_while_another_thread_adds() -> None:
    histogram, is_over = LatencyHistogram(), threading.Event()

    def add() -> None:
        while not is_over.is_set():
            for power in range(10, 30):
                histogram.add(1.5 * 2**power * 1e-9)

    adder = threading.Thread(target=add)
    adder.start()
    try:
        seen = [histogram.cumulative(DOUBLED_S) for _ in range(300)]
    finally:
        is_over.set()
        adder.join()
    for before, after in itertools.pairwise(seen):
        assert before == sorted(before)
        assert all(old <= new for old, new in zip(before, after, strict=True))
    assert histogram.cumulative(DOUBLED_S)[-1] == histogram.num_samples > 0


def test_nothing_measured_is_zero() -> None:
    assert LatencyHistogram().quantile_s(0.5) == 0.0
    assert LatencyHistogram().cumulative([1.0]) == [0, 0]
    assert set(PhaseStats().as_record().values()) == {0}


def test_a_profile_logs_what_each_generation_added(caplog: pytest.LogCaptureFixture) -> None:
    stats, profile = PhaseStats(), Profile()
    owners = {"cpu0": {Phase.DECODE: stats}, "local": {}}
    with caplog.at_level(logging.INFO):
        profile.log_generation(owners)
        assert caplog.messages == []
        for number in (3, 5):
            stats.requests += number
            stats.bytes_sent += number << 20
            stats.wait_s += number * 1e-3
            stats.round_trips.add(100e-6)
            profile.log_generation(owners)
        profile.log_generation(owners)
    assert len(caplog.messages) == 2
    for message, number in zip(caplog.messages, (3, 5), strict=True):
        assert f"cpu0 decode: {number} requests" in message
        assert f" {number}.00 MiB " in message
        assert f" {number}.0 ms" in message
        assert "p50" in message


def test_a_profile_says_who_is_in_trouble_and_nothing_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    profile = Profile()
    with caplog.at_level(logging.INFO):
        profile.log_generation({}, troubles={"cpu0": "breaker open, opened 2 times", "cpu1": ""})
        profile.log_generation({}, troubles={"cpu1": ""})
    [message] = caplog.messages
    assert "cpu0: breaker open, opened 2 times" in message
    assert "cpu1" not in message


EXPERTS_PER_LAYER = {1: 5, 4: 3}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(EXPERTS_PER_LAYER)),
            st.integers(0, 300),
            st.integers(0, 2**32 - 1),
            st.booleans(),
            st.sampled_from(Phase),
        ),
        max_size=6,
    )
)
def test_every_selection_is_counted_where_it_belongs(
    batches: list[tuple[int, int, int, bool, Phase]],
) -> None:
    counts = SelectionCounts(EXPERTS_PER_LAYER)
    expected = np.zeros((2, len(EXPERTS_PER_LAYER), max(EXPERTS_PER_LAYER.values())), np.int64)
    rows = {layer_id: row for row, layer_id in enumerate(sorted(EXPERTS_PER_LAYER))}
    for layer_id, num_pairs, seed, is_counted, phase in batches:
        random = np.random.default_rng(seed)
        ids = random.integers(0, EXPERTS_PER_LAYER[layer_id], num_pairs).astype(np.int32)
        np.add.at(expected[int(phase is not Phase.PREFILL), rows[layer_id]], ids, 1)
        if is_counted:
            counts.add_counts(
                phase, layer_id, np.bincount(ids, minlength=EXPERTS_PER_LAYER[layer_id])
            )
        else:
            counts.add(phase, layer_id, ids)
    np.testing.assert_array_equal(counts.as_array(), expected)
    for layer_id, num_experts in EXPERTS_PER_LAYER.items():
        both = expected.sum(axis=0)[rows[layer_id]]
        assert counts.snapshot()[layer_id] == both[:num_experts].tolist()
        assert not both[num_experts:].any()


def test_a_snapshot_stays_as_it_is() -> None:
    counts = SelectionCounts(EXPERTS_PER_LAYER)
    before = counts.snapshot()
    counts.add(Phase.DECODE, 1, np.array([2, 2, 4], np.int32))
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
            counts.add(Phase.DECODE, 0, step)
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
