"""Heat: what was counted is kept, decays with tokens however it is counted, and predicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import F64Array, I64Array, Phase
from dflash_runtime.placement.heat import (
    HalfLives,
    Heat,
    HeatLayer,
    experts_for,
    hottest_share,
)
from support.examples import examples

LAYERS = (HeatLayer(1, 5, 2), HeatLayer(2, 3, 1), HeatLayer(7, 5, 5))
BOTH = (Phase.PREFILL, Phase.DECODE)


def random_tokens(
    num_tokens: int, seed: int, *, layers: tuple[HeatLayer, ...] = LAYERS
) -> list[I64Array]:
    """The selections of tokens one by one, all of one phase. Shapes: each [2, L, E]."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(num_tokens):
        selections = np.zeros(Heat(layers, HalfLives()).shape, np.int64)
        for row, layer in enumerate(layers):
            chosen = random.permutation(layer.num_experts)[: layer.num_experts_used]
            selections[1, row, chosen] = 1
        found.append(selections)
    return found


def heat_of(counts: list[I64Array], half_lives: HalfLives | None = None) -> Heat:
    heat = Heat(LAYERS, half_lives or HalfLives())
    for each in counts:
        heat.add(each)
    return heat


def test_without_data_every_expert_is_as_likely_as_another() -> None:
    heat = Heat(LAYERS, HalfLives())
    for phase in Phase:
        for layer in LAYERS:
            expected = [layer.num_experts_used / layer.num_experts] * layer.num_experts
            np.testing.assert_allclose(heat.probabilities(phase, layer.layer_id), expected)
            assert heat.num_tokens(phase, layer.layer_id) == 0
            assert heat.selections(phase, layer.layer_id) is None
    assert heat.num_tokens() == 0
    with pytest.raises(KeyError):
        heat.probabilities(Phase.DECODE, 0)


def test_few_tokens_of_a_text_promise_little_more_than_the_next_ones_keep() -> None:
    """Experts are chosen, and their share predicted, from the same counts."""
    random, num_experts, num_used, num_learnt = np.random.default_rng(1), 128, 8, 800
    kept, num_tokens = math.exp(-1 / 20), 8 * num_learnt
    scores = random.standard_normal((num_tokens, num_experts))
    scores[1:] *= math.sqrt(1 - kept * kept)
    for token in range(1, num_tokens):  # what a token chooses resembles what the last ones chose
        scores[token] += kept * scores[token - 1]
    scores += 1.4 * random.standard_normal(num_experts)
    chosen = np.argsort(-scores, axis=1)[:, :num_used]
    heat = Heat([HeatLayer(0, num_experts, num_used)], HalfLives())
    for begin in range(0, num_learnt, 100):
        counts = np.zeros((2, 1, num_experts), np.int64)
        counts[1, 0] = np.bincount(chosen[begin : begin + 100].ravel(), minlength=num_experts)
        heat.add(counts)
    shares = heat.probabilities(Phase.DECODE, 0)
    for num_here in (40, 72, 102):
        here = np.argsort(-shares)[:num_here]
        predicted = shares[here].sum() / num_used
        assert predicted == pytest.approx(np.isin(chosen[num_learnt:], here).mean(), abs=0.025)


@examples(60)
@given(st.integers(1, 40), st.integers(0, 1000), st.floats(1, 1e5), st.floats(1, 1e5))
def test_probabilities_are_those_of_one_tokens_selections(
    num_tokens: int, seed: int, fast: float, slow: float
) -> None:
    heat = heat_of(random_tokens(num_tokens, seed), HalfLives(fast, slow))
    for phase in Phase:
        for layer in LAYERS:
            found = heat.probabilities(phase, layer.layer_id)
            assert found.shape == (layer.num_experts,)
            assert found.sum() == pytest.approx(layer.num_experts_used)
            assert ((found > 0) & (found <= 1 + 1e-12)).all()
    assert heat.num_tokens() == heat.num_tokens(Phase.DECODE) == num_tokens
    assert heat.num_tokens(Phase.VERIFY, 7) == num_tokens
    assert heat.num_tokens(Phase.PREFILL) == 0


@examples(60)
@given(st.integers(1, 60), st.integers(0, 1000), st.floats(1, 1e4))
def test_tokens_one_by_one_decay_as_defined(num_tokens: int, seed: int, half_life: float) -> None:
    tokens = random_tokens(num_tokens, seed)
    heat = heat_of(tokens, HalfLives(half_life, 2 * half_life))
    ages = np.arange(num_tokens)[::-1]
    for counts, life in ((heat.fast, half_life), (heat.slow, 2 * half_life)):
        weights = 2.0 ** (-ages / life)
        expected = np.einsum("t,tple->ple", weights, np.array(tokens, np.float64))
        np.testing.assert_allclose(counts, expected, rtol=1e-9)
    np.testing.assert_array_equal(heat.totals, np.sum(tokens, axis=0))


