"""What a model takes of one kind of memory, from its file's metadata alone.

Adds up what the backends say without a device: `compute/gpu/room.py` and `compute/host_room.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe
from dflash_adapters.spec import ModelSpec
from dflash_runtime.compute.gpu.room import GpuRoom
from dflash_runtime.compute.host_room import HostRoom
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.room import LayerBytes, Needs, Room

__all__ = ["Footprint", "LayerBytes", "Memory", "Needs", "footprint"]


class Memory(StrEnum):
    """A kind of memory, which decides how weights lie in it."""

    GPU = "gpu"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model's bytes in one kind of memory."""

    memory: Memory
    room: Room

    @property
    def layers(self) -> tuple[LayerBytes, ...]:
        """All layers of the model, in order."""
        return self.room.layers

    @property
    def ends(self) -> int:
        """Bytes of embedding, head, output norm: everything that is in no layer."""
        return self.room.ends

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
        """See Room.needs."""
        return self.room.needs(
            num_positions=num_positions,
            kv_type=kv_type,
            chunk=chunk,
            is_parent=is_parent,
            num_remote_layers=num_remote_layers,
            num_daemons=num_daemons,
        )

    def experts_bytes(self, num_experts: Mapping[int, int]) -> int:
        """Memory of so many experts of each layer, by layer id, as the allocator rounds it."""
        each = (self.room.experts_bytes(layer, count) for layer, count in num_experts.items())
        return sum(each)


def footprint(file: GgufFile, spec: ModelSpec, memory: Memory) -> Footprint:
    """Raises: UnsupportedModel if that memory's backend does not compute the model."""
    room = GpuRoom if memory is Memory.GPU else HostRoom
    return Footprint(memory, room(file, spec, describe(file)))
