"""Rotary frequencies against the formulas, pair by pair; attention temperature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.rope import (
    AttentionTemperature,
    RopePairing,
    RopeTable,
    YarnScaling,
    rope_table,
)
from support.examples import examples

BASES = st.floats(1.5, 1e7)
EVEN_DIMS = st.integers(1, 96).map(lambda pairs: 2 * pairs)


def table(num_rotated: int, base: float, **scaling: object) -> RopeTable:
    return rope_table(RopePairing.HALF_SPLIT, num_rotated, base, **scaling)  # type: ignore[arg-type]


def turns(frequency: float, num_positions: int) -> float:
    """How often a pair goes around within so many positions."""
    return num_positions * frequency / (2 * math.pi)


@examples(60)
@given(EVEN_DIMS, BASES)
def test_plain_frequencies_fall_geometrically_from_one(num_rotated: int, base: float) -> None:
    plain = table(num_rotated, base)
    expected = [base ** (-2 * pair / num_rotated) for pair in range(num_rotated // 2)]
    np.testing.assert_allclose(plain.inv_freq, expected, rtol=1e-14)
    assert plain.inv_freq.dtype == np.float64
    assert plain.inv_freq[0] == 1.0
    assert (plain.num_rotated, plain.scale) == (num_rotated, 1.0)


@examples(60)
@given(EVEN_DIMS, BASES, st.floats(0.25, 64.0))
def test_linear_scaling_divides_every_frequency(
    num_rotated: int, base: float, factor: float
) -> None:
    scaled = table(num_rotated, base, scaling=factor)
    np.testing.assert_array_equal(scaled.inv_freq, table(num_rotated, base).inv_freq / factor)
    assert scaled.scale == 1.0


def naive_yarn(num_rotated: int, base: float, yarn: YarnScaling) -> list[float]:
    """Source: Peng et al. 2023 (arXiv 2309.00071), section 3.2, with edges at whole dimensions."""

    def dimension_of(beta: float) -> float:
        per_turn = math.log(yarn.original_context / (beta * 2 * math.pi))
        return num_rotated * per_turn / (2 * math.log(base))

    low = max(math.floor(dimension_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension_of(yarn.beta_slow)), num_rotated - 1)
    frequencies = []
    for pair in range(num_rotated // 2):
        plain = base ** (-2 * pair / num_rotated)
        ramp = min(1.0, max(0.0, (pair - low) / max(high - low, 0.001)))
        frequencies.append(plain * (1 - ramp) + plain / yarn.factor * ramp)
    return frequencies


@examples(80)
@given(EVEN_DIMS, BASES, st.floats(1.0, 64.0), st.integers(1, 1 << 20))
def test_yarn_follows_its_formula_and_stays_between_both_ends(
    num_rotated: int, base: float, factor: float, original_context: int
) -> None:
    yarn = YarnScaling(factor, original_context)
    scaled = table(num_rotated, base, scaling=yarn)
    np.testing.assert_allclose(
        scaled.inv_freq, naive_yarn(num_rotated, base, yarn), rtol=1e-12, atol=0.0
    )
    plain = table(num_rotated, base).inv_freq
    assert np.all(scaled.inv_freq <= plain * (1 + 1e-12))
    assert np.all(scaled.inv_freq >= plain / factor * (1 - 1e-12))
    assert scaled.scale == 1.0 + 0.1 * math.log(factor)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    """Qwen3's head at four times its context."""
    yarn = YarnScaling(4.0, 32768)
    plain, scaled = table(128, 1e6).inv_freq, table(128, 1e6, scaling=yarn).inv_freq
    fast = [pair for pair in range(64) if turns(plain[pair], 32768) > 40]
    slow = [pair for pair in range(64) if turns(plain[pair], 32768) < 0.7]
    assert fast
    assert slow
    np.testing.assert_array_equal(scaled[fast], plain[fast])
    np.testing.assert_allclose(scaled[slow], plain[slow] / 4.0, rtol=1e-15)
    between = [pair for pair in range(64) if pair not in (*fast, *slow)]
    ratios = scaled[between] / plain[between]
    assert np.all(np.diff(ratios) <= 0.0)


def test_yarn_of_factor_one_is_plain() -> None:
    scaled = table(64, 1e4, scaling=YarnScaling(1.0, 4096))
    np.testing.assert_allclose(scaled.inv_freq, table(64, 1e4).inv_freq, rtol=1e-15)
    assert scaled.scale == 1.0


@pytest.mark.parametrize("scaling", [{}, {"scaling": 4.0}, {"scaling": YarnScaling(8.0, 32)}])
def test_factors_divide_each_pairs_angles_before_any_scaling(scaling: dict[str, Any]) -> None:
    factors = np.array([1.0, 2.5, 8.0, 4.0], np.float32)
    divided, usual = table(8, 1e4, **scaling, factors=factors), table(8, 1e4, **scaling)
    np.testing.assert_allclose(divided.inv_freq, usual.inv_freq / factors, rtol=1e-14)
    assert divided.scale == usual.scale


def test_betas_say_where_yarn_begins_to_stretch() -> None:
    """Laguna's full layers: with the file's beta fewer pairs stay as they are."""
    plain = table(64, 5e5).inv_freq
    kept = {
        beta: int((table(64, 5e5, scaling=YarnScaling(32.0, 4096, beta)).inv_freq == plain).sum())
        for beta in (32.0, 64.0)
    }
    assert kept == {32.0: 8, 64.0: 6}


@pytest.mark.parametrize("pairing", list(RopePairing))
def test_pairing_is_kept_and_does_not_change_frequencies(pairing: RopePairing) -> None:
    made = rope_table(pairing, 10, 1e4)
    assert made.pairing is pairing
    np.testing.assert_array_equal(made.inv_freq, table(10, 1e4).inv_freq)


def test_queries_grow_from_period_to_period() -> None:
    positions = np.array([0, 8, 9, 10, 29], np.int32)
    factors = AttentionTemperature(period=10, slope=0.3).factors(positions)
    assert factors.dtype == np.float32
    np.testing.assert_allclose(factors, 1 + 0.3 * np.log([1, 1, 2, 2, 4]), rtol=1e-6)
