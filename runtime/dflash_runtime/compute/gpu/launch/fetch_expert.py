"""Launches of ``fetch_expert.cu``: an expert from the host's memory, over the bus, for a step."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_adapters.spec import MoeLayer
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice, address
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import check_shared_bytes
from dflash_runtime.compute.gpu.launch.layouts import ResidentExperts, row_bytes

_THREADS = 256
_BLOCKS = 32
"""A few blocks read as fast as the bus is; the others are for what runs beside them."""
_CHUNK_BYTES = 8192
"""Bytes of rows that a block reads at once."""

FetchArgs = kernel_struct("fetch_expert.cu", "FetchArgs")


@dataclass(frozen=True, slots=True, eq=False)
class FetchTables:
    """What says which experts a layer keeps besides those that are here always.

    Shapes: decision [FETCH_WORDS] int32; places [N, 3] uint64: where gate, up and down of the
    peer's experts lie, as the device sees the host's memory; own_ids, local_ids [E] int32.
    """

    decision: DeviceArray
    places: DeviceArray
    own_ids: DeviceArray
    """The peer's local ids of its experts; negative for others."""
    local_ids: DeviceArray
    """The same, negative for those that are kept here: what the peer is asked for."""
    first_slot: int


class FetchExpert:
    """Launches the kernel for layers of one kind."""

    def __init__(self, device: KernelDevice, layer: MoeLayer) -> None:
        """Raises: ValueError if a row does not fit a block's shared memory."""
        self._device = device
        native = [each.tensor_type.row_bytes(each.columns) for each in layer.projections]
        self._sizes = [
            each.rows * row_bytes(each.tensor_type, each.columns) for each in layer.projections
        ]
        self._shared_bytes = check_shared_bytes(
            device, max(_CHUNK_BYTES, *native) + 32, f"rows of {max(native)} bytes"
        )
        gate, up, down = (int(each.tensor_type) for each in layer.projections)
        defines: dict[str, int | str] = {
            "HIDDEN": layer.hidden_size,
            "FFN": layer.ffn_size,
            "TYPE_GATE": gate,
            "TYPE_UP": up,
            "TYPE_DOWN": down,
            "CHUNK_BYTES": _CHUNK_BYTES,
            "THREADS": _THREADS,
        }
        self._kernel = device.module("fetch_expert.cu", defines).kernel("fetch_expert", FetchArgs)

    def launch(
        self, experts: ResidentExperts, tables: FetchTables, *, pair_slots: DeviceArray
    ) -> None:
        """Fetch what was decided on, if anything. `experts`: with the table of steps, which
        changes. Shapes: pair_slots [T, K] int32."""
        gate, up, down = (
            address(of.weights, tables.first_slot * num_bytes)
            for of, num_bytes in zip(
                (experts.gate, experts.up, experts.down), self._sizes, strict=True
            )
        )
        args = FetchArgs(
            places=address(tables.places),
            gate=gate,
            up=up,
            down=down,
            decision=address(tables.decision),
            own_ids=address(tables.own_ids),
            local_ids=address(tables.local_ids),
            slot_of_expert=address(experts.slot_of_expert),
            pair_slots=address(pair_slots),
            first_slot=tables.first_slot,
        )
        self._device.launch(
            self._kernel, (_BLOCKS, 1, 1), _THREADS, args, shared_bytes=self._shared_bytes
        )
