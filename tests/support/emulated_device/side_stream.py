"""Side streams of the emulated device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.device import DeviceArray, Graph, Grid, address

if TYPE_CHECKING:
    from support.emulated_device.emulated_device import EmulatedDevice


class EmulatedMark:
    """A position in the order of launches, which have all run at once."""


class EmulatedSideStream:
    """Implements SideStream. Work runs as late as the rules allow, when it is waited for: this
    reveals a missing wait, and memory that is freed too early."""

    def __init__(self, device: EmulatedDevice, *, copies_mapped: bool = False) -> None:
        self._device, self._copies_mapped = device, copies_mapped
        self._is_closed = False
        self._waiting: list[Callable[[], None]] = []
        self._was_asked = False
        self.num_runs = 0
        """Number of copies and launches that have run."""

    def wait_for(self, mark: Any) -> None:
        """As SideStream.wait_for."""
        assert isinstance(mark, EmulatedMark)

    def write(self, destination: DeviceArray, source: AnyArray) -> None:
        """As SideStream.write."""
        assert not self._is_closed
        assert source.flags.c_contiguous
        if self._copies_mapped:
            self._device.require_mapped(source)
        place, origin, num_bytes = address(destination), int(source.ctypes.data), source.nbytes
        assert destination.nbytes == num_bytes
        # By address: the caller must keep both alive.
        self._waiting.append(lambda: self._device.write_at(place, origin, num_bytes))

    def launch(self, kernel: Any, grid: Grid, block: int, args: ctypes.Structure) -> None:
        """As SideStream.launch."""
        assert not self._is_closed
        run = self._device.prepared(kernel, grid, block, args, overlaps_previous=False)
        self._waiting.append(run)

    def replay(self, graph: Graph) -> None:
        """As SideStream.replay: the thread that replays a graph runs it."""
        assert not self._is_closed
        self.synchronize()
        graph.replay()

    def is_empty(self) -> bool:
        """As SideStream.is_empty: False on the first call, True on the second."""
        has_been_asked, self._was_asked = self._was_asked, True
        if self._waiting and has_been_asked:
            self.synchronize()
        return not self._waiting

    def synchronize(self, deadline_s: float | None = None) -> None:
        """As SideStream.synchronize. Raises: KernelFailure."""
        assert deadline_s is None or deadline_s > 0
        self._was_asked = False
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            run()
            self.num_runs += 1

    def close(self) -> None:
        """As SideStream.close."""
        self.synchronize()
        self._is_closed = True
