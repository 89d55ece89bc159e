"""Random gpt-oss models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.random_gguf import SIZES_ON_GPU, YarnRope


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
            **({} if self.rope_scaling is None else self.rope_scaling.keys()),
            "expert_count": self.num_experts,
            "expert_used_count": self.num_experts_used,
            "expert_feed_forward_length": self.ffn_size,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """See random_gguf.RandomShape."""
        hidden, experts, ffn = self.hidden_size, self.num_experts, self.ffn_size
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (width, hidden),
            "attn_k.weight": (kv_width, hidden),
            "attn_v.weight": (kv_width, hidden),
            "attn_output.weight": (hidden, width),
            "attn_output.bias": (hidden,),
            "attn_sinks.weight": (self.num_heads,),
            "post_attention_norm.weight": (hidden,),
            "ffn_gate_inp.weight": (experts, hidden),
            "ffn_gate_inp.bias": (experts,),
            "ffn_gate_exps.weight": (experts, ffn, hidden),
            "ffn_gate_exps.bias": (experts, ffn),
            "ffn_up_exps.weight": (experts, ffn, hidden),
            "ffn_up_exps.bias": (experts, ffn),
            "ffn_down_exps.weight": (experts, hidden, ffn),
            "ffn_down_exps.bias": (experts, hidden),
        }
        if self.has_qkv_biases:
            layer |= {
                "attn_q.bias": (width,),
                "attn_k.bias": (kv_width,),
                "attn_v.bias": (kv_width,),
            }
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab_size, hidden)}
        for layer_id in range(self.num_layers):
            shapes |= {f"blk.{layer_id}.{kind}": dims for kind, dims in layer.items()}
        shapes["output_norm.weight"] = (hidden,)
        shapes["output.weight"] = (self.vocab_size, hidden)
        return shapes


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
"""Shapes in which nothing is round, for F32 files."""

SMALL = GptOssShape(num_layers=2)
"""Two layers with all that they may have; for what only metadata says."""

SHAPE_ON_GPU = GptOssShape(
    **SIZES_ON_GPU, num_layers=3, num_heads=4, head_dim=16, window=5, rope_scaling=YarnRope(4.0, 64)
)
"""Rows as the GPU's kernels of quantised and float matrices take them."""

BLOCK_256_SHAPE = GptOssShape(
    num_layers=2,
    hidden_size=256,
    num_heads=8,
    head_dim=32,
    num_experts=4,
    num_experts_used=4,
    ffn_size=256,
)
"""Rows of whole blocks of 256 values. All experts are used: a router whose choice flips would drown
what is measured."""

REQUIRED_KEYS = ("expert_feed_forward_length", "attention.sliding_window")
"""Beside those that every architecture needs."""
