"""qwen35moe: Qwen3.5-35B-A3B, Qwen3.6-35B-A3B, their larger siblings and finetunes.

Pre-norm transformer. Most layers are Gated DeltaNets: a causal convolution and the delta rule, with
a recurrent state of constant size. The others are attention with a sigmoid gate on the output and
partial RoPE. Every layer has a routed FFN: softmax over all experts, top-k, weights renormalised,
and a shared expert multiplied by the sigmoid of a gate. Multi-token prediction blocks are ignored.

Source: Yang et al. 2024 (arXiv 2412.06464) and llama.cpp's graph of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dflash_adapters.blocks import Block, describe_model
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import Keys
from dflash_adapters.layers import Attention, Description, GateBesideQueries, Layer, Rope, RoutedFfn
from dflash_adapters.rope import RopePairing
from dflash_adapters.routing import Gating, RoutingRule

_SECTIONS = "rope.dimension_sections"


def describe(file: GgufFile) -> Description:
    keys = Keys(file)
    base = keys.read_base()
    num_blocks, num_layers = base.num_layers, base.num_layers - keys.num_prediction_blocks()
    heads, state = keys.read_heads(base.hidden_size), keys.read_delta_state()
    rope = _read_rope(keys, heads.dim)
    sizes = base.expert_sizes(keys.read_expert_ffn_size(base.num_experts_used))
    shared_size = keys.read_shared_ffn_size()
    rule = RoutingRule(base.num_experts_used, Gating.SOFTMAX, normalise=True)

    def attention(block: Block) -> Attention:
        return Attention(
            heads,
            block.qkv(replace(heads, num=2 * heads.num)),
            block.output("attn_output", heads.query_size),
            block.normed_rotary(rope, heads.dim),
            scale=heads.dim**-0.5,
            gate=GateBesideQueries(),
        )

    def layer(layer_id: int, is_recurrent: bool) -> Layer:
        block = Block(file, layer_id, base.hidden_size)
        ffn = RoutedFfn(
            block.linear("ffn_gate_inp", base.num_experts),
            rule,
            block.experts(sizes, may_be_merged=True),
            shared=block.shared_expert(shared_size, is_gated=True),
        )
        mixer = block.delta_net(state) if is_recurrent else attention(block)
        return Layer(block.norm("attn_norm"), block.norm("post_attention_norm"), mixer, ffn)

    return describe_model(
        file,
        base,
        (layer(*each) for each in enumerate(_are_recurrent(keys, num_layers, num_blocks))),
        may_be_tied=True,
        left_out=(f"blk.{block}." for block in range(num_layers, num_blocks)),
    )


def _are_recurrent(keys: Keys, num_layers: int, num_blocks: int) -> Iterable[bool]:
    """For each layer, whether it is a DeltaNet; otherwise it is attention."""
    key = "attention.recurrent_layers"
    if keys.has(key):
        return keys.file.get_bool_per_layer(keys.name(key), num_blocks)[:num_layers]
    interval = keys.uint("full_attention_interval", 4)
    return ((layer_id + 1) % interval != 0 for layer_id in range(num_layers))


def _read_rope(keys: Keys, head_dim: int) -> Rope:
    """Multi-axis RoPE, for text: the first three coordinates of a position are all equal.

    Raises: ModelFileError; UnsupportedModel if a pair is rotated by the fourth coordinate, which
    text does not have.
    """
    num_rotated = keys.read_num_rotated(head_dim)
    sections = keys.file.get_uint_array(keys.name(_SECTIONS), maximum=1 << 16).tolist()
    total = sum(sections)
    if len(sections) != 4 or not total:
        raise keys.wrong(_SECTIONS, f"{sections} are not the sizes of four sections")
    for pair in range(min(num_rotated // 2, total)):
        if pair >= 3 * sections[pair % 3]:
            reason = f"pair {pair} is in none of the first three of {sections}"
            raise keys.unsupported(_SECTIONS, reason)
    return keys.read_rope(RopePairing.HALF_SPLIT, num_rotated)
