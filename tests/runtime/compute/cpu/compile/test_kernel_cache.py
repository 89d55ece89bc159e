"""Compiled kernels on disk: compiled once, by one process, and never a reason to fail."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from dflash_runtime.compute.cpu.compile import kernel_cache
from dflash_runtime.compute.cpu.compile.compiling import (
    RowFunction,
    compile_kernel,
)
from dflash_runtime.compute.cpu.compile.kernel_cache import keeping_in
from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.instruction_sets import Tier
from dflash_runtime.compute.cpu.simd.types import f64, i64
from dflash_runtime.compute.cpu.weights.rows import expand_f16, expand_f32
from support.processes import START_S, environment

CACHE_DIR = "DFLASH_MOE_EXPERT_COMPUTE_CACHE_DIR"
NUM_KEPT = 8

CHILD = """
import json, sys
from dflash_runtime.compute.cpu.simd.types import i64
from dflash_runtime.compute.cpu.weights import rows
from dflash_runtime.compute.cpu.compile.compiling import RowFunction

functions = rows.expand_f32, rows.expand_f16
print("ready", flush=True)
sys.stdin.readline()
compiled = {each.__name__: RowFunction(each, *[i64] * 3) for each in functions}
found = {name: each.came_from_cache for name, each in compiled.items()}
print(json.dumps([found, "numba.np.arraymath" in sys.modules]))
"""

HOLDER = """
import sys
from dflash_runtime.compute.cpu.compile import kernel_cache
assert kernel_cache._acquire_lock("some_kernel") is not None
print("held", flush=True)
sys.stdin.readline()
"""


def compiled() -> RowFunction:
    return RowFunction(expand_f32, i64, i64, i64)


def came_from_cache() -> bool:
    return compiled().came_from_cache


def kernel_folders(cache_dir: Path) -> list[Path]:
    return sorted(cache_dir.glob("kernels-*"))


def the_folder(cache_dir: Path) -> Path:
    (folder,) = kernel_folders(cache_dir)
    return folder


def locks_are_free(folder: Path) -> bool:
    """Whether the lock of every kernel that was locked before is free."""
    for path in folder.glob("*.lock"):
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
    return True


# -- one process ----------------------------------------------------------------------------------


def test_kernels_are_kept_in_a_private_folder(cache_dir: Path) -> None:
    assert [came_from_cache() for _ in range(2)] == [False, True]
    folder = the_folder(cache_dir)
    assert folder.stat().st_mode & 0o7777 == 0o700
    assert {path.suffix for path in folder.iterdir()} == {".lock", ".nbi", ".nbc"}
    assert locks_are_free(folder)


def test_a_folder_that_is_given_is_where_kernels_are_kept(cache_dir: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    with keeping_in(str(given)):
        assert [came_from_cache() for _ in range(2)] == [False, True]
        folder = the_folder(given)
        assert kernel_cache.kernel_folder() == folder
    assert not cache_dir.exists()
    assert not came_from_cache()
    assert the_folder(cache_dir).name == folder.name
    with keeping_in(str(given)):
        assert came_from_cache()


def _double(x: float) -> float:
    return 2 * x


def test_kernels_that_python_calls_are_kept_too(cache_dir: Path) -> None:
    first, second = (compile_kernel(_double, f64) for _ in range(2))
    assert first(1.5) == second(1.5) == 3
    assert not first.stats.cache_hits  # type: ignore[attr-defined]
    assert second.stats.cache_hits  # type: ignore[attr-defined]
    assert locks_are_free(the_folder(cache_dir))


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_damage_heals(cache_dir: Path, suffix: str) -> None:
    assert not came_from_cache()
    for damaged in (lambda data: data[:100], lambda data: b"", lambda data: b"nonsense" * 99):
        (path,) = cache_dir.rglob(f"*.{suffix}")
        path.write_bytes(damaged(path.read_bytes()))
        assert [came_from_cache() for _ in range(2)] == [False, True]
    (path,) = cache_dir.rglob(f"*.{suffix}")
    path.unlink()
    assert [came_from_cache() for _ in range(2)] == [False, True]


def test_every_identity_has_its_own_folder(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [came_from_cache() for _ in range(2)] == [False, True]
    before = the_folder(cache_dir)
    with monkeypatch.context() as changed:
        changed.setattr(kernel_cache, "_sources_digest", lambda: "of other sources")
        kernel_cache.prepared_folder.cache_clear()
        assert [came_from_cache() for _ in range(2)] == [False, True]
        assert len(kernel_folders(cache_dir)) == 2
    kernel_cache.prepared_folder.cache_clear()
    assert came_from_cache()
    assert kernel_cache.kernel_folder() == before


def test_sources_compilers_and_tier_make_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    here = current_tier()
    found = {kernel_cache.code_identity()}
    assert kernel_cache.code_identity() in found
    changes: dict[str, object] = {
        "_sources_digest": lambda: "of other sources",
        "numba.__version__": "0.0",
        "llvmlite.__version__": "0.0",
        "platform.python_version": lambda: "4.0",
        "current_tier": lambda: next(tier for tier in Tier if tier is not here),
    }
    for name, value in changes.items():
        with monkeypatch.context() as changed:
            changed.setattr(f"{kernel_cache.__name__}.{name}", value)
            found.add(kernel_cache.code_identity())
    assert len(found) == 1 + len(changes)


def test_a_folder_that_is_removed_meanwhile_is_made_again(cache_dir: Path) -> None:
    assert not came_from_cache()
    folder = the_folder(cache_dir)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert [came_from_cache() for _ in range(2)] == [False, True]


@pytest.mark.parametrize("clock", [1e9, time.time() + 1e6], ids=["older", "newer by the clock"])
def test_the_folders_used_last_are_kept_and_ours_among_them(cache_dir: Path, clock: float) -> None:
    assert not came_from_cache()
    ours = the_folder(cache_dir)
    others = [cache_dir / f"kernels-{index:02}" for index in range(12)]
    for age, folder in enumerate(others):
        folder.mkdir()
        (folder / "some.nbi").touch()
        os.utime(folder, (clock - age, clock - age))
    kept = [cache_dir / "kernels", cache_dir / "something-else"]
    for folder in kept:
        folder.mkdir()
        os.utime(folder, (1e8, 1e8))
    os.utime(ours, (1e8, 1e8))
    kernel_cache.prepared_folder.cache_clear()
    assert came_from_cache()
    assert kernel_folders(cache_dir) == sorted([ours, *others[: NUM_KEPT - 1]])
    assert all(folder.is_dir() for folder in kept)


# -- trouble --------------------------------------------------------------------------------------


def unusable(cache_dir: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the warning says."""
    if how == "no folder":
        cache_dir.touch()
        return "File exists"
    if how == "below a file":
        cache_dir.touch()
        monkeypatch.setenv(CACHE_DIR, str(cache_dir / "below"))
        return "Not a directory"
    if how == "open to others":
        cache_dir.mkdir()
        cache_dir.chmod(0o755)
        return "open to others"
    if how == "a file in its place":
        name = f"kernels-{kernel_cache.code_identity()[:16]}"
        cache_dir.mkdir(mode=0o700, exist_ok=True)
        (cache_dir / name).touch()
        return "File exists"
    if how == "bad settings":
        monkeypatch.setenv("DFLASH_MOE_NO_SUCH_VARIABLE", "1")
        return "DFLASH_MOE_NO_SUCH_VARIABLE"
    assert how in ("not writable", "full")
    error = {"not writable": errno.EACCES, "full": errno.ENOSPC}[how]

    def refuse(path: Path, *arguments: object, **keywords: object) -> None:
        path.touch()  # an empty file there is room for
        raise OSError(error, os.strerror(error), str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)  # root may write everywhere
    return os.strerror(error)


