"""Sets of experts chosen by heat, on planted routing (bench.planted_routing): the share of
selections that is predicted for them, and the share that they have of text that is new to heat."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import F64Array, I64Array, Phase
from dflash_runtime.placement.expectation import chosen_by_prompt
from dflash_runtime.placement.heat import (
    HalfLives,
    Heat,
    HeatLayer,
    _undecayed,
    phase_index,
)
from support.planted_choices import planted_choices

LAYERS, EXPERTS, USED = 4, 128, 8
WALK, LUMP = 60_000, 40
UNSEEN = slice(40_000 // LUMP, None)
"""No heat is learnt there."""
SLOTS = (40, 72, 102)
"""Experts of a layer that fit: 31, 56 and 80 %."""
STEADY_ENDS = (14_000, 20_000, 26_000, 32_000, 39_000)
"""Where the text ends that heat is learnt on: chance differs from one to the next."""


@cache
def counted(kind: str, seed: int = 1) -> I64Array:
    """Selections along a walk, by lumps of tokens. Shapes: result [T / LUMP, L, E]."""
    chosen = planted_choices(
        kind, seed, length=WALK, num_layers=LAYERS, num_experts=EXPERTS, num_used=USED
    )
    counts = np.zeros((WALK // LUMP, LAYERS, EXPERTS), np.int64)
    lumps = np.repeat(np.arange(WALK // LUMP), LUMP * USED)
    for layer, ids in enumerate(chosen):
        np.add.at(counts[:, layer], (lumps, ids.ravel()), 1)
    return counts


def new_heat() -> Heat:
    return Heat([HeatLayer(layer, EXPERTS, USED) for layer in range(LAYERS)], HalfLives())


def learn(heat: Heat, lumps: I64Array, phase: Phase = Phase.DECODE) -> Heat:
    for lump in lumps:
        both = np.zeros(heat.shape, np.int64)
        both[phase_index(phase)] = lump
        heat.add(both)
    return heat


def learnt(kind: str, begin: int, end: int, phase: Phase = Phase.DECODE) -> Heat:
    return learn(new_heat(), counted(kind)[begin // LUMP : end // LUMP], phase)


def expected_of(heat: Heat) -> F64Array:
    """Shapes: result [L, E]."""
    return np.stack([heat.probabilities(Phase.DECODE, layer) for layer in range(LAYERS)])


def share_of_hottest(by: F64Array | I64Array, counts: F64Array | I64Array, slots: int) -> float:
    """The share of counts that the experts with the largest values `by` have."""
    hottest = np.argsort(-by, axis=1, kind="stable")[:, :slots]
    return float(np.take_along_axis(counts, hottest, axis=1).sum() / counts.sum())


@pytest.mark.wide(1)
@pytest.mark.parametrize("kind", ["qwen3", "fickle", "flat"])
@pytest.mark.parametrize("slots", SLOTS)
def test_on_steady_traffic_the_set_is_that_of_the_long_term(kind: str, slots: int) -> None:
    """And its predicted share is the real one: of what follows, nothing is learnt from the latest
    tokens."""
    unseen = counted(kind)[UNSEEN].sum(axis=0)
    for end in STEADY_ENDS:
        heat = learnt(kind, 0, end)
        expected = expected_of(heat)
        real = share_of_hottest(expected, unseen, slots)
        slow = heat.slow[phase_index(Phase.DECODE)]
        assert real >= share_of_hottest(slow, unseen, slots) - 0.002, end
        assert share_of_hottest(expected, expected, slots) == pytest.approx(real, abs=0.02), end


@pytest.mark.wide(1)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("num_tokens", [1_000, 2_000, 4_000])
def test_little_heat_promises_no_more_than_it_gives(slots: int, num_tokens: int) -> None:
    """What is hottest in a short text is less so in others."""
    unseen = counted("qwen3")[UNSEEN].sum(axis=0)
    promised, real = [], []
    for begin in range(0, 36_000, 4_000):
        expected = expected_of(learnt("qwen3", begin, begin + num_tokens))
        promised.append(share_of_hottest(expected, expected, slots))
        real.append(share_of_hottest(expected, unseen, slots))
    assert np.mean(promised) == pytest.approx(np.mean(real), abs=0.02)


def changed(num_changed: int) -> I64Array:
    """The walk with so many experts of each layer renamed among themselves."""
    random, counts = np.random.default_rng(0), counted("qwen3").copy()
    for layer in range(LAYERS):
        some = random.choice(EXPERTS, num_changed, replace=False)
        counts[:, layer, random.permutation(some)] = counts[:, layer, some]
    return counts


@pytest.mark.wide(2)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("num_changed", [32, 64, 128])
@pytest.mark.parametrize("num_before", [1_000, 10_000, 20_000])
def test_after_a_change_of_topic_the_set_follows_within_2000_tokens(
    slots: int, num_changed: int, num_before: int
) -> None:
    """It has 0.95 of what the best set for all of the new topic has, which nothing can know yet;
    and what is predicted for it is about what it has, though the long memory has both topics."""
    other = changed(num_changed)
    heat = learnt("qwen3", 0, num_before)
    for begin in range(20_000, 30_000, 2_000):
        learn(heat, other[begin // LUMP : (begin + 2_000) // LUMP])
        expected, unseen = expected_of(heat), other[UNSEEN].sum(axis=0)
        real = share_of_hottest(expected, unseen, slots)
        assert real >= 0.95 * share_of_hottest(unseen, unseen, slots), begin
    assert share_of_hottest(expected, expected, slots) == pytest.approx(real, abs=0.035)


@pytest.mark.parametrize("slots", SLOTS)
def test_prompts_say_what_few_written_tokens_do_not(slots: int) -> None:
    unseen = counted("qwen3")[UNSEEN].sum(axis=0)
    without, both = [], []
    for begin in range(0, 36_000, 4_000):
        without.append(learnt("qwen3", begin, begin + 800))
        both.append(learnt("qwen3", 36_000 - begin, 40_000 - begin, Phase.PREFILL))
        learn(both[-1], counted("qwen3")[begin // LUMP : (begin + 800) // LUMP])
    alone, real, promised = (
        np.mean([share_of_hottest(expected_of(each), unseen, slots) for each in without]),
        np.mean([share_of_hottest(expected_of(each), unseen, slots) for each in both]),
        np.mean([share_of_hottest(expected_of(each), expected_of(each), slots) for each in both]),
    )
    best = share_of_hottest(unseen, unseen, slots)
    assert best - real < 0.6 * (best - alone)
    assert promised == pytest.approx(real, abs=0.02)


@pytest.mark.parametrize("slots", SLOTS)
def test_the_coldest_are_not_expected_to_be_as_cold_as_they_look(slots: int) -> None:
    """Chance is part of why they are the coldest: what will be missed is predicted nevertheless."""
    expected_missed, missed = [], []
    for seed in (1, 2):
        counts = counted("qwen3", seed)
        for begin in range(0, 32_000, 4_000):
            prompt = counts[(36_000 - begin) // LUMP : (40_000 - begin) // LUMP]
            heat = learn(new_heat(), prompt, Phase.PREFILL)
            expected = expected_of(learn(heat, counts[begin // LUMP : (begin + 800) // LUMP]))
            expected_missed.append(1.0 - share_of_hottest(expected, expected, slots))
            missed.append(1.0 - share_of_hottest(expected, counts[UNSEEN].sum(axis=0), slots))
    ratio = np.mean(expected_missed) / np.mean(missed)
    print(f"{slots} of {EXPERTS} here: {np.mean(missed):.2%} missed, {ratio:.3f} of it expected")
    assert ratio == pytest.approx(1.0, abs=0.05)


@given(st.integers(1, 5_000), st.floats(1.0, 2_000.0))
def test_decayed_tokens_tell_as_much_as_the_squares_of_their_weights_say(
    num_tokens: int, half_life: float
) -> None:
    weights = 2.0 ** (-np.arange(num_tokens) / half_life)
    undecayed = float(weights.sum() ** 2 / (weights**2).sum())
    assert _undecayed(float(weights.sum()), half_life) == pytest.approx(undecayed, rel=1e-6)


@pytest.mark.parametrize("slots", SLOTS)
def test_phases_that_differ_are_told_apart(slots: int) -> None:
    """Prompts of another kind say nothing of written tokens, once there are enough of these."""
    unseen = counted("qwen3")[UNSEEN].sum(axis=0)
    heat = learn(new_heat(), changed(64)[: 20_000 // LUMP], Phase.PREFILL)
    learn(heat, counted("qwen3")[20_000 // LUMP : 24_000 // LUMP])
    real = share_of_hottest(expected_of(heat), unseen, slots)
    alone = share_of_hottest(expected_of(learnt("qwen3", 20_000, 24_000)), unseen, slots)
    assert real >= alone - 0.005


@pytest.mark.parametrize(("kind", "near"), [("qwen3", 0.08), ("fickle", 0.25), ("flat", 0.03)])
@pytest.mark.parametrize("num_tokens", [480, 2000])
def test_cold_experts_that_a_prompt_chooses_are_as_many_as_predicted(
    kind: str, near: float, num_tokens: int
) -> None:
    shares = counted(kind).sum(axis=0) / WALK
    coldest = np.argsort(shares, axis=1)[:, : EXPERTS - SLOTS[0]]
    size = num_tokens // LUMP
    prompts = counted(kind)[: len(counted(kind)) // size * size].reshape(-1, size, LAYERS, EXPERTS)
    is_chosen = prompts.sum(axis=1) > 0
    real = np.take_along_axis(is_chosen, coldest[None], axis=2).sum(axis=2).mean()
    predicted = chosen_by_prompt(np.take_along_axis(shares, coldest, axis=1), num_tokens)
    assert predicted.sum(axis=1).mean() == pytest.approx(real, rel=near)
