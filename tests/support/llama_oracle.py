"""llama.cpp as the numeric oracle: logits, inner tensors, token ids and quantised rows.

The library is the extension module of the `xllamacpp` wheel, opened with ctypes: it exports the C
interfaces of llama.cpp and ggml. Settings are those of exact comparison: CPU, no weight
repacking, no flash attention. Does not import the packages under test.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import gguf
import numpy as np
from bench.llama_api import (
    EVAL_CALLBACK,
    FLAG,
    I32,
    I64,
    LOG_CALLBACK,
    SIZE,
    Calls,
    LlamaError,
    P,
    declare,
    default_context_params,
    default_model_params,
    fill_batch,
    open_wheel,
    tensor_values,
)

from dflash_protocol.ids import AnyArray, F32Array, F64Array, U8Array

_LOG_LEVEL_ERROR = 4
_FLASH_ATTENTION_DISABLED = 0
_KV_TYPE_IDS = {"f32": 0, "f16": 1}
_NOT_FOR_WEIGHTS = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})

WEIGHT_TYPES = tuple(t.name for t in gguf.GGMLQuantizationType if t.name not in _NOT_FOR_WEIGHTS)
"""Names of the GGML types that `quantise` makes."""


class OracleError(LlamaError):
    """llama.cpp refused a request."""


_recent_errors: deque[str] = deque(maxlen=8)


def _keep_error(level: int, text: bytes, _user_data: object) -> None:
    if level == _LOG_LEVEL_ERROR:
        _recent_errors.append(text.decode(errors="replace").strip())


_on_log = LOG_CALLBACK(_keep_error)  # llama.cpp keeps the pointer as long as the process lives

_CALLS: Calls = {
    "ggml_quantize_chunk": (SIZE, [I32, P, P, I64, I64, I64, P]),
    "ggml_quantize_requires_imatrix": (FLAG, [I32]),
}


@cache
def llama_library() -> ctypes.CDLL:
    """llama.cpp's C interface with the argument types that this module needs, and no log.

    Raises: LlamaError if the wheel is missing, or its structures are not known.
    """
    library = open_wheel()
    declare(library, _CALLS)
    library.llama_log_set(_on_log, None)
    library.llama_backend_init()
    return library


class LlamaOracle:
    """One GGUF file loaded in llama.cpp, with one sequence and its KV cache.

    Owns: the model and the context, freed by `close` or at the end of a `with` block.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        context_length: int,
        kv_type: Literal["f32", "f16"] = "f32",
        threads: int = 1,
        max_batch: int | None = None,
        vocab_only: bool = False,
        yarn_beta_fast: float | None = None,
    ) -> None:
        """Load `path`, or the first shard of it.

        `max_batch` limits the tokens of one decode call (default: `context_length`);
        `vocab_only` reads no weights, for `tokenize` alone; `yarn_beta_fast` is what llama.cpp
        computes with instead of 32, whatever the file says.
        Raises: OracleError if llama.cpp does not load the file.
        """
        self._context: int | None = None
        self._model: int | None = None
        self._library = llama_library()
        self._context_length = context_length
        self._max_batch = max_batch or context_length
        self._kv_type_id = _KV_TYPE_IDS[kv_type]
        self._threads = threads
        self._vocab_only = vocab_only
        self._yarn_beta_fast = yarn_beta_fast
        params = default_model_params(self._library)
        params.n_gpu_layers = 0
        params.use_extra_bufts = False
        params.vocab_only = vocab_only
        _recent_errors.clear()
        # `bench.peer` and the demo's oracle, in the same process, set a function of their own.
        self._library.llama_log_set(_on_log, None)
        self._model = self._library.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise OracleError(f"llama.cpp does not load {path}: {'; '.join(_recent_errors)}")
        self._vocab = self._library.llama_model_get_vocab(self._model)
        self.vocab_size: int = self._library.llama_vocab_n_tokens(self._vocab)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free context and model. May be called again."""
        if self._context:
            self._library.llama_free(self._context)
        if self._model:
            self._library.llama_model_free(self._model)
        self._context = self._model = None

    def logits(
        self,
        token_ids: Sequence[int] | AnyArray,
        chunks: Sequence[int] | None = None,
        start_position: int = 0,
    ) -> F32Array:
        """Logits after every position, from an empty KV cache.

        `chunks` are the sizes of the pieces decoded one after another (default: as few as
        `max_batch` allows); the first token stands at `start_position`.
        Shapes: token_ids [T]; result [T, V] float32.
        """
        if self._context is None:
            self._context = self._new_context(None)
        return self._decode(self._context, token_ids, chunks, start_position)

    def layer_tensors(
        self,
        token_ids: Sequence[int] | AnyArray,
        names: Collection[str],
        start_position: int = 0,
    ) -> dict[str, AnyArray]:
        """Inner tensors of one decode of all tokens, by llama.cpp's name, such as ``l_out-3``.

        Useful names: attn_norm, Qcur, Kcur, Vcur, kqv_out, ffn_norm, ffn_moe_logits,
        ffn_moe_topk, ffn_moe_weights_norm, ffn_moe_out, l_out with ``-<layer>``; result_norm.
        A name that the graph uses again keeps its last value: Qcur is after norm and rotation.
        Shapes: row-major with the token axis first, such as Qcur [T, heads, D], l_out [T, H].
        Raises: OracleError for a name that the graph has not.
        """
        found: dict[str, AnyArray] = {}

        def on_tensor(tensor: int, asked: bool, _user_data: object) -> bool:
            name = self._library.ggml_get_name(tensor).decode()
            if name not in names:
                return not asked
            if not asked:
                found[name] = self._read_tensor(tensor, len(token_ids))
            return True

        callback = EVAL_CALLBACK(on_tensor)
        context = self._new_context(callback)
        try:
            self._decode(context, token_ids, [len(token_ids)], start_position)
        finally:
            self._library.llama_free(context)
        if missing := sorted(set(names) - found.keys()):
            raise OracleError(f"the graph has no tensor named {', '.join(missing)}")
        return found

    def tokenize(
        self, text: str, *, parse_special: bool = True, add_special: bool = False
    ) -> list[int]:
        """Token ids of `text`; with `add_special`, those that begin and end a sequence too."""
        encoded = text.encode()
        buffer = (ctypes.c_int32 * (len(encoded) + 8))()
        count = self._library.llama_tokenize(
            self._vocab, encoded, len(encoded), buffer, len(buffer), add_special, parse_special
        )
        if count < 0:
            raise OracleError(f"llama.cpp does not tokenise {text!r}: code {count}")
        return list(buffer[:count])

    def _new_context(self, on_tensor: Callable[..., Any] | None) -> int:
        if self._model is None or self._vocab_only:
            raise OracleError("the oracle is closed, or was opened for its vocabulary alone")
        params = default_context_params(self._library)
        params.n_ctx = self._context_length
        params.n_batch = params.n_ubatch = self._max_batch
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = _FLASH_ATTENTION_DISABLED
        params.type_k = params.type_v = self._kv_type_id
        params.no_perf = True
        if self._yarn_beta_fast is not None:
            params.yarn_beta_fast = self._yarn_beta_fast
        if on_tensor is not None:
            params.cb_eval = ctypes.cast(on_tensor, ctypes.c_void_p)  # type: ignore[arg-type]
        _recent_errors.clear()
        context = self._library.llama_init_from_model(self._model, params)
        if not context:
            raise OracleError(f"llama.cpp makes no context: {'; '.join(_recent_errors)}")
        return int(context)

    def _decode(
        self,
        context: int,
        token_ids: Sequence[int] | AnyArray,
        chunks: Sequence[int] | None,
        start_position: int,
    ) -> F32Array:
        ids = np.asarray(token_ids, dtype=np.int32)
        if ids.ndim != 1 or not np.all((ids >= 0) & (ids < self.vocab_size)):
            raise ValueError(f"token ids must be one row of 0 … {self.vocab_size - 1}")
        if len(ids) > self._context_length:
            raise ValueError(f"{len(ids)} tokens exceed the context of {self._context_length}")
        if chunks is None:
            whole, rest = divmod(len(ids), self._max_batch)
            chunks = [self._max_batch] * whole + [rest] * (rest > 0)
        if sum(chunks) != len(ids) or not all(0 < size <= self._max_batch for size in chunks):
            raise ValueError(
                f"chunks {list(chunks)} must be of 1 … {self._max_batch} tokens, {len(ids)} in all"
            )
        self._library.llama_memory_clear(self._library.llama_get_memory(context), True)
        result = np.empty((len(ids), self.vocab_size), dtype=np.float32)
        done = 0
        for size in chunks:
            chunk = slice(done, done + size)
            self._decode_chunk(context, ids[chunk], start_position + done, result[chunk])
            done += size
        return result

    def _decode_chunk(
        self, context: int, ids: AnyArray, first_position: int, out: F32Array
    ) -> None:
        batch = self._library.llama_batch_init(len(ids), 0, 1)
        try:
            fill_batch(batch, ids, first_position, all_logits=True)
            _recent_errors.clear()
            if code := self._library.llama_decode(context, batch):
                raise OracleError(f"llama_decode: code {code}; {'; '.join(_recent_errors)}")
        finally:
            self._library.llama_batch_free(batch)
        for index in range(len(ids)):
            row = self._library.llama_get_logits_ith(context, index)
            if not row:
                raise OracleError(f"llama.cpp has no logits for token {index} of the chunk")
            out[index] = np.ctypeslib.as_array(row, shape=(self.vocab_size,))

    def _read_tensor(self, tensor: int, num_tokens: int) -> AnyArray:
        """Copy of a tensor with the token axis first."""
        values: AnyArray = tensor_values(self._library, tensor)[0]
        return values[0] if values.shape[:2] == (1, num_tokens) else values


def quantise(values: F32Array, tensor_type_name: str) -> U8Array:
    """Rows in a GGML block format, by llama.cpp's own quantiser; F32, F16 and BF16 too.

    Formats that need an importance matrix get one that is the same everywhere.
    Shapes: values [rows, columns] float32; result [rows, row_bytes] uint8.
    Raises: ValueError for a type not in `WEIGHT_TYPES`, or columns that are not whole blocks.
    """
    if tensor_type_name not in WEIGHT_TYPES:  # the quantiser would abort the process
        raise ValueError(f"{tensor_type_name} is not one of {', '.join(WEIGHT_TYPES)}")
    library = llama_library()
    tensor_type = gguf.GGMLQuantizationType[tensor_type_name]
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    rows, columns = values.shape
    if columns % block_elements:
        raise ValueError(f"{columns} columns are not whole {tensor_type_name} blocks")
    source = np.ascontiguousarray(values, dtype=np.float32)
    result = np.empty((rows, columns // block_elements * block_bytes), dtype=np.uint8)
    importance = None
    if library.ggml_quantize_requires_imatrix(tensor_type):
        importance = np.ones(columns, dtype=np.float32)
    num_bytes = library.ggml_quantize_chunk(
        tensor_type,
        source.ctypes.data,
        result.ctypes.data,
        0,
        rows,
        columns,
        None if importance is None else importance.ctypes.data,
    )
    if num_bytes != result.nbytes:
        raise OracleError(f"{tensor_type_name}: {num_bytes} bytes written, not {result.nbytes}")
    return result


def relative_error(values: AnyArray, reference: AnyArray) -> float:
    """``max|values - reference| / max|reference|``, in float64."""
    return float(np.max(position_errors(values, reference)))


def position_errors(values: AnyArray, reference: AnyArray) -> F64Array:
    """`relative_error` of each position, on the scale of the whole reference.

    For quantised files, where a rounding can flip an expert of some position: take the median.
    Shapes: values, reference [T, ...]; result [T].
    """
    if values.shape != reference.shape:
        raise ValueError(f"shapes differ: {values.shape} and {reference.shape}")
    exact = np.asarray(reference, dtype=np.float64).reshape(len(reference), -1)
    difference = np.asarray(values, dtype=np.float64).reshape(exact.shape) - exact
    errors: F64Array = np.abs(difference).max(axis=1) / np.abs(exact).max()
    return errors
