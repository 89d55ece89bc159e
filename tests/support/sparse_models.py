"""Files with the sizes of published models, but few layers, whose weights are holes in the file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from support.random_gguf import RandomShape, _add_key, _type_name
from support.random_glm4moe import Glm4MoeShape
from support.random_gpt_oss import GptOssShape
from support.random_laguna import LagunaShape
from support.random_llama4 import Llama4Shape
from support.random_models import Qwen3MoeShape
from support.random_olmoe import OlmoeShape
from support.random_qwen35moe import Qwen35MoeShape

REAL_SIZES: dict[str, tuple[RandomShape, str]] = {
    "qwen3moe": (
        Qwen3MoeShape(
            "30B",
            num_layers=4,
            hidden_size=2048,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_used=8,
            ffn_size=768,
            vocab_size=151_936,
            context_length=40_960,
        ),
        "Q4_K",
    ),
    "qwen35moe": (
        Qwen35MoeShape(
            "35B",
            num_layers=4,
            hidden_size=2048,
            num_heads=16,
            num_kv_heads=2,
            head_dim=256,
            num_rotated=64,
            sections=(11, 11, 10, 0),
            num_key_heads=16,
            num_value_heads=32,
            state_size=128,
            num_experts=256,
            num_experts_used=8,
            ffn_size=512,
            shared_ffn_size=512,
            vocab_size=248_320,
            context_length=40_960,
        ),
        "Q4_K",
    ),
    "gpt-oss": (
        GptOssShape(
            "20B",
            num_layers=4,
            hidden_size=2880,
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            window=128,
            num_experts=32,
            num_experts_used=4,
            ffn_size=2880,
            vocab_size=201_088,
            context_length=131_072,
        ),
        "MXFP4",
    ),
    "llama4": (
        Llama4Shape(
            "scout",
            num_layers=4,
            hidden_size=5120,
            num_heads=40,
            num_kv_heads=8,
            head_dim=128,
            num_experts=16,
            ffn_size=8192,
            dense_ffn_size=16_384,
            vocab_size=202_048,
            context_length=131_072,
            has_rope_freqs=False,
        ),
        "Q4_K",
    ),
    "glm4moe": (
        Glm4MoeShape(
            "air",
            num_layers=4,
            hidden_size=4096,
            num_heads=96,
            num_kv_heads=8,
            head_dim=128,
            num_rotated=64,
            num_dense=1,
            dense_ffn_size=10_944,
            num_experts=128,
            num_experts_used=8,
            ffn_size=1408,
            has_prediction_block=True,
            vocab_size=151_552,
            context_length=131_072,
        ),
        "Q5_0",
    ),
    "olmoe": (
        OlmoeShape(
            "1B-7B",
            num_layers=4,
            hidden_size=2048,
            num_heads=16,
            num_experts=64,
            num_experts_used=8,
            ffn_size=1024,
            vocab_size=50_304,
            context_length=4096,
        ),
        "F16",
    ),
    "laguna": (
        LagunaShape(
            "xs",
            hidden_size=2048,
            num_heads=(32, 32, 32, 32),
            num_kv_heads=8,
            head_dim=128,
            window=512,
            num_rotated=64,
            num_rotated_in_window=128,
            num_dense=1,
            dense_ffn_size=8192,
            num_experts=256,
            num_experts_used=8,
            ffn_size=512,
            shared_ffn_size=512,
            vocab_size=100_352,
            context_length=131_072,
        ),
        "Q8_0",
    ),
}
"""By architecture: sizes of a published model, and the type of most tensors."""


def write_sparse(path: Path, shape: RandomShape, tensor_type: str) -> Path:
    """Write metadata and tensor table; weights read as zeros."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_type("model")
    writer.add_name(f"sparse {shape.architecture}, {shape.name}")
    writer.add_quantization_version(2)
    for key, value in shape.keys().items():
        _add_key(writer, f"{shape.architecture}.{key}", value)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(shape.vocab_size)
    total = 0
    for name, sizes in shape.tensors().items():
        is_vector = len(sizes) == 1 or name.endswith(".bias")
        kind = gguf.GGMLQuantizationType["F32" if is_vector else _type_name(tensor_type, name)]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = int(np.prod(sizes, dtype=np.int64)) // block * block_bytes
        is_float = kind is gguf.GGMLQuantizationType.F32
        stored = sizes if is_float else gguf.quant_shape_to_byte_shape(sizes, kind)
        dtype = np.dtype(np.float32 if is_float else np.uint8)
        writer.add_tensor_info(name, stored, dtype, num_bytes, raw_dtype=kind)
        total += -(-num_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        end = -(-path.stat().st_size // 32) * 32
        file.truncate(end + total)
    return path
