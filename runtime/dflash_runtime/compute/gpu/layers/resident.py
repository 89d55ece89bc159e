"""The experts of one layer on the device, by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import ExpertProjection, ExpertVector, MoeLayer
from dflash_protocol.ids import F32Array, I32Array, I64Array, Phase, U8Array
from dflash_runtime.compute.gpu.device.device import BlockArray, DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.layouts import ResidentExperts, ResidentMatrices, row_bytes
from dflash_runtime.compute.gpu.layers.matrix import Uploader, require_kernels


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ResidentLayer:
    """Experts of a layer on the device. `slot_of_expert` [E] int32, on the host; -1: none.

    `rename` changes tables and vectors in place, so that what was captured with them stays valid.
    """

    layer: MoeLayer
    slot_of_expert: I32Array
    experts: ResidentExperts
    selections: DeviceArray | None = None
    """How often each expert was chosen since `take_selections`, for a whole layer, which is routed
    on the device alone: in chunks of prompts, and in steps. Shapes: [2, E] uint32."""

    @property
    def num_resident(self) -> int:
        """Experts that are here."""
        return int(np.count_nonzero(self.slot_of_expert >= 0))

    @property
    def weights(self) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
        """The matrices of gate, up and down, by slot. Shapes: [slots * expert_bytes] uint8."""
        experts = self.experts
        return experts.gate.weights, experts.up.weights, experts.down.weights

    def counted_in(self, phase: Phase) -> DeviceArray | None:
        """Where choices of a phase are counted, if they are. Shapes: [E] uint32."""
        if self.selections is None:
            return None
        counts: DeviceArray = self.selections[0 if phase is Phase.PREFILL else 1]
        return counts

    @property
    def is_whole(self) -> bool:
        """Whether all experts of the layer are resident."""
        return self.num_resident == self.layer.num_experts

    def rename(
        self,
        device: KernelDevice,
        file: GgufFile,
        slots: Sequence[int],
        *,
        ids: Sequence[tuple[int, int]],
    ) -> None:
        """These slots hold other experts now. `ids`: for each slot its expert's global id, and the
        id that this object uses. No kernel may be running."""
        names = [name for _, name in ids]
        if (self.slot_of_expert[names] != slots).any():
            self.slot_of_expert[names] = slots
            device.write(self.experts.slot_of_expert, self.slot_of_expert)
        parts = self.experts.gate, self.experts.up, self.experts.down
        for projection, matrices in zip(self.layer.projections, parts, strict=True):
            for vector, rows in (
                (projection.bias, matrices.bias),
                (projection.scale, matrices.scale),
            ):
                if vector is not None and rows is not None:
                    for global_expert_id, name in ids:
                        row = rows.reshape(-1, vector.length)[name : name + 1]
                        device.write(row, _vector(file, vector, global_expert_id).reshape(1, -1))

    def fill(
        self,
        uploader: Uploader,
        file: GgufFile,
        slot: int,
        *,
        global_expert_id: int,
        native: Sequence[DeviceArray] | None = None,
    ) -> None:
        """Write an expert's matrices into a slot: from `native`, where they lie on the device as in
        the file, else from the file."""
        if native is None:
            for each, weights in zip(self.layer.projections, self.weights, strict=True):
                raws, place = [_matrix(file, each, global_expert_id)], _slot(each, weights, slot)
                uploader.fill(place, raws, each.tensor_type, columns=each.columns)
            return
        for each, weights, source in zip(self.layer.projections, self.weights, native, strict=True):
            place = _slot(each, weights, slot)
            uploader.lay_out(source, place, each.tensor_type, columns=each.columns)

    def only(self, device: KernelDevice, chosen: npt.NDArray[np.bool_]) -> ResidentLayer | None:
        """The same weights with only the chosen experts; None if none is left.

        Shapes: chosen [E], by this object's ids.
        """
        slots = np.where(chosen, self.slot_of_expert, np.int32(-1))
        if (slots == self.slot_of_expert).all():
            return self
        if (slots < 0).all():
            return None
        experts = replace(self.experts, slot_of_expert=device.upload(slots))
        return replace(self, slot_of_expert=slots, experts=experts, selections=None)

    def take_selections(self, device: KernelDevice) -> I64Array | None:
        """How often each expert was chosen since the last call, in chunks and in steps; None if not
        counted, or zero.

        Shapes: result [2, E].
        """
        if self.selections is None:
            return None
        counts: I64Array = device.download(self.selections).astype(np.int64)
        if not counts.any():
            return None
        device.write(self.selections, np.zeros(counts.shape, np.uint32))
        return counts


def load_resident(
    device: KernelDevice,
    uploader: Uploader,
    file: GgufFile,
    *,
    layer: MoeLayer,
    global_expert_ids: I32Array,
    num_more: int = 0,
    blocks: list[BlockArray] | None = None,
) -> tuple[ResidentLayer, ResidentLayer]:
    """Bring experts to the device, once; named by their global ids, and by their local ids, which
    are their places in `global_expert_ids`. `num_more`: slots before these, for further experts;
    biases and scales of all experts are there then. With `blocks`, of a list that is empty, memory
    of all projections comes in blocks, which are added to it, if the device has such memory.

    Raises: UnsupportedModel if there are no kernels for their types; DeviceOutOfMemory.
    """
    global_ids = np.asarray(global_expert_ids, np.int64)
    num_slots = max(1, global_ids.size + num_more)
    sizes = []
    for each in layer.projections:
        require_kernels(file, each.tensor_name, each.tensor_type, columns=each.columns)
        sizes.append(num_slots * expert_bytes(each))
    weights = _memory(device, sizes, blocks)
    for each, place in zip(layer.projections, weights, strict=True):
        raws = [_matrix(file, each, expert) for expert in global_ids.tolist()]
        first = num_more * expert_bytes(each)
        uploader.fill(place[first:], raws, each.tensor_type, columns=each.columns)
    places = np.arange(num_more, num_more + global_ids.size, dtype=np.int32)
    by_global, by_local = (
        named_layer(
            device,
            file,
            layer,
            weights=weights,
            ids=(global_ids, named),
            places=places,
            has_all_vectors=num_more > 0 and named is global_ids,
        )
        for named in (global_ids, np.arange(global_ids.size))
    )
    if by_global.is_whole:
        by_global = replace(by_global, selections=device.zeros((2, layer.num_experts), np.uint32))
    return by_global, by_local


def _memory(
    device: KernelDevice, sizes: Sequence[int], blocks: list[BlockArray] | None
) -> list[DeviceArray]:
    """See load_resident. Shapes: each [size] uint8."""
    if blocks is not None:
        for size in sizes:
            found = device.in_blocks(size)
            if found is None:
                blocks.clear()
                break
            blocks.append(found)
    return [each.array for each in blocks or ()] or [device.empty(size, np.uint8) for size in sizes]


def _matrix(file: GgufFile, projection: ExpertProjection, global_expert_id: int) -> U8Array:
    """One expert's, as in the file. Shapes: [bytes] uint8."""
    return file.region(*projection.place_of(global_expert_id), projection.num_bytes)


