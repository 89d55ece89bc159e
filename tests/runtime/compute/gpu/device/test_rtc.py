"""Compiling kernels through NVRTC, which needs no GPU: what is made, kept, and said."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from dflash_protocol.errors import DeviceUnavailable, KernelCompileError, SettingsError
from dflash_runtime.compute.cores import ThreadCounts
from dflash_runtime.compute.gpu.device import kernel_sources, rtc
from dflash_runtime.compute.gpu.device.binary_cache import BinaryCache
from dflash_runtime.compute.gpu.device.capabilities import (
    Capabilities,
    Vendor,
    cuda_capabilities,
    hip_capabilities,
)
from dflash_runtime.compute.gpu.device.kernel_sources import define_options, kernel_source
from dflash_runtime.compute.gpu.device.rtc import (
    Compiled,
    DeviceCompiler,
    RuntimeCompiler,
    architecture_options,
    runtime_compiler,
)
from support.emulated_device.device_checks import CASES


@pytest.fixture
def nvrtc() -> RuntimeCompiler:
    try:
        return runtime_compiler(Vendor.CUDA)
    except DeviceUnavailable as error:
        pytest.skip(f"{error}; the package nvidia-cuda-nvrtc-cu12 has it")


class CountingCompiler(RuntimeCompiler):
    """Makes its options, of any version."""

    vendor = Vendor.CUDA

    def __init__(self, version: str = "counting 1") -> None:
        self.version = version
        self.num_compiled = 0

    def supports(self, architecture: str) -> bool:
        return architecture != "sm_999"

    def compile(self, source: kernel_sources.KernelSource, options: Sequence[str]) -> Compiled:
        self.num_compiled += 1
        return Compiled(" ".join((source.name, *options)).encode(), "")


class HipRtc:
    """A library of AMD's whose compiler notes how many are in it."""

    _name = "libhiprtc.so"

    def __init__(self) -> None:
        self.num_within = self.most_within = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("hiprtc"):
            raise AttributeError(name)
        return self.compile if name == "hiprtcCompileProgram" else lambda *_: 0

    def compile(self, *_: object) -> int:
        self.num_within += 1
        self.most_within = max(self.most_within, self.num_within)
        time.sleep(0.01)
        self.num_within -= 1
        return 0


class SlowCompiler(CountingCompiler):
    """Takes a while for each kernel, and notes how many are compiled at the same time; a file with
    BAD cannot be compiled."""

    def __init__(self, vendor: Vendor = Vendor.CUDA) -> None:
        super().__init__()
        self.vendor = vendor
        self.num_within = self.most_within = 0
        self._lock = threading.Lock()

    def compile(self, source: kernel_sources.KernelSource, options: Sequence[str]) -> Compiled:
        with self._lock:
            self.num_within += 1
            self.most_within = max(self.most_within, self.num_within)
        time.sleep(0.02)
        with self._lock:
            self.num_within -= 1
            made = super().compile(source, options)
        if "-DBAD=1" in options:
            raise KernelCompileError("bad")
        return made


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtc, "default_counts", lambda topology: ThreadCounts(4, 4))


WANTED: list[dict[str, int]] = [{"A": number} for number in range(48)]


def note_wanted(on_module: Callable[[str, kernel_sources.Defines], None]) -> None:
    for defines in WANTED:
        on_module(str(CASES), defines)


def no_progress(num_done: int, num_total: int) -> None:
    pass


def compiling_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("dflash-compile")]


def compiler_of(
    compiler: RuntimeCompiler, folder: Path, *, cc: tuple[int, int] = (9, 0), lanes: int = 32
) -> DeviceCompiler:
    cache = BinaryCache(folder)
    return DeviceCompiler(compiler, cuda_capabilities(*cc), lanes=lanes, cache=cache)


def test_machine_code_of_a_kernel_that_uses_every_name(
    nvrtc: RuntimeCompiler, tmp_path: Path
) -> None:
    binary = compiler_of(nvrtc, tmp_path).binary(str(CASES), {})
    assert binary.startswith(b"\x7fELF")
    for name in (b"sum_rows", b"every_name", b"padded"):
        assert name in binary
    assert compiler_of(nvrtc, tmp_path, lanes=64).binary(str(CASES), {}) != binary


