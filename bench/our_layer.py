"""Our expert layers through the public backend: grouping by expert, then `accumulate`."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from bench.machine import touch_pages
from bench.workload import Work

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol import numeric_class
from dflash_protocol.batch import group_by_expert
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.settings import load_settings
from dflash_runtime.compute import BackendName, make_backend


class OurLayers:
    """The expert layers of one file, with `num_threads` threads.

    `in_step_order`: few tokens have the bits of a GPU's decode steps, as beside one.
    """

    def __init__(self, path: Path, *, num_threads: int, in_step_order: bool = False) -> None:
        self._most_of_step = 8 if in_step_order else 1
        self._file = GgufFile.open(path)
        layers = read_spec(self._file).moe.layers
        self._backend = make_backend(
            BackendName.CPU, num_threads=num_threads, cpu_tier=load_settings().cpu_tier
        )
        self._backend.warm_up({each.tensor_type for layer in layers for each in layer.projections})
        beside = numeric_class.in_step_order("") if in_step_order else ""
        self.banks = [
            self._backend.bank_beside(
                beside,
                self._backend.load_experts(
                    self._file, layer, np.arange(layer.num_experts, dtype=np.int32)
                ),
            )
            for layer in layers
        ]
        for info in self._file.tensors.values():
            touch_pages(self._file.tensor_bytes(info.name))

    def numeric_class(self) -> str:
        """Names the kernels in use."""
        return self._backend.numeric_class

    def run(self, works: list[Work]) -> float:
        """Seconds for the layers of these works, grouping by expert included."""
        seconds = 0.0
        for work in works:
            seconds += self._accumulate(work, np.zeros(work.hidden.shape, np.float64))
        return seconds

    def result(self, work: Work) -> F64Array:
        """Shapes: result [T, H] float64."""
        out = np.zeros(work.hidden.shape, np.float64)
        self._accumulate(work, out)
        return out

    def end_row(self) -> None:
        """Do nothing: no state is kept from row to row."""

    def close(self) -> None:
        """End the threads and close the file. Idempotent."""
        self.banks.clear()
        self._backend.close()
        self._file.close()

    def _accumulate(self, work: Work, out: F64Array) -> float:
        token_indices = np.repeat(np.arange(work.num_tokens, dtype=np.int32), work.num_used)
        expert_ids, weights = work.expert_ids.reshape(-1), work.weights.reshape(-1)
        phase = Phase.DECODE if work.num_tokens <= self._most_of_step else Phase.PREFILL
        started_s = time.perf_counter()
        batch = group_by_expert(
            work.hidden, token_indices, expert_ids, weights=weights, phase=phase
        )
        self.banks[work.layer_index].accumulate(batch, out)
        return time.perf_counter() - started_s
