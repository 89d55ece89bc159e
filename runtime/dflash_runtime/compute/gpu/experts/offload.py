"""Remote experts of prompt chunks, computed locally with weights copied from the mapped file.

::

    file ──threads──► locked memory ──copies──► place 0 │ place 1 │ place 2 ──(repacked)──► products

Where experts are larger than memory, threads take those that lie in an arena from there, and read
the others past the page cache (file_copier).

A layer's experts are cut into parts, each with a place, which parts of all layers take in turns.
All chunks of a group choose before any of these experts are computed. Then each part is computed
for all of them, and its place is free. Meanwhile the next parts are copied: those of this layer,
then those of the next one, whose tokens have not chosen yet. Of these, what its router chooses for
the rows of this layer is copied. If it has no such router, what several tokens of the last group
chose there is; if that is not known, all, if this layer's tokens chose nearly all of its own.

The host waits for a group's choice, and has fewer experts copied. Where the last group's tokens
chose nearly all of them, in this layer and in the next one, it does not: it launches the products
of all, and so stays ahead of the device. The parent maps the file anyway, for the experts of lost
daemons. `RemoteExperts` decides which experts are offloaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import MoeLayer
from dflash_protocol.batch import group_by_expert
from dflash_protocol.ids import AnyArray, F64Array, Phase
from dflash_runtime.compute.backend import RemoteExperts
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice, Mark
from dflash_runtime.compute.gpu.experts.offload_room import (
    aligned,
    memory_of,
    most_of_part,
    num_places,
    part_bytes,
)
from dflash_runtime.compute.gpu.launch.layouts import is_native
from dflash_runtime.compute.gpu.layers.matrix import Uploader, require_kernels
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer, expert_bytes, named_layer
from dflash_runtime.compute.gpu.ops.kernels import RoutedRows
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, FileRuns, Transfer
from dflash_runtime.compute.gpu.transfers.host_rows import PendingChoice
from dflash_runtime.compute.step_order import MOST_TOKENS

_NEARLY_ALL = 0.75
"""If this share of a layer's experts was chosen, all of the next layer's are copied ahead, unless
its choice is predicted or it is known what was chosen there before."""

_FORESEEN = 0.9
"""If by the last group's choice this share of a layer's experts will be chosen `_OFTEN`, all are
copied and computed without waiting for the choice. Copies of the others are in vain."""

_SELDOM = 1e-3
"""Rows assumed for an expert that the last group did not choose, but that is computed anyway."""

_OFTEN = 2
"""Without a prediction, experts that fewer tokens chose in the last group are not copied ahead.
With planted routing as that of Qwen3-30B-A3B, chunks of 512 tokens and the 40 coldest of 128
experts, 19 are copied ahead, 14 of them for something (of 24 and 17 that were chosen at all), and
25 are chosen."""

Experts = npt.NDArray[np.bool_]
"""A mask of a layer's experts. Shapes: [E]."""

_Chosen: TypeAlias = tuple[PendingChoice, Callable[[], None] | None]
"""What a chunk chose, and whom to tell. Its rows are not kept."""


