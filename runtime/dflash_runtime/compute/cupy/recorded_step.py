"""A decode step that was recorded once and is replayed for every token of a context bucket.

Token ids and positions lie on the device: a step reads what the one before it has chosen, so that
the host may start several without waiting for any. Nothing is allocated or compiled in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_adapters.ops import Model, MoeBlock
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cupy.attention_plan import context_bucket
from dflash_runtime.compute.cupy.device import DeviceArray, Graph
from dflash_runtime.compute.cupy.kv_cache import DeviceKvCache
from dflash_runtime.compute.cupy.ops import CupyOps
from dflash_runtime.compute.cupy.values import Product, Rows, StepPositions, StepTokens


class RecordedStep:
    """Steps of one token of one sequence; all experts must be on the device.

    `history` has every token at its position, once a step has chosen it.
    Shapes: history [capacity] int32.
    Owns: a graph of each context bucket that was met.
    """

    def __init__(
        self, ops: CupyOps, model: Model[Any], cache: DeviceKvCache, moe: MoeBlock[Any]
    ) -> None:
        device = ops.device
        self._ops = ops
        self._model = model
        self._cache = cache
        self._moe = moe
        self._token_ids = device.zeros(1, np.int32)
        self._positions = device.zeros(1, np.int32)
        self.history: DeviceArray = device.zeros(cache.capacity, np.int32)
        self._graphs: dict[int, tuple[Graph, Rows]] = {}
        self._last: Rows | None = None

    def begin(self, token_id: int, position: int) -> None:
        """The next step computes this token at this position."""
        self._cache.check_fits(position, 1)
        self._ops.device.write(self._token_ids, np.array([token_id], np.int32))
        self._ops.device.write(self._positions, np.array([position], np.int32))
        self._position = position

    def start(self) -> None:
        """Start a step: its likeliest token is the next one's, at the next position.

        Raises: ContextExceeded if there is no room for it.
        """
        self._cache.check_fits(self._position, 1)
        bucket = context_bucket(self._position + 1)
        if bucket not in self._graphs:
            self._graphs[bucket] = self._recorded(bucket)
        graph, self._last = self._graphs[bucket]
        graph.replay()
        self._position += 1

    def logits(self) -> F32Array:
        """Of the step that was started last, once it is done. Shapes: result [V]."""
        assert self._last is not None
        logits: F32Array = self._ops.device.download(self._last.array)[0]
        return logits

    def tokens(self, first: int, last: int) -> I32Array:
        """Tokens chosen for these positions, once everything that was started is done."""
        tokens: I32Array = self._ops.device.download(self.history)[first:last]
        return tokens

    def close(self) -> None:
        for graph, _ in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _recorded(self, bucket: int) -> tuple[Graph, Rows]:
        """Try the step out, which compiles and allocates what it needs, then record it."""
        device = self._ops.device
        before = [device.download(array) for array in (self._token_ids, self._positions)]
        self._record(bucket)
        device.synchronize()
        for array, values in zip((self._token_ids, self._positions), before, strict=True):
            device.write(array, values)
        results: list[Rows] = []
        graph = device.capture(lambda: results.append(self._record(bucket)))
        return graph, results[0]

    def _record(self, bucket: int) -> Rows:
        tokens: Any = StepTokens(self._token_ids)
        positions: Any = StepPositions(self._positions, bucket)
        hidden = self._model.forward(tokens, positions, self._cache, self._moe)
        logits = self._model.head(hidden)
        assert isinstance(logits, Product)
        return self._ops.steps.pick(logits, self._token_ids, self._positions, self.history)
