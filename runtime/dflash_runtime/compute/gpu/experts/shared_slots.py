"""A layer's slots that several banks of a daemon share: one for each placement in use. An expert
lies in one slot, whoever has it. Slots that no bank uses are given back to the driver: those that
stay move together at the beginning. Addresses stay, and with them all that was recorded."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.experts.resizing import SlotRoom, copy_slot
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer

Named = tuple[ResidentLayer, ResidentLayer]
"""Experts by their global ids, and by their local ones."""

Paused = Callable[[], AbstractContextManager[object]]
"""Within it no step that was recorded runs beside the device's main stream."""


class SharedSlots:
    """The slots of one layer's weights, and who uses them. Callers hold the backend's lock.

    A layer that is referred to counts as used, also by a mailbox whose bank is gone already.
    """

    def __init__(self, room: SlotRoom, paused: Paused) -> None:
        self.room = room
        self._paused = paused
        self._num_kept = room.most_experts
        """Slots that have memory."""
        self._users: list[tuple[weakref.ref[ResidentLayer], ...]] = []

    def add(self, named: Named) -> None:
        """These use slots, as long as anything refers to one of them."""
        self._users.append(tuple(map(weakref.ref, named)))

    def slot_of_expert(self) -> I32Array:
        """By global expert id; -1: in none. Shapes: result [E]."""
        found = np.full(self.room.layer.num_experts, -1, np.int32)
        for by_global, _ in self._live():
            if by_global is not None:
                np.maximum(found, by_global.slot_of_expert, out=found)
        return found

    def num_missing(self, global_expert_ids: I32Array) -> int | None:
        """How many of these are in no slot; None: there is no room for them."""
        num_missing = int((self.slot_of_expert()[global_expert_ids] < 0).sum())
        return num_missing if num_missing <= len(self._free()) else None

    def take(self, global_expert_ids: I32Array) -> tuple[I32Array, list[tuple[int, int]]]:
        """The slot of each, and slot and expert of those that are to be filled. Memory is taken
        for them. There has to be room for all.

        Shapes: both [N]. Raises: DeviceOutOfMemory, and then it is as before.
        """
        slots, free = self.slot_of_expert()[global_expert_ids], iter(self._free())
        new = [
            (next(free), expert)
            for slot, expert in zip(slots.tolist(), global_expert_ids.tolist(), strict=True)
            if slot < 0
        ]
        slots[slots < 0] = [slot for slot, _ in new]
        self._keep(max(self._num_kept, *(slot + 1 for slot, _ in new), 0))
        return slots, new

    def trim(self, device: KernelDevice) -> None:
        """Move the experts that are in use together, and give back the other slots' memory.

        Raises: DeviceUnavailable.
        """
        used = self._used()
        if len(used) == self._num_kept:
            return
        with self._paused():
            device.synchronize()
            moves = dict(
                zip(
                    (slot for slot in sorted(used) if slot >= len(used)),
                    sorted({*range(len(used))} - used),
                    strict=True,
                )
            )
            layers = [each for user in self._live() for each in user if each is not None]
            if layers:
                for slot, place in moves.items():
                    copy_slot(device, layers[0], source=slot, place=place)
            for each in layers:
                slots = each.slot_of_expert
                slots[:] = [moves.get(slot, slot) for slot in slots.tolist()]
                device.write(each.experts.slot_of_expert, slots)
            device.synchronize()
            self._keep(len(used))

    def _keep(self, num_slots: int) -> None:
        self.room.keep(num_slots, before=self._num_kept)
        self._num_kept = num_slots

    def _free(self) -> list[int]:
        return sorted({*range(self.room.most_experts)} - self._used())

    def _used(self) -> set[int]:
        slots = (
            slot
            for user in self._live()
            for each in user
            if each is not None
            for slot in each.slot_of_expert.tolist()
        )
        return {slot for slot in slots if slot >= 0}

    def _live(self) -> list[tuple[ResidentLayer | None, ...]]:
        """The users that anything refers to; both, by global ids and by local ones, or one."""
        found = [(user, tuple(each() for each in user)) for user in self._users]
        alive = [(user, each) for user, each in found if any(part is not None for part in each)]
        self._users = [user for user, _ in alive]
        return [each for _, each in alive]
