"""Random laguna models; see architectures.RandomArchitecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.random_gguf import SIZES_OF_256, SIZES_ON_GPU, YarnRope, scaling_keys
from support.tensor_shapes import (
    TensorShapes,
    experts,
    gated_ffn,
    qk_norms,
    qkv,
    shared_experts,
    whole_model,
)


@dataclass(frozen=True, slots=True)
class LagunaShape:
    """Dimensions of a laguna model: head counts by layer, dense layers first."""

    name: str = "default"
    hidden_size: int = 46
    num_heads: tuple[int, ...] = (6, 4, 2, 8, 6)
    num_kv_heads: int = 2
    head_dim: int = 12
    gates_elements: bool = False
    """Gates are per element of a head, otherwise per head."""
    window: int = 16
    """0: none."""
    pattern: int | tuple[bool, ...] | None = None
    num_rotated: int = 6
    num_rotated_in_window: int | None = 12
    rope_freq_base: float = 5e5
    rope_freq_base_in_window: float | None = 1e4
    rope_scaling: YarnRope | None = None
    num_dense: int = 1
    dense_ffn_size: int = 31
    num_experts: int = 11
    num_experts_used: int = 3
    ffn_size: int = 20
    shared_ffn_size: int = 13
    weights_norm: bool = True
    weights_scale: float = 2.5
    gating_func: int | None = 2
    vocab_size: int = 101
    context_length: int = 256
    rms_eps: float = 1e-6
    tied_output: bool = False
    architecture: str = "laguna"

    def keys(self) -> dict[str, Any]:
        """See random_gguf.RandomShape."""
        window: dict[str, Any] = {}
        if self.window:
            window = {
                "attention.sliding_window": self.window,
                "attention.sliding_window_pattern": (
                    list(self.pattern) if isinstance(self.pattern, tuple) else self.pattern
                ),
                "rope.freq_base_swa": self.rope_freq_base_in_window,
                "rope.dimension_count_swa": self.num_rotated_in_window,
            }
        return {
            "block_count": len(self.num_heads),
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "feed_forward_length": self.dense_ffn_size,
            "attention.head_count": list(self.num_heads),
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            **window,
            "rope.freq_base": self.rope_freq_base,
            "rope.dimension_count": self.num_rotated,
            "leading_dense_block_count": self.num_dense,
            "expert_count": self.num_experts,
            "expert_used_count": self.num_experts_used,
            "expert_feed_forward_length": self.ffn_size,
            "expert_shared_feed_forward_length": self.shared_ffn_size,
            "expert_weights_norm": self.weights_norm,
            "expert_weights_scale": self.weights_scale,
            "expert_gating_func": self.gating_func,
            **scaling_keys(self.rope_scaling),
        }

    def tensors(self) -> TensorShapes:
        """See random_gguf.RandomShape."""
        layers = [self._layer(layer_id) for layer_id in range(len(self.num_heads))]
        return whole_model(self, layers, tied_output=self.tied_output)

    def _layer(self, layer_id: int) -> TensorShapes:
        hidden, num_heads = self.hidden_size, self.num_heads[layer_id]
        width, kv_width = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = {
            "attn_norm.weight": (hidden,),
            **qkv(hidden, width, kv_width),
            **qk_norms(self.head_dim),
            "attn_gate.weight": (width if self.gates_elements else num_heads, hidden),
            "attn_output.weight": (hidden, width),
            "ffn_norm.weight": (hidden,),
        }
        if layer_id < self.num_dense:
            return layer | gated_ffn(hidden, self.dense_ffn_size)
        return {
            **layer,
            "ffn_gate_inp.weight": (self.num_experts, hidden),
            "exp_probs_b.bias": (self.num_experts,),
            **experts(self.num_experts, hidden, self.ffn_size),
            **shared_experts(hidden, self.shared_ffn_size),
        }


SHAPES = (
    LagunaShape("odd widths"),
    LagunaShape(
        "gates of elements, yarn",
        gates_elements=True,
        head_dim=16,
        num_rotated=8,
        num_rotated_in_window=16,
        window=23,
        rope_scaling=YarnRope(32.0, 64),
        tied_output=True,
    ),
    LagunaShape(
        "everything seen",
        num_heads=(3, 9, 6),
        num_kv_heads=3,
        window=0,
        num_dense=2,
        weights_norm=False,
        weights_scale=0.0,
        gating_func=None,
    ),
    LagunaShape(
        "its own pattern",
        num_heads=(2, 2, 4, 4),
        pattern=(True, False, True, True),
        num_rotated_in_window=None,
        rope_freq_base_in_window=None,
        num_dense=0,
        num_experts=7,
        num_experts_used=7,
        gating_func=1,
    ),
    LagunaShape(
        "a period of two", num_heads=(2, 6, 4), num_kv_heads=1, pattern=2, window=1, vocab_size=97
    ),
)

SMALL = LagunaShape(num_heads=(6, 4))

SHAPE_ON_GPU = LagunaShape(
    **SIZES_ON_GPU,
    num_heads=(6, 4, 2),
    head_dim=16,
    num_rotated=8,
    num_rotated_in_window=16,
    dense_ffn_size=32,
    shared_ffn_size=32,
    window=5,
)

BLOCK_256_SHAPE = LagunaShape(
    **SIZES_OF_256,
    num_heads=(8, 16, 16),
    head_dim=32,
    num_rotated=16,
    num_rotated_in_window=32,
    dense_ffn_size=256,
    shared_ffn_size=256,
)

REQUIRED_KEYS = ("expert_feed_forward_length", "leading_dense_block_count", "feed_forward_length")
