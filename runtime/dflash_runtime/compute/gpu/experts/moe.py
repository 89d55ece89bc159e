"""Routed experts of a GPU parent, local ones on its device, remote ones through the host.

If all of a layer's experts are on the device, nothing leaves it. Otherwise the choice is copied to
the host, and if it has remote experts their owners are asked, while the device computes the local
ones. Rows of a chunk and the sums that return stay on the device unless an owner computes on a CPU;
the experts of such an owner may be computed locally, see offload.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_protocol.batch import Hidden, HostHidden, Sums
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_runtime.compute.backend import RemoteExperts
from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.experts.offload import ExpertOffload
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.values import Chosen, ExpertSums, F32Rows, Normed
from dflash_runtime.compute.gpu.ops.ops import CupyOps


class DeviceMoe:
    """Implements ops.MoeBlock for one phase. Used by the thread that runs the model.

    `resident`: the experts computed here; `remote` asks for the rest, None if every layer is whole.
    `offload` computes remote experts of chunks if that is faster than asking.
    """

    def __init__(
        self,
        ops: CupyOps,
        resident: Mapping[int, ResidentLayer],
        phase: Phase,
        *,
        remote: RemoteExperts | None,
        offload: ExpertOffload | None = None,
    ) -> None:
        self._offload = offload
        self._ops = ops
        self._resident = resident
        self._phase = phase
        self._remote = remote

    def __call__(self, layer_id: int, hidden: Any, topk_ids: Any, topk_weights: Any) -> ExpertSums:
        """Raises: DaemonUnavailable if a remote expert's owner is lost and it has no fallback."""
        assert isinstance(hidden, Normed | F32Rows)
        assert isinstance(topk_ids, Chosen)
        assert isinstance(topk_weights, Chosen)
        layer, remote = self._resident.get(layer_id), self._remote
        if self._phase is Phase.PREFILL or layer is None or not layer.is_whole:
            self._ops.steps.choose(topk_ids)
        sums = ExpertSums(layer, hidden, topk_ids, topk_weights, self._phase)
        if remote is None:
            return sums
        num_tokens, num_used = topk_ids.array.shape
        if layer is None or not layer.is_whole:
            device, both = self._ops.device, self._both(topk_ids, topk_weights)
            ids = device.download(topk_ids.array) if both is None else both[0]
            if layer is None or _has_remote(layer.slot_of_expert, ids):
                weights = device.download(topk_weights.array) if both is None else both[1]
                sums.parts = self._parts(layer_id, sums, (ids, weights), remote)
                return sums
            remote.count_selections(layer_id, ids)
        remote.count_local(self._phase, num_tokens=num_tokens, num_pairs=num_tokens * num_used)
        return sums

    def _both(self, topk_ids: Chosen, topk_weights: Chosen) -> tuple[I32Array, F32Array] | None:
        """Wait for ids and weights, if a single copy brings both. Shapes: both [T, K]."""
        if topk_ids.both is None or topk_ids.both is not topk_weights.both:
            return None
        both: I32Array = self._ops.device.download(topk_ids.both)
        return both[0], both[1].view(np.float32)

    def _parts(
        self,
        layer_id: int,
        sums: ExpertSums,
        chosen: tuple[I32Array, F32Array],
        remote: RemoteExperts,
    ) -> tuple[Buffer, ...]:
        """Sums of the local experts, if any, and of the remote ones.

        Shapes: chosen [T, K], of global ids; all results [T, H] float64.
        """
        (ids, weights), offload = chosen, self._offload
        hidden = self._hidden_of(sums)
        offloaded = None if offload is None else offload.begin(layer_id, ids, remote)
        # Launched first, so that the device works while the host groups pairs and sends rows.
        local = None if sums.layer is None else self._ops.local_sums(sums)
        ticket = remote.begin(
            layer_id, hidden, ids, weights, phase=self._phase, offloaded=offloaded
        )
        try:
            if offload is not None and offloaded is not None:
                local = offload.sums(layer_id, sums, experts=offloaded, before=local)
        except BaseException:
            if ticket is not None:
                remote.abandon(ticket)
            raise
        parts = () if local is None else (local,)
        return parts if ticket is None else (*parts, self._on_device(remote.finish(ticket)))

    def _hidden_of(self, sums: ExpertSums) -> Hidden:
        """The experts' input rows; those of a chunk stay on the device.

        They are a copy, which may be sent while the device goes on with other rows.
        """
        if self._phase is not Phase.PREFILL:
            return HostHidden(self._ops.hidden_of(sums))
        return self._ops.payload.rows(self._ops.chunks.copy_of_normed(sums.x).array)

    def _on_device(self, sums: Sums) -> Buffer:
        """Remote sums as a buffer of the device. Shapes: sums [T, H]."""
        if not sums.is_on_device:
            return self._ops.uploaded(sums.to_host())
        return Buffer(self._ops.payload.array_of_sums(sums))


def _has_remote(slot_of_expert: I32Array, ids: I32Array) -> bool:
    """Whether remote experts were chosen. Shapes: slot_of_expert [E]; ids [T, K]."""
    if (slot_of_expert[ids[0]] < 0).any():  # mostly the first of thousands of tokens decides
        return True
    return bool((slot_of_expert[ids] < 0).any())
