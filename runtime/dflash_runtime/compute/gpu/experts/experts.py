"""The experts of one layer on a GPU, for host code of a parent or daemon.

Hidden rows come from the host's memory and sums go back there. The phase decides the kernels, step
kernels for decode and verify and chunk kernels for prefill, whatever the number of tokens, so that
a slice of a batch has the same bits as the whole. Steps are captured for each layer and number of
tokens; their inputs and sums lie in mapped memory, so that a step is a single graph launch, without
copies by the driver.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import MoeLayer
from dflash_protocol.batch import HostSums, RoutedBatch, Sums, slice_tokens
from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase
from dflash_runtime.compute.backend import ExpertStage
from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.device.device import Graph
from dflash_runtime.compute.gpu.experts.resizing import SlotRoom, resize
from dflash_runtime.compute.gpu.experts.shared_slots import SharedSlots
from dflash_runtime.compute.gpu.experts.stage import DeviceStage
from dflash_runtime.compute.gpu.launch.decode_arrays import STEP_SIZES
from dflash_runtime.compute.gpu.launch.decode_experts import Choice
from dflash_runtime.compute.gpu.layers.matrix import Uploader
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer, named_layer
from dflash_runtime.compute.gpu.layers.rows import Input, Rows
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.transfers.exchange import Exchanger, StepBox
from dflash_runtime.compute.gpu.transfers.payload import PlacedSums
from dflash_runtime.compute.step_order import MOST_TOKENS

_MOST_CAPTURES = 1024
"""Captures kept; the least recently used is dropped. Each has some 20 kB of buffers per token."""
_TIMED = 8
"""Replays of a graph that is timed."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class CapturedLayer:
    """A bank's experts; captures of them last as long as the bank refers to this."""

    resident: ResidentLayer
    """By local ids."""
    token_box: StepBox | None = None
    """Mapped memory for steps of one token; None before the first."""


