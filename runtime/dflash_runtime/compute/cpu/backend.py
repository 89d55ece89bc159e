"""The CPU backend: compiled kernels on weights where they are mapped, float32 activations."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import MoeLayer
from dflash_adapters.quant import TensorType
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.cpu.compiling import numeric_class
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.matrix import as_matrix
from dflash_runtime.compute.cpu.matrix_kernels import expert_ffn_kernel
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.workers import Workers


class CpuBackend:
    """Implements backend.ComputeBackend with up to `num_threads` threads, the caller's among them.

    Weights of any type are multiplied as the float32 values they stand for; nothing is rounded to
    fewer bits. Results do not depend on `num_threads`.
    """

    name = "cpu"

    def __init__(self, *, num_threads: int) -> None:
        self._workers = Workers(num_threads)

    @cached_property
    def numeric_class(self) -> str:
        return numeric_class()

    @cached_property
    def ops(self) -> CpuOps:
        return CpuOps(self._workers)

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> CpuExpertBank:
        return CpuExpertBank(file, layer, global_expert_ids, self._workers)

    def warm_up(self, tensor_types: Iterable[TensorType]) -> None:
        expert_ffn_kernel()
        for tensor_type in tensor_types:
            columns = tensor_type.layout.block_elements
            data = np.zeros(tensor_type.row_bytes(columns), np.uint8)
            matrix = as_matrix(data, tensor_type, 1, columns)
            self.ops.embed(matrix, np.zeros(1, np.int32))
            for num_tokens in (1, 5):
                self.ops.linear(np.zeros((num_tokens, columns), np.float32), matrix)

    def close(self) -> None:
        self._workers.close()
