"""Owners behind mailboxes: which there are, and that only the device asks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dflash_protocol.batch import HostHidden, Pairs
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import I32Array, Phase
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.compute.backend import MailRoute
from dflash_runtime.experts.compute import LocalIds
from dflash_runtime.experts.mailed import mail_routes
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.telemetry import OwnerKind, OwnerStats

LAYER_ID = 3
HIDDEN = HostHidden(np.ones((1, 4), np.float32))


class FakeOwner:
    """The part of compute.ExpertCompute that is used here; a daemon with a mailbox, a ring or
    nothing, which notes its pairs."""

    def __init__(self, *, has_mail: bool = False, has_ring: bool = True) -> None:
        self.stats = OwnerStats(OwnerKind.DAEMON, 1)
        self.has_mail, self.has_ring = has_mail, has_ring
        self.pairs: list[Pairs] = []

    def mail_route(self, owner_index: int, local_ids: LocalIds) -> MailRoute | None:
        segment: Any = None
        if not self.has_mail:
            return None
        return MailRoute(
            "", owner_index, segment, local_ids(), is_live=lambda: True, fail=lambda reason: None
        )

    def ask_route(self, owner_index: int) -> Any:
        return self if self.has_ring else None

    def begin(self, layer_id: int, rows: Any, pairs: Pairs, *, phase: Phase) -> Pairs:
        if not self.has_ring:
            raise DaemonUnavailable("lost")
        self.pairs.append(pairs)
        return pairs

    def abandon(self, ticket: Any) -> None:
        pass


def placement_of(owned: Mapping[str, list[int]]) -> Placement:
    owners = tuple(OwnedExperts.from_lists({LAYER_ID: ids}) for ids in owned.values())
    return Placement({LAYER_ID: 4}, tuple(owned), owners)


def routed(placement: Placement, *owners: Any) -> list[int]:
    routes = mail_routes(placement, owners, [True] * len(owners))
    return [route.owner_index for route in routes]


def test_owners_without_a_mailbox_take_it_from_none() -> None:
    placement = placement_of({"a": [0], "b": [1], "c": [2, 3]})
    mail, ring, lost = FakeOwner(has_mail=True), FakeOwner(), FakeOwner(has_ring=False)
    assert routed(placement, ring, mail, mail) == [1, 2]
    assert routed(placement, lost, mail, mail) == [1, 2]
    [route] = mail_routes(placement, [ring, ring, mail], [True] * 3)  # type: ignore[list-item]
    assert {layer: ids.tolist() for layer, ids in route.local_ids.items()} == {
        LAYER_ID: [-1, -1, 0, 1]
    }


def test_the_host_asks_for_replicas_of_a_lost_owners_experts() -> None:
    placement = placement_of({"a": [0], "b": [0, 1], "c": [1, 2, 3]})
    mail, ring, lost = FakeOwner(has_mail=True), FakeOwner(), FakeOwner(has_ring=False)
    assert routed(placement, lost, mail, mail) == []
    assert routed(placement, lost, ring, mail) == [2]
    assert routed(placement, mail, lost, mail) == []
    assert routed(placement, mail, mail, lost) == [0, 1]


def begun(owners: list[Any], placement: Placement, mailed: frozenset[int]) -> Any:
    runtime = MoeExpertComputeRuntime(placement, owners, fallback=None)
    ids: I32Array = np.array([[0, 1, 3]], np.int32)
    weights = np.ones((1, 3), np.float32)
    ticket = runtime.begin(LAYER_ID, HIDDEN, ids, weights, phase=Phase.DECODE, mailed=mailed)
    return ticket, runtime.hits


def test_pairs_of_owners_that_the_device_asks_are_counted_only() -> None:
    placement = placement_of({"a": [0, 2], "b": [1], "c": [3]})
    owners = [FakeOwner(), FakeOwner(has_mail=True), FakeOwner(has_mail=True)]
    ticket, hits = begun(owners, placement, frozenset((1, 2)))
    assert [[pairs.expert_ids.tolist() for pairs in owner.pairs] for owner in owners] == [
        [[0]],
        [],
        [],
    ]
    assert not ticket.is_hot_only
    assert hits.remote == 2
    for owner in owners[1:]:
        counted = owner.stats.of_phase(Phase.DECODE)
        assert (counted.requests, counted.tokens, counted.pairs) == (1, 1, 1)


def test_a_replica_in_a_mailboxs_step_is_not_asked() -> None:
    """Its device waits for the step that we are in."""
    placement = placement_of({"a": [0, 2], "b": [0, 1, 2], "c": [3]})
    owners = [FakeOwner(has_ring=False), FakeOwner(has_mail=True), FakeOwner()]
    runtime = MoeExpertComputeRuntime(placement, owners, fallback=None)  # type: ignore[arg-type]
    ids = np.array([[0, 1, 3]], np.int32)
    weights = np.ones((1, 3), np.float32)
    ticket = runtime.begin(
        LAYER_ID, HIDDEN, ids, weights, phase=Phase.DECODE, mailed=frozenset((1,))
    )
    assert ticket is not None
    ticket.in_flight.clear()  # the other owner has finished
    with pytest.raises(DaemonUnavailable, match="b is in a mailbox's step"):
        runtime.finish(ticket)
    assert not owners[1].pairs
