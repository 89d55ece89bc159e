"""The even split: everyone gets as many, every expert has one owner, and always the same one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import ProtocolError, SettingsError
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.placement.split import LOCAL_OWNER, even_split, make_placement
from support.examples import examples
from support.routed_batches import moe_layer


def spec_of(experts_per_layer: dict[int, int]) -> MoeSpec:
    return MoeSpec(
        tuple(
            moe_layer(layer_id=layer_id, num_experts=num_experts)
            for layer_id, num_experts in sorted(experts_per_layer.items())
        )
    )


SPEC = spec_of({0: 8, 1: 5})
MODELS = st.dictionaries(st.integers(0, 6), st.integers(1, 12), min_size=1, max_size=4)


def lists_of(placement: Placement) -> dict[str, dict[int, list[int]]]:
    return {
        name: {layer_id: ids.tolist() for layer_id, ids in owned.by_layer.items()}
        for name, owned in zip(placement.owner_names, placement.owners, strict=True)
    }


@examples(100)
@given(MODELS, st.integers(0, 5), st.data())
def test_every_expert_has_exactly_one_owner_and_daemons_share_evenly(
    experts_per_layer: dict[int, int], num_daemons: int, data: st.DataObject
) -> None:
    names = [f"cpu{index}" for index in range(num_daemons)]
    num_local = None
    if num_daemons:
        num_local = data.draw(st.none() | st.integers(0, min(experts_per_layer.values())))
    spec = spec_of(experts_per_layer)
    placement = even_split(spec, names, num_local)
    lists = lists_of(placement)
    for layer_id, num_experts in experts_per_layer.items():
        owners = Counter(i for layers in lists.values() for i in layers.get(layer_id, []))
        assert owners == Counter(range(num_experts))
        shares = [len(lists[name].get(layer_id, [])) for name in names]
        assert not shares or max(shares) - min(shares) <= 1
        expected_local = (0 if names else num_experts) if num_local is None else num_local
        local = lists.get(LOCAL_OWNER, {}).get(layer_id, [])
        assert local == list(range(expected_local))
    assert [name for name in placement.owner_names if name != LOCAL_OWNER] == names
    assert lists_of(even_split(spec, names, num_local)) == lists


def test_daemons_are_dealt_experts_one_by_one() -> None:
    assert lists_of(even_split(SPEC, ["cpu0", "cpu1", "cpu2"], 1)) == {
        "local": {0: [0], 1: [0]},
        "cpu0": {0: [1, 4, 7], 1: [1, 4]},
        "cpu1": {0: [2, 5], 1: [2]},
        "cpu2": {0: [3, 6], 1: [3]},
    }


def test_without_daemons_everything_is_local() -> None:
    for num_local in (None, 5):
        placement = even_split(spec_of({0: 5, 3: 5}), [], num_local)
        assert lists_of(placement) == {"local": {0: [0, 1, 2, 3, 4], 3: [0, 1, 2, 3, 4]}}


def test_with_daemons_nothing_is_local_unless_asked_for() -> None:
    assert even_split(SPEC, ["cpu0"], None).owner_names == ("cpu0",)
    assert even_split(SPEC, ["cpu0"], 0).owner_names == ("cpu0",)
    assert even_split(SPEC, ["cpu0"], 2).owner_names == ("local", "cpu0")


def test_a_daemon_for_which_nothing_is_left_still_has_its_place() -> None:
    placement = even_split(spec_of({0: 2}), ["cpu0", "cpu1", "cpu2"], None)
    assert placement.owner_names == ("cpu0", "cpu1", "cpu2")
    assert [owned.num_experts for owned in placement.owners] == [1, 1, 0]


@pytest.mark.parametrize(
    ("names", "num_local", "reason"),
    [
        (["cpu0"], -1, r"-1 local experts\b.*layer 0\b.*\b8\b"),
        (["cpu0"], 6, r"\b6 local experts\b.*layer 1\b.*\b5\b"),
        ([], 9, r"\b9 local experts\b.*layer 0\b.*\b8\b"),
        ([], 5, r"\b3 experts\b.*owner\b.*daemon"),
        ([], 0, r"\b8 experts\b.*owner"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_the_amounts(
    names: list[str], num_local: int, reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        even_split(SPEC, names, num_local)


def test_a_placement_knows_the_layers_of_its_model() -> None:
    owners = {"a": OwnedExperts.from_lists({0: range(8), 1: range(5)})}
    placement = make_placement(SPEC, owners)
    assert placement.experts_per_layer == {0: 8, 1: 5}
    np.testing.assert_array_equal(placement.routing[1].local_expert_id, np.arange(5))
    with pytest.raises(ProtocolError, match=r"layer 1 expert 4 .*owner"):
        make_placement(SPEC, {"a": OwnedExperts.from_lists({0: range(8), 1: range(4)})})
