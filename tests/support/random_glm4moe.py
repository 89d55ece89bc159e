"""Random glm4moe models; see architectures.RandomArchitecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.random_gguf import SIZES_OF_256, SIZES_ON_GPU, YarnRope, scaling_keys
from support.tensor_shapes import (
    TensorShapes,
    experts,
    gated_ffn,
    prediction,
    qk_norms,
    qkv,
    qkv_biases,
    shared_experts,
    whole_model,
)


@dataclass(frozen=True, slots=True)
class Glm4MoeShape:
    """Dimensions of a glm4moe model: dense layers first, a block for prediction last."""

    name: str = "default"
    num_layers: int = 4
    hidden_size: int = 46
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 12
    num_rotated: int = 6
    sections: tuple[int, int, int, int] | None = None
    rope_freq_base: float = 1e6
    rope_scaling: YarnRope | None = None
    has_head_norms: bool = False
    has_qkv_biases: bool = True
    num_dense: int = 1
    dense_ffn_size: int = 31
    num_experts: int = 12
    num_experts_used: int = 3
    num_groups: int | None = 1
    num_groups_used: int | None = 1
    ffn_size: int = 20
    num_shared: int = 1
    weights_norm: bool = True
    weights_scale: float | None = 2.5
    gating_func: int | None = 2
    has_prediction_block: bool = False
    vocab_size: int = 101
    context_length: int = 256
    rms_eps: float = 1e-5
    tied_output: bool = False
    architecture: str = "glm4moe"

    def keys(self) -> dict[str, Any]:
        """See random_gguf.RandomShape."""
        return {
            "block_count": self.num_layers + self.has_prediction_block,
            "nextn_predict_layers": int(self.has_prediction_block),
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "feed_forward_length": self.dense_ffn_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "rope.freq_base": self.rope_freq_base,
            "rope.dimension_count": self.num_rotated,
            "rope.dimension_sections": None if self.sections is None else list(self.sections),
            **scaling_keys(self.rope_scaling),
            "leading_dense_block_count": self.num_dense,
            "expert_count": self.num_experts,
            "expert_used_count": self.num_experts_used,
            "expert_group_count": self.num_groups,
            "expert_group_used_count": self.num_groups_used,
            "expert_feed_forward_length": self.ffn_size,
            "expert_shared_count": self.num_shared,
            "expert_weights_norm": self.weights_norm,
            "expert_weights_scale": self.weights_scale,
            "expert_gating_func": self.gating_func,
        }

    def tensors(self) -> TensorShapes:
        """See random_gguf.RandomShape."""
        layers = [
            self._attention() | self._ffn(is_dense=layer_id < self.num_dense)
            for layer_id in range(self.num_layers + self.has_prediction_block)
        ]
        if self.has_prediction_block:
            layers[-1] |= prediction(self.hidden_size)
        return whole_model(self, layers, tied_output=self.tied_output)

    def _attention(self) -> TensorShapes:
        hidden, width = self.hidden_size, self.num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        return {
            "attn_norm.weight": (hidden,),
            **qkv(hidden, width, kv_width),
            "attn_output.weight": (hidden, width),
            "post_attention_norm.weight": (hidden,),
            **(qkv_biases(width, kv_width) if self.has_qkv_biases else {}),
            **(qk_norms(self.head_dim) if self.has_head_norms else {}),
        }

    def _ffn(self, *, is_dense: bool) -> TensorShapes:
        hidden, ffn = self.hidden_size, self.ffn_size
        if is_dense:
            return gated_ffn(hidden, self.dense_ffn_size)
        return {
            "ffn_gate_inp.weight": (self.num_experts, hidden),
            "exp_probs_b.bias": (self.num_experts,),
            **experts(self.num_experts, hidden, ffn),
            **shared_experts(hidden, self.num_shared * ffn),
        }


SHAPES = (
    Glm4MoeShape("odd widths"),
    Glm4MoeShape(
        "norms of heads, prediction block, two dense layers",
        has_head_norms=True,
        has_prediction_block=True,
        num_dense=2,
        num_shared=2,
        hidden_size=37,
        num_heads=3,
        num_kv_heads=3,
        head_dim=14,
        num_rotated=14,
    ),
    Glm4MoeShape(
        "groups, prediction block, tied",
        num_layers=3,
        has_prediction_block=True,
        num_groups=4,
        num_groups_used=2,
        weights_scale=None,
        tied_output=True,
        vocab_size=97,
    ),
    Glm4MoeShape(
        "sections of positions, yarn",
        head_dim=16,
        num_rotated=8,
        sections=(1, 2, 1, 0),
        rope_scaling=YarnRope(8.0, 32),
        num_groups=None,
        num_groups_used=None,
        gating_func=None,
        num_dense=0,
    ),
    Glm4MoeShape(
        "every expert used, three shared",
        num_kv_heads=1,
        has_qkv_biases=False,
        num_experts=5,
        num_experts_used=5,
        num_shared=3,
        weights_norm=False,
        gating_func=1,
    ),
)

SMALL = Glm4MoeShape(num_layers=2)

SHAPE_ON_GPU = Glm4MoeShape(
    **SIZES_ON_GPU, num_layers=3, head_dim=16, num_rotated=8, dense_ffn_size=32, num_groups=None
)

BLOCK_256_SHAPE = Glm4MoeShape(
    **SIZES_OF_256,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    num_rotated=16,
    dense_ffn_size=256,
)

REQUIRED_KEYS = ("expert_feed_forward_length", "expert_shared_count", "feed_forward_length")
