"""Chunks on the host, layer by layer: nothing is deferred there, so each part is timed itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_protocol.ids import AnyArray, I32Array, Phase
from dflash_runtime.compute.kv_cache import KvCache
from dflash_runtime.compute.model import Model, Pausable, RoutedExperts, Step, run_to_end


@dataclass(slots=True, eq=False)
class _TimedExperts:
    """Implements model.RoutedExperts with others, whose time it adds up."""

    experts: RoutedExperts[AnyArray]
    seconds: float = field(default=0.0)

    def __call__(
        self, layer_id: int, hidden: AnyArray, topk_ids: AnyArray, topk_weights: AnyArray
    ) -> Pausable[AnyArray]:
        started_s = time.perf_counter()
        result = yield from self.experts(layer_id, hidden, topk_ids, topk_weights)
        self.seconds += time.perf_counter() - started_s
        return result


def chunk_times(
    model: Model[AnyArray, Any],
    cache: KvCache,
    experts: RoutedExperts[AnyArray],
    *,
    token_ids: I32Array,
    position: int,
    layer_ids: Sequence[int],
) -> tuple[float, ...]:
    """Compute a chunk through some layers; returns the seconds of each layer without its experts,
    then those of each one's experts, and last of embedding and head, of the last row.

    Shapes: token_ids [T].
    """
    clock, timed = time.perf_counter, _TimedExperts(experts)
    trunks, of_experts = list[float](), list[float]()
    began_s = clock()
    step = model.place(Step.of_chunk(token_ids, position, cache, Phase.PREFILL))
    x = model.embed(step)
    outside_s = clock() - began_s
    for layer_id in layer_ids:
        timed.seconds, began_s = 0.0, clock()
        x = run_to_end(model.layer(layer_id, x, step, timed))
        trunks.append(clock() - began_s - timed.seconds)
        of_experts.append(timed.seconds)
    began_s = clock()
    np.argmax(model.head(x[-1:]))
    return *trunks, *of_experts, outside_s + clock() - began_s