class CapturedExperts:
    """Captured steps of all banks of a backend; callers hold the backend's lock.

    Owns: graphs, and mapped memory of the host.
    """

    def __init__(self, ops: GpuOps) -> None:
        self._ops = ops
        self._exchanger: Exchanger | None = None
        self._boxes: dict[tuple[int, int, int], StepBox] = {}
        self._captures: OrderedDict[tuple[int, int], _Capture] = OrderedDict()

    def add_token(self, layer: CapturedLayer, batch: RoutedBatch, *, out: F64Array) -> None:
        """`add_steps` for one token, where every group is one pair: the fast path of decode."""
        box = layer.token_box
        num_pairs, num_used = batch.num_pairs, layer.resident.layer.num_experts_used
        if num_pairs > num_used:
            raise too_many_pairs(num_pairs, num_used)
        if box is None:
            box = layer.token_box = self._box(1, batch.hidden.shape[1], num_used)
        np.copyto(box.rows, batch.hidden)
        if num_pairs < num_used:
            box.ids.fill(-1)
        box.flat_ids[:num_pairs] = batch.expert_ids
        box.flat_weights[:num_pairs] = batch.weights
        capture = self._capture(layer, box, size=1)
        box.expect()
        capture.graph.replay()
        box.wait()
        np.add(out, box.sums, out=out)

    def add_steps(
        self,
        layer: CapturedLayer,
        *,
        hidden: F32Array,
        ids: I32Array,
        weights: F32Array,
        out: F64Array,
    ) -> None:
        """Add the weighted sums of a few tokens' experts to `out`.

        The batch is padded with rows without experts to the next size in STEP_SIZES.
        Shapes: hidden, out [T, H], T up to MOST_TOKENS; ids, weights [T, K].
        Raises: DeviceUnavailable.
        """
        num_tokens = hidden.shape[0]
        size = next(size for size in STEP_SIZES if size >= num_tokens)
        box = self._box(size, hidden.shape[1], ids.shape[1])
        box.rows[:num_tokens] = hidden
        box.ids[:num_tokens] = ids
        box.ids[num_tokens:] = -1
        box.weights[:num_tokens] = weights
        capture = self._capture(layer, box, size=size)
        box.expect()
        capture.graph.replay()
        box.wait()
        out += box.sums[:num_tokens]

    def token_s(self, layers: Sequence[CapturedLayer], num_experts: int) -> float:
        """Seconds that the device takes for `num_experts` of a token in one of these layers, which
        are alike: all of them in one graph, without the host. Raises: DeviceUnavailable."""
        device, steps, first = self._ops.device, self._ops.steps, layers[0].resident.layer
        ids = np.full((1, first.num_experts_used), -1, np.int32)
        ids[0, :num_experts] = np.arange(num_experts)
        choice = Choice(device.upload(ids), device.upload(np.ones(ids.shape, np.float32)))
        hidden = device.zeros((1, first.hidden_size), np.float32)

        def launch() -> None:
            for layer in layers:
                rows = steps.for_experts(Input(Rows(hidden, of_step=True)))
                sums = steps.sums(*hidden.shape)
                self._ops.step_experts.run(
                    layer.resident, choice, rows, out=sums.array, gives_sums=True
                )

        with self._ops.step_experts.uncounted():
            graph, _kept = self._recorded(launch)
        try:
            graph.replay()
            device.synchronize()
            begun_s = time.perf_counter()
            for _ in range(_TIMED):
                graph.replay()
            device.synchronize()
            return (time.perf_counter() - begun_s) / (_TIMED * len(layers))
        finally:
            graph.close()

    def forget_dropped(self) -> None:
        """Close captures of banks that no longer exist."""
        for key, capture in list(self._captures.items()):
            if capture.layer() is None:
                self._captures.pop(key).graph.close()

    def close(self) -> None:
        """Release everything; no step may be running."""
        for capture in self._captures.values():
            capture.graph.close()
        self._captures.clear()
        for box in self._boxes.values():
            box.close()
        self._boxes.clear()

    def _box(self, num_tokens: int, hidden_size: int, num_used: int) -> StepBox:
        key = num_tokens, hidden_size, num_used
        box = self._boxes.get(key)
        if box is None:
            box = self._boxes[key] = StepBox(
                self._ops.device, num_tokens=num_tokens, hidden_size=hidden_size, num_used=num_used
            )
        return box

    def _capture(self, layer: CapturedLayer, box: StepBox, *, size: int) -> _Capture:
        """The capture of this layer and size, made when first needed."""
        key = id(layer), size
        found = self._captures.get(key)
        if found is not None and found.layer() is layer:
            self._captures.move_to_end(key)
            return found
        self.forget_dropped()
        while len(self._captures) >= _MOST_CAPTURES:
            _, oldest = self._captures.popitem(last=False)
            oldest.graph.close()
        capture = self._captures[key] = self._captured(layer, box)
        return capture

    def _captured(self, layer: CapturedLayer, box: StepBox) -> _Capture:
        if self._exchanger is None:
            self._exchanger = Exchanger(self._ops.device)
        exchanger, resident = self._exchanger, layer.resident
        graph, kept = self._recorded(lambda: self._launch(exchanger, resident, box))
        return _Capture(weakref.ref(layer), graph, kept)

    def _recorded(self, launch: Callable[[], None]) -> tuple[Graph, list[Buffer]]:
        """A graph of what `launch` launches, and its buffers, which are to be kept: it always
        writes to the same ones."""
        device, buffers = self._ops.device, self._ops.steps.buffers
        with buffers.noted() as noted:
            launch()  # a trial, which compiles and allocates what is needed
        device.synchronize()
        with buffers.repeated(noted) as kept:
            graph = device.capture(launch)
        return graph, kept

    def _launch(self, exchanger: Exchanger, layer: ResidentLayer, box: StepBox) -> None:
        steps = self._ops.steps
        rows = steps.rows(*box.rows.shape)
        ids = steps.buffers.take(box.ids.shape, np.int32)
        weights = steps.buffers.take(box.weights.shape, np.float32)
        choice = Choice(ids.array, weights.array)
        exchanger.take(box, rows.array, choice)
        sums = steps.sums(*box.rows.shape)
        self._ops.step_experts.run(
            layer, choice, steps.for_experts(Input(rows)), out=sums.array, gives_sums=True
        )
        exchanger.give_sums(box, sums.array)


