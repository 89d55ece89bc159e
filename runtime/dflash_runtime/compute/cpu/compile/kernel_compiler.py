"""Numba's compiler pipeline without the parts that kernels do not use.

A first start waits for this. Helpers become code that kernels are linked from: not optimised by
themselves, never made executable and not wrapped for Python or C. A kernel is optimised once, when
it has been linked; passes for features that kernels do not use are left out. That takes half the
time and gives the same bits.
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
