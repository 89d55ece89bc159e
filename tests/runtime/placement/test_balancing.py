"""Owners of one class exchange experts so that none has much more to do than the others, if that is
worth it; hot experts of slower classes come to faster ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import F64Array, I64Array, Phase
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.placement.balancing import Exchange, Share, apply, best_exchange
from dflash_runtime.placement.heat import HalfLives, Heat, layers_of, phase_index
from dflash_runtime.placement.moves import (
    FEWEST_TOKENS,
    HORIZON,
    MovePolicy,
    MovePrices,
    OwnerPrice,
    swapped,
)
from dflash_runtime.placement.split import make_placement
from support.planned_boxes import moe_spec

LAYERS, EXPERTS, USED = 3, 32, 4
MOE = moe_spec([2_870_000] * LAYERS, num_experts=EXPERTS, num_used=USED)
RATE_S = 1e-3
"""Of a selection: in three layers as much as 33 µs in the 48 of a large model, or more."""


def share(name: str, experts: list[int], expected: F64Array, rate_s: float = 1.0) -> Share:
    ids = np.array(experts, np.int64)
    return Share(name, ids, rate_s, float(expected[ids].sum()) * rate_s, 0.0)


def busiest_after(exchange: Exchange, busy: Share, idle: Share, expected: F64Array) -> float:
    less = expected[exchange.leaving] - expected[exchange.arriving]
    return float(max(busy.load_s - less * busy.rate_s, idle.load_s + less * idle.rate_s))


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    rate_s=st.sampled_from([0.25, 1.0, 3.0]),
    least_s=st.sampled_from([0.0, 0.5]),
)
def test_the_best_exchange_is_that_of_all_pairs(
    seed: int, sizes: tuple[int, int], rate_s: float, least_s: float
) -> None:
    random = np.random.default_rng(seed)
    expected = random.random(10)
    ids = random.permutation(10).tolist()
    busy = share("busy", ids[: sizes[0]], expected)
    idle = share("idle", ids[5 : 5 + sizes[1]], expected, rate_s)
    found = best_exchange(busy, idle, expected, doubt=np.zeros(10), least_s=least_s)
    every = [
        Exchange(0.0, leaving, arriving)
        for leaving in busy.experts.tolist()
        for arriving in idle.experts.tolist()
    ]
    best_s = min(
        (max(busiest_after(each, busy, idle, expected), least_s) for each in every),
        default=busy.load_s,
    )
    if found is None:
        assert best_s >= busy.load_s - 1e-9 or busy.load_s <= idle.load_s
        return
    assert max(busiest_after(found, busy, idle, expected), least_s) == pytest.approx(best_s)
    assert found.saved_s == pytest.approx(busy.load_s - best_s)
    loads = busy.load_s, idle.load_s
    apply(found, expected, busy=busy, idle=idle)
    assert busy.load_s < loads[0]
    assert idle.load_s > loads[1]
    assert found.leaving not in busy.experts
    assert found.arriving not in idle.experts


def test_what_chance_may_account_for_is_not_exchanged() -> None:
    expected = np.array([0.9, 0.8, 0.5, 0.4])
    busy, idle = share("busy", [0, 1], expected), share("idle", [2, 3], expected)
    assert best_exchange(busy, idle, expected, doubt=np.full(4, 0.01), least_s=0.0) is not None
    assert best_exchange(busy, idle, expected, doubt=np.full(4, 0.4), least_s=0.0) is None
    busy.doubt_s = 0.9
    assert best_exchange(busy, idle, expected, doubt=np.zeros(4), least_s=0.0) is None


NAMES = "cpu0", "cpu1"


def placement_of(
    lists: dict[str, list[int]] | None = None, classes: dict[str, str] | None = None
) -> Placement:
    """The same experts of each layer; by default halves."""
    if lists is None:
        lists = {"cpu0": [*range(EXPERTS // 2)], "cpu1": [*range(EXPERTS // 2, EXPERTS)]}
    owned = {
        name: OwnedExperts.from_lists({layer: ids for layer in range(LAYERS)})
        for name, ids in lists.items()
    }
    made = make_placement(MOE, owned)
    return replace(made, numeric_classes=classes or dict.fromkeys(lists, "avx2"))


def price(rate_s: float = RATE_S, arrival_s: float = 0.0) -> OwnerPrice:
    return OwnerPrice(np.full(LAYERS, rate_s), np.full(LAYERS, arrival_s))


def policy_of(rates_s: dict[str, float] | None = None, *, most: int = 48) -> MovePolicy:
    owners = {name: price(rate) for name, rate in (rates_s or dict.fromkeys(NAMES, RATE_S)).items()}
    return MovePolicy(MOE, MovePrices(owners), most=most, min_gain=2.0)


def heat_of(shares: F64Array, num_tokens: int = 40_000, seed: int = 1) -> Heat:
    """Of written tokens whose selections have these shares. Shapes: shares [E], sum 1."""
    heat = Heat(layers_of(MOE), HalfLives())
    random = np.random.default_rng(seed)
    for _ in range(0, num_tokens, FEWEST_TOKENS):
        counts: I64Array = np.zeros((2, LAYERS, EXPERTS), np.int64)
        counts[phase_index(Phase.DECODE)] = random.multinomial(USED * FEWEST_TOKENS, shares, LAYERS)
        heat.add(counts)
    return heat


def write_more(heat: Heat, shares: F64Array, num_tokens: int) -> None:
    counts: I64Array = np.zeros((2, LAYERS, EXPERTS), np.int64)
    counts[phase_index(Phase.DECODE)] = np.rint(USED * num_tokens * shares)
    heat.add(counts)


def loads_of(placement: Placement, shares: F64Array, rates_s: dict[str, float]) -> F64Array:
    """Seconds of each layer of a step, by owner. Shapes: result [N, L]."""
    return np.array([
        [USED * shares[owned.by_layer[layer]].sum() * rates_s[name] for layer in range(LAYERS)]
        for name, owned in zip(placement.owner_names, placement.owners, strict=True)
    ])  # fmt: skip


def settled(
    policy: MovePolicy, placement: Placement, heat: Heat, shares: F64Array
) -> tuple[Placement, int]:
    """The placement after all rounds that are worth it, and how many swaps they had."""
    num_swaps = 0
    for _ in range(30):
        found = policy.decide(placement, heat)
        if found is not None:
            placement = swapped(placement, found.swaps)
            policy.note_applied(found, heat.num_tokens(Phase.DECODE))
            num_swaps += len(found.swaps)
        write_more(heat, shares, FEWEST_TOKENS)
    return placement, num_swaps


def skewed(seed: int = 0) -> F64Array:
    """Half of the experts, which the first owner has, are chosen three times as often."""
    weights = np.random.default_rng(seed).random(EXPERTS) + 0.2
    weights[: EXPERTS // 2] *= 3.0
    return np.asarray(weights / weights.sum())


@pytest.mark.parametrize("rates", [(1.0, 1.0), (1.0, 2.0)], ids=str)
def test_the_fullest_owner_gets_less_to_do(rates: tuple[float, float]) -> None:
    rates_s = {name: RATE_S * rate for name, rate in zip(NAMES, rates, strict=True)}
    shares, before = skewed(), placement_of()
    after, num_swaps = settled(policy_of(rates_s), before, heat_of(shares), shares)
    assert num_swaps > 0
    loads, was = (loads_of(each, shares, rates_s) for each in (after, before))
    assert (loads.max(axis=0) <= was.max(axis=0) + 1e-12).all()
    if rates == (1.0, 1.0):
        assert (loads.max(axis=0) < 1.1 * loads.mean(axis=0)).all()
    for owned, then in zip(after.owners, before.owners, strict=True):
        for layer, ids in owned.by_layer.items():
            assert ids.size == then.by_layer[layer].size


def test_three_owners_are_balanced_too() -> None:
    third = EXPERTS // 3
    lists = {
        "a": [*range(third)],
        "b": [*range(third, 2 * third)],
        "c": [*range(2 * third, EXPERTS)],
    }
    rates_s = dict.fromkeys(lists, RATE_S)
    shares = skewed(3)
    after, _ = settled(policy_of(rates_s), placement_of(lists), heat_of(shares), shares)
    loads = loads_of(after, shares, rates_s)
    assert (loads.max(axis=0) < 1.15 * loads.mean(axis=0)).all()


def test_on_steady_and_even_traffic_nothing_moves() -> None:
    shares = np.full(EXPERTS, 1 / EXPERTS)
    for seed in range(5):
        heat = heat_of(shares, 2_000, seed)
        _, num_swaps = settled(policy_of(), placement_of(), heat, shares)
        assert num_swaps == 0


def test_an_owner_of_another_class_that_the_layer_waits_for_makes_it_useless() -> None:
    """And one of an unknown class is like no other."""
    shares = skewed()
    lists = {"cpu0": [*range(12)], "cpu1": [*range(12, 24)], "slow": [*range(24, EXPERTS)]}
    classes = {"cpu0": "avx2", "cpu1": "avx2", "slow": "sse2"}
    rates_s = {"cpu0": RATE_S, "cpu1": RATE_S, "slow": 40 * RATE_S}
    heat = heat_of(shares)
    without = MovePrices({name: price(rates_s[name]) for name in ("cpu0", "cpu1")})
    policy = MovePolicy(MOE, without, most=48, min_gain=2.0)
    assert policy.decide(placement_of(lists, classes), heat) is not None
    found = policy_of(rates_s).decide(placement_of(lists, classes), heat)
    assert found is not None
    assert {swap.of for swap in found.swaps} == {"slow"}  # hot experts come from there
    unknown = placement_of(classes=dict.fromkeys(NAMES, ""))
    assert policy_of().decide(unknown, heat) is None


def test_what_saves_less_than_a_handover_costs_stays() -> None:
    shares, heat = skewed(), heat_of(skewed())
    fast = dict.fromkeys(NAMES, RATE_S / 100)
    assert policy_of(fast).decide(placement_of(), heat) is None
    found = policy_of().decide(placement_of(), heat)
    assert found is not None
    assert found.saved_s >= 2 * found.cost_s > 0.0
    gained = loads_of(placement_of(), shares, dict.fromkeys(NAMES, RATE_S)).max(axis=0).sum()
    assert found.saved_s <= gained * HORIZON


@pytest.mark.parametrize("most_layers", [0, 1, 2])
def test_a_round_changes_no_more_layers_of_an_owner_than_it_can(most_layers: int) -> None:
    prices = {"cpu0": price(), "cpu1": replace(price(), most_layers=most_layers)}
    policy = MovePolicy(MOE, MovePrices(prices), most=48, min_gain=0.0)
    heat = heat_of(skewed())
    found = policy.decide(placement_of(), heat)
    layers = set() if found is None else {swap.layer_id for swap in found.swaps}
    assert len(layers) == most_layers


def test_an_owner_without_a_price_keeps_its_experts() -> None:
    heat = heat_of(skewed())
    assert policy_of({"cpu0": RATE_S}).decide(placement_of(), heat) is None


def test_replicas_stay() -> None:
    placement = placement_of({"cpu0": [*range(EXPERTS)], "cpu1": [*range(EXPERTS)]})
    assert policy_of().decide(placement, heat_of(skewed())) is None
