"""Random glm4moe models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.random_gguf import SIZES_ON_GPU, YarnRope


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
            **({} if self.rope_scaling is None else self.rope_scaling.keys()),
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

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """See random_gguf.RandomShape."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab_size, hidden)}
        for layer_id in range(self.num_layers + self.has_prediction_block):
            layer = self._attention() | self._ffn(is_dense=layer_id < self.num_dense)
            if layer_id == self.num_layers:
                layer |= {
                    "nextn.eh_proj.weight": (hidden, 2 * hidden),
                    "nextn.enorm.weight": (hidden,),
                    "nextn.hnorm.weight": (hidden,),
                    "nextn.shared_head_norm.weight": (hidden,),
                }
            shapes |= {f"blk.{layer_id}.{kind}": dims for kind, dims in layer.items()}
        shapes["output_norm.weight"] = (hidden,)
        if not self.tied_output:
            shapes["output.weight"] = (self.vocab_size, hidden)
        return shapes

    def _attention(self) -> dict[str, tuple[int, ...]]:
        hidden, width = self.hidden_size, self.num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (width, hidden),
            "attn_k.weight": (kv_width, hidden),
            "attn_v.weight": (kv_width, hidden),
            "attn_output.weight": (hidden, width),
            "post_attention_norm.weight": (hidden,),
        }
        if self.has_qkv_biases:
            layer |= {
                "attn_q.bias": (width,),
                "attn_k.bias": (kv_width,),
                "attn_v.bias": (kv_width,),
            }
        if self.has_head_norms:
            norms = {"attn_q_norm.weight": (self.head_dim,), "attn_k_norm.weight": (self.head_dim,)}
            return layer | norms
        return layer

    def _ffn(self, *, is_dense: bool) -> dict[str, tuple[int, ...]]:
        hidden, experts, ffn = self.hidden_size, self.num_experts, self.ffn_size
        if is_dense:
            return {
                "ffn_gate.weight": (self.dense_ffn_size, hidden),
                "ffn_up.weight": (self.dense_ffn_size, hidden),
                "ffn_down.weight": (hidden, self.dense_ffn_size),
            }
        shared = self.num_shared * ffn
        return {
            "ffn_gate_inp.weight": (experts, hidden),
            "exp_probs_b.bias": (experts,),
            "ffn_gate_exps.weight": (experts, ffn, hidden),
            "ffn_up_exps.weight": (experts, ffn, hidden),
            "ffn_down_exps.weight": (experts, hidden, ffn),
            "ffn_gate_shexp.weight": (shared, hidden),
            "ffn_up_shexp.weight": (shared, hidden),
            "ffn_down_shexp.weight": (hidden, shared),
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
"""Shapes in which nothing is round, for F32 files."""

SMALL = Glm4MoeShape(num_layers=2)
"""Two layers with all that they may have; for what only metadata says."""

SHAPE_ON_GPU = Glm4MoeShape(
    **SIZES_ON_GPU, num_layers=3, head_dim=16, num_rotated=8, dense_ffn_size=32, num_groups=None
)
"""Rows as the GPU's kernels of quantised and float matrices take them."""

BLOCK_256_SHAPE = Glm4MoeShape(
    num_layers=3,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    num_rotated=16,
    num_experts=4,
    num_experts_used=4,
    dense_ffn_size=256,
    ffn_size=256,
)
"""Rows of whole blocks of 256 values. All experts are used: a router whose choice flips would drown
what is measured."""

REQUIRED_KEYS = ("expert_feed_forward_length", "expert_shared_count", "feed_forward_length")
"""Beside those that every architecture needs."""
