"""What kernels are told of a tree: the way that states go through it, and paths."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from dflash_runtime.compute.gpu.layers.branch import FROM_SEQUENCE, GOES_ON, Branch, state_walk
from dflash_runtime.compute.trees import MOST_NODES, Tree
from support.emulated_device import EmulatedDevice
from support.trees import BUSHY, CHAIN, parent_lists, way_to


def tree_of(parents: list[int]) -> Tree:
    return Tree(np.array(parents, np.int32), 5)


@given(parent_lists(smallest=1, largest=MOST_NODES))
def test_every_token_goes_on_from_its_parents_state(parents: list[int]) -> None:
    walk, num_places = state_walk(tree_of(parents))
    assert sorted(walk[:, 0].tolist()) == list(range(len(parents)))
    kept: dict[int, list[int]] = {}
    state: list[int] = []
    for token, source, place in walk.tolist():
        if source == FROM_SEQUENCE:
            state = []
        elif source != GOES_ON:
            state = kept[source]
        state = [*state, token]
        assert state == way_to(parents, token)
        if place >= 0:
            assert place < num_places
            kept[place] = state
    assert set(kept) == set(range(num_places))


def test_few_states_are_kept_at_a_time() -> None:
    for parents, expected in ((CHAIN, 0), ([-1] * 9, 0), ([-1, *[0] * 63], 1), (BUSHY, 5)):
        assert state_walk(tree_of(parents))[1] == expected


@given(parent_lists(smallest=1, largest=MOST_NODES))
def test_paths_lead_from_the_sequence_to_each_token(parents: list[int]) -> None:
    branch = Branch(EmulatedDevice(), tree_of(parents))
    paths = np.asarray(branch.paths)
    assert paths.shape == (len(parents), MOST_NODES)
    for token in range(len(parents)):
        way = way_to(parents, token)
        assert paths[token, : len(way)].tolist() == way
        assert np.asarray(branch.positions)[token] == 5 + len(way) - 1
