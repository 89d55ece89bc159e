"""What all backends that compute in host memory have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import psutil

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.ops import KvCache, KvType, Model
from dflash_adapters.spec import KvLayer, MoeLayer, RecurrentLayer
from dflash_protocol.ids import AnyArray, F32Array, I32Array, I64Array, Phase
from dflash_runtime.compute.backend import Chunking, ExpertBank, RemoteExperts, argmax_of

PREFILL_CHUNK = 512
ONE_TOKEN = ((Phase.DECODE, 1),)
"""Enough of a trial for kernels that are compiled ahead."""


class HostBackend:
    """The methods of backend.ComputeBackend that only a device needs, without one."""

    is_host = True
    mover = None
    chunking = Chunking(PREFILL_CHUNK, None, invariant_from=1)
    trial_batches = ONE_TOKEN

    def free_memory_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def require_room(
        self,
        file: GgufFile,
        experts: Iterable[tuple[MoeLayer, int]],
        *,
        kv_layers: tuple[KvLayer, ...] = (),
        recurrent: tuple[RecurrentLayer, ...] = (),
        num_positions: int = 0,
        kv_type: KvType = KvType.F16,
    ) -> None:
        """Do nothing: weights are read from the file when they are used."""

    def to_host(self, rows: AnyArray) -> F32Array:
        return rows

    def argmax(self, logits: AnyArray) -> I32Array:
        return argmax_of(logits)

    def joined(self, parts: Sequence[AnyArray]) -> AnyArray:
        return np.concatenate(parts)

    def moe(
        self, banks: Mapping[int, ExpertBank], phase: Phase, remote: RemoteExperts | None
    ) -> None:
        """Return None: rows are already on the host."""

    def captured_step(
        self,
        model: Model[AnyArray],
        cache: KvCache,
        banks: Mapping[int, ExpertBank],
        *,
        remote: RemoteExperts,
    ) -> None:
        """Return None: nothing is captured on a host."""

    @property
    def mail(self) -> None:
        """None: there is no device."""

    def offload_prompts(
        self, file: GgufFile, layers: Iterable[MoeLayer], remote: RemoteExperts
    ) -> None:
        """Do nothing: weights are already on the host."""

    def take_selections(self, banks: Mapping[int, ExpertBank]) -> dict[int, I64Array]:
        """Return nothing: the host does the routing."""
        return {}
