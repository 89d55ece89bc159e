"""Experts on their way to the device: copied beside running steps, then put into their slots."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import MoeLayer
from dflash_protocol.errors import DeviceUnavailable, SettingsError
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, FileRuns, Transfer
from dflash_runtime.compute.room import SLOT_ALIGNMENT, staged_slots

_LOG = logging.getLogger(__name__)


class DeviceStage:
    """Implements backend.ExpertStage. One thread copies: steps need the others."""

    def __init__(
        self, device: KernelDevice, file: GgufFile, *, num_slots: int, slot_bytes: int
    ) -> None:
        """`slot_bytes`: see `room.staged_slots`. Raises: DeviceUnavailable, DeviceOutOfMemory among
        them; SettingsError if memory cannot be locked."""
        self.num_slots = num_slots
        self._device, self._file, self._slot_bytes = device, file, slot_bytes
        self._matrices: dict[tuple[int, int], tuple[DeviceArray, ...]] = {}
        self._transfer: Transfer | None = None
        with contextlib.ExitStack() as undo:
            self._copier = FileCopier(device, num_threads=1)
            undo.callback(self._copier.close)
            self._memory: DeviceArray | None = device.empty(num_slots * slot_bytes, np.uint8)
            self._undo = undo.pop_all()

    @property
    def is_filled(self) -> bool:
        return self._transfer is not None and self._transfer.has_ended

    def matrices(self, layer_id: int, global_expert_id: int) -> tuple[DeviceArray, ...] | None:
        """An expert's gate, up and down, as in the file; None if it is not here.

        Shapes: each [bytes] uint8.
        """
        return self._matrices.get((layer_id, global_expert_id))

    def begin(self, experts: Sequence[tuple[MoeLayer, int]]) -> None:
        assert self._memory is not None
        assert len(experts) <= self.num_slots
        self.clear()
        self._file.require_unwritten()
        runs = []
        for index, (layer, global_expert_id) in enumerate(experts):
            begin, places = index * self._slot_bytes, []
            for each in layer.projections:
                place = self._memory[begin : begin + each.num_bytes]
                raw = self._file.region(*each.place_of(global_expert_id), each.num_bytes)
                runs.append((raw, place))
                places.append(place)
                begin += -(-each.num_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
            self._matrices[layer.layer_id, global_expert_id] = tuple(places)
        self._transfer = self._copier.begin(FileRuns.of(runs))

    def wait(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
        self._file.require_unwritten()

    def clear(self) -> None:
        if self._transfer is not None:
            self._transfer.cancel()
            self._transfer = None
        if self._matrices:
            self._matrices.clear()
            # Kernels that read what was here. What a failed device says, its next step says too.
            with contextlib.suppress(DeviceUnavailable):
                self._device.synchronize()

    def close(self) -> None:
        try:
            self.clear()
        finally:
            self._undo.close()
            self._memory = None


def open_stage(
    device: KernelDevice,
    file: GgufFile,
    layers: Sequence[MoeLayer],
    *,
    most: int,
    require_room: Callable[[int], None],
) -> DeviceStage | None:
    """See backend.new_stage. `require_room` raises DeviceOutOfMemory if so many bytes are not
    free."""
    num_slots, slot_bytes = staged_slots(layers, most)
    try:
        require_room(num_slots * slot_bytes)
        return DeviceStage(device, file, num_slots=num_slots, slot_bytes=slot_bytes)
    except (DeviceUnavailable, SettingsError) as error:
        # docs (parent): the device has no memory left for copies of experts, or none can be
        # locked: experts stay where they are, whatever the heat
        _LOG.warning("experts are not moved while serving: %s", str(error))
        return None
