"""qwen3moe: Qwen3-30B-A3B, Qwen3-Coder-30B-A3B and their finetunes.

Pre-norm transformer. Grouped-query attention with a norm of each head of q and k. Every layer has a
routed FFN: softmax over all experts, top-k, weights renormalised, no shared expert.

Source: the Qwen3 technical report (arXiv 2505.09388) and llama.cpp's graph of the same name.
"""

from __future__ import annotations

from dflash_adapters.blocks import Block, describe_model
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import Keys
from dflash_adapters.layers import Attention, Description, Layer, RoutedFfn
from dflash_adapters.rope import RopePairing
from dflash_adapters.routing import Gating, RoutingRule


def describe(file: GgufFile) -> Description:
    keys = Keys(file)
    base = keys.read_base()
    heads = keys.read_heads(base.hidden_size)
    keys.require_dim("rope.dimension_count", heads.dim)
    rope = keys.read_rope(RopePairing.HALF_SPLIT, heads.dim)
    sizes = base.expert_sizes(keys.read_expert_ffn_size(base.num_experts_used))
    rule = RoutingRule(base.num_experts_used, Gating.SOFTMAX, normalise=True)

    def layer(layer_id: int) -> Layer:
        block = Block(file, layer_id, base.hidden_size)
        attention = Attention(
            heads,
            block.qkv(heads),
            block.output("attn_output", heads.query_size),
            block.normed_rotary(rope, heads.dim),
            scale=heads.dim**-0.5,
        )
        ffn = RoutedFfn(block.linear("ffn_gate_inp", base.num_experts), rule, block.experts(sizes))
        return Layer(block.norm("attn_norm"), block.norm("ffn_norm"), attention, ffn)

    layers = map(layer, range(base.num_layers))
    return describe_model(file, base, layers, may_be_tied=True)
