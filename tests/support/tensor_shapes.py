"""Shapes of the tensors that architectures have in common, row-major and by name, in file order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from support.random_gguf import RandomShape

TensorShapes: TypeAlias = dict[str, tuple[int, ...]]


def whole_model(
    shape: RandomShape,
    layers: Iterable[TensorShapes],
    *,
    tied_output: bool = False,
    num_rope_freqs: int = 0,
) -> TensorShapes:
    """Layers, whose tensors lack ``blk.N.``, between an embedding and a head."""
    shapes: TensorShapes = {"token_embd.weight": (shape.vocab_size, shape.hidden_size)}
    if num_rope_freqs:
        shapes["rope_freqs.weight"] = (num_rope_freqs,)
    for layer_id, layer in enumerate(layers):
        shapes |= {f"blk.{layer_id}.{kind}": dims for kind, dims in layer.items()}
    shapes["output_norm.weight"] = (shape.hidden_size,)
    if not tied_output:
        shapes["output.weight"] = (shape.vocab_size, shape.hidden_size)
    return shapes


def qkv(hidden: int, width: int, kv_width: int) -> TensorShapes:
    """Projections of queries, keys and values."""
    return {
        "attn_q.weight": (width, hidden),
        "attn_k.weight": (kv_width, hidden),
        "attn_v.weight": (kv_width, hidden),
    }


def qkv_biases(width: int, kv_width: int) -> TensorShapes:
    return {"attn_q.bias": (width,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}


def qk_norms(width: int) -> TensorShapes:
    """Norms of queries and keys, of each head or of all heads together."""
    return {"attn_q_norm.weight": (width,), "attn_k_norm.weight": (width,)}


def gated_ffn(hidden: int, ffn: int) -> TensorShapes:
    return _gated_ffn("", hidden, ffn)


def shared_experts(hidden: int, ffn: int) -> TensorShapes:
    """Experts that every token uses, as one FFN; without a gate."""
    return _gated_ffn("_shexp", hidden, ffn)


def experts(num_experts: int, hidden: int, ffn: int) -> TensorShapes:
    """Stacks of routed experts, without the router."""
    return _gated_ffn("_exps", hidden, ffn, num_experts)


def prediction(hidden: int) -> TensorShapes:
    """What a block for multi-token prediction has beside a layer's tensors."""
    return {
        "nextn.eh_proj.weight": (hidden, 2 * hidden),
        "nextn.enorm.weight": (hidden,),
        "nextn.hnorm.weight": (hidden,),
        "nextn.shared_head_norm.weight": (hidden,),
    }


def _gated_ffn(suffix: str, hidden: int, ffn: int, *stack: int) -> TensorShapes:
    return {
        f"ffn_gate{suffix}.weight": (*stack, ffn, hidden),
        f"ffn_up{suffix}.weight": (*stack, ffn, hidden),
        f"ffn_down{suffix}.weight": (*stack, hidden, ffn),
    }
