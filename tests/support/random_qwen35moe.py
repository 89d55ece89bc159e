"""Random qwen35moe models; see architectures.RandomArchitecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.random_gguf import SIZES_OF_256, SIZES_ON_GPU, YarnRope, scaling_keys
from support.tensor_shapes import (
    TensorShapes,
    experts,
    prediction,
    qk_norms,
    qkv,
    shared_experts,
    whole_model,
)


@dataclass(frozen=True, slots=True)
class Qwen35MoeShape:
    """Dimensions of a qwen35moe model."""

    name: str = "default"
    num_layers: int = 5
    hidden_size: int = 44
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 20
    num_rotated: int = 8
    sections: tuple[int, int, int, int] = (2, 1, 1, 0)
    num_key_heads: int = 2
    num_value_heads: int = 4
    state_size: int = 16
    conv_kernel: int = 4
    interval: int | None = 4
    """Every so many layers one has attention; None: the key is missing, which means 4."""
    recurrent_layers: tuple[bool, ...] | None = None
    """Replaces the interval: one entry per block."""
    num_experts: int = 11
    num_experts_used: int = 3
    ffn_size: int = 20
    shared_ffn_size: int = 28
    is_merged: bool = False
    has_prediction_block: bool = False
    vocab_size: int = 101
    context_length: int = 512
    rope_freq_base: float = 1e6
    rms_eps: float = 1e-6
    tied_output: bool = False
    rope_scaling: YarnRope | None = None
    architecture: str = "qwen35moe"

    @property
    def num_channels(self) -> int:
        return (2 * self.num_key_heads + self.num_value_heads) * self.state_size

    def is_recurrent(self, layer_id: int) -> bool:
        if self.recurrent_layers is not None:
            return self.recurrent_layers[layer_id]
        return (layer_id + 1) % (self.interval or 4) != 0

    def keys(self) -> dict[str, Any]:
        """See random_gguf.RandomShape."""
        keys = {
            "block_count": self.num_layers + self.has_prediction_block,
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "rope.freq_base": self.rope_freq_base,
            "rope.dimension_count": self.num_rotated,
            "rope.dimension_sections": self.sections,
            "expert_count": self.num_experts,
            "expert_used_count": self.num_experts_used,
            "expert_feed_forward_length": self.ffn_size,
            "expert_shared_feed_forward_length": self.shared_ffn_size,
            "full_attention_interval": self.interval,
            "ssm.conv_kernel": self.conv_kernel,
            "ssm.state_size": self.state_size,
            "ssm.group_count": self.num_key_heads,
            "ssm.time_step_rank": self.num_value_heads,
            "ssm.inner_size": self.num_value_heads * self.state_size,
            **scaling_keys(self.rope_scaling),
        }
        if self.recurrent_layers is not None:
            keys["attention.recurrent_layers"] = self.recurrent_layers
        if self.has_prediction_block:
            keys["nextn_predict_layers"] = 1
        return keys

    def tensors(self) -> TensorShapes:
        """See random_gguf.RandomShape."""
        layers = [
            (self._delta() if self.is_recurrent(layer_id) else self._attention()) | self._ffn()
            for layer_id in range(self.num_layers)
        ]
        if self.has_prediction_block:
            layers.append(self._attention() | self._ffn() | prediction(self.hidden_size))
        return whole_model(self, layers, tied_output=self.tied_output)

    def _attention(self) -> TensorShapes:
        hidden, width = self.hidden_size, self.num_heads * self.head_dim
        return {
            **qkv(hidden, 2 * width, self.num_kv_heads * self.head_dim),
            **qk_norms(self.head_dim),
            "attn_output.weight": (hidden, width),
        }

    def _delta(self) -> TensorShapes:
        hidden, inner = self.hidden_size, self.num_value_heads * self.state_size
        return {
            "attn_qkv.weight": (self.num_channels, hidden),
            "attn_gate.weight": (inner, hidden),
            "ssm_conv1d.weight": (self.num_channels, self.conv_kernel),
            "ssm_dt.bias": (self.num_value_heads,),
            "ssm_a": (self.num_value_heads,),
            "ssm_beta.weight": (self.num_value_heads, hidden),
            "ssm_alpha.weight": (self.num_value_heads, hidden),
            "ssm_norm.weight": (self.state_size,),
            "ssm_out.weight": (hidden, inner),
        }

    def _ffn(self) -> TensorShapes:
        hidden, num_experts, ffn = self.hidden_size, self.num_experts, self.ffn_size
        routed = experts(num_experts, hidden, ffn)
        if self.is_merged:
            routed = {
                "ffn_gate_up_exps.weight": (num_experts, 2 * ffn, hidden),
                "ffn_down_exps.weight": (num_experts, hidden, ffn),
            }
        return {
            "attn_norm.weight": (hidden,),
            "post_attention_norm.weight": (hidden,),
            "ffn_gate_inp.weight": (num_experts, hidden),
            **routed,
            "ffn_gate_inp_shexp.weight": (hidden,),
            **shared_experts(hidden, self.shared_ffn_size),
        }


SHAPES = (
    Qwen35MoeShape("two value heads a key head"),
    Qwen35MoeShape(
        "as many value heads, tied, merged",
        hidden_size=37,
        num_heads=6,
        num_kv_heads=1,
        head_dim=14,
        num_rotated=14,
        sections=(3, 2, 2, 0),
        num_key_heads=3,
        num_value_heads=3,
        state_size=20,
        interval=2,
        num_experts=7,
        num_experts_used=2,
        is_merged=True,
        vocab_size=97,
        tied_output=True,
    ),
    Qwen35MoeShape(
        "three value heads a key head, prediction block",
        num_kv_heads=4,
        num_value_heads=6,
        conv_kernel=3,
        interval=None,
        num_experts=5,
        num_experts_used=5,
        has_prediction_block=True,
        rms_eps=1e-5,
    ),
    Qwen35MoeShape(
        "layers by name, merged, prediction block, yarn",
        num_layers=4,
        head_dim=24,
        num_rotated=16,
        sections=(3, 3, 2, 0),
        num_key_heads=1,
        num_value_heads=3,
        state_size=32,
        recurrent_layers=(False, True, True, False, False),
        is_merged=True,
        has_prediction_block=True,
        rope_scaling=YarnRope(factor=4.0, original_context=128),
    ),
)

SMALL = Qwen35MoeShape(num_layers=2, interval=2)

SHAPE_ON_GPU = Qwen35MoeShape(**SIZES_ON_GPU, num_layers=4, head_dim=16, shared_ffn_size=32)

REQUIRED_KEYS = ()

BLOCK_256_SHAPE = Qwen35MoeShape(
    "blocks of 256",
    **SIZES_OF_256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_rotated=16,
    sections=(3, 3, 2, 0),
    num_key_heads=2,
    num_value_heads=4,
    # The real size: in smaller states results nearly cancel, and only rounding errors remain.
    state_size=128,
    shared_ffn_size=256,
    vocab_size=400,
)
