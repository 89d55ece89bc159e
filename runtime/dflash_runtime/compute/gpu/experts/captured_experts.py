"""Expert steps for host code (ExpertBank.accumulate), captured for each layer and number of tokens.

Inputs and sums lie in mapped memory: a step is a single graph launch, without copies by the driver.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from dflash_protocol.batch import RoutedBatch
from dflash_protocol.ids import F32Array, F64Array, I32Array
from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.device.device import Graph
from dflash_runtime.compute.gpu.launch.decode_arrays import STEP_SIZES
from dflash_runtime.compute.gpu.launch.decode_experts import Choice
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.rows import Input
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.transfers.exchange import Exchanger, StepBox

_MOST_CAPTURES = 1024
"""Captures kept; the least recently used is dropped. Each has some 20 kB of buffers per token."""


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
        device, buffers = self._ops.device, self._ops.steps.buffers
        if self._exchanger is None:
            self._exchanger = Exchanger(device)
        with buffers.noted() as noted:
            # A trial, which compiles and allocates what is needed.
            self._launch(self._exchanger, layer.resident, box)
        device.synchronize()
        exchanger, resident = self._exchanger, layer.resident
        # The graph's buffers are kept: a graph always writes to the same ones.
        with buffers.repeated(noted) as kept:
            graph = device.capture(lambda: self._launch(exchanger, resident, box))
        return _Capture(weakref.ref(layer), graph, kept)

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


def too_many_pairs(num_pairs: int, num_used: int) -> ValueError:
    """The error for a token with too many pairs."""
    return ValueError(f"a token with {num_pairs} pairs, {num_used} experts are used")


@dataclass(frozen=True, slots=True)
class _Capture:
    layer: weakref.ref[CapturedLayer]
    graph: Graph
    kept: list[Buffer]
