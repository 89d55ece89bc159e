"""Remote experts of a prompt chunk, computed locally with weights copied from the mapped file.

::

    file ──threads──► locked memory ──copies──► place 0 │ place 1 ──(repacked)──► products

Layers alternate between the two places. While a layer is computed from one, the next one's experts
are copied into the other: all of them if this layer's tokens chose nearly all of its own, else the
chosen ones once they are known. The parent maps the file anyway, for the experts of lost daemons.
`RemoteExperts` decides which experts are offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import MoeLayer
from dflash_protocol.batch import group_by_expert
from dflash_protocol.ids import I32Array, Phase
from dflash_runtime.compute.backend import RemoteExperts
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.experts.offload_room import NUM_PLACES, aligned, memory_of
from dflash_runtime.compute.gpu.launch.decode_arrays import MOST_TOKENS
from dflash_runtime.compute.gpu.launch.layouts import is_native
from dflash_runtime.compute.gpu.layers.matrix import Uploader, require_kernels
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer, expert_bytes, named_layer
from dflash_runtime.compute.gpu.ops.kernels import RoutedRows
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, FileRuns, Transfer

_NEARLY_ALL = 0.75
"""If this share of a layer's experts was chosen, all of the next layer's are copied ahead."""

Experts = npt.NDArray[np.bool_]
"""A mask of a layer's experts. Shapes: [E]."""


@dataclass(slots=True, eq=False)
class _Place:
    """Memory for the experts of one layer in the file's layout, and the layer in it now."""

    memory: DeviceArray
    layer_id: int = -1
    loaded: Experts = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Experts in it, or being copied."""
    transfers: list[Transfer] = field(default_factory=list)
    is_read: bool = False
    """Kernels that read it may be running."""

    def clear(self) -> None:
        """Cancel transfers and forget the content."""
        for transfer in self.transfers:
            transfer.cancel()
        self.transfers.clear()
        self.layer_id = -1


@dataclass(slots=True, eq=False)
class _Layer:
    """A layer with remote experts."""

    layer: MoeLayer
    missing: Experts
    place: _Place
    native: tuple[DeviceArray, ...]
    """For each projection, the missing experts one after another in the file's layout."""
    weights: tuple[DeviceArray, ...]
    """The same in the device's layout; the same arrays if the layouts agree."""
    resident: ResidentLayer
    """All missing experts as a resident layer."""
    runs: FileRuns
    """From the file to `native`: each missing expert's matrix, projection by projection."""
    some: tuple[Experts, ResidentLayer] | None = None
    """The experts computed last, as a resident layer."""

    @property
    def is_laid_out(self) -> bool:
        """Whether any projection has another layout on the device than in the file."""
        pairs = zip(self.native, self.weights, strict=True)
        return any(native is not weights for native, weights in pairs)

    def runs_of(self, experts: Experts) -> FileRuns:
        """Those of some of the missing experts. Shapes: experts [E]."""
        return self.runs.chosen(np.tile(experts[self.missing], len(self.native)))


