"""Statistics of round-trip times, and of faults."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_runtime.compute.mail_trial import NO_FAULTS, Fault, FaultKind, Faults, TripTimes

TRIPS = st.lists(st.integers(0, 10**10), min_size=1, max_size=500)


@given(trips=TRIPS, cut=st.integers(0, 200), share=st.sampled_from([0.5, 0.99, 0.999]))
def test_quantiles_are_those_of_all_trips_to_within_their_bins(
    trips: list[int], cut: int, share: float
) -> None:
    times = TripTimes()
    for part in (trips[:cut], trips[cut:]):
        times.add(np.array(part, np.int64))
    in_order = sorted(trips)
    exact_us = max(1, in_order[int(np.ceil(share * len(trips))) - 1]) * 1e-3
    found_us = times.quantile_us(share)
    assert found_us >= min(exact_us, max(trips) * 1e-3)
    assert found_us <= exact_us * 1.012
    assert times.longest_ns == max(trips)
    assert times.num_trips == len(trips)


@given(trips=st.lists(st.integers(0, 10**10), min_size=1, max_size=20))
def test_a_histogram_has_every_trip_in_its_row(trips: list[int]) -> None:
    times = TripTimes()
    times.add(np.array(trips, np.int64))
    rows = times.rows()
    assert sum(count for *_, count in rows) == len(trips)
    for (first_us, last_us, count), following in zip(rows, [*rows[1:], None], strict=True):
        inside = [each for each in trips if first_us <= max(1, each) * 1e-3 < last_us]
        assert abs(len(inside) - count) <= sum(
            math.isclose(max(1, each) * 1e-3, edge)
            for each in trips
            for edge in (first_us, last_us)
        )
        assert following is None or following[0] == last_us


def test_without_trips_there_is_nothing_to_show() -> None:
    times = TripTimes()
    times.add(np.empty(0, np.int64))
    assert (times.quantile_us(0.5), times.rows(), times.num_trips) == (0.0, [], 0)


def test_faults_add_up_and_the_first_is_kept() -> None:
    first = Fault(FaultKind.TORN, 3, line=1, word=0, expected=5, found=6)
    later = Fault(FaultKind.WRONG, 9, line=0, word=1, expected=1, found=2)
    total = NO_FAULTS + Faults({FaultKind.TORN: 2}, first) + Faults({FaultKind.WRONG: 1}, later)
    assert (total.total, total.first) == (3, first)
    assert total.counts[FaultKind.TORN] == 2