def test_an_error_names_the_file_and_what_is_wrong(
    nvrtc: RuntimeCompiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "wrong.cu"
    file.write_text('#include "common.cuh"\nKERNEL(wrong, int, 32, 1) { undeclared(); }\n')
    with pytest.raises(KernelCompileError, match=r"wrong.cu\(2\): error: .*undeclared") as caught:
        compiler_of(nvrtc, tmp_path / "cache").binary(str(file), {})
    assert len(str(caught.value).splitlines()) == 1
    assert "1 error detected" in caplog.text  # the whole log


def test_an_option_that_the_compiler_does_not_know(nvrtc: RuntimeCompiler) -> None:
    with pytest.raises(KernelCompileError, match="unrecognized option"):
        nvrtc.compile(kernel_source(str(CASES)), ("--no-such-option",))


def test_architectures_that_the_compiler_knows(nvrtc: RuntimeCompiler) -> None:
    assert nvrtc.supports("sm_90a")
    assert nvrtc.supports("sm_80")
    assert not nvrtc.supports("sm_999")
    unknown = Capabilities(**{**vars(cuda_capabilities(9, 0)), "architecture": "sm_999"})
    with pytest.raises(DeviceUnavailable, match=r"nvrtc 1.* sm_999"):
        DeviceCompiler(nvrtc, unknown, lanes=32)


def test_a_driver_is_given_no_compiler_that_is_too_new(nvrtc: RuntimeCompiler) -> None:
    assert runtime_compiler(Vendor.CUDA, nvrtc.major).version == nvrtc.version
    with pytest.raises(DeviceUnavailable, match=r"driver|cannot open"):
        runtime_compiler(Vendor.CUDA, 1)


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    counting = CountingCompiler()
    first = compiler_of(counting, tmp_path).binary(str(CASES), {"A": 1, "B": "x"})
    assert compiler_of(counting, tmp_path).binary(str(CASES), {"B": "x", "A": 1}) == first
    assert counting.num_compiled == 1
    assert first == b"cases.cu -arch=sm_90a -std=c++17 -lineinfo -DA=1 -DB=x -DLANES=32"


def test_whatever_decides_the_code_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "one.cu"
    file.write_text('#include "header.cuh"\n')
    header = tmp_path / "kernels/header.cuh"
    header.parent.mkdir()
    header.write_text('#include "deeper.cuh"\n')
    deeper = header.with_name("deeper.cuh")
    deeper.write_text("// 1\n")
    monkeypatch.setattr(kernel_sources, "KERNELS_FOLDER", header.parent)
    cache = tmp_path / "cache"
    counting = CountingCompiler()

    def compile_all() -> int:
        """How many had to be compiled."""
        kernel_source.cache_clear()
        before = counting.num_compiled
        compiler_of(counting, cache).binary(str(file), {})
        return counting.num_compiled - before

    assert (compile_all(), compile_all()) == (1, 0)
    deeper.write_text("// 2\n")
    assert (compile_all(), compile_all()) == (1, 0)
    header.write_text('#include "deeper.cuh"\n#include "vendors.cuh"\n')  # which is not there
    assert (compile_all(), compile_all()) == (1, 0)
    file.write_text('#include "header.cuh"\n// new\n')
    assert (compile_all(), compile_all()) == (1, 0)
    counting.version = "counting 2"
    assert (compile_all(), compile_all()) == (1, 0)
    for other in ({"cc": (8, 0)}, {"lanes": 64}):
        before = counting.num_compiled
        compiler_of(counting, cache, **other).binary(str(file), {})
        assert counting.num_compiled == before + 1
    kernel_source.cache_clear()


@pytest.mark.parametrize("defines", [{"A B": 1}, {"": 1}, {"A": "1 2"}, {"A": "x;y"}, {"-D": 1}])
def test_only_names_and_plain_values_are_defined(defines: dict[str, int | str]) -> None:
    with pytest.raises(SettingsError, match="cannot be defined"):
        define_options(defines)


def test_a_kernel_file_that_is_not_there() -> None:
    with pytest.raises(SettingsError, match=r"nothing.cu: No such file"):
        kernel_source("nothing.cu")


def test_amd_is_told_its_own_options() -> None:
    options = architecture_options(hip_capabilities("gfx1030:xnack-"))
    assert options == ("--offload-arch=gfx1030", "-std=c++17", "-O3")


def test_a_library_of_another_kind_is_refused() -> None:
    with pytest.raises(DeviceUnavailable, match="nvrtcCreateProgram"):
        RuntimeCompiler(Vendor.CUDA, ctypes.CDLL(None))


def test_without_a_compiler_there_is_one_line_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{os.path.basename(name)}: cannot open\nshared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    runtime_compiler.cache_clear()
    with pytest.raises(DeviceUnavailable, match=r"\bcompiler\b.*\bcuda\b.*libnvrtc") as caught:
        runtime_compiler(Vendor.CUDA)
    assert len(str(caught.value).splitlines()) == 1
    runtime_compiler.cache_clear()


def test_amds_compiler_is_entered_by_one_thread_at_a_time() -> None:
    library = HipRtc()
    compilers = [RuntimeCompiler(Vendor.HIP, cast("ctypes.CDLL", library)) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        under_way = [
            pool.submit(compilers[index % 2].compile, kernel_source(str(CASES)), ())
            for index in range(8)
        ]
    assert [each.result().binary for each in under_way] == [b""] * 8
    assert library.most_within == 1


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("vendor", "most"), [(Vendor.CUDA, 4), (Vendor.HIP, 1)])
def test_kernels_are_compiled_ahead_several_at_once(
    tmp_path: Path, vendor: Vendor, most: int
) -> None:
    slow, seen = SlowCompiler(vendor), list[tuple[int, int]]()
    compiler = compiler_of(slow, tmp_path)
    compiler.compile_ahead("model", note_wanted, lambda *progress: seen.append(progress))
    assert seen == [(number, len(WANTED)) for number in range(1, len(WANTED) + 1)]
    assert slow.most_within == most
    assert not compiling_threads()
    for defines in WANTED:
        compiler.binary(str(CASES), defines)
    assert slow.num_compiled == len(WANTED)


def test_what_was_compiled_ahead_is_not_even_asked_for_again(tmp_path: Path) -> None:
    counting, asked = CountingCompiler(), list[str]()

    def ahead(what: str) -> int:
        before = len(asked)
        compiler_of(counting, tmp_path).compile_ahead(
            what, lambda _: asked.append(what), no_progress
        )
        return len(asked) - before

    assert (ahead("one"), ahead("one"), ahead("other"), ahead("one")) == (1, 0, 1, 0)
    counting.version = "counting 2"
    assert (ahead("one"), ahead("one")) == (1, 0)


@pytest.mark.usefixtures("four_cores")
def test_a_kernel_that_cannot_be_compiled_fails_when_it_is_needed(tmp_path: Path) -> None:
    slow = SlowCompiler()
    compiler = compiler_of(slow, tmp_path)

    def note(on_module: Callable[[str, kernel_sources.Defines], None]) -> None:
        on_module(str(CASES), {"BAD": 1})
        on_module("none.cu", {})
        note_wanted(on_module)

    compiler.compile_ahead("model", note, no_progress)
    for defines in WANTED:
        compiler.binary(str(CASES), defines)
    assert slow.num_compiled == len(WANTED) + 1
    with pytest.raises(KernelCompileError):
        compiler.binary(str(CASES), {"BAD": 1})
    with pytest.raises(SettingsError):
        compiler.binary("none.cu", {})


@pytest.mark.usefixtures("four_cores")
def test_ctrl_c_ends_compiling_ahead(tmp_path: Path) -> None:
    slow = SlowCompiler()
    compiler = compiler_of(slow, tmp_path)

    def interrupt(num_done: int, num_total: int) -> None:
        raise KeyboardInterrupt

    def interrupted_note(on_module: Callable[[str, kernel_sources.Defines], None]) -> None:
        note_wanted(on_module)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiler.compile_ahead("model", interrupted_note, no_progress)
    with pytest.raises(KeyboardInterrupt):
        compiler.compile_ahead("model", note_wanted, interrupt)
    assert slow.num_compiled < len(WANTED)
    assert not compiling_threads()
    compiler.compile_ahead("model", note_wanted, no_progress)  # the next start goes on
    assert slow.num_compiled == len(WANTED)


def test_without_a_folder_nothing_is_compiled_ahead(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    counting, asked = CountingCompiler(), list[str]()
    compiler = compiler_of(counting, tmp_path / "file/below")
    compiler.compile_ahead("model", lambda _: asked.append("model"), no_progress)
    assert not asked
