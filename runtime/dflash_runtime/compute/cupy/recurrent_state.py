"""What recurrent layers keep of a sequence on a device, and how it is taken up.

The host knows for which positions states are there; what they are lies on the device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters import ops
from dflash_adapters.moe_spec import RecurrentLayer
from dflash_protocol.errors import StateNotKept
from dflash_runtime.compute.cupy.delta import PLACES, RING, DeltaPlan, DeltaState
from dflash_runtime.compute.cupy.device import DeviceArray, KernelDevice

_NOTHING = -1
"""In place of a number of positions, while layers differ."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSnapshot:
    """Implements ops.Snapshot. Shapes: of each layer, its ring, and one state."""

    num_positions: int
    rings: tuple[DeviceArray, ...]
    states: tuple[DeviceArray, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.rings, *self.states))


class RecurrentStates:
    """The part of ops.KvCache that is about going on.

    States before the last positions are kept, so that steps that were started too much can be
    taken back. Owns: device memory. Raises: DeviceOutOfMemory.
    """

    def __init__(self, device: KernelDevice, layers: Sequence[RecurrentLayer]) -> None:
        self._device = device
        self._oldest = self._newest = 0
        """States are there after so many positions, up to so many."""
        self._begun: tuple[int, int] | None = None
        """What a call is bringing from where to where, layer by layer."""
        self._oldest_after = 0
        """The oldest state when that is done."""
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
        """A layer's state is brought further; the first one's first, the last one's last.

        Raises: StateNotKept if it is not there after `first` positions.
        """
        if layer == 0:
            self.require(first)
            self._begun = first, first + num_tokens
            self._oldest_after = first + num_tokens
            if num_tokens == 1:  # only one place is written to
                oldest = self._oldest if first else 0
                self._oldest_after = max(oldest, self._oldest_after - PLACES + 1)
            self._oldest = self._newest = _NOTHING
        elif self._begun != (first, first + num_tokens):
            raise StateNotKept(wanted=first, kept=_NOTHING)
        if layer == len(self.layers) - 1:
            self._begun = None
            self._oldest, self._newest = self._oldest_after, first + num_tokens

    def require(self, num_positions: int) -> None:
        """Raises: StateNotKept if there is no state after so many positions."""
        if not self.can_resume(num_positions):
            raise StateNotKept(wanted=num_positions, kept=self._newest)

    def can_resume(self, num_positions: int) -> bool:
        """As ops.KvCache.can_resume."""
        is_there = self._oldest <= num_positions <= self._newest
        return num_positions == 0 or not self.layers or is_there

    def begin_step(self, position: int) -> None:
        """Recorded steps of one token go on from here. Raises: StateNotKept."""
        if not self.layers:
            return
        self.require(position)
        if not position:
            self._oldest = 0
        self._newest = position

    def count_step(self) -> None:
        """One of them was started."""
        self._newest += 1
        self._oldest = max(self._oldest, self._newest - PLACES + 1)

    def snapshot(
        self, num_positions: int, instead_of: ops.Snapshot | None = None
    ) -> DeviceSnapshot:
        """As ops.KvCache.snapshot."""
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

    def restore(self, snapshot: ops.Snapshot) -> None:
        """As ops.KvCache.restore."""
        assert isinstance(snapshot, DeviceSnapshot)
        num_positions = snapshot.num_positions
        for layer, ring, state in zip(self.layers, snapshot.rings, snapshot.states, strict=True):
            self._device.copy(layer.ring, ring)
            self._device.copy(layer.state[num_positions % PLACES], state)
        self._oldest = self._newest = num_positions

    def truncate(self, num_positions: int) -> None:
        """As ops.KvCache.truncate."""
        if not self.layers:
            return
        if num_positions == 0:
            self._oldest = self._newest = 0
        elif self._newest > num_positions or self._newest == _NOTHING:
            self.require(num_positions)
            self._newest = num_positions


def state_bytes(layers: Sequence[RecurrentLayer]) -> int:
    """Device memory that RecurrentStates takes."""
    total = 0
    for layer in layers:
        delta = layer.delta
        matrices = PLACES * delta.num_value_heads * delta.value_dim * delta.key_dim
        total += 4 * (matrices + RING * delta.num_channels)
    return total
