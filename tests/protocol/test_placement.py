"""Placements: canonical bytes, lookup tables, and every wrong one of them."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflash_protocol.errors import ProtocolError
from dflash_protocol.placement import OwnedExperts, Placement
from support.examples import examples

EXPERTS_PER_LAYER = {0: 4, 2: 3, 5: 1}
BIG = 2**31 - 1

Lists = Mapping[int, list[int]]


@st.composite
def models(draw: st.DrawFn) -> dict[int, int]:
    """Experts per layer; not every layer has some."""
    return draw(st.dictionaries(st.integers(0, 9), st.integers(1, 8), min_size=1, max_size=5))


@st.composite
def owners(draw: st.DrawFn, experts_per_layer: Mapping[int, int]) -> OwnedExperts:
    """Any experts of a model, in any local order."""
    return OwnedExperts.from_lists(
        {
            layer_id: draw(st.lists(st.integers(0, num_experts - 1), unique=True))
            for layer_id, num_experts in experts_per_layer.items()
        }
    )


def lists_of(owned: OwnedExperts) -> dict[int, list[int]]:
    return {layer_id: ids.tolist() for layer_id, ids in owned.by_layer.items()}


def wire(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def test_wire_form_is_layer_count_and_ids_with_layers_ascending() -> None:
    owned = OwnedExperts.from_lists({2: [1], 0: [3, 0], 5: []})
    assert owned.canonical_bytes == wire(0, 2, 3, 0, 2, 1, 1)
    assert lists_of(owned) == {0: [3, 0], 2: [1]}
    assert owned.num_experts == 3


def test_an_owner_of_nothing_is_no_bytes() -> None:
    nothing = OwnedExperts.from_lists({0: [], 2: []})
    assert nothing.canonical_bytes == b""
    assert nothing.num_experts == 0
    assert lists_of(OwnedExperts.from_bytes(b"", EXPERTS_PER_LAYER)) == {}


@examples(100)
@given(st.data())
def test_wire_form_comes_back_as_it_was(data: st.DataObject) -> None:
    experts_per_layer = data.draw(models())
    owned = data.draw(owners(experts_per_layer))
    for frame in (owned.canonical_bytes, memoryview(owned.canonical_bytes)):
        received = OwnedExperts.from_bytes(frame, experts_per_layer)
        assert lists_of(received) == lists_of(owned)
        assert received.fingerprint == owned.fingerprint
        assert received.num_experts == owned.num_experts


@examples(200)
@given(st.lists(st.integers(-2, 6) | st.sampled_from([BIG, -BIG - 1]), max_size=12))
@example([0, 1, 3])
@example([0, 1, 3, 2, 1, 2])
def test_any_integers_are_canonical_bytes_or_refused(values: list[int]) -> None:
    frame = wire(*values)
    try:
        owned = OwnedExperts.from_bytes(frame, EXPERTS_PER_LAYER)
    except ProtocolError as error:
        reason = str(error)
        assert len(reason.splitlines()) == 1
    else:
        assert owned.canonical_bytes == frame


@examples(100)
@given(st.binary(max_size=40))
def test_any_bytes_are_canonical_or_refused(frame: bytes) -> None:
    try:
        owned = OwnedExperts.from_bytes(frame, EXPERTS_PER_LAYER)
    except ProtocolError:
        return
    assert owned.canonical_bytes == frame


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"\0\0\0", "int32"),
        (wire(0), "cut short"),
        (wire(0, 2, 1), "cut short"),
        (wire(0, 1, 1, 2), "cut short"),
        (wire(0, 0), "empty"),
        (wire(0, -1, 1), "empty"),
        (wire(0, -BIG - 1, 1), "empty"),
        (wire(0, BIG, 1), "cut short"),
        (wire(BIG, BIG), "cut short"),
        (wire(0, 1, 1, 0, 1, 2), r"layer 0\b.*layer 0\b"),
        (wire(2, 1, 1, 0, 1, 2), r"layer 0\b.*layer 2\b"),
        (wire(-1, 1, 0), "layer -1"),
        (wire(1, 1, 0), r"layer 1\b.*experts"),
        (wire(BIG, 1, 0), rf"layer {BIG}\b.*experts"),
        (wire(0, 1, 4), "outside 0..3"),
        (wire(0, 1, -1), "outside 0..3"),
        (wire(0, 1, BIG), "outside 0..3"),
        (wire(0, 2, 1, 1), r"expert 1\b.*twice"),
    ],
)
def test_a_wrong_wire_form_is_refused_and_costs_no_memory(frame: bytes, reason: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=reason):
            OwnedExperts.from_bytes(frame, EXPERTS_PER_LAYER)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert OwnedExperts.from_bytes(wire(0, 1, 3), EXPERTS_PER_LAYER).num_experts == 1


def test_a_wire_form_cut_anywhere_is_refused_or_ends_with_a_layer() -> None:
    owned = OwnedExperts.from_lists({0: [3, 0, 1], 2: [2], 5: [0]})
    whole = owned.canonical_bytes
    ends = []
    for length in range(len(whole)):
        try:
            part = OwnedExperts.from_bytes(whole[:length], EXPERTS_PER_LAYER)
        except ProtocolError:
            continue
        ends.append(length)
        assert part.fingerprint != owned.fingerprint
    assert ends == [0, 20, 32]


def test_fingerprint_tells_local_orders_apart() -> None:
    ways: list[Lists] = [{0: [0, 1]}, {0: [1, 0]}, {0: [0], 2: [1]}, {2: [0, 1]}, {0: [0]}, {}]
    assert len({OwnedExperts.from_lists(lists).fingerprint for lists in ways}) == len(ways)


def placement(*lists: Lists, names: tuple[str, ...] | None = None) -> Placement:
    names = tuple(f"owner{index}" for index in range(len(lists))) if names is None else names
    return Placement({0: 3}, names, tuple(OwnedExperts.from_lists(each) for each in lists))


@examples(100)
@given(st.data())
def test_first_owner_that_holds_an_expert_answers_for_it(data: st.DataObject) -> None:
    experts_per_layer = data.draw(models())
    everyone = [data.draw(owners(experts_per_layer)) for _ in range(data.draw(st.integers(1, 4)))]
    naive = {
        (layer_id, global_id): next(
            (
                (index, lists_of(owned)[layer_id].index(global_id))
                for index, owned in enumerate(everyone)
                if global_id in lists_of(owned).get(layer_id, [])
            ),
            None,
        )
        for layer_id, num_experts in experts_per_layer.items()
        for global_id in range(num_experts)
    }
    names = tuple(f"owner{index}" for index in range(len(everyone)))
    if None in naive.values():
        with pytest.raises(ProtocolError, match="owner"):
            Placement(experts_per_layer, names, tuple(everyone))
        return
    routing = Placement(experts_per_layer, names, tuple(everyone)).routing
    for (layer_id, global_id), owner in naive.items():
        table = routing[layer_id]
        assert (table.owner_index[global_id], table.local_expert_id[global_id]) == owner
    assert {(i, t.owner_index.size, t.local_expert_id.size) for i, t in routing.items()} == {
        (layer_id, count, count) for layer_id, count in experts_per_layer.items()
    }


@examples(100)
@given(st.data())
def test_without_the_lost_the_next_owner_answers_and_else_nobody(data: st.DataObject) -> None:
    experts_per_layer = data.draw(models())
    whole = {layer_id: range(count) for layer_id, count in experts_per_layer.items()}
    others = [data.draw(owners(experts_per_layer)) for _ in range(data.draw(st.integers(0, 3)))]
    everyone = data.draw(st.permutations([OwnedExperts.from_lists(whole), *others]))
    names = tuple(f"owner{index}" for index in range(len(everyone)))
    placed = Placement(experts_per_layer, names, tuple(everyone))
    lost = data.draw(st.frozensets(st.integers(0, len(everyone) - 1)))
    for layer_id, table in placed.routing_without(lost).items():
        for global_id in range(experts_per_layer[layer_id]):
            owner, local = next(
                (
                    (index, lists_of(owned)[layer_id].index(global_id))
                    for index, owned in enumerate(everyone)
                    if index not in lost and global_id in lists_of(owned).get(layer_id, [])
                ),
                (-1, -1),
            )
            assert (table.owner_index[global_id], table.local_expert_id[global_id]) == (
                owner,
                local,
            )
        owners_of_all = set(table.owner_index.tolist())
        is_sole = len(owners_of_all) == 1 and -1 not in owners_of_all
        assert table.sole_owner == (owners_of_all.pop() if is_sole else None)
        local_ids = table.local_expert_id.tolist()
        assert table.is_identity == (is_sole and local_ids == list(range(len(local_ids))))
    assert placed.routing_without(lost) is placed.routing_without(lost), "made once"
    assert placed.routing_without(frozenset()) == placed.routing


@pytest.mark.parametrize(
    ("lists", "reason"),
    [
        ([{0: [0, 1]}], "layer 0 expert 2 .*owner"),
        ([], "layer 0 expert 0 .*owner"),
        ([{0: [0, 1, 2]}, {0: [3]}], "outside 0..2"),
        ([{0: [0, 1, 2]}, {1: [0]}], r"layer 1\b.*experts"),
        ([{0: [0, 1, 2, 2]}], r"expert 2\b.*twice"),
    ],
)
def test_a_placement_that_does_not_fit_the_model_is_refused(
    lists: list[Lists], reason: str
) -> None:
    with pytest.raises(ProtocolError, match=reason):
        placement(*lists)


def test_a_placement_names_every_owner() -> None:
    with pytest.raises(ProtocolError, match=r"owner names\b.*lists"):
        placement({0: [0, 1, 2]}, names=())
    with pytest.raises(ProtocolError, match="two owners"):
        placement({0: [0, 1]}, {0: [2]}, names=("cpu0", "cpu0"))


def test_a_layer_without_an_id_of_the_owner_has_no_local_id() -> None:
    both = placement({0: [0, 1, 2]}, {0: [2, 1]})
    np.testing.assert_array_equal(both.routing[0].owner_index, [0, 0, 0])
    replicas_first = placement({0: [2, 1]}, {0: [0, 1, 2]})
    np.testing.assert_array_equal(replicas_first.routing[0].owner_index, [1, 0, 0])
    np.testing.assert_array_equal(replicas_first.routing[0].local_expert_id, [0, 1, 0])


def test_the_owner_that_is_named_answers_if_it_is_of_the_first_ones_class() -> None:
    lists: list[Lists] = [{0: [0, 1]}, {0: [2, 1, 0]}, {0: [1, 0]}]
    named = {0: np.array([2, 1, -1], np.int32)}

    def owners_of(*classes: str, lost: tuple[int, ...] = ()) -> list[int]:
        of = {f"owner{index}": each for index, each in enumerate(classes)}
        placed = replace(placement(*lists), answering=named, numeric_classes=of)
        table = placed.routing_without(frozenset(lost))[0]
        for expert, owner in enumerate(table.owner_index.tolist()):
            assert lists[owner][0][table.local_expert_id[expert]] == expert
        return [*map(int, table.owner_index)]

    assert owners_of("a", "a", "a") == [2, 1, 1]
    assert owners_of("a", "b", "a") == [2, 0, 1]  # expert 1: another class is asked only at need
    assert owners_of("a", "b", "b") == [0, 0, 1]
    assert owners_of() == owners_of("", "", "") == [0, 0, 1]
    # One of the same class before the first of another one.
    assert owners_of("a", "b", "a", lost=(0,)) == [2, 2, 1]
    assert owners_of("a", "b", "a", lost=(2,)) == [0, 0, 1]
    assert owners_of("a", "b", "a", lost=(0, 2)) == [1, 1, 1]


def test_equal_owners_share_what_is_named_while_they_are_there() -> None:
    lists: list[Lists] = [{0: [0, 1, 2]}, {0: [0, 1]}, {0: [1]}]
    named = {0: np.array([1, 0, -1], np.int32)}
    classes = {"owner0": "a", "owner1": "a", "owner2": "b"}
    placed = replace(placement(*lists), answering=named, numeric_classes=classes)
    assert placed.routing[0].shared == ((0, (0, 1)), (1, (0, 1)))
    assert placed.routing_without(frozenset({1}))[0].shared == ()
    assert replace(placed, numeric_classes={}).routing[0].shared == ()
    assert placement(*lists).routing[0].shared == ()
    assert placed.local_ids_of(1)[0].tolist() == [0, -1, -1]
    assert placed.local_ids(0).tolist() == [[0, 1, 2], [0, 1, -1], [-1, 0, -1]]


@pytest.mark.parametrize(
    ("answering", "reason"),
    [
        ({0: [0, 0, 2]}, "not there"),
        ({0: [0, 0, -2]}, "not there"),
        ({0: [1, 0, 0]}, r"expert 0\b"),
        ({0: [0, 0]}, "layer 0"),
        ({1: [0, 0, 0]}, "layer 1"),
    ],
)
def test_only_owners_of_an_expert_answer_for_it(
    answering: dict[int, list[int]], reason: str
) -> None:
    placed = placement({0: [0, 1, 2]}, {0: [2]})
    tables = {layer_id: np.array(indices, np.int32) for layer_id, indices in answering.items()}
    with pytest.raises(ProtocolError, match=reason):
        replace(placed, answering=tables)
