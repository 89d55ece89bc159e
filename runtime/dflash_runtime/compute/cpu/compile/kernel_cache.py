"""Compiled kernels on disk, one folder for each combination of sources, compiler and CPU.

Failures of the folder cost time, nothing else. Of several processes that need a kernel at once one
compiles it, under the kernel's lock, and the others load the result.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba

from dflash_protocol.errors import SettingsError
from dflash_protocol.ring import compiled_experts
from dflash_protocol.settings import cache_folder
from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.untyped import (
    CacheImpl,
    CacheLocator,
    FunctionCache,
    NullCache,
    cpu_target,
    rtsys,
)

_LOG = logging.getLogger(__name__)

_PREFIX = "kernels-"
_NUM_FOLDERS_KEPT = 8
_LOCK_TIMEOUT_S = 60.0
"""How long a process waits for another to compile a kernel before it does so itself."""
_LOCK_POLL_S = 0.02
_PROBE_BYTES = 64 << 10
"""A full disk still accepts empty files."""

_cache_dir: ContextVar[str | None] = ContextVar("cache_dir", default=None)


def code_identity() -> str:
    """Digest of what decides a kernel's machine code: sources, compilers, CPU, tier."""
    tier = current_tier()  # sets the CPU features in the compiler
    state = hashlib.sha256(_sources_digest().encode())
    state.update(repr(cpu_target.target_context.codegen().magic_tuple()).encode())
    versions = numba.__version__, llvmlite.__version__, platform.python_version()
    state.update(repr((versions, tier.value)).encode())
    return state.hexdigest()


def cache_for(function: Any) -> Any:
    """A cache as numba uses them, or one that keeps nothing if there is no folder."""
    folder = kernel_folder()
    return NullCache() if folder is None else _KernelCache(function)


def release(kernel_cache: Any) -> None:
    """Let other processes compile, whether or not compiling succeeded."""
    if isinstance(kernel_cache, _KernelCache):
        kernel_cache.release()


@cache
def _sources_digest() -> str:
    """Digest of all modules of this package, of those beside it, and of the words that kernels
    share with the ring's: a kernel's code depends on its helpers and their constants, too."""
    state = hashlib.sha256()
    package, words = Path(__file__).parents[1], Path(compiled_experts.__file__)
    for path in [*sorted(package.rglob("*.py")), *sorted(package.parent.glob("*.py")), words]:
        state.update(path.read_bytes())
    return state.hexdigest()


def kernel_folder() -> Path | None:
    """The folder, created and writable, or None after a warning."""
    return prepared_folder(_cache_dir.get())


@contextmanager
def keeping_in(cache_dir: str | None) -> Iterator[None]:
    """Kernels that this thread compiles within the context are kept in this `cache_dir` (see
    `cache_folder`). Kernels that another backend of the process compiled stay where they are."""
    token = _cache_dir.set(cache_dir)
    try:
        yield
    finally:
        _cache_dir.reset(token)


@cache
def prepared_folder(cache_dir: str | None) -> Path | None:
    """The folder for this `cache_dir`, created and writable, or None after a warning; cached."""
    try:
        parent = cache_folder(cache_dir)
        folder = parent / f"{_PREFIX}{code_identity()[:16]}"
        folder.mkdir(mode=0o700, exist_ok=True)
        probe = folder / f".{os.getpid()}"
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)  # another thread may probe at the same time
        os.utime(folder)  # time of last use, by which old folders are removed
    except (SettingsError, OSError) as error:
        # docs: the cache folder cannot be used: `CACHE_DIR`
        _LOG.warning("kernels will be compiled at every start: %s", error)
        return None
    _remove_old(parent, folder)
    return folder


def _remove_old(parent: Path, used: Path) -> None:
    """Keep the most recently used folders, and `used` whatever the clock says."""
    with suppress(OSError):
        others = [each for each in parent.glob(f"{_PREFIX}*") if each != used]
        others.sort(key=lambda each: each.stat().st_mtime)
        for folder in others[: -(_NUM_FOLDERS_KEPT - 1)]:
            shutil.rmtree(folder, ignore_errors=True)


_cannot_keep = threading.Event()


def can_keep() -> bool:
    """Whether every kernel that this process has compiled was saved."""
    return not _cannot_keep.is_set()


def _note_lost(error: Exception) -> None:
    """Warn once that compiled kernels could not be saved."""
    if not _cannot_keep.is_set():
        _cannot_keep.set()
        # docs: once; the cache folder is full, or was removed: `CACHE_DIR`
        _LOG.warning("compiled kernels could not be kept, the next start compiles anew: %s", error)


class _Locator(CacheLocator):  # type: ignore[misc]
    """Locates all files in our folder, whose name identifies what they are valid for."""

    def __init__(self, stamp: str) -> None:
        self._stamp = stamp

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        """Kernels from outside this package also depend on their own file."""
        del py_func
        path = Path(py_file)
        is_ours = Path(__file__).parents[1] in path.parents or not path.is_file()
        return cls("" if is_ours else hashlib.sha256(path.read_bytes()).hexdigest())

    def get_cache_path(self) -> str:
        return str(kernel_folder())

    def get_source_stamp(self) -> str:
        return self._stamp

    def get_disambiguator(self) -> None:
        return None


class _Impl(CacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]  # noqa: RUF012 - numba declares it so


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """The cache of one function. Holds its lock between a load that found nothing and `release`."""

    _impl_class = _Impl

    def __init__(self, py_func: Any) -> None:
        super().__init__(py_func)
        self._lock: int | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = self._load(sig, target_context)
        if found is None:
            self._lock = _acquire_lock(self._impl.filename_base)
            found = self._load(sig, target_context)
            if found is not None:
                self.release()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # no space, no permission, damaged meanwhile
            _note_lost(error)
        self.release()

    def release(self) -> None:
        """Let other processes compile."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            # Not numba's load_overload, which first imports everything its compiler may need.
            rtsys.initialize(target_context)
            return self._load_overload(sig, target_context)
        except Exception:  # a damaged file can raise whatever unpickling can
            with suppress(OSError):
                self.flush()
            return None


def _acquire_lock(name: str) -> int | None:
    """An open file that holds a kernel's lock, or None if another process held it for too long."""
    folder, end_s = kernel_folder(), time.monotonic() + _LOCK_TIMEOUT_S
    try:
        lock = os.open(f"{folder}/{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError:
            if time.monotonic() > end_s:
                os.close(lock)
                return None
            time.sleep(_LOCK_POLL_S)
