"""A whole model in llama.cpp: prefill and decode, timed without sampling.

Settings are llama.cpp's defaults except for: mapped file, batches of 2048, micro-batches of 512
unless told otherwise.
"""

from __future__ import annotations

import ctypes
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench.llama_api import (
    CPU,
    Batch,
    P,
    TensorPlace,
    default_context_params,
    default_model_params,
    fill_batch,
)
from bench.peer import PeerError, find_device, open_peer

from dflash_protocol.ids import F32Array

_LOAD_MAPPED = 1
_SPLIT_NONE, _SPLIT_BY_LAYER = 0, 1
_KV_TYPES = {"f32": 0, "f16": 1}
_BATCH = 2048
_ALL_LAYERS = -1
_EXPERT_TENSORS = rb"\.ffn_(up|down|gate)_exps"
"""Names of routed experts, as in llama.cpp's own option for experts on the CPU."""


class FlashAttention(enum.IntEnum):
    """llama_flash_attn_type."""

    AUTO = -1
    ENABLED = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model is computed: layers split over the devices `layers_on`, or on the CPU if there
    are none; routed experts on `experts_on`, if set. Devices have llama.cpp's names."""

    layers_on: tuple[str, ...] = ()
    experts_on: str = ""


def load_model(
    library: Any, path: Path, placement: Placement = Placement(), *, repack: bool = True
) -> int:
    """Load a model for the life of the process.

    `library` is a Peer, or has the functions of `llama_api.llama_calls`. `repack` is llama.cpp's
    default of repacking some weights on the CPU; without it all are read from the mapped file.
    Raises: PeerError if llama.cpp has no such device, or does not load the file.
    """
    params = default_model_params(getattr(library, "llama", library))
    params.n_gpu_layers = _ALL_LAYERS if placement.layers_on else 0
    names = list(placement.layers_on)
    params.load_mode = _LOAD_MAPPED
    params.use_extra_bufts = repack
    if placement.experts_on:
        device = find_device(library, placement.experts_on)
        buffer_type = library.ggml_backend_dev_buffer_type(device)
        places = (TensorPlace * 2)(TensorPlace(_EXPERT_TENSORS, buffer_type), TensorPlace())
        params.tensor_buft_overrides = ctypes.addressof(places)
        if placement.experts_on not in (CPU, *names):
            # The device is used, but for nothing else.
            shares = (ctypes.c_float * library.llama_max_devices())(*[1.0] * len(names))
            params.tensor_split = ctypes.addressof(shares)
            names.append(placement.experts_on)
    params.split_mode = _SPLIT_BY_LAYER if len(names) > 1 else _SPLIT_NONE
    if names:
        devices = (P * (len(names) + 1))(*[find_device(library, name) for name in names])
        params.devices = ctypes.addressof(devices)
    model = library.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise PeerError(f"llama.cpp does not load {path}")
    return int(model)


def context_params(
    library: Any,
    *,
    num_threads: int,
    context: int,
    kv_type: str,
    micro_batch: int,
    flash_attention: FlashAttention,
    num_outputs: int,
    expert_cache_bytes: int = 0,
) -> Any:
    """llama_context_params of one sequence; see PeerContext."""
    params = default_context_params(getattr(library, "llama", library))
    params.n_ctx = context
    params.n_batch = max(_BATCH, micro_batch)
    params.n_ubatch = micro_batch
    params.n_outputs_max = num_outputs
    params.n_threads = params.n_threads_batch = num_threads
    params.type_k = params.type_v = _KV_TYPES[kv_type]
    params.flash_attn_type = flash_attention
    params.no_perf = True
    if expert_cache_bytes:
        params.expert_cache_bytes = expert_cache_bytes
    return params


