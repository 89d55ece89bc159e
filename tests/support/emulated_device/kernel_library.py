"""Compiles kernel files to host libraries, once for all processes."""

from __future__ import annotations

import ctypes
import fcntl
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from dflash_protocol.errors import KernelCompileError
from dflash_protocol.settings import cache_folder
from dflash_runtime.compute.cpu.simd.instruction_sets import host_features
from dflash_runtime.compute.gpu.device.binary_cache import BinaryCache
from dflash_runtime.compute.gpu.device.kernel_sources import (
    digest_of,
    kernel_folders,
    kernel_path,
    kernel_source,
)

_FOLDER = Path(__file__).parent
_LANGUAGE = (
    *("-std=c++17", "-fPIC", "-DDFLASH_HOST"),
    *("-fvisibility=hidden", "-fno-gnu-unique", "-fno-exceptions", "-fno-rtti"),
    "-fno-asynchronous-unwind-tables",
    # As in GPU compilers: ints wrap around, and memory may be read as any type.
    *("-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"),
)
_FLAGS = (
    *_LANGUAGE,
    # Kernels are compiled per shape and run on little data. -Og compiles 10 % longer than -O0 and
    # runs in a quarter of the time; higher levels cost more than they save.
    *("-Og", "-shared", "-nostdlib"),
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero",
    *("-fno-sanitize-recover=all", "-fno-sanitize=vptr", "-Wframe-larger-than=65536"),
)
_INSTRUCTIONS = ("f16c", "fma", "sse4.1")
"""Of the processor, if it has them all: halves are converted often, and libm is called."""
_SCHEDULER_FLAGS = (*_LANGUAGE, "-O2", "-c")
_TIMEOUT_S = 300
_BINARIES = BinaryCache()


@cache
def kernel_library(file: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """Compile a kernel file, or find it on disk; loaded once per process.

    Raises: KernelCompileError.
    """
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        raise KernelCompileError("the emulated device needs g++, c++ or clang++")
    source = kernel_source(file, (_FOLDER,))
    scheduler = _scheduler(compiler, next(each for each in options if each.startswith("-DLANES=")))
    version = _compiler_version(compiler)
    options += _instructions()
    key = digest_of((source.digest, scheduler, *_FLAGS, *options, version))
    with tempfile.TemporaryDirectory(prefix="dflash-emulated-") as folder:
        other, path = Path(folder) / "scheduler.o", Path(folder) / "kernel.so"
        other.write_bytes(scheduler)
        content = _compiled(
            key,
            path,
            (compiler, *_FLAGS, *options, *(f"-I{each}" for each in (*kernel_folders(), _FOLDER))),
            ("-x", "c++", str(kernel_path(file)), "-x", "none", str(other), "-lm", "-lc"),
        )
        path.write_bytes(content)
        return ctypes.CDLL(str(path))


@cache
def _instructions() -> tuple[str, ...]:
    """Compiler flags for them."""
    has = host_features()
    return tuple(f"-m{each}" for each in _INSTRUCTIONS) if all(map(has.get, _INSTRUCTIONS)) else ()


@cache
def _scheduler(compiler: str, lanes: str) -> bytes:
    """The object file that every kernel for this number of lanes is linked with.

    Raises: KernelCompileError.
    """
    file = _FOLDER / "scheduler.cpp"
    source = kernel_source(file, (_FOLDER,))
    key = digest_of((source.digest, *_SCHEDULER_FLAGS, lanes, _compiler_version(compiler)))
    with tempfile.TemporaryDirectory(prefix="dflash-emulated-") as folder:
        path = Path(folder) / "scheduler.o"
        return _compiled(key, path, (compiler, *_SCHEDULER_FLAGS, lanes), (str(file),))


def _compiled(key: bytes, path: Path, command: tuple[str, ...], inputs: tuple[str, ...]) -> bytes:
    """The result on disk, or else of running the command. Raises: KernelCompileError."""
    with _compiled_by_one(key):
        content = _BINARIES.get(key)
        if content is None:
            result = subprocess.run(
                (*command, "-o", str(path), *inputs),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
            if result.returncode:
                raise KernelCompileError(f"{' '.join(inputs)}\n{result.stderr[:8000]}")
            content = path.read_bytes()
            _BINARIES.put(key, content)
    return content


@contextmanager
def _compiled_by_one(key: bytes) -> Iterator[None]:
    """Lock against other processes that compile the same module; they find it on disk afterwards.

    The holder's compiler has a time limit, and the lock ends with its process.
    """
    folder = cache_folder(None) / "emulated-locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / key[:1].hex()).open(
        "w"
    ) as file:  # at most 256 lock files, which are never removed
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _compiler_version(compiler: str) -> str:
    result = subprocess.run((compiler, "--version"), capture_output=True, text=True, timeout=60)
    return result.stdout
