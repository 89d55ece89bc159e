"""Slots of steps: what they save of a step, and when a plan has them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.device import parse_device
from dflash_runtime.engine.kept_plan import _priced
from dflash_runtime.placement.box import AskedSpeed, Curve
from dflash_runtime.placement.plan import Plan
from dflash_runtime.placement.planner import plan
from dflash_runtime.placement.situation import Situation
from dflash_runtime.placement.speeds import _FOUND_IN_SLOTS, READ_S, StepSlots
from dflash_runtime.placement.split import HOST_OWNER
from dflash_runtime.placement.wishes import Wishes
from support.examples import examples
from support.planned_boxes import (
    CARD,
    CORES_16,
    GIB,
    MIB,
    BoxRow,
    model_spec,
    moe_spec,
    situation,
    skewed,
)

GPU = parse_device("cuda:0")
SPEC = model_spec(moe_spec([3 * MIB] * 8, num_experts=128, num_used=8))
WISHES = Wishes(device=GPU, context=4096)
FIXED = 640 * MIB
EVERY = SPEC.moe.expert_bytes_total
ASKED_S = 20e-6 + 30e-6 * np.arange(9.0)


def machine(part: float, *, bus: float = 50e9, cache_slots: tuple[int, ...] = (0, 8)) -> Situation:
    """A GPU that holds so much of the experts."""
    row = BoxRow(CARD, FIXED + int(part * EVERY), CORES_16, 64 * GIB, bus=bus)
    shares = skewed(SPEC.moe, exponent=1.0)
    at = situation(SPEC, row, shares=shares, chunks=(512,), cache_slots=cache_slots)
    asked = Curve(((3.0 * MIB, 50e-6), (24.0 * MIB, 260e-6)))
    return replace(at, box=replace(at.box, host_asked={"cuda:0": AskedSpeed(asked, asked)}))


def planned(at: Situation) -> Plan:
    found = plan(at, WISHES)
    assert isinstance(found, Plan), found
    return found


def seconds(slots: StepSlots) -> list[float]:
    asked = ASKED_S.copy()
    asked[0] = 0.0
    return [float(each) for each in slots.seconds(asked[None], np.array([3e6]))[0]]


def test_of_two_missing_experts_one_is_read_by_the_gpu_unless_they_are_in_slots() -> None:
    found = seconds(StepSlots(8, 50e9))
    left = 1.0 - _FOUND_IN_SLOTS
    assert found[0] == 0.0
    assert found[1] == pytest.approx(left * ASKED_S[1])
    bus_s = 3e6 / 50e9
    read_s = (ASKED_S[1] ** 3 + bus_s**3) ** (1 / 3) + READ_S
    expected = comb(2, 1) * left * _FOUND_IN_SLOTS * ASKED_S[1] + left**2 * read_s
    assert found[2] == pytest.approx(expected)


@examples(60)
@given(st.integers(1, 31), st.floats(1e9, 1e12))
def test_more_missing_experts_take_longer_and_more_slots_never(num: int, bus: float) -> None:
    found, more = seconds(StepSlots(num, bus)), seconds(StepSlots(num + 1, bus))
    assert all(before <= after for before, after in pairwise(found))
    assert all(many <= few * (1 + 1e-12) for many, few in zip(more, found, strict=True))


def test_slots_are_planned_where_many_experts_are_missing() -> None:
    at = machine(0.31)
    found, without = planned(at), planned(replace(at, parents=(at.parents[0], at.parents[-1])))
    assert found.setup.cache_slots == 8
    assert without.setup.cache_slots == 0
    assert HOST_OWNER in found.placement.owner_names
    assert found.forecast.decode > 1.03 * without.forecast.decode
    assert found.budgets[0].num_experts < without.budgets[0].num_experts


@pytest.mark.parametrize("part", [0.9, 1.1])
def test_slots_are_not_planned_where_few_or_none_are_missing(part: float) -> None:
    assert planned(machine(part)).setup.cache_slots == 0


def test_slots_are_not_planned_behind_a_slow_bus() -> None:
    assert planned(machine(0.31, bus=1e9)).setup.cache_slots == 0


def test_slots_that_were_asked_for_are_obeyed() -> None:
    assert planned(machine(0.9, cache_slots=(4,))).setup.cache_slots == 4


def test_a_kept_plan_is_priced_with_its_slots() -> None:
    at = machine(0.31)
    kept = planned(at)
    now = _priced(kept, at, WISHES)
    assert now is not None
    assert now.forecast.decode == pytest.approx(kept.forecast.decode)
    assert now.setup == kept.setup
    assert _priced(kept, machine(0.31, cache_slots=(0,)), WISHES) is None
