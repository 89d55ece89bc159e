"""llama.cpp's libraries, opened with ctypes: loading, signatures, settings of the process.

peer_layer.py and peer_model.py measure with them.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

from bench.build_peer import WITH_CUDA, build_record, libraries_of
from bench.cuda_toolkit import load_runtime_libraries
from bench.llama_api import (
    DEVICE_CALLS,
    FLAG,
    I32,
    I64,
    LOG_CALLBACK,
    REGISTRY_CALLS,
    SIZE,
    TENSOR_CALLS,
    Calls,
    LlamaError,
    P,
    declare,
    default_context_params,
    llama_calls,
)
from bench.peer_fit import FIT_CALLS, LIMIT_CALLS

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


_ERROR_LEVEL = 4
"""Errors in ggml's log levels."""
_recent_errors: deque[str] = deque(maxlen=4)


class PeerError(LlamaError):
    """llama.cpp refused a request; the text ends with the last errors it logged."""

    def __init__(self, text: str) -> None:
        super().__init__("; ".join([text, *_recent_errors]))


class GgmlInitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", FLAG))


_GGML_BASE: Calls = {
    **TENSOR_CALLS,
    **DEVICE_CALLS,
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
    "ggml_backend_free": (None, [P]),
    "ggml_backend_graph_compute": (I32, [P, P]),
    "ggml_backend_tensor_set": (None, [P, P, SIZE, SIZE]),
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

_GGML_CPU: Calls = {
    "ggml_backend_cpu_init": (P, []),
    "ggml_backend_cpu_set_n_threads": (None, [P, I32]),
    "ggml_backend_cpu_reg": (P, []),
}


@LOG_CALLBACK  # type: ignore[untyped-decorator]
def _keep_errors(level: int, text: bytes, _user_data: object) -> None:
    """Replaces ggml's and llama.cpp's printing, a line for every tensor."""
    if level == _ERROR_LEVEL:
        _recent_errors.append(text.decode(errors="replace").strip())


def keep_errors(library: Any) -> None:
    """Let PeerErrors of this process tell what `library`, a Peer or the wheel, logs as an error."""
    library.llama_log_set(_keep_errors, None)


class Peer:
    """The libraries of one variant; once a process, since their symbols are global.

    Their functions are attributes: ``peer.ggml_init(...)``.
    """

    def __init__(self, folder: Path) -> None:
        """Raises: BuildError if `folder` has no finished build, LlamaError if an unknown one."""
        self.record = build_record(folder)
        variant = self.record["variant"]
        self.has_cuda = variant in WITH_CUDA
        if self.has_cuda:
            load_runtime_libraries(self.record["cuda"].partition(".")[0])
        # The peer uses its own default of waiting, whatever this process's environment says.
        for name in _OPENMP_VARIABLES:
            os.unsetenv(name)
        # Some of a build's libraries have parts of the C++ library in them, others use the shared
        # one. It comes first, so that all of them use that: two of them crash on streams.
        ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
        names = libraries_of(variant)
        libraries = [ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL) for name in names]
        base, cpu, *_, ggml, self.llama, fit = libraries
        of_llama = llama_calls(type(default_context_params(self.llama)))
        of_libraries = (
            (base, _GGML_BASE),
            (cpu, _GGML_CPU),
            (ggml, REGISTRY_CALLS),
            (self.llama, {**of_llama, **LIMIT_CALLS}),
            (fit, FIT_CALLS),
        )
        for library, calls in of_libraries:
            declare(library, calls)
            for name in calls:
                setattr(self, name, getattr(library, name))
        keep_errors(self)
        self.llama_backend_init()

    def device_names(self) -> list[str]:
        """Names of the devices it can compute on: ``CUDA0``, ``CPU`` and the like."""
        devices = [self.ggml_backend_dev_get(each) for each in range(self.ggml_backend_dev_count())]
        return [self.ggml_backend_dev_name(device).decode() for device in devices]

    def __getattr__(self, name: str) -> Any:
        """For type checkers only: every function is set in the constructor."""
        raise AttributeError(name)


def find_device(library: Any, name: str) -> int:
    """The device with llama.cpp's name for it; `library` is a Peer, or has `REGISTRY_CALLS`.

    Raises: PeerError if there is none.
    """
    device = library.ggml_backend_dev_by_name(name.encode())
    if not device:
        raise PeerError(f"llama.cpp has no device {name}")
    return int(device)


@cache
def open_peer(folder: Path) -> Peer:
    """The peer in a folder returned by `build_peer.build`."""
    return Peer(folder)
