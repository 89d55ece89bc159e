"""Block layouts against the gguf package and ggml; the dequantiser against ggml's C functions, and
against values worked out by hand."""

from __future__ import annotations

import ctypes
import struct

import gguf
import numpy as np
import pytest

from dflash_adapters.quant import BlockLayout, TensorType, dequantise
from dflash_protocol.ids import F32Array, U8Array
from support.llama_oracle import llama_library

# Activation formats, never stored; and types that came after the formats we read.
_NOT_STORED = {"Q8_1", "Q8_K", "Q1_0", "Q2_0"}


@pytest.mark.parametrize("tensor_type", TensorType)
def test_layout_is_the_gguf_packages(tensor_type: TensorType) -> None:
    theirs = gguf.GGMLQuantizationType(int(tensor_type))
    assert theirs.name == tensor_type.name
    assert tensor_type.layout == BlockLayout(*gguf.GGML_QUANT_SIZES[theirs])


@pytest.mark.parametrize("tensor_type", TensorType)
def test_layout_is_ggmls(tensor_type: TensorType) -> None:
    library = llama_library()
    elements, num_bytes = library.ggml_blck_size, library.ggml_type_size
    elements.restype, num_bytes.restype = ctypes.c_int64, ctypes.c_size_t
    assert tensor_type.layout == BlockLayout(elements(tensor_type), num_bytes(tensor_type))


def test_every_type_that_files_hold_is_known() -> None:
    assert {t.name for t in gguf.GGMLQuantizationType} - _NOT_STORED == {t.name for t in TensorType}


@pytest.mark.parametrize("tensor_type", TensorType)
def test_a_row_is_whole_blocks(tensor_type: TensorType) -> None:
    elements, num_bytes = tensor_type.layout
    assert tensor_type.row_bytes(0) == 0
    assert tensor_type.row_bytes(3 * elements) == 3 * num_bytes
    if elements > 1:
        with pytest.raises(ValueError, match=rf"\b{elements + 1}\b.*\b{elements}\b"):
            tensor_type.row_bytes(elements + 1)


_INTEGERS = [TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64]
_WEIGHTS = [t for t in TensorType if t not in _INTEGERS]
# ggml has no row function for the first (nothing to decode) and none at all for the second.
_WITHOUT_C_FUNCTION = {TensorType.F32, TensorType.F64}


