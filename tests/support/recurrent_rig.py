"""Random inputs of recurrent layers, results in float64, and a backend's results in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_adapters.spec import DeltaShape, RecurrentLayer
from dflash_protocol.ids import F32Array, F64Array
from dflash_runtime.compute.host_ops import DeltaInputs
from dflash_runtime.compute.kv_cache import KvCache, KvType
from support.float64_recurrent import float64_conv, float64_delta_rule

EPS = 1e-6


def delta_inputs(shape: DeltaShape, num_tokens: int, *, seed: int = 0) -> DeltaInputs:
    """Inputs whose heads' decay rates range from very fast to very slow, as trained ones do."""
    random = np.random.default_rng([seed, num_tokens])
    heads = shape.num_value_heads

    def normal(*dims: int) -> F32Array:
        return random.standard_normal(dims, dtype=np.float32)

    return DeltaInputs(
        shape=shape,
        eps=EPS,
        mixed=normal(num_tokens, shape.num_channels),
        alpha=2 * normal(num_tokens, heads),
        beta=2 * normal(num_tokens, heads),
        a=-np.exp(random.uniform(-7, 2.5, heads)).astype(np.float32),
        dt_bias=normal(heads),
    )


def expected_outputs(inputs: DeltaInputs) -> tuple[F64Array, F64Array]:
    """Outputs [T, heads, Dv] and matrices [heads, Dv, Dk], in float64."""
    shape, num_tokens = inputs.shape, len(inputs.mixed)
    num_keys = shape.num_key_heads * shape.key_dim
    q, k, v = np.split(inputs.mixed, [num_keys, 2 * num_keys], axis=1)
    key_head = [
        head % shape.num_key_heads
        if shape.is_tiled
        else head * shape.num_key_heads // shape.num_value_heads
        for head in range(shape.num_value_heads)
    ]
    keys = num_tokens, shape.num_key_heads, shape.key_dim
    logits = inputs.alpha.astype(np.float64) + inputs.dt_bias
    return float64_delta_rule(
        q.reshape(keys)[:, key_head],
        k.reshape(keys)[:, key_head],
        v.reshape(num_tokens, shape.num_value_heads, shape.value_dim),
        g=inputs.a * np.logaddexp(logits, 0),
        b=1 / (1 + np.exp(-inputs.beta.astype(np.float64))),
        eps=EPS,
    )


def recurrent_cache(ops: Any, shape: DeltaShape, *, kernel: int = 4, num_layers: int = 1) -> Any:
    """A cache of `ops` with recurrent layers only."""
    layers = (RecurrentLayer(kernel, shape),) * num_layers
    return ops.new_kv_cache((), 1 << 20, KvType.F32, layers)


def delta_outputs(
    ops: Any, inputs: DeltaInputs, cache: KvCache, *, chunks: Sequence[int], first: int = 0
) -> F32Array:
    """Results of `ops` for the inputs from position `first` on, computed in these chunks."""
    outputs, start = [], 0
    for size in chunks:
        part = inputs.of(slice(start, start + size))
        positions = np.arange(first + start, first + start + size, dtype=np.int32)
        outputs.append(ops.delta_rule(part, cache, 0, positions))
        start += size
    assert start == len(inputs.mixed)
    return np.concatenate(outputs)


def conv_outputs(
    ops: Any, x: F32Array, weight: F32Array, cache: KvCache, *, chunks: Sequence[int]
) -> F32Array:
    """The same for the convolution, from position 0 on."""
    outputs, start = [], 0
    for size in chunks:
        positions = np.arange(start, start + size, dtype=np.int32)
        outputs.append(ops.causal_conv(x[start : start + size], weight, cache, 0, positions))
        start += size
    assert start == len(x)
    return np.concatenate(outputs)


def error(values: F32Array, expected: F64Array) -> float:
    """``max|values - expected| / max|expected|``."""
    return float(np.abs(values - expected).max() / np.abs(expected).max())


__all__ = [
    "EPS",
    "DeltaInputs",
    "conv_outputs",
    "delta_inputs",
    "delta_outputs",
    "error",
    "expected_outputs",
    "float64_conv",
    "recurrent_cache",
]
