"""Second copies of experts: who answers has least to do, plans with copies fit, and classes keep to
themselves."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import BoolArray, F64Array, I64Array
from dflash_runtime.placement.class_map import ClassMap
from dflash_runtime.placement.plan import Plan, PlanRefused
from dflash_runtime.placement.plan_record import RecordOf, as_json, from_json
from dflash_runtime.placement.plan_text import plan_text
from dflash_runtime.placement.planner import plan
from dflash_runtime.placement.replicas import choose_answering
from dflash_runtime.placement.situation import Situation
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from dflash_runtime.placement.wishes import ExpertWishes, Wishes
from support.examples import examples
from support.planned_boxes import (
    CARD,
    CORES_16,
    GIB,
    MIB,
    BoxRow,
    DaemonRow,
    model_spec,
    moe_spec,
    qwen3_30b,
    situation,
    skewed,
)

SPEC = model_spec(moe_spec([3 * MIB] * 6, num_experts=32, num_used=4))
FIXED = 640 * MIB
"""About what the model takes on a device besides experts."""


def fullest(loads: F64Array, chosen: I64Array, begun_s: F64Array) -> F64Array:
    """Seconds of the fullest owner of each layer."""
    ends = [
        begun_s[index] + np.where(chosen == index, loads[index], 0.0).sum(axis=1)
        for index in range(len(loads))
    ]
    return np.asarray(np.max(ends, axis=0))


def best_of_all(loads: F64Array, holders: BoolArray, begun_s: F64Array) -> float:
    """The same for the best choice in a model of one layer."""
    able = [np.flatnonzero(holders[:, 0, expert]) for expert in range(holders.shape[2])]
    return min(
        float(fullest(loads, np.array([each]), begun_s)[0]) for each in itertools.product(*able)
    )


@st.composite
def choices(draw: st.DrawFn) -> tuple[F64Array, BoolArray, F64Array]:
    num_owners, num_experts = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    heat = st.floats(0.0, 1.0, allow_subnormal=False)
    shares = np.array(draw(st.lists(heat, min_size=num_experts, max_size=num_experts)))
    holders = np.zeros((num_owners, 1, num_experts), np.bool_)
    for expert in range(num_experts):
        some = draw(st.sets(st.integers(0, num_owners - 1), min_size=1, max_size=2))
        holders[list(some), 0, expert] = True
    begun = np.array(draw(st.lists(heat, min_size=num_owners, max_size=num_owners)))
    return np.broadcast_to(shares, holders.shape).copy(), holders, begun[:, None]


@examples(200)
@given(choices())
def test_the_fullest_owner_has_nearly_the_least_to_do(
    choice: tuple[F64Array, BoolArray, F64Array],
) -> None:
    loads, holders, begun_s = choice
    chosen = choose_answering(loads, holders, begun_s)
    assert np.take_along_axis(holders, chosen[None], axis=0).all()
    best, largest = best_of_all(*choice), loads.max(initial=0.0)
    assert fullest(loads, chosen, begun_s)[0] <= best + (len(loads) - 1) * largest + 1e-9
    assert (choose_answering(loads, holders, begun_s) == chosen).all()


def test_it_is_the_best_choice_in_nearly_all_cases_and_speeds_count() -> None:
    random, ratios = np.random.default_rng(3), []
    for _ in range(200):
        shares = random.exponential(size=7)
        slowness = random.uniform(1.0, 3.0, size=(3, 1, 1))
        holders = random.random((3, 1, 7)) < 0.5
        holders[0] |= ~holders.any(axis=0)
        loads, begun = slowness * shares, np.zeros((3, 1))
        chosen = choose_answering(loads, holders, begun)
        ratios.append(float(fullest(loads, chosen, begun)[0]) / best_of_all(loads, holders, begun))
    assert np.median(ratios) == pytest.approx(1.0)
    assert np.mean(ratios) < 1.03


def test_layers_do_not_depend_on_each_other() -> None:
    random = np.random.default_rng(5)
    loads = np.broadcast_to(random.random((4, 9)), (2, 4, 9)).copy()
    holders = np.ones((2, 4, 9), np.bool_)
    holders[1, :, 7:] = False
    begun = random.random((2, 4))
    together = choose_answering(loads, holders, begun)
    for row in range(4):
        alone = choose_answering(
            loads[:, row : row + 1], holders[:, row : row + 1], begun[:, row : row + 1]
        )
        assert (alone[0] == together[row]).all()
    assert (together[:, 7:] == 0).all()


def cards(
    *parts: float, classes: tuple[str, ...] = ("a", "a"), parent: str = "", gpu: float = 0.1
) -> BoxRow:
    """A GPU parent with room for a part of the experts, and daemons on cards like it."""
    every = SPEC.moe.expert_bytes_total
    daemons = tuple(
        DaemonRow(
            f"cuda:{index}", f"cuda:{index}", CARD, int(part * every) + 520 * MIB,
            by_device=True, numeric_class=name,
        )
        for index, (part, name) in enumerate(zip(parts, classes, strict=True), 1)
    )  # fmt: skip
    gpu_bytes = FIXED + int(gpu * every)
    return BoxRow(CARD, gpu_bytes, CORES_16, 8 * GIB, numeric_class=parent, daemons=daemons)


def at_of(row: BoxRow, *, exponent: float = 1.0) -> Situation:
    return situation(SPEC, row, shares=skewed(SPEC.moe, exponent=exponent), chunks=(512,))


def planned(at: Situation, **experts: object) -> Plan:
    wishes = Wishes(context=4096, experts=ExpertWishes(**experts))  # type: ignore[arg-type]
    found = plan(at, wishes)
    assert isinstance(found, Plan), found
    return found


def num_copies(found: Plan) -> int:
    return sum(owned.num_experts for owned in found.placement.owners) - found.num_experts


def used_bytes(found: Plan, name: str) -> int:
    return sum(each.expert_bytes + each.work_bytes for each in found.budgets if each.name == name)


def check(found: Plan, at: Situation) -> None:
    """Copies are of one class, fit, are counted, and answer only for their like."""
    placement = found.placement
    for each in found.budgets:
        used = each.trunk_bytes + each.cache_bytes + each.work_bytes + each.expert_bytes
        assert used - each.disk_bytes <= each.free_bytes
    assert sum(each.num_replicas for each in found.budgets) == num_copies(found)
    for layer_id, num_experts in placement.experts_per_layer.items():
        holds = placement.local_ids(layer_id) >= 0
        assert holds.sum(axis=0).min() >= 1
        assert holds.sum(axis=0).max() <= 2
        equal = placement.equal_holders(layer_id)
        assert (equal == holds).all()
        answering = placement.answering.get(layer_id, np.full(num_experts, -1))
        assert ((answering >= 0) == (holds.sum(axis=0) > 1)).all()
    assert at.spec.moe.num_experts_total == found.num_experts


def test_room_left_over_on_equal_devices_takes_copies_of_hot_experts() -> None:
    at = at_of(cards(0.7, 0.7))
    found = planned(at)
    check(found, at)
    assert num_copies(found) > 0
    assert "second copy" in found.reason
    assert "second copies" in plan_text(found)
    heat = at.shares.decode
    copied, others = [], []
    for layer_id, answering in found.placement.answering.items():
        copied += heat[layer_id][answering >= 0].tolist()
        others += heat[layer_id][answering < 0].tolist()
    assert np.mean(copied) > np.mean(others)
    again = planned(at)
    assert as_json(again) == as_json(found)
    # What is decided is kept, and read again.
    names = found.placement.owner_names
    of = RecordOf("model", found.placement.experts_per_layer, names)
    read = from_json(as_json(found).encode(), of)
    assert as_json(read) == as_json(found)
    kept = replace(read.placement, numeric_classes=found.placement.numeric_classes)
    for layer_id, routing in found.placement.routing.items():
        assert (kept.routing[layer_id].owner_index == routing.owner_index).all()
    # It is priced as it was, copies included, and needs its room.
    there = Wishes(context=4096, chunk=512, experts=ExpertWishes(placement=read.placement))
    priced = plan(at, there)
    assert isinstance(priced, Plan)
    assert num_copies(priced) == num_copies(found)
    assert priced.forecast == found.forecast
    assert [each.expert_bytes for each in priced.budgets] == [
        each.expert_bytes for each in found.budgets
    ]
    full = [replace(each, free_bytes=used_bytes(found, each.name)) for each in at.daemons]
    assert isinstance(plan(replace(at, daemons=tuple(full)), there), Plan)
    less = [replace(each, free_bytes=each.free_bytes - 1) for each in full]
    refused = plan(replace(at, daemons=(*full[:-1], less[-1])), there)
    assert isinstance(refused, PlanRefused)
    assert "no room" in refused.reason
    # Who answers is not in the class map.
    class_of = {name: each or name for name, each in found.placement.numeric_classes.items()}
    first = replace(found.placement, answering={})
    assert ClassMap.of(found.placement, class_of).digest == ClassMap.of(first, class_of).digest


def test_the_parents_device_counts_if_its_class_is_the_same() -> None:
    at = at_of(cards(0.7, classes=("a",), parent="a", gpu=0.6), exponent=0.0)
    found = planned(at)
    check(found, at)
    assert num_copies(found) > 0
    at = at_of(cards(0.7, classes=("a",), parent="b", gpu=0.6), exponent=0.0)
    assert not num_copies(planned(at))


@pytest.mark.parametrize("classes", [("a", "b"), ("", "")])
def test_other_classes_and_unknown_ones_get_no_copies(classes: tuple[str, str]) -> None:
    found = planned(at_of(cards(0.7, 0.7, classes=classes)))
    assert not num_copies(found)
    assert not found.placement.answering
    assert "second" not in found.reason


def test_places_that_were_asked_for_are_left_alone() -> None:
    assert not num_copies(planned(at_of(cards(0.7, 0.7)), num_local=4))


@examples(20)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3),
    st.sampled_from((0.0, 1.0)),
    st.sampled_from((0.2, 0.6)),
    st.sampled_from((1, 2 * MIB)),
    st.booleans(),
)
def test_any_room_gives_a_legal_plan(
    parts: list[float], exponent: float, gpu: float, granule: int, is_parent_equal: bool
) -> None:
    row = cards(*parts, classes=("a",) * len(parts), gpu=gpu, parent="a" if is_parent_equal else "")
    shares = skewed(SPEC.moe, exponent=exponent)
    at = situation(SPEC, row, shares=shares, chunks=(512,), granule=granule)
    found = planned(at)
    check(found, at)
    names = {LOCAL_OWNER, HOST_OWNER, *(each.name for each in at.daemons)}
    assert set(found.placement.owner_names) <= names


def test_the_fullest_owner_of_steps_has_less_to_do_than_without_copies() -> None:
    at = at_of(cards(0.7, 0.7), exponent=1.2)
    found = planned(at)
    first = replace(found.placement, answering={})
    for layer_id in found.placement.answering:
        heat = at.shares.decode[layer_id]
        with_copies, without = (
            max(
                np.where(routing.owner_index == index, heat, 0.0).sum()
                for index, name in enumerate(found.placement.owner_names)
                if name.startswith("cuda")
            )
            for routing in (found.placement.routing[layer_id], first.routing[layer_id])
        )
        assert with_copies <= without + 1e-9


def test_copies_are_planned_in_a_fraction_of_a_second() -> None:
    spec = qwen3_30b()
    daemons = tuple(
        DaemonRow(f"cuda:{i}", f"cuda:{i}", CARD, 9 * GIB, by_device=True, numeric_class="a")
        for i in (1, 2)
    )
    times, copies = [], []
    for name in ("a", ""):
        row = BoxRow(
            CARD, 4 * GIB, CORES_16, 64 * GIB,
            daemons=tuple(replace(each, numeric_class=name) for each in daemons),
        )  # fmt: skip
        at = situation(spec, row, shares=skewed(spec.moe, exponent=0.0))
        started_s = time.process_time()
        copies.append(num_copies(planned(at)))
        times.append(time.process_time() - started_s)
    assert copies[0] > 0 == copies[1]
    assert times[0] < times[1] + 1.0