def _slot(projection: ExpertProjection, weights: DeviceArray, slot: int) -> DeviceArray:
    num_bytes = expert_bytes(projection)
    place: DeviceArray = weights[slot * num_bytes : (slot + 1) * num_bytes]
    return place


def named_layer(
    device: KernelDevice,
    file: GgufFile,
    layer: MoeLayer,
    *,
    weights: Sequence[DeviceArray],
    ids: tuple[I64Array, I64Array],
    places: I32Array | None = None,
    has_all_vectors: bool = False,
) -> ResidentLayer:
    """Experts whose matrices, of each projection, lie in these arrays one after another, or in the
    slots that `places` says.

    `ids` are their global ids, and what they are called. `has_all_vectors`: with the biases and
    scales of all experts, if they are called by their global ids. Shapes: weights each
    [slots * expert_bytes] uint8; ids each [experts]; places [experts].
    """
    names = ids[1]
    every = np.arange(layer.num_experts)
    of_vectors = (every, every) if has_all_vectors else ids
    slots = np.full(layer.num_experts, -1, np.int32)
    slots[names] = np.arange(names.size, dtype=np.int32) if places is None else places
    parts = []
    for projection, matrices in zip(layer.projections, weights, strict=True):
        bias, scale = (
            _by_name(device, file, vector, of_vectors, num_experts=layer.num_experts)
            for vector in (projection.bias, projection.scale)
        )
        scale = None if scale is None else scale.reshape(-1)
        parts.append(ResidentMatrices(projection.tensor_type, matrices, bias, scale))
    gate, up, down = parts
    experts = ResidentExperts(
        gate,
        up,
        down,
        device.upload(slots),
        activation_limit=layer.activation_limit,
        activation_alpha=layer.activation_alpha,
        up_offset=layer.activation.up_offset,
    )
    return ResidentLayer(layer, slots, experts)


def _by_name(
    device: KernelDevice,
    file: GgufFile,
    vector: ExpertVector | None,
    ids: tuple[I64Array, I64Array],
    *,
    num_experts: int,
) -> DeviceArray | None:
    """A vector of these experts, in the row of each one's id. Shapes: [E, length] float32."""
    if vector is None:
        return None
    values = np.zeros((num_experts, vector.length), np.float32)
    for global_expert_id, name in zip(*(each.tolist() for each in ids), strict=True):
        values[name] = _vector(file, vector, global_expert_id)
    return device.upload(values)


def _vector(file: GgufFile, vector: ExpertVector, global_expert_id: int) -> F32Array:
    """Shapes: result [length]."""
    # Need not be aligned in the file.
    raw = file.region(*vector.place_of(global_expert_id), vector.num_bytes).copy()
    values: F32Array = raw.view("<f4").astype(np.float32)
    return values


def expert_bytes(projection: ExpertProjection) -> int:
    """Bytes of one expert's matrix in the device's layout."""
    return projection.rows * row_bytes(projection.tensor_type, projection.columns)
