"""Names of numba and llvmlite as ``Any``: their annotations differ between supported versions."""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import llvmlite.ir
import numba
import numba.core.caching
import numba.core.ccallback
import numba.core.cgutils
import numba.core.codegen
import numba.core.compiler
import numba.core.compiler_machinery
import numba.core.imputils
import numba.core.registry
import numba.core.runtime
import numba.core.typed_passes
import numba.core.typing
import numba.core.typing.templates
import numba.extending

llvm: Any = llvmlite.binding
ir: Any = llvmlite.ir
types: Any = numba.types
config: Any = numba.config
njit: Any = numba.njit
CFunc: Any = numba.core.ccallback.CFunc
FunctionCache: Any = numba.core.caching.FunctionCache
NullCache: Any = numba.core.caching.NullCache
CacheImpl: Any = numba.core.caching.CompileResultCacheImpl
CacheLocator: Any = numba.core.caching._CacheLocator
cgutils: Any = numba.core.cgutils
cpu_target: Any = numba.core.registry.cpu_target
rtsys: Any = getattr(numba.core.runtime, "rtsys")  # noqa: B009
lower_builtin: Any = numba.core.imputils.lower_builtin
signature: Any = getattr(numba.core.typing, "signature")  # noqa: B009
templates: Any = numba.core.typing.templates
intrinsic: Any = numba.extending.intrinsic
models: Any = numba.extending.models
register_model: Any = numba.extending.register_model
Compiler: Any = numba.core.compiler.Compiler
CPUDispatcher: Any = numba.core.registry.CPUDispatcher
DefaultPassBuilder: Any = numba.core.compiler.DefaultPassBuilder
JITCodeLibrary: Any = numba.core.codegen.JITCodeLibrary
NativeLowering: Any = numba.core.typed_passes.NativeLowering
PassManager: Any = numba.core.compiler_machinery.PassManager
register_pass: Any = numba.core.compiler_machinery.register_pass
