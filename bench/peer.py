"""llama.cpp's libraries, opened with ctypes: loading, types of the calls, settings of the process.

Knows nothing of what is measured; peer_layer.py and peer_model.py do.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bench.build_peer import LIBRARIES, build_record

_OPENMP_VARIABLES = (
    "OMP_WAIT_POLICY",
    "OMP_NUM_THREADS",
    "OMP_THREAD_LIMIT",
    "OMP_DYNAMIC",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_SPINCOUNT",
    "GOMP_CPU_AFFINITY",
)

P, I32, I64, SIZE, FLAG = (
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_size_t,
    ctypes.c_bool,
)


class PeerError(RuntimeError):
    """llama.cpp refused a request, or is not the build whose structures are known here."""


class GgmlInitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", FLAG))


class LlamaModelParams(ctypes.Structure):
    """llama_model_params of llama.cpp 0c1e57098."""

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


class LlamaContextParams(ctypes.Structure):
    """llama_context_params of llama.cpp 0c1e57098."""

    _fields_ = (
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


class LlamaBatch(ctypes.Structure):
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


_GGML_BASE: dict[str, tuple[Any, Sequence[Any]]] = {
    "ggml_init": (P, [GgmlInitParams]),
    "ggml_free": (None, [P]),
    "ggml_tensor_overhead": (SIZE, []),
    "ggml_graph_overhead_custom": (SIZE, [SIZE, FLAG]),
    "ggml_new_graph_custom": (P, [P, SIZE, FLAG]),
    "ggml_build_forward_expand": (None, [P, P]),
    "ggml_new_tensor_1d": (P, [P, I32, I64]),
    "ggml_new_tensor_2d": (P, [P, I32, I64, I64]),
    "ggml_new_tensor_3d": (P, [P, I32, I64, I64, I64]),
    "ggml_view_2d": (P, [P, P, I64, I64, SIZE, SIZE]),
    "ggml_mul_mat_id": (P, [P, P, P, P]),
    "ggml_swiglu_split": (P, [P, P, P]),
    "ggml_mul": (P, [P, P, P]),
    "ggml_add": (P, [P, P, P]),
    "ggml_set_input": (None, [P]),
    "ggml_set_output": (None, [P]),
    "ggml_nbytes": (SIZE, [P]),
    "ggml_backend_free": (None, [P]),
    "ggml_backend_graph_compute": (I32, [P, P]),
    "ggml_backend_tensor_set": (None, [P, P, SIZE, SIZE]),
    "ggml_backend_tensor_get": (None, [P, P, SIZE, SIZE]),
    "ggml_backend_tensor_alloc": (I32, [P, P, P]),
    "ggml_backend_cpu_buffer_from_ptr": (P, [P, SIZE]),
    "ggml_backend_cpu_buffer_type": (P, []),
    "ggml_backend_buffer_set_usage": (None, [P, I32]),
    "ggml_backend_buffer_free": (None, [P]),
    "ggml_backend_buffer_get_base": (P, [P]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [P]),
    "ggml_backend_buft_alloc_buffer": (P, [P, SIZE]),
    "ggml_backend_buft_get_alloc_size": (SIZE, [P, P]),
    "ggml_backend_reg_get_proc_address": (P, [P, ctypes.c_char_p]),
    "ggml_backend_reg_dev_get": (P, [P, SIZE]),
    "ggml_backend_dev_supports_op": (FLAG, [P, P]),
    "ggml_gallocr_new": (P, [P]),
    "ggml_gallocr_free": (None, [P]),
    "ggml_gallocr_alloc_graph": (FLAG, [P, P]),
}

_GGML_CPU: dict[str, tuple[Any, Sequence[Any]]] = {
    "ggml_backend_cpu_init": (P, []),
    "ggml_backend_cpu_set_n_threads": (None, [P, I32]),
    "ggml_backend_cpu_reg": (P, []),
}

_LLAMA: dict[str, tuple[Any, Sequence[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (LlamaModelParams, []),
    "llama_context_default_params": (LlamaContextParams, []),
    "llama_model_load_from_file": (P, [ctypes.c_char_p, LlamaModelParams]),
    "llama_model_free": (None, [P]),
    "llama_init_from_model": (P, [P, LlamaContextParams]),
    "llama_free": (None, [P]),
    "llama_get_memory": (P, [P]),
    "llama_memory_clear": (None, [P, FLAG]),
    "llama_memory_seq_rm": (FLAG, [P, I32, I32, I32]),
    "llama_batch_init": (LlamaBatch, [I32, I32, I32]),
    "llama_batch_free": (None, [LlamaBatch]),
    "llama_decode": (I32, [P, LlamaBatch]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [P, I32]),
    "llama_log_set": (None, [P, P]),
}

_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, P)


@_LOG  # type: ignore[untyped-decorator]
def _drop_log(_level: int, _text: bytes, _user_data: object) -> None:
    """ggml and llama.cpp print a line a tensor otherwise."""


class Peer:
    """The libraries of one variant; once a process, since their symbols are global.

    Their functions are attributes: ``peer.ggml_init(...)``.
    """

    def __init__(self, folder: Path) -> None:
        """Raises: BuildError if `folder` holds no finished build."""
        self.record = build_record(folder)
        # The peer waits as it does by itself, whatever this process was told for others.
        for name in _OPENMP_VARIABLES:
            os.unsetenv(name)
        libraries = [ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL) for name in LIBRARIES]
        base, cpu, _ggml, llama = libraries
        for library, calls in ((base, _GGML_BASE), (cpu, _GGML_CPU), (llama, _LLAMA)):
            for name, (result_type, argument_types) in calls.items():
                function = getattr(library, name)
                function.restype = result_type
                function.argtypes = argument_types
                setattr(self, name, function)
        self.llama_log_set(ctypes.cast(_drop_log, P), None)
        self.llama_backend_init()

    def __getattr__(self, name: str) -> Any:
        """Only for type checkers: every call is set in the constructor."""
        raise AttributeError(name)


@cache
def open_peer(folder: Path) -> Peer:
    """The peer in a folder that `build_peer.build` gave."""
    return Peer(folder)
