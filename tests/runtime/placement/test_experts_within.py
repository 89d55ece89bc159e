"""Which experts stay within a budget: no more memory than asked, as many as fit, the hottest ones,
and none is lost."""

from __future__ import annotations

from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_protocol.ids import F64Array
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.placement import experts_within as module
from dflash_runtime.placement.experts_within import LayerRoom
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER

NUM_LAYERS, NUM_EXPERTS, BLOCK = 3, 12, 5
MOST = 8


def placement_of(num_here: int) -> Placement:
    """With an owner more, which has the last expert, and one that two owners have."""
    here = {layer_id: range(num_here) for layer_id in range(NUM_LAYERS)}
    away = {layer_id: range(num_here - 1, NUM_EXPERTS - 1) for layer_id in range(NUM_LAYERS)}
    other = {layer_id: [NUM_EXPERTS - 1] for layer_id in range(NUM_LAYERS)}
    return Placement(
        dict.fromkeys(range(NUM_LAYERS), NUM_EXPERTS),
        (LOCAL_OWNER, HOST_OWNER, "daemon"),
        tuple(OwnedExperts.from_lists({**each}) for each in (here, away, other)),
    )


def held_bytes(num_experts: int) -> int:
    """Three bytes an expert, in blocks."""
    return -(-3 * num_experts // BLOCK) * BLOCK


experts_within = partial(module.experts_within, here=LOCAL_OWNER)
ROOMS = [LayerRoom(layer_id, 2, MOST, held_bytes) for layer_id in range(NUM_LAYERS)]


def ids_of(placement: Placement, owner: int, layer_id: int) -> set[int]:
    return {*placement.owners[owner].by_layer[layer_id].tolist()}


def total_bytes(placement: Placement) -> int:
    return sum(held_bytes(len(ids_of(placement, 0, each))) for each in range(NUM_LAYERS))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1000), budgets=st.lists(st.integers(0, 90), min_size=1, max_size=4))
def test_budgets_are_kept_and_used(seed: int, budgets: list[int]) -> None:
    rng = np.random.default_rng(seed)
    heats = [rng.random(NUM_EXPERTS).round(1) for _ in range(NUM_LAYERS)]

    def heat_of(layer_id: int) -> F64Array:
        return heats[layer_id]

    placement = placement_of(MOST)
    least_bytes = NUM_LAYERS * held_bytes(2)
    for budget in budgets:
        before, placement = placement, experts_within(placement, ROOMS, budget, heat_of=heat_of)
        assert total_bytes(placement) <= max(budget, least_bytes)
        is_cut = total_bytes(before) > budget
        for layer_id in range(NUM_LAYERS):
            here, away = (ids_of(placement, owner, layer_id) for owner in (0, 1))
            assert here | away | {NUM_EXPERTS - 1} == {*range(NUM_EXPERTS)}
            assert ids_of(placement, 2, layer_id) == {NUM_EXPERTS - 1}
            assert 2 <= len(here) <= MOST
            was, heat = ids_of(before, 0, layer_id), heats[layer_id]
            if was > here:
                assert max(heat[[*(was - here)]]) <= min(heat[[*here]])
                assert is_cut
                # A block that is kept is full.
                assert held_bytes(len(here) + 1) > held_bytes(len(here))
            if here > was and away - here:
                assert min(heat[[*(here - was)]]) >= max(heat[[*(away - here)]])
        again = experts_within(placement, ROOMS, budget, heat_of=heat_of)
        assert total_bytes(again) == total_bytes(placement)


def test_the_same_placement_comes_back_if_nothing_changes() -> None:
    placement = placement_of(MOST)
    same = experts_within(placement, ROOMS, 1 << 20, heat_of=lambda _: np.zeros(NUM_EXPERTS))
    assert same is placement
    least = experts_within(placement, ROOMS, 0, heat_of=lambda _: np.zeros(NUM_EXPERTS))
    assert total_bytes(least) == NUM_LAYERS * held_bytes(2)
    assert experts_within(least, ROOMS, -5, heat_of=lambda _: np.zeros(NUM_EXPERTS)) is least
