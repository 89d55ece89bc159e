"""Random llama4 models; see architectures.RandomArchitecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.tensor_shapes import TensorShapes, experts, gated_ffn, qkv, shared_experts, whole_model


@dataclass(frozen=True, slots=True)
class Llama4Shape:
    """Dimensions of a llama4 model."""

    name: str = "default"
    num_layers: int = 5
    hidden_size: int = 40
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 10
    num_experts: int = 11
    interleave_step: int = 1
    """Every so many layers, the last one has experts."""
    ffn_size: int = 20
    dense_ffn_size: int = 31
    vocab_size: int = 101
    context_length: int = 16384
    rope_freq_base: float = 5e5
    rms_eps: float = 1e-5
    has_rope_freqs: bool = True
    tied_output: bool = False
    architecture: str = "llama4"

    def keys(self) -> dict[str, Any]:
        """See random_gguf.RandomShape."""
        return {
            "block_count": self.num_layers,
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "feed_forward_length": self.dense_ffn_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "rope.freq_base": self.rope_freq_base,
            "rope.dimension_count": self.head_dim,
            "expert_count": self.num_experts,
            "expert_used_count": 1,
            "expert_feed_forward_length": self.ffn_size,
            "interleave_moe_layer_step": self.interleave_step,
        }

    def tensors(self) -> TensorShapes:
        """See random_gguf.RandomShape."""
        return whole_model(
            self,
            [
                self._layer(has_experts=(layer_id + 1) % self.interleave_step == 0)
                for layer_id in range(self.num_layers)
            ],
            tied_output=self.tied_output,
            num_rope_freqs=self.head_dim // 2 if self.has_rope_freqs else 0,
        )

    def _layer(self, *, has_experts: bool) -> TensorShapes:
        hidden, ffn = self.hidden_size, self.ffn_size
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = {
            "attn_norm.weight": (hidden,),
            **qkv(hidden, width, kv_width),
            "attn_output.weight": (hidden, width),
            "ffn_norm.weight": (hidden,),
        }
        if not has_experts:
            return layer | gated_ffn(hidden, self.dense_ffn_size)
        return {
            **layer,
            "ffn_gate_inp.weight": (self.num_experts, hidden),
            **experts(self.num_experts, hidden, ffn),
            **shared_experts(hidden, ffn),
        }


SHAPES = (
    Llama4Shape("odd widths"),
    Llama4Shape(
        "every other layer dense", num_layers=4, interleave_step=2, num_kv_heads=1, head_dim=14
    ),
    Llama4Shape(
        "every third layer has experts",
        num_layers=7,
        interleave_step=3,
        num_heads=6,
        num_kv_heads=6,
        head_dim=6,
        has_rope_freqs=False,
        tied_output=True,
    ),
    Llama4Shape("unnormed heads", num_layers=4, num_experts=128, ffn_size=7, vocab_size=97),
)

SMALL = Llama4Shape(num_layers=2, interleave_step=2)

SHAPE_ON_GPU = Llama4Shape(
    num_layers=4,
    hidden_size=64,
    num_experts=7,
    ffn_size=32,
    dense_ffn_size=32,
    interleave_step=2,
    head_dim=16,
)

BLOCK_256_SHAPE = Llama4Shape(
    num_layers=4,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    num_experts=1,
    ffn_size=256,
    interleave_step=2,
    dense_ffn_size=256,
)

REQUIRED_KEYS = ("expert_feed_forward_length", "interleave_moe_layer_step", "feed_forward_length")
