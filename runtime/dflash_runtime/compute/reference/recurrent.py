"""Causal convolution and the gated delta rule in plain numpy, with their state.

Few tokens take one step of the recurrence each; many are computed in chunks, and only a chunk's end
needs a state.
"""

from __future__ import annotations

import numpy as np

from dflash_adapters.spec import DeltaShape, RecurrentLayer
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.host_ops import DeltaInputs
from dflash_runtime.compute.sequence_state import LayerState, begin_of
from dflash_runtime.compute.trees import Tree

DELTA_CHUNK = 64
"""Tokens between two states of the chunked form."""

_FEW_TOKENS = 16


class RecurrentState(LayerState):
    """Shapes: inputs [K - 1, channels], oldest first; matrices [heads, value_dim, key_dim]."""

    __slots__ = ("inputs", "matrices")

    def __init__(self, layer: RecurrentLayer) -> None:
        delta, num_kept = layer.delta, layer.conv_kernel - 1
        num_inputs = num_kept * delta.num_channels
        shape = delta.num_value_heads, delta.value_dim, delta.key_dim
        super().__init__(np.zeros(num_inputs + int(np.prod(shape)), np.float32))
        self.inputs: F32Array = self.values[:num_inputs].reshape(num_kept, delta.num_channels)
        self.matrices: F32Array = self.values[num_inputs:].reshape(shape)


def causal_conv(
    x: F32Array, weight: F32Array, state: RecurrentState, positions: I32Array
) -> F32Array:
    num_tokens, kernel = x.shape[0], weight.shape[1]
    if weight.shape[0] != x.shape[1] or state.inputs.shape != (kernel - 1, x.shape[1]):
        raise ValueError(f"{x.shape} by {weight.shape} does not fit {state.inputs.shape}")
    if num_tokens == 0:
        return np.empty_like(x)
    first = begin_of(positions, state.conv_positions)
    if first == 0:
        state.inputs[:] = 0
    rows = np.concatenate([state.inputs, x])
    total = np.zeros_like(x)
    for tap in range(kernel):
        total += rows[tap : tap + num_tokens] * weight[:, tap]
    state.inputs[:] = rows[num_tokens:]
    state.conv_positions = first + num_tokens
    return total * _sigmoid(total)


def tree_conv(x: F32Array, weight: F32Array, state: RecurrentState, *, tree: Tree) -> F32Array:
    """`causal_conv` of a tree's tokens; accepting a path updates the state."""
    tree.check_size(x.shape[0])
    kernel = weight.shape[1]
    rows = np.concatenate([x, state.inputs])  # inputs before the tree have negative indices
    before = tree.ancestors(kernel)
    total = np.zeros_like(x)
    for tap in range(kernel):
        total += rows[before[:, tap]] * weight[:, tap]

    def keep(path: I32Array) -> None:
        causal_conv(x[path], weight, state, tree.positions[path])

    tree.keep(keep)
    return total * _sigmoid(total)


def _prepared(inputs: DeltaInputs) -> tuple[F32Array, F32Array, F32Array, F32Array, F32Array]:
    """Queries, keys and values of each value head [T, heads, D]; g and b [T, heads]."""
    decay = inputs.a * np.logaddexp(inputs.alpha + inputs.dt_bias, np.float32(0))
    heads = _heads(inputs.mixed, inputs.shape, inputs.eps)
    return *heads, decay, _sigmoid(inputs.beta)


def delta_rule(inputs: DeltaInputs, state: RecurrentState, positions: I32Array) -> F32Array:
    num_tokens, out = inputs.num_tokens, np.empty(inputs.out_shape, np.float32)
    if num_tokens == 0:
        return out
    first = begin_of(positions, state.delta_positions)
    if first == 0:
        state.matrices[:] = 0
    prepared = _prepared(inputs)
    size = 1 if num_tokens <= _FEW_TOKENS else DELTA_CHUNK
    for start in range(0, num_tokens, size):
        compute = _step if size == 1 else _chunk
        of_chunk = (each[start : start + size] for each in prepared)
        out[start : start + size] = compute(*of_chunk, matrices=state.matrices)
    state.delta_positions = first + num_tokens
    return out


