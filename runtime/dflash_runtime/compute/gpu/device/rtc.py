"""Run-time compilation of kernels: NVRTC and hipRTC through ctypes, with one interface.

Neither needs a GPU. Machine code is cached on disk, by a digest of all that decides it: text,
options, compiler, architecture.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_protocol.errors import DeviceUnavailable, KernelCompileError, one_line
from dflash_runtime.compute.cores import default_counts
from dflash_runtime.compute.gpu.device.binary_cache import BinaryCache
from dflash_runtime.compute.gpu.device.capabilities import Capabilities, Vendor
from dflash_runtime.compute.gpu.device.kernel_sources import (
    Defines,
    KernelSource,
    define_options,
    digest_of,
    kernel_source,
)
from dflash_runtime.compute.topology import read_topology

_LOG = logging.getLogger(__name__)

_MAX_BINARY_BYTES = 64 << 20
_MAX_LOG_BYTES = 1 << 20
_MOST_AT_ONCE = 16
"""Kernels that are compiled at once; each takes some 30 MiB."""

_ONE_AT_A_TIME = threading.Lock()
"""For hipRTC. LLVM's options are the process's own, and ROCm 5.2 lets several threads read them at
once, of which one process in five died here; later ones have a lock of their own
(ROCm-CompilerSupport issues 27, 57)."""


@dataclass(frozen=True)
class _Names:
    """A vendor's names for the functions that both have."""

    prefix: str
    code_size: str
    code: str
    libraries: tuple[str, ...]
    wheels: tuple[str, ...]
    """Where packages of Python keep the library, below a folder of packages."""
    folders: tuple[str, ...]


_NAMES = {
    Vendor.CUDA: _Names(
        prefix="nvrtc",
        code_size="GetCUBINSize",
        code="GetCUBIN",
        libraries=("libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"),
        wheels=("nvidia/cuda_nvrtc/lib/libnvrtc.so.1?", "nvidia/cu1?/lib/libnvrtc.so.1?"),
        folders=("/usr/local/cuda/lib64/libnvrtc.so.1?", "/usr/local/cuda-*/lib64/libnvrtc.so.1?"),
    ),
    Vendor.HIP: _Names(
        prefix="hiprtc",
        code_size="GetCodeSize",
        code="GetCode",
        # Before ROCm 5.3 it was a part of the runtime.
        libraries=(
            *("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6"),
            *("libamdhip64.so", "libamdhip64.so.5"),
        ),
        wheels=("_rocm_sdk_core/lib/libhiprtc.so.?",),
        folders=("/opt/rocm/lib/libhiprtc.so", "/opt/rocm-*/lib/libhiprtc.so"),
    ),
}


@dataclass(frozen=True)
class Compiled:
    """Machine code, and the compiler's warnings."""

    binary: bytes
    warnings: str


class RuntimeCompiler:
    """One vendor's library. May be used by several threads at once; AMD's compiles for one."""

    def __init__(self, vendor: Vendor, library: ctypes.CDLL) -> None:
        """Raises: DeviceUnavailable if it is not the library it should be."""
        self._names = _NAMES[vendor]
        self._library = library
        for name in ("CreateProgram", "CompileProgram", self._names.code, "GetProgramLog"):
            if not hasattr(library, self._names.prefix + name):
                raise DeviceUnavailable(f"{library._name} has no {self._names.prefix}{name}")
        self._function("GetErrorString").restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.vendor = vendor
        self.version = f"{self._names.prefix} {major.value}.{minor.value}"
        self.major = major.value

    def supports(self, architecture: str) -> bool:
        """Whether it can compile for ``sm_90a``; AMD's compiler does not tell, so True."""
        if self.vendor is not Vendor.CUDA:
            return True
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", numbers)
        return architecture.removeprefix("sm_").rstrip("a") in map(str, numbers)

    def compile(self, source: KernelSource, options: Sequence[str]) -> Compiled:
        """Machine code of a file.

        Raises: KernelCompileError whose message has the first error; the whole log is logged.
        """
        with _ONE_AT_A_TIME if self.vendor is Vendor.HIP else nullcontext():
            return self._compile(source, options)

    def _compile(self, source: KernelSource, options: Sequence[str]) -> Compiled:
        program = ctypes.c_void_p()
        headers = source.headers
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for _, text in headers))
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name, _ in headers))
        self._call(
            "CreateProgram",
            ctypes.byref(program),
            source.text.encode(),
            source.name.encode(),
            ctypes.c_int(len(headers)),
            texts,
            names,
        )
        try:
            given = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
            status = self._function("CompileProgram")(program, ctypes.c_int(len(options)), given)
            log = self._fetch(program, "GetProgramLogSize", "GetProgramLog", _MAX_LOG_BYTES)
            text = _without_deprecation(log.rstrip(b"\0").decode(errors="replace"))
            if status:
                # docs: a kernel does not fit this compiler or device: report it with the log
                _LOG.error("cannot compile %s %s: %s", source.name, " ".join(options), text)
                raise KernelCompileError(self._first_error(source, status, text))
            binary = self._fetch(
                program, self._names.code_size, self._names.code, _MAX_BINARY_BYTES
            )
        finally:
            self._call("DestroyProgram", ctypes.byref(program))
        return Compiled(binary, text)

    def _first_error(self, source: KernelSource, status: int, text: str) -> str:
        lines = (line for line in text.splitlines() if "error" in line)
        return one_line(f"{source.name}: {next(lines, self._words_of(status))} ({self.version})")

    def _fetch(self, program: ctypes.c_void_p, size_name: str, name: str, most_bytes: int) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_name, program, ctypes.byref(size))
        if size.value > most_bytes:
            raise KernelCompileError(f"{self.version} made {size.value:,} bytes")
        content = ctypes.create_string_buffer(size.value)
        self._call(name, program, content)
        return content.raw

    def _function(self, name: str) -> Any:
        return getattr(self._library, self._names.prefix + name)

    def _words_of(self, status: int) -> str:
        words = self._function("GetErrorString")(status)
        return words.decode(errors="replace") if words else f"error {status}"

    def _call(self, name: str, *args: Any) -> None:
        status = self._function(name)(*args)
        if status:
            raise KernelCompileError(f"{self._names.prefix}{name}: {self._words_of(status)}")


