"""The class map: a digest that changes with what computes an expert, and with nothing else."""

from __future__ import annotations

import pytest

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import Phase
from dflash_protocol.numeric_class import in_step_order
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.placement.class_map import ClassMap

SIZES = {0: 4, 2: 4}
CLASSES = {"local": "cuda", "host": "avx512", "gpu": "cuda", "cpu": "avx512"}


def placement(**owned: dict[int, list[int]]) -> Placement:
    owners = tuple(OwnedExperts.from_lists(each) for each in owned.values())
    return Placement(SIZES, tuple(owned), owners)


SPLIT = placement(
    local={0: [0, 1, 2, 3], 2: [1, 3]},
    host={2: [0, 2]},
)


def test_owners_of_one_class_are_one() -> None:
    here = ClassMap.of(SPLIT, CLASSES)
    moved = placement(gpu={0: [3, 2], 2: [3]}, local={0: [0, 1], 2: [1]}, cpu={2: [2, 0]})
    assert ClassMap.of(moved, CLASSES).digest == here.digest
    across = placement(local={0: [0, 1, 2, 3], 2: [0, 1, 3]}, host={2: [2]})
    assert ClassMap.of(across, CLASSES).digest != here.digest


def test_prompts_may_have_another_class() -> None:
    found = ClassMap.of(SPLIT, CLASSES, prompts_here=(2,), processors=("host",))
    assert found.class_of(Phase.PREFILL, 2, 0) == "cuda"
    assert found.class_of(Phase.DECODE, 2, 0) == "avx512"
    assert found.class_of(Phase.VERIFY, 2, 0) == "avx512"
    assert found.class_of(Phase.DECODE, 2, 1) == "cuda"
    assert found.digest != ClassMap.of(SPLIT, CLASSES).digest
    other = ClassMap.of(SPLIT, CLASSES, prompts_here=(0,), processors=("host",))
    assert other.class_of(Phase.PREFILL, 2, 0) == "avx512"


def test_moves_keep_the_map_where_steps_are_in_step_order_and_prompts_are_here() -> None:
    classes = {"local": in_step_order("cuda"), "host": in_step_order("avx512")}
    moved = placement(local={0: [0, 1, 2, 3], 2: [0, 1]}, host={2: [2, 3]})
    here, elsewhere = (
        [
            ClassMap.of(each, classes, prompts_here=layers, processors=("host",)).digest
            for each in (SPLIT, moved)
        ]
        for layers in ((2,), ())
    )
    assert here[0] == here[1]
    assert elsewhere[0] != elsewhere[1]
    found = ClassMap.of(SPLIT, classes)
    assert found.class_of(Phase.DECODE, 2, 0) == found.class_of(Phase.DECODE, 2, 1)
    assert found.class_of(Phase.PREFILL, 2, 0) == classes["host"]


def test_an_owner_without_a_class() -> None:
    with pytest.raises(SettingsError, match="host"):
        ClassMap.of(SPLIT, {"local": "cuda"})


def test_owners_without_experts_need_none() -> None:
    idle = placement(local={0: [0, 1, 2, 3], 2: [0, 1, 2, 3]}, gpu={})
    assert ClassMap.of(idle, {"local": "cuda"}).classes == ("cuda",)
