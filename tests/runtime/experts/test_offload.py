"""Whose experts of a chunk are copied to the parent's device, by what this and that takes."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from dflash_adapters.spec import MoeSpec
from dflash_protocol.ids import I32Array
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
        self, mode: OffloadMode, *, has_fallback: bool = True, replica: bool = False
    ) -> None:
        owned = {
            LOCAL_OWNER: [0, 1],
            "slow": [2, 3],
            "quick": [4, 5, *([3] if replica else [])],
        }
        layer = moe_layer(layer_id=2, num_experts=NUM_EXPERTS)
        placement = make_placement(
            MoeSpec((layer,)),
            {name: OwnedExperts.from_lists({2: ids}) for name, ids in owned.items()},
        )
        self.owners = [
            LocalExpertCompute(
                OwnerKind.LOCAL if name == LOCAL_OWNER else OwnerKind.DAEMON,
                {},
                pairs_per_s=1.0,
            )
            for name in owned
        ]
        _, self.slow, self.quick = self.owners
        self.slow.stats.device, self.quick.stats.device = "cpu", "cuda:1"
        fallback = LocalExpertCompute(OwnerKind.FALLBACK, {}, pairs_per_s=1.0)
        self.offload = PromptOffload(
            OffloadChoice(mode),
            placement,
            self.owners,
            fallback=fallback if has_fallback else None,
            device_owner=0,
        )

    def experts(
        self, *chosen: int, expert_s: float = 1e-3, num_tokens: int = NUM_TOKENS
    ) -> list[int]:
        """Those to be copied if all tokens choose these, or if it is not known."""
        ids: I32Array | None = np.tile(np.array(chosen, np.int32), (num_tokens, 1))
        found = self.offload.experts(2, ids if chosen else None, expert_s=expert_s)
        return [] if found is None else np.flatnonzero(found).tolist()


def test_modes_that_have_been_set_hold() -> None:
    on, off = Rig(OffloadMode.ON), Rig(OffloadMode.OFF)
    on.slow.pairs_per_s = 0.0
    assert on.experts(2, expert_s=1e9, num_tokens=9) == [2, 3]
    assert off.experts(2, expert_s=1e-9) == []


def test_an_owner_that_is_slow_by_its_own_account_is_not_tried() -> None:
    rig = Rig(OffloadMode.AUTO)
    said_s = NUM_TOKENS / rig.slow.pairs_per_s
    assert rig.experts(2, expert_s=said_s / 17) == [2, 3]
    assert rig.experts(2, expert_s=said_s / 15) == []  # it may be much quicker than that
    assert rig.experts(2, expert_s=2 * said_s) == []
    assert rig.experts(2, expert_s=1e-9, num_tokens=FEWEST_TOKENS - 1) == []
    rig.slow.pairs_per_s = 0.0
    assert rig.experts(2, expert_s=1e-9) == []


def test_what_was_measured_decides() -> None:
    rig = Rig(OffloadMode.AUTO)
    slow, quick = rig.owners.index(rig.slow), rig.owners.index(rig.quick)
    rig.offload.note(slow, num_tokens=NUM_TOKENS, num_pairs=50, elapsed_s=0.1)
    assert rig.experts(2, expert_s=0.21) == []
    assert rig.experts(2, expert_s=0.19) == [2, 3]
    # Of other owners, and of chunks of another magnitude, nothing is known.
    rig.offload.note(quick, num_tokens=NUM_TOKENS, num_pairs=50, elapsed_s=1e-6)
    rig.offload.note(slow, num_tokens=4 * NUM_TOKENS, num_pairs=50, elapsed_s=1e-6)
    assert rig.experts(2, expert_s=0.19) == [2, 3]
    for _ in range(20):
        rig.offload.note(slow, num_tokens=NUM_TOKENS, num_pairs=50, elapsed_s=0.01)
    assert rig.experts(2, expert_s=0.021) == []
    assert rig.experts(2, expert_s=0.019) == [2, 3]


def test_whether_some_may_be_named_is_known_before_a_chunk() -> None:
    for has_fallback in (True, False):
        rig = Rig(OffloadMode.AUTO, has_fallback=has_fallback)
        assert rig.offload.may_name_some_now
        rig.slow.stats.device = "hip:0"
        assert not rig.offload.may_name_some_now
        assert rig.offload.mode is OffloadMode.AUTO
        rig.quick.stats.is_lost = True  # the fallback computes on the CPU
        assert rig.offload.may_name_some_now == has_fallback
        assert bool(rig.experts(4)) == has_fallback
    assert Rig(OffloadMode.ON).offload.may_name_some_now
    assert not Rig(OffloadMode.OFF).offload.may_name_some_now


def test_experts_of_slow_owners_are_named_and_those_of_devices_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig(OffloadMode.AUTO)
    assert rig.experts(0, 1, 4, 5) == []
    assert rig.experts() == []
    for _ in range(2):
        assert rig.experts(1, 2, 4) == [2, 3]
        assert rig.experts() == [2, 3]  # of a layer whose choice is not known yet
    assert rig.experts(0, 4) == []
    assert rig.experts(2) == [2, 3]
    [record] = caplog.records  # however often it is decided
    assert record.args == ("slow", 100)
    assert Rig(OffloadMode.ON).experts(0, 2, 4) == [2, 3, 4, 5]


def test_a_lost_owner_counts_as_whoever_computes_for_it() -> None:
    rig = Rig(OffloadMode.AUTO, replica=True)
    rig.slow.stats.is_lost = True
    assert rig.experts(2, 3, 4) == [2]  # the fallback's; a GPU has the other one
    rig.quick.stats.is_lost = True
    assert rig.experts(2, 3, 4) == [2, 3, 4, 5]
    without = Rig(OffloadMode.ON, has_fallback=False)  # daemons are required
    assert without.experts(2, 4) == [2, 3, 4, 5]
    without.slow.stats.is_lost = True
    assert without.experts(2, 4) == [4, 5]
