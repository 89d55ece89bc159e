"""Routed experts of a GPU that has a part of each layer: pairs of the others are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_protocol.ids import Phase
from dflash_runtime.compute import ExpertBank
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.experts.experts import CupyExpertBank
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe, HereRoute
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.model.model import GpuModel
from dflash_runtime.compute.gpu.run.captured_step import GraphStep
from dflash_runtime.compute.gpu.run.step_path import LocalPath
from dflash_runtime.compute.kv_cache import KvCache
from dflash_runtime.compute.model import Model


class PartialExperts:
    """The same weights as the banks', with only some of their experts. Immutable."""

    def __init__(
        self,
        backend: CupyBackend,
        banks: Mapping[int, ExpertBank],
        here: Mapping[int, npt.NDArray[np.bool_]],
    ) -> None:
        """`here`: by layer id, at least one expert. Shapes: each [E]."""
        self._backend = backend
        self._layers: dict[int, ResidentLayer] = {}
        for layer_id, mask in here.items():
            bank = banks[layer_id]
            assert isinstance(bank, CupyExpertBank)
            layer = bank.by_global.only(backend.device, mask)
            assert layer is not None
            self._layers[layer_id] = layer

    def moe(self, phase: Phase) -> DeviceMoe:
        """What a model calls in a phase."""
        ops, layers = self._backend.ops, self._layers
        return DeviceMoe(lambda layer_id: HereRoute(ops, layers[layer_id], phase))

    def captured_step(self, model: Model[Any, Any], cache: KvCache) -> GraphStep:
        assert isinstance(model, GpuModel)
        assert isinstance(cache, DeviceKvCache)
        home = LocalPath(self.moe(Phase.DECODE))
        return GraphStep(self._backend.ops, model, cache, home=home)
