"""qwen2moe: Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B and their finetunes.

Pre-norm transformer with biases of q, k and v. Every layer has a routed FFN: softmax over all
experts, top-k, weights not renormalised, and a shared expert multiplied by the sigmoid of a gate.

Source: the Qwen2 technical report (arXiv 2407.10671) and llama.cpp's graph of the same name.
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
    positions = Rotary(keys.read_rope(RopePairing.HALF_SPLIT, heads.dim))
    sizes = base.expert_sizes(keys.read_expert_ffn_size(base.num_experts_used))
    shared_size = keys.read_shared_ffn_size()
    rule = RoutingRule(base.num_experts_used, Gating.SOFTMAX, normalise=False)

    def layer(layer_id: int) -> Layer:
        block = Block(file, layer_id, base.hidden_size)
        attention = Attention(
            heads,
            block.qkv(heads, may_have_bias=True),
            block.output("attn_output", heads.query_size),
            positions,
            scale=heads.dim**-0.5,
        )
        ffn = RoutedFfn(
            block.linear("ffn_gate_inp", base.num_experts),
            rule,
            block.experts(sizes),
            shared=block.shared_expert(shared_size, is_gated=True),
        )
        return Layer(block.norm("attn_norm"), block.norm("ffn_norm"), attention, ffn)

    layers = map(layer, range(base.num_layers))
    return describe_model(file, base, layers, may_be_tied=False)
