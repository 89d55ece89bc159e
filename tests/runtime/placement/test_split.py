"""The even split: everyone gets as many, every expert has one owner, and always the same one."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import ProtocolError, SettingsError
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_protocol.wire.messages import Offer
from dflash_runtime.placement.budgets import ExpertBudget
from dflash_runtime.placement.split import LOCAL_OWNER, even_split, make_placement
from support.examples import examples
from support.routed_batches import moe_layer
from support.scripted_daemon import good_offer


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


def offer_of(spec: MoeSpec, num_experts: float, *, device: str = "cuda:0", held: int = 0) -> Offer:
    """An offer of memory for so many of these experts, some of it taken by held ones."""
    size = spec.layers[0].expert_bytes
    total = int(num_experts * size)
    return good_offer(
        spec,
        device=device,
        free_bytes=total - held * size,
        held_bytes=held * size,
        total_bytes=max(1, total),
    )


@examples(150)
@given(MODELS, st.integers(1, 4), st.data())
def test_a_daemon_gets_no_more_than_it_has_memory_for(
    experts_per_layer: dict[int, int], num_daemons: int, data: st.DataObject
) -> None:
    names = [f"gpu{index}" for index in range(num_daemons)]
    num_local = data.draw(st.none() | st.integers(0, min(experts_per_layer.values())))
    spec = spec_of(experts_per_layer)
    num_remote = sum(experts_per_layer.values()) - (num_local or 0) * len(experts_per_layer)
    rooms = {name: data.draw(st.none() | st.integers(0, num_remote + 2)) for name in names}
    offers = {name: offer_of(spec, room) for name, room in rooms.items() if room is not None}
    total = sum(math.inf if room is None else room for room in rooms.values())
    if total < num_remote:
        with pytest.raises(SettingsError, match="GiB"):
            even_split(spec, names, num_local, offers=offers)
        return
    placement = even_split(spec, names, num_local, offers=offers)
    lists = lists_of(placement)
    for layer_id, num_experts in experts_per_layer.items():
        owners = Counter(i for layers in lists.values() for i in layers.get(layer_id, []))
        assert owners == Counter(range(num_experts))
        assert lists.get(LOCAL_OWNER, {}).get(layer_id, []) == list(range(num_local or 0))
    for name, room in rooms.items():
        num_owned = sum(map(len, lists.get(name, {}).values()))
        assert room is None or num_owned <= room
    even = even_split(spec, names, num_local)
    shares = {name: sum(map(len, lists_of(even).get(name, {}).values())) for name in names}
    if all(room is None or room >= shares[name] for name, room in rooms.items()):
        assert lists == lists_of(even), "as without offers"
    assert lists_of(even_split(spec, names, num_local, offers=offers)) == lists


def test_less_memory_means_some_of_the_same_experts_of_every_layer() -> None:
    spec = spec_of(dict.fromkeys(range(6), 16))
    before: dict[int, set[int]] = {}
    for room in (6, 12, 24, 36, 48):
        lists = lists_of(even_split(spec, ["a", "b"], None, offers={"a": offer_of(spec, room)}))
        found = {layer_id: {*ids} for layer_id, ids in lists["a"].items()}
        assert {len(ids) for ids in found.values()} == {room // 6}
        assert all(before.get(layer_id, set()) <= ids for layer_id, ids in found.items())
        before = found


def test_experts_that_are_held_count_as_room() -> None:
    """A parent that comes back, or comes second, gets what the first one had."""
    spec = spec_of({0: 8})
    first = even_split(spec, ["a", "b"], None, offers={"a": offer_of(spec, 3)})
    second = even_split(spec, ["a", "b"], None, offers={"a": offer_of(spec, 3, held=3)})
    assert lists_of(first) == lists_of(second)
    assert lists_of(first)["a"] == {0: [0, 2, 4]}


def test_memory_that_is_unknown_limits_nothing() -> None:
    unknown = replace(offer_of(SPEC, 1), total_bytes=0, free_bytes=0)
    placement = even_split(SPEC, ["a", "b"], None, offers={"a": unknown})
    assert lists_of(placement) == lists_of(even_split(SPEC, ["a", "b"], None))


def test_experts_larger_than_memory_stay_in_the_file_of_a_daemon_on_a_processor() -> None:
    offers = {"a": offer_of(SPEC, 2), "cpu": offer_of(SPEC, 3, device="cpu")}
    lists = lists_of(even_split(SPEC, ["a", "cpu"], None, offers=offers))
    assert sum(map(len, lists["a"].values())) == 2
    assert sum(map(len, lists["cpu"].values())) == 11


@examples(150)
@given(MODELS, st.integers(1, 4), st.data())
def test_a_daemon_gets_no_more_than_its_budget(
    experts_per_layer: dict[int, int], num_daemons: int, data: st.DataObject
) -> None:
    """Whatever memory it offers; without an offer, too."""
    names = [f"d{index}" for index in range(num_daemons)]
    spec = spec_of(experts_per_layer)
    every = spec.expert_bytes_total
    percents = {name: data.draw(st.none() | st.integers(0, 100)) for name in names}
    budgets = {n: ExpertBudget(percent=each) for n, each in percents.items() if each is not None}
    rooms = {name: data.draw(st.none() | st.integers(0, 90)) for name in names}
    offers = {
        name: offer_of(spec, room, device=data.draw(st.sampled_from(("cpu", "cuda:0"))))
        for name, room in rooms.items()
        if room is not None
    }
    try:
        placement = even_split(spec, names, None, offers=offers, budgets=budgets)
    except SettingsError:
        num_roomy = sum(
            name not in budgets and (name not in offers or offers[name].device == "cpu")
            for name in names
        )
        assert not num_roomy
        return
    lists = lists_of(placement)
    assert sum(len(ids) for each in lists.values() for ids in each.values()) == sum(
        experts_per_layer.values()
    )
    for name, budget in budgets.items():
        used = sum(
            spec.by_layer_id[layer_id].expert_bytes * len(ids)
            for layer_id, ids in lists.get(name, {}).items()
        )
        assert used <= budget.most_bytes(every)
        if name in offers and offers[name].device != "cpu":
            assert used <= offers[name].free_bytes


def test_a_budget_without_room_for_all_is_refused_with_where_it_was_set() -> None:
    budgets = {"cpu": ExpertBudget(percent=50, source="moe.toml: daemon[0].expert_budget_pct")}
    offers = {"cpu": offer_of(SPEC, 3, device="cpu")}
    with pytest.raises(SettingsError, match=r"no place; .* raise moe\.toml: daemon\[0\]\.expert_b"):
        even_split(SPEC, ["cpu"], None, offers=offers, budgets=budgets)
    lists = lists_of(even_split(SPEC, ["cpu", "d"], None, offers=offers, budgets=budgets))
    assert sum(map(len, lists["cpu"].values())) <= 6
    for whole in (ExpertBudget(percent=100), ExpertBudget(num_mib=1)):
        lists = lists_of(even_split(SPEC, ["cpu"], None, offers=offers, budgets={"cpu": whole}))
        assert sum(map(len, lists["cpu"].values())) == 13
