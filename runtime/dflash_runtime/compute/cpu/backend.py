"""The CPU backend: compiled kernels on weights as mapped from the file, float32 activations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import MoeLayer
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import I32Array
from dflash_protocol.ring.compiled_experts import CompiledExperts
from dflash_runtime.compute.backend import ExpertBank
from dflash_runtime.compute.cpu.compile import compiling
from dflash_runtime.compute.cpu.compile.kernel_cache import keeping_in
from dflash_runtime.compute.cpu.compile_ahead import OnProgress, compile_ahead, jobs_for, run_job
from dflash_runtime.compute.cpu.compiled_banks import compile_banks
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers, check_num_threads
from dflash_runtime.compute.host import HostBackend
from dflash_runtime.compute.kv_cache import KvType


class CpuBackend(HostBackend):
    """Implements backend.ComputeBackend on up to `num_threads` threads, the caller's included.

    Weights of any type are multiplied as the float32 values they stand for; nothing is rounded to
    fewer bits. Results do not depend on `num_threads`. Kernels that `warm_up` compiles are kept in
    `cache_dir` (see `cache_folder`).
    Raises: SettingsError on a CPU that the kernels cannot run on.
    """

    name = "cpu"

    def __init__(self, *, num_threads: int, cache_dir: str | None = None) -> None:
        if not compiling.is_supported_cpu():
            raise SettingsError("backend cpu needs a CPU that converts halves (F16C on x86-64)")
        check_num_threads(num_threads)
        self._num_threads = num_threads
        self._cache_dir = cache_dir
        self._scratch = Scratch()

    @cached_property
    def numeric_class(self) -> str:
        return compiling.numeric_class()

    @cached_property
    def _workers(self) -> Workers:
        return Workers(self._num_threads)

    @cached_property
    def ops(self) -> CpuOps:
        return CpuOps(self._workers, self._scratch)

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> CpuExpertBank:
        return CpuExpertBank(file, layer, global_expert_ids, self._workers, self._scratch)

    def drop_experts(self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array) -> None:
        """Do nothing: banks are views of the file."""

    def compile_banks(
        self, banks: Mapping[int, ExpertBank], *, max_tokens: int, max_experts_used: int
    ) -> CompiledExperts | None:
        with keeping_in(self._cache_dir):
            return compile_banks(
                banks, self._workers, max_tokens=max_tokens, max_experts_used=max_experts_used
            )

    def warm_up(
        self,
        tensor_types: Iterable[TensorType],
        *,
        kv_type: KvType | None = None,
        is_recurrent: bool = False,
        on_progress: OnProgress | None = None,
    ) -> None:
        jobs = jobs_for(tensor_types, kv_type, is_recurrent=is_recurrent)
        with keeping_in(self._cache_dir):
            compile_ahead(jobs, on_progress or (lambda num_done, num_total: None))
            for job in jobs:
                run_job(job)

    def idle(self) -> None:
        self._workers.idle()

    def close(self) -> None:
        if "_workers" in vars(self):
            self._workers.close()
