"""Per-sequence state of host caches besides keys and values, and how a sequence is resumed.

Keys and values have one row for each position, overwritten when other tokens come. A recurrent
layer has a single state, after the positions computed last: resuming from fewer positions needs a
checkpoint of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_protocol.errors import CheckpointMissing
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.kv_cache import Snapshot
from dflash_runtime.compute.sliding_window import WindowRows, WindowSnapshot
from dflash_runtime.compute.trees import Tree


class LayerState:
    """One recurrent layer's state, as one array whose layout the backend chooses.

    Its two parts (convolution, delta rule) are updated one after the other: an interrupted step may
    have advanced only one.
    """

    __slots__ = ("conv_positions", "delta_positions", "values")

    def __init__(self, values: F32Array) -> None:
        self.values = values
        self.conv_positions = 0
        self.delta_positions = 0

    @property
    def num_positions(self) -> int:
        """Positions that both parts have seen; -1 if they differ."""
        return self.conv_positions if self.conv_positions == self.delta_positions else -1

    def copy(self, source: F32Array, target: F32Array, num_positions: int) -> None:
        """Copy the values that matter after `num_positions` from one such state to another."""
        np.copyto(target, source)


def begin_of(positions: I32Array, kept: int) -> int:
    """The first of ascending positions, which must be 0 or `kept`, the number computed so far.

    Shapes: positions [T], at least one.
    Raises: CheckpointMissing.
    """
    first, size = int(positions[0]), positions.size
    if positions.shape != (size,) or (size > 1 and bool((np.diff(positions) != 1).any())):
        raise ValueError("positions must ascend by one")
    if first not in (0, kept):
        raise CheckpointMissing(wanted=first, kept=kept)
    return first


@dataclass(frozen=True, slots=True, eq=False)
class StateSnapshot:
    """Implements Snapshot: a copy of every layer's state, and of sliding-window rows."""

    num_positions: int
    values: tuple[F32Array, ...]
    windows: tuple[WindowSnapshot, ...] = ()

    @property
    def nbytes(self) -> int:
        of_windows = sum(each.nbytes for each in self.windows)
        return of_windows + sum(each.nbytes for each in self.values)


class SequenceState:
    """The part of kv_cache.KvCache that resumes sequences; base class of the K/V caches."""

    def __init__(
        self, recurrent: Sequence[LayerState] = (), windows: Sequence[WindowRows] = ()
    ) -> None:
        self.recurrent = list(recurrent)
        self.windows = list(windows)
        """Which rows each K/V layer has."""

    @property
    def state_bytes(self) -> int:
        """Memory of the recurrent layers' states."""
        return sum(state.values.nbytes for state in self.recurrent)

    def touch(self, num_positions: int) -> None:
        """Do nothing: memory is allocated where it is first written."""

    def check_tree(self, tree: Tree) -> None:
        if not self.can_resume(tree.position):
            raise CheckpointMissing(wanted=tree.position, kept=-1)

    def can_resume(self, num_positions: int) -> bool:
        kept = all(state.num_positions == num_positions for state in self.recurrent)
        return num_positions == 0 or (
            kept and all(r.can_resume(num_positions) for r in self.windows)
        )

    def snapshot(self, num_positions: int, instead_of: Snapshot | None = None) -> StateSnapshot:
        for state in self.recurrent:
            if state.num_positions != num_positions:
                raise CheckpointMissing(wanted=num_positions, kept=state.num_positions)
        old: tuple[WindowSnapshot | None, ...] = (None,) * len(self.windows)
        if instead_of is None:
            values = tuple(np.empty_like(state.values) for state in self.recurrent)
        else:
            assert isinstance(instead_of, StateSnapshot)
            values, old = instead_of.values, instead_of.windows
        pairs = zip(self.windows, old, strict=True)
        windows = tuple(window.snapshot(num_positions, each) for window, each in pairs)
        for state, target in zip(self.recurrent, values, strict=True):
            state.copy(state.values, target, num_positions)
        return StateSnapshot(num_positions, values, windows)

    def restore(self, snapshot: Snapshot) -> None:
        assert isinstance(snapshot, StateSnapshot)
        for state, values in zip(self.recurrent, snapshot.values, strict=True):
            state.copy(values, state.values, snapshot.num_positions)
            state.conv_positions = state.delta_positions = snapshot.num_positions
        for window, kept in zip(self.windows, snapshot.windows, strict=True):
            window.restore(kept)