class _TypeTraits(ctypes.Structure):
    """ggml_type_traits, as far as its decoder."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def ggml_dequantise(data: U8Array, tensor_type: TensorType) -> F32Array:
    """The values of some blocks, by ggml."""
    get_traits = llama_library().ggml_get_type_traits
    get_traits.restype = ctypes.POINTER(_TypeTraits)
    traits = get_traits(int(tensor_type)).contents
    assert traits.type_name.decode().upper() == tensor_type.name
    values = np.empty(data.size // traits.type_size * traits.blck_size, dtype=np.float32)
    traits.to_float(data.ctypes.data, values.ctypes.data, values.size)
    return values


def as_bytes(*values: float, layout: str) -> U8Array:
    return np.frombuffer(struct.pack(f"<{len(values)}{layout}", *values), dtype=np.uint8)


@pytest.mark.parametrize(
    "tensor_type", [t for t in _WEIGHTS if t not in _WITHOUT_C_FUNCTION], ids=lambda t: t.name
)
def test_any_block_decodes_to_ggmls_bits(tensor_type: TensorType) -> None:
    elements, block_bytes = tensor_type.layout
    num_blocks = 300 if elements > 1 else 9000
    random = np.random.default_rng(int(tensor_type))
    data = random.integers(0, 256, num_blocks * block_bytes, dtype=np.uint8)
    expected = ggml_dequantise(data, tensor_type)
    found = dequantise(data, tensor_type, (num_blocks, elements)).ravel()
    finite = np.isfinite(expected)
    assert finite.any()
    np.testing.assert_array_equal(found[finite].view(np.uint32), expected[finite].view(np.uint32))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))


def test_plain_floats_decode_by_definition() -> None:
    numbers = [0.0, -0.0, 1.5, -65504.0]
    for tensor_type, letter in [
        (TensorType.F16, "e"),
        (TensorType.F32, "f"),
        (TensorType.F64, "d"),
    ]:
        found = dequantise(as_bytes(*numbers, layout=letter), tensor_type, (2, 2))
        assert found.dtype == np.float32
        assert found.ravel().tolist() == numbers
    halves = np.array([1.5, -2.0], dtype=np.float32).view(np.uint16)[1::2]
    assert dequantise(halves.copy().view(np.uint8), TensorType.BF16, (2,)).tolist() == [1.5, -2.0]
    beyond = dequantise(as_bytes(1e300, layout="d"), TensorType.F64, (1,))
    assert np.isinf(beyond).all()


def test_a_q8_0_block_decodes_by_hand() -> None:
    quants = np.arange(-16, 16, dtype=np.int8)
    block = np.concatenate([as_bytes(0.25, layout="e"), quants.view(np.uint8)])
    assert dequantise(block, TensorType.Q8_0, (32,)).tolist() == [0.25 * q for q in range(-16, 16)]


def test_a_q4_k_block_decodes_by_hand() -> None:
    # Scale 2, minimum scale 0.5; sub-block j has scale j + 1 and minimum 2 j, all below 16, so the
    # two top bits stay clear; every byte holds 5 (low nibble) and 9 (high nibble).
    packed = [0] * 12
    for j in range(4):
        packed[j], packed[j + 4] = j + 1, 2 * j
        packed[j + 8] = (j + 5) | (2 * (j + 4)) << 4
    block = np.concatenate([as_bytes(2.0, 0.5, layout="e"), np.array(packed + [0x95] * 128)])
    found = dequantise(block.astype(np.uint8), TensorType.Q4_K, (256,)).reshape(8, 32)
    for j in range(8):
        nibble = 5 if j % 2 == 0 else 9
        assert set(found[j].tolist()) == {2.0 * (j + 1) * nibble - 0.5 * 2 * j}


@pytest.mark.parametrize("tensor_type", _WEIGHTS, ids=lambda t: t.name)
def test_rows_decode_alike_alone_and_together(tensor_type: TensorType) -> None:
    columns = 2 * tensor_type.layout.block_elements
    row_bytes = tensor_type.row_bytes(columns)
    data = np.random.default_rng(2).integers(0, 256, 6 * row_bytes, dtype=np.uint8)
    together = dequantise(data, tensor_type, (2, 3, columns))
    assert together.shape == (2, 3, columns)
    one = dequantise(data[row_bytes : 2 * row_bytes], tensor_type, (columns,))
    np.testing.assert_array_equal(one.view(np.uint32), together[0, 1].view(np.uint32))
    assert dequantise(data[:0], tensor_type, (0, columns)).shape == (0, columns)


def test_the_result_is_the_callers_own() -> None:
    data = as_bytes(1.0, 2.0, layout="f")
    data.flags.writeable = False
    values = dequantise(data, TensorType.F32, (2,))
    values[0] = 5.0
    assert data.view(np.float32).tolist() == [1.0, 2.0]


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\b33 .*\buint8\b.*\bQ8_0\b.*\(32,\).* 34"):
        dequantise(np.zeros(33, dtype=np.uint8), TensorType.Q8_0, (32,))
    with pytest.raises(ValueError, match=r"\b34 .*\bint8\b"):
        dequantise(np.zeros(34, dtype=np.int8), TensorType.Q8_0, (32,))
    with pytest.raises(ValueError, match=r"\bQ8_0\b.*block"):
        dequantise(np.zeros(34, dtype=np.uint8), TensorType.Q8_0, (16, 2))


@pytest.mark.parametrize("tensor_type", _INTEGERS, ids=lambda t: t.name)
def test_integers_are_no_weights(tensor_type: TensorType) -> None:
    with pytest.raises(ValueError, match="integers"):
        dequantise(np.zeros(8, dtype=np.uint8), tensor_type, (1,))