@dataclass(slots=True, eq=False)
class _Place:
    """Memory for one part in the file's layout, and the part in it now."""

    memory: DeviceArray
    part: _Part | None = None
    loaded: Experts = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Experts in it, or being copied."""
    transfers: list[Transfer] = field(default_factory=list)
    num_fillings: int = 0
    """Transfers into it so far."""
    is_due: bool = False
    """The part is yet to be computed for this group."""
    read: Mark | None = None
    """Behind the kernels that read it last."""

    def take(self, part: _Part) -> None:
        """Give it to a part of which nothing is here."""
        self.clear()
        self.part, self.loaded = part, np.zeros(part.experts.size, np.bool_)

    def clear(self) -> None:
        """Cancel transfers and forget the content; that first, as cancelling may fail."""
        self.part, self.is_due = None, False
        for transfer in self.transfers:
            transfer.cancel()
        self.transfers.clear()


@dataclass(slots=True, eq=False)
class _Part:
    """Some of a layer's remote experts, copied together."""

    layer: MoeLayer
    experts: Experts
    place: _Place
    native: tuple[DeviceArray, ...]
    """For each projection, the experts one after another in the file's layout."""
    weights: tuple[DeviceArray, ...]
    """The same in the device's layout; the same arrays if the layouts agree."""
    resident: ResidentLayer
    """All of them as a resident layer."""
    runs: FileRuns
    """From the file to `native`: each expert's matrix, projection by projection."""
    is_laid_out: bool = field(init=False)
    """Whether any projection has another layout on the device than in the file."""
    some: tuple[Experts, ResidentLayer] | None = None
    """The experts computed last, as a resident layer."""

    def __post_init__(self) -> None:
        pairs = zip(self.native, self.weights, strict=True)
        self.is_laid_out = any(native is not weights for native, weights in pairs)

    @property
    def is_due(self) -> bool:
        """Whether its place holds it, until it is computed."""
        return self.place.is_due and self.place.part is self

    def runs_of(self, experts: Experts) -> FileRuns:
        """Those of some of the experts. Shapes: experts [E]."""
        return self.runs.chosen(experts[self.experts])


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Remote experts of a layer that are to be computed here, at least one. Shapes: [E]."""

    experts: Experts
    is_all: bool
    """Whether the layer has no other remote experts."""


@dataclass(slots=True, eq=False)
class _Layer:
    """A layer with remote experts."""

    layer: MoeLayer
    missing: Experts
    places: tuple[_Place, ...]
    """Of its parts."""
    parts: tuple[_Part, ...] = ()
    """None until they are needed."""
    shares: F64Array | None = None
    """Of the last group's tokens, those that chose each expert: the next one's choice resembles
    them. Shapes: [E]."""
    asked: tuple[Experts, Wanted | None] | None = None
    foreseen: tuple[F64Array | None, Experts, int, bool] | None = None
    """What was asked last, and the answer: a chunk asks the same several times. Arrays are not
    written to."""

    def wanted(self, offloaded: Experts) -> Wanted | None:
        """Those of `offloaded` that are missing. Shapes: offloaded [E]."""
        if self.asked is None or self.asked[0] is not offloaded:
            experts = offloaded & self.missing
            is_all = bool((experts == self.missing).all())
            self.asked = offloaded, Wanted(experts, is_all) if experts.any() else None
        return self.asked[1]

    def often(self, wanted: Experts, num_tokens: int) -> Experts | None:
        """Which of the wanted experts so many tokens will choose `_OFTEN`, by the last group's
        choice. None: it is not known. Shapes: [E]."""
        return None if self.shares is None else wanted & (self.shares * num_tokens > _OFTEN - 0.5)

    def foresees_all(self, wanted: Experts, num_tokens: int) -> bool:
        """Whether these are nearly all of the wanted experts. Shapes: wanted [E]."""
        if self.foreseen is not None:
            shares, asked, number, found = self.foreseen
            if shares is self.shares and asked is wanted and number == num_tokens:
                return found
        often = self.often(wanted, num_tokens)
        found = often is not None and bool(often.sum() >= _FORESEEN * wanted.sum())
        self.foreseen = self.shares, wanted, num_tokens, found
        return found

    def settle(self, chosen: Sequence[_Chosen]) -> None:
        """Note what a group's tokens chose; waits for that."""
        counts = [pending.counts() for pending, _ in chosen]
        self.shares = _total(counts) / sum(pending.num_tokens for pending, _ in chosen)
        for _, note in chosen:
            if note is not None:
                note()


@dataclass(slots=True, eq=False)
class OffloadedChunk:
    """What a layer's offloaded experts are computed for."""

    routed: RoutedRows
    pending: PendingChoice
    wanted: Experts
    """The experts to compute, of which some may not be chosen."""
    sums: DeviceArray | None = None
    """Of its other experts, if any; once computed of these too. Shapes: [T, H] float64."""
    predicted: PendingChoice | None = None
    """What it is expected to choose in the next layer."""
    note: Callable[[], None] | None = None
    """Called when its choice is known."""
    is_computed: bool = field(default=False, init=False)


