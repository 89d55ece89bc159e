"""Telemetry: quantiles within a bucket's width, and one log line a generation."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_protocol.ids import Phase
from dflash_runtime.experts.telemetry import LatencyHistogram, PhaseStats, Profile


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(1e-8, 1000.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.99]))
def test_quantiles_are_right_within_an_eighth(times_s: list[float], share: float) -> None:
    histogram = LatencyHistogram()
    for seconds in times_s:
        histogram.add(seconds)
    exact = np.quantile(times_s, share, method="inverted_cdf")
    assert histogram.quantile_s(share) == pytest.approx(exact, rel=0.13)
    assert histogram.num_samples == len(times_s)


@pytest.mark.parametrize("seconds", [0.0, 1e-12, 1e-9, 7e-9, 1e5, 1e12])
def test_times_out_of_all_bounds_are_counted_too(seconds: float) -> None:
    histogram = LatencyHistogram()
    histogram.add(seconds)
    assert histogram.num_samples == 1
    assert 0.0 < histogram.quantile_s(0.5) < 1e5


def test_nothing_measured_is_zero() -> None:
    assert LatencyHistogram().quantile_s(0.5) == 0.0
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
        assert f"{number}.00 MiB sent" in message
        assert f"wait {number}.0 ms" in message
        assert "p50" in message


def test_a_profile_says_who_is_in_trouble_and_nothing_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    profile = Profile()
    with caplog.at_level(logging.INFO):
        profile.log_generation({}, troubles={"cpu0": "breaker open, opened 2 times", "cpu1": ""})
        profile.log_generation({}, troubles={"cpu1": ""})
    assert caplog.messages == ["expert compute: cpu0: breaker open, opened 2 times"]
