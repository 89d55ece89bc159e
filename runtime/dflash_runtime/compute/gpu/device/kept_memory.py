"""Exported memory whose other side is lost: kept for as long as that may still use it.

Freeing what another process has open is undefined (CUDA Driver API, `cuIpcOpenMemHandle`; HIP API,
`hipIpcOpenMemHandle`). Where the other side can be asked, it is asked first;
this is for where nobody answers. A process that was killed has nothing open; one that hangs has
kernels that end by themselves, soon after our abort word is set.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime.compute.gpu.device.device import PeerMemory

KEPT_S = 1.0
"""Kernels that wait for a side that has given up see that within a millisecond or two; what they
still compute is a step's."""


class MemoryKeeper:
    """Gives memory back when its time has come. `lock` is held while that uses the device.

    Owns: what it keeps, and a thread for each.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._timers: list[threading.Timer] = []

    def keep(self, memory: PeerMemory) -> None:
        """It is not the caller's any more. The other side must have been told to give up."""
        self._timers = [timer for timer in self._timers if timer.is_alive()]
        timer = threading.Timer(KEPT_S, self._give_back, (memory,))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def close(self) -> None:
        """Wait until everything is given back. Twice does nothing."""
        timers, self._timers = self._timers, []
        for timer in timers:
            timer.join()

    def _give_back(self, memory: PeerMemory) -> None:
        with suppress(DeviceUnavailable), self._lock:  # a device that has failed shares nothing
            memory.close()
