"""olmoe: OLMoE-1B-7B and its finetunes.

Pre-norm transformer. q and k are normed over their full width before they are split into heads.
Every layer has a routed FFN: softmax over all experts, top-k, weights not renormalised, no shared
expert. The key ``feed_forward_length`` is the width of one expert.

Source: Muennighoff et al. 2024 (arXiv 2409.02060) and llama.cpp's graph of the same name.
"""

from __future__ import annotations

from dflash_adapters.blocks import Block, describe_model
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import Keys
from dflash_adapters.layers import Attention, Description, Layer, RoutedFfn, RowNormRotary
from dflash_adapters.rope import RopePairing
from dflash_adapters.routing import Gating, RoutingRule


def describe(file: GgufFile) -> Description:
    keys = Keys(file)
    base = keys.read_base()
    heads = keys.read_heads(base.hidden_size)
    keys.require_dim("rope.dimension_count", heads.dim)
    keys.require("attention.clamp_kqv", 0.0)
    rope = keys.read_rope(RopePairing.HALF_SPLIT, heads.dim)
    sizes = base.expert_sizes(keys.uint("feed_forward_length"))
    rule = RoutingRule(base.num_experts_used, Gating.SOFTMAX, normalise=False)

    def layer(layer_id: int) -> Layer:
        block = Block(file, layer_id, base.hidden_size)
        attention = Attention(
            heads,
            block.qkv(heads, may_have_bias=True),
            block.output("attn_output", heads.query_size),
            RowNormRotary(
                rope,
                block.norm("attn_q_norm", heads.query_size),
                block.norm("attn_k_norm", heads.kv_size),
            ),
            scale=heads.dim**-0.5,
        )
        ffn = RoutedFfn(block.linear("ffn_gate_inp", base.num_experts), rule, block.experts(sizes))
        return Layer(block.norm("attn_norm"), block.norm("ffn_norm"), attention, ffn)

    layers = map(layer, range(base.num_layers))
    return describe_model(file, base, layers, may_be_tied=False)
