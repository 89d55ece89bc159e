"""Random olmoe models; see architectures.RandomArchitecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.random_gguf import SIZES_OF_256, SIZES_ON_GPU, LinearRope, YarnRope, scaling_keys
from support.tensor_shapes import TensorShapes, experts, qk_norms, qkv, whole_model


@dataclass(frozen=True, slots=True)
class OlmoeShape:
    """Dimensions of an olmoe model: heads that fill the hidden size, as many of keys."""

    name: str = "default"
    num_layers: int = 4
    hidden_size: int = 42
    num_heads: int = 3
    num_experts: int = 11
    num_experts_used: int = 3
    ffn_size: int = 20
    vocab_size: int = 101
    context_length: int = 256
    rope_freq_base: float | None = None
    rms_eps: float = 1e-5
    rope_scaling: LinearRope | YarnRope | None = None
    architecture: str = "olmoe"

    def keys(self) -> dict[str, Any]:
        """See random_gguf.RandomShape."""
        return {
            "block_count": self.num_layers,
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "feed_forward_length": self.ffn_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_heads,
            "rope.freq_base": self.rope_freq_base,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "expert_count": self.num_experts,
            "expert_used_count": self.num_experts_used,
            **scaling_keys(self.rope_scaling),
        }

    def tensors(self) -> TensorShapes:
        """See random_gguf.RandomShape."""
        hidden = self.hidden_size
        layer = {
            "attn_norm.weight": (hidden,),
            **qkv(hidden, hidden, hidden),
            **qk_norms(hidden),
            "attn_output.weight": (hidden, hidden),
            "ffn_norm.weight": (hidden,),
            "ffn_gate_inp.weight": (self.num_experts, hidden),
            **experts(self.num_experts, hidden, self.ffn_size),
        }
        return whole_model(self, [layer] * self.num_layers)


SHAPES = (
    OlmoeShape("odd widths"),
    OlmoeShape("one head", hidden_size=26, num_heads=1, ffn_size=37, vocab_size=97),
    OlmoeShape("every expert used", hidden_size=40, num_heads=4, num_experts=5, num_experts_used=5),
    OlmoeShape(
        "linear rope",
        num_layers=2,
        hidden_size=48,
        num_heads=6,
        rope_freq_base=5e5,
        rope_scaling=LinearRope(2.5),
    ),
    OlmoeShape("yarn", num_heads=7, rms_eps=1e-6, rope_scaling=YarnRope(4.0, 64)),
)

SMALL = OlmoeShape(num_layers=2)

SHAPE_ON_GPU = OlmoeShape(**SIZES_ON_GPU, num_layers=2, num_heads=4)

BLOCK_256_SHAPE = OlmoeShape(**SIZES_OF_256, num_layers=2, num_heads=4)

REQUIRED_KEYS = ("feed_forward_length",)
