"""What all backends that compute in host memory have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Description
from dflash_adapters.spec import ModelSpec, MoeLayer
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.ids import AnyArray, F32Array, I32Array, I64Array, Phase
from dflash_protocol.ring.compiled_experts import CompiledExperts
from dflash_runtime.compute.backend import (
    CapturedStep,
    Chunking,
    ExpertBank,
    ExpertMemory,
    MailAnswering,
    MailedExperts,
    RemoteExperts,
    argmax_of,
)
from dflash_runtime.compute.expert_arena import ArenaOptions, ExpertArena
from dflash_runtime.compute.host_model import HostExperts, HostModel
from dflash_runtime.compute.host_ops import Ops
from dflash_runtime.compute.kv_cache import KvCache, KvType
from dflash_runtime.compute.memory import host_memory
from dflash_runtime.compute.model import Model, Pausable
from dflash_runtime.compute.thread_trial import OnePass
from dflash_runtime.compute.topology import processor_name

PREFILL_CHUNK = 512
GROUP_TOKENS = 4096
"""Tokens of a prompt whose chunks go through a layer one after the other where experts are read
from the disk: once for all of them."""
ONE_TOKEN = ((Phase.DECODE, 1),)
"""Enough of a trial for kernels that are compiled ahead."""


class HostBackend:
    """The methods of backend.ComputeBackend that only a device needs, without one."""

    is_host = True
    mover = None
    answering: MailAnswering | None = None
    chunking = Chunking(PREFILL_CHUNK, None, invariant_from=1)
    trial_batches = ONE_TOKEN

    @property
    def ops(self) -> Ops:
        """The operations that its models are computed with."""
        raise NotImplementedError

    @property
    def numeric_class(self) -> str:
        raise NotImplementedError

    def class_beside(self, parent_class: str) -> str:
        del parent_class
        return self.numeric_class

    def bank_beside(self, parent_class: str, bank: ExpertBank) -> ExpertBank:
        del parent_class
        return bank

    @property
    def num_threads(self) -> int:
        return 1

    @cached_property
    def device_name(self) -> str:
        return processor_name()

    def device_memory(self) -> None:
        """None: it has none."""

    def free_memory_bytes(self) -> int:
        return host_memory().free_bytes

    def expert_memory(self, file: GgufFile, layers: Iterable[MoeLayer]) -> ExpertMemory:
        """Of the page cache, as experts are read where they are mapped."""
        memory = host_memory()
        expert = {each.layer_id: each.expert_bytes for each in layers}
        return ExpertMemory(memory.free_bytes, memory.total_bytes, expert)

    def require_room(
        self,
        file: GgufFile,
        experts: Iterable[tuple[MoeLayer, int]],
        *,
        num_positions: int = 0,
        kv_type: KvType = KvType.F16,
        num_daemons: int = 0,
    ) -> None:
        """Do nothing: weights are read from the file when they are used."""

    def device_seconds(self, banks: Sequence[ExpertBank], batch: RoutedBatch) -> None:
        """Return None: the host computes."""

    def choose_threads(
        self, file: GgufFile, one_pass: OnePass | None, *, beside_device: bool = False
    ) -> None:
        """Do nothing: it has no threads of its own."""

    def to_host(self, rows: AnyArray) -> F32Array:
        return rows

    def argmax(self, logits: AnyArray) -> I32Array:
        return argmax_of(logits)

    def joined(self, parts: Sequence[AnyArray]) -> AnyArray:
        return np.concatenate(parts)

    def load_model(self, file: GgufFile, description: Description) -> HostModel:
        return HostModel(file, self.ops, description)

    def new_cache(self, spec: ModelSpec, num_positions: int, kv_type: KvType) -> KvCache:
        return self.ops.new_kv_cache(spec.kv_layers, num_positions, kv_type, spec.recurrent_layers)

    def moe(
        self,
        banks: Mapping[int, ExpertBank],
        phase: Phase,
        remote: RemoteExperts,
        *,
        may_offload: bool = True,
    ) -> HostExperts:
        """All from `remote`, those in `banks` too."""
        return HostExperts(remote, phase)

    @contextmanager
    def noted_choices(self, experts: HostExperts) -> Iterator[tuple[Any, Callable[[], I32Array]]]:
        noted: list[I32Array] = []

        def noting(
            layer_id: int, hidden: F32Array, topk_ids: I32Array, topk_weights: F32Array
        ) -> Pausable[F32Array]:
            noted.append(topk_ids.copy())
            return (yield from experts(layer_id, hidden, topk_ids, topk_weights))

        yield noting, lambda: np.concatenate(noted, axis=1)

    def captured_step(
        self,
        model: Model[AnyArray, Any],
        cache: KvCache,
        banks: Mapping[int, ExpertBank],
        *,
        remote: MailedExperts,
        check: Callable[[], None],
        keeps_choices: bool = False,
    ) -> CapturedStep | None:
        """Return None: nothing is captured."""

    @property
    def mail(self) -> None:
        """None: there is no device."""

    def offload_prompts(
        self,
        file: GgufFile,
        layers: Iterable[MoeLayer],
        remote: RemoteExperts,
        *,
        arena: ExpertArena | None = None,
    ) -> None:
        """Do nothing: weights are already on the host."""

    def follow_owners(self, layer_ids: Iterable[int], remote: RemoteExperts) -> None:
        """Do nothing: nothing was prepared."""

    def new_stage(self, file: GgufFile, layers: Sequence[MoeLayer], most: int) -> None:
        """Return None: experts stay where the file is mapped."""

    def bring_experts(
        self,
        file: GgufFile,
        banks: Mapping[int, ExpertBank],
        options: ArenaOptions,
    ) -> ExpertArena | None:
        return None

    def compile_banks(
        self, banks: Mapping[int, ExpertBank], *, max_tokens: int, max_experts_used: int
    ) -> CompiledExperts | None:
        """Return None: there is no such code."""
        return None

    def take_selections(self, banks: Mapping[int, ExpertBank]) -> dict[tuple[Phase, int], I64Array]:
        """Return nothing: the host does the routing."""
        return {}
