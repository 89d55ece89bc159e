"""Random qwen2moe models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.random_gguf import SIZES_ON_GPU, YarnRope


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
            **({} if self.rope_scaling is None else self.rope_scaling.keys()),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """See random_gguf.RandomShape."""
        hidden, experts, ffn = self.hidden_size, self.num_experts, self.ffn_size
        kv_width, shared = hidden // self.num_heads * self.num_kv_heads, self.shared_ffn_size
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (hidden, hidden),
            "attn_k.weight": (kv_width, hidden),
            "attn_v.weight": (kv_width, hidden),
            "attn_output.weight": (hidden, hidden),
            "ffn_norm.weight": (hidden,),
            "ffn_gate_inp.weight": (experts, hidden),
            "ffn_gate_exps.weight": (experts, ffn, hidden),
            "ffn_up_exps.weight": (experts, ffn, hidden),
            "ffn_down_exps.weight": (experts, hidden, ffn),
            "ffn_gate_inp_shexp.weight": (hidden,) if self.has_flat_gate else (1, hidden),
            "ffn_gate_shexp.weight": (shared, hidden),
            "ffn_up_shexp.weight": (shared, hidden),
            "ffn_down_shexp.weight": (hidden, shared),
        }
        if self.has_biases:
            layer |= {
                "attn_q.bias": (hidden,),
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
"""Shapes in which nothing is round, for F32 files."""

SMALL = Qwen2MoeShape(num_layers=2)
"""Two layers with all that they may have; for what only metadata says."""

SHAPE_ON_GPU = Qwen2MoeShape(**SIZES_ON_GPU, num_layers=2, num_heads=4, shared_ffn_size=32)
"""Rows as the GPU's kernels of quantised and float matrices take them."""

BLOCK_256_SHAPE = Qwen2MoeShape(
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_experts=4,
    num_experts_used=4,
    ffn_size=256,
    shared_ffn_size=256,
)
"""Rows of whole blocks of 256 values. All experts are used: a router whose choice flips would drown
what is measured."""

REQUIRED_KEYS = ()
"""Beside those that every architecture needs."""
