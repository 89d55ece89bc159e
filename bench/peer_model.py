"""A whole model in llama.cpp: prefill and decode, timed without sampling.

Settings are llama.cpp's own except threads, context and KV type: mapped file, flash attention auto,
batches of 2048, micro-batches of 512. `repack` leaves on that some weights are kept in another
order, which is llama.cpp's default; without it all are read where the file is mapped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bench.llama_api import Batch, default_context_params, default_model_params, fill_batch
from bench.peer import PeerError, open_peer

from dflash_protocol.ids import F32Array

_LOAD_MAPPED = 1
_KV_TYPES = {"f32": 0, "f16": 1}
_BATCH = 2048


class PeerModel:
    """One file with one sequence. Owns: model, context and batch, as long as the process lives."""

    def __init__(
        self,
        folder: Path,
        path: Path,
        *,
        num_threads: int,
        context: int,
        kv_type: str,
        repack: bool,
    ) -> None:
        self._peer = peer = open_peer(folder)
        model_params = default_model_params(peer.llama)
        model_params.n_gpu_layers = 0
        model_params.load_mode = _LOAD_MAPPED
        model_params.use_extra_bufts = repack
        self._model = peer.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise PeerError(f"llama.cpp does not load {path}")
        params = default_context_params(peer.llama)
        params.n_ctx = context
        params.n_threads = params.n_threads_batch = num_threads
        params.type_k = params.type_v = _KV_TYPES[kv_type]
        params.no_perf = True
        self._context = peer.llama_init_from_model(self._model, params)
        if not self._context:
            raise PeerError("llama.cpp makes no context")
        self._memory = peer.llama_get_memory(self._context)
        self._batch: Batch = peer.llama_batch_init(_BATCH, 0, 1)

    def logits(self, token_ids: Sequence[int], vocab_size: int) -> F32Array:
        """Logits after the last token, from an empty state. Shapes: result [V] float32."""
        self.fill(token_ids)
        row = self._peer.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(row, (vocab_size,)).copy()

    def prefill(self, token_ids: Sequence[int]) -> float:
        """Tokens per second of one prompt from an empty state, with logits after its last token."""
        self._peer.llama_memory_clear(self._memory, False)
        started_s = time.perf_counter()
        self._decode(token_ids, 0)
        return len(token_ids) / (time.perf_counter() - started_s)

    def fill(self, token_ids: Sequence[int]) -> float:
        """Make these tokens the whole state. Returns tokens per second."""
        self._peer.llama_memory_clear(self._memory, False)
        started_s = time.perf_counter()
        for first in range(0, len(token_ids), _BATCH):
            self._decode(token_ids[first : first + _BATCH], first)
        return len(token_ids) / (time.perf_counter() - started_s)

    def decode(self, position: int, token_ids: Sequence[int]) -> float:
        """Tokens per second of tokens one by one from `position`; what stood there is dropped."""
        if not self._peer.llama_memory_seq_rm(self._memory, 0, position, -1):
            raise PeerError("llama.cpp does not drop positions")
        started_s = time.perf_counter()
        for index, token_id in enumerate(token_ids):
            self._decode([token_id], position + index)
        return len(token_ids) / (time.perf_counter() - started_s)

    def _decode(self, token_ids: Sequence[int], first_position: int) -> None:
        fill_batch(self._batch, token_ids, first_position, all_logits=False)
        if code := self._peer.llama_decode(self._context, self._batch):
            raise PeerError(f"llama_decode: code {code}")
        self._peer.llama_get_logits_ith(self._context, -1)  # waits until all is computed
