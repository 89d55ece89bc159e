"""llama.cpp's C interface for ctypes: structures, signatures, and a check that they fit a build.

Used by the benches, the tests' oracle and the demo model's evaluation, with builds of several
versions.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

P, I32, I64, SIZE, FLAG = (
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_size_t,
    ctypes.c_bool,
)

CPU = "CPU"
"""llama.cpp's name of the CPU as a device."""

Calls = Mapping[str, tuple[Any, Sequence[Any]]]
"""Functions by name: type of the result, types of the arguments."""

LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, P)
"""(level, text, user data). llama.cpp keeps the pointer as long as the process lives."""
EVAL_CALLBACK = ctypes.CFUNCTYPE(FLAG, P, FLAG, P)
"""(tensor, whether this call only asks if it is wanted, user data)."""

_MOST_BYTES = 1024
"""Larger than any structure of parameters."""


class LlamaError(RuntimeError):
    """llama.cpp refused a request, or the build has unknown structures."""


class ModelParams(ctypes.Structure):
    """llama_model_params, of 80 bytes"""

    _fields_ = (
        ("devices", P),
        ("tensor_buft_overrides", P),
        ("n_gpu_layers", I32),
        ("split_mode", I32),
        ("load_mode", I32),
        ("lazy_mode", I32),
        ("main_gpu", I32),
        ("tensor_split", P),
        ("progress_callback", P),
        ("progress_callback_user_data", P),
        ("kv_overrides", P),
        ("vocab_only", FLAG),
        ("check_tensors", FLAG),
        ("use_extra_bufts", FLAG),
        ("no_host", FLAG),
        ("no_alloc", FLAG),
        ("load_mtp", FLAG),
    )


