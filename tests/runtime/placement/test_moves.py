"""Which experts change places while serving: never more than allowed, never for chance, and soon
after the topic has changed. Traffic is planted routing (bench.planted_routing), 128 experts of
which 8 are used."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import I64Array, Phase
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.placement.box import CopySpeed
from dflash_runtime.placement.heat import HalfLives, Heat, layers_of, phase_index
from dflash_runtime.placement.moves import (
    FEWEST_TOKENS,
    RESTING,
    MovePolicy,
    MovePrices,
    MoveRound,
    OwnerPrice,
    Swap,
    move_prices,
    staged_bytes,
    swapped,
)
from dflash_runtime.placement.plan import Plan
from dflash_runtime.placement.planner import plan
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER, make_placement
from support.planned_boxes import IMPOSED, moe_spec, qwen3_30b, situation
from support.planted_choices import planted_choices

LAYERS, EXPERTS, USED = 4, 128, 8
MOE = moe_spec([2_870_000] * LAYERS, num_experts=EXPERTS, num_used=USED)
PRICES = MovePrices({
    LOCAL_OWNER: OwnerPrice(np.full(LAYERS, 2e-6), np.full(LAYERS, 0.3e-3)),
    HOST_OWNER: OwnerPrice(np.full(LAYERS, 33e-6), np.zeros(LAYERS)),
})  # fmt: skip
"""As in the 30B shape: products of 80 GB/s, copies of 10."""
REQUEST = 400
WALK = 46_000


def placement_of(here: dict[int, list[int]]) -> Placement:
    there = {
        layer.layer_id: sorted({*range(layer.num_experts)} - {*here.get(layer.layer_id, [])})
        for layer in MOE.layers
    }
    owners = {LOCAL_OWNER: here, HOST_OWNER: there}
    owned = {name: OwnedExperts.from_lists(each) for name, each in owners.items()}
    return make_placement(MOE, owned)


def here_of(placement: Placement) -> dict[int, set[int]]:
    owned = placement.owners[placement.owner_names.index(LOCAL_OWNER)].by_layer
    return {layer_id: set(ids.tolist()) for layer_id, ids in owned.items()}


def policy_of(most: int = 64, min_gain: float = 2.0) -> MovePolicy:
    return MovePolicy(MOE, PRICES, most=most, min_gain=min_gain)


def new_heat() -> Heat:
    return Heat(layers_of(MOE), HalfLives())


def add(heat: Heat, counts: I64Array) -> None:
    """Shapes: counts [L, E], of written tokens."""
    both = np.zeros((2, LAYERS, EXPERTS), np.int64)
    both[phase_index(Phase.DECODE)] = counts
    heat.add(both)


def counted(chosen: I64Array) -> I64Array:
    """Shapes: chosen [L, T, K]; result [L, E]."""
    return np.stack([np.bincount(each.ravel(), minlength=EXPERTS) for each in chosen])


walk_of = partial(
    planted_choices, length=WALK, num_layers=LAYERS, num_experts=EXPERTS, num_used=USED
)


@dataclass
class Served:
    """Requests as an engine serves them: rounds are decided within and between them, and applied
    between them, once copied."""

    placement: Placement
    heat: Heat
    policy: MovePolicy = field(default_factory=policy_of)
    moved: list[tuple[int, Swap]] = field(default_factory=list)
    """With the written tokens before."""
    pending: MoveRound | None = None

    def serve(self, chosen: I64Array) -> None:
        for begin in range(0, chosen.shape[1], FEWEST_TOKENS):
            self._decide()
            for first in range(begin, begin + FEWEST_TOKENS, 40):  # about as often as it counts
                add(self.heat, counted(chosen[:, first : first + 40]))
        found, self.pending = self.pending, None
        if found is not None:
            now = self.heat.num_tokens(Phase.DECODE)
            self.placement = swapped(self.placement, found.swaps)
            self.moved += [(now, swap) for swap in found.swaps]
            self.policy.note_applied(found, now)

    def _decide(self) -> None:
        if self.pending is None:
            self.pending = self.policy.decide(self.placement, self.heat)

    def hit_share(self, chosen: I64Array) -> float:
        counts, here = counted(chosen), here_of(self.placement)
        hits = sum(counts[layer, sorted(ids)].sum() for layer, ids in here.items())
        return float(hits / counts.sum())


def served_from(kind: str, *, slots: int, seed: int = 1, num_learnt: int = 20_000) -> Served:
    """An engine whose experts were placed by heat that was learnt on a stretch of the walk."""
    walk, heat = walk_of(kind, seed), new_heat()
    for begin in range(0, num_learnt, 40):
        add(heat, counted(walk[:, begin : begin + 40]))
    hottest = np.argsort(-heat.slow[1], axis=1, kind="stable")[:, :slots]
    here = {layer: sorted(hottest[layer].tolist()) for layer in range(LAYERS)}
    return Served(placement_of(here), heat)


def best_share(chosen: I64Array, slots: int) -> float:
    """Of a placement made for this text."""
    counts = counted(chosen)
    return float(np.sort(counts, axis=1)[:, ::-1][:, :slots].sum() / counts.sum())


@pytest.mark.parametrize(
    ("kind", "slots"), [("qwen3", 24), ("qwen3", 40), ("qwen3", 80), ("fickle", 40), ("flat", 40)]
)
def test_on_steady_traffic_hardly_any_expert_moves(kind: str, slots: int) -> None:
    served, walk = served_from(kind, slots=slots), walk_of(kind, 1)
    for begin in range(22_000, 32_000, REQUEST):
        served.serve(walk[:, begin : begin + REQUEST])
    assert 2 * len(served.moved) <= 0.01 * LAYERS * EXPERTS


@pytest.mark.parametrize("slots", [24, 40, 80])
def test_another_stretch_finds_what_a_placement_made_for_it_would(slots: int) -> None:
    served, walk = served_from("qwen3", slots=slots), walk_of("qwen3", 1)
    for begin in range(40_000, 42_000, REQUEST):
        served.serve(walk[:, begin : begin + REQUEST])
    rest = walk[:, 42_000:45_900]
    assert served.hit_share(rest) >= 0.95 * best_share(rest, slots)


@pytest.mark.parametrize("slots", [40, 80])
def test_where_all_routing_is_new_experts_follow_within_2000_tokens(slots: int) -> None:
    """Another file's routers, so that nothing that was learnt holds: worse than any change of
    topic. Compared with the best for the 8,000 tokens that follow, which nothing can know."""
    served, other = served_from("qwen3", slots=slots), walk_of("qwen3", 8)
    rest = other[:, 12_000:20_000]
    assert served.hit_share(rest) < 0.75 * best_share(rest, slots)
    for begin in range(10_000, 12_000, REQUEST):
        served.serve(other[:, begin : begin + REQUEST])
    assert served.hit_share(rest) >= 0.93 * best_share(rest, slots)


def test_an_expert_that_was_moved_rests() -> None:
    served = served_from("qwen3", slots=40, num_learnt=2_000)
    for seed in (8, 9, 10):
        for begin in range(10_000, 12_400, REQUEST):
            served.serve(walk_of("qwen3", seed)[:, begin : begin + REQUEST])
    last: dict[tuple[int, int], int] = {}
    assert len(served.moved) > 100
    for now, swap in served.moved:
        for expert in (swap.arriving, swap.leaving):
            key = swap.layer_id, expert
            assert now - last.get(key, -RESTING) >= RESTING
            last[key] = now


@given(
    seed=st.integers(0, 2**32 - 1),
    most=st.integers(0, 40),
    min_gain=st.integers(0, 4),
    num_here=st.lists(st.integers(0, EXPERTS), min_size=LAYERS, max_size=LAYERS),
    num_rounds=st.integers(1, 4),
)
def test_rounds_are_legal(
    seed: int, most: int, min_gain: int, num_here: list[int], num_rounds: int
) -> None:
    """Whatever was counted: at most so many swaps, each worth it, as many experts as before."""
    random = np.random.default_rng(seed)
    here = {
        layer: sorted(random.choice(EXPERTS, num, replace=False).tolist())
        for layer, num in enumerate(num_here)
        if num
    }
    placement, heat, policy = placement_of(here), new_heat(), policy_of(most, min_gain)
    if LOCAL_OWNER not in placement.owner_names or HOST_OWNER not in placement.owner_names:
        return
    for _ in range(num_rounds):
        skew = random.dirichlet(np.full(EXPERTS, 0.2), LAYERS)
        num_tokens = int(random.integers(0, 3000))
        add(heat, np.stack([random.multinomial(USED * num_tokens, each) for each in skew]))
        found = policy.decide(placement, heat)
        if found is None:
            continue
        assert 0 < len(found.swaps) <= most
        assert found.is_worth(min_gain, 0.0)
        assert not found.is_worth(max(min_gain, 1), found.saved_s + 1e-9)
        experts = [(s.layer_id, e) for s in found.swaps for e in (s.arriving, s.leaving)]
        assert len(set(experts)) == len(experts)
        after = swapped(placement, found.swaps)
        assert after.experts_per_layer == placement.experts_per_layer
        for before, now in zip(placement.owners, after.owners, strict=True):
            assert {k: v.size for k, v in before.by_layer.items()} == {
                k: v.size for k, v in now.by_layer.items()
            }
        policy.note_applied(found, heat.num_tokens(Phase.DECODE))
        placement = after


def test_swaps_that_a_round_left_out_follow_at_once() -> None:
    served = served_from("qwen3", slots=40, num_learnt=2_000)
    served.policy = policy_of(most=3)
    other = walk_of("qwen3", 8)
    for begin in range(0, 2_000, REQUEST):
        add(served.heat, counted(other[:, begin : begin + REQUEST]))
        found = served.policy.decide(served.placement, served.heat)
    rounds = 0
    while found is not None and rounds < 5:
        rounds += 1
        assert len(found.swaps) == 3
        served.placement = swapped(served.placement, found.swaps)
        served.policy.note_applied(found, served.heat.num_tokens(Phase.DECODE))
        found = served.policy.decide(served.placement, served.heat)
    assert rounds == 5


def test_nothing_is_decided_before_enough_was_written() -> None:
    policy, heat = policy_of(), new_heat()
    placement = placement_of({layer: [*range(40)] for layer in range(LAYERS)})
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    counts[:, 100:108] = 5_000
    assert policy.decide(placement, heat) is None
    add(heat, counts)
    assert policy.decide(placement, heat) is not None
    counts[:] = 0
    counts[:, 108:116] = FEWEST_TOKENS - 1
    add(heat, counts)
    assert policy.decide(placement, heat) is None


def test_a_swap_that_does_not_fit_is_refused() -> None:
    placement = placement_of({layer: [*range(40)] for layer in range(LAYERS)})
    for swap in (Swap(0, 3, 4), Swap(0, 50, 60), Swap(0, 50, 50)):
        with pytest.raises(ValueError, match="to swap"):
            swapped(placement, [swap])


def test_prices_are_those_of_the_processor_and_the_bus() -> None:
    found = situation(qwen3_30b(), IMPOSED["narrow bus"])
    gpu, _ = found.parents
    prices = move_prices(found, gpu, prompt_s=1e-3)
    assert prices is not None
    here, there = (prices.owners[name] for name in (LOCAL_OWNER, HOST_OWNER))
    np.testing.assert_allclose(there.selection_s, 2.87e6 / 80e9, rtol=0.02)
    np.testing.assert_allclose(here.arrival_s, 2.87e6 / 2e9, rtol=0.02)
    assert (here.selection_s < 0.2 * there.selection_s).all()
    assert (there.arrival_s == 0.0).all()
    assert prices.prompt_s == 1e-3
    assert staged_bytes(found, gpu) == 0
    assert 40 * 2.87e6 <= staged_bytes(replace(found, most_swaps=1000), gpu) <= 128 * 2**20


def test_without_measured_copies_or_with_shared_memory_nothing_moves() -> None:
    found = situation(qwen3_30b(), IMPOSED["narrow bus"])
    gpu, cpu = found.parents
    not_measured = replace(found, box=replace(found.box, copies={"cuda:0": CopySpeed("cuda:0")}))
    for each, parent in (
        (not_measured, gpu),
        (found, cpu),
        (found, replace(gpu, shares_host_memory=True)),
    ):
        assert move_prices(each, parent) is None
        assert staged_bytes(replace(each, most_swaps=48), parent) == 0


def test_a_plan_keeps_memory_for_what_moves_and_says_so() -> None:
    found = situation(qwen3_30b(), IMPOSED["big ram, tiny card"])
    works = []
    for most in (0, 48):
        planned = plan(replace(found, most_swaps=most))
        assert isinstance(planned, Plan)
        budget = planned.budgets[0]
        used = budget.trunk_bytes + budget.cache_bytes + budget.work_bytes + budget.expert_bytes
        assert used <= budget.free_bytes
        works.append(budget.work_bytes)
    assert works[1] - works[0] >= 40 * 2.87e6
