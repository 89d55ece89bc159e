"""laguna: poolside's Laguna XS, S and M models.

Pre-norm transformer. The number of query heads may differ between layers. Attention is either over
a sliding window, with plain RoPE, or over all positions, with YaRN and partial rotation. Its output
is multiplied by the softplus of a gate, one per head or per element. The first layers have dense
FFNs, the others routed ones: experts are chosen by sigmoid scores plus a bias, weighted by the
sigmoid scores, and an ungated shared expert is added.

Source: llama.cpp's graph of the same name. YaRN's betas are read from the file, where llama.cpp
always uses 32 and 1 (see YARN_KEYS in keys.py).
"""

from __future__ import annotations

from functools import cache

from dflash_adapters.blocks import Block, describe_model
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import Keys
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
    base = keys.read_base()
    rule = keys.read_routing_rule(base)
    ffn_size = keys.uint("expert_feed_forward_length")
    shared_size = keys.count("expert_shared_feed_forward_length")
    shared_size = shared_size or ffn_size * keys.uint("expert_shared_count", 1)
    num_dense = keys.count("leading_dense_block_count", None)
    num_heads = keys.uint_of_layer("attention.head_count", base.num_layers)
    num_kv_heads = keys.uint_of_layer("attention.head_count_kv", base.num_layers, num_heads)
    head_dim = keys.read_head_dim(base.hidden_size // num_heads(0))
    window, is_sliding = keys.read_window(base.num_layers)

    @cache  # one Rope of each kind, so that a backend makes one table
    def rope(slides: bool) -> Rope:
        return _read_rope(keys, head_dim, slides=slides)

    def attention(block: Block) -> Attention:
        num, num_kv = num_heads(block.layer_id), num_kv_heads(block.layer_id)
        slides = is_sliding(block.layer_id)
        heads = keys.checked_heads(Heads(num, num_kv, head_dim))
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

    num_rotated = keys.read_num_rotated(head_dim, key("rope.dimension_count"))
    return keys.read_rope(
        RopePairing.HALF_SPLIT,
        num_rotated,
        base_key=key("rope.freq_base"),
        is_scaled=not slides,
    )
