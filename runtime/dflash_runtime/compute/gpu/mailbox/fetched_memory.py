"""The processor's experts in the mapped file, for kernels that read them over the bus."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Mapping

import numpy as np

from dflash_protocol.ids import I64Array
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.gpu.device.device import KernelDevice


class FetchedMemory:
    """The mapped shards of some banks, locked and mapped for a device: experts that move to the
    processor later lie in them too. Owns: the mappings, until `close`."""

    def __init__(
        self, device: KernelDevice, banks: Mapping[int, CpuExpertBank], num_slots: int
    ) -> None:
        """`banks`: by layer id; `num_slots`: for experts of each of these layers that steps keep.

        Raises: DeviceUnavailable if so much cannot be locked.
        """
        self.banks, self.num_slots = banks, num_slots
        shards = {
            int(shard.ctypes.data): shard.nbytes
            for bank in banks.values()
            for shard in bank.mappings()
        }
        self._moved: list[tuple[int, int, int]] = []
        """Begin and end of each shard here, and how far its address for the device is from that."""
        with contextlib.ExitStack() as undo:
            for begin, num_bytes in shards.items():
                size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
                pages = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin))
                pages.flags.writeable = False
                mapping = device.map_host(pages)
                undo.callback(mapping.close)
                self._moved.append((begin, begin + size, mapping.device_address - begin))
            self._undo = undo.pop_all()

    def places(self, layer_id: int) -> I64Array:
        """Where the matrices of gate, up and down of the processor's experts lie, for kernels.

        Shapes: result [experts, 3].
        """
        here = self.banks[layer_id].addresses
        places = np.zeros_like(here)
        for begin, end, moved in self._moved:
            places += np.where((here >= begin) & (here < end), here + moved, 0)
        return places

    def close(self) -> None:
        """No kernel may be running. Idempotent."""
        self._undo.close()