def tree_delta(inputs: DeltaInputs, state: RecurrentState, tree: Tree) -> F32Array:
    """`delta_rule` of a tree's tokens, each from its parent's state."""
    tree.check_size(inputs.num_tokens)
    out = np.empty(inputs.out_shape, np.float32)
    prepared = _prepared(inputs)
    after: list[F32Array] = []
    for node, parent in enumerate(tree.parents.tolist()):
        after.append((state.matrices if parent < 0 else after[parent]).copy())
        of_node = (each[node : node + 1] for each in prepared)
        out[node : node + 1] = _step(*of_node, matrices=after[node])

    def keep(path: I32Array) -> None:
        delta_rule(inputs.of(path), state, tree.positions[path])

    tree.keep(keep)
    return out


def _heads(mixed: F32Array, shape: DeltaShape, eps: float) -> tuple[F32Array, F32Array, F32Array]:
    """Queries, keys and values of each value head. Shapes: results [T, heads, D]."""
    num_tokens, key_heads = mixed.shape[0], shape.num_key_heads
    num_keys = key_heads * shape.key_dim
    q = mixed[:, :num_keys].reshape(num_tokens, key_heads, shape.key_dim)
    k = mixed[:, num_keys : 2 * num_keys].reshape(num_tokens, key_heads, shape.key_dim)
    v = mixed[:, 2 * num_keys :].reshape(num_tokens, shape.num_value_heads, shape.value_dim)
    heads = np.arange(shape.num_value_heads)
    key_head = (
        heads % key_heads if shape.is_tiled else heads // (shape.num_value_heads // key_heads)
    )
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(eps)) for x in (q, k))
    return (q * np.float32(shape.key_dim**-0.5))[:, key_head], k[:, key_head], v


def _step(
    q: F32Array, k: F32Array, v: F32Array, decay: F32Array, share: F32Array, *, matrices: F32Array
) -> F32Array:
    """One token's step. Shapes: q, k, v, result [1, heads, D]; decay, share [1, heads]."""
    matrices *= np.exp(decay[0])[:, None, None]
    difference = share[0][:, None] * (v[0] - np.einsum("hvk,hk->hv", matrices, k[0]))
    matrices += difference[:, :, None] * k[0][:, None, :]
    out: F32Array = np.einsum("hvk,hk->hv", matrices, q[0])[None]
    return out


def _chunk(
    q: F32Array, k: F32Array, v: F32Array, decay: F32Array, share: F32Array, *, matrices: F32Array
) -> F32Array:
    """Many steps at once: each key's row of the state is found by solving a triangular system.

    Shapes: q, k, v, result [n, heads, D]; decay, share [n, heads].
    Source: Yang et al. 2024 (arXiv 2406.06484), with decays as in arXiv 2412.06464.
    """
    num_tokens = q.shape[0]
    q, k, v = (x.transpose(1, 0, 2) for x in (q, k, v))
    share = share.T[:, :, None]
    # Float64: differences of these sums are used.
    total = np.cumsum(decay.T.astype(np.float64), axis=1)
    since_begin = np.exp(total)[:, :, None].astype(np.float32)
    apart = total[:, :, None] - total[:, None, :]
    is_later = np.tril(np.ones((num_tokens, num_tokens), np.bool_))
    between = np.exp(np.where(is_later, apart, -np.inf)).astype(np.float32)
    triangle = np.tril(share * (k @ k.transpose(0, 2, 1)) * between, -1)
    triangle += np.eye(num_tokens, dtype=np.float32)
    known = share * (v - since_begin * (k @ matrices.transpose(0, 2, 1)))
    rows = np.linalg.solve(triangle, known)
    seen = (q @ k.transpose(0, 2, 1)) * between
    out = since_begin * (q @ matrices.transpose(0, 2, 1)) + seen @ rows
    until_end = np.exp(total[:, -1:] - total)[:, :, None].astype(np.float32)
    matrices *= since_begin[:, -1:, :]
    matrices += (until_end * rows).transpose(0, 2, 1) @ k
    result: F32Array = out.transpose(1, 0, 2)
    return result


def _sigmoid(x: F32Array) -> F32Array:
    with np.errstate(over="ignore"):  # large arguments: exp is inf, the result 0
        result: F32Array = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result
