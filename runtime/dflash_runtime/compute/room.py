"""Memory that a model needs in one kind of memory, by purpose; counted before anything is loaded.

A backend's own counts are in `gpu/room.py` and `host_room.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from dflash_adapters.spec import MoeLayer
from dflash_runtime.compute.kv_cache import KvType

SLOT_ALIGNMENT = 256
"""Of each matrix in a slot."""

HEAD_ROWS = 64
"""Rows of logits computed at once: each is as long as the vocabulary, 0.6 MB of 152,000 tokens.
Memory for them is taken from what holds experts."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer's weights, as they lie in that memory."""

    layer_id: int
    trunk: int
    """Everything but its routed experts."""
    expert: int
    """One routed expert: its matrices, biases and scales. 0 for a dense layer."""
    num_experts: int


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a process needs beside its routed experts, by purpose."""

    weights: int = 0
    cache: int = 0
    """Keys and values, snapshots of sliding windows' rings, recurrent states and copies of them."""
    work: int = 0
    """Weights as halves, intermediate results of a chunk, logits."""
    recorded: int = 0
    """Captured steps and trees, and memory through which devices ask each other."""
    staging: int = 0
    """Locked memory of the host. Counted for the host only; a GPU's is listed, but not in `total`.
    """
    driver: int = 0
    """The driver's context and compiled modules, or a host process without a model."""
    counts_staging: bool = False

    @property
    def total(self) -> int:
        staging = self.staging if self.counts_staging else 0
        return self.weights + self.cache + self.work + self.recorded + staging + self.driver

    def as_record(self) -> dict[str, int]:
        """For JSON: bytes by purpose, and `total`."""
        record = {name: size for name, size in asdict(self).items() if name != "counts_staging"}
        return {**record, "total": self.total}


_MOST_STAGED_BYTES = 128 << 20
_MOST_STAGED_PART = 1 / 128
"""Of the bytes of all experts: a model with few has few that move, and they need the memory."""
_FEW_STAGED = 8
"""So many may move in any case."""


def staged_slots(layers: Sequence[MoeLayer], most: int) -> tuple[int, int]:
    """How many experts that are about to move to a device are copied there at a time, `most` if
    they are small, and the bytes of one slot: of an expert of any layer, as in the file."""
    sizes = [
        sum(-(-each.num_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for each in layer.projections)
        for layer in layers
    ]
    slot_bytes = max(sizes, default=0)
    every = sum(size * layer.num_experts for size, layer in zip(sizes, layers, strict=True))
    limit = min(_MOST_STAGED_BYTES, max(_FEW_STAGED * slot_bytes, int(_MOST_STAGED_PART * every)))
    return min(most, max(1, limit // max(1, slot_bytes))), slot_bytes


class Room(ABC):
    """Counts the memory of one model. Immutable; needs no device."""

    maps_weights: ClassVar[bool] = False
    """Whether weights are pages of the file, which are read again if they do not stay in memory."""

    @property
    @abstractmethod
    def layers(self) -> tuple[LayerBytes, ...]:
        """All layers of the model, in order."""

    @property
    @abstractmethod
    def ends(self) -> int:
        """Bytes of the embedding, the head, and everything else that is in no layer."""

    @abstractmethod
    def layer_experts_bytes(self, layer_id: int, num_experts: int) -> int:
        """Memory taken for so many of a layer's experts, as the allocator rounds it."""

    @abstractmethod
    def offload_bytes(self, num_missing: Mapping[int, int]) -> int:
        """Memory through which prompts' experts of other owners, so many of each layer by layer id,
        are computed here; taken if it is left. 0 where weights need not be copied."""

    @abstractmethod
    def needs(
        self,
        *,
        num_positions: int,
        kv_type: KvType,
        chunk: int,
        is_parent: bool = True,
        num_remote_layers: int = 0,
        num_daemons: int = 0,
    ) -> Needs:
        """`chunk`: most tokens of a prompt computed at once. A parent has `num_remote_layers`
        layers with experts in `num_daemons` daemons; a daemon (not `is_parent`) has no trunk.

        Raises: SettingsError for a cache that the backend does not support.
        """

    def experts_bytes(self, num_experts: Mapping[int, int]) -> int:
        """Memory of so many experts of each layer, by layer id."""
        return sum(self.layer_experts_bytes(*each) for each in num_experts.items())

    @property
    def every_expert(self) -> int:
        """Memory of all experts."""
        return self.experts_bytes(
            {each.layer_id: each.num_experts for each in self.layers if each.num_experts}
        )
