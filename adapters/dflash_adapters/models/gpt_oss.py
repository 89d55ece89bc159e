"""gpt-oss: gpt-oss-20b, gpt-oss-120b and their finetunes.

Pre-norm transformer with biases of all projections. Every second layer, from the first on, attends
to a sliding window, the others to all positions. All have attention sinks: a score per head that
takes part in the softmax, but has no value. Every layer has a routed FFN: the experts with the
highest logits, weighted by the softmax of these; experts have biases and a clamped activation.

Source: the gpt-oss model card (arXiv 2508.10925) and llama.cpp's graph of the same name.
"""

from __future__ import annotations

from dataclasses import replace

from dflash_adapters.blocks import Block, describe_model
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import Keys
from dflash_adapters.layers import (
    Attention,
    ClampedSwiglu,
    Description,
    Layer,
    Rotary,
    RoutedFfn,
)
from dflash_adapters.rope import RopePairing
from dflash_adapters.routing import Gating, RoutingRule
from dflash_adapters.spec import CAUSAL, Mask

_ACTIVATION = ClampedSwiglu(limit=7.0, alpha=1.702)


def describe(file: GgufFile) -> Description:
    keys = Keys(file)
    base = keys.read_base()
    heads = keys.read_heads(base.hidden_size)
    keys.require_dim("rope.dimension_count", heads.dim)
    rope = keys.read_rope(RopePairing.HALF_SPLIT, heads.dim)
    keys.require("rope.freq_base_swa", rope.freq_base)
    window = keys.uint("attention.sliding_window")
    keys.require("attention.sliding_window_pattern", 2)
    sizes = base.expert_sizes(keys.uint("expert_feed_forward_length"))
    rule = RoutingRule(base.num_experts_used, Gating.SOFTMAX_WEIGHT, normalise=False)

    def layer(layer_id: int) -> Layer:
        block = Block(file, layer_id, base.hidden_size)
        attention = Attention(
            heads,
            block.qkv(heads, may_have_bias=True),
            block.output("attn_output", heads.query_size, may_have_bias=True),
            Rotary(rope),
            scale=heads.dim**-0.5,
            mask=CAUSAL if layer_id % 2 else Mask(window=window),
            sinks=block.vector("attn_sinks.weight", heads.num),
        )
        router = replace(
            block.linear("ffn_gate_inp", base.num_experts),
            bias=block.vector("ffn_gate_inp.bias", base.num_experts),
        )
        ffn = RoutedFfn(router, rule, block.biased_experts(sizes, _ACTIVATION))
        return Layer(block.norm("attn_norm"), block.norm("post_attention_norm"), attention, ffn)

    return describe_model(file, base, map(layer, range(base.num_layers)), may_be_tied=False)
