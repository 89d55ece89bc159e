"""Memory of two processes' devices, each of which maps the other's, and how it is given back.

Freeing memory that another process has open is undefined (CUDA Driver API, `cuIpcOpenMemHandle`;
HIP API, `hipIpcOpenMemHandle`). A peer that answers is asked to close it first; for one that does
not it is kept for a while. A killed process has nothing open; the kernels of a hanging one end by
themselves soon after our abort word is set.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime.compute.gpu.device.device import KernelDevice, PeerMemory

KEPT_S = 1.0
"""Waiting kernels see an abort word within 2 ms or so; then they compute a step at most."""


class MemoryKeeper:
    """Frees memory after KEPT_S. `lock` is held while that uses the device.

    Owns: the memory kept, and a timer thread for each piece.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._timers: list[threading.Timer] = []

    def keep(self, memory: PeerMemory) -> None:
        """Take over memory whose peer was told to abort."""
        self._timers = [timer for timer in self._timers if timer.is_alive()]
        timer = threading.Timer(KEPT_S, self._give_back, (memory,))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def close(self) -> None:
        """Wait until all memory is freed. Idempotent."""
        timers, self._timers = self._timers, []
        for timer in timers:
            timer.join()

    def _give_back(self, memory: PeerMemory) -> None:
        with suppress(DeviceUnavailable), self._lock:  # a device that has failed shares nothing
            memory.close()


class MemoryExchange:
    """One side's memory of a mailbox: ours, which the other device maps, and the mapping of its.

    Either may be there without the other; a side without either uses the host's memory only. Used
    by one thread; a daemon's holds the device's lock. Lasts as long as the mailbox.
    Owns: both, until they are given back.
    """

    def __init__(self, device: KernelDevice, keeper: MemoryKeeper) -> None:
        self.own: PeerMemory | None = None
        """Exported: lines that the other device writes."""
        self.other: PeerMemory | None = None
        """Imported: lines that the other device reads."""
        self._device, self._keeper = device, keeper

    def export(self, num_bytes: int) -> PeerMemory:
        """New zeroed memory, as `own`. Raises: DeviceUnavailable."""
        self.own = self._device.export_memory(num_bytes)
        return self.own

    def map_other(self, handle: bytes, num_bytes: int) -> PeerMemory:
        """Map the other side's memory, as `other`. Raises: DeviceUnavailable."""
        self.other = self._device.import_memory(handle, num_bytes)
        return self.other

    def unmap_other(self) -> None:
        """Unmap `other`; no step may be running. Raises: DeviceUnavailable, and then it is still
        there."""
        if self.other is not None:
            self.other.close()
            self.other = None

    def give_back(self, *, may_be_open: bool) -> None:
        """Free `own`, or leave it to the keeper if the other process, which was told to abort, may
        still have it open. Raises: DeviceUnavailable."""
        own, self.own = self.own, None
        if own is None:
            return
        if may_be_open:
            self._keeper.keep(own)
        else:
            own.close()
