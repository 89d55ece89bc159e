"""How numba compiles our kernels and what they call: its own way, without what nothing here uses.

A first start waits for this. Helpers become code that kernels are linked from, not optimised by
themselves, never made executable and not wrapped for Python or C; a kernel is optimised once, when
all of it has been linked; and passes over features that kernels do not have are left out. That is
half the time, and the same bits.
"""

from __future__ import annotations

from typing import Any, NoReturn

from dflash_runtime.compute.cpu.simd.untyped import (
    Compiler,
    CPUDispatcher,
    DefaultPassBuilder,
    JITCodeLibrary,
    NativeLowering,
    PassManager,
    register_pass,
)

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
"""Closures, contexts, raising, literals, overloads written in Python, array expressions."""


class _KernelLibrary(JITCodeLibrary):  # type: ignore[misc]
    def _optimize_functions(self, module: Any) -> None:
        """Nothing: what is linked from these functions is optimised as a whole."""
        module.data_layout = self._codegen._data_layout


class _HelperLibrary(_KernelLibrary):
    """Code of a helper and of those it calls."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class KernelCompiler(Compiler):  # type: ignore[misc]
    """Of functions that are called from Python, or by their address."""

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
        key = object()  # by which callers find it, as they find others by what can be called
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
        """Not where calls from Python would find it."""
        self.overloads[tuple(compiled.signature.args)] = compiled

    def _compile_for_args(self, *args: Any, **kws: Any) -> NoReturn:
        del args, kws
        raise TypeError(f"{self.py_func.__name__} is for kernels to call")
