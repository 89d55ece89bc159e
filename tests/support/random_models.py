"""Random qwen3moe models: small ones, and a sparse file with the size of a real one.

Does not import the packages under test.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np

from dflash_protocol.ids import I32Array
from support.random_gguf import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    LinearRope,
    TensorTypes,
    YarnRope,
    byte_characters,
    kind_of,
    random_tensors,
    scaling_keys,
    write_model,
)
from support.tensor_shapes import TensorShapes, experts, qk_norms, qkv, whole_model

__all__ = [
    "BLOCK_32_SHAPE",
    "BLOCK_256_SHAPE",
    "CHAT_TEMPLATE",
    "END_OF_TEXT",
    "END_OF_TEXT_ID",
    "ODD_SHAPES",
    "LinearRope",
    "Qwen3MoeShape",
    "TensorTypes",
    "YarnRope",
    "byte_characters",
    "random_tensors",
    "write_qwen3moe",
    "write_sparse_30b",
]


@dataclass(frozen=True, slots=True)
class Qwen3MoeShape:
    """Dimensions of a qwen3moe model."""

    name: str = "default"
    num_layers: int = 5
    hidden_size: int = 52
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 10
    num_experts: int = 11
    num_experts_used: int = 3
    ffn_size: int = 36
    vocab_size: int = 101
    context_length: int = 256
    rope_freq_base: float = 10_000.0
    rms_eps: float = 1e-6
    tied_output: bool = False
    rope_scaling: LinearRope | YarnRope | None = None
    architecture: str = "qwen3moe"

    def keys(self) -> dict[str, Any]:
        """See random_gguf.RandomShape."""
        return {
            "block_count": self.num_layers,
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "feed_forward_length": self.ffn_size * self.num_experts_used,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.freq_base": self.rope_freq_base,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "expert_count": self.num_experts,
            "expert_used_count": self.num_experts_used,
            "expert_feed_forward_length": self.ffn_size,
            **scaling_keys(self.rope_scaling),
        }

    def tensors(self) -> TensorShapes:
        """See random_gguf.RandomShape."""
        hidden, width = self.hidden_size, self.num_heads * self.head_dim
        layer = {
            "attn_norm.weight": (hidden,),
            **qkv(hidden, width, self.num_kv_heads * self.head_dim),
            **qk_norms(self.head_dim),
            "attn_output.weight": (hidden, width),
            "ffn_norm.weight": (hidden,),
            "ffn_gate_inp.weight": (self.num_experts, hidden),
            **experts(self.num_experts, hidden, self.ffn_size),
        }
        return whole_model(self, [layer] * self.num_layers, tied_output=self.tied_output)


ODD_SHAPES: tuple[Qwen3MoeShape, ...] = (
    Qwen3MoeShape("odd widths"),
    Qwen3MoeShape(
        "seven heads on one",
        hidden_size=45,
        num_heads=7,
        num_kv_heads=1,
        head_dim=18,
        ffn_size=23,
        vocab_size=97,
        rope_freq_base=1e6,
        rms_eps=1e-5,
    ),
    Qwen3MoeShape(
        "yarn",
        head_dim=24,
        context_length=4096,
        rope_scaling=YarnRope(factor=4.0, original_context=1024),
    ),
    Qwen3MoeShape(
        "yarn from few positions",
        hidden_size=37,
        head_dim=14,
        rope_freq_base=5e5,
        rope_scaling=YarnRope(factor=8.0, original_context=32),
    ),
    Qwen3MoeShape("linear rope", head_dim=12, rope_scaling=LinearRope(factor=2.5)),
    Qwen3MoeShape("tied output", hidden_size=60, vocab_size=113, tied_output=True),
    Qwen3MoeShape("every expert used", num_experts=5, num_experts_used=5),
    Qwen3MoeShape("one expert used", num_experts=7, num_experts_used=1, num_kv_heads=6),
    Qwen3MoeShape("one layer", num_layers=1, hidden_size=33, head_dim=6),
)
"""Shapes in which nothing is round, for F32 files."""

BLOCK_32_SHAPE = Qwen3MoeShape(
    "blocks of 32", hidden_size=96, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=160
)
"""Rows of whole blocks of 32 values: Q8_0, Q4_0, IQ4_NL, MXFP4 and the like."""

BLOCK_256_SHAPE = Qwen3MoeShape(
    "blocks of 256",
    num_layers=2,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    num_experts=6,
    num_experts_used=2,
    ffn_size=512,
)
"""Rows of whole blocks of 256 values: every GGML type."""


write_qwen3moe = write_model


CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nFunction signatures are within <tools></tools> tags:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""The dialogue format of the Qwen3 models, with tools and thinking."""

# fmt: off
_CONTROL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
]
_USER_TOKENS = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
]
# fmt: on

_NUM_MERGES_30B = 151_387
_SHAPE_30B = Qwen3MoeShape(
    "Qwen3 30B A3B",
    num_layers=48,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_used=8,
    ffn_size=768,
    vocab_size=151_936,
    context_length=40_960,
    rope_freq_base=1e6,
)