def _without_deprecation(log: str) -> str:
    """The log without warnings that an old architecture is deprecated."""
    lines = (line for line in log.splitlines() if "are deprecated and may be removed" not in line)
    return "\n".join(lines).strip()


def architecture_options(capabilities: Capabilities) -> tuple[str, ...]:
    """Compiler options for an architecture."""
    if capabilities.vendor is Vendor.CUDA:
        # Line numbers for compute-sanitizer and profilers cost nothing at run time.
        return (f"-arch={capabilities.architecture}", "-std=c++17", "-lineinfo")
    return (f"--offload-arch={capabilities.architecture}", "-std=c++17", "-O3")


class DeviceCompiler:
    """Compiles kernel files for one device and caches the binaries on disk."""

    def __init__(
        self,
        compiler: RuntimeCompiler,
        capabilities: Capabilities,
        *,
        lanes: int,
        cache: BinaryCache | None = None,
    ) -> None:
        """Raises: DeviceUnavailable if the compiler does not know the architecture."""
        if not compiler.supports(capabilities.architecture):
            raise DeviceUnavailable(
                f"{compiler.version} does not support {capabilities.architecture}; "
                "install a newer one"
            )
        self._compiler = compiler
        self._options = architecture_options(capabilities)
        self._lanes = lanes
        self._cache = cache or BinaryCache()

    def binary(self, file: str, defines: Defines) -> bytes:
        """Machine code of a file with its defines and LANES, from the disk if it is cached there.

        Raises: KernelCompileError.
        """
        source = kernel_source(file)
        options = (*self._options, *define_options({"LANES": self._lanes, **defines}))
        key = digest_of((source.digest, self._compiler.version, *options))
        found = self._cache.get(key)
        if found is None:
            compiled = self._compiler.compile(source, options)
            if compiled.warnings:
                # docs: nothing to do; report it
                _LOG.warning("the compiler warns of %s: %s", file, compiled.warnings)
            found = compiled.binary
            self._cache.put(key, found)
        return found

    def compile_ahead(
        self,
        what: str,
        note: Callable[[Callable[[str, Defines], None]], None],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Compile the files with defines that `note` gives to the function it is given, several at
        once, and keep them on disk; unless that was done before for the same `what`.

        What cannot be compiled fails when it is needed. `on_progress` gets the number that is
        compiled, and of all; what it raises, or `note`, ends the compiling.
        """
        mark = digest_of(("ahead", what, self._compiler.version, *self._options, str(self._lanes)))
        if not self._cache.can_keep() or self._cache.get(mark) is not None:
            return
        is_hip = self._compiler.vendor is Vendor.HIP
        most = 1 if is_hip else min(_MOST_AT_ONCE, default_counts(read_topology()).prompts)
        begun: list[Future[bytes]] = []
        with ThreadPoolExecutor(most, thread_name_prefix="dflash-compile") as pool:
            try:
                note(lambda file, defines: begun.append(pool.submit(self.binary, file, defines)))
                for num_done, _ in enumerate(as_completed(begun), 1):
                    on_progress(num_done, len(begun))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self._cache.put(mark, b"")


@cache
def runtime_compiler(vendor: Vendor, newest_major: int | None = None) -> RuntimeCompiler:
    """The vendor's library, first from this interpreter's packages, then from the system.

    A driver loads nothing that a compiler of a newer major version made: `newest_major` is the
    newest that will do.
    Raises: DeviceUnavailable saying what was looked for.
    """
    reasons = []
    for path in _places(_NAMES[vendor]):
        try:
            compiler = RuntimeCompiler(vendor, ctypes.CDLL(path))
        except (OSError, DeviceUnavailable, KernelCompileError) as error:
            reasons.append(one_line(str(error)))
            continue
        if newest_major is not None and compiler.major > newest_major:
            reasons.append(f"{compiler.version} is too new for the driver")
            continue
        # docs: which NVRTC or hipRTC was found
        _LOG.info("kernels are compiled by %s, %s", compiler.version, path)
        return compiler
    library, *_ = _NAMES[vendor].libraries
    raise DeviceUnavailable(
        f"no compiler for {vendor} kernels: {reasons[0] if reasons else f'{library} not found'}"
    )


def _places(names: _Names) -> Iterator[str]:
    for folder in map(Path, sys.path):
        for pattern in names.wheels:
            yield from map(str, sorted(folder.glob(pattern)))
    yield from names.libraries
    for pattern in names.folders:
        yield from map(str, sorted(Path("/").glob(pattern.removeprefix("/"))))
