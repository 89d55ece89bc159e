"""Device memory of a model, or of some of its experts, counted before anything is loaded.

What the driver adds is in the constants below; `bench/gpu_memory.py` compares the counts with what
a GPU takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Description, MatrixTensor, VectorTensor, parts_of
from dflash_adapters.spec import ModelSpec, MoeLayer
from dflash_protocol.errors import DeviceOutOfMemory
from dflash_runtime.compute.gpu.chunk_room import GROUP_TOKENS, ChunkRoom, scratch_of_chunk
from dflash_runtime.compute.gpu.device.devices import CONTEXT_BYTES, DeviceMemory, allocated
from dflash_runtime.compute.gpu.experts.offload_room import offload_bytes
from dflash_runtime.compute.gpu.launch.layouts import row_bytes
from dflash_runtime.compute.gpu.layers.kv_cache import snapshot_bytes, state_bytes
from dflash_runtime.compute.gpu.layers.kv_rows import array_bytes, bytes_with_snapshots, layer_bytes
from dflash_runtime.compute.gpu.layers.matrix import require_kernels
from dflash_runtime.compute.gpu.step_room import StepRoom
from dflash_runtime.compute.gpu.transfers.locked_room import copier_bytes, rows_bytes
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.room import LayerBytes, Needs, Room

MODULES_BYTES = 64 << 20
"""Compiled kernels, the memory of their threads, and captured graphs."""


def require_room(device: str, memory: DeviceMemory, needed: Mapping[str, int]) -> None:
    """`needed`: bytes by purpose.

    Raises: DeviceOutOfMemory with the amounts if so much is not free.
    """
    num_bytes = sum(needed.values())
    if num_bytes <= memory.free_bytes:
        return
    named = (f"{size / 2**30:.2f} GiB {what}" for what, size in needed.items() if size)
    raise DeviceOutOfMemory(
        device,
        num_bytes=num_bytes,
        free_bytes=memory.free_bytes,
        total_bytes=memory.total_bytes,
        what=", ".join(named),
    )


def expert_bytes(layer: MoeLayer) -> int:
    """Bytes of one expert in the device's layout, its biases and scales among them.

    Raises: ValueError for a type without layout.
    """
    matrices = sum(
        each.rows * row_bytes(each.tensor_type, each.columns) for each in layer.projections
    )
    return matrices + _vector_bytes(layer)


def slots_beside(layer: MoeLayer, num_experts: int, cache_slots: int) -> int:
    """Slots for experts that steps fetch, where so many of a layer are here: `cache_slots`, and one
    for what is not kept. 0 for layers that are whole, or have none here."""
    return cache_slots + 1 if cache_slots and 0 < num_experts < layer.num_experts else 0


def experts_bytes(layer: MoeLayer, num_experts: int, cache_slots: int = 0) -> int:
    """Memory that so many experts of a layer take: each projection's matrices are one array; tables
    of biases and scales have all of the layer's experts, once by global and once by local ids.

    Raises: ValueError for a type without layout.
    """
    if not num_experts:
        return 0
    num_slots = num_experts + slots_beside(layer, num_experts, cache_slots)
    matrices = sum(
        allocated(num_slots * each.rows * row_bytes(each.tensor_type, each.columns))
        for each in layer.projections
    )
    slots_and_counts = 2 * allocated(4 * layer.num_experts) + allocated(8 * layer.num_experts)
    return matrices + slots_and_counts + 2 * allocated(layer.num_experts * _vector_bytes(layer))


def _vector_bytes(layer: MoeLayer) -> int:
    vectors = (v for each in layer.projections for v in (each.bias, each.scale) if v is not None)
    return sum(vector.num_bytes for vector in vectors)


class GpuRoom(Room):
    """Implements room.Room for a GPU."""

    def __init__(
        self, file: GgufFile, spec: ModelSpec, description: Description, *, cache_slots: int = 0
    ) -> None:
        """`cache_slots`: see `open_backend`. Raises: UnsupportedModel for tensors that no kernel
        reads."""
        self._file, self._spec, self._description = file, spec, description
        self._cache_slots = cache_slots
        for layer in spec.moe.layers:
            for each in layer.projections:
                require_kernels(file, each.tensor_name, each.tensor_type, columns=each.columns)
        self._kv_layers = Counter(spec.kv_layers)
        self._chunks = ChunkRoom(file, spec, description)
        self._steps = StepRoom(spec, description, layer_columns=self._chunks.step_columns)

    @cached_property
    def layers(self) -> tuple[LayerBytes, ...]:
        moe = self._spec.moe.by_layer_id
        found = []
        for layer_id, layer in enumerate(self._description.layers):
            routed = moe.get(layer_id)
            expert, num_experts = (
                (0, 0) if routed is None else (expert_bytes(routed), routed.num_experts)
            )
            found.append(LayerBytes(layer_id, self._trunk(layer), expert, num_experts))
        return tuple(found)

    @cached_property
    def ends(self) -> int:
        return self._trunk(self._description.ends)

    def layer_experts_bytes(self, layer_id: int, num_experts: int) -> int:
        layer = self._spec.moe.by_layer_id[layer_id]
        return experts_bytes(layer, num_experts, self._cache_slots)

    def offload_bytes(self, num_missing: Mapping[int, int]) -> int:
        """Memory through which so many remote experts of each layer, by layer id, are copied for
        prompts. It is taken last, and only if it leaves something free (see ExpertOffload)."""
        layers = self._spec.moe.by_layer_id
        return offload_bytes((layers[layer_id], num) for layer_id, num in num_missing.items())

    def cache_bytes(self, num_positions: int, kv_type: KvType) -> int:
        """Raises: SettingsError as DeviceKvCache."""
        spec = self._spec
        rows = sum(
            count * allocated(size)
            for kv, count in self._kv_layers.items()
            for size in array_bytes(kv, num_positions, kv_type)
        )
        states = state_bytes(spec.recurrent_layers)
        return rows + states + self._snapshot_bytes(num_positions, kv_type)

    def _snapshot_bytes(self, num_positions: int, kv_type: KvType) -> int:
        spec = self._spec
        of_windows = sum(
            count
            * (
                bytes_with_snapshots(kv, num_positions, kv_type)
                - layer_bytes(kv, num_positions, kv_type)
            )
            for kv, count in self._kv_layers.items()
        )
        return of_windows + snapshot_bytes(spec.recurrent_layers)

    def passing_bytes(
        self,
        *,
        num_positions: int,
        kv_type: KvType,
        chunk: int,
        num_remote_layers: int = 0,
        num_daemons: int = 0,
    ) -> int:
        """What passes in a chunk, and what steps and snapshots take; beside what a chunk keeps."""
        num_tokens = min(chunk, num_positions)
        remote = waiting = 0
        if num_remote_layers:
            waiting = self._chunks.waiting_bytes(min(GROUP_TOKENS, num_positions) - num_tokens)
            remote = self._chunks.remote_bytes(num_tokens, num_daemons)
        steps = self._steps.num_bytes(num_positions, kv_type)
        steps += self._steps.remote_bytes(num_positions, num_remote_layers)
        snapshots = self._snapshot_bytes(num_positions, kv_type)
        rows = self._chunks.passing_bytes(num_tokens, remote_bytes=remote) + waiting
        return rows + steps + snapshots

    def needs(
        self,
        *,
        num_positions: int,
        kv_type: KvType,
        chunk: int,
        is_parent: bool = True,
        num_remote_layers: int = 0,
        num_daemons: int = 0,
        scratch_bytes: int | None = None,
    ) -> Needs:
        """`scratch_bytes`: for matrices as halves, if not what suits the chunk."""
        if scratch_bytes is None:
            scratch_bytes = scratch_of_chunk(chunk)
        work = self._chunks.kept_bytes(
            chunk, scratch_bytes, is_parent=is_parent, is_remote=num_remote_layers > 0
        )
        if not is_parent:
            return Needs(
                work=work + self._chunks.batch_bytes(chunk),
                recorded=self._steps.daemon_bytes,
                staging=copier_bytes(),
                driver=CONTEXT_BYTES + MODULES_BYTES,
            )
        passing = self.passing_bytes(
            num_positions=num_positions,
            kv_type=kv_type,
            chunk=chunk,
            num_remote_layers=num_remote_layers,
            num_daemons=num_daemons,
        )
        recorded = self._steps.num_bytes(num_positions, kv_type)
        recorded += self._steps.remote_bytes(num_positions, num_remote_layers)
        mail = num_daemons * allocated(self._steps.mail_bytes) if num_remote_layers else 0
        staging = self._steps.staging_bytes(num_positions, num_remote_layers)
        if num_remote_layers:
            staging += rows_bytes(min(chunk, num_positions), self._spec.hidden_size)
        return Needs(
            weights=self.ends + sum(layer.trunk for layer in self.layers),
            cache=self.cache_bytes(num_positions, kv_type),
            # What passes is one piece, of which steps and snapshots are counted elsewhere.
            work=work
            + allocated(passing)
            - recorded
            - self._snapshot_bytes(num_positions, kv_type),
            recorded=recorded + mail,
            staging=staging,
            driver=CONTEXT_BYTES + MODULES_BYTES,
        )

    def _trunk(self, part: object) -> int:
        """Bytes of dense tensors. Raises: UnsupportedModel."""
        seen: set[str] = set()
        total = 0
        for tensor in parts_of(part):
            if not isinstance(tensor, MatrixTensor | VectorTensor) or tensor.name in seen:
                continue
            seen.add(tensor.name)  # a head may be the embedding table
            stored = self._file.tensor(tensor.name)
            if isinstance(tensor, VectorTensor):
                total += allocated(4 * stored.num_rows * stored.columns)
                continue
            columns, tensor_type = stored.columns, stored.tensor_type
            require_kernels(self._file, tensor.name, tensor_type, columns=columns)
            total += allocated(stored.num_rows * row_bytes(tensor_type, columns))
        return total


def total_experts(experts: Iterable[tuple[MoeLayer, int]], cache_slots: int = 0) -> int:
    """Memory of so many experts of each of these layers. Raises: ValueError."""
    return sum(experts_bytes(layer, num_experts, cache_slots) for layer, num_experts in experts)