def write_sparse_30b(path: Path) -> Path:
    """Write a sparse file with the metadata and size of Qwen3-30B-A3B in Q4_K_M (18.6 GB).

    Metadata, a vocabulary of 151,936 tokens with its merges, and 579 tensors of the types that
    llama-quantize chooses; their data is a hole in the file, which reads as zeros.
    """
    alignment = gguf.GGUF_DEFAULT_ALIGNMENT
    metadata = _metadata_30b()
    tensors = _SHAPE_30B.tensors()
    header = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += _gguf_string(key) + _gguf_value(value)
    offset = 0
    for name, dims in tensors.items():
        ggml_type = gguf.GGMLQuantizationType[_q4_k_m_type(name, _SHAPE_30B.num_layers)]
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        header += _gguf_string(name) + struct.pack("<I", len(dims))
        header += struct.pack(f"<{len(dims)}QIQ", *reversed(dims), ggml_type, offset)
        num_bytes = math.prod(dims) // block_elements * block_bytes
        offset += num_bytes + -num_bytes % alignment
    header += bytes(-len(header) % alignment)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + offset)
    return path


def _q4_k_m_type(name: str, num_layers: int) -> str:
    """Source: llama-quantize, the rule that gives some layers more bits."""
    kind = kind_of(name)
    if kind.endswith("_norm") or kind == "ffn_gate_inp":
        return "F32"
    if kind == "output":
        return "Q6_K"
    if kind in {"attn_v", "ffn_down_exps"}:
        layer_id, eighth = int(name.split(".")[1]), num_layers // 8
        first_or_last = not eighth <= layer_id < 7 * eighth
        return "Q6_K" if first_or_last or (layer_id - eighth) % 3 == 2 else "Q4_K"
    return "Q4_K"


_MetadataValue: TypeAlias = str | bool | int | float | list[bytes] | I32Array


def _metadata_30b() -> dict[str, _MetadataValue]:
    shape = _SHAPE_30B
    words, merges = _random_merges(_NUM_MERGES_30B)
    added = [token.encode() for token in (*_CONTROL_TOKENS, *_USER_TOKENS)]
    normal = [character.encode() for character in byte_characters()] + words
    first_unused = len(normal) + len(added)
    unused = [f"[PAD{token_id}]".encode() for token_id in range(first_unused, shape.vocab_size)]
    types = (
        [gguf.TokenType.NORMAL] * len(normal)
        + [gguf.TokenType.CONTROL] * len(_CONTROL_TOKENS)
        + [gguf.TokenType.USER_DEFINED] * len(_USER_TOKENS)
        + [gguf.TokenType.UNUSED] * len(unused)
    )
    end_of_text_id = len(normal)
    return {
        "general.architecture": "qwen3moe",
        "general.type": "model",
        "general.name": shape.name,
        "general.basename": "Qwen3",
        "general.size_label": "30B-A3B",
        "qwen3moe.block_count": shape.num_layers,
        "qwen3moe.context_length": shape.context_length,
        "qwen3moe.embedding_length": shape.hidden_size,
        "qwen3moe.feed_forward_length": 6144,
        "qwen3moe.attention.head_count": shape.num_heads,
        "qwen3moe.attention.head_count_kv": shape.num_kv_heads,
        "qwen3moe.rope.freq_base": shape.rope_freq_base,
        "qwen3moe.attention.layer_norm_rms_epsilon": shape.rms_eps,
        "qwen3moe.expert_used_count": shape.num_experts_used,
        "qwen3moe.attention.key_length": shape.head_dim,
        "qwen3moe.attention.value_length": shape.head_dim,
        "qwen3moe.expert_count": shape.num_experts,
        "qwen3moe.expert_feed_forward_length": shape.ffn_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*normal, *added, *unused],
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": end_of_text_id + _CONTROL_TOKENS.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": end_of_text_id,
        "tokenizer.ggml.bos_token_id": end_of_text_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        "general.quantization_version": 2,
        "general.file_type": 15,
    }


def _random_merges(count: int) -> tuple[list[bytes], list[bytes]]:
    """`count` tokens of several letters and the merges that make them, as long as real ones."""
    random = np.random.default_rng(0)
    space = "Ġ".encode()
    parts = [space, *(bytes([letter]) for letter in b"etaoinshrdlcumwfgypbvkxjqzETAOINSHRDLCUM")]
    words: list[bytes] = []
    merges: list[bytes] = []
    seen: set[bytes] = set()
    while len(merges) < count:
        for first, second in random.random((count, 2)).tolist():
            left, right = parts[int(first * len(parts))], parts[int(second * len(parts))]
            word = left + right
            if word not in seen and not right.startswith(space) and len(merges) < count:
                seen.add(word)
                words.append(word)
                merges.append(left + b" " + right)
                if len(parts) < 8_000 and len(word) <= 5:
                    parts.append(word)
    return words, merges


def _gguf_string(text: str | bytes) -> bytes:
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded


def _gguf_value(value: _MetadataValue) -> bytes:
    """A metadata value after its type."""
    kind = gguf.GGUFValueType
    if isinstance(value, bool):
        return struct.pack("<I?", kind.BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", kind.UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", kind.FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", kind.STRING) + _gguf_string(value)
    if isinstance(value, list):
        texts = b"".join(_gguf_string(text) for text in value)
        return struct.pack("<IIQ", kind.ARRAY, kind.STRING, len(value)) + texts
    return struct.pack("<IIQ", kind.ARRAY, kind.INT32, len(value)) + value.tobytes()
