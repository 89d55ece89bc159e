"""Products of quantised rows with quantised vectors: exact except for float32's rounding.

Every type that is multiplied as repacked tiles, against float64 on the gguf package's values and on
the int8 activations that the kernels make.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from dflash_adapters.quant import TensorType
from dflash_protocol.ids import F32Array, U8Array
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.cpu.weights.matrix import as_matrix
from dflash_runtime.compute.cpu.weights.repacked.formats import FORMATS
from support.block_scales import SCALE_OFFSETS
from support.int8_activations import as_int8

TYPES = list(FORMATS)
NUM_ROWS = [1, 15, 16, 17, 33]
NUM_TOKENS = [0, 1, 2, 3, 7, 8, 9, 32]
MOST_TOKENS = 33

HALVES = {each: SCALE_OFFSETS[each] for each in TYPES if each in SCALE_OFFSETS}

SCALE_BITS = {
    "zero": 0x0000,
    "minus zero": 0x8000,
    "smallest": 0x0001,
    "largest subnormal": 0x03FF,
    "negative subnormal": 0x8200,
    "smallest normal": 0x0400,
    "largest": 0x7BFF,
    "largest negative": 0xFBFF,
}


@pytest.fixture(scope="module")
def ops() -> Iterator[CpuOps]:
    workers = Workers(1)
    yield CpuOps(workers, Scratch())
    workers.close()


def random_blocks(tensor_type: TensorType, rows: int, columns: int) -> U8Array:
    """Every bit of every quant random, scales of either sign. Shapes: result [blocks, bytes]."""
    rng = np.random.default_rng([int(tensor_type), rows, columns])
    layout = tensor_type.layout
    num_blocks = rows * columns // layout.block_elements
    blocks = rng.integers(0, 256, (num_blocks, layout.block_bytes), dtype=np.uint8)
    for offset in HALVES.get(tensor_type, ()):
        scales = (0.01 * rng.standard_normal((num_blocks, 1))).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    if tensor_type is TensorType.MXFP4:
        blocks[:, 0] = rng.integers(110, 130, num_blocks)
    return blocks


def random_vectors(num_tokens: int, columns: int) -> F32Array:
    """Vectors of very different sizes, with some blocks of zeros."""
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((num_tokens, columns)).astype(np.float32)
    x *= np.exp(rng.standard_normal((num_tokens, 1))).astype(np.float32)
    x[::5, : 32 * (columns // 64)] = 0
    return x


def many_columns(tensor_type: TensorType) -> int:
    """More than one chunk of the kernels, and part of one where the type allows it."""
    return {32: 13 * 32, 64: 7 * 64, 256: 3 * 256}[tensor_type.layout.block_elements]


def multiply(
    ops: CpuOps, data: U8Array, tensor_type: TensorType, rows: int, x: F32Array
) -> F32Array:
    out = np.full((x.shape[0], rows), 7.0, np.float32)
    ops.linear(x, as_matrix(data, tensor_type, rows, x.shape[1]), out)
    return out


def assert_close(
    got: F32Array, data: U8Array, tensor_type: TensorType, x: F32Array, tolerance: float = 1e-6
) -> None:
    rows = got.shape[1]
    stored = data.reshape(rows, -1)
    weights = dequantize(stored, GGMLQuantizationType(int(tensor_type))).astype(np.float64)
    vectors = as_int8(x)
    bound = tolerance * (np.abs(vectors) @ np.abs(weights).T)
    error = np.abs(got - vectors @ weights.T)
    assert np.isfinite(bound).all()
    assert (error <= bound).all(), f"{(error / np.maximum(bound, 1e-300)).max()} times too far off"


@pytest.mark.wide(1)
@pytest.mark.parametrize("rows", NUM_ROWS)
@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_products_are_exact_but_for_rounding(
    ops: CpuOps, tensor_type: TensorType, rows: int
) -> None:
    for columns in (tensor_type.layout.block_elements, many_columns(tensor_type)):
        data = random_blocks(tensor_type, rows, columns).reshape(-1)
        x = random_vectors(MOST_TOKENS, columns)
        whole = multiply(ops, data, tensor_type, rows, x)
        assert_close(whole, data, tensor_type, x)
        for num_tokens in NUM_TOKENS:
            got = multiply(ops, data, tensor_type, rows, x[:num_tokens])
            np.testing.assert_array_equal(got, whole[:num_tokens])


@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_bits_depend_on_row_and_vector_alone(ops: CpuOps, tensor_type: TensorType) -> None:
    columns = many_columns(tensor_type)
    data = random_blocks(tensor_type, 33, columns).reshape(-1)
    row_bytes = tensor_type.row_bytes(columns)
    x = random_vectors(MOST_TOKENS, columns)
    whole = multiply(ops, data, tensor_type, 33, x)
    for token in range(MOST_TOKENS):
        alone = multiply(ops, data, tensor_type, 33, x[token : token + 1])
        np.testing.assert_array_equal(alone, whole[token : token + 1])
    for row, tokens in ((0, slice(5, 6)), (14, slice(3, 10)), (32, slice(1, 29))):
        few = data[row * row_bytes : (row + 1) * row_bytes]
        got = multiply(ops, few, tensor_type, 1, x[tokens])
        np.testing.assert_array_equal(got, whole[tokens, row : row + 1])


@pytest.mark.wide(1)
@pytest.mark.parametrize("bits", SCALE_BITS.values(), ids=SCALE_BITS.keys())
@pytest.mark.parametrize("tensor_type", HALVES, ids=lambda t: t.name)
def test_scales_at_the_limits(ops: CpuOps, tensor_type: TensorType, bits: int) -> None:
    columns = many_columns(tensor_type)
    blocks = random_blocks(tensor_type, 16, columns)
    for offset in HALVES[tensor_type]:
        blocks[:, offset : offset + 2] = np.array([bits], np.uint16).view(np.uint8)
    for num_tokens in (1, 3):
        x = random_vectors(num_tokens, columns)
        got = multiply(ops, blocks.reshape(-1), tensor_type, 16, x)
        assert_close(got, blocks.reshape(-1), tensor_type, x)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 127, 200])
def test_exponents_at_the_limits(ops: CpuOps, exponent: int) -> None:
    """The two smallest scales of MXFP4 are subnormal numbers."""
    blocks = random_blocks(TensorType.MXFP4, 16, 416)
    blocks[:, 0] = exponent
    for num_tokens in (1, 3):
        x = 1e6 * random_vectors(num_tokens, 416)  # or results would be subnormal
        got = multiply(ops, blocks.reshape(-1), TensorType.MXFP4, 16, x)
        assert_close(got, blocks.reshape(-1), TensorType.MXFP4, x)


def test_every_scale_of_nvfp4(ops: CpuOps) -> None:
    blocks = random_blocks(TensorType.NVFP4, 64, 64)
    blocks[:, :4] = np.arange(256).reshape(64, 4)
    for num_tokens in (1, 3):
        x = random_vectors(num_tokens, 64)
        got = multiply(ops, blocks.reshape(-1), TensorType.NVFP4, 64, x)
        assert_close(got, blocks.reshape(-1), TensorType.NVFP4, x)


@pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)
def test_each_weight_alone(ops: CpuOps, tensor_type: TensorType) -> None:
    """Vectors with a single nonzero value show each weight in its place, and nothing else."""
    columns = tensor_type.layout.block_elements
    data = random_blocks(tensor_type, 16, columns).reshape(-1)
    weights = dequantize(data.reshape(16, -1), GGMLQuantizationType(int(tensor_type)))
    got = multiply(ops, data, tensor_type, 16, np.eye(columns, dtype=np.float32))
    np.testing.assert_allclose(got, weights.T, rtol=0, atol=1e-6 * np.abs(weights).max())


EDGE = """
import ctypes, mmap, sys
import numpy as np
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.weights.matrix import as_matrix
from dflash_runtime.compute.cpu.weights.repacked.formats import FORMATS
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers

