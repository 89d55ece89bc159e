"""Rows, windows and states that a cache on a device keeps of a sequence, and how they are restored.

The host keeps the positions that rows and states belong to; the data itself is on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflash_adapters.spec import KvLayer, RecurrentLayer
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.layers.recurrent_state import DeviceSnapshot, RecurrentStates
from dflash_runtime.compute.kv_cache import Snapshot
from dflash_runtime.compute.sliding_window import MOST_KEPT, WindowRows, WindowSnapshot, num_rows


def rows_kept(kv: KvLayer, capacity: int) -> int:
    """Positions that a layer has rows for: those of a window if that, with all of its snapshots,
    takes no more memory than rows for all positions, which need no snapshots."""
    in_window = num_rows(kv.mask, capacity)
    return in_window if in_window * (1 + MOST_KEPT) <= capacity else capacity


class DeviceWindowRows(WindowRows):
    """WindowRows on a device: the positions that one layer has rows of."""

    __slots__ = ("_device",)

    def __init__(self, device: KernelDevice, kv: KvLayer, capacity: int) -> None:
        super().__init__(kv.mask, capacity)
        self.num_rows = rows_kept(kv, capacity)
        self.is_window = self.num_rows < capacity
        self._device = device

    def empty_like(self, array: DeviceArray) -> DeviceArray:
        return self._device.empty(array.shape, array.dtype)

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        self._device.copy(target, source)


@dataclass(frozen=True, slots=True, eq=False)
class CacheSnapshot:
    """Implements Snapshot."""

    num_positions: int
    states: DeviceSnapshot
    windows: tuple[WindowSnapshot, ...]

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + sum(each.nbytes for each in self.windows)


class KeptRows:
    """Base of DeviceKvCache: the part of KvCache that resumes, saves and restores
    sequences.

    Owns: states of recurrent layers. Raises: DeviceOutOfMemory.
    """

    def __init__(
        self,
        device: KernelDevice,
        layers: Iterable[KvLayer],
        *,
        capacity: int,
        recurrent: Sequence[RecurrentLayer],
    ) -> None:
        self.windows = [DeviceWindowRows(device, kv, capacity) for kv in layers]
        """The rows of each attention layer."""
        self.states = RecurrentStates(device, recurrent)

    def can_resume(self, num_positions: int) -> bool:
        has_rows = all(window.can_resume(num_positions) for window in self.windows)
        return has_rows and self.states.can_resume(num_positions)

    def begin_step(self, position: int) -> None:
        """Captured steps of one token continue from this position. Raises: CheckpointMissing."""
        for window in self.windows:
            window.require(position)
        self.states.begin_step(position)
        for window in self.windows:
            window.begin(position)

    def count_step(self) -> None:
        """Count a captured step that was started."""
        for window in self.windows:
            window.advance(1)
        self.states.count_step()

    def snapshot(self, num_positions: int, instead_of: Snapshot | None = None) -> CacheSnapshot:
        states: DeviceSnapshot | None = None
        windows: tuple[WindowSnapshot | None, ...] = (None,) * len(self.windows)
        if instead_of is not None:
            assert isinstance(instead_of, CacheSnapshot)
            states, windows = instead_of.states, instead_of.windows
        for window in self.windows:
            window.require(num_positions)
        return CacheSnapshot(
            num_positions,
            self.states.snapshot(num_positions, states),
            tuple(
                window.snapshot(num_positions, old)
                for window, old in zip(self.windows, windows, strict=True)
            ),
        )

    def restore(self, snapshot: Snapshot) -> None:
        assert isinstance(snapshot, CacheSnapshot)
        self.states.restore(snapshot.states)
        for window, kept in zip(self.windows, snapshot.windows, strict=True):
            window.restore(kept)

    def require(self, num_positions: int) -> None:
        """Raises: CheckpointMissing if it cannot be resumed after so many positions."""
        for window in self.windows:
            window.require(num_positions)
        self.states.require(num_positions)
