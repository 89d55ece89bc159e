"""The CPU backend: compiled kernels on weights as mapped from the file, float32 activations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import MoeLayer
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import AnyArray, I32Array, I64Array, Phase
from dflash_protocol.numeric_class import in_step_order, is_in_step_order
from dflash_protocol.ring.compiled_experts import CompiledExperts
from dflash_runtime.compute.backend import ExpertBank, MailAnswering, MailedExperts
from dflash_runtime.compute.cores import (
    LEAST_TIMED,
    ThreadCounts,
    default_counts,
    most_beside_device,
)
from dflash_runtime.compute.cpu.arena_keeper import ArenaKeeper
from dflash_runtime.compute.cpu.captured.step import CpuStep
from dflash_runtime.compute.cpu.compile import compiling
from dflash_runtime.compute.cpu.compile.kernel_cache import keeping_in
from dflash_runtime.compute.cpu.compile_ahead import OnProgress, compile_ahead, jobs_for, run_job
from dflash_runtime.compute.cpu.compiled_banks import compile_banks
from dflash_runtime.compute.cpu.experts import CpuExpertBank, with_others
from dflash_runtime.compute.cpu.host_arena import HostArena
from dflash_runtime.compute.cpu.kv_cache import CpuKvCache
from dflash_runtime.compute.cpu.mail import CpuMail
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.routers_ahead import routers_ahead
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers, check_num_threads
from dflash_runtime.compute.expert_arena import ArenaOptions
from dflash_runtime.compute.host import GROUP_TOKENS, HostBackend
from dflash_runtime.compute.host_model import HostModel
from dflash_runtime.compute.kv_cache import KvCache, KvType
from dflash_runtime.compute.model import Model
from dflash_runtime.compute.thread_trial import (
    OnePass,
    counts_to_try,
    fastest_count,
    is_busy,
    keep_count,
    kept_count,
)
from dflash_runtime.compute.topology import read_topology

_LOG = logging.getLogger(__name__)

_ROUTERS_PART, _FEW_BYTES = 50, 4 << 20
"""Of an arena's memory, what routers for predictions may take, or so many bytes of any."""


