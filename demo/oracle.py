"""Logits of a GGUF file at every position, computed by llama.cpp (the xllamacpp wheel) on the CPU.

Only the C API is used, through ctypes, because the wheel's own Python API returns one position at
a time. Struct layouts are those of the wheel's llama.cpp build; fields used here are set by offset.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import xllamacpp

_MODEL_PARAMS_BYTES, _CONTEXT_PARAMS_BYTES = 80, 168
_USE_EXTRA_BUFFERS_OFFSET = 74
_N_CTX, _N_BATCH, _N_UBATCH, _N_THREADS, _N_THREADS_BATCH = 0, 4, 8, 28, 32
_FLASH_ATTENTION_OFFSET = 52
_CALLBACK_OFFSET = 88

_ModelParams = ct.c_uint8 * _MODEL_PARAMS_BYTES
_ContextParams = ct.c_uint8 * _CONTEXT_PARAMS_BYTES


class _Model(ct.Structure):
    _fields_ = [("bytes", _ModelParams)]


class _Context(ct.Structure):
    _fields_ = [("bytes", _ContextParams)]


class _Batch(ct.Structure):
    _fields_ = [
        ("n_tokens", ct.c_int32),
        ("token", ct.POINTER(ct.c_int32)),
        ("embd", ct.POINTER(ct.c_float)),
        ("pos", ct.POINTER(ct.c_int32)),
        ("n_seq_id", ct.POINTER(ct.c_int32)),
        ("seq_id", ct.POINTER(ct.POINTER(ct.c_int32))),
        ("logits", ct.POINTER(ct.c_int8)),
    ]


TensorCallback = Callable[[str, npt.NDArray[np.uint8]], None]
_EvalCallback = ct.CFUNCTYPE(ct.c_bool, ct.c_void_p, ct.c_bool, ct.c_void_p)
_LogCallback = ct.CFUNCTYPE(None, ct.c_int, ct.c_char_p, ct.c_void_p)
_quiet = _LogCallback(lambda level, text, data: None)


def _load_library() -> ct.CDLL:
    folder = Path(xllamacpp.__file__).parent
    lib = ct.CDLL(str(next(folder.glob("xllamacpp*.so"))))
    pointer, i32 = ct.c_void_p, ct.c_int32
    signatures: dict[str, tuple[object, list[object]]] = {
        "llama_model_default_params": (_Model, []),
        "llama_context_default_params": (_Context, []),
        "llama_model_load_from_file": (pointer, [ct.c_char_p, _Model]),
        "llama_init_from_model": (pointer, [pointer, _Context]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (i32, [pointer]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, ct.c_bool]),
        "llama_batch_init": (_Batch, [i32, i32, i32]),
        "llama_batch_free": (None, [_Batch]),
        "llama_decode": (i32, [pointer, _Batch]),
        "llama_get_logits": (ct.POINTER(ct.c_float), [pointer]),
        "llama_tokenize": (
            i32, [pointer, ct.c_char_p, i32, ct.POINTER(i32), i32, ct.c_bool, ct.c_bool],
        ),
        "llama_free": (None, [pointer]),
        "llama_model_free": (None, [pointer]),
        "llama_log_set": (None, [_LogCallback, pointer]),
        "ggml_get_name": (ct.c_char_p, [pointer]),
        "ggml_nbytes": (ct.c_size_t, [pointer]),
        "ggml_backend_tensor_get": (None, [pointer, pointer, ct.c_size_t, ct.c_size_t]),
    }  # fmt: skip
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
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
        flash_attention: bool = False,
        wanted: Callable[[str], bool] | None = None,
        on_tensor: TensorCallback | None = None,
    ) -> None:
        self._lib = lib = _load_library()
        model_params = lib.llama_model_default_params()
        model_params.bytes[_USE_EXTRA_BUFFERS_OFFSET] = 0
        self._model = lib.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        settings = {
            _N_CTX: n_ctx, _N_BATCH: n_ctx, _N_UBATCH: 512, _N_THREADS: n_threads,
            _N_THREADS_BATCH: n_threads, _FLASH_ATTENTION_OFFSET: int(flash_attention),
        }  # fmt: skip
        for offset, value in settings.items():
            ct.c_int32.from_buffer(params.bytes, offset).value = value
        if wanted is not None and on_tensor is not None:
            self._callback = self._make_callback(wanted, on_tensor)
            address = ct.cast(self._callback, ct.c_void_p).value
            ct.c_void_p.from_buffer(params.bytes, _CALLBACK_OFFSET).value = address
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
                raw = np.empty(lib.ggml_nbytes(tensor), np.uint8)
                lib.ggml_backend_tensor_get(tensor, raw.ctypes.data, 0, raw.nbytes)
                on_tensor(name, raw)
            return True

        return _EvalCallback(callback)

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
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = int(token), i
            batch.n_seq_id[i], batch.logits[i] = 1, 1
            batch.seq_id[i][0] = 0
        status = lib.llama_decode(self._context, batch)
        lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama.cpp decode failed with status {status}")
        flat = np.ctypeslib.as_array(lib.llama_get_logits(self._context), (n * self.n_vocab,))
        return flat.reshape(n, self.n_vocab).copy()
