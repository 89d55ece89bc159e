"""Experts that steps keep on the device besides those that are loaded.

Of the experts that a token's layer would ask the processor for, the device fetches the second one
itself, over the bus, while the processor computes the others (kernels/mailbox/mailbox_post.cuh). It
stays in a slot for the next tokens if it was used more of late than what is there. Bits do not
depend on it: both compute steps in one order (compute.step_order).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice, address
from dflash_runtime.compute.gpu.launch.decode_experts import MailFetch
from dflash_runtime.compute.gpu.launch.fetch_expert import (
    FetchExpert,
    FetchTables,
    empty_decision,
)
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer, expert_bytes
from dflash_runtime.compute.gpu.mailbox.fetched_memory import FetchedMemory

HALF_LIFE = 64
"""Tokens after which a use counts half; see docs/worklog.md."""
_MARGIN = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LayerSlots:
    """Of one layer. Shapes: scores [E] float32, slot_experts [slots] int32."""

    resident: ResidentLayer
    """With the table of steps, which kernels change."""
    tables: FetchTables
    scores: DeviceArray
    slot_experts: DeviceArray
    kernel: FetchExpert

    def post_args(self, peer: int) -> ctypes.Structure:
        """For the kernel that posts; `peer`: the processor's place among the peers posted to."""
        return MailFetch(
            scores=address(self.scores),
            slot_experts=address(self.slot_experts),
            decision=address(self.tables.decision),
            decay=0.5 ** (1.0 / HALF_LIFE),
            margin=_MARGIN,
            peer=peer,
            num_slots=self.slot_experts.size,
        )

    def reset(self, device: KernelDevice, fetched: FetchedMemory, local_ids: I32Array) -> None:
        """Nothing is kept; experts have moved. No step may be running. `local_ids`: of the
        processor's. Shapes: local_ids [E]."""
        resident, tables = self.resident, self.tables
        device.write(resident.experts.slot_of_expert, resident.slot_of_expert)
        device.write(tables.own_ids, local_ids)
        device.write(tables.places, fetched.places(resident.layer.layer_id).astype(np.uint64))
        device.write(self.slot_experts, np.full(self.slot_experts.size, -1, np.int32))


def slots_of_layers(
    device: KernelDevice,
    fetched: FetchedMemory,
    resident: Mapping[int, ResidentLayer],
    *,
    local_ids: Mapping[int, DeviceArray],
) -> dict[int, LayerSlots]:
    """By layer id, of all layers whose experts may be fetched; empty at first.

    `local_ids`: of the processor's experts, by layer id; kernels change them from now on.
    Shapes: each [E] int32.
    """
    kernels: dict[object, FetchExpert] = {}
    found = {}
    for layer_id in fetched.banks:
        layer = resident[layer_id].layer
        kind = tuple((each.tensor_type, each.rows, each.columns) for each in layer.projections)
        if kind not in kernels:
            kernels[kind] = FetchExpert(device, layer)
        found[layer_id] = _new_slots(
            device, fetched, resident[layer_id], kernels[kind], local_ids[layer_id]
        )
    return found


def _new_slots(
    device: KernelDevice,
    fetched: FetchedMemory,
    resident: ResidentLayer,
    kernel: FetchExpert,
    local_ids: DeviceArray,
) -> LayerSlots:
    layer = resident.layer
    num_slots = resident.weights[0].nbytes // expert_bytes(layer.gate)
    experts = replace(resident.experts, slot_of_expert=device.upload(resident.slot_of_expert))
    tables = FetchTables(
        decision=empty_decision(device),
        places=device.upload(fetched.places(layer.layer_id).astype(np.uint64)),
        own_ids=device.upload(device.download(local_ids)),
        local_ids=local_ids,
        first_slot=num_slots - fetched.num_slots - 1,
    )
    return LayerSlots(
        replace(resident, experts=experts),
        tables,
        device.zeros(layer.num_experts, np.float32),
        device.upload(np.full(fetched.num_slots, -1, np.int32)),
        kernel,
    )