class CpuBackend(HostBackend):
    """Implements backend.ComputeBackend on up to `num_threads` threads, the caller's included.

    None: as many as suit the machine; see `cores.default_counts`, and `choose_threads`.

    Weights of any type are multiplied as the float32 values they stand for; nothing is rounded to
    fewer bits. Results do not depend on `num_threads`. Kernels that `warm_up` compiles are kept in
    `cache_dir` (see `cache_folder`).
    Raises: SettingsError on a CPU that the kernels cannot run on.
    """

    name = "cpu"

    def __init__(self, *, num_threads: int | None = None, cache_dir: str | None = None) -> None:
        if not compiling.is_supported_cpu():
            raise SettingsError("backend cpu needs a CPU that converts halves (F16C on x86-64)")
        self._topology = None if num_threads is not None else read_topology()
        if self._topology is not None:
            self._counts = default_counts(self._topology)
        elif num_threads is not None:
            check_num_threads(num_threads)
            self._counts = ThreadCounts(num_threads, num_threads)
        self._cache_dir = cache_dir
        self.answering: MailAnswering | None = CpuMail(cache_dir)
        self._scratch = Scratch()

    @cached_property
    def numeric_class(self) -> str:
        return compiling.numeric_class()

    def class_beside(self, parent_class: str) -> str:
        own = self.numeric_class
        return in_step_order(own) if is_in_step_order(parent_class) else own

    def bank_beside(self, parent_class: str, bank: ExpertBank) -> ExpertBank:
        if not (is_in_step_order(parent_class) and isinstance(bank, CpuExpertBank)):
            return bank
        with keeping_in(self._cache_dir):
            return bank.in_step_order()

    @property
    def num_threads(self) -> int:
        return self._counts.prompts

    @cached_property
    def _workers(self) -> Workers:
        workers = Workers(self._counts.prompts)
        workers.use_for_decode(self._counts.decode)
        return workers

    @cached_property
    def ops(self) -> CpuOps:
        return CpuOps(self._workers, self._scratch)

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> CpuExpertBank:
        return CpuExpertBank(file, layer, global_expert_ids, self._workers, self._scratch)

    def load_resizable(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> CpuExpertBank:
        """With room for all experts of the layer: they lie in the mapped file anyway."""
        every = with_others(global_expert_ids, layer.num_experts)
        bank = self.load_experts(file, layer, every)
        bank.num_experts = global_expert_ids.size
        return bank

    def bring_experts(
        self,
        file: GgufFile,
        banks: Mapping[int, ExpertBank],
        options: ArenaOptions,
    ) -> HostArena:
        ours = {i: bank for i, bank in banks.items() if isinstance(bank, CpuExpertBank)}
        most_bytes, routers = max(options.num_bytes // _ROUTERS_PART, _FEW_BYTES), {}
        if options.looks_ahead:
            routers = routers_ahead(file, ours, most_bytes=most_bytes)
        with keeping_in(self._cache_dir):
            arena = HostArena(file, [*ours.values()], options, routers=routers)
        keeper = ArenaKeeper(arena, options)
        arena.before_close(keeper.close)
        keeper.start()
        self.chunking = replace(self.chunking, grouped=GROUP_TOKENS)
        return arena

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def drop_experts(self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array) -> None:
        """Do nothing: banks are views of the file."""

    def captured_step(
        self,
        model: Model[AnyArray, Any],
        cache: KvCache,
        banks: Mapping[int, ExpertBank],
        *,
        remote: MailedExperts,
        check: Callable[[], None],
        keeps_choices: bool = False,
    ) -> CpuStep:
        """Never None."""
        assert isinstance(model, HostModel)
        assert isinstance(cache, CpuKvCache)
        here = {
            layer_id: bank for layer_id, bank in banks.items() if isinstance(bank, CpuExpertBank)
        }
        is_whole = all(
            layer.layer_id in here and here[layer.layer_id].has_all_experts
            for layer in model.spec.moe.layers
        )
        return CpuStep(
            self.ops,
            model,
            cache,
            banks=here,
            owners=None if is_whole else remote,
            check=check,
            keeps_choices=keeps_choices,
        )

    def take_selections(self, banks: Mapping[int, ExpertBank]) -> dict[tuple[Phase, int], I64Array]:
        taken: dict[tuple[Phase, int], I64Array] = {}
        for layer_id, bank in banks.items():
            if isinstance(bank, CpuExpertBank) and bank.selections.any():
                # Recorded steps count: of a prompt's chunks the host sees the routing.
                taken[Phase.DECODE, layer_id] = bank.selections.copy()
                bank.selections[:] = 0
        return taken

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
        asks_daemons: bool = False,
        beside_device: bool = False,
        on_progress: OnProgress | None = None,
    ) -> None:
        jobs = jobs_for(
            tensor_types,
            kv_type,
            is_recurrent=is_recurrent,
            asks_daemons=asks_daemons,
            beside_device=beside_device,
        )
        with keeping_in(self._cache_dir):
            compile_ahead(jobs, on_progress or (lambda num_done, num_total: None))
            for job in jobs:
                run_job(job)

    def choose_threads(
        self, file: GgufFile, one_pass: OnePass | None, *, beside_device: bool = False
    ) -> None:
        """Set how many threads take part in decode steps, unless `num_threads` was given."""
        topology, default = self._topology, self._counts
        if topology is None or default.prompts < LEAST_TIMED:
            return
        workers = self._workers
        chosen = kept_count(file, topology, self._cache_dir)
        if chosen is None and one_pass is not None and not is_busy():
            counts = counts_to_try(default)
            try:
                chosen = fastest_count(one_pass, counts, workers.use_for_decode)
            except Exception as error:  # what is wrong with the model is reported when it is used
                # docs: decode steps use the machine's default number of threads
                _LOG.info("threads of decode steps could not be timed: %s", error)
            if chosen is not None:
                keep_count(chosen, file, topology, cache_dir=self._cache_dir)
                # docs: once for a model on a machine; `--threads` sets another number
                _LOG.info("decode steps are fastest with %d of %d threads", chosen, default.prompts)
        chosen = chosen or default.decode
        workers.use_for_decode(
            min(chosen, most_beside_device(topology)) if beside_device else chosen
        )

    def spin_for(self, spin_s: float) -> None:
        self._workers.spin_for(spin_s)

    def idle(self) -> None:
        self._workers.idle()

    def close(self) -> None:
        if "_workers" in vars(self):
            self._workers.close()
