"""Random llama models with experts; see architectures.RandomArchitecture."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_protocol.ids import F32Array
from support.random_gguf import SIZES_OF_256, SIZES_ON_GPU, LinearRope, scaling_keys
from support.tensor_shapes import TensorShapes, experts, qkv, qkv_biases, whole_model


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Dimensions of a Mixtral-like model: heads that fill the hidden size."""

    name: str = "default"
    num_layers: int = 4
    hidden_size: int = 48
    num_heads: int = 6
    num_kv_heads: int = 2
    num_experts: int = 7
    num_experts_used: int = 2
    ffn_size: int = 20
    vocab_size: int = 101
    context_length: int = 256
    rope_freq_base: float | None = 1e6
    rms_eps: float = 1e-5
    tied_output: bool = False
    has_rope_freqs: bool = False
    has_output_bias: bool = False
    has_qkv_biases: bool = False
    rope_scaling: LinearRope | None = None
    architecture: str = "llama"

    def keys(self) -> dict[str, Any]:
        """See random_gguf.RandomShape."""
        return {
            "block_count": self.num_layers,
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "feed_forward_length": self.ffn_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "rope.dimension_count": self.hidden_size // self.num_heads,
            "rope.freq_base": self.rope_freq_base,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "expert_count": self.num_experts,
            "expert_used_count": self.num_experts_used,
            **scaling_keys(self.rope_scaling),
        }

    def tensors(self) -> TensorShapes:
        """See random_gguf.RandomShape."""
        hidden, head_dim = self.hidden_size, self.hidden_size // self.num_heads
        kv_width = head_dim * self.num_kv_heads
        layer = {
            "attn_norm.weight": (hidden,),
            **qkv(hidden, hidden, kv_width),
            "attn_output.weight": (hidden, hidden),
            "ffn_norm.weight": (hidden,),
            "ffn_gate_inp.weight": (self.num_experts, hidden),
            **experts(self.num_experts, hidden, self.ffn_size),
            **(qkv_biases(hidden, kv_width) if self.has_qkv_biases else {}),
            **({"attn_output.bias": (hidden,)} if self.has_output_bias else {}),
        }
        return whole_model(
            self,
            [layer] * self.num_layers,
            tied_output=self.tied_output,
            num_rope_freqs=head_dim // 2 if self.has_rope_freqs else 0,
        )


SHAPES = (
    LlamaShape("odd widths"),
    LlamaShape(
        "rope factors", num_heads=4, has_rope_freqs=True, has_output_bias=True, vocab_size=97
    ),
    LlamaShape(
        "tied output",
        hidden_size=54,
        num_heads=9,
        num_kv_heads=3,
        num_experts=5,
        num_experts_used=5,
        rope_freq_base=None,
        tied_output=True,
    ),
    LlamaShape(
        "linear rope",
        num_layers=2,
        num_heads=3,
        num_kv_heads=1,
        num_experts_used=1,
        has_qkv_biases=True,
        rope_scaling=LinearRope(4.0),
    ),
)

SMALL = LlamaShape(num_layers=2, has_rope_freqs=True, has_output_bias=True, has_qkv_biases=True)

SHAPE_ON_GPU = LlamaShape(**SIZES_ON_GPU, num_layers=2, num_heads=4)

BLOCK_256_SHAPE = LlamaShape(**SIZES_OF_256, num_layers=2, num_heads=4)

REQUIRED_KEYS = ("feed_forward_length",)


def with_separate_experts(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
    """The same model with one tensor per expert, as llama.cpp wrote them until April 2024."""
    result = {}
    for name, values in tensors.items():
        stack = re.fullmatch(r"(.*ffn_(?:gate|up|down))_exps\.weight", name)
        if stack is None:
            result[name] = values
        else:
            for expert, matrix in enumerate(values):
                result[f"{stack[1]}.{expert}.weight"] = np.ascontiguousarray(matrix)
    return result
