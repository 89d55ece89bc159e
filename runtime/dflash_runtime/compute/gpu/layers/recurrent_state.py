"""States of recurrent layers on a device, and how they are saved and restored.

The host keeps the positions of states; the states themselves are on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters.spec import RecurrentLayer
from dflash_protocol.errors import CheckpointMissing
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.layers.delta import PLACES, RING, DeltaPlan, DeltaState
from dflash_runtime.compute.kv_cache import Snapshot

_NOTHING = -1
"""In place of a number of positions, while layers differ."""


@dataclass(slots=True)
class _Kept:
    """A layer has states after `oldest` to `newest` positions.

    Layers differ while a chunk, or two halves of one, goes through them, or after one was aborted.
    """

    oldest: int = 0
    newest: int = 0

    def has(self, num_positions: int) -> bool:
        return num_positions == 0 or self.oldest <= num_positions <= self.newest


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSnapshot:
    """Implements Snapshot: the ring and one state of each layer."""

    num_positions: int
    rings: tuple[DeviceArray, ...]
    states: tuple[DeviceArray, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.rings, *self.states))


class RecurrentStates:
    """States of all recurrent layers of a sequence.

    States before the last positions are kept, so that surplus steps can be undone. Owns: device
    memory. Raises: DeviceOutOfMemory.
    """

    def __init__(self, device: KernelDevice, layers: Sequence[RecurrentLayer]) -> None:
        self._device = device
        self._kept = [_Kept() for _ in layers]
        self.layers = [
            DeltaState(
                device.empty(plan.ring_shape, np.float32),
                device.empty(plan.state_shape, np.float32),
            )
            for plan in (
                DeltaPlan(layer.delta, num_taps=layer.conv_kernel, finishes=False)
                for layer in layers
            )
        ]

    @property
    def nbytes(self) -> int:
        return sum(layer.ring.nbytes + layer.state.nbytes for layer in self.layers)

    def advance_layer(self, layer: int, first: int, num_tokens: int) -> None:
        """Advance one layer's state.

        Raises: CheckpointMissing if it has no state after `first` positions.
        """
        kept = self._kept[layer]
        if not kept.has(first):
            raise CheckpointMissing(wanted=first, kept=kept.newest)
        oldest = kept.newest = first + num_tokens
        if num_tokens == 1:  # only one place is written to
            oldest = max(kept.oldest if first else 0, oldest - PLACES + 1)
        kept.oldest = oldest

    def require(self, num_positions: int) -> None:
        """Raises: CheckpointMissing if there is no state after so many positions."""
        if not self.can_resume(num_positions):
            newest = {kept.newest for kept in self._kept}
            raise CheckpointMissing(
                wanted=num_positions, kept=newest.pop() if len(newest) == 1 else _NOTHING
            )

    def can_resume(self, num_positions: int) -> bool:
        return all(kept.has(num_positions) for kept in self._kept)

    def begin_step(self, position: int) -> None:
        """Captured steps of one token continue from this position. Raises: CheckpointMissing."""
        if not self.layers:
            return
        self.require(position)
        for kept in self._kept:
            if not position:
                kept.oldest = 0
            kept.newest = position

    def count_step(self) -> None:
        """Count a captured step that was started."""
        for kept in self._kept:
            kept.newest += 1
            kept.oldest = max(kept.oldest, kept.newest - PLACES + 1)

    def snapshot(self, num_positions: int, instead_of: Snapshot | None = None) -> DeviceSnapshot:
        if self.layers:
            self.require(num_positions)
        if instead_of is None:
            empty = self._device.empty
            rings = tuple(empty(layer.ring.shape, np.float32) for layer in self.layers)
            states = tuple(empty(layer.state.shape[1:], np.float32) for layer in self.layers)
            instead_of = DeviceSnapshot(num_positions, rings, states)
        assert isinstance(instead_of, DeviceSnapshot)
        taken = DeviceSnapshot(num_positions, instead_of.rings, instead_of.states)
        for layer, ring, state in zip(self.layers, taken.rings, taken.states, strict=True):
            self._device.copy(ring, layer.ring)
            self._device.copy(state, layer.state[num_positions % PLACES])
        return taken

    def restore(self, snapshot: Snapshot) -> None:
        assert isinstance(snapshot, DeviceSnapshot)
        num_positions = snapshot.num_positions
        for layer, ring, state in zip(self.layers, snapshot.rings, snapshot.states, strict=True):
            self._device.copy(layer.ring, ring)
            self._device.copy(layer.state[num_positions % PLACES], state)
        for kept in self._kept:
            kept.oldest = kept.newest = num_positions


def state_bytes(layers: Sequence[RecurrentLayer]) -> int:
    """Bytes of device memory of RecurrentStates."""
    total = 0
    for layer in layers:
        delta = layer.delta
        matrices = PLACES * delta.num_value_heads * delta.value_dim * delta.key_dim
        total += 4 * (matrices + RING * delta.num_channels)
    return total
