"""Logits of a GGUF file at every position, computed by llama.cpp (the xllamacpp wheel) on the CPU.

Only the C API is used, through ctypes, because the wheel's own Python API returns one position at
a time.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from bench.llama_api import (
    EVAL_CALLBACK,
    LOG_CALLBACK,
    P,
    declare,
    default_context_params,
    default_model_params,
    fill_batch,
    open_wheel,
    tensor_bytes,
)

_MICRO_BATCH = 512

TensorCallback = Callable[[str, npt.NDArray[np.uint8]], None]
_quiet = LOG_CALLBACK(lambda level, text, data: None)


def _load_library() -> ct.CDLL:
    lib = open_wheel()
    declare(lib, {"llama_get_logits": (ct.POINTER(ct.c_float), [P])})
    lib.llama_log_set(_quiet, None)
    return lib


class Oracle:
    """A GGUF file loaded by llama.cpp with an F16 key-value cache.

    `on_tensor` is called with the name and raw bytes of every tensor whose name `wanted` accepts.
    """

    def __init__(
        self,
        path: Path,
        n_ctx: int,
        n_threads: int = 2,
        *,
        flash_attention: bool = False,
        wanted: Callable[[str], bool] | None = None,
        on_tensor: TensorCallback | None = None,
    ) -> None:
        self._lib = lib = _load_library()
        model_params = default_model_params(lib)
        model_params.use_extra_bufts = False
        self._model = lib.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        params = default_context_params(lib)
        params.n_ctx = params.n_batch = n_ctx
        params.n_ubatch = _MICRO_BATCH
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = int(flash_attention)
        if wanted is not None and on_tensor is not None:
            self._callback = self._make_callback(wanted, on_tensor)
            params.cb_eval = ct.cast(self._callback, P)
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("llama.cpp cannot create a context")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self._vocab))

    def _make_callback(self, wanted: Callable[[str], bool], on_tensor: TensorCallback) -> Any:
        lib = self._lib

        def callback(tensor: int, ask: bool, _data: int) -> bool:
            name = lib.ggml_get_name(tensor).decode()
            if not wanted(name):
                return not ask
            if not ask:
                on_tensor(name, tensor_bytes(lib, tensor))
            return True

        return EVAL_CALLBACK(callback)

    def __enter__(self) -> Oracle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def tokenize(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids of a text, without special tokens: (n,)."""
        raw = text.encode()
        ids = np.empty(len(raw) + 8, np.int32)
        out = ids.ctypes.data_as(ct.POINTER(ct.c_int32))
        n = self._lib.llama_tokenize(self._vocab, raw, len(raw), out, len(ids), False, False)
        return ids[:n].copy()

    def logits(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
        """Logits (n, n_vocab) after each of the tokens (n,), starting from an empty context."""
        lib, n = self._lib, len(tokens)
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        batch = lib.llama_batch_init(n, 0, 1)
        fill_batch(batch, tokens, 0, all_logits=True)
        status = lib.llama_decode(self._context, batch)
        lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama.cpp decode failed with status {status}")
        flat = np.ctypeslib.as_array(lib.llama_get_logits(self._context), (n * self.n_vocab,))
        return flat.reshape(n, self.n_vocab).copy()
