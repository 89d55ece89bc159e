"""The cache of one sequence on a device: keys, values and states of its layers, and trees over it.

The owner keeps the number of positions in use: a truncated sequence is overwritten later. The host
keeps the positions that rows and states belong to; the data itself is on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from dflash_adapters.spec import KvLayer, RecurrentLayer
from dflash_protocol.errors import CheckpointMissing, ContextExceeded
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.device.devices import allocated
from dflash_runtime.compute.gpu.layers.delta import PLACES, DeltaPlan, DeltaState
from dflash_runtime.compute.gpu.layers.kv_rows import (
    DeviceWindowRows,
    check_capacity,
    layer_bytes,
    new_layer_cache,
)
from dflash_runtime.compute.kv_cache import KvType, Snapshot
from dflash_runtime.compute.sliding_window import MOST_KEPT, WindowSnapshot
from dflash_runtime.compute.trees import Tree

_NOTHING = -1
"""In place of a number of positions, while layers differ."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSnapshot:
    """Implements Snapshot: the ring and one state of each recurrent layer, and windows."""

    num_positions: int
    states: tuple[DeltaState, ...]
    windows: tuple[WindowSnapshot, ...]

    @property
    def nbytes(self) -> int:
        states = sum(each.ring.nbytes + each.state.nbytes for each in self.states)
        return states + sum(each.nbytes for each in self.windows)


class DeviceKvCache:
    """Implements kv_cache.KvCache. Rows that were never written are uninitialised, and never used.

    Owns: the device memory, freed with the object.
    Raises: SettingsError for heads or a capacity that the kernels cannot take; DeviceOutOfMemory.
    """

    def __init__(
        self,
        device: KernelDevice,
        layers: Iterable[KvLayer],
        *,
        capacity: int,
        kv_type: KvType,
        recurrent: Sequence[RecurrentLayer] = (),
    ) -> None:
        given = tuple(layers)
        check_capacity(capacity)
        for kv in given:
            layer_bytes(kv, capacity, kv_type)  # all are checked before anything is allocated
        self.capacity = capacity
        self.kv_type = kv_type
        self.layers = [
            new_layer_cache(device, kv, capacity=capacity, kv_type=kv_type) for kv in given
        ]
        self.windows = [DeviceWindowRows(device, kv, capacity) for kv in given]
        """The rows of each attention layer."""
        self.states = RecurrentStates(device, recurrent)
        for window, layer in zip(self.windows, self.layers, strict=True):
            window.arrays = tuple(
                array
                for rows in (layer.keys, layer.values)
                for array in (rows.elements, rows.scales)
                if array is not None
            )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        kept = sum(layer_bytes(layer.kv, self.capacity, self.kv_type) for layer in self.layers)
        return kept + self.states.nbytes

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

    def touch(self, num_positions: int) -> None:
        """Do nothing: all memory is allocated."""

    def count_step(self) -> None:
        """Count a captured step that was started."""
        for window in self.windows:
            window.advance(1)
        self.states.count_step()

    def snapshot(self, num_positions: int, instead_of: Snapshot | None = None) -> DeviceSnapshot:
        states: tuple[DeltaState, ...] | None = None
        windows: tuple[WindowSnapshot | None, ...] = (None,) * len(self.windows)
        if instead_of is not None:
            assert isinstance(instead_of, DeviceSnapshot)
            states, windows = instead_of.states, instead_of.windows
        for window in self.windows:
            window.require(num_positions)
        return DeviceSnapshot(
            num_positions,
            self.states.copies(num_positions, states),
            tuple(
                window.snapshot(num_positions, old)
                for window, old in zip(self.windows, windows, strict=True)
            ),
        )

    def restore(self, snapshot: Snapshot) -> None:
        assert isinstance(snapshot, DeviceSnapshot)
        self.states.restore(snapshot.num_positions, snapshot.states)
        for window, kept in zip(self.windows, snapshot.windows, strict=True):
            window.restore(kept)

    def require(self, num_positions: int) -> None:
        """Raises: CheckpointMissing if it cannot be resumed after so many positions."""
        for window in self.windows:
            window.require(num_positions)
        self.states.require(num_positions)

    def check_tree(self, tree: Tree) -> None:
        self.require(tree.position)
        self.check_fits(tree.position, int(tree.depths.max(initial=-1)) + 1)

    def check_fits(self, first_position: int, num_tokens: int) -> None:
        """Raises: ContextExceeded if tokens from `first_position` on do not fit."""
        if first_position < 0 or num_tokens < 0:
            raise ValueError(f"{num_tokens} tokens from position {first_position} on")
        if first_position + num_tokens > self.capacity:
            raise ContextExceeded(first_position + num_tokens, self.capacity)


@dataclass(slots=True)
class _Kept:
    """A layer has states after `oldest` to `newest` positions.

    Layers differ while a chunk, or two halves of one, goes through them, or after one was aborted.
    """

    oldest: int = 0
    newest: int = 0

    def has(self, num_positions: int) -> bool:
        return num_positions == 0 or self.oldest <= num_positions <= self.newest


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
            for plan in _plans(layers)
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

    def copies(
        self, num_positions: int, instead_of: tuple[DeltaState, ...] | None
    ) -> tuple[DeltaState, ...]:
        """Each layer's ring and the one state after so many positions; see KvCache.snapshot.

        Raises: CheckpointMissing.
        """
        if self.layers:
            self.require(num_positions)
        copies = instead_of
        if copies is None:
            empty = self._device.empty
            copies = tuple(
                DeltaState(
                    empty(layer.ring.shape, np.float32), empty(layer.state.shape[1:], np.float32)
                )
                for layer in self.layers
            )
        for layer, kept in zip(self.layers, copies, strict=True):
            self._device.copy(kept.ring, layer.ring)
            self._device.copy(kept.state, layer.state[num_positions % PLACES])
        return copies

    def restore(self, num_positions: int, copies: tuple[DeltaState, ...]) -> None:
        """Go on from these copies, which are those after so many positions."""
        for layer, kept in zip(self.layers, copies, strict=True):
            self._device.copy(layer.ring, kept.ring)
            self._device.copy(layer.state[num_positions % PLACES], kept.state)
        for state in self._kept:
            state.oldest = state.newest = num_positions


def _plans(layers: Iterable[RecurrentLayer]) -> list[DeltaPlan]:
    return [DeltaPlan(each.delta, num_taps=each.conv_kernel) for each in layers]


def state_bytes(layers: Iterable[RecurrentLayer]) -> int:
    """Device memory that RecurrentStates take."""
    shapes = (shape for plan in _plans(layers) for shape in (plan.ring_shape, plan.state_shape))
    return sum(allocated(4 * prod(shape)) for shape in shapes)


def snapshot_bytes(layers: Iterable[RecurrentLayer]) -> int:
    """The same of the snapshots that an engine may keep: a ring and one state each."""
    each = (4 * (prod(plan.ring_shape) + prod(plan.state_shape[1:])) for plan in _plans(layers))
    return MOST_KEPT * sum(each)
