"""Block layouts against the gguf package and ggml itself."""

from __future__ import annotations

import ctypes

import gguf
import pytest

from dflash_adapters.quant import BlockLayout, TensorType
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
