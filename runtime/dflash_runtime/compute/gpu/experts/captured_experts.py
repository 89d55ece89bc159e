"""Steps of experts that a host asks for: captured once for each layer and number of tokens.

What goes in and out lies in memory that host and device both see, so that a step is one word to the
driver, and no copy has to be asked of it.
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
from dflash_runtime.compute.gpu.layers.values import F32Rows
from dflash_runtime.compute.gpu.ops.ops import CupyOps
from dflash_runtime.compute.gpu.transfers.exchange import Exchanger, StepBox

_MOST_CAPTURES = 1024
"""Those that were needed last are kept: of each, a graph and buffers of some 20 kB a token."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class CapturedLayer:
    """A bank's experts, whose steps stay captured for as long as the bank holds this."""

    resident: ResidentLayer
    """Named by local ids."""
    token_box: StepBox | None = None
    """What steps of one token go through, once there was one."""


class CapturedExperts:
    """Steps of all banks of a backend, which holds its lock while one is computed.

    Owns: graphs, and mapped memory of the host.
    """

    def __init__(self, ops: CupyOps) -> None:
        self._ops = ops
        self._exchanger: Exchanger | None = None
        self._boxes: dict[tuple[int, int, int], StepBox] = {}
        self._captures: OrderedDict[tuple[int, int], _Capture] = OrderedDict()

    def add_token(self, layer: CapturedLayer, batch: RoutedBatch, *, out: F64Array) -> None:
        """`add_steps` of one token, whose every group is one pair: what decode asks for, so that it
        must cost no more than it needs to."""
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

        Rows are added to those of a batch until there are kernels for so many: without experts.
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
        """Give back what was captured of banks that are no more."""
        for key, capture in list(self._captures.items()):
            if capture.layer() is None:
                self._captures.pop(key).graph.close()

    def close(self) -> None:
        """Give back everything; nothing of it may still run."""
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
        """Tried out and captured when it is first needed."""
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
            self._launch(
                self._exchanger, layer.resident, box
            )  # compiles and allocates what is needed
        device.synchronize()
        exchanger, resident = self._exchanger, layer.resident
        # Others may use buffers between two steps, but a graph always writes to the same ones.
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
        sums = steps.sums_of(layer, F32Rows(rows.array, rows.buffers), choice)
        exchanger.give_sums(box, sums)


def too_many_pairs(num_pairs: int, num_used: int) -> ValueError:
    """Of one token."""
    return ValueError(f"a token with {num_pairs} pairs, {num_used} experts are used")


@dataclass(frozen=True, slots=True)
class _Capture:
    layer: weakref.ref[CapturedLayer]
    graph: Graph
    kept: list[Buffer]