class TensorPlace(ctypes.Structure):
    """llama_model_tensor_buft_override: where tensors go whose names match. A list of them ends
    with one of null pointers."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", P))


_CONTEXT_BEGIN = (
    ("n_ctx", ctypes.c_uint32),
    ("n_batch", ctypes.c_uint32),
    ("n_ubatch", ctypes.c_uint32),
    ("n_seq_max", ctypes.c_uint32),
    ("n_rs_seq", ctypes.c_uint32),
    ("n_outputs_max", ctypes.c_uint32),
    ("n_outputs_max_per_seq", ctypes.c_uint32),
    ("n_threads", I32),
    ("n_threads_batch", I32),
    ("ctx_type", I32),
    ("rope_scaling_type", I32),
    ("pooling_type", I32),
    ("attention_type", I32),
    ("flash_attn_type", I32),
    ("rope_freq_base", ctypes.c_float),
    ("rope_freq_scale", ctypes.c_float),
    ("yarn_ext_factor", ctypes.c_float),
    ("yarn_attn_factor", ctypes.c_float),
    ("yarn_beta_fast", ctypes.c_float),
    ("yarn_beta_slow", ctypes.c_float),
    ("yarn_orig_ctx", ctypes.c_uint32),
    ("defrag_thold", ctypes.c_float),
    ("cb_eval", P),
    ("cb_eval_user_data", P),
    ("type_k", I32),
    ("type_v", I32),
    ("abort_callback", P),
    ("abort_callback_data", P),
)
_CONTEXT_END = (
    ("embeddings", FLAG),
    ("offload_kqv", FLAG),
    ("no_perf", FLAG),
    ("op_offload", FLAG),
    ("swa_full", FLAG),
    ("kv_unified", FLAG),
    ("samplers", P),
    ("n_samplers", SIZE),
    ("ctx_other", P),
)


class ContextParams(ctypes.Structure):
    """llama_context_params since b11549, of 168 bytes"""

    _fields_ = (*_CONTEXT_BEGIN, ("expert_cache_bytes", ctypes.c_uint64), *_CONTEXT_END)


class OlderContextParams(ctypes.Structure):
    """llama_context_params before the expert cache's size came in, of 160 bytes"""

    _fields_ = (*_CONTEXT_BEGIN, *_CONTEXT_END)


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", I32),
        ("token", ctypes.POINTER(I32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(I32)),
        ("n_seq_id", ctypes.POINTER(I32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(I32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class TensorHead(ctypes.Structure):
    """First fields of ggml_tensor: type, buffer, elements and bytes a step of each axis."""

    _fields_ = (("type", I32), ("buffer", P), ("ne", I64 * 4), ("nb", SIZE * 4))


def declare(library: ctypes.CDLL, calls: Calls) -> None:
    """Set the types of these functions. Raises: AttributeError if the library lacks one."""
    for name, (result_type, argument_types) in calls.items():
        function = getattr(library, name)
        function.restype = result_type
        function.argtypes = argument_types


def llama_calls(context_params: type[ctypes.Structure]) -> Calls:
    """The functions of libllama that every program here calls, for a build with such context
    parameters."""
    return {
        "llama_backend_init": (None, []),
        "llama_batch_free": (None, [Batch]),
        "llama_batch_init": (Batch, [I32, I32, I32]),
        "llama_decode": (I32, [P, Batch]),
        "llama_free": (None, [P]),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [P, I32]),
        "llama_get_memory": (P, [P]),
        "llama_init_from_model": (P, [P, context_params]),
        "llama_log_set": (None, [LOG_CALLBACK, P]),
        "llama_max_devices": (SIZE, []),
        "llama_memory_clear": (None, [P, FLAG]),
        "llama_memory_seq_rm": (FLAG, [P, I32, I32, I32]),
        "llama_model_free": (None, [P]),
        "llama_model_get_vocab": (P, [P]),
        "llama_model_load_from_file": (P, [ctypes.c_char_p, ModelParams]),
        "llama_set_n_threads": (None, [P, I32, I32]),
        "llama_tokenize": (I32, [P, ctypes.c_char_p, I32, P, I32, FLAG, FLAG]),
        "llama_vocab_n_tokens": (I32, [P]),
    }


TENSOR_CALLS: Calls = {
    "ggml_backend_tensor_get": (None, [P, P, SIZE, SIZE]),
    "ggml_get_name": (ctypes.c_char_p, [P]),
    "ggml_nbytes": (SIZE, [P]),
}
"""For tensors passed to callbacks."""

DEVICE_CALLS: Calls = {
    "ggml_backend_dev_buffer_type": (P, [P]),
    "ggml_backend_dev_memory": (None, [P, P, P]),
    "ggml_backend_dev_name": (ctypes.c_char_p, [P]),
}
REGISTRY_CALLS: Calls = {
    "ggml_backend_dev_by_name": (P, [ctypes.c_char_p]),
    "ggml_backend_dev_count": (SIZE, []),
    "ggml_backend_dev_get": (P, [SIZE]),
    "ggml_backend_reg_by_name": (P, [ctypes.c_char_p]),
    "ggml_backend_register": (None, [P]),
}
"""The devices of a build, and where each keeps tensors."""


def default_params(
    library: ctypes.CDLL, function_name: str, *layouts: type[ctypes.Structure]
) -> Any:
    """Default parameters from the function of this name; see `written_params`."""
    # A structure this large is returned through a pointer to it, passed as the first argument.
    return written_params(ctypes.CFUNCTYPE(P, P)((function_name, library)), *layouts)


def written_params(function: Callable[[int], Any], *layouts: type[ctypes.Structure]) -> Any:
    """What `function` writes to an address, as the one layout that has exactly these bytes.

    It fills a buffer twice, over two patterns: bytes equal in both are those it writes, which gives
    the structure's size and padding.
    Raises: LlamaError if the structure is none of the known ones.
    """
    images: list[bytes] = []
    for fill in (0xA5, 0x5A):
        buffer = ctypes.create_string_buffer(bytes([fill]) * _MOST_BYTES, _MOST_BYTES)
        function(ctypes.addressof(buffer))
        images.append(buffer.raw)
    written = [index for index, (a, b) in enumerate(zip(*images, strict=True)) if a == b]
    for layout in layouts:
        if written == _bytes_of(layout):
            return layout.from_buffer_copy(images[0])
    size, holes = written[-1] + 1, sorted(set(range(written[-1])) - set(written))
    known = " or ".join(f"{each.__doc__} ({ctypes.sizeof(each)} bytes)" for each in layouts)
    raise LlamaError(
        f"the build's parameters have {size} bytes, not written {holes}; known here is {known}: "
        "compare llama.h of that build with bench/llama_api.py"
    )


def _bytes_of(layout: type[ctypes.Structure]) -> list[int]:
    """Offsets of the bytes that are not padding."""
    fields = [getattr(layout, name) for name, *_ in layout._fields_]
    return [index for field in fields for index in range(field.offset, field.offset + field.size)]


def check_defaults(params: ctypes.Structure, **expected: int) -> None:
    """Raises: LlamaError if a field does not have its known default, so has moved."""
    found = {name: getattr(params, name) for name in expected}
    if found != expected:
        raise LlamaError(f"defaults {found} of {type(params).__doc__} were expected as {expected}")


def default_model_params(library: ctypes.CDLL) -> Any:
    """ModelParams. Raises: LlamaError if the build has another structure."""
    params = default_params(library, "llama_model_default_params", ModelParams)
    check_defaults(params, use_extra_bufts=True, vocab_only=False, check_tensors=False)
    return params


def default_context_params(library: ctypes.CDLL) -> Any:
    """ContextParams or OlderContextParams. Raises: LlamaError if the build has neither."""
    params = default_params(
        library, "llama_context_default_params", ContextParams, OlderContextParams
    )
    check_defaults(params, n_ctx=512, n_batch=2048, n_ubatch=512, n_seq_max=1, offload_kqv=True)
    check_defaults(params, flash_attn_type=-1, type_k=1, type_v=1)
    return params


def fill_batch(
    batch: Any,
    token_ids: Sequence[int] | npt.NDArray[np.integer],
    first_position: int,
    *,
    all_logits: bool,
) -> None:
    """Tokens of one sequence, with logits wanted after each or after the last alone."""
    batch.n_tokens = len(token_ids)
    for index, token_id in enumerate(token_ids):
        batch.token[index] = int(token_id)
        batch.pos[index] = first_position + index
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = 0
        batch.logits[index] = all_logits or index == len(token_ids) - 1


def tensor_bytes(library: Any, tensor: int) -> npt.NDArray[np.uint8]:
    """Copy of all bytes of a tensor. Shapes: result [bytes]."""
    raw = np.empty(library.ggml_nbytes(tensor), np.uint8)
    library.ggml_backend_tensor_get(tensor, raw.ctypes.data, 0, raw.nbytes)
    return raw


_ELEMENT_TYPES = {0: np.float32, 1: np.float16, 26: np.int32}
"""By ggml's type ids."""


def tensor_values(library: Any, tensor: int) -> npt.NDArray[Any]:
    """Copy of a tensor's elements, by its own strides: some are views of wider tensors.

    Shapes: result has ggml's four axes, the last first.
    """
    head = TensorHead.from_address(tensor)
    raw = tensor_bytes(library, tensor)
    shape, strides = list(head.ne)[::-1], list(head.nb)[::-1]
    return np.ndarray(shape, _ELEMENT_TYPES[head.type], raw, strides=strides).copy()


def open_wheel() -> ctypes.CDLL:
    """The library in the `xllamacpp` wheel, which exports the C interfaces of llama.cpp and ggml,
    with the types of `llama_calls` and `TENSOR_CALLS`.

    Raises: LlamaError if the wheel is missing, or its structures are unknown.
    """
    spec = importlib.util.find_spec("xllamacpp")
    folders = () if spec is None else spec.submodule_search_locations or ()
    files = [file for folder in folders for file in Path(folder).glob("xllamacpp*.so")]
    if len(files) != 1:
        raise LlamaError(f"the xllamacpp wheel's extension library was looked for, found {files}")
    library = ctypes.CDLL(str(files[0]))
    declare(library, llama_calls(type(default_context_params(library))))
    declare(library, TENSOR_CALLS)
    return library
