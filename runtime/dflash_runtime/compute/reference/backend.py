"""The reference backend: ReferenceOps and reference expert banks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType, dequantise
from dflash_adapters.spec import MoeLayer
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.backend import Chunking
from dflash_runtime.compute.host import PREFILL_CHUNK, HostBackend
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.reference.experts import ExpertCache, ReferenceExpertBank
from dflash_runtime.compute.reference.ops import ReferenceOps

_CACHE_BYTES = 256 << 20


class ReferenceBackend(HostBackend):
    """Implements backend.ComputeBackend."""

    name = "reference"
    # BLAS sums in an order that depends on shapes, so bits depend on the chunk.
    chunking = Chunking(PREFILL_CHUNK, None, invariant_from=None)

    def __init__(self) -> None:
        self._ops = ReferenceOps()
        self._cache = ExpertCache(_CACHE_BYTES)

    @property
    def numeric_class(self) -> str:
        return f"reference-1/numpy-{np.__version__}"

    @property
    def ops(self) -> ReferenceOps:
        return self._ops

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> ReferenceExpertBank:
        return ReferenceExpertBank(file, layer, global_expert_ids, cache=self._cache)

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def drop_experts(self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array) -> None:
        for global_expert_id in global_expert_ids.tolist():
            self._cache.drop(file, layer, global_expert_id)

    def warm_up(
        self,
        tensor_types: Iterable[TensorType],
        *,
        kv_type: KvType | None = None,
        is_recurrent: bool = False,
        asks_daemons: bool = False,
        beside_device: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compiles nothing; raises for a type that cannot be dequantised."""
        for tensor_type in tensor_types:
            layout = tensor_type.layout
            dequantise(
                np.zeros(layout.block_bytes, np.uint8), tensor_type, (layout.block_elements,)
            )

    def spin_for(self, spin_s: float) -> None:
        """Do nothing: there are no worker threads."""

    def idle(self) -> None:
        """Do nothing: there are no worker threads."""

    def close(self) -> None:
        self._cache.clear()
