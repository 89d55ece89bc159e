"""Decode steps that belong to no sequence, to time a backend's threads with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dflash_protocol.batch import group_by_expert
from dflash_protocol.ids import AnyArray, F32Array, I32Array, Phase
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.model import Model, Pausable, Step, forward, run_to_end
from dflash_runtime.compute.thread_trial import OnePass


def trial_steps(
    backend: ComputeBackend,
    model: Model[AnyArray, Any],
    banks: Mapping[int, ExpertBank],
    *,
    kv_type: KvType,
) -> OnePass:
    """Steps of one token at position 0, of a model on the host whose experts are all in `banks`.

    A part is a layer. The cache is made by the first pass; nothing is counted.
    """
    caches: list[Any] = []

    def one_pass(*, before: Callable[[], None], after: Callable[[], None]) -> None:
        if not caches:
            caches.append(backend.new_cache(model.spec, 1, kv_type))
        step = Step.of_chunk(np.zeros(1, np.int32), 0, caches[0], Phase.DECODE)
        experts = _LocalExperts(banks)
        run_to_end(
            forward(
                model,
                step,
                experts,
                before_layer=before,
                on_layer=lambda layer_id, x: after(),
            )
        )

    return one_pass


class _LocalExperts:
    """Implements model.RoutedExperts on the host, with every expert of each layer in one bank."""

    def __init__(self, banks: Mapping[int, ExpertBank]) -> None:
        self._banks = banks

    def __call__(
        self, layer_id: int, hidden: F32Array, topk_ids: I32Array, topk_weights: F32Array
    ) -> Pausable[F32Array]:
        num_tokens, num_used = topk_ids.shape
        batch = group_by_expert(
            hidden,
            np.repeat(np.arange(num_tokens, dtype=np.int32), num_used),
            topk_ids.reshape(-1),
            weights=topk_weights.reshape(-1),
            phase=Phase.DECODE,
        )
        sums = np.zeros(hidden.shape)
        self._banks[layer_id].accumulate(batch, sums)
        yield from ()
        return sums.astype(np.float32)
