"""Whose experts of a chunk are copied to the parent's device, and what computes each expert."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import pytest

from dflash_adapters.spec import MoeSpec
from dflash_protocol.ids import Phase
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.experts.compute import LocalExpertCompute
from dflash_runtime.experts.offload import (
    FEWEST_TOKENS,
    OffloadChoice,
    OffloadMode,
    PromptOffload,
)
from dflash_runtime.experts.telemetry import OwnerKind
from dflash_runtime.placement.split import LOCAL_OWNER, make_placement
from support.routed_batches import moe_layer

NUM_EXPERTS = 6
NUM_TOKENS = 100


class Rig:
    """A device's own experts 0 and 1, a CPU's 2 and 3, a GPU's 4 and 5 and perhaps a copy of 3."""

    def __init__(
        self,
        mode: OffloadMode,
        layers: Collection[int] = (2,),
        *,
        has_fallback: bool = True,
        replica: bool = False,
    ) -> None:
        owned = {
            LOCAL_OWNER: [0, 1],
            "slow": [2, 3],
            "quick": [4, 5, *([3] if replica else [])],
        }
        layer = moe_layer(layer_id=2, num_experts=NUM_EXPERTS)
        classes = {LOCAL_OWNER: "cuda", "slow": "avx512", "quick": "cuda"}
        placement = make_placement(
            MoeSpec((layer,)),
            {name: OwnedExperts.from_lists({2: ids}) for name, ids in owned.items()},
        )
        self.placement = replace(placement, numeric_classes=classes)
        self.owners = [
            LocalExpertCompute(
                OwnerKind.LOCAL if name == LOCAL_OWNER else OwnerKind.DAEMON,
                {},
                numeric_class=classes[name],
            )
            for name in owned
        ]
        _, self.slow, self.quick = self.owners
        self.slow.stats.device, self.quick.stats.device = "cpu", "cuda:1"
        fallback = LocalExpertCompute(OwnerKind.FALLBACK, {})
        self.offload = PromptOffload(
            OffloadChoice(mode, frozenset(layers), "cuda"),
            self.owners,
            fallback=fallback if has_fallback else None,
            device_owner=0,
        )

    def experts(self, num_tokens: int = NUM_TOKENS) -> list[int]:
        """Those to be copied for a chunk."""
        found = self.offload.experts(self.placement, 2, num_tokens)
        return [] if found is None else np.flatnonzero(found).tolist()

    def classes(self, phase: Phase) -> list[str]:
        found = self.offload.class_map(self.placement)
        return [found.class_of(phase, 2, each) for each in range(NUM_EXPERTS)]


def test_modes_that_have_been_set_hold() -> None:
    on, off = Rig(OffloadMode.ON, ()), Rig(OffloadMode.OFF)
    assert on.experts(9) == [2, 3, 4, 5]
    assert off.experts() == []
    assert on.classes(Phase.PREFILL) == ["cuda"] * NUM_EXPERTS
    assert on.classes(Phase.DECODE) == ["cuda", "cuda", "avx512", "avx512", "cuda", "cuda"]
    assert off.classes(Phase.PREFILL) == off.classes(Phase.DECODE) == on.classes(Phase.DECODE)


def test_of_planned_layers_those_of_processors_are_named_whatever_the_chunk() -> None:
    planned, other = Rig(OffloadMode.AUTO), Rig(OffloadMode.AUTO, (0,))
    for num_tokens in (1, FEWEST_TOKENS, 4096):
        assert planned.experts(num_tokens) == [2, 3]
        assert other.experts(num_tokens) == []
    assert planned.classes(Phase.PREFILL) == ["cuda"] * NUM_EXPERTS
    assert other.classes(Phase.PREFILL)[2:4] == ["avx512"] * 2


def test_what_no_chunk_gets_is_of_its_owners_class() -> None:
    rig = Rig(OffloadMode.AUTO)
    before = rig.offload.class_map(rig.placement)
    assert rig.offload.class_map(rig.placement) is before
    rig.offload.mode = OffloadMode.OFF
    assert rig.experts() == []
    assert rig.classes(Phase.PREFILL)[2:4] == ["avx512"] * 2
    assert rig.offload.class_map(rig.placement).digest != before.digest


def test_a_daemon_that_comes_back_as_another_class_changes_the_map() -> None:
    rig = Rig(OffloadMode.AUTO)
    before = rig.offload.class_map(rig.placement).digest
    rig.quick.stats.numeric_class = "hip"
    after = rig.offload.class_map(rig.placement)
    assert after.digest != before
    assert after.class_of(Phase.DECODE, 2, 4) == "hip"


