"""What a model takes of one kind of memory, from its file's metadata alone.

Adds up what the backends say without a device: `compute/gpu/room.py` and `compute/host_room.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe
from dflash_adapters.spec import ModelSpec
from dflash_runtime.compute.host_room import HostRoom
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.room import Room

_ROUND_CONTEXT = 256


class Memory(StrEnum):
    """A kind of memory, which decides how weights lie in it."""

    GPU = "gpu"
    HOST = "host"


def footprint(file: GgufFile, spec: ModelSpec, memory: Memory, *, cache_slots: int = 0) -> Room:
    """`cache_slots`: of a GPU, see `open_backend`.

    Raises: UnsupportedModel if that memory's backend does not compute the model.
    """
    description = describe(file)
    if memory is Memory.HOST:
        return HostRoom(file, spec, description)
    # Imported late: daemons on processors do without, and start the sooner.
    from dflash_runtime.compute.gpu.room import GpuRoom

    return GpuRoom(file, spec, description, cache_slots=cache_slots)


@dataclass(frozen=True, slots=True)
class Request:
    """What a parent is to hold, but for the context."""

    kv_type: KvType
    chunk: int
    num_experts: Mapping[int, int] = field(default_factory=dict)
    """Routed experts of each layer that are here, by layer id. On the host none need stay in
    memory."""
    num_remote_layers: int = 0
    num_daemons: int = 0

    def num_bytes(self, found: Room, num_positions: int) -> int:
        """Memory that must be there. The host's pages of weights are read again if they are not.

        Raises: SettingsError for a context that the backend does not support.
        """
        needs = found.needs(
            num_positions=num_positions,
            kv_type=self.kv_type,
            chunk=self.chunk,
            num_remote_layers=self.num_remote_layers,
            num_daemons=self.num_daemons,
        )
        if found.maps_weights:
            return needs.total - needs.weights
        return needs.total + found.experts_bytes(self.num_experts)


def largest_context(found: Room, request: Request, *, room_bytes: int, most: int) -> int:
    """The largest context up to `most` positions that fits into so much memory; 0: none does.

    `room_bytes`: what is free before the process has taken anything, the driver's context included.
    """
    if most < 1 or request.num_bytes(found, 1) > room_bytes:
        return 0
    fits, too_large = 1, most + 1
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if request.num_bytes(found, middle) <= room_bytes:
            fits = middle
        else:
            too_large = middle
    return fits


def what_fits(
    found: Room, request: Request, *, room_bytes: int, num_positions: int, most: int
) -> str:
    """What could be asked for instead of a context of `num_positions` that does not fit: a smaller
    one, or a smaller type of keys and values; empty if there is neither.

    `most`: positions that the model was made for.
    """
    offers = []
    for kv_type in request.kv_type.and_smaller:
        other = replace(request, kv_type=kv_type)
        context = largest_context(
            found, other, room_bytes=room_bytes, most=min(most, num_positions)
        )
        if context < num_positions:
            context -= context % _ROUND_CONTEXT if context > _ROUND_CONTEXT else 0
        if not context:
            continue
        if kv_type is request.kv_type:
            offers.append(f"a context of {context:,} fits")
        elif context == num_positions:
            offers.append(f"--kv-type {kv_type} fits")
        else:
            offers.append(f"--kv-type {kv_type} with {context:,}")
    return ", or ".join(offers)