@examples(60)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(0, 1000))
def test_how_counts_are_split_changes_no_sum(sizes: list[int], seed: int) -> None:
    """The weight of a layer's tokens is the same, and all of it if tokens are alike."""
    token = random_tokens(1, seed)[0]
    whole, parts = heat_of([token * sum(sizes)]), heat_of([token * size for size in sizes])
    for name in ("totals", "slow", "fast"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-9)
    lives = whole.half_lives
    for counts, life in ((whole.fast, lives.fast), (whole.slow, lives.slow)):
        rate = 2.0 ** (-1 / life)
        mass = (1 - rate ** sum(sizes)) / (1 - rate)
        np.testing.assert_allclose(counts[1].sum(axis=1) / [2, 1, 5], mass, rtol=1e-9)


def test_phases_and_layers_decay_by_their_own_tokens() -> None:
    heat = heat_of(random_tokens(10, 0))
    before = heat.copy()
    prompt = np.zeros(heat.shape, np.int64)
    prompt[0, 1, 2] = 5000
    heat.add(prompt)
    np.testing.assert_array_equal(heat.fast[1], before.fast[1])
    assert not heat.fast[0, [0, 2]].any()
    assert heat.selections(Phase.PREFILL, 1) is None
    assert heat.num_tokens(Phase.PREFILL, 2) == 5000
    assert before.num_tokens(Phase.PREFILL) == 0
    selections = heat.selections(Phase.PREFILL, 2)
    assert selections is not None
    assert selections.tolist() == [0, 0, 5000]


def test_a_phase_without_data_predicts_as_the_other_one() -> None:
    heat = heat_of(random_tokens(50, 3))
    for layer in LAYERS:
        np.testing.assert_array_equal(
            heat.probabilities(Phase.PREFILL, layer.layer_id),
            heat.probabilities(Phase.DECODE, layer.layer_id),
        )
        np.testing.assert_array_equal(
            heat.probabilities(Phase.VERIFY, layer.layer_id),
            heat.probabilities(Phase.DECODE, layer.layer_id),
        )


def hits(heat: Heat, chances: F64Array, num_local: int) -> float:
    """The share of a token's selections that the experts which are likeliest by the heat have."""
    hottest = np.argsort(-heat.probabilities(Phase.DECODE, 0))[:num_local]
    return float(chances[hottest].sum() / chances.sum())


@pytest.mark.parametrize("lump", [10, 300])
def test_the_fast_counts_are_followed_when_the_topic_changes(lump: int) -> None:
    """Within 2,000 tokens a set of experts chosen by heat has 0.95 of what the best set has; on
    steady traffic always."""
    random = np.random.default_rng(0)
    num_experts, num_used, num_local = 64, 4, 20
    layers = (HeatLayer(0, num_experts, num_used),)
    heat, num_tokens = Heat(layers, HalfLives()), 0
    lasting = random.normal(size=num_experts)
    for topic in range(2):
        chances = np.exp(1.2 * lasting + 1.2 * random.normal(size=num_experts))
        best = float(np.sort(chances)[-num_local:].sum() / chances.sum())
        for first in range(0, 12_000, lump):
            num_selections = random.multinomial(lump * num_used, chances / chances.sum())
            selections = np.zeros((2, 1, num_experts), np.int64)
            selections[1, 0] = num_selections
            heat.add(selections)
            num_tokens += lump
            if first + lump >= 2000:
                assert hits(heat, chances, num_local) >= 0.95 * best, (topic, first)
    assert heat.num_tokens() == num_tokens


def test_owners_pairs_add_up() -> None:
    heat = Heat(LAYERS, HalfLives())
    heat.add_pairs({"local": [1, 2], "cpu0": [0, 0]})
    heat.add_pairs({"local": [10, 20], "cpu1": [0, 3]})
    copied = heat.copy()
    heat.add_pairs({"cpu1": [1, 0]})
    assert copied.pairs_of_owner == {"local": [11, 22], "cpu1": [0, 3]}
    assert heat.pairs_of_owner["cpu1"] == [1, 3]


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0], 0.5, 0), ([5, 5, 5, 5], 0.5, 2), ([5, 5, 5, 5], 0.51, 3), ([1, 97, 2], 0.5, 1),
        ([1, 97, 2], 0.98, 2), ([1, 97, 2], 1.0, 3),
    ],
)  # fmt: skip
def test_experts_for_a_share(counts: list[int], share: float, expected: int) -> None:
    assert experts_for(np.array(counts), share) == expected


def test_the_share_of_the_hottest() -> None:
    assert hottest_share(np.array([1, 7, 2]), 1) == 0.7
    assert hottest_share(np.array([0, 0]), 1) == 0.0
