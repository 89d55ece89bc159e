"""The even split: the first N experts of each layer stay local, the rest are dealt to the daemons;
without daemons the rest is computed by the processor of a parent that has a device.

All daemons count alike, whatever their speed; one that has offered too little memory for its share
gets what fits, and the others get the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_protocol.device import CPU
from dflash_protocol.errors import SettingsError
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_protocol.wire.messages import Offer
from dflash_runtime.placement.budgets import ExpertBudget

LOCAL_OWNER = "local"
"""The parent, on its device."""
HOST_OWNER = "host"
"""The processor of a parent whose device is another one."""


def even_split(
    spec: MoeSpec,
    daemon_names: Sequence[str],
    num_local_experts: int | None,
    *,
    offers: Mapping[str, Offer] | None = None,
    budgets: Mapping[str, ExpertBudget] | None = None,
    has_host: bool = False,
    owned: OwnedExperts | None = None,
) -> Placement:
    """Deal experts one by one: the daemons' numbers of experts of a layer differ by at most one,
    unless `offers`, by daemon, say that some have too little memory; one without an offer has room
    for all. Of `budgets`, by daemon, none is exceeded.

    `num_local_experts` a layer stay in the parent: none by default if there are daemons, else all.
    `has_host`: without daemons the parent's processor can compute the others. `owned`: those that
    stay in the parent, instead of a number.
    Raises: SettingsError if a layer has fewer experts, if some have no owner, or if the daemons
    have no memory, or budgets, for all.
    """
    if has_host and not daemon_names and (num_local_experts is not None or owned is not None):
        daemon_names = [HOST_OWNER]
    local: dict[int, Sequence[int]] = {}
    shares: dict[str, dict[int, Sequence[int]]] = {name: {} for name in daemon_names}
    for layer in spec.layers:
        here = _ids_here(layer, num_local_experts, owned, has_others=bool(daemon_names))
        elsewhere = sorted({*range(layer.num_experts)}.difference(here))
        if elsewhere and not daemon_names:
            raise SettingsError(
                f"{len(elsewhere)} experts a layer have no owner: add a daemon, or keep all of "
                "them local"
            )
        local[layer.layer_id] = here
        for index, name in enumerate(daemon_names):
            shares[name][layer.layer_id] = elsewhere[index :: len(daemon_names)]
    offers, budgets = offers or {}, budgets or {}
    rooms = {
        name: _Room(spec, offers.get(name), budgets.get(name))
        for name in shares
        if name in offers or name in budgets
    }
    if any(not rooms[name].has_room(shares[name]) for name in rooms):
        shares = _fitted(spec, shares, rooms)
    owners = {
        name: OwnedExperts.from_lists(by_layer)
        for name, by_layer in {LOCAL_OWNER: local, **shares}.items()
    }
    for name in (LOCAL_OWNER, HOST_OWNER):
        if name in owners and not owners[name].num_experts:
            del owners[name]
    return make_placement(spec, owners)


def _ids_here(
    layer: MoeLayer, num_local: int | None, owned: OwnedExperts | None, *, has_others: bool
) -> Sequence[int]:
    """Experts of a layer that stay in the parent. Raises: SettingsError if it has fewer."""
    if owned is not None:
        ids: list[int] = [*map(int, owned.by_layer.get(layer.layer_id, ()))]
        return ids
    if num_local is None:
        num_local = 0 if has_others else layer.num_experts
    if not 0 <= num_local <= layer.num_experts:
        raise SettingsError(
            f"{num_local} local experts asked for; layer {layer.layer_id} has {layer.num_experts}"
        )
    return range(num_local)


class _Room:
    """What one daemon has for experts of this model: its budget, and memory that is free, or taken
    by such experts already, which parents share. Infinite where it is not known, or not limited."""

    def __init__(self, spec: MoeSpec, offer: Offer | None, budget: ExpertBudget | None) -> None:
        of_kind = (
            {} if offer is None else dict(zip(offer.layer_ids, offer.expert_bytes, strict=True))
        )
        self.expert_bytes = {
            layer_id: of_kind.get(first, spec.by_layer_id[layer_id].expert_bytes)
            for layer_id, first in spec.first_of_kind.items()
        }
        is_known = offer is not None and {*spec.first_of_kind.values()} <= of_kind.keys()
        self.num_bytes = math.inf
        if offer is not None and is_known and offer.total_bytes:
            self.num_bytes = offer.free_bytes + offer.held_bytes
        self.budget_bytes = math.inf
        if budget is not None:
            sizes = {each.layer_id: each.num_experts for each in spec.layers}
            every = sum(self.bytes_of(layer_id, size) for layer_id, size in sizes.items())
            self.budget_bytes = budget.most_bytes(every)
        self.source = "" if budget is None else budget.source
        self.is_mapped = offer is not None and offer.device == str(CPU)
        """Its experts are read where their file is mapped: without memory they are slow, not
        impossible."""

    @property
    def most_bytes(self) -> float:
        return min(self.num_bytes, self.budget_bytes)

    def bytes_of(self, layer_id: int, num_experts: int) -> int:
        return num_experts * self.expert_bytes[layer_id]

    def has_room(self, share: Mapping[int, Sequence[int]]) -> bool:
        needed = sum(self.bytes_of(layer_id, len(ids)) for layer_id, ids in share.items())
        return needed <= self.most_bytes


def _fitted(
    spec: MoeSpec, shares: Mapping[str, Mapping[int, Sequence[int]]], rooms: Mapping[str, _Room]
) -> dict[str, dict[int, Sequence[int]]]:
    """The shares cut to what their daemons have room for, about the same part of each layer, and
    the rest dealt to daemons with room; what then is left, to those that read it from the file and
    whose budget permits it.

    A share is cut at its end, so that a daemon with less room gets some of the same experts, which
    it may hold already. Raises: SettingsError with the bytes that are missing.
    """
    kept: dict[str, dict[int, list[int]]] = {}
    left: dict[str, float] = {}
    rest: list[tuple[int, int]] = []
    for name, share in shares.items():
        room = rooms.get(name)
        if room is None or math.isinf(room.most_bytes):
            kept[name] = {layer_id: [*ids] for layer_id, ids in share.items()}
            left[name] = math.inf
            continue
        bytes_of_layer = {
            layer_id: room.bytes_of(layer_id, len(ids)) for layer_id, ids in share.items()
        }
        part = min(1.0, room.most_bytes / max(1, sum(bytes_of_layer.values())))
        due, used, kept[name] = 0.0, 0, {}
        for layer_id, ids in share.items():
            due += part * bytes_of_layer[layer_id]
            num_kept = min(len(ids), int((due - used) // room.bytes_of(layer_id, 1)))
            used += room.bytes_of(layer_id, num_kept)
            kept[name][layer_id] = [*ids[:num_kept]]
            rest += ((layer_id, each) for each in ids[num_kept:])
        left[name] = room.most_bytes - used
    missing = 0
    for layer_id, global_expert_id in sorted(rest):
        need = {name: rooms[name].bytes_of(layer_id, 1) if name in rooms else 0 for name in shares}
        able = [name for name in shares if left[name] >= need[name]]
        able = able or [
            name
            for name, room in rooms.items()
            # Beyond its memory, `left` is below 0.
            if room.is_mapped and left[name] + room.budget_bytes - room.most_bytes >= need[name]
        ]
        if not able:
            missing += spec.by_layer_id[layer_id].expert_bytes
            continue
        taker = min(able, key=lambda name: len(kept[name][layer_id]))
        kept[taker][layer_id].append(global_expert_id)
        left[taker] -= need[taker]
    if missing:
        budgets = [room.source for room in rooms.values() if room.source]
        advice = ", ".join([*(f"raise {each}" for each in budgets[:1]), "or add a daemon"])
        raise SettingsError(
            f"the daemons have too little memory: {missing / 2**30:.2f} GiB of experts have no "
            f"place; keep more of them local (--local-experts), {advice}"
        )
    return {name: dict(by_layer) for name, by_layer in kept.items()}


def make_placement(spec: MoeSpec, owners: Mapping[str, OwnedExperts]) -> Placement:
    """A placement of this model's experts. Raises: ProtocolError if one has no owner."""
    return Placement(
        experts_per_layer={layer.layer_id: layer.num_experts for layer in spec.layers},
        owner_names=tuple(owners),
        owners=tuple(owners.values()),
    )