PAGE, ROWS = mmap.PAGESIZE, 16
ops = CpuOps(Workers(1), Scratch())
for tensor_type, form in FORMATS.items():
    print(tensor_type.name, flush=True)
    for num_chunks in (1, 3):
        columns = 32 * form.chunk_blocks * num_chunks
        size = ROWS * tensor_type.row_bytes(columns)
        readable = -(-size // PAGE) * PAGE
        memory = mmap.mmap(-1, readable + 2 * PAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for guard in (first, first + PAGE + readable):
            assert protect(guard, PAGE, 0) == 0, ctypes.get_errno()
        for begin in (first + PAGE, first + PAGE + readable - size):
            data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin))
            for num_tokens in (1, 3):
                x = np.ones((num_tokens, columns), np.float32)
                out = np.ones((num_tokens, ROWS), np.float32)
                ops.linear(x, as_matrix(data, tensor_type, ROWS, columns), out)
                assert tensor_type.name == "MXFP4" or not out.any()
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="protects pages with mprotect")
def test_nothing_is_read_outside_the_rows() -> None:
    """Rows between unreadable pages, as the last ones of a mapped file might be."""
    ended = subprocess.run(
        [sys.executable, "-c", EDGE], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, f"{ended.returncode}: {ended.stdout} {ended.stderr}"
    assert ended.stdout.endswith("done\n")
