"""Exported memory of a lost peer: kept for as long as the peer's kernels may still use it.

Freeing memory that another process has open is undefined (CUDA Driver API, `cuIpcOpenMemHandle`;
HIP API, `hipIpcOpenMemHandle`). A peer that answers is asked to close it first; this is for one
that does not. A killed process has nothing open; the kernels of a hanging one end by themselves
soon after our abort word is set.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime.compute.gpu.device.device import PeerMemory

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
