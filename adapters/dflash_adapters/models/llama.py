"""llama with experts: Mixtral 8x7B, 8x22B, their finetunes, and models converted in the same form.

Pre-norm transformer with RoPE over interleaved pairs, whose frequencies a tensor may divide. Every
layer has a routed FFN: softmax over all experts, top-k, weights renormalised, no shared expert.
Each expert may be a tensor of its own, as llama.cpp wrote them until April 2024.

Source: Jiang et al. 2024 (arXiv 2401.04088) and llama.cpp's graph of the same name.
"""

from __future__ import annotations

from dflash_adapters.blocks import Block, describe_model
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import Keys
from dflash_adapters.layers import Attention, Description, Layer, Rotary, RoutedFfn
from dflash_adapters.rope import RopePairing
from dflash_adapters.routing import Gating, RoutingRule


def describe(file: GgufFile) -> Description:
    keys = Keys(file)
    base = keys.read_base()
    heads = keys.read_heads(base.hidden_size)
    keys.require_dim("rope.dimension_count", heads.dim)
    factors = keys.rope_factors(heads.dim)
    positions = Rotary(keys.read_rope(RopePairing.INTERLEAVED, heads.dim, factors=factors))
    scale = keys.read_attention_scale(heads.dim)
    sizes = base.expert_sizes(keys.uint("feed_forward_length"))
    rule = RoutingRule(base.num_experts_used, Gating.SOFTMAX, normalise=True)

    def layer(layer_id: int) -> Layer:
        block = Block(file, layer_id, base.hidden_size)
        attention = Attention(
            heads,
            block.qkv(heads, may_have_bias=True),
            block.output("attn_output", heads.query_size, may_have_bias=True),
            positions,
            scale,
        )
        router = block.linear("ffn_gate_inp", base.num_experts)
        ffn = RoutedFfn(router, rule, block.experts(sizes, may_be_separate=True))
        return Layer(block.norm("attn_norm"), block.norm("ffn_norm"), attention, ffn)

    layers = map(layer, range(base.num_layers))
    return describe_model(file, base, layers, may_be_tied=True)
