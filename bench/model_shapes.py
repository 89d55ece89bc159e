"""Tensors and metadata of the real models whose shapes random files get.

A shape is named like its architecture. Which tensors get more bits follows Q4_K_M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import gguf
from gguf import GGMLQuantizationType as Type

Tensor: TypeAlias = tuple[str, Type, tuple[int, ...]]
"""Name, type and row-major shape."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Types of one file. `more` is the type that Q4_K_M gives some layers' sensitive tensors."""

    experts: Type
    attention: Type
    head: Type
    num_layers: int
    vocabulary: int = 0
    """0: the model's own."""
    more: Type | None = None
    shape: str = "qwen3moe"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model: its sizes, and the tensors of a layer except the experts'."""

    name: str
    num_layers: int
    vocabulary: int
    hidden: int
    ffn: int
    num_experts: int
    num_used: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float
    eps: float
    layer: Callable[[ModelShape, Mix, int, Type | None], Iterator[Tensor]]
    metadata: Callable[[ModelShape, gguf.GGUFWriter], None]


def tensors(mix: Mix, num_layers: int) -> Iterator[Tensor]:
    """Every tensor, in file order."""
    shape = SHAPES[mix.shape]
    vocabulary = mix.vocabulary or shape.vocabulary
    yield "token_embd.weight", mix.attention, (vocabulary, shape.hidden)
    yield "output_norm.weight", Type.F32, (shape.hidden,)
    yield "output.weight", mix.head, (vocabulary, shape.hidden)
    for layer in range(num_layers):
        # Source: llama.cpp's rule for layers with more bits (first, last, every third).
        eighth = num_layers // 8
        gets_more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
        more = mix.more if mix.more is not None and gets_more else None
        for name, tensor_type, sizes in shape.layer(shape, mix, layer, more):
            yield f"blk.{layer}.{name}", tensor_type, sizes


def add_metadata(writer: gguf.GGUFWriter, mix: Mix, num_layers: int) -> None:
    """All keys except the tokenizer's."""
    shape = SHAPES[mix.shape]
    writer.add_type("model")
    writer.add_name(f"random weights, shape of {shape.name}")
    writer.add_quantization_version(2)
    writer.add_block_count(num_layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(shape.hidden)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.num_used)
    shape.metadata(shape, writer)


def _experts(shape: ModelShape, mix: Mix, more: Type | None) -> Iterator[Tensor]:
    sizes = (shape.num_experts, shape.ffn, shape.hidden)
    yield "ffn_gate_inp.weight", Type.F32, (shape.num_experts, shape.hidden)
    yield "ffn_gate_exps.weight", mix.experts, sizes
    yield "ffn_up_exps.weight", mix.experts, sizes
    yield "ffn_down_exps.weight", more or mix.experts, (sizes[0], shape.hidden, shape.ffn)


def _attention(
    shape: ModelShape, mix: Mix, more: Type | None, *, q_rows: int, norms: tuple[int, int]
) -> Iterator[Tensor]:
    """`norms`: lengths of the norms of queries and keys."""
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "attn_norm.weight", Type.F32, (shape.hidden,)
    yield "attn_q_norm.weight", Type.F32, (norms[0],)
    yield "attn_k_norm.weight", Type.F32, (norms[1],)
    yield "attn_q.weight", mix.attention, (q_rows, shape.hidden)
    yield "attn_k.weight", mix.attention, (kv_heads, shape.hidden)
    yield "attn_v.weight", more or mix.attention, (kv_heads, shape.hidden)
    yield "attn_output.weight", mix.attention, (shape.hidden, heads)


def _qwen3moe_layer(shape: ModelShape, mix: Mix, layer: int, more: Type | None) -> Iterator[Tensor]:
    rows = shape.num_heads * shape.head_dim
    yield from _attention(shape, mix, more, q_rows=rows, norms=(shape.head_dim, shape.head_dim))
    yield "ffn_norm.weight", Type.F32, (shape.hidden,)
    yield from _experts(shape, mix, more)


def _qwen3moe_metadata(shape: ModelShape, writer: gguf.GGUFWriter) -> None:
    writer.add_feed_forward_length(6144)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_expert_feed_forward_length(shape.ffn)


