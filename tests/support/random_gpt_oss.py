"""Random gpt-oss models; see architectures.RandomArchitecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.random_gguf import SIZES_OF_256, SIZES_ON_GPU, YarnRope, scaling_keys
from support.tensor_shapes import TensorShapes, experts, qkv, qkv_biases, whole_model


@dataclass(frozen=True, slots=True)
class GptOssShape:
    """Dimensions of a gpt-oss model."""

    name: str = "default"
    num_layers: int = 4
    hidden_size: int = 46
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 10
    window: int = 16
    rope_freq_base: float = 150_000.0
    rope_scaling: YarnRope | None = None
    has_qkv_biases: bool = True
    num_experts: int = 11
    num_experts_used: int = 3
    ffn_size: int = 20
    vocab_size: int = 101
    context_length: int = 256
    rms_eps: float = 1e-5
    architecture: str = "gpt-oss"

    def keys(self) -> dict[str, Any]:
        """See random_gguf.RandomShape."""
        return {
            "block_count": self.num_layers,
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "feed_forward_length": self.ffn_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.sliding_window": self.window,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "rope.freq_base": self.rope_freq_base,
            **scaling_keys(self.rope_scaling),
            "expert_count": self.num_experts,
            "expert_used_count": self.num_experts_used,
            "expert_feed_forward_length": self.ffn_size,
        }

    def tensors(self) -> TensorShapes:
        """See random_gguf.RandomShape."""
        hidden, num_experts, ffn = self.hidden_size, self.num_experts, self.ffn_size
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = {
            "attn_norm.weight": (hidden,),
            **qkv(hidden, width, kv_width),
            "attn_output.weight": (hidden, width),
            "attn_output.bias": (hidden,),
            "attn_sinks.weight": (self.num_heads,),
            "post_attention_norm.weight": (hidden,),
            "ffn_gate_inp.weight": (num_experts, hidden),
            "ffn_gate_inp.bias": (num_experts,),
        }
        for name, dims in experts(num_experts, hidden, ffn).items():
            layer |= {name: dims, name.replace(".weight", ".bias"): dims[:2]}
        if self.has_qkv_biases:
            layer |= qkv_biases(width, kv_width)
        return whole_model(self, [layer] * self.num_layers)


SHAPES = (
    GptOssShape("odd widths"),
    GptOssShape(
        "yarn, a window of one",
        num_layers=3,
        hidden_size=37,
        num_heads=3,
        num_kv_heads=3,
        head_dim=14,
        window=1,
        rope_scaling=YarnRope(32.0, 64),
        vocab_size=97,
    ),
    GptOssShape("every expert used", num_kv_heads=1, window=23, num_experts=5, num_experts_used=5),
    GptOssShape("one expert used", num_layers=2, num_experts_used=1, has_qkv_biases=False),
)

SMALL = GptOssShape(num_layers=2)

SHAPE_ON_GPU = GptOssShape(
    **SIZES_ON_GPU, num_layers=3, num_heads=4, head_dim=16, window=5, rope_scaling=YarnRope(4.0, 64)
)

BLOCK_256_SHAPE = GptOssShape(**SIZES_OF_256, num_layers=2, num_heads=8, head_dim=32)

REQUIRED_KEYS = ("expert_feed_forward_length", "attention.sliding_window")