@dataclass(frozen=True, slots=True)
class _Capture:
    layer: weakref.ref[CapturedLayer]
    graph: Graph
    kept: list[Buffer]


class CupyExpertBank:
    """Implements backend.ExpertBank.

    `by_global` and `by_local` are the same experts by global and by local ids. Any thread may use
    it: `lock`, which guards the backend's buffers, captures and stream, is held for each batch.
    """

    def __init__(
        self,
        ops: GpuOps,
        by_global: ResidentLayer,
        by_local: ResidentLayer,
        *,
        captured: CapturedExperts,
        uploader: Uploader,
        lock: threading.RLock,
        room: SlotRoom | None = None,
        shared: SharedSlots | None = None,
    ) -> None:
        """`room`: of a bank that can be resized. `shared`: of one whose memory others share."""
        self.layer: MoeLayer = by_local.layer
        self.num_experts = by_local.num_resident
        self._lock = lock
        self._captured = captured
        self._uploader = uploader
        self.by_global = by_global
        self._ops = ops
        self.by_local = by_local
        self._steps = CapturedLayer(by_local)
        self._room = room
        self._shared = shared
        if shared is not None:
            shared.add((by_global, by_local))

    def num_missing(self, global_expert_ids: I32Array) -> int | None:
        with self._lock:
            return None if self._shared is None else self._shared.num_missing(global_expert_ids)

    def sibling(self, file: GgufFile, global_expert_ids: I32Array) -> CupyExpertBank:
        """Shares the weights; only tables, vectors and what is missing are new."""
        shared, global_ids = self._shared, global_expert_ids.astype(np.int64)
        assert shared is not None  # else something is missing
        with self._lock:
            places, new = shared.take(global_expert_ids)
            for slot, expert in new:
                self.by_global.fill(self._uploader, file, slot, global_expert_id=expert)
            by_global, by_local = (
                named_layer(
                    self._ops.device,
                    file,
                    self.layer,
                    weights=self.by_local.weights,
                    ids=(global_ids, names),
                    places=places,
                )
                for names in (global_ids, np.arange(places.size))
            )
            self._uploader.finish()
            return CupyExpertBank(
                self._ops,
                by_global,
                by_local,
                captured=self._captured,
                uploader=self._uploader,
                lock=self._lock,
                shared=shared,
            )

    def trim(self) -> None:
        """Slots that no bank uses have no memory from now on."""
        with self._lock:
            if self._shared is not None:
                self._shared.trim(self._ops.device)

    def replace(
        self,
        file: GgufFile,
        local_expert_ids: I32Array,
        global_expert_ids: I32Array,
        *,
        stage: ExpertStage | None = None,
    ) -> None:
        """Slots get other weights, under the same local ids."""
        assert stage is None or isinstance(stage, DeviceStage)  # this backend's
        by_global, by_local, device = self.by_global, self.by_local, self._ops.device
        slots = by_local.slot_of_expert[local_expert_ids].tolist()
        global_ids, local_ids = global_expert_ids.tolist(), local_expert_ids.tolist()
        slot_of_expert = by_global.slot_of_expert
        with self._lock:
            device.synchronize()
            for slot, global_expert_id in zip(slots, global_ids, strict=True):
                slot_of_expert[slot_of_expert == slot] = -1  # the expert that leaves
                native = None
                if stage is not None:
                    native = stage.matrices(self.layer.layer_id, global_expert_id)
                by_global.fill(
                    self._uploader, file, slot, global_expert_id=global_expert_id, native=native
                )
            for named, names in ((by_global, global_ids), (by_local, local_ids)):
                ids = list(zip(global_ids, names, strict=True))
                named.rename(device, file, slots, ids=ids)
            self._uploader.finish()

    @property
    def most_experts(self) -> int:
        return self.num_experts if self._room is None else self._room.most_experts

    def held_bytes(self, num_experts: int) -> int:
        return 0 if self._room is None else self._room.held_bytes(num_experts)

    def resize(self, file: GgufFile, global_expert_ids: I32Array) -> None:
        """Their slots hold other weights, and the last ones have no memory."""
        if self._room is None:
            raise ValueError("it was not loaded to be resized")
        with self._lock:
            resize(
                self._room,
                self._ops.device,
                self._uploader,
                file=file,
                named=(self.by_global, self.by_local),
                ids=global_expert_ids,
            )
            self.num_experts = global_expert_ids.size

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        """Raises: ValueError for a wrong shape or ids; DeviceUnavailable."""
        shape = batch.hidden_shape
        if shape != out.shape or shape[1:] != (self.layer.hidden_size,):
            expected = f"[T, {self.layer.hidden_size}]"
            raise ValueError(f"hidden {shape}, out {out.shape}, expected {expected}")
        if not batch.num_pairs:
            return
        if batch.expert_ids[0] < 0 or batch.expert_ids[-1] >= self.num_experts:
            raise ValueError(f"the batch has expert ids beyond 0 to {self.num_experts - 1}")
        with self._lock:
            if batch.phase is Phase.PREFILL:
                self._add_chunks(batch, HostSums(out))
                return
            hidden = batch.hidden
            if batch.num_tokens == 1:
                self._captured.add_token(self._steps, batch, out=out)
                return
            ids, weights = rectangular(batch, self.layer.num_experts_used)
            for first in range(0, batch.num_tokens, MOST_TOKENS):
                some = slice(first, first + MOST_TOKENS)
                self._captured.add_steps(
                    self._steps,
                    hidden=hidden[some],
                    ids=ids[some],
                    weights=weights[some],
                    out=out[some],
                )

    def sums_of(self, batch: RoutedBatch) -> PlacedSums:
        """Sums of a prefill never leave the device."""
        sums = PlacedSums(self._ops.payload, batch.hidden_shape)
        if batch.phase is Phase.PREFILL and batch.num_pairs:
            with self._lock:
                self._add_chunks(batch, sums)
        else:
            on_host = np.zeros(batch.hidden_shape)
            self.accumulate(batch, on_host)
            sums.add(HostSums(on_host))
        return sums

    @property
    def captured_layer(self) -> CapturedLayer:
        return self._steps

    def _add_chunks(self, batch: RoutedBatch, out: Sums) -> None:
        """Call with the lock held. Shapes: out [T, H]."""
        payload = self._ops.payload
        for first, piece in slice_tokens(batch, self._ops.chunks.max_chunk):
            sums = payload.sums(self._ops.chunk_experts.sums_of_batch(self.by_local, piece))
            num_tokens = piece.num_tokens
            is_whole = num_tokens == batch.num_tokens
            out.add(sums, None if is_whole else slice(first, first + num_tokens))


def rectangular(batch: RoutedBatch, num_used: int) -> tuple[I32Array, F32Array]:
    """A batch's pairs by token: ids, padded with -1, and weights.

    Shapes: both [T, K]. Raises: ValueError if a token has more than K pairs.
    """
    ids = np.full((batch.num_tokens, num_used), -1, np.int32)
    weights = np.zeros((batch.num_tokens, num_used), np.float32)
    expert_of_pair = np.repeat(batch.expert_ids, np.diff(batch.group_starts))
    order = np.argsort(batch.token_indices, kind="stable")
    tokens = batch.token_indices[order]
    place = np.arange(tokens.size) - np.searchsorted(tokens, tokens)
    if tokens.size and place.max() >= num_used:
        raise too_many_pairs(int(place.max()) + 1, num_used)
    ids[tokens, place] = expert_of_pair[order]
    weights[tokens, place] = batch.weights[order]
    return ids, weights


def too_many_pairs(num_pairs: int, num_used: int) -> ValueError:
    """The error for a token with too many pairs."""
    return ValueError(f"a token with {num_pairs} pairs, {num_used} experts are used")
