"""Kernel files as libraries of the host, compiled once for all processes."""

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
from dflash_protocol.settings import cache_directory_in_use
from dflash_runtime.compute.cupy.binary_cache import BinaryCache
from dflash_runtime.compute.cupy.kernel_sources import KERNELS_FOLDER, digest_of, kernel_source

_FOLDER = Path(__file__).parent
_FLAGS = (
    # Kernels are compiled for one shape each and run on little: this takes a tenth more than not to
    # optimise at all, and runs in a quarter; more of it takes longer than it saves.
    *("-std=c++17", "-Og", "-fPIC", "-shared", "-DDFLASH_HOST"),
    *("-fvisibility=hidden", "-fno-gnu-unique", "-fno-exceptions", "-fno-rtti"),
    *("-fno-asynchronous-unwind-tables", "-nostdlib"),
    # As devices' compilers have it: ints wrap around, bytes may be read as anything.
    *("-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off"),
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero",
    *("-fno-sanitize-recover=all", "-fno-sanitize=vptr"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"),
    "-Wframe-larger-than=65536",
)


@cache
def kernel_library(file: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """Compiled, or found on disk; loaded once a process.

    Raises: KernelCompileError.
    """
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        raise KernelCompileError("the emulated device needs g++, c++ or clang++")
    source = kernel_source(file, (_FOLDER,))
    version = _compiler_version(compiler)
    key = digest_of((source.digest, *_FLAGS, *options, version))
    binaries = BinaryCache()
    with (
        tempfile.TemporaryDirectory(prefix="dflash-emulated-") as folder,
        _compiled_by_one(key),
    ):
        content = binaries.get(key)
        library = Path(folder) / "kernel.so"
        if content is not None:
            library.write_bytes(content)
        else:
            path = KERNELS_FOLDER / file
            includes = ("-I", str(KERNELS_FOLDER), "-I", str(_FOLDER))
            command = (
                *(compiler, *_FLAGS, *options, *includes),
                *("-x", "c++", str(path), "-o", str(library), "-lm", "-lc"),
            )
            result = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if result.returncode:
                raise KernelCompileError(f"{file} {' '.join(options)}\n{result.stderr[:8000]}")
            binaries.put(key, library.read_bytes())
        return ctypes.CDLL(str(library))


@contextmanager
def _compiled_by_one(key: bytes) -> Iterator[None]:
    """Whoever else wants the same module meanwhile waits, and finds it on disk.

    Whoever holds the lock gives up its compiler after a while, and a lock ends with its process.
    """
    folder = cache_directory_in_use() / "emulated-locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / key[:1].hex()).open("w") as file:  # few files, so that none has to be removed
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _compiler_version(compiler: str) -> str:
    result = subprocess.run((compiler, "--version"), capture_output=True, text=True, timeout=60)
    return result.stdout