class ExpertOffload:
    """Computes experts of chunks with weights copied for them. Used by one thread.

    Per layer: `begin` starts the copies, `sums` waits for them and computes. Owns: memory on the
    device, and a FileCopier, until it is closed.
    """

    def __init__(
        self,
        ops: GpuOps,
        file: GgufFile,
        missing: Mapping[int, tuple[MoeLayer, Experts]],
        *,
        uploader: Uploader,
        new_copier: Callable[[KernelDevice], FileCopier] = FileCopier,
    ) -> None:
        """`missing`: the remote experts by layer id, in the model's order.

        Raises: UnsupportedModel if there are no kernels for them; SettingsError, DeviceUnavailable.
        """
        for layer, _ in missing.values():
            for each in layer.projections:
                require_kernels(file, each.tensor_name, each.tensor_type, columns=each.columns)
        self._ops = ops
        self._device = device = ops.device
        self._uploader = uploader
        self._file = file
        place_bytes, laid_out_bytes = memory_of(
            (layer, int(experts.sum())) for layer, experts in missing.values()
        )
        self._places = [_Place(device.empty(place_bytes, np.uint8)) for _ in range(NUM_PLACES)]
        self._laid_out = device.empty(laid_out_bytes, np.uint8)
        """Memory for projections whose layout on the device differs."""
        self._laid_out_of: tuple[int, bytes] | None = None
        device.synchronize()  # kernels that used this memory before must have ended
        self._layers = {
            layer_id: self._made(layer, experts, self._places[index % NUM_PLACES])
            for index, (layer_id, (layer, experts)) in enumerate(missing.items())
        }
        ids = list(missing)
        self._following = dict(pairwise(ids))
        self._copier = new_copier(device)

    def prepare(self) -> None:
        """Compile every kernel and allocate all memory.

        Raises: SettingsError, DeviceUnavailable, DeviceOutOfMemory among them.
        """
        tried: set[object] = set()
        for layer_id, known in self._layers.items():
            layer = known.layer
            self._ops.chunk_experts.expect(known.resident)
            kind = tuple((each.tensor_type, each.rows, each.columns) for each in layer.projections)
            if kind not in tried:
                tried.add(kind)
                self._try_out(layer_id, known)
        for place in self._places:
            place.clear()

    def follow(self, missing_of: Mapping[int, Experts]) -> None:
        """Others of these layers' experts are remote now, as many as before; no chunk is computed.
        If that fails, nothing has changed.

        Shapes: by layer id [E]. Raises: DeviceUnavailable.
        """
        made = {}
        for layer_id, missing in missing_of.items():
            known = self._layers.get(layer_id)
            if known is None or (known.missing == missing).all():
                continue
            if known.missing.sum() != missing.sum():
                raise ValueError(f"layer {layer_id} has room for {known.missing.sum()} experts")
            made[layer_id] = self._made(known.layer, missing, known.place)
        for layer in made.values():
            layer.place.clear()
            self._laid_out_of = None
        self._layers.update(made)

    def begin(self, layer_id: int, topk_ids: I32Array, remote: RemoteExperts) -> Experts | None:
        """Decide which of a layer's remote experts to compute here, and start to copy those that
        were chosen; None: none. All kernels launched for the chunk must have ended.

        Shapes: topk_ids [T, K]; result [E]. Raises: ModelFileError if the file was written to.
        """
        known = self._layers.get(layer_id)
        if known is None:
            return None
        wanted = self._wanted(layer_id, topk_ids.shape[0], remote)
        if wanted is None:
            return None
        self._file.require_unwritten()
        chosen = np.zeros(wanted.size, np.bool_)
        chosen[topk_ids] = True
        chosen &= wanted
        self._load(layer_id, chosen)
        following = self._following.get(layer_id)
        if following is not None and chosen.sum() >= _NEARLY_ALL * wanted.sum():
            unseen = self._wanted(following, topk_ids.shape[0], remote)
            if unseen is not None:
                self._load(following, unseen)
        return wanted

    def sums(
        self, layer_id: int, routed: RoutedRows, *, experts: Experts, before: DeviceArray | None
    ) -> DeviceArray:
        """Sums of the pairs of these experts, which `begin` gave, added to those `before`.

        Shapes: result [T, H] float64. Raises: DeviceUnavailable.
        """
        known = self._layers[layer_id]
        resident = self._arrived(layer_id, known, experts)
        return self._ops.chunk_experts.local_sums(resident, routed, before)

    def close(self) -> None:
        """Release everything. Idempotent."""
        for place in self._places:
            place.clear()
        self._copier.close()
        self._layers.clear()
        self._places.clear()

    def _wanted(self, layer_id: int, num_tokens: int, remote: RemoteExperts) -> Experts | None:
        known = self._layers[layer_id]
        wanted = remote.to_offload(layer_id, num_tokens)
        if wanted is None or not (wanted & known.missing).any():
            return None
        return wanted & known.missing

    def _load(self, layer_id: int, experts: Experts) -> None:
        """Start to copy those of these experts that are not in the layer's place yet."""
        known = self._layers[layer_id]
        place = known.place
        if place.layer_id != layer_id:
            place.clear()
            if place.is_read:
                self._device.synchronize()
                place.is_read = False
            place.layer_id = layer_id
            place.loaded = np.zeros(experts.size, np.bool_)
        more = experts & ~place.loaded
        if more.any():
            place.transfers.append(self._copier.begin(known.runs_of(more)))
            place.loaded = place.loaded | more

    def _arrived(self, layer_id: int, known: _Layer, experts: Experts) -> ResidentLayer:
        """Wait for a layer's copies and return `experts` in the device's layout."""
        place = known.place
        assert place.layer_id == layer_id
        try:
            for transfer in place.transfers:
                transfer.wait()
        except BaseException:
            place.clear()
            raise
        place.transfers.clear()
        place.is_read = True
        self._lay_out(layer_id, known)
        if known.some is None or (known.some[0] != experts).any():
            resident = known.resident.only(self._device, experts)
            assert resident is not None
            known.some = experts, resident
        return known.some[1]

    def _lay_out(self, layer_id: int, known: _Layer) -> None:
        """Repack what was copied into the device's layout, if that differs."""
        loaded = known.place.loaded
        state = layer_id, loaded.tobytes()
        if state == self._laid_out_of or not known.is_laid_out:
            return
        self._laid_out_of = state
        # In one launch, with what lies between them.
        slots = np.flatnonzero(loaded[known.missing])
        first, end = int(slots[0]), int(slots[-1]) + 1
        for projection, native, weights in zip(
            known.layer.projections, known.native, known.weights, strict=True
        ):
            if native is weights:
                continue
            size, laid_out_size = projection.num_bytes, expert_bytes(projection)
            self._uploader.lay_out(
                native[first * size : end * size],
                weights[first * laid_out_size : end * laid_out_size],
                projection.tensor_type,
                columns=projection.columns,
            )

    def _made(self, layer: MoeLayer, missing: Experts, place: _Place) -> _Layer:
        num = int(missing.sum())
        native: list[DeviceArray] = []
        weights: list[DeviceArray] = []
        begin = laid_out_begin = 0
        for each in layer.projections:
            end = begin + num * each.num_bytes
            native.append(place.memory[begin:end])
            begin = aligned(end)
            if is_native(each.tensor_type, each.columns):
                weights.append(native[-1])
                continue
            laid_out_end = laid_out_begin + num * expert_bytes(each)
            weights.append(self._laid_out[laid_out_begin:laid_out_end])
            laid_out_begin = aligned(laid_out_end)
        ids = np.flatnonzero(missing)
        resident = named_layer(self._device, self._file, layer, weights=weights, ids=(ids, ids))
        runs = FileRuns.of(
            (
                self._file.region(*each.place_of(global_expert_id), each.num_bytes),
                array[slot * each.num_bytes : (slot + 1) * each.num_bytes],
            )
            for each, array in zip(layer.projections, native, strict=True)
            for slot, global_expert_id in enumerate(ids.tolist())
        )
        return _Layer(
            layer,
            missing,
            place,
            native=tuple(native),
            weights=tuple(weights),
            resident=resident,
            runs=runs,
        )

    def _try_out(self, layer_id: int, known: _Layer) -> None:
        """Compute the smallest chunk, with all tokens routed to one expert."""
        layer, num_tokens = known.layer, MOST_TOKENS + 1
        expert = np.zeros(layer.num_experts, np.bool_)
        expert[np.flatnonzero(known.missing)[0]] = True
        self._load(layer_id, expert)
        resident = self._arrived(layer_id, known, expert)
        batch = group_by_expert(
            np.ones((num_tokens, layer.hidden_size), np.float32),
            np.arange(num_tokens, dtype=np.int32),
            np.full(num_tokens, np.flatnonzero(expert)[0], np.int32),
            weights=np.ones(num_tokens, np.float32),
            phase=Phase.PREFILL,
        )
        self._ops.chunk_experts.sums_of_batch(resident, batch)
        self._device.synchronize()
