"""Sampling against a naive implementation that works on lists of probabilities, and against another
that sorts all tokens."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import F32Array
from dflash_runtime.engine.sampling import Sampler, SamplingParams
from support.examples import examples

LOGITS = st.lists(st.integers(-512, 512).map(lambda number: number / 128), min_size=1)
"""Exact in float32; the shares used with them below are ones that no sum of theirs meets."""


def row(values: list[float]) -> F32Array:
    return np.array(values, dtype=np.float32)


def naive_distribution(values: list[float], options: SamplingParams) -> dict[int, float]:
    """Probability of every token that may be drawn."""
    order = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    if options.top_k:
        order = order[: options.top_k]
    best = values[order[0]]
    terms = [math.exp((values[token_id] - best) / options.temperature) for token_id in order]
    kept: dict[int, float] = {}
    reached = 0.0
    for token_id, term in zip(order, terms, strict=True):
        probability = term / sum(terms)
        if reached >= options.top_p or probability < options.min_p * terms[0] / sum(terms):
            break
        kept[token_id] = probability
        reached += probability
    return {token_id: probability / sum(kept.values()) for token_id, probability in kept.items()}


def plainly_drawn(logits: F32Array, options: SamplingParams, number: float) -> int:
    """The token that a number falls on, with every token sorted and every probability computed."""
    order = np.argsort(-logits, kind="stable")
    if options.top_k:
        order = order[: options.top_k]
    below_peak = logits[order].astype(np.float64) - np.float64(logits[order[0]])
    probabilities = np.exp(below_peak / options.temperature)
    probabilities /= probabilities.sum()
    if options.top_p < 1.0:
        before = np.cumsum(probabilities) - probabilities
        probabilities = probabilities[before < options.top_p]
    if options.min_p > 0.0:
        probabilities = probabilities[probabilities >= options.min_p * probabilities[0]]
    cumulative = np.cumsum(probabilities)
    return int(order[np.searchsorted(cumulative, number * cumulative[-1], side="right")])


def draw(values: list[float], options: SamplingParams, count: int) -> list[int]:
    sampler = Sampler(options)
    return [sampler(row(values)) for _ in range(count)]


@examples(120)
@given(LOGITS)
def test_greedy_takes_the_first_of_the_most_likely(values: list[float]) -> None:
    (token_id,) = draw(values, SamplingParams(), 1)
    assert token_id == values.index(max(values))
    assert draw(values, SamplingParams(temperature=0.0, top_k=3, seed=1), 3) == [token_id] * 3


@examples(120)
@given(
    LOGITS,
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, 6),
    st.sampled_from([0.0503, 0.3719, 0.8017, 0.99913, 1.0]),
    st.sampled_from([0.0, 0.0131, 0.3109, 1.0]),
)
def test_only_what_the_filters_leave_is_drawn(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    options = SamplingParams(temperature, top_k, top_p, min_p, seed=3)
    allowed = naive_distribution(values, options)
    assert set(draw(values, options, 30)) <= set(allowed)


LARGE = st.tuples(
    st.integers(1, 5000),
    st.sampled_from([0.01, 0.5, 3.0, 30.0]),
    st.sampled_from([None, 0.05, 1.0]),
    st.integers(0, 1 << 32),
)
"""Tokens, how far apart their logits are, to what these are rounded, and where it begins."""


def large_row(size: int, scale: float, step: float | None, seed: int) -> F32Array:
    """Many logits: all different, or many alike; some of tokens that cannot be."""
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(size) * scale).astype(np.float32)
    if step is not None:
        logits = (np.round(logits / step) * step).astype(np.float32)  # of both signs of zero
    logits[random.random(size) < 0.1] = -np.inf
    logits[random.integers(size)] = scale
    return logits


@examples(120)
@given(
    st.one_of(LOGITS.map(row), LARGE.map(lambda large: large_row(*large))),
    st.sampled_from([0.01, 0.7, 1.0, 40.0]),
    st.sampled_from([0, 1, 2, 3, 40, 1500, 1 << 40]),
    st.sampled_from([1e-9, 0.25, 0.5, 0.9, 0.99999, 1 - 1e-12, 1.0]),
    st.sampled_from([0.0, 1e-12, 0.05, 0.5, 1.0]),
)
def test_tokens_are_those_of_the_plain_formula(
    logits: F32Array, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    options = SamplingParams(temperature, top_k, top_p, min_p, seed=11)
    numbers = np.random.default_rng(11)
    expected = [plainly_drawn(logits, options, numbers.random()) for _ in range(20)]
    sampler, ahead = Sampler(options), Sampler(options)
    assert [sampler(logits) for _ in range(20)] == expected
    assert [ahead.sample(logits, number) for number in ahead.numbers(20)] == expected


def test_numbers_that_are_drawn_ahead_are_those_of_the_tokens() -> None:
    logits = large_row(3000, 0.5, None, 1)
    sampler, ahead = (Sampler(SamplingParams(2.0, seed=9)) for _ in range(2))
    expected = [sampler(logits) for _ in range(12)]
    drawn = [ahead(logits)]
    drawn += [ahead.sample(logits, number) for number in ahead.numbers(4)]
    drawn += [ahead(logits)]
    drawn += [ahead.sample(logits, number) for number in ahead.numbers(6)]
    assert drawn == expected
    assert len(set(expected)) > 5


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, math.nan, 3.0, math.nan], 1),
        ([1.0, math.inf, 3.0, math.inf], 1),
        ([-math.inf, -math.inf], 0),
        ([-math.inf, math.nan], 1),
    ],
)
def test_without_a_distribution_the_token_is_the_greedy_one(
    values: list[float], expected: int
) -> None:
    assert draw(values, SamplingParams(), 1) == [expected]
    for top_k in (0, 4):
        for top_p, min_p in ((1.0, 0.0), (0.5, 0.0), (1.0, 0.5)):
            options = SamplingParams(0.7, top_k, top_p, min_p, seed=1)
            assert draw(values, options, 3) == [expected] * 3


def test_what_top_k_leaves_out_need_not_be_a_number() -> None:
    values = [1.0, math.nan, 3.0, 2.0]
    assert set(draw(values, SamplingParams(1.0, top_k=2, seed=1), 100)) == {2, 3}


@pytest.mark.parametrize(
    "options",
    [
        SamplingParams(1.0, seed=1),
        SamplingParams(0.5, seed=2),
        SamplingParams(3.0, seed=3),
        SamplingParams(1.0, top_k=3, seed=4),
        SamplingParams(1.0, top_p=0.7, seed=5),
        SamplingParams(1.0, min_p=0.2, seed=6),
        SamplingParams(1.5, top_k=5, top_p=0.9, min_p=0.1, seed=7),
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(options: SamplingParams) -> None:
    values = [0.1, 2.0, -1.0, 1.5, 0.7, 0.0, 1.9]
    count = 4_000
    drawn = Counter(draw(values, options, count))
    expected = naive_distribution(values, options)
    assert set(drawn) == set(expected)
    for token_id, probability in expected.items():
        deviation = math.sqrt(count * probability * (1 - probability))
        assert abs(drawn[token_id] - count * probability) <= 5 * deviation


def test_a_seed_gives_the_same_tokens_again_and_none_gives_others() -> None:
    values = [0.0] * 50
    first = draw(values, SamplingParams(1.0, seed=42), 50)
    assert draw(values, SamplingParams(1.0, seed=42), 50) == first
    assert draw(values, SamplingParams(1.0, seed=43), 50) != first
    assert draw(values, SamplingParams(1.0), 50) != draw(values, SamplingParams(1.0), 50)


def test_equally_likely_tokens_are_taken_in_order_of_their_ids() -> None:
    options = SamplingParams(1.0, top_k=2, seed=5)
    assert set(draw([1.0, 1.0, 1.0, 1.0], options, 50)) == {0, 1}


@pytest.mark.parametrize(
    "temperature",
    [
        1e-3,
        1e-30,
        1e-300,
        1e-310,
        5e-324,
    ],
)
def test_as_temperature_falls_to_nothing_the_most_likely_token_is_certain(
    temperature: float,
) -> None:
    values = [1.0, 7.5, -3.0, 7.0]
    for options in (
        SamplingParams(temperature, seed=1),
        SamplingParams(temperature, top_k=3, top_p=0.9, min_p=0.1, seed=1),
    ):
        assert draw(values, options, 20) == [1] * 20


def test_a_high_temperature_makes_all_tokens_equally_likely() -> None:
    options = SamplingParams(100.0, seed=1)
    assert set(draw([0.0, 4.0, -4.0, 1.0], options, 200)) == {0, 1, 2, 3}


def test_what_is_impossible_is_never_drawn() -> None:
    values = [-math.inf, 0.0, -math.inf, 0.0]
    assert set(draw(values, SamplingParams(2.0, seed=1), 200)) == {1, 3}
    assert draw([-math.inf, 3.0, -math.inf], SamplingParams(1.0, top_p=0.5, seed=1), 5) == [1] * 5


def test_far_apart_logits_do_not_overflow() -> None:
    values = [3e38, -3e38, 0.0]
    assert draw(values, SamplingParams(0.01, seed=1), 5) == [0] * 5


def test_top_k_of_more_than_there_are_keeps_all() -> None:
    assert set(draw([0.0, 0.0], SamplingParams(1.0, top_k=1000, seed=1), 50)) == {0, 1}


def test_the_smallest_top_p_keeps_the_most_likely_token() -> None:
    assert draw([0.0, 0.1, 0.0], SamplingParams(1.0, top_p=1e-9, seed=1), 20) == [1] * 20


def test_a_vocabulary_of_one_has_one_answer() -> None:
    for options in (SamplingParams(), SamplingParams(1.0, top_p=0.5, min_p=1.0, seed=1)):
        assert draw([-5.0], options, 3) == [0] * 3


def test_logits_are_left_alone() -> None:
    logits = row([0.5, 2.0, 1.0])
    Sampler(SamplingParams(0.7, top_k=2, top_p=0.9, min_p=0.1, seed=1))(logits)
    np.testing.assert_array_equal(logits, row([0.5, 2.0, 1.0]))


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("temperature", [-0.1, 100.1, math.nan, math.inf], [0.0, 100.0]),
        ("top_k", [-1], [0, 1, 1 << 40]),
        ("top_p", [0.0, -0.5, 1.0001, math.nan], [1e-9, 1.0]),
        ("min_p", [-0.001, 1.001, math.nan], [0.0, 1.0]),
        ("seed", [-1], [None, 0, 1 << 70]),
    ],
)
def test_an_option_out_of_range_is_refused_with_its_name(
    name: str, bad: list[float], good: list[float]
) -> None:
    for value in bad:
        with pytest.raises(SettingsError, match=f"^{name}="):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
    for value in good:
        Sampler(SamplingParams(**{name: value}))(row([0.0, 1.0]))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "seed"])
def test_an_option_of_another_type_is_refused_with_its_name(name: str) -> None:
    for value in ("0.5", [1], 1j, b"1"):
        with pytest.raises(SettingsError, match=f"^{name}="):
            SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", None),
        ("top_p", None),
        ("min_p", None),
        ("top_k", None),
        ("top_k", 1.5),
        ("seed", 1.5),
    ],
)
def test_an_option_that_is_almost_a_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"^{name}="):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def naively_typical(probabilities: list[float], share: float) -> set[int]:
    """The places that stay, from the definition."""
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    order = sorted(
        range(len(probabilities)),
        key=lambda i: abs(-math.log(probabilities[i]) - entropy) if probabilities[i] else math.inf,
    )
    kept, reached = set(), 0.0
    for place in order:
        kept.add(place)
        reached += probabilities[place]
        if reached > share:
            break
    return kept


@examples(120)
@given(
    LOGITS.filter(lambda values: len({*values}) == len(values)),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, 4]),
    st.sampled_from([0.0503, 0.3719, 0.8017, 0.99913]),
)
def test_typical_tokens_stay(
    values: list[float], temperature: float, top_k: int, typical_p: float
) -> None:
    order = sorted(range(len(values)), key=lambda token_id: -values[token_id])
    order = order[: top_k or len(order)]
    terms = [math.exp((values[each] - values[order[0]]) / temperature) for each in order]
    kept = naively_typical([term / sum(terms) for term in terms], typical_p)
    options = SamplingParams(temperature, top_k, typical_p=typical_p, seed=1)
    drawn = Counter(draw(values, options, 60))
    assert {*drawn} <= {order[place] for place in kept}
    likely = [p for p in kept if terms[p] > 0.5 * sum(terms[place] for place in kept)]
    assert all(order[place] in drawn for place in likely)


def test_the_most_likely_token_may_be_untypical() -> None:
    logits = [math.log(0.4)] + [math.log(0.1)] * 6
    drawn = Counter(draw(logits, SamplingParams(1.0, typical_p=0.3, seed=1), 200))
    assert 0 not in drawn
    assert len(drawn) == 4  # 0.1 each: the fourth passes 0.3 surely
    wide = SamplingParams(1.0, typical_p=0.3, top_p=0.2, seed=1)
    assert {*draw(logits, wide, 100)} < {*drawn}
    # A peak, or greedy: the most likely token.
    assert {*draw([50.0, 0.0, 1.0], SamplingParams(1.0, typical_p=0.5, seed=1), 9)} == {0}
    assert draw(logits, SamplingParams(typical_p=0.3), 1) == [0]
