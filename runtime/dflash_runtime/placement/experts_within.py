"""Which experts a device, a parent's or a daemon's, keeps within a budget, and which the parent's
processor computes then: the coldest leave first, the hottest come back first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_protocol.ids import F64Array, I32Array
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.placement.split import HOST_OWNER


@dataclass(frozen=True, slots=True)
class LayerRoom:
    """A layer whose experts may go from a device to the processor, and back."""

    layer_id: int
    fewest: int
    """Experts that stay on the device."""
    most: int
    held_bytes: Callable[[int], int]
    """What so many experts take there. It may be the same for several numbers: memory comes in
    blocks."""


def experts_within(
    placement: Placement,
    rooms: Sequence[LayerRoom],
    budget_bytes: int,
    *,
    heat_of: Callable[[int], F64Array],
    here: str,
) -> Placement:
    """The placement in which a device's experts of these layers take no more than a budget, or as
    little as they can; and as much as they can within it. The same object if nothing changes.
    `here`: the owner on the device.

    `heat_of` says by layer id how often a token chooses each expert. Shapes: its result [E].
    """
    ours, away = (_owned(placement, name) for name in (here, HOST_OWNER))
    counts = {room.layer_id: len(ours[room.layer_id]) for room in rooms}
    held = {room.layer_id: room.held_bytes(counts[room.layer_id]) for room in rooms}
    total = sum(held.values())
    heats = {room.layer_id: heat_of(room.layer_id) for room in rooms}
    by_id = {room.layer_id: room for room in rooms}
    leaving: dict[int, list[int]] = {layer_id: [] for layer_id in counts}
    for layer_id, expert in _by_heat(ours, heats):
        room = by_id[layer_id]
        if total <= budget_bytes:
            break
        if counts[layer_id] > room.fewest:
            counts[layer_id] -= 1
            leaving[layer_id].append(expert)
            size = room.held_bytes(counts[layer_id])
            total, held[layer_id] = total + size - held[layer_id], size
    for layer_id, experts in leaving.items():  # what fits into the blocks that are kept
        while experts and by_id[layer_id].held_bytes(counts[layer_id] + 1) == held[layer_id]:
            experts.pop()
            counts[layer_id] += 1
    arriving: dict[int, list[int]] = {layer_id: [] for layer_id in counts}
    for layer_id, expert in reversed(_by_heat(away, heats)):
        room = by_id[layer_id]
        if counts[layer_id] >= room.most or leaving[layer_id] or expert in ours[layer_id]:
            continue
        size = room.held_bytes(counts[layer_id] + 1)
        if total + size - held[layer_id] <= budget_bytes:
            counts[layer_id] += 1
            arriving[layer_id].append(expert)
            total, held[layer_id] = total + size - held[layer_id], size
    changed = [layer_id for layer_id in counts if leaving[layer_id] or arriving[layer_id]]
    if not changed:
        return placement
    for layer_id in changed:
        going, coming = (np.array(each[layer_id], np.int32) for each in (leaving, arriving))
        ours[layer_id] = _exchanged(ours[layer_id], going, coming)
        away[layer_id] = _exchanged(away[layer_id], coming, going)
    owners = {here: ours, HOST_OWNER: away}
    return replace(
        placement,
        owners=tuple(
            OwnedExperts(owners[name]) if name in owners else owned
            for name, owned in zip(placement.owner_names, placement.owners, strict=True)
        ),
    )


def _owned(placement: Placement, name: str) -> dict[int, I32Array]:
    return dict(placement.owners[placement.owner_names.index(name)].by_layer)


def _by_heat(owned: Mapping[int, I32Array], heats: Mapping[int, F64Array]) -> list[tuple[int, int]]:
    """Layer and expert, the coldest first."""
    found = [
        (float(heat[expert]), layer_id, expert)
        for layer_id, heat in heats.items()
        for expert in owned[layer_id].tolist()
    ]
    return [(layer_id, expert) for _, layer_id, expert in sorted(found)]


def _exchanged(ids: I32Array, going: I32Array, coming: I32Array) -> I32Array:
    """Those that stay keep their order. Replicas stay, too."""
    coming = coming[~np.isin(coming, ids)]
    return np.concatenate((ids[~np.isin(ids, going)], coming)).astype(np.int32)
