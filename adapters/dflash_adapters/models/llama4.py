"""llama4: the text models of Llama 4 Scout and Maverick.

Pre-norm transformer. Three of four layers attend within chunks of 8192 positions, with RoPE over
interleaved pairs and then, in Scout, an RMS norm of each head without weights. Every fourth layer
attends to all positions, without RoPE; its queries are scaled by a temperature that grows with the
position. FFNs are routed, in some models in every other layer only: the expert with the highest
logit is used, its input is multiplied by the sigmoid of the logit, and a shared expert is added.

Source: Meta's Llama 4 model cards and llama.cpp's graph of the same name.
"""

from __future__ import annotations

from dflash_adapters.blocks import Block, describe_model
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import Keys
from dflash_adapters.layers import (
    Attention,
    Description,
    Ffn,
    InputScaledFfn,
    Layer,
    Rotary,
    RotaryUnitNorm,
)
from dflash_adapters.rope import AttentionTemperature, RopePairing
from dflash_adapters.routing import Gating, RoutingRule
from dflash_adapters.spec import CAUSAL, Mask

_CHUNK = 8192
_PERIOD = 4
"""Every fourth layer attends to all positions."""
_SLOPE = 0.1
"""Slope of the temperature that scales the queries of these layers."""
_UNNORMED_EXPERTS = 128
"""The number of experts of Maverick, whose heads are not normed."""

_CHOICE = RoutingRule(1, Gating.SOFTMAX_WEIGHT, normalise=False)
"""The weight is 1, as it is a softmax over the one chosen logit."""
_INPUT_SCALE = RoutingRule(1, Gating.SIGMOID, normalise=False, selects_by_logits=True)


def describe(file: GgufFile) -> Description:
    keys = Keys(file)
    base = keys.read_base()
    heads = keys.read_heads(base.hidden_size)
    keys.require_dim("rope.dimension_count", heads.dim)
    keys.require("expert_used_count", 1)
    keys.require("attention.sliding_window_pattern", _PERIOD)
    window = "attention.sliding_window"
    if keys.has(window) and keys.count(window) == 0:
        raise keys.unsupported(window, "full attention in every layer is not supported")
    base_key = "rope.freq_base_swa" if keys.has("rope.freq_base_swa") else "rope.freq_base"
    factors = keys.rope_factors(heads.dim)
    rope = keys.read_rope(RopePairing.INTERLEAVED, heads.dim, base_key=base_key, factors=factors)
    is_normed = base.num_experts != _UNNORMED_EXPERTS
    chunked = RotaryUnitNorm(rope) if is_normed else Rotary(rope)
    temperature = AttentionTemperature(_CHUNK, _SLOPE)
    scale = keys.read_attention_scale(heads.dim)
    step = keys.uint("interleave_moe_layer_step")
    expert_size = keys.uint("expert_feed_forward_length")

    def attention(block: Block) -> Attention:
        is_chunked = (block.layer_id + 1) % _PERIOD != 0
        return Attention(
            heads,
            block.qkv(heads, may_have_bias=True),
            block.output("attn_output", heads.query_size),
            chunked if is_chunked else temperature,
            scale,
            Mask(chunk=_CHUNK) if is_chunked else CAUSAL,
        )

    def ffn(block: Block) -> Ffn | InputScaledFfn:
        if (block.layer_id + 1) % step:
            return block.ffn(keys.uint("feed_forward_length"))
        return InputScaledFfn(
            block.linear("ffn_gate_inp", base.num_experts),
            _CHOICE,
            _INPUT_SCALE,
            block.experts(base.expert_sizes(expert_size)),
            block.shared_expert(expert_size, is_gated=False),
        )

    def layer(layer_id: int) -> Layer:
        block = Block(file, layer_id, base.hidden_size)
        return Layer(block.norm("attn_norm"), block.norm("ffn_norm"), attention(block), ffn(block))

    layers = map(layer, range(base.num_layers))
    return describe_model(file, base, layers, may_be_tied=True)
