"""qwen3moe in float64 numpy by its formulas, to check the oracle. No cache and no batches.

Does not import the packages under test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dflash_protocol.ids import AnyArray, F32Array, F64Array
from support.random_models import LinearRope, Qwen3MoeShape, YarnRope

_SMALLEST_NORMAL_HALF = 2.0**-14


def float64_logits(
    shape: Qwen3MoeShape,
    tensors: Mapping[str, F32Array],
    token_ids: Sequence[int] | AnyArray,
    start_position: int = 0,
) -> F64Array:
    """Logits after every position. Shapes: token_ids [T]; result [T, V] float64."""
    weights = {name: values.astype(np.float64) for name, values in tensors.items()}
    positions = start_position + np.arange(len(token_ids))
    x: F64Array = weights["token_embd.weight"][np.asarray(token_ids)]
    for layer_id in range(shape.num_layers):
        prefix = f"blk.{layer_id}."
        layer = {
            name.removeprefix(prefix).removesuffix(".weight"): values
            for name, values in weights.items()
            if name.startswith(prefix)
        }
        x = x + _attention(shape, layer, _rms(x, layer["attn_norm"], shape.rms_eps), positions)
        x = x + _routed_experts(shape, layer, _rms(x, layer["ffn_norm"], shape.rms_eps))
    head = weights["token_embd.weight" if shape.tied_output else "output.weight"]
    result: F64Array = _rms(x, weights["output_norm.weight"], shape.rms_eps) @ head.T
    return result


def rope_frequencies(shape: Qwen3MoeShape) -> tuple[F64Array, float]:
    """Angle per position of every pair, and the factor on cos and sin.

    Shapes: frequencies [D / 2].
    Source: Su et al. 2021 (arXiv 2104.09864); Peng et al. 2023 (arXiv 2309.00071), and llama.cpp
    for the factor ``1 + 0.1 ln(factor)``.
    """
    rotated = shape.head_dim
    plain = np.array([shape.rope_freq_base ** (-2 * p / rotated) for p in range(rotated // 2)])
    match shape.rope_scaling:
        case LinearRope(factor):
            return plain / factor, 1.0
        case YarnRope(factor, original_context):
            edges = [
                rotated
                * math.log(original_context / (2 * math.pi * turns))
                / (2 * math.log(shape.rope_freq_base))
                for turns in (32.0, 1.0)
            ]
            low = max(0, math.floor(edges[0]))
            high = min(rotated - 1, math.ceil(edges[1]))
            kept = [
                1 - min(1.0, max(0.0, (p - low) / max(0.001, high - low)))
                for p in range(rotated // 2)
            ]
            share = np.array(kept)
            return plain / factor * (1 - share) + plain * share, 1 + 0.1 * math.log(factor)
    return plain, 1.0


def _rms(x: F64Array, weight: F64Array, eps: float) -> F64Array:
    result: F64Array = weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return result


def _rotate(shape: Qwen3MoeShape, x: F64Array, positions: AnyArray) -> F64Array:
    """Rotate (x[p], x[p + D/2]). Shapes: x and result [T, heads, D]; positions [T]."""
    frequencies, scale = rope_frequencies(shape)
    angles = positions[:, None, None] * frequencies
    cos, sin = np.cos(angles) * scale, np.sin(angles) * scale
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _softmax(x: F64Array) -> F64Array:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    result: F64Array = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return result


def _attention(
    shape: Qwen3MoeShape, layer: Mapping[str, F64Array], h: F64Array, positions: AnyArray
) -> F64Array:
    """Shapes: h and result [T, H]."""
    num_tokens, head_dim = len(h), shape.head_dim
    q = (h @ layer["attn_q"].T).reshape(num_tokens, shape.num_heads, head_dim)
    k = (h @ layer["attn_k"].T).reshape(num_tokens, shape.num_kv_heads, head_dim)
    v = (h @ layer["attn_v"].T).reshape(num_tokens, shape.num_kv_heads, head_dim)
    q = _rotate(shape, _rms(q, layer["attn_q_norm"], shape.rms_eps), positions)
    k = _rotate(shape, _rms(k, layer["attn_k_norm"], shape.rms_eps), positions)
    hidden_from = np.triu(np.full((num_tokens, num_tokens), -np.inf), k=1)
    heads = []
    for head in range(shape.num_heads):
        kv_head = head // (shape.num_heads // shape.num_kv_heads)
        scores = q[:, head] @ k[:, kv_head].T / math.sqrt(head_dim) + hidden_from
        heads.append(_softmax(scores) @ v[:, kv_head])
    result: F64Array = np.concatenate(heads, axis=-1) @ layer["attn_output"].T
    return result


def _routed_experts(shape: Qwen3MoeShape, layer: Mapping[str, F64Array], h: F64Array) -> F64Array:
    """Shapes: h and result [T, H]."""
    scores = _softmax(h @ layer["ffn_gate_inp"].T)
    result = np.zeros_like(h)
    for token_idx, x in enumerate(h):
        chosen = np.argsort(-scores[token_idx])[: shape.num_experts_used]
        weights = scores[token_idx, chosen]
        weights = weights / max(weights.sum(), _SMALLEST_NORMAL_HALF)
        for global_expert_id, weight in zip(chosen, weights, strict=True):
            gate = layer["ffn_gate_exps"][global_expert_id] @ x
            up = layer["ffn_up_exps"][global_expert_id] @ x
            inner = gate / (1 + np.exp(-gate)) * up
            result[token_idx] += weight * (layer["ffn_down_exps"][global_expert_id] @ inner)
    return result
