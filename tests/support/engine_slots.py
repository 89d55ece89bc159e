"""The slots of steps of an engine's GPU: what lies there, and an adversary that has it leave."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_runtime import Engine
from dflash_runtime.compute.gpu.run.step_slots import LayerSlots


def slots_of(engine: Engine) -> list[LayerSlots]:
    """Of the layers that have some."""
    captured: Any = engine._steps._captured
    layers = captured._choice.mailbox._layers.values()
    return [layer.slots for layer in layers if layer.slots is not None]


def kept(engine: Engine) -> list[set[int]]:
    """Global ids of the experts in each layer's slots."""
    return [
        {int(each) for each in layer.device.download(layer.slot_experts) if each >= 0}
        for layer in slots_of(engine)
    ]


def check_tables(engine: Engine, most: int, *, least: int = 1) -> None:
    """Each expert is here, or the processor is asked for it."""
    for layer, experts in zip(slots_of(engine), kept(engine), strict=True):
        assert least <= len(experts) <= most
        asked = layer.device.download(layer.tables.local_ids)
        here = layer.device.download(layer.resident.experts.slot_of_expert)
        is_kept = (here >= 0) & (here <= layer.slot_experts.size)  # experts that live here follow
        assert {*np.flatnonzero(is_kept)} == experts
        assert ((asked >= 0) != (here >= 0)).all()


def empty_some(layer: LayerSlots, rng: np.random.Generator, share: float) -> int:
    """Have experts leave slots at random, and spoil the memory of those that are empty; how many
    have left. No step may be running."""
    device, tables = layer.device, layer.tables
    table = layer.resident.experts.slot_of_expert
    kept, here, asked, own_ids = (
        device.download(each).copy()
        for each in (layer.slot_experts, table, tables.local_ids, tables.own_ids)
    )
    leaving = np.flatnonzero((kept >= 0) & (rng.random(kept.size) < share))
    here[kept[leaving]] = -1
    asked[kept[leaving]] = own_ids[kept[leaving]]
    kept[leaving] = -1
    device.write(layer.slot_experts, kept)
    device.write(table, here)
    device.write(tables.local_ids, asked)
    for weights in layer.resident.weights:
        content = device.download(weights).copy()
        num_slots = kept.size + 1 + layer.resident.num_resident
        by_slot = content.reshape(-1).view(np.uint8).reshape(num_slots, -1)
        by_slot[tables.first_slot :][: kept.size + 1][np.append(kept < 0, True)] = 0xFF
        device.write(weights, content)
    return int(leaving.size)
