"""What a cache on a device keeps of a sequence, and how it is taken up: rows, rings and states.

The host knows which positions rows and states are of; what they are lies on the device alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflash_adapters import ops
from dflash_adapters.spec import KvLayer, RecurrentLayer
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.layers.recurrent_state import DeviceSnapshot, RecurrentStates
from dflash_runtime.compute.rings import MOST_KEPT, Ring, RingSnapshot, num_rows


def rows_kept(kv: KvLayer, capacity: int) -> int:
    """Positions that a layer has room for: those of a ring if that, with all of its snapshots,
    takes no more memory than rows for all positions, which need none."""
    in_ring = num_rows(kv.mask, capacity)
    return in_ring if in_ring * (1 + MOST_KEPT) <= capacity else capacity


class DeviceRing(Ring):
    """Which positions one layer has rows of, on a device."""

    __slots__ = ("_device",)

    def __init__(self, device: KernelDevice, kv: KvLayer, capacity: int) -> None:
        super().__init__(kv.mask, capacity)
        self.num_rows = rows_kept(kv, capacity)
        self.is_ring = self.num_rows < capacity
        self._device = device

    def empty_like(self, array: DeviceArray) -> DeviceArray:
        return self._device.empty(array.shape, array.dtype)

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        self._device.copy(target, source)


@dataclass(frozen=True, slots=True, eq=False)
class CacheSnapshot:
    """Implements ops.Snapshot."""

    num_positions: int
    states: DeviceSnapshot
    rings: tuple[RingSnapshot, ...]

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + sum(each.nbytes for each in self.rings)


class KeptRows:
    """The part of ops.KvCache that is about going on; what has keys and values derives from it.

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
        self.rings = [DeviceRing(device, kv, capacity) for kv in layers]
        """Which rows each layer of keys and values has."""
        self.states = RecurrentStates(device, recurrent)

    def can_resume(self, num_positions: int) -> bool:
        """As ops.KvCache.can_resume."""
        has_rows = all(ring.can_resume(num_positions) for ring in self.rings)
        return has_rows and self.states.can_resume(num_positions)

    def begin_step(self, position: int) -> None:
        """Recorded steps of one token go on from here. Raises: StateNotKept."""
        for ring in self.rings:
            ring.require(position)
        self.states.begin_step(position)
        for ring in self.rings:
            ring.begin(position)

    def count_step(self) -> None:
        """One of them was started."""
        for ring in self.rings:
            ring.advance(1)
        self.states.count_step()

    def snapshot(self, num_positions: int, instead_of: ops.Snapshot | None = None) -> CacheSnapshot:
        """As ops.KvCache.snapshot."""
        states: DeviceSnapshot | None = None
        rings: tuple[RingSnapshot | None, ...] = (None,) * len(self.rings)
        if instead_of is not None:
            assert isinstance(instead_of, CacheSnapshot)
            states, rings = instead_of.states, instead_of.rings
        for ring in self.rings:
            ring.require(num_positions)
        return CacheSnapshot(
            num_positions,
            self.states.snapshot(num_positions, states),
            tuple(
                ring.snapshot(num_positions, old)
                for ring, old in zip(self.rings, rings, strict=True)
            ),
        )

    def restore(self, snapshot: ops.Snapshot) -> None:
        """As ops.KvCache.restore."""
        assert isinstance(snapshot, CacheSnapshot)
        self.states.restore(snapshot.states)
        for ring, kept in zip(self.rings, snapshot.rings, strict=True):
            ring.restore(kept)

    def require(self, num_positions: int) -> None:
        """Raises: StateNotKept if it cannot be resumed after so many positions."""
        for ring in self.rings:
            ring.require(num_positions)
        self.states.require(num_positions)
