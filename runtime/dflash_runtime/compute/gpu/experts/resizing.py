"""More or fewer experts of a layer on the device: those that stay move together at the beginning of
their memory, whose end is given back, or taken anew. Addresses stay, and with them all that was
recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import MoeLayer
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.device import BlockArray, DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.layers.matrix import Uploader
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer, expert_bytes


@dataclass(frozen=True, slots=True, eq=False)
class SlotRoom:
    """The slots of a layer's experts."""

    layer: MoeLayer
    blocks: Sequence[BlockArray]
    """Of gate, up and down; none: their memory is not given back."""
    first_slot: int
    """Of experts that live here; those before are for experts that steps fetch."""
    most_experts: int

    def held_bytes(self, num_experts: int) -> int:
        """What so many experts take of what can be given back."""
        sizes = self._sizes(num_experts)
        return sum(each.held_for(size) for each, size in zip(self.blocks, sizes, strict=False))

    def keep(self, num_experts: int, *, before: int) -> None:
        """Have memory for so many, instead of those `before`.

        Raises: DeviceOutOfMemory, and then it is as before.
        """
        sizes, sizes_before = self._sizes(num_experts), self._sizes(before)
        num_done = 0
        try:
            for each, size in zip(self.blocks, sizes, strict=False):
                each.keep(size)
                num_done += 1
        except BaseException:
            for each, size in zip(self.blocks[:num_done], sizes_before, strict=False):
                each.keep(size)
            raise

    def _sizes(self, num_experts: int) -> list[int]:
        num_slots = self.first_slot + num_experts
        return [num_slots * expert_bytes(each) for each in self.layer.projections]


def resize(
    room: SlotRoom,
    device: KernelDevice,
    uploader: Uploader,
    *,
    file: GgufFile,
    named: tuple[ResidentLayer, ResidentLayer],
    ids: I32Array,
) -> None:
    """See ResizableBank.resize. `named`: the experts by their global ids, and by their local ones.
    Whatever fails, `named` knows only of experts whose slots hold them."""
    by_global, by_local = named
    if ids.size > room.most_experts:
        raise ValueError(f"there is room for {room.most_experts} experts, not {ids.size}")
    device.synchronize()
    num_before, first, end = by_local.num_resident, room.first_slot, room.first_slot + ids.size
    if ids.size > num_before:
        room.keep(ids.size, before=num_before)
    slot_of = by_global.slot_of_expert
    stays = np.zeros(slot_of.size, np.bool_)
    stays[ids] = True
    slot_of[~stays] = -1
    by_local.slot_of_expert[:] = -1
    taken = {slot for slot in slot_of.tolist() if slot >= 0}
    free = iter(sorted({*range(first, end)} - taken))
    for expert in ids.tolist():
        slot = int(slot_of[expert])
        if 0 <= slot < end:
            continue
        place = next(free)
        if slot < 0:
            by_global.fill(uploader, file, place, global_expert_id=expert)
        else:
            copy_slot(device, by_global, source=slot, place=place)
        slot_of[expert] = place
    slots, global_ids = slot_of[ids].tolist(), ids.tolist()
    device.write(by_global.experts.slot_of_expert, slot_of)
    for each, names in ((by_global, global_ids), (by_local, range(ids.size))):
        each.rename(device, file, slots, ids=list(zip(global_ids, names, strict=True)))
    uploader.finish()
    device.synchronize()
    if ids.size < num_before:
        room.keep(ids.size, before=num_before)


def copy_slot(device: KernelDevice, layer: ResidentLayer, *, source: int, place: int) -> None:
    """Copy the weights of a slot to another one, in the main stream."""
    for projection, weights in zip(layer.layer.projections, layer.weights, strict=True):
        device.copy(*(_slot(weights, each, expert_bytes(projection)) for each in (place, source)))


def _slot(weights: DeviceArray, slot: int, num_bytes: int) -> DeviceArray:
    part: DeviceArray = weights[slot * num_bytes : (slot + 1) * num_bytes]
    return part
