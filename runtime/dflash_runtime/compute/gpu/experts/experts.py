"""The experts of one layer on a GPU, for host code of a parent or daemon.

Hidden rows come from the host's memory and sums go back there. The phase decides the kernels, step
kernels for decode and verify and chunk kernels for prefill, whatever the number of tokens, so that
a slice of a batch has the same bits as the whole.
"""

from __future__ import annotations

import threading

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import MoeLayer
from dflash_protocol.batch import HostSums, RoutedBatch, Sums, slice_tokens
from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase
from dflash_runtime.compute.gpu.experts.captured_experts import (
    CapturedExperts,
    CapturedLayer,
    too_many_pairs,
)
from dflash_runtime.compute.gpu.launch.decode_arrays import MOST_TOKENS
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer, named_layer
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.transfers.payload import PlacedSums


class CupyExpertBank:
    """Implements backend.ExpertBank.

    `by_global` and `by_local` are the same experts by global and by local ids. Any thread may use
    it: `lock`, which guards the backend's buffers, captures and stream, is held for each batch.
    """

    def __init__(
        self,
        ops: GpuOps,
        by_global: ResidentLayer,
        by_local: ResidentLayer,
        *,
        captured: CapturedExperts,
        lock: threading.RLock,
    ) -> None:
        self.layer: MoeLayer = by_local.layer
        self.num_experts = by_local.num_resident
        self._lock = lock
        self._captured = captured
        self.by_global = by_global
        self._ops = ops
        self.by_local = by_local
        self._steps = CapturedLayer(by_local)

    def part(self, file: GgufFile, local_expert_ids: I32Array) -> CupyExpertBank:
        """Shares the weights; only tables and vectors are new."""
        places = self.by_local.slot_of_expert[local_expert_ids]
        slots = self.by_global.slot_of_expert
        global_of_slot = np.zeros(slots.max() + 1, np.int64)
        global_of_slot[slots[slots >= 0]] = np.flatnonzero(slots >= 0)
        global_ids = global_of_slot[places]
        with self._lock:
            by_global, by_local = (
                named_layer(
                    self._ops.device,
                    file,
                    self.layer,
                    weights=self.by_local.weights,
                    ids=(global_ids, names),
                    places=places,
                )
                for names in (global_ids, np.arange(places.size))
            )
        return CupyExpertBank(
            self._ops, by_global, by_local, captured=self._captured, lock=self._lock
        )

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        """Raises: ValueError for a wrong shape or ids; DeviceUnavailable."""
        shape = batch.hidden_shape
        if shape != out.shape or shape[1:] != (self.layer.hidden_size,):
            expected = f"[T, {self.layer.hidden_size}]"
            raise ValueError(f"hidden {shape}, out {out.shape}, expected {expected}")
        if not batch.num_pairs:
            return
        if batch.expert_ids[0] < 0 or batch.expert_ids[-1] >= self.num_experts:
            raise ValueError(f"the batch has expert ids beyond 0 to {self.num_experts - 1}")
        with self._lock:
            if batch.phase is Phase.PREFILL:
                self._add_chunks(batch, HostSums(out))
                return
            hidden = batch.hidden
            if batch.num_tokens == 1:
                self._captured.add_token(self._steps, batch, out=out)
                return
            ids, weights = rectangular(batch, self.layer.num_experts_used)
            for first in range(0, batch.num_tokens, MOST_TOKENS):
                some = slice(first, first + MOST_TOKENS)
                self._captured.add_steps(
                    self._steps,
                    hidden=hidden[some],
                    ids=ids[some],
                    weights=weights[some],
                    out=out[some],
                )

    def sums_of(self, batch: RoutedBatch) -> PlacedSums:
        """Sums of a prefill never leave the device."""
        sums = PlacedSums(self._ops.payload, batch.hidden_shape)
        if batch.phase is Phase.PREFILL and batch.num_pairs:
            with self._lock:
                self._add_chunks(batch, sums)
        else:
            on_host = np.zeros(batch.hidden_shape)
            self.accumulate(batch, on_host)
            sums.add(HostSums(on_host))
        return sums

    def _add_chunks(self, batch: RoutedBatch, out: Sums) -> None:
        """Call with the lock held. Shapes: out [T, H]."""
        payload = self._ops.payload
        for first, piece in slice_tokens(batch, self._ops.chunks.max_chunk):
            sums = payload.sums(self._ops.chunk_experts.sums_of_batch(self.by_local, piece))
            num_tokens = piece.num_tokens
            is_whole = num_tokens == batch.num_tokens
            out.add(sums, None if is_whole else slice(first, first + num_tokens))


def rectangular(batch: RoutedBatch, num_used: int) -> tuple[I32Array, F32Array]:
    """A batch's pairs by token: ids, padded with -1, and weights.

    Shapes: both [T, K]. Raises: ValueError if a token has more than K pairs.
    """
    ids = np.full((batch.num_tokens, num_used), -1, np.int32)
    weights = np.zeros((batch.num_tokens, num_used), np.float32)
    expert_of_pair = np.repeat(batch.expert_ids, np.diff(batch.group_starts))
    order = np.argsort(batch.token_indices, kind="stable")
    tokens = batch.token_indices[order]
    place = np.arange(tokens.size) - np.searchsorted(tokens, tokens)
    if tokens.size and place.max() >= num_used:
        raise too_many_pairs(int(place.max()) + 1, num_used)
    ids[tokens, place] = expert_of_pair[order]
    weights[tokens, place] = batch.weights[order]
    return ids, weights