@pytest.mark.parametrize(
    "how",
    [
        "no folder",
        "below a file",
        "open to others",
        "a file in its place",
        "not writable",
        "full",
        "bad settings",
    ],
)
def test_an_unusable_cache_is_one_warning_and_no_error(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    reason = unusable(cache_dir, how, monkeypatch)
    with caplog.at_level("WARNING"):
        assert [came_from_cache() for _ in range(2)] == [False, False]
        assert compile_kernel(_double, f64)(1.5) == 3
    (message,) = (each.getMessage() for each in caplog.records if each.module == "kernel_cache")
    assert reason in message
    assert not list(cache_dir.rglob("*.nb?"))
    assert not list(cache_dir.rglob(f".{os.getpid()}"))


def test_a_cache_that_fails_later_costs_nothing_but_time_and_is_told_once(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(cache: object, sig: object, target_context: object) -> object:
        raise EOFError("cut off")

    def save(cache: object, sig: object, data: object) -> None:
        raise OSError("no space left on device")

    assert not came_from_cache()
    monkeypatch.setattr(kernel_cache._KernelCache, "_load_overload", load)
    monkeypatch.setattr(kernel_cache._KernelCache, "_save_overload", save)
    monkeypatch.setattr(kernel_cache, "_cannot_keep", threading.Event())
    assert kernel_cache.can_keep()
    assert [came_from_cache() for _ in range(2)] == [False, False]
    assert locks_are_free(the_folder(cache_dir))
    assert not kernel_cache.can_keep()
    [message] = [each.getMessage() for each in caplog.records if each.module == "kernel_cache"]
    assert "no space left on device" in message


def test_a_folder_that_becomes_unusable_later_costs_nothing_but_time(cache_dir: Path) -> None:
    assert not came_from_cache()
    folder = the_folder(cache_dir)
    folder.rename(cache_dir / "moved")
    folder.touch()
    assert [came_from_cache() for _ in range(2)] == [False, False]


def _not_compilable(x: float) -> float:
    return x.no_such_attribute  # type: ignore[attr-defined,no-any-return]


def test_failing_to_compile_lets_others_compile(cache_dir: Path) -> None:
    with pytest.raises(Exception, match="no_such_attribute"):
        compile_kernel(_not_compilable, f64)
    with pytest.raises(Exception, match="no_such_attribute"):
        RowFunction(_not_compilable, f64)
    assert locks_are_free(the_folder(cache_dir))


def test_a_lock_that_is_never_released_is_waited_for_only_so_long(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "_LOCK_TIMEOUT_S", 0.3)
    assert not came_from_cache()
    (lock_path,) = the_folder(cache_dir).glob("*.lock")
    for path in the_folder(cache_dir).glob("*.nb?"):
        path.unlink()
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begin_s = time.monotonic()
        assert not came_from_cache()
        assert time.monotonic() - begin_s >= 0.3
        assert came_from_cache()  # needs no lock
    assert came_from_cache()


def test_threads_compile_side_by_side(cache_dir: Path) -> None:
    found: list[bool] = []

    def work() -> None:
        for function in (expand_f32, expand_f16):
            row_function = RowFunction(function, i64, i64, i64)
            found.append(row_function.came_from_cache)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False] * 2 + [True] * 4
    assert locks_are_free(the_folder(cache_dir))


def test_threads_may_look_for_the_folder_at_once(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both_are_there = threading.Barrier(2)
    touch = Path.touch

    def touch_and_wait(path: Path) -> None:
        touch(path)
        with suppress(threading.BrokenBarrierError):  # or one waits for the other
            both_are_there.wait(timeout=0.5)

    monkeypatch.setattr(Path, "touch", touch_and_wait)
    found: list[Path | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(kernel_cache.kernel_folder())) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [the_folder(cache_dir)] * 2
    assert not caplog.messages


# -- several processes ----------------------------------------------------------------------------


def start(stack: ExitStack, code: str, first_line: str) -> subprocess.Popen[str]:
    """A child that has printed `first_line`; it waits for a line of ours."""
    child = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(child.kill)
    assert child.stdout is not None
    assert child.stdout.readline() == f"{first_line}\n"
    return child


def what_children_found(num_children: int) -> list[tuple[dict[str, bool], bool]]:
    """By each child's functions, which came from the cache, and whether it has imported what only
    compiling needs; all start at once."""
    with ExitStack() as stack:
        children = [start(stack, CHILD, "ready") for _ in range(num_children)]
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        return [json.loads(child.communicate(timeout=4 * START_S)[0]) for child in children]


def test_of_processes_that_start_at_once_one_compiles_each_kernel(cache_dir: Path) -> None:
    found = what_children_found(2)
    for name in found[0][0]:
        assert sorted(child[name] for child, _ in found) == [False, True], name
    assert any(has_compiler for _, has_compiler in found)
    ((later, has_compiler),) = what_children_found(1)
    assert all(later.values())
    assert not has_compiler
    assert came_from_cache()
    assert locks_are_free(the_folder(cache_dir))


def test_the_lock_of_a_killed_process_holds_nobody_up(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        holder = start(stack, HOLDER, "held")
        assert not locks_are_free(the_folder(cache_dir))
        holder.kill()
        holder.wait(timeout=START_S)
        assert locks_are_free(the_folder(cache_dir))
    monkeypatch.setattr(kernel_cache, "_LOCK_TIMEOUT_S", 1e9)  # a wait would be noticed
    assert [came_from_cache() for _ in range(2)] == [False, True]
