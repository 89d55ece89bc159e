"""Causal convolution and the gated delta rule in float64 numpy, one token after the other.

Does not import the packages under test.
"""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import AnyArray, F64Array


def float64_conv(x: AnyArray, weight: AnyArray) -> F64Array:
    """The convolution after zeros. Shapes: x, result [T, C]; weight [C, K]."""
    num_tokens, kernel = len(x), weight.shape[1]
    rows = np.concatenate([np.zeros((kernel - 1, x.shape[1])), x.astype(np.float64)])
    out = np.zeros((num_tokens, x.shape[1]))
    for token_idx in range(num_tokens):
        for tap in range(kernel):
            out[token_idx] += weight[:, tap] * rows[token_idx + tap]
    return _silu(out)


def float64_delta_rule(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    g: AnyArray,
    b: AnyArray,
    eps: float,
) -> tuple[F64Array, F64Array]:
    """Outputs [T, heads, Dv], and the matrices after the last token [heads, Dv, Dk], from zeros on.

    Shapes: q, k [T, heads, Dk], not normed; v [T, heads, Dv]; g, b [T, heads].
    """
    q, k, v, g, b = (each.astype(np.float64) for each in (q, k, v, g, b))
    q = q / np.sqrt((q * q).sum(axis=-1, keepdims=True) + eps) / np.sqrt(q.shape[-1])
    k = k / np.sqrt((k * k).sum(axis=-1, keepdims=True) + eps)
    num_tokens, num_heads, value_dim = v.shape
    matrices = np.zeros((num_heads, value_dim, k.shape[-1]))
    out = np.zeros_like(v)
    for t in range(num_tokens):
        matrices *= np.exp(g[t])[:, None, None]
        difference = b[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", matrices, k[t]))
        matrices += np.einsum("hv,hk->hvk", difference, k[t])
        out[t] = np.einsum("hvk,hk->hv", matrices, q[t])
    return out, matrices


def _silu(x: F64Array) -> F64Array:
    result: F64Array = x / (1 + np.exp(-x))
    return result
