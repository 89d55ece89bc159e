"""Routed experts of a GPU parent: those on its device without any work of the host.

Where all of a layer's experts are on the device, nothing leaves it. Else the choice and the hidden
rows come to the host, which asks others for their share; what is here is computed on the device
when the sums are added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase
from dflash_runtime.compute.cupy.ops import CupyOps
from dflash_runtime.compute.cupy.resident import ResidentLayer
from dflash_runtime.compute.cupy.values import Chosen, ExpertSums, Normed

ComputeElsewhere = Callable[..., F64Array]
"""``(layer_id, hidden [T, H], topk_ids [T, K], topk_weights [T, K], phase=…)`` to sums [T, H]."""


class DeviceMoe:
    """Implements ops.MoeBlock for one phase; `elsewhere` leaves out what is resident."""

    def __init__(
        self,
        ops: CupyOps,
        resident: Mapping[int, ResidentLayer],
        phase: Phase,
        elsewhere: ComputeElsewhere | None,
    ) -> None:
        self._ops = ops
        self._resident = resident
        self._phase = phase
        self._elsewhere = elsewhere

    def __call__(self, layer_id: int, hidden: Any, topk_ids: Any, topk_weights: Any) -> ExpertSums:
        assert isinstance(hidden, Normed)
        assert isinstance(topk_ids, Chosen)
        assert isinstance(topk_weights, Chosen)
        layer = self._resident[layer_id]
        sums = ExpertSums(layer, hidden, topk_ids, topk_weights, self._phase)
        if not layer.is_whole:
            assert self._elsewhere is not None
            device = self._ops.device
            rows: F32Array = self._ops.to_host(hidden)
            ids: I32Array = device.download(topk_ids.array)
            weights: F32Array = device.download(topk_weights.array)
            others = self._elsewhere(layer_id, rows, ids, weights, phase=self._phase)
            sums.others = device.upload(others)
        return sums
