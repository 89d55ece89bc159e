"""Loads experts, only the byte ranges of those that are owned, and warms them up.

Used for the daemon's, the parent's local and the fallback's experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_protocol.batch import RoutedBatch, group_by_expert
from dflash_protocol.ids import F64Array, I32Array, Phase
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.compute.host import ONE_TOKEN

LoadProgress = Callable[[int, int], None]
"""Called with layers done and layers in total."""

TrialBatches: TypeAlias = tuple[tuple[Phase, int], ...]
"""Pairs of phase and number of tokens."""

BankKind: TypeAlias = tuple[object, ...]
"""What a bank's rate depends on: banks of one kind run the same kernels on the same shapes."""


def expert_tensor_types(spec: MoeSpec) -> frozenset[TensorType]:
    """Every type that an expert projection of the model is stored in."""
    return frozenset(
        projection.tensor_type for layer in spec.layers for projection in layer.projections
    )


def every_expert(spec: MoeSpec) -> OwnedExperts:
    """All experts of the model under their global ids."""
    return OwnedExperts.from_lists(
        {layer.layer_id: range(layer.num_experts) for layer in spec.layers}
    )


def load_banks(
    backend: ComputeBackend,
    file: GgufFile,
    spec: MoeSpec,
    *,
    owned: OwnedExperts,
    read_now: bool,
) -> dict[int, ExpertBank]:
    """Make a bank for each layer in which experts are owned.

    `read_now` reads the owned byte ranges, and no others, into memory; otherwise they are read on
    first use, as suits a fallback that is rarely needed. Such banks raise ModelFileError if the
    file was modified meanwhile.
    """
    banks: dict[int, ExpertBank] = {}
    for layer_id, global_expert_ids in sorted(owned.by_layer.items()):
        layer = spec.by_layer_id[layer_id]
        if read_now:
            read_experts(file, layer, global_expert_ids)
        bank = backend.load_experts(file, layer, global_expert_ids)
        banks[layer_id] = bank if read_now else _WatchedBank(bank, file)
    return banks


def measure_pairs_per_second(
    banks: Iterable[ExpertBank],
    known: dict[BankKind, float] | None = None,
    *,
    batches: TrialBatches = ONE_TOKEN,
) -> float:
    """Run every kind of bank once; return the (token, expert) pairs a second of the slowest.

    This also ensures that every kernel is compiled and has run before a daemon reports that it is
    ready: `batches` are the backend's `trial_batches`. Rates of kinds in `known` are taken from
    there, and new ones are added to it.
    """
    rates = {} if known is None else known
    kinds = set()
    for bank in banks:
        kind = _kind_of(bank)
        kinds.add(kind)
        if kind not in rates:
            rates[kind] = _measured(bank, batches)
    return min((rates[kind] for kind in kinds), default=1e9)


class _WatchedBank:
    """Implements ExpertBank with another bank, whose file may have changed before it is used."""

    def __init__(self, bank: ExpertBank, file: GgufFile) -> None:
        self.layer = bank.layer
        self.num_experts = bank.num_experts
        self._bank = bank
        self._file = file

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        self._file.watch.poll()
        self._bank.accumulate(batch, out)


def _kind_of(bank: ExpertBank) -> BankKind:
    layer = bank.layer
    return (
        min(layer.num_experts_used, bank.num_experts),
        layer.activation,
        *(
            (p.tensor_type, p.rows, p.columns, p.bias is None, p.scale is None)
            for p in layer.projections
        ),
    )


def _measured(bank: ExpertBank, batches: TrialBatches) -> float:
    """Pairs a second of the first batch, after all batches have been computed once."""
    for phase, num_tokens in reversed(batches):
        batch = _trial_batch(bank, phase, num_tokens)
        out = np.zeros(batch.hidden.shape)
        bank.accumulate(batch, out)
    started_s = time.perf_counter()
    bank.accumulate(batch, out)
    return batch.num_pairs / max(time.perf_counter() - started_s, 1e-7)


def _trial_batch(bank: ExpertBank, phase: Phase, num_tokens: int) -> RoutedBatch:
    """A batch whose tokens use the experts in turn."""
    layer = bank.layer
    num_used = min(layer.num_experts_used, bank.num_experts)
    tokens = np.repeat(np.arange(num_tokens, dtype=np.int32), num_used)
    chosen = np.arange(num_tokens * num_used, dtype=np.int32) % np.int32(bank.num_experts)
    return group_by_expert(
        np.ones((num_tokens, layer.hidden_size), np.float32),
        tokens,
        chosen,
        weights=np.ones(chosen.size, np.float32),
        phase=phase,
    )


def read_experts(file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array) -> None:
    """Announce the ranges to the kernel (madvise), then touch each page."""
    ranges = byte_ranges(layer, global_expert_ids)
    for each in ranges:
        file.advise_willneed(*each)
    for each in ranges:
        file.region(*each)[::4096].max()


def byte_ranges(layer: MoeLayer, global_expert_ids: I32Array) -> list[tuple[int, int, int]]:
    """(shard, offset, bytes) of every part of these experts."""
    return [
        (*part.place_of(int(global_expert_id)), part.num_bytes)
        for part in layer.parts
        for global_expert_id in global_expert_ids
    ]
