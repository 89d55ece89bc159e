"""What a backend's cache of a sequence offers: keys and values, and states of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dflash_adapters.spec import ModelSpec
from dflash_runtime.compute.trees import Tree


class KvType(StrEnum):
    """Element type of the key/value cache; each takes less memory than the one before."""

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"
    """Blocks of 32 along a row: a half as scale, and signed bytes."""

    @property
    def bytes_per_value(self) -> float:
        return {KvType.F32: 4, KvType.F16: 2, KvType.Q8_0: 34 / 32}[self]

    @property
    def and_smaller(self) -> list[KvType]:
        """This type, then those that take less memory."""
        types = list(KvType)
        return types[types.index(self) :]


def chosen_kv_type(asked: str, spec: ModelSpec) -> KvType:
    """The type that a setting names; ``auto`` is F32 if all of the model's matrices are, else
    F16."""
    if asked != "auto":
        return KvType(asked)
    return KvType.F32 if spec.all_matrices_f32 else KvType.F16


class Snapshot(Protocol):
    """The state of a sequence's recurrent layers after some positions, as a cache has kept it."""

    @property
    def num_positions(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Keys and values of the one sequence, and the states of recurrent layers."""

    num_bytes: int = 0
    """Memory when it is full. On the host it is taken as the sequence grows."""
    num_positions: int = 0
    """Positions that it has room for."""
    num_cached: int = 0
    """Positions that the last run has left, or the current one has computed."""


class KvCache(Protocol):
    """What all layers keep of one sequence: keys and values of each position, and the state of
    recurrent layers after the last one."""

    @property
    def capacity(self) -> int:
        """Positions that fit."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes when it is full."""

    def touch(self, num_positions: int) -> None:
        """Have memory for positions below `num_positions`, and some more, allocated now, where it
        is not until it is written; at next to no cost if it is already."""

    def can_resume(self, num_positions: int) -> bool:
        """Whether the next token may be the one after so many positions, as things are."""

    def snapshot(self, num_positions: int, instead_of: Snapshot | None = None) -> Snapshot:
        """Save the state after so many positions, in the memory of `instead_of`, a snapshot of this
        cache that is no longer needed, if given. Rows of keys and values are not copied.

        Raises: CheckpointMissing if a layer's state is another one.
        """

    def check_tree(self, tree: Tree) -> None:
        """Check that a tree can be computed: the sequence stays as it is until a path is accepted.

        Raises: CheckpointMissing if the sequence does not end where the tree starts;
        ContextExceeded if it does not fit, which on the host the operations raise.
        """

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot of this cache; rows from its position on may be overwritten."""
