"""Random llama4 models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """See random_gguf.RandomShape."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab_size, hidden)}
        if self.has_rope_freqs:
            shapes["rope_freqs.weight"] = (self.head_dim // 2,)
        for layer_id in range(self.num_layers):
            layer = self._layer(has_experts=(layer_id + 1) % self.interleave_step == 0)
            shapes |= {f"blk.{layer_id}.{kind}.weight": dims for kind, dims in layer.items()}
        shapes["output_norm.weight"] = (hidden,)
        if not self.tied_output:
            shapes["output.weight"] = (self.vocab_size, hidden)
        return shapes

    def _layer(self, *, has_experts: bool) -> dict[str, tuple[int, ...]]:
        hidden, experts, ffn = self.hidden_size, self.num_experts, self.ffn_size
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q": (q_width, hidden),
            "attn_k": (kv_width, hidden),
            "attn_v": (kv_width, hidden),
            "attn_output": (hidden, q_width),
            "ffn_norm": (hidden,),
        }
        if not has_experts:
            dense = self.dense_ffn_size
            return layer | {
                "ffn_gate": (dense, hidden),
                "ffn_up": (dense, hidden),
                "ffn_down": (hidden, dense),
            }
        return layer | {
            "ffn_gate_inp": (experts, hidden),
            "ffn_gate_exps": (experts, ffn, hidden),
            "ffn_up_exps": (experts, ffn, hidden),
            "ffn_down_exps": (experts, hidden, ffn),
            "ffn_gate_shexp": (ffn, hidden),
            "ffn_up_shexp": (ffn, hidden),
            "ffn_down_shexp": (hidden, ffn),
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
"""Shapes in which nothing is round, for F32 files."""

SMALL = Llama4Shape(num_layers=2, interleave_step=2)
"""Two layers with all that they may have; for what only metadata says."""

SHAPE_ON_GPU = Llama4Shape(
    num_layers=4,
    hidden_size=64,
    num_experts=7,
    ffn_size=32,
    dense_ffn_size=32,
    interleave_step=2,
    head_dim=16,
)
"""Rows as the GPU's kernels of quantised and float matrices take them."""

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
"""Rows of whole blocks of 256 values. All experts are used: a router whose choice flips would drown
what is measured."""

REQUIRED_KEYS = ("expert_feed_forward_length", "interleave_moe_layer_step", "feed_forward_length")
"""Beside those that every architecture needs."""
