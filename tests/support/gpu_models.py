"""A whole model on a KernelDevice, real or emulated, and the same model on the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe, read_spec
from dflash_protocol.ids import AnyArray, F32Array, I32Array, Phase
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.run.captured_step import GraphStep
from dflash_runtime.compute.gpu.run.step_path import LocalPath
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.model import Step, forward, run_to_end
from support.architectures import RANDOM
from support.poison import Poison

SHAPES = {name: module.SHAPE_ON_GPU for name, module in RANDOM.items()}


class GpuModel:
    """A model with all experts on one device; result buffers are poisoned before each run."""

    def __init__(
        self, path: Path, device: KernelDevice, *, kv_type: KvType, capacity: int = 96
    ) -> None:
        self.poison = Poison(device)
        self.backend = CupyBackend(device, max_chunk=64, scratch_bytes=16 << 20)
        self.file = GgufFile.open(path)
        self.spec = read_spec(self.file)
        self.model = self.backend.load_model(self.file, describe(self.file))
        self.banks = {
            layer.layer_id: self.backend.load_experts(
                self.file, layer, np.arange(layer.num_experts, dtype=np.int32)
            )
            for layer in self.spec.moe.layers
        }
        self.cache = self.backend.new_cache(self.spec, capacity, kv_type)
        self.poison.begin()

    def logits(self, ids: I32Array, chunks: Sequence[int]) -> F32Array:
        """Logits of every position, computed in chunks. Shapes: ids [T]; result [T, V]."""
        rows, first = [], 0
        for size in chunks:
            phase = Phase.DECODE if size == 1 else Phase.PREFILL
            moe = self.backend.moe(self.banks, phase, None)
            self.poison.again()
            step = Step.of_chunk(ids[first : first + size], first, self.cache, phase)
            hidden = run_to_end(forward(self.model, step, moe))
            rows.append(self.backend.to_host(self.model.head(hidden)))
            first += size
        assert first == ids.size
        return np.concatenate(rows)

    def captured_step(self) -> GraphStep:
        moe = self.backend.moe(self.banks, Phase.DECODE, None)
        return GraphStep(self.backend.ops, self.model, self.cache, home=LocalPath(moe))

    def close(self) -> None:
        self.poison.close()
        self.backend.close()
        self.file.close()


def reference_logits(path: Path, ids: I32Array, kv_type: KvType) -> F32Array:
    """Logits of the reference backend. Shapes: ids [T]; result [T, V]."""
    with Engine.open(path, backend="reference", kv_type=kv_type.value) as engine:
        return engine.logits(ids.tolist())


def error_of(logits: F32Array, reference: F32Array) -> float:
    """Root mean square error, relative to that of the logits; NaN if any is NaN."""
    return float(np.sqrt(((logits - reference) ** 2).mean() / (reference**2).mean()))


def largest_error(found: AnyArray, expected: AnyArray) -> float:
    """The largest error relative to the largest value; infinite if any is NaN."""
    error = np.abs(found - expected).max() / np.abs(expected).max()
    return float(error) if error == error else float("inf")
