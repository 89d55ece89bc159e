"""Memory of two processes' devices, each of which maps the other's."""

from __future__ import annotations

from dflash_runtime.compute.gpu.device.device import KernelDevice, PeerMemory
from dflash_runtime.compute.gpu.device.kept_memory import MemoryKeeper


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