@dataclass(slots=True, eq=False)
class _Group:
    """Chunks that use the same copies of a layer's experts."""

    layer_id: int
    chunks: list[OffloadedChunk] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Of all chunks."""
        return sum(each.pending.num_tokens for each in self.chunks)

    @property
    def wanted(self) -> Experts:
        """By any chunk. Shapes: [E]."""
        first, *others = (each.wanted for each in self.chunks)
        if all(each is first for each in others):
            return first
        return np.asarray(np.any([first, *others], axis=0))


class ExpertOffload:
    """Computes experts of chunks with weights copied for them. Used by one thread.

    Per layer: `wanted` says what is to be computed, `add` adds a chunk, `sums_of` computes all that
    were added. Owns: memory on the device, and a FileCopier, until it is closed.
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
        device = ops.device
        self._uploader = uploader
        self._file = file
        place_bytes, laid_out_bytes = memory_of(
            (layer, int(experts.sum())) for layer, experts in missing.values()
        )
        num = num_places((layer, int(experts.sum())) for layer, experts in missing.values())
        self._places = [_Place(device.empty(place_bytes, np.uint8)) for _ in range(num)]
        self._laid_out = device.empty(laid_out_bytes, np.uint8)
        """Memory for projections whose layout on the device differs."""
        self._laid_out_of: tuple[_Part, int] | None = None
        """The part in it, and its place's `num_fillings` then."""
        device.synchronize()  # kernels that used this memory before must have ended
        self._layers = self._with_places(missing)
        self._following = dict(pairwise(missing))
        self._group: _Group | None = None
        """A layer's chunks that were added and are not computed yet."""
        self._unsettled: tuple[_Layer, list[_Chosen]] | None = None
        """Of the group that was computed last, if it is not noted yet what it chose."""
        self._copied_next: deque[tuple[_Part, Experts]] = deque()
        """Experts whose copies are not begun yet, in the order in which they are computed."""
        self._copier = new_copier(device)

    @property
    def _device(self) -> KernelDevice:
        return self._ops.device

    def prepare(self) -> None:
        """Compile every kernel and allocate all memory.

        Raises: SettingsError, DeviceUnavailable, DeviceOutOfMemory among them.
        """
        tried: set[object] = set()
        for known in self._layers.values():
            layer, parts = known.layer, self._parts(known)
            self._ops.chunk_experts.expect(parts[0].resident)
            kind = tuple((each.tensor_type, each.rows, each.columns) for each in layer.projections)
            if kind not in tried:
                tried.add(kind)
                self._try_out(parts[0])
        self.forget()

    def _with_places(self, missing: Mapping[int, tuple[MoeLayer, Experts]]) -> dict[int, _Layer]:
        """Layers whose parts take places in turns."""
        in_turns = cycle(self._places)
        return {
            layer_id: _Layer(
                layer, experts, tuple(next(in_turns) for _ in self._parts_of(layer, experts))
            )
            for layer_id, (layer, experts) in missing.items()
        }

    def _parts_of(self, layer: MoeLayer, missing: Experts) -> list[Experts]:
        """A layer's remote experts, cut into parts of nearly the same size that fit into a place.
        Shapes: each [E]."""
        ids = np.flatnonzero(missing)
        most, there = most_of_part(layer, ids.size), (self._places[0].memory, self._laid_out)
        while most > 1 and any(
            memory.nbytes < needed
            for memory, needed in zip(there, part_bytes(layer, most), strict=True)
        ):
            most -= 1
        masks = []
        for chosen in np.array_split(ids, -(-ids.size // most)):
            mask = np.zeros(missing.size, np.bool_)
            mask[chosen] = True
            masks.append(mask)
        return masks

    def forget(self, *, choices: bool = False) -> None:
        """Drop what was copied, and with `choices` what is known of the last group's; no chunk is
        computed."""
        for place in self._places:
            place.clear()
        for known in self._layers.values() if choices else ():
            known.shares = None

    def follow(self, missing_of: Mapping[int, Experts]) -> None:
        """Others of these layers' experts are remote now, perhaps more or fewer; no chunk is
        computed.

        Shapes: by layer id [E].
        """
        changed = {
            layer_id: missing
            for layer_id, missing in missing_of.items()
            if layer_id in self._layers and (self._layers[layer_id].missing != missing).any()
        }
        for layer_id, missing in changed.items():
            if not missing.any():
                raise ValueError(f"layer {layer_id} has no remote experts any more")
        self._unsettled = None  # of a pass that failed: its experts are elsewhere now
        layers = {layer_id: (each.layer, each.missing) for layer_id, each in self._layers.items()}
        if any(layers[layer_id][1].sum() != each.sum() for layer_id, each in changed.items()):
            self.forget()  # there may be more parts, or fewer
            self._layers = self._with_places(
                {
                    layer_id: (layer, changed.get(layer_id, missing))
                    for layer_id, (layer, missing) in layers.items()
                }
            )
            return
        for layer_id, missing in changed.items():
            known = self._layers[layer_id]
            for part in known.parts:
                if part.place.part is part:
                    part.place.clear()
            self._layers[layer_id] = _Layer(known.layer, missing, known.places)

    def wanted(self, layer_id: int, num_tokens: int, remote: RemoteExperts) -> Wanted | None:
        """Which of a layer's remote experts a chunk of so many tokens has computed here, if any."""
        known = self._layers.get(layer_id)
        offloaded = None if known is None else remote.to_offload(layer_id, num_tokens)
        if known is None or offloaded is None:
            return None
        return known.wanted(offloaded)

    def is_uncertain(self, layer_id: int, num_tokens: int, remote: RemoteExperts) -> bool:
        """Whether some of a layer's remote experts are to be computed for a chunk of so many
        tokens, which comes next to the group of the layer before, and it is not known that the
        group will choose nearly all of them."""
        group, wanted = self._group, self.wanted(layer_id, num_tokens, remote)
        if group is not None and group.layer_id == layer_id - 1:
            num_tokens += group.num_tokens
        if wanted is None:
            return False
        return not self._layers[layer_id].foresees_all(wanted.experts, num_tokens)

    def add(self, layer_id: int, chunk: OffloadedChunk) -> None:
        """Add a chunk to the layer's group. Nothing is waited for."""
        if self._group is None or self._group.layer_id != layer_id:
            self._group = _Group(layer_id)
        self._group.chunks.append(chunk)

    def sums_of(self, chunk: OffloadedChunk, remote: RemoteExperts) -> DeviceArray:
        """Sums of the pairs of an added chunk's experts, added to those of its other ones. All
        chunks of its group are computed with the first one.

        Shapes: result [T, H] float64. Raises: ModelFileError if the file was written to;
        DeviceUnavailable.
        """
        group = self._group
        if group is not None and chunk in group.chunks:
            self._group = None
            self._compute(group, remote)
        if not chunk.is_computed:
            raise RuntimeError("a chunk of a group that was given up")
        sums = chunk.sums
        if sums is None:  # none of its experts were chosen
            sums = self._device.zeros(chunk.routed.x.rows.array.shape, np.float64)
        return sums

    def abandon(self) -> None:
        """Forget chunks that are not computed yet, or not counted: their pass has failed."""
        self._group = None
        self._unsettled = None

    def _compute(self, group: _Group, remote: RemoteExperts) -> None:
        """Each part for all chunks, while the next ones are copied."""
        known, chunks = self._layers[group.layer_id], group.chunks
        self._file.require_unwritten()
        self._settle()
        for place in self._places:  # what else was on its way, of a group that was given up
            place.is_due = False
        rows_of = self._rows_of(known, group)
        self._unsettled = known, [(each.pending, each.note) for each in chunks]
        rows = _total(rows_of)
        # Those on their way come first: another part, which only a later chunk needs, may be
        # waiting for the place of one.
        parts = sorted(self._parts_with(known, rows > 0), key=lambda found: not found[0].is_due)
        following, ahead = self._ahead(group, remote, rows)
        self._copied_next = deque(parts)
        if following is not None:
            self._copied_next.extend(self._parts_with(following, ahead))
        self._copy()
        for part, chosen in parts:
            self._await(part)
            for chunk, of_chunk in zip(chunks, rows_of, strict=True):
                of_experts = of_chunk[chosen]
                if of_experts.any():
                    chunk.sums = self._ops.chunk_experts.local_sums(
                        self._resident(part, chunk.wanted),
                        chunk.routed,
                        chunk.sums,
                        mean_rows=float(of_experts.sum()) / np.count_nonzero(of_experts),
                    )
            part.place.read, part.place.is_due = self._device.mark(), False
            self._copy()
        for chunk in chunks:
            chunk.is_computed = True
        if following is None:
            self._settle()

    def close(self) -> None:
        """Release everything. Idempotent."""
        self.forget()
        self._copier.close()
        self._group = None
        self._copied_next.clear()
        self._laid_out_of = None
        self._layers.clear()
        self._places.clear()
        self._laid_out = self._device.empty(0, np.uint8)

    def _parts_with(self, known: _Layer, experts: Experts) -> Iterator[tuple[_Part, Experts]]:
        """A layer's parts with any of these experts, and which of them."""
        for part in self._parts(known):
            some = part.experts & experts
            if some.any():
                yield part, some

    def _rows_of(self, known: _Layer, group: _Group) -> list[F64Array]:
        """How many tokens of each chunk have chosen an expert, or will by the last group's choice,
        if all must be computed anyway; 0: it need not be. Shapes: each [E]."""
        shares = known.shares
        if shares is not None and known.foresees_all(group.wanted, group.num_tokens):
            return [
                each.wanted * (each.pending.num_tokens * shares + _SELDOM) for each in group.chunks
            ]
        rows_of: list[F64Array] = []
        for chunk in group.chunks:
            rows_of.append(np.where(chunk.wanted, chunk.pending.counts(), 0.0))
            if len(rows_of) == 1 < len(group.chunks):  # others choose nearly the same
                self._copied_next = deque(self._parts_with(known, rows_of[0] > 0))
                self._copy()
        return rows_of

    def _ahead(
        self, group: _Group, remote: RemoteExperts, rows: F64Array
    ) -> tuple[_Layer | None, Experts]:
        """The layer after this one, if it has experts to compute, and those to copy ahead. Shapes:
        rows, of this layer's experts, [E]."""
        following = self._following.get(group.layer_id)
        most = max(each.pending.num_tokens for each in group.chunks)
        wanted = None if following is None else self.wanted(following, most, remote)
        if following is None or wanted is None:
            return None, np.zeros(0, np.bool_)
        known, experts, num_tokens = self._layers[following], wanted.experts, group.num_tokens
        if known.foresees_all(experts, num_tokens):
            return known, experts
        predicted = [each.predicted for each in group.chunks]
        if None not in predicted:
            counts = [each.counts() for each in predicted if each is not None]
            return known, experts & (_total(counts) > 0)
        often = known.often(experts, num_tokens)
        if often is None and (rows > 0).sum() >= _NEARLY_ALL * group.wanted.sum():
            often = experts
        return known, np.zeros_like(experts) if often is None else often

    def _settle(self) -> None:
        """Note what a group chose that was computed before that was known."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:
            known, chosen = unsettled
            known.settle(chosen)

    def _copy(self) -> None:
        """Begin copies, in their order, until the next part's place is due to be computed."""
        while self._copied_next:
            part, experts = self._copied_next[0]
            place = part.place
            if place.part is not part:
                if place.is_due:
                    return
                place.take(part)
            more = experts & ~place.loaded
            if more.any():
                runs = part.runs_of(more)
                self._copier.begin(runs, after=place.read, into=place.transfers)
                place.loaded = place.loaded | more
                place.num_fillings += 1
            place.is_due = True
            self._copied_next.popleft()

    def _await(self, part: _Part) -> None:
        """Wait for a part's copies, and have them in the device's layout."""
        place = part.place
        assert place.part is part
        try:
            for transfer in place.transfers:
                transfer.wait()
        except BaseException:
            place.clear()
            raise
        place.transfers.clear()
        self._lay_out(part)

    def _resident(self, part: _Part, experts: Experts) -> ResidentLayer:
        """Those of `experts` that are in a part, as a resident layer."""
        some = part.some
        if some is None or (some[0] is not experts and (some[0] != experts).any()):
            resident = part.resident.only(self._device, experts)
            assert resident is not None
            some = part.some = experts, resident
        return some[1]

    def _lay_out(self, part: _Part) -> None:
        """Repack a part into the device's layout, if that differs and it was not done; also what of
        it was not copied, as most is."""
        state = part, part.place.num_fillings
        if not part.is_laid_out or state == self._laid_out_of:
            return
        self._laid_out_of = state
        for projection, native, weights in zip(
            part.layer.projections, part.native, part.weights, strict=True
        ):
            if native is not weights:
                self._uploader.lay_out(
                    native, weights, projection.tensor_type, columns=projection.columns
                )

    def all_parts(self) -> Iterator[_Part]:
        """Of all layers, in their order."""
        for known in self._layers.values():
            yield from self._parts(known)

    def _parts(self, known: _Layer) -> tuple[_Part, ...]:
        """A layer's parts, made when they are first needed."""
        if not known.parts:
            masks = self._parts_of(known.layer, known.missing)
            known.parts = tuple(
                self._made(known.layer, mask, place)
                for mask, place in zip(masks, known.places, strict=True)
            )
        return known.parts

    def _made(self, layer: MoeLayer, experts: Experts, place: _Place) -> _Part:
        num = int(experts.sum())
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
        ids = np.flatnonzero(experts)
        resident = named_layer(self._device, self._file, layer, weights=weights, ids=(ids, ids))
        arena, nowhere = self._copier.arena, (0, 0)
        lent = [
            (arena and arena.place_of(layer.layer_id, global_expert_id)) or nowhere
            for global_expert_id in ids.tolist()
        ]
        runs = FileRuns.lent(
            (
                (
                    self._file.region(*each.place_of(global_expert_id), each.num_bytes),
                    array[slot * each.num_bytes : (slot + 1) * each.num_bytes],
                    (lent[slot][0], 3 * lent[slot][1] + index),
                )
                for index, (each, array) in enumerate(zip(layer.projections, native, strict=True))
                for slot, global_expert_id in enumerate(ids.tolist())
            ),
            arena,
        )
        return _Part(
            layer,
            experts,
            place,
            native=tuple(native),
            weights=tuple(weights),
            resident=resident,
            runs=runs,
        )

    def _try_out(self, part: _Part) -> None:
        """Compute the smallest chunk, with all tokens routed to one expert."""
        layer, num_tokens = part.layer, MOST_TOKENS + 1
        expert = np.zeros(layer.num_experts, np.bool_)
        expert[np.flatnonzero(part.experts)[0]] = True
        self._copied_next.append((part, expert))
        self._copy()
        self._await(part)
        resident = self._resident(part, expert)
        part.place.is_due = False
        batch = group_by_expert(
            np.ones((num_tokens, layer.hidden_size), np.float32),
            np.arange(num_tokens, dtype=np.int32),
            np.full(num_tokens, np.flatnonzero(expert)[0], np.int32),
            weights=np.ones(num_tokens, np.float32),
            phase=Phase.PREFILL,
        )
        self._ops.chunk_experts.sums_of_batch(resident, batch)
        self._device.synchronize()


def _total(counts: Sequence[AnyArray]) -> AnyArray:
    """Of chunks; most groups have one. Shapes: counts [E] each, result [E]."""
    return counts[0] if len(counts) == 1 else np.asarray(np.sum(counts, axis=0))
