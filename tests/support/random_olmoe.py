"""Random olmoe models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.random_gguf import SIZES_ON_GPU, LinearRope, YarnRope


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
        scaling = {} if self.rope_scaling is None else self.rope_scaling.keys()
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
            **scaling,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """See random_gguf.RandomShape."""
        hidden, experts, ffn = self.hidden_size, self.num_experts, self.ffn_size
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (hidden, hidden),
            "attn_v": (hidden, hidden),
            "attn_q_norm": (hidden,),
            "attn_k_norm": (hidden,),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate_inp": (experts, hidden),
            "ffn_gate_exps": (experts, ffn, hidden),
            "ffn_up_exps": (experts, ffn, hidden),
            "ffn_down_exps": (experts, hidden, ffn),
        }
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab_size, hidden)}
        for layer_id in range(self.num_layers):
            shapes |= {f"blk.{layer_id}.{kind}.weight": dims for kind, dims in layer.items()}
        shapes["output_norm.weight"] = (hidden,)
        shapes["output.weight"] = (self.vocab_size, hidden)
        return shapes


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
"""Shapes in which nothing is round, for F32 files."""

SMALL = OlmoeShape(num_layers=2)
"""Two layers with all that they may have; for what only metadata says."""

SHAPE_ON_GPU = OlmoeShape(**SIZES_ON_GPU, num_layers=2, num_heads=4)
"""Rows as the GPU's kernels of quantised and float matrices take them."""

BLOCK_256_SHAPE = OlmoeShape(
    num_layers=2, hidden_size=256, num_heads=4, num_experts=4, num_experts_used=4, ffn_size=256
)
"""Rows of whole blocks of 256 values. All experts are used: a router whose choice flips would drown
what is measured."""

REQUIRED_KEYS = ("feed_forward_length",)
"""Beside those that every architecture needs."""
