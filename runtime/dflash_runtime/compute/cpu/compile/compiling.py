"""Compiles kernels for this CPU, once for each machine: results are kept on disk if possible.

Kernels are plain functions of this package, compiled on first use, each for one signature, by
numba's pipeline without the parts that they do not use, since a first start waits for it. Helpers
become code that kernels are linked from: not optimised by themselves, never made executable and not
wrapped for Python or C. A kernel is optimised once, when it has been linked. That takes half the
time and gives the same bits.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn

import llvmlite
import numba

from dflash_protocol.fingerprint import digest
from dflash_runtime.compute.cpu.compile.kernel_cache import cache_for, release
from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.types import i64, void
from dflash_runtime.compute.cpu.simd.untyped import (
    CFunc,
    Compiler,
    CPUDispatcher,
    DefaultPassBuilder,
    JITCodeLibrary,
    NativeLowering,
    PassManager,
    cpu_target,
    llvm,
    njit,
    register_pass,
    types,
)
from dflash_runtime.interrupts import uninterrupted

# Part of the numeric class: raise it when a change to a kernel changes the bits of a result.
KERNEL_VERSION = 3

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
    """A compiled function that other kernels call through its address.

    Owns the code; `address` is valid while this object lives.
    """

    def __init__(self, function: Kernel, *argument_types: Any, result: Any = void) -> None:
        signature = argument_types, result
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


# -- numba's pipeline, shortened ------------------------------------------------------------------

_UNUSED_PASSES = frozenset(
    (
        "WithLifting",
        "InlineClosureLikes",
        "RewriteSemanticConstants",
        "DeadBranchPrune",
        "GenericRewrites",
        "RewriteDynamicRaises",
        "MakeFunctionToJitFunction",
        "InlineInlinables",
        "FindLiterallyCalls",
        "LiteralUnroll",
        "LiteralPropagationSubPipelinePass",
        "InlineOverloads",
        "NopythonRewrites",
        "NoPythonSupportedFeatureValidation",
        "DumpParforDiagnostics",
    )
)
"""Passes for closures, contexts, raising, literals, overloads in Python, array expressions."""


class _KernelLibrary(JITCodeLibrary):  # type: ignore[misc]
    def _optimize_functions(self, module: Any) -> None:
        """Do nothing: code linked from these functions is optimised as a whole."""
        module.data_layout = self._codegen._data_layout


class _HelperLibrary(_KernelLibrary):
    """The code of a helper and of the helpers it calls."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class KernelCompiler(Compiler):  # type: ignore[misc]
    """Compiles functions that are called from Python, or by address."""

    _library: type[_KernelLibrary] = _KernelLibrary
    _lowering: Any = NativeLowering

    def define_pipelines(self) -> list[Any]:
        library = self._library(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        library.enable_object_caching()
        self.state.library = library
        manager = PassManager("kernel")
        manager.passes = [
            (self._lowering if each is NativeLowering else each, description)
            for each, description in DefaultPassBuilder.define_nopython_pipeline(self.state).passes
            if each.__name__ not in _UNUSED_PASSES
        ]
        manager.finalize()
        return [manager]


@register_pass(mutates_CFG=True, analysis_only=False)
class _HelperLowering(NativeLowering):  # type: ignore[misc]
    _name = "helper_lowering"

    def run_pass(self, state: Any) -> bool:
        state.flags.no_compile = True
        super().run_pass(state)
        lowered = state["cr"]
        key = object()  # stands for the function pointer by which numba finds other functions
        state.targetctx.insert_user_function(key, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=key)
        return True


class _HelperCompiler(KernelCompiler):
    _library = _HelperLibrary
    _lowering = _HelperLowering


class Helper(CPUDispatcher):  # type: ignore[misc]
    """A function that kernels can call, and Python cannot."""

    def __init__(self, function: Any, options: dict[str, Any]) -> None:
        every = {**options, "nopython": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        super().__init__(function, {}, every, _HelperCompiler)

    def add_overload(self, compiled: Any) -> None:
        """Not registered where calls from Python would find it."""
        self.overloads[tuple(compiled.signature.args)] = compiled

    def _compile_for_args(self, *args: Any, **kws: Any) -> NoReturn:
        del args, kws
        raise TypeError(f"{self.py_func.__name__} can only be called by kernels")
