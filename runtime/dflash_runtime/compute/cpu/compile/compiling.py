"""Compiles kernels for this CPU, once for each machine: results are kept on disk if possible.

Kernels are plain functions of this package, compiled on first use, each for one signature.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from types import FunctionType
from typing import Any

import llvmlite
import numba

from dflash_protocol.fingerprint import digest
from dflash_runtime.compute.cpu.compile.kernel_cache import cache_for, release
from dflash_runtime.compute.cpu.compile.kernel_compiler import Helper, KernelCompiler
from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.types import i64, void
from dflash_runtime.compute.cpu.simd.untyped import CFunc, cpu_target, llvm, njit, types
from dflash_runtime.interrupts import uninterrupted

# Part of the numeric class: raise it when a change to a kernel changes the bits of a result.
KERNEL_VERSION = 2

Kernel = Callable[..., Any]

_OPTIONS = {"error_model": "numpy", "nogil": True}


def compile_kernel(function: Kernel, *argument_types: Any) -> Kernel:
    """Compile a function for Python; it releases the GIL and refuses other argument types."""
    kernel = njit(**_OPTIONS, pipeline_class=KernelCompiler)(function)
    kernel._cache = cache_for(function)
    # LLVM calls Python while it links; exceptions raised there, KeyboardInterrupt too, are lost.
    with uninterrupted():
        try:
            kernel.compile(argument_types)
        finally:
            release(kernel._cache)
    kernel.disable_compile()
    return kernel  # type: ignore[no-any-return]


def compile_task(function: Kernel) -> RowFunction:
    """Compile ``task(args, counter, worker_idx)``, which threads run; see threads/parallel."""
    return RowFunction(function, i64, i64, i64)


def read_only(element: Any, ndim: int) -> Any:
    """The type of a contiguous array that a kernel does not write."""
    return types.Array(element, ndim, "C", readonly=True)


class RowFunction:
    """A compiled function that other kernels call through its address, without a result.

    Owns the code; `address` is valid while this object lives.
    """

    def __init__(self, function: Kernel, *argument_types: Any) -> None:
        signature = argument_types, void
        callback = CFunc(function, signature, {}, dict(_OPTIONS), pipeline_class=KernelCompiler)
        callback._cache = cache_for(function)
        with uninterrupted():
            try:
                callback.compile()
            finally:
                release(callback._cache)
        self._callback = callback
        self.address = int(callback.address)
        self.came_from_cache: bool = callback.cache_hits > 0


def variant(function: Kernel, name: str, **others: object) -> Kernel:
    """The same function with some globals replaced, cached under `name`."""
    assert isinstance(function, FunctionType)
    varied = FunctionType(function.__code__, function.__globals__ | others, name)
    varied.__qualname__ = name
    varied.__module__ = function.__module__
    return varied


def helper(function: Kernel) -> Kernel:
    """Mark a function that kernels call; it is compiled into each of them."""
    return Helper(function, _OPTIONS)


def numeric_class() -> str:
    """Names what decides a result's bits: the kernels, their compiler and the CPU."""
    tier = current_tier()  # restricts the features
    _, cpu_name, features = cpu_target.target_context.codegen().magic_tuple()
    features_digest = digest("cpu-features-v1", [str(features).encode()])[:8]
    return (
        f"cpu-{KERNEL_VERSION}/{tier.numerics}/{cpu_name}+{features_digest}"
        f"/numba-{numba.__version__}/llvmlite-{llvmlite.__version__}"
    )


def is_supported_cpu() -> bool:
    """Whether kernels run on this CPU: without F16C LLVM calls functions that do not exist to read
    halves."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return bool(llvm.get_host_cpu_features().get("f16c"))
    return machine in ("aarch64", "arm64")
