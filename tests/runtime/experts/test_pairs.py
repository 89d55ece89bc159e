"""Shares of a layer's pairs, the same whether compiled code or numpy finds them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.batch import Pairs
from dflash_protocol.placement import LayerRouting, OwnedExperts, Placement
from dflash_protocol.ring import compiled as ring_native
from dflash_runtime.experts.pairs import (
    all_pairs,
    pairs_of_some,
    shared_routing,
    split_by_owner,
)
from support.examples import examples

NUM_EXPERTS, NUM_USED, NUM_OWNERS = 11, 3, 3


def shared_out(seed: int, num_tokens: int, routing: LayerRouting) -> tuple[Pairs, dict[int, Pairs]]:
    """What is not the first owner's, and by whose it is."""
    random = np.random.default_rng(seed)
    ids = random.random((num_tokens, NUM_EXPERTS)).argsort(axis=1)[:, :NUM_USED].astype(np.int32)
    weights = random.random(ids.shape, dtype=np.float32)
    share, num_whole_tokens, counts = pairs_of_some(ids, weights, routing.owner_index != 0)
    every = all_pairs(ids, weights)
    expected = every.where(routing.owner_index[every.expert_ids] != 0)
    assert_same_pairs(share, expected)
    whole = (routing.owner_index[ids] != 0).all(axis=1).sum()
    assert num_whole_tokens == whole
    if counts is not None:
        np.testing.assert_array_equal(counts, np.bincount(ids.reshape(-1), minlength=NUM_EXPERTS))
    by_owner = dict(split_by_owner(share, routing)) if share.num_pairs else {}
    return share, {owner: pairs for owner, pairs in by_owner.items() if pairs.num_pairs}


def assert_same_pairs(one: Pairs, other: Pairs) -> None:
    np.testing.assert_array_equal(one.token_indices, other.token_indices)
    np.testing.assert_array_equal(one.expert_ids, other.expert_ids)
    np.testing.assert_array_equal(one.weights, other.weights)
    if one.counts is not None:
        counts = np.bincount(one.expert_ids, minlength=NUM_EXPERTS)
        np.testing.assert_array_equal(one.counts, counts)


@examples(100)
@given(st.integers(0, 1 << 32), st.integers(1, 60), st.integers(1, NUM_OWNERS))
def test_shares_are_the_same_whatever_finds_them(seed: int, num_tokens: int, owners: int) -> None:
    owner_index = np.random.default_rng(seed).integers(0, owners, NUM_EXPERTS).astype(np.int32)
    local_ids = np.arange(NUM_EXPERTS, dtype=np.int32)
    routing = LayerRouting(owner_index, local_ids, sole_owner=None, is_identity=False)
    ring_native.kernels()
    with pytest.MonkeyPatch.context() as patch:
        share, by_owner = shared_out(seed, num_tokens, routing)
        patch.setattr(ring_native, "if_compiled", lambda: None)
        plain, plain_by_owner = shared_out(seed, num_tokens, routing)
    assert (share.counts is None) == (num_tokens * NUM_USED <= 64)
    assert plain.counts is None
    assert by_owner.keys() == plain_by_owner.keys()
    assert 0 not in by_owner
    for owner, pairs in by_owner.items():
        assert_same_pairs(pairs, plain_by_owner[owner])


@examples(100)
@given(
    st.integers(0, 1 << 32),
    st.integers(1, 60),
    st.frozensets(st.integers(0, NUM_OWNERS - 1)),
    st.booleans(),
)
def test_equal_owners_have_about_as_many_pairs_of_a_chunk(
    seed: int, num_tokens: int, lost: frozenset[int], has_device: bool
) -> None:
    random = np.random.default_rng(seed)
    holds = random.random((NUM_OWNERS, NUM_EXPERTS)) < 0.6
    holds[0] |= ~holds.any(axis=0)
    lists = [{0: random.permutation(np.flatnonzero(each))} for each in holds]
    answering = np.array([random.choice(np.flatnonzero(each)) for each in holds.T], np.int32)
    placement = Placement(
        {0: NUM_EXPERTS},
        ("a", "b", "c"),
        tuple(OwnedExperts.from_lists(each) for each in lists),
        {0: answering},
        dict.fromkeys("abc", "x"),
    )
    never = 0 if has_device else None
    routing = placement.routing_without(lost)[0]
    ids = random.random((num_tokens, NUM_EXPERTS)).argsort(axis=1)[:, :NUM_USED].astype(np.int32)
    # Pairs of the device's are its own.
    pairs, _, _ = pairs_of_some(
        ids, np.ones(ids.shape, np.float32), routing.owner_index != (-2 if never is None else never)
    )
    found = shared_routing(placement, routing, pairs, layer_id=0, never=never)
    again = shared_routing(placement, routing, pairs, layer_id=0, never=never)
    np.testing.assert_array_equal(found.owner_index, again.owner_index)
    used = np.unique(pairs.expert_ids)
    asked = found.owner_index[used]
    assert not set(asked.tolist()) & set(lost)
    assert has_device is False or 0 not in asked
    assert ((asked >= 0) == (routing.owner_index[used] >= 0)).all()
    for expert in used[asked >= 0].tolist():
        owner, local_id = int(found.owner_index[expert]), int(found.local_expert_id[expert])
        assert placement.owners[owner].by_layer[0][local_id] == expert
    # No expert could go from the fullest to another that then has less than that one.
    counts = np.bincount(pairs.expert_ids, minlength=NUM_EXPERTS)
    loads = [int(counts[found.owner_index == index].sum()) for index in range(NUM_OWNERS)]
    able = [index for index in range(NUM_OWNERS) if index not in lost and index != never]
    if len(able) == 2 and holds[able].all():
        assert abs(loads[able[0]] - loads[able[1]]) <= counts.max()
