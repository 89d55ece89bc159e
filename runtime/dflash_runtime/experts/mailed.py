"""Owners that a device asks through mailboxes: routes to them, and what is counted of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dflash_protocol.batch import Pairs
from dflash_protocol.ids import Phase
from dflash_protocol.placement import LayerRouting, Placement
from dflash_runtime.compute.backend import MailRoute
from dflash_runtime.experts.compute import ExpertCompute


def mail_routes(
    placement: Placement, owners: Sequence[ExpertCompute], is_daemon: Sequence[bool]
) -> tuple[MailRoute, ...]:
    """Routes to the owners that have a mailbox now. None if they have replicas of a lost owner's
    experts, which only the host can ask for."""
    routes, lost = [], set[int]()
    for index, owner in enumerate(owners):
        if not is_daemon[index] or not placement.owners[index].num_experts:
            continue
        route = owner.mail_route(index, partial(placement.local_ids_of, index))
        if route is not None:
            routes.append(route)
        elif owner.ask_route(index) is None:
            lost.add(index)
    if routes and lost:
        routed = [route.owner_index for route in routes]
        without = placement.routing_without(frozenset(lost))
        for layer_id, routing in placement.routing.items():
            is_lost = np.isin(routing.owner_index, list(lost))
            if np.isin(without[layer_id].owner_index[is_lost], routed).any():
                return ()
    return tuple(routes)


def without_mailed(
    pairs: Pairs,
    routing: LayerRouting,
    owners: Sequence[ExpertCompute],
    *,
    mailed: frozenset[int],
    phase: Phase,
) -> Pairs:
    """A layer's pairs of one token without those of the owners `mailed`, in whose statistics they
    are counted."""
    owner_index = routing.owner_index[pairs.expert_ids]
    for index in mailed:
        num_pairs = int((owner_index == index).sum())
        if num_pairs:
            counted = owners[index].stats.of_phase(phase)
            counted.requests += 1
            counted.tokens += 1
            counted.pairs += num_pairs
    return pairs.where(~np.isin(owner_index, list(mailed)))