def test_whether_some_may_be_named_is_known_before_a_chunk() -> None:
    for has_fallback in (True, False):
        rig = Rig(OffloadMode.AUTO, has_fallback=has_fallback)
        assert rig.offload.may_name_some_now
        rig.slow.stats.device = "hip:0"
        assert not rig.offload.may_name_some_now
        assert rig.offload.mode is OffloadMode.AUTO
        rig.quick.stats.is_lost = True  # the fallback computes on the CPU
        assert rig.offload.may_name_some_now == has_fallback
        assert bool(rig.experts()) == has_fallback
    assert not Rig(OffloadMode.AUTO, ()).offload.may_name_some_now
    assert Rig(OffloadMode.ON).offload.may_name_some_now
    assert not Rig(OffloadMode.OFF).offload.may_name_some_now


def test_each_owner_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig(OffloadMode.AUTO)
    for _ in range(2):
        assert rig.experts() == [2, 3]
    [record] = caplog.records
    assert record.args == ("slow",)


def test_a_lost_owner_counts_as_whoever_computes_for_it() -> None:
    rig = Rig(OffloadMode.AUTO, replica=True)
    rig.slow.stats.is_lost = True
    assert rig.experts() == [2]  # the fallback's; a GPU has the other one
    rig.quick.stats.is_lost = True
    assert rig.experts() == [2, 3, 4, 5]
    without = Rig(OffloadMode.ON, has_fallback=False)  # daemons are required
    assert without.experts() == [2, 3, 4, 5]
    without.slow.stats.is_lost = True
    assert without.experts() == [4, 5]


def test_beyond_the_planned_layers_lost_experts_are_named_in_large_chunks() -> None:
    rig = Rig(OffloadMode.AUTO, ())
    rig.slow.stats.is_lost = True
    assert rig.experts(FEWEST_TOKENS) == [2, 3]
    assert rig.experts(FEWEST_TOKENS - 1) == []
    assert rig.classes(Phase.PREFILL)[2:4] == ["avx512"] * 2  # a loss is none of its business


def test_bits_change_where_the_class_map_leaves_experts_to_other_classes() -> None:
    def changed(rig: Rig) -> list[int]:
        return np.flatnonzero(rig.offload.other_class(rig.placement, 2)).tolist()

    names = (LOCAL_OWNER, "slow", "quick")
    for exact, same in ((names, [4, 5]), (("slow",), [])):
        known, unplanned = Rig(OffloadMode.AUTO), Rig(OffloadMode.AUTO, ())
        for rig in (known, unplanned):
            classes = {name: name for name in exact}  # only whether there is one counts
            rig.placement = replace(rig.placement, numeric_classes=classes)
        rounded = [each for each in (4, 5) if each not in same]
        assert changed(known) == rounded
        assert changed(unplanned) == [2, 3, *rounded]
    assert changed(Rig(OffloadMode.ON, ())) == []


def test_answers_are_kept_for_as_long_as_nothing_changes() -> None:
    rig = Rig(OffloadMode.AUTO)

    def found() -> tuple[object, object]:
        other_class = rig.offload.other_class(rig.placement, 2)
        return rig.offload.experts(rig.placement, 2, NUM_TOKENS), other_class

    def changed_by(change: Callable[[], None]) -> tuple[list[int], list[int]]:
        """The experts found after a change, and those of other classes."""
        before = found()
        assert all(a is b for a, b in zip(before, found(), strict=True))
        change()
        assert not any(a is b for a, b in zip(before, found(), strict=True))
        return rig.experts(), np.flatnonzero(rig.offload.other_class(rig.placement, 2)).tolist()

    assert rig.experts() == [2, 3]
    slow, quick = rig.slow.stats, rig.quick.stats
    assert changed_by(lambda: setattr(quick, "is_lost", True)) == ([2, 3, 4, 5], [])
    assert changed_by(lambda: setattr(quick, "numeric_class", "avx2")) == ([2, 3, 4, 5], [4, 5])
    assert changed_by(lambda: setattr(quick, "is_lost", False)) == ([2, 3], [4, 5])
    moved = {LOCAL_OWNER: [0, 5], "slow": [2, 3], "quick": [4, 1]}
    placement = make_placement(
        MoeSpec((moe_layer(layer_id=2, num_experts=NUM_EXPERTS),)),
        {name: OwnedExperts.from_lists({2: ids}) for name, ids in moved.items()},
    )
    placement = replace(placement, numeric_classes=rig.placement.numeric_classes)
    assert changed_by(lambda: setattr(rig, "placement", placement)) == ([2, 3], [1, 4])
    assert changed_by(lambda: setattr(rig.offload, "mode", OffloadMode.ON)) == ([1, 2, 3, 4], [])
    rig.offload.mode = OffloadMode.AUTO
    assert changed_by(lambda: setattr(slow, "device", "cuda:2")) == ([], [1, 2, 3, 4])
    rig.offload.mode = OffloadMode.OFF
    assert rig.experts() == []
