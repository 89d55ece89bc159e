"""Compiles kernels for this CPU, once per machine: results are kept on disk where that is possible.

Kernels are plain functions of this package that are compiled when somebody first needs them, each
for one signature. Knows nothing of what they compute.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba

from dflash_protocol.fingerprint import digest
from dflash_runtime.compute.cpu.untyped import (
    CFunc,
    FunctionCache,
    NullCache,
    cpu_target,
    llvm,
    njit,
)

# Part of the numeric class: raise it when a change to a kernel changes the bits of a result.
KERNEL_VERSION = 1

Kernel = Callable[..., Any]

_OPTIONS = {"error_model": "numpy", "nogil": True}


def compile_kernel(function: Kernel, *argument_types: Any) -> Kernel:
    """A function to be called from Python; it releases the GIL and refuses other argument types."""
    kernel = njit(**_OPTIONS)(function)
    kernel._cache = _cache_for(function)
    kernel.compile(argument_types)
    kernel.disable_compile()
    return kernel  # type: ignore[no-any-return]


def compile_row_function(function: Kernel, result: Any, *argument_types: Any) -> RowFunction:
    """A function to be called by other kernels through its address."""
    return RowFunction(function, result, argument_types)


class RowFunction:
    """Owns compiled code; `address` is valid while this object lives."""

    def __init__(self, function: Kernel, result: Any, argument_types: tuple[Any, ...]) -> None:
        callback = CFunc(function, (argument_types, result), locals={}, options=dict(_OPTIONS))
        callback._cache = _cache_for(function)
        callback.compile()
        self._callback = callback
        self.address = int(callback.address)
        self.came_from_cache: bool = callback.cache_hits > 0


def helper(function: Kernel) -> Kernel:
    """Mark a function that kernels call; it is compiled into each of them."""
    return njit(**_OPTIONS)(function)  # type: ignore[no-any-return]


def numeric_class() -> str:
    """Names what decides the bits of a result: the kernels, their compiler and the CPU."""
    _, cpu_name, features = cpu_target.target_context.codegen().magic_tuple()
    features_digest = digest("cpu-features-v1", [str(features).encode()])[:8]
    return (
        f"cpu-{KERNEL_VERSION}/{cpu_name}+{features_digest}"
        f"/numba-{numba.__version__}/llvmlite-{llvmlite.__version__}"
    )


def is_supported_cpu() -> bool:
    """Whether kernels can run here: LLVM would call functions that do not exist to read halves."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return bool(llvm.get_host_cpu_features().get("f16c"))
    return machine in ("aarch64", "arm64")


@cache
def _sources_digest() -> str:
    """Of every module here: a kernel's code also depends on the helpers it was built from."""
    state = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache on disk, except that trouble with it costs time and never more.

    Numba looks at the one source file of a function; here any change to the package counts.
    """

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _sources_digest())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged file can raise whatever unpickling can
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(Exception):  # no space, no longer ours to write, damaged meanwhile
            super().save_overload(sig, data)


def _cache_for(function: Kernel) -> Any:
    try:
        return _KernelCache(function)
    except (RuntimeError, OSError):  # no writable place for a cache
        return NullCache()
