"""glm4moe: GLM-4.5, 4.6 and 4.7, their Air models and finetunes.

Pre-norm transformer with biases of q, k and v, and in the large models a norm of each head of q and
k. RoPE rotates half of each head. The first layers have dense FFNs, the others routed ones: experts
are chosen by sigmoid scores plus a bias, from the best groups if there are several, weighted by the
sigmoid scores, and an ungated shared expert is added. Multi-token prediction blocks are ignored.

Source: the GLM-4.5 technical report (arXiv 2508.06471) and llama.cpp's graph of the same name.
"""

from __future__ import annotations

from dflash_adapters.blocks import Block, describe_model
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import Keys
from dflash_adapters.layers import Attention, Description, Ffn, Layer, Rotary, RoutedFfn
from dflash_adapters.rope import RopePairing


def describe(file: GgufFile) -> Description:
    keys = Keys(file)
    base = keys.read_base()
    num_layers = base.num_layers - keys.num_prediction_blocks()
    sections = "rope.dimension_sections"
    if keys.has(sections) and any(keys.file.get_uint_array(keys.name(sections))[3:]):
        raise keys.unsupported(sections, "pairs rotated by a coordinate that text does not have")
    heads = keys.read_heads(base.hidden_size)
    rope = keys.read_rope(RopePairing.HALF_SPLIT, keys.read_num_rotated(heads.dim))
    rule = keys.read_routing_rule(base)
    num_dense = keys.count("leading_dense_block_count")
    ffn_size = keys.uint("expert_feed_forward_length")
    shared_size = ffn_size * keys.uint("expert_shared_count")

    def layer(layer_id: int) -> Layer:
        block = Block(file, layer_id, base.hidden_size)
        has_norms = block.name("attn_q_norm.weight") in file.tensors
        attention = Attention(
            heads,
            block.qkv(heads, may_have_bias=True),
            block.output("attn_output", heads.query_size),
            block.normed_rotary(rope, heads.dim) if has_norms else Rotary(rope),
            scale=heads.dim**-0.5,
        )
        ffn: Ffn | RoutedFfn
        if layer_id < num_dense:
            ffn = block.ffn(keys.uint("feed_forward_length"))
        else:
            ffn = RoutedFfn(
                block.linear("ffn_gate_inp", base.num_experts),
                rule,
                block.experts(base.expert_sizes(ffn_size)),
                bias=block.vector("exp_probs_b.bias", base.num_experts),
                shared=block.shared_expert(shared_size, is_gated=False),
            )
        return Layer(block.norm("attn_norm"), block.norm("post_attention_norm"), attention, ffn)

    layers = map(layer, range(num_layers))
    left_out = (f"blk.{block_id}." for block_id in range(num_layers, base.num_layers))
    return describe_model(file, base, layers, may_be_tied=True, left_out=left_out)