def _olmoe_layer(shape: ModelShape, mix: Mix, layer: int, more: Type | None) -> Iterator[Tensor]:
    rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield from _attention(shape, mix, more, q_rows=rows, norms=(rows, kv_rows))
    yield "ffn_norm.weight", Type.F32, (shape.hidden,)
    yield from _experts(shape, mix, more)


def _olmoe_metadata(shape: ModelShape, writer: gguf.GGUFWriter) -> None:
    writer.add_feed_forward_length(shape.ffn)


_STATE, _KEY_HEADS, _VALUE_HEADS, _KERNEL = 128, 16, 32, 4
_INTERVAL, _ROTATED, _SHARED_FFN = 4, 64, 512
"""Sizes of Qwen3.6-35B-A3B."""


def _qwen35moe_layer(
    shape: ModelShape, mix: Mix, layer: int, more: Type | None
) -> Iterator[Tensor]:
    hidden, rows = shape.hidden, shape.num_heads * shape.head_dim
    if (layer + 1) % _INTERVAL == 0:
        norms = (shape.head_dim, shape.head_dim)
        yield from _attention(shape, mix, more, q_rows=2 * rows, norms=norms)
    else:
        values = _VALUE_HEADS * _STATE
        channels = 2 * _KEY_HEADS * _STATE + values
        yield "attn_norm.weight", Type.F32, (hidden,)
        yield "attn_qkv.weight", mix.attention, (channels, hidden)
        yield "attn_gate.weight", mix.attention, (values, hidden)
        yield "ssm_conv1d.weight", Type.F32, (channels, _KERNEL)
        yield "ssm_dt.bias", Type.F32, (_VALUE_HEADS,)
        yield "ssm_a", Type.F32, (_VALUE_HEADS,)
        yield "ssm_beta.weight", mix.attention, (_VALUE_HEADS, hidden)
        yield "ssm_alpha.weight", mix.attention, (_VALUE_HEADS, hidden)
        yield "ssm_norm.weight", Type.F32, (_STATE,)
        yield "ssm_out.weight", mix.attention, (hidden, values)
    yield "post_attention_norm.weight", Type.F32, (hidden,)
    yield from _experts(shape, mix, more)
    yield "ffn_gate_inp_shexp.weight", Type.F32, (hidden,)
    yield "ffn_gate_shexp.weight", mix.attention, (_SHARED_FFN, hidden)
    yield "ffn_up_shexp.weight", mix.attention, (_SHARED_FFN, hidden)
    yield "ffn_down_shexp.weight", more or mix.attention, (hidden, _SHARED_FFN)


def _qwen35moe_metadata(shape: ModelShape, writer: gguf.GGUFWriter) -> None:
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_expert_feed_forward_length(shape.ffn)
    writer.add_expert_shared_feed_forward_length(_SHARED_FFN)
    writer.add_rope_dimension_count(_ROTATED)
    writer.add_array("qwen35moe.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_uint32("qwen35moe.full_attention_interval", _INTERVAL)
    writer.add_ssm_conv_kernel(_KERNEL)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_group_count(_KEY_HEADS)
    writer.add_ssm_time_step_rank(_VALUE_HEADS)
    writer.add_ssm_inner_size(_VALUE_HEADS * _STATE)


SHAPES = {
    "qwen3moe": ModelShape(
        name="Qwen3-30B-A3B",
        num_layers=48,
        vocabulary=151_936,
        hidden=2048,
        ffn=768,
        num_experts=128,
        num_used=8,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rope_base=1e6,
        eps=1e-6,
        layer=_qwen3moe_layer,
        metadata=_qwen3moe_metadata,
    ),
    "qwen35moe": ModelShape(
        name="Qwen3.6-35B-A3B",
        num_layers=40,
        vocabulary=248_320,
        hidden=2048,
        ffn=512,
        num_experts=256,
        num_used=8,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        rope_base=1e7,
        eps=1e-6,
        layer=_qwen35moe_layer,
        metadata=_qwen35moe_metadata,
    ),
    "olmoe": ModelShape(
        name="OLMoE-1B-7B",
        num_layers=16,
        vocabulary=50_304,
        hidden=2048,
        ffn=1024,
        num_experts=64,
        num_used=8,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        rope_base=1e4,
        eps=1e-5,
        layer=_olmoe_layer,
        metadata=_olmoe_metadata,
    ),
}
