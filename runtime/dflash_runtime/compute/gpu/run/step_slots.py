"""Experts that steps keep on the device besides those that are loaded.

Of the experts that a step's layer would ask the processor for, the device fetches the second one
itself, over the bus, while the processor computes the others (kernels/mailbox/mailbox_post.cuh). It
stays in a slot for the next tokens if it was used more of late than what is there, unless that is
pinned. A step of several tokens, a tree of drafts, does the same for all of them at once. Bits do
not depend on it: both compute steps in one order (compute.step_order).
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from dflash_protocol.ids import F32Array, I32Array, I64Array
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    KernelDevice,
    address,
    optional_address,
)
from dflash_runtime.compute.gpu.launch.decode_experts import FETCH_WORDS, FetchCounts, MailFetch
from dflash_runtime.compute.gpu.launch.fetch_expert import FetchExpert, FetchTables
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.mailbox.fetched_memory import FetchedMemory
from dflash_runtime.compute.slot_stats import SlotCounts
from dflash_runtime.compute.step_slots import HALF_LIFE, MARGIN


@dataclass(frozen=True, slots=True, eq=False)
class LayerSlots:
    """Of one layer. Shapes: scores [E] float32, slot_experts [slots] int32."""

    device: KernelDevice
    fetched: FetchedMemory
    resident: ResidentLayer
    """With the table of steps, which kernels change."""
    tables: FetchTables
    scores: DeviceArray
    slot_experts: DeviceArray
    kernel: FetchExpert

    def post_args(self, peer: int, counts: DeviceArray | None) -> ctypes.Structure:
        """For the kernel that posts; `peer`: the processor's place among the peers posted to;
        `counts`: what is done is added here. Shapes: counts [FETCH_COUNTS] uint32."""
        return MailFetch(
            scores=address(self.scores),
            slot_experts=address(self.slot_experts),
            decision=address(self.tables.decision),
            counts=optional_address(counts),
            decay=0.5 ** (1.0 / HALF_LIFE),
            margin=MARGIN,
            peer=peer,
            num_slots=self.slot_experts.size,
        )

    def counted(self, words: I64Array) -> SlotCounts:
        """What such counts say. Shapes: words [FETCH_COUNTS]."""
        counts = FetchCounts(*words.tolist())
        num_bytes = self.resident.layer.expert_bytes * counts.fetched
        return SlotCounts(counts.found, counts.fetched, counts.kept, num_bytes)

    def pin(self, expert: int) -> None:
        """Have an expert not leave once it is in a slot, in steps that are started from now on.

        Kernels compare uses, and have those of each step fade: infinitely many neither fade nor are
        fewer than another's.
        """
        self._write_score(expert, np.inf)

    def unpin(self, expert: int) -> None:
        """It may leave again, as if it had not been used; nothing if it was not pinned."""
        if self.is_pinned(expert):
            self._write_score(expert, 0.0)

    def pin_only(self, experts: Collection[int]) -> None:
        """Pin these, and unpin all others."""
        scores: F32Array = self.device.download(self.scores)
        for expert in np.flatnonzero(np.isinf(scores)).tolist():
            if expert not in experts:
                self.unpin(expert)
        for expert in experts:
            self.pin(expert)

    def is_pinned(self, expert: int) -> bool:
        score: F32Array = self.device.download(self.scores[expert : expert + 1])
        return bool(np.isinf(score[0]))

    def _write_score(self, expert: int, score: float) -> None:
        self.device.write(self.scores[expert : expert + 1], np.array([score], np.float32))

    def reset(self, local_ids: I32Array) -> None:
        """Nothing is kept, and experts are where they are now. No step may be running.

        `local_ids`: of the processor's experts. Shapes: local_ids [E].
        """
        resident, tables, write = self.resident, self.tables, self.device.write
        write(resident.experts.slot_of_expert, resident.slot_of_expert)
        write(tables.own_ids, local_ids)
        write(tables.places, self.fetched.places(resident.layer.layer_id).astype(np.uint64))
        write(self.slot_experts, np.full(self.slot_experts.size, -1, np.int32))


def new_slots(
    device: KernelDevice, fetched: FetchedMemory, resident: ResidentLayer, *, local_ids: DeviceArray
) -> LayerSlots:
    """Slots of a layer whose experts may be fetched, to be `reset`.

    `local_ids`: of the processor's experts; kernels change them. Shapes: local_ids [E] int32.
    """
    layer, num_experts = resident.layer, resident.layer.num_experts
    num_fetched = len(fetched.banks[layer.layer_id].addresses)
    experts = replace(resident.experts, slot_of_expert=device.empty(num_experts, np.int32))
    tables = FetchTables(
        decision=device.empty(FETCH_WORDS, np.int32),
        places=device.empty((num_fetched, 3), np.uint64),
        own_ids=device.empty(num_experts, np.int32),
        local_ids=local_ids,
        first_slot=0,  # experts that live here come behind them
    )
    return LayerSlots(
        device,
        fetched,
        replace(resident, experts=experts),
        tables,
        device.zeros(num_experts, np.float32),
        device.empty(fetched.num_slots, np.int32),
        FetchExpert(device, layer),
    )
