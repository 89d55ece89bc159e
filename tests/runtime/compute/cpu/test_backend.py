"""The CPU backend as a whole: loading from files, threads, warm-up."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType, dequantise
from dflash_protocol.errors import ModelFileError, SettingsError
from dflash_protocol.ids import F32Array
from dflash_runtime.compute.backend import ComputeBackend
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.compile import compiling
from dflash_runtime.compute.cpu.weights.matrix import as_matrix
from support.cpu_regions import cpu_threads
from support.processes import environment

ROWS, COLUMNS = 5, 256
MATRIX_TYPES = [tensor_type for tensor_type in TensorType if not tensor_type.is_integer]


def test_it_is_a_compute_backend() -> None:
    backend: ComputeBackend = CpuBackend(num_threads=1)
    assert backend.name == "cpu"
    assert backend.numeric_class.startswith("cpu-3/")
    assert backend.numeric_class == CpuBackend(num_threads=2).numeric_class
    assert not any(character.isspace() for character in backend.numeric_class)
    backend.close()


# -- loading --------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[GgufFile]:
    path = tmp_path / "some.gguf"
    values = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "some-architecture")
    for name, qtype in (
        ("f16", gguf.GGMLQuantizationType.F16),
        ("bf16", gguf.GGMLQuantizationType.BF16),
    ):
        writer.add_tensor(f"{name}_vector", gguf.quants.quantize(values[0], qtype), raw_dtype=qtype)
    writer.add_tensor("f32_vector", values[0])
    for tensor_type in MATRIX_TYPES:
        # No byte above 0x2B: no number or scale is large, infinite or NaN.
        row_bytes = tensor_type.row_bytes(COLUMNS)
        stored = np.random.default_rng(1).integers(0, 0x2C, (ROWS, row_bytes), dtype=np.uint8)
        qtype = gguf.GGMLQuantizationType(int(tensor_type))
        writer.add_tensor(tensor_type.name, stored, raw_dtype=qtype)
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


@pytest.mark.parametrize("tensor_type", MATRIX_TYPES, ids=lambda t: t.name)
def test_matrices_of_every_type_are_used_where_the_file_is_mapped(
    file: GgufFile, tensor_type: TensorType
) -> None:
    ops = CpuBackend(num_threads=1).ops
    x = np.ones((2, COLUMNS), np.float32)
    stored = file.tensor_bytes(tensor_type.name)
    matrix = ops.load_matrix(file, tensor_type.name)
    assert (matrix.rows, matrix.columns) == (ROWS, COLUMNS)
    assert np.shares_memory(matrix.data, stored)
    assert matrix.address == stored.ctypes.data
    before = ops.linear(x, matrix)
    weights = dequantise(stored, tensor_type, (ROWS, COLUMNS)).astype(np.float64)
    # Ones are exact in int8 except for the rounding of their scale, 1/127.
    tolerance = 2e-6 * np.abs(weights).sum(axis=1)
    assert (np.abs(before - weights.sum(axis=1)) <= tolerance).all()
    file.close()
    np.testing.assert_array_equal(ops.linear(x, matrix), before)


def test_a_vector_is_a_matrix_of_one_row_and_what_is_absent_is_none(file: GgufFile) -> None:
    ops = CpuBackend(num_threads=1).ops
    assert ops.load_matrix(file, "f32_vector").rows == 1
    with pytest.raises(ModelFileError):
        ops.load_matrix(file, "absent")


# -- threads --------------------------------------------------------------------------------------


def test_one_thread_means_the_callers() -> None:
    before = cpu_threads()
    backend = CpuBackend(num_threads=1)
    assert cpu_threads() <= before
    backend.close()


def test_close_ends_the_threads() -> None:
    before = cpu_threads()
    backend = CpuBackend(num_threads=3)
    assert cpu_threads() <= before  # they are started when work may come
    _ = backend.ops
    assert len(cpu_threads() - before) == 2
    backend.close()
    assert cpu_threads() <= before
    backend.close()


@pytest.mark.parametrize("num_threads", [0, -1])
def test_at_least_one_thread(num_threads: int) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        CpuBackend(num_threads=num_threads)


@pytest.mark.parametrize("tensor_type", [TensorType.F32, TensorType.Q8_0])
def test_two_threads_may_use_one_backend(tensor_type: TensorType) -> None:
    backend = CpuBackend(num_threads=2)
    ops = backend.ops
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    weights = np.random.default_rng(1).standard_normal((128, 256)).astype(np.float32)
    stored = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(int(tensor_type)))
    matrix = as_matrix(stored.view(np.uint8).reshape(-1), tensor_type, 128, 256)
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
    backend.warm_up(MATRIX_TYPES)
    backend.warm_up([])


def test_a_cpu_that_cannot_run_the_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "is_supported_cpu", lambda: False)
    with pytest.raises(SettingsError, match="F16C"):
        CpuBackend(num_threads=1)


def test_importing_the_package_compiles_nothing(tmp_path: Path) -> None:
    """A package that only offers the backend by name does not import numba."""
    code = (
        "import sys, dflash_runtime.compute.backend; assert 'numba' not in sys.modules\n"
        "import dflash_runtime.compute.cpu\n"
        "from dflash_runtime.compute.cpu.compile import kernel_cache\n"
        "from dflash_runtime.compute.cpu.kernels import linear_kernel\n"
        "from dflash_runtime.compute.cpu.weights import rows\n"
        "assert not kernel_cache.prepared_folder.cache_info().currsize\n"  # asked before compiling
        "assert not rows.expand_function.cache_info().currsize\n"
        "assert not linear_kernel.run_linear.cache_info().currsize\n"
    )
    cache_dir = tmp_path / "cache"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=environment(DFLASH_MOE_EXPERT_COMPUTE_CACHE_DIR=str(cache_dir)),
        timeout=60,
    )
    assert not cache_dir.exists()
