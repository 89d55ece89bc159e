"""Random qwen2moe models; see architectures.RandomArchitecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.random_gguf import SIZES_OF_256, SIZES_ON_GPU, YarnRope, scaling_keys
from support.tensor_shapes import (
    TensorShapes,
    experts,
    qkv,
    qkv_biases,
    shared_experts,
    whole_model,
)


@dataclass(frozen=True, slots=True)
class Qwen2MoeShape:
    """Dimensions of a qwen2moe model: heads that fill the hidden size."""

    name: str = "default"
    num_layers: int = 4
    hidden_size: int = 48
    num_heads: int = 6
    num_kv_heads: int = 2
    num_experts: int = 11
    num_experts_used: int = 3
    ffn_size: int = 20
    shared_ffn_size: int = 29
    vocab_size: int = 101
    context_length: int = 256
    rope_freq_base: float = 1e6
    rms_eps: float = 1e-6
    has_biases: bool = True
    has_old_keys: bool = False
    """Old key: the FFN's width is that of all used experts together, and of the shared expert."""
    has_flat_gate: bool = True
    """The shared expert's gate is stored as [H], otherwise as [1, H]."""
    rope_scaling: YarnRope | None = None
    architecture: str = "qwen2moe"

    def keys(self) -> dict[str, Any]:
        """See random_gguf.RandomShape."""
        sizes = {
            "feed_forward_length": 2 * self.shared_ffn_size,
            "expert_feed_forward_length": self.ffn_size,
            "expert_shared_feed_forward_length": self.shared_ffn_size,
        }
        if self.has_old_keys:
            sizes = {"feed_forward_length": self.shared_ffn_size}
        return {
            "block_count": self.num_layers,
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "rope.freq_base": self.rope_freq_base,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "expert_count": self.num_experts,
            "expert_used_count": self.num_experts_used,
            **sizes,
            **scaling_keys(self.rope_scaling),
        }

    def tensors(self) -> TensorShapes:
        """See random_gguf.RandomShape."""
        hidden = self.hidden_size
        kv_width = hidden // self.num_heads * self.num_kv_heads
        layer = {
            "attn_norm.weight": (hidden,),
            **qkv(hidden, hidden, kv_width),
            "attn_output.weight": (hidden, hidden),
            "ffn_norm.weight": (hidden,),
            "ffn_gate_inp.weight": (self.num_experts, hidden),
            **experts(self.num_experts, hidden, self.ffn_size),
            "ffn_gate_inp_shexp.weight": (hidden,) if self.has_flat_gate else (1, hidden),
            **shared_experts(hidden, self.shared_ffn_size),
            **(qkv_biases(hidden, kv_width) if self.has_biases else {}),
        }
        return whole_model(self, [layer] * self.num_layers)


SHAPES = (
    Qwen2MoeShape("odd widths"),
    Qwen2MoeShape(
        "old keys",
        hidden_size=42,
        num_heads=3,
        num_kv_heads=3,
        num_experts=7,
        ffn_size=13,
        shared_ffn_size=39,
        has_old_keys=True,
        has_flat_gate=False,
    ),
    Qwen2MoeShape("no biases", num_kv_heads=1, has_biases=False, vocab_size=97),
    Qwen2MoeShape("yarn", num_kv_heads=6, num_experts_used=1, rope_scaling=YarnRope(8.0, 32)),
    Qwen2MoeShape("every expert used", num_layers=2, num_experts=5, num_experts_used=5),
)

SMALL = Qwen2MoeShape(num_layers=2)

SHAPE_ON_GPU = Qwen2MoeShape(**SIZES_ON_GPU, num_layers=2, num_heads=4, shared_ffn_size=32)

BLOCK_256_SHAPE = Qwen2MoeShape(**SIZES_OF_256, num_layers=2, num_heads=4, shared_ffn_size=256)

REQUIRED_KEYS = ()