class PeerContext:
    """One sequence of a loaded model. Owns context and batches, until `close` or the process's
    end."""

    def __init__(
        self,
        library: Any,
        model: int,
        *,
        num_threads: int,
        context: int,
        kv_type: str,
        micro_batch: int = 512,
        flash_attention: FlashAttention = FlashAttention.AUTO,
        num_outputs: int = 0,
        expert_cache_bytes: int = 0,
        on_tensor: Any = None,
    ) -> None:
        """`num_outputs`: most tokens of a batch with logits, for which memory is reserved; 0: all.
        `expert_cache_bytes`: of a GPU, for experts that are in the host's memory.
        `on_tensor`: an EVAL_CALLBACK for the tensors that are computed.

        Raises: PeerError if llama.cpp cannot make a context of this size.
        """
        self._peer = library
        self._on_tensor = on_tensor  # kept alive for llama.cpp
        params = context_params(
            library,
            num_threads=num_threads,
            context=context,
            kv_type=kv_type,
            micro_batch=micro_batch,
            flash_attention=flash_attention,
            num_outputs=num_outputs,
            expert_cache_bytes=expert_cache_bytes,
        )
        if on_tensor is not None:
            params.cb_eval = ctypes.cast(on_tensor, P)
        self._context = library.llama_init_from_model(model, params)
        if not self._context:
            raise PeerError(f"llama.cpp makes no context of {context} positions")
        self._memory = library.llama_get_memory(self._context)
        self._batch_size = int(params.n_batch)
        self._batches: list[Batch] = []

    def close(self) -> None:
        """Free them; the last call."""
        for batch in self._batches:
            self._peer.llama_batch_free(batch)
        self._peer.llama_free(self._context)

    def use_threads(self, num_threads: int) -> None:
        """Threads from now on, of decode and of prompts."""
        self._peer.llama_set_n_threads(self._context, num_threads, num_threads)

    def logits(self, token_ids: Sequence[int], vocab_size: int) -> F32Array:
        """Logits after the last token, from an empty state. Shapes: result [V] float32."""
        self.fill(token_ids)
        return self.last_logits(vocab_size)

    def last_logits(self, vocab_size: int) -> F32Array:
        """Logits after the token that was computed last. Shapes: result [V] float32."""
        row = self._peer.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(row, (vocab_size,)).copy()

    def prefill(self, token_ids: Sequence[int]) -> float:
        """Tokens per second of one prompt from an empty state, with logits after its last token."""
        return self.fill(token_ids)

    def fill(self, token_ids: Sequence[int]) -> float:
        """Replace the state by these tokens. Returns tokens per second."""
        self._peer.llama_memory_clear(self._memory, False)
        batches = self._filled(token_ids, 0)
        started_s = time.perf_counter()
        self._decode(batches)
        return len(token_ids) / (time.perf_counter() - started_s)

    def drop(self, position: int) -> bool:
        """Drop `position` and later ones; False for a recurrent state, which cannot go back."""
        return bool(self._peer.llama_memory_seq_rm(self._memory, 0, position, -1))

    def decode(self, position: int, token_ids: Sequence[int]) -> float:
        """Tokens per second of tokens one by one from `position`; later ones are dropped first."""
        if not self.drop(position):
            raise PeerError("llama.cpp does not drop positions")
        return self._one_by_one(position, token_ids)

    def decode_after(self, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
        """Tokens per second of tokens one by one after a prompt, whose time is not included.

        Works for recurrent layers, too, whose state llama.cpp cannot take back.
        """
        self.fill(prompt)
        return self._one_by_one(len(prompt), token_ids)

    def _one_by_one(self, position: int, token_ids: Sequence[int]) -> float:
        started_s = time.perf_counter()
        for index, token_id in enumerate(token_ids):
            self._decode(self._filled([token_id], position + index))
        return len(token_ids) / (time.perf_counter() - started_s)

    def _filled(self, token_ids: Sequence[int], first_position: int) -> list[Batch]:
        """Batches of these tokens, ready to be computed, with logits after the last of each."""
        size = self._batch_size
        pieces = [token_ids[first : first + size] for first in range(0, len(token_ids), size)]
        while len(self._batches) < len(pieces):
            self._batches.append(self._peer.llama_batch_init(size, 0, 1))
        for index, (batch, piece) in enumerate(zip(self._batches, pieces, strict=False)):
            fill_batch(batch, piece, first_position + index * size, all_logits=False)
        return self._batches[: len(pieces)]

    def _decode(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            if code := self._peer.llama_decode(self._context, batch):
                raise PeerError(f"llama_decode: code {code}")
        self._peer.llama_get_logits_ith(self._context, -1)  # waits until all is computed


def peer_model(folder: Path, path: Path, *, repack: bool, **options: Any) -> PeerContext:
    """One file with one sequence on the CPU; `options` are those of PeerContext.

    Raises: BuildError, PeerError.
    """
    peer = open_peer(folder)
    return PeerContext(peer, load_model(peer, path, repack=repack), **options)
