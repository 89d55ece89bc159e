"""The CPU backend as a whole: loading from files, threads, warm-up, the kernels' cache."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import gguf
import numba
import numpy as np
import pytest

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_protocol.errors import ModelFileError, SettingsError
from dflash_protocol.ids import F32Array
from dflash_runtime.compute.backend import ComputeBackend
from dflash_runtime.compute.cpu import CpuBackend, compiling
from dflash_runtime.compute.cpu.compiling import compile_row_function
from dflash_runtime.compute.cpu.matrix import as_matrix
from dflash_runtime.compute.cpu.rows_dense import expand_f32
from dflash_runtime.compute.cpu.vector import i64, void
from dflash_runtime.compute.cpu.workers import Workers, share

REPOSITORY = Path(__file__).parents[4]
SOURCE_ROOTS = [str(REPOSITORY / name) for name in ("protocol", "adapters", "runtime")]


def test_it_is_a_compute_backend() -> None:
    backend: ComputeBackend = CpuBackend(num_threads=1)
    assert backend.name == "cpu"
    assert backend.numeric_class.startswith("cpu-1/")
    assert backend.numeric_class == CpuBackend(num_threads=2).numeric_class
    assert not any(character.isspace() for character in backend.numeric_class)
    backend.close()


# -- loading --------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[GgufFile]:
    path = tmp_path / "some.gguf"
    values = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "some-architecture")
    for name, qtype in (
        ("f16", gguf.GGMLQuantizationType.F16),
        ("bf16", gguf.GGMLQuantizationType.BF16),
    ):
        writer.add_tensor(f"{name}_vector", gguf.quants.quantize(values[0], qtype), raw_dtype=qtype)
    writer.add_tensor("f32_vector", values[0])
    writer.add_tensor("f32", values)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("q8_0", gguf.quants.quantize(values, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile.open(path) as opened:
        yield opened


def test_vectors_become_float32(file: GgufFile) -> None:
    ops = CpuBackend(num_threads=1).ops
    exact = ops.load_vector(file, "f32_vector")
    for name, tolerance in (("f32_vector", 0), ("f16_vector", 1e-3), ("bf16_vector", 1e-2)):
        vector = ops.load_vector(file, name)
        assert vector.dtype == np.float32
        np.testing.assert_allclose(vector, exact, rtol=tolerance)


def test_matrices_are_used_where_the_file_is_mapped(file: GgufFile) -> None:
    ops = CpuBackend(num_threads=1).ops
    x = np.ones((1, 64), np.float32)
    for name in ("f32", "q8_0"):
        matrix = ops.load_matrix(file, name)
        assert (matrix.rows, matrix.columns) == (5, 64)
        assert np.shares_memory(matrix.data, file.tensor_bytes(name))
    before = ops.linear(x, matrix)
    file.close()
    np.testing.assert_array_equal(ops.linear(x, matrix), before)


def test_only_matrices_are_loaded_as_such(file: GgufFile) -> None:
    ops = CpuBackend(num_threads=1).ops
    with pytest.raises(ValueError, match="not a matrix"):
        ops.load_matrix(file, "f32_vector")
    with pytest.raises(ModelFileError):
        ops.load_matrix(file, "absent")


# -- threads --------------------------------------------------------------------------------------


def cpu_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cpu-worker")]


def test_one_thread_means_the_callers() -> None:
    before = cpu_threads()
    backend = CpuBackend(num_threads=1)
    assert cpu_threads() == before
    backend.close()


def test_close_ends_the_threads() -> None:
    before = len(cpu_threads())
    backend = CpuBackend(num_threads=3)
    assert len(cpu_threads()) == before + 2
    backend.close()
    assert len(cpu_threads()) == before
    backend.close()


@pytest.mark.parametrize("num_threads", [0, -1])
def test_at_least_one_thread(num_threads: int) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        CpuBackend(num_threads=num_threads)


def test_every_part_is_done_once_and_errors_arrive() -> None:
    workers = Workers(3)
    done: list[tuple[int, int]] = []
    workers.run(lambda part, parts: done.append((part, parts)))
    assert sorted(done) == [(0, 3), (1, 3), (2, 3)]

    def fail_in_one(part: int, parts: int) -> None:
        if part == parts - 1:
            raise ArithmeticError("part failed")

    with pytest.raises(ArithmeticError, match="part failed"):
        workers.run(fail_in_one)
    done.clear()
    # A job inside a job, as from two threads at once, is done by its caller.
    workers.run(lambda part, parts: workers.run(lambda p, n: done.append((part, n))))
    assert sorted(done) == [(0, 1), (1, 1), (2, 1)]
    workers.close()
    done.clear()
    workers.run(lambda part, parts: done.append((part, parts)))
    assert done == [(0, 1)]


@pytest.mark.parametrize("total", [0, 1, 15, 16, 17, 100, 1000])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_shares_cover_everything_once(total: int, num_parts: int) -> None:
    shares = [share(total, part, num_parts) for part in range(num_parts)]
    assert [i for first, end in shares for i in range(first, end)] == list(range(total))
    assert all(first % 16 == 0 or first == total for first, _ in shares)


def test_two_threads_may_use_one_backend() -> None:
    backend = CpuBackend(num_threads=2)
    ops = backend.ops
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    weights = np.random.default_rng(1).standard_normal((128, 256)).astype(np.float32)
    matrix = as_matrix(weights.view(np.uint8).reshape(-1), TensorType.F32, 128, 256)
    expected = ops.linear(x, matrix)
    results: list[F32Array] = []
    threads = [
        threading.Thread(target=lambda: results.extend(ops.linear(x, matrix) for _ in range(20)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    backend.close()
    assert len(results) == 60
    for result in results:
        np.testing.assert_array_equal(result, expected)


# -- kernels --------------------------------------------------------------------------------------


def test_warm_up_takes_any_type_that_holds_weights() -> None:
    backend = CpuBackend(num_threads=1)
    backend.warm_up([TensorType.F32, TensorType.Q8_0, TensorType.TQ2_0])
    backend.warm_up([])


def test_kernels_are_kept_on_disk_and_damage_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def came_from_cache() -> bool:
        return compile_row_function(expand_f32, void, i64, i64, i64).came_from_cache

    assert [came_from_cache() for _ in range(2)] == [False, True]
    for suffix in ("nbi", "nbc"):
        (path,) = tmp_path.rglob(f"*.{suffix}")
        path.write_bytes(path.read_bytes()[:100])
        assert [came_from_cache() for _ in range(2)] == [False, True]
    monkeypatch.setattr(compiling, "_sources_digest", lambda: "of other sources")
    assert [came_from_cache() for _ in range(2)] == [False, True]


def test_a_cache_that_cannot_be_used_costs_nothing_but_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(cache: object, sig: object, target_context: object) -> object:
        raise EOFError("cut off")

    def save(cache: object, sig: object, data: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(compiling._KernelCache, "_load_overload", load)
    monkeypatch.setattr(compiling._KernelCache, "_save_overload", save)
    assert compile_row_function(expand_f32, void, i64, i64, i64).address

    def no_place(function: object) -> object:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(compiling, "_KernelCache", no_place)
    assert compile_row_function(expand_f32, void, i64, i64, i64).address


def test_a_cpu_that_cannot_run_the_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "is_supported_cpu", lambda: False)
    with pytest.raises(SettingsError, match="F16C"):
        CpuBackend(num_threads=1)


def test_importing_the_package_compiles_nothing() -> None:
    """And a package that only offers the backend by name does not pay for numba."""
    code = (
        "import sys, dflash_runtime.compute.backend; assert 'numba' not in sys.modules\n"
        "import dflash_runtime.compute.cpu\n"
        "from dflash_runtime.compute.cpu import matrix_kernels, rows\n"
        "assert not rows.row_kernels.cache_info().currsize\n"
        "assert not matrix_kernels.linear_kernel.cache_info().currsize\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS)},
        timeout=60,
    )
