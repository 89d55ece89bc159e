"""A whole model on the CPU backend: steps layer by layer, and as a captured step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe
from dflash_protocol.batch import HostHidden, Pairs, RoutedBatch
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_runtime.compute.backend import ExpertBank
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.captured.step import CpuStep
from dflash_runtime.compute.kv_cache import KvCache, KvType
from dflash_runtime.compute.model import Pausable, Step, forward, run_to_end
from dflash_runtime.compute.trees import Tree


class HostSteps:
    """Owns the file and the backend until closed."""

    def __init__(self, path: Path, *, num_threads: int) -> None:
        self.file = GgufFile.open(path)
        self.backend = CpuBackend(num_threads=num_threads)
        self.model = self.backend.load_model(self.file, describe(self.file))
        self.spec = self.model.spec
        self.banks: dict[int, ExpertBank] = {
            layer.layer_id: self.backend.load_experts(
                self.file, layer, np.arange(layer.num_experts, dtype=np.int32)
            )
            for layer in self.spec.moe.layers
        }

    def new_cache(self, capacity: int = 96, kv_type: KvType = KvType.F16) -> KvCache:
        return self.backend.new_cache(self.spec, capacity, kv_type)

    def logits(
        self, cache: KvCache, ids: I32Array, first: int, tree: Tree | None = None
    ) -> F32Array:
        """Layer by layer. Shapes: ids [T]; result [T, V]."""
        phase = Phase.DECODE if ids.size == 1 else Phase.PREFILL
        step = Step.of_chunk(ids, first, cache, phase)
        if tree is not None:
            step = Step.of_tree(ids, tree, cache)
        return self.model.head(run_to_end(forward(self.model, step, self._experts)))

    def _experts(
        self, layer_id: int, hidden: F32Array, topk_ids: I32Array, topk_weights: F32Array
    ) -> Pausable[F32Array]:
        tokens = np.repeat(np.arange(hidden.shape[0], dtype=np.int32), topk_ids.shape[1])
        pairs = Pairs(tokens, topk_ids.reshape(-1), topk_weights.reshape(-1))
        sums = np.zeros(hidden.shape)
        batch = RoutedBatch.group(Phase.DECODE, HostHidden(hidden), pairs)
        self.banks[layer_id].accumulate(batch, sums)
        yield from ()
        return sums.astype(np.float32)

    def captured(self, cache: KvCache, check: Callable[[], None] = lambda: None) -> CpuStep:
        remote = cast(Any, _Nothing())
        return self.backend.captured_step(self.model, cache, self.banks, remote=remote, check=check)

    def close(self) -> None:
        self.backend.close()
        self.file.close()


class _Nothing:
    """Stands for owners that are not asked."""
