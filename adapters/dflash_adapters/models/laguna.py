"""laguna: poolside's Laguna XS, S and M models.

Pre-norm transformer with more query heads in some layers than in others, and two kinds of
attention: over a sliding window, with plain rotation, or over everything, with YaRN and part of
each head rotated. What attention gives is multiplied by the softplus of a gate for each head, or
each element. The first layers have dense FFNs, the others a routed mixture: experts are chosen by
sigmoid and a bias, weighted by sigmoid alone, and a shared expert is added as it is.

Source: llama.cpp's graph of the same name. YaRN is what the file says: llama.cpp computes with
betas 32 and 1 whatever it says (see Settings.yarn).
"""

from __future__ import annotations

from functools import cache

from dflash_adapters.blocks import Block, describe_model
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import (
    Keys,
    checked_heads,
    read_base,
    read_head_dim,
    read_num_rotated,
    read_rope,
    read_routing_rule,
    read_window,
)
from dflash_adapters.layers import (
    Attention,
    Description,
    Ffn,
    HeadOrElementGate,
    Heads,
    Layer,
    Rope,
    RoutedFfn,
)
from dflash_adapters.rope import RopePairing
from dflash_adapters.spec import CAUSAL, Mask


def describe(file: GgufFile) -> Description:
    keys = Keys(file)
    base = read_base(keys)
    rule = read_routing_rule(keys, base)
    ffn_size = keys.uint("expert_feed_forward_length")
    shared_size = keys.count("expert_shared_feed_forward_length")
    shared_size = shared_size or ffn_size * keys.uint("expert_shared_count", 1)
    num_dense = keys.count("leading_dense_block_count", None)
    num_heads = keys.uint_of_layer("attention.head_count", base.num_layers)
    num_kv_heads = keys.uint_of_layer("attention.head_count_kv", base.num_layers, num_heads)
    head_dim = read_head_dim(keys, base.hidden_size // num_heads(0))
    window, is_sliding = read_window(keys, base.num_layers)

    @cache  # one object, so that a backend makes one table
    def rope(slides: bool) -> Rope:
        return _read_rope(keys, head_dim, slides=slides)

    def attention(block: Block) -> Attention:
        num, num_kv = num_heads(block.layer_id), num_kv_heads(block.layer_id)
        slides = is_sliding(block.layer_id)
        heads = checked_heads(keys, Heads(num, num_kv, head_dim))
        is_by_head = file.tensor(block.name("attn_gate.weight")).num_rows == num
        return Attention(
            heads,
            block.qkv(heads, may_have_bias=True),
            block.output("attn_output", heads.query_size),
            block.normed_rotary(rope(slides), head_dim),
            scale=head_dim**-0.5,
            mask=Mask(window=window) if slides else CAUSAL,
            gate=HeadOrElementGate(
                block.linear("attn_gate", num if is_by_head else heads.query_size)
            ),
        )

    def ffn(block: Block) -> Ffn | RoutedFfn:
        if block.layer_id < num_dense:
            return block.ffn(keys.uint("feed_forward_length"))
        return RoutedFfn(
            block.linear("ffn_gate_inp", base.num_experts),
            rule,
            block.experts(base.expert_sizes(ffn_size)),
            bias=block.vector("exp_probs_b.bias", base.num_experts),
            shared=block.shared_expert(shared_size, is_gated=False),
        )

    def layer(layer_id: int) -> Layer:
        block = Block(file, layer_id, base.hidden_size)
        return Layer(block.norm("attn_norm"), block.norm("ffn_norm"), attention(block), ffn(block))

    layers = map(layer, range(base.num_layers))
    return describe_model(file, base, layers, may_be_tied=True)


def _read_rope(keys: Keys, head_dim: int, *, slides: bool) -> Rope:
    def key(name: str) -> str:
        return f"{name}_swa" if slides and keys.has(f"{name}_swa") else name

    num_rotated = read_num_rotated(keys, head_dim, key("rope.dimension_count"))
    return read_rope(
        keys,
        RopePairing.HALF_SPLIT,
        num_rotated,
        base_key=key("rope.freq_base"),
        is_scaled=not slides,
    )
