"""Every dense operation of the CPU backend against a plain formula, and its guards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from dflash_adapters.moe_spec import KvLayer
from dflash_adapters.ops import Gating, KvCache, KvType, RoutingRule
from dflash_adapters.quant import TensorType
from dflash_adapters.rope import RopePairing, RopeTable, rope_table
from dflash_protocol.errors import ContextExceeded
from dflash_protocol.ids import F32Array, F64Array
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu import ops as cpu_ops
from dflash_runtime.compute.cpu.matrix import CpuMatrix, as_matrix
from dflash_runtime.compute.cpu.ops import CpuOps


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuBackend(num_threads=1).ops


@pytest.fixture
def threaded_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuOps]:
    """Three threads, used for work of any size."""
    monkeypatch.setattr(cpu_ops, "PARALLEL_PRODUCTS", 0)
    backend = CpuBackend(num_threads=3)
    yield backend.ops
    backend.close()


def normal(*shape: int, seed: int = 0) -> F32Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def f32_matrix(values: F32Array) -> CpuMatrix:
    return as_matrix(values.view(np.uint8).reshape(-1), TensorType.F32, *values.shape)


def q8_0_matrix(rows: int, columns: int) -> CpuMatrix:
    stored = quantize(normal(rows, columns), GGMLQuantizationType.Q8_0)
    return as_matrix(stored.reshape(-1), TensorType.Q8_0, rows, columns)


# -- rms_norm, add, heads -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 192), (3, 52), (2, 4, 64), (2, 3, 10), (0, 32), (5, 1)])
def test_rms_norm(ops: CpuOps, shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), normal(shape[-1], seed=1)
    wide = x.astype(np.float64)
    mean_square = np.mean(wide**2, axis=-1, keepdims=True) if x.size else wide
    expected = weight * wide / np.sqrt(mean_square + 1e-6)
    np.testing.assert_allclose(ops.rms_norm(x, weight, 1e-6), expected, rtol=5e-7)
    in_place = x.copy()
    assert ops.rms_norm(in_place, weight, 1e-6, out=in_place) is in_place
    np.testing.assert_allclose(in_place, expected, rtol=5e-7)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_rms_norm_of_extreme_rows(ops: CpuOps, scale: float) -> None:
    x = normal(2, 96) * np.float32(scale)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    got = ops.rms_norm(x, np.ones(96, np.float32), 1e-6)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_add_and_heads(ops: CpuOps) -> None:
    x, y = normal(3, 24), normal(3, 24, seed=1)
    np.testing.assert_array_equal(ops.add(x, y), x + y)
    expected = x + y
    assert ops.add(x, y, out=x) is x
    np.testing.assert_array_equal(x, expected)
    heads = ops.split_heads(x, 4)
    assert heads.shape == (3, 4, 6)
    assert np.shares_memory(heads, x)
    merged = ops.merge_heads(heads)
    assert merged.shape == x.shape
    assert np.shares_memory(merged, x)


# -- rope -----------------------------------------------------------------------------------------


def rotated(x: F32Array, positions: Any, table: RopeTable) -> F64Array:
    half = len(table.inv_freq)
    pair = np.arange(half)
    if table.pairing is RopePairing.HALF_SPLIT:
        first, second = pair, pair + half
    else:
        first, second = 2 * pair, 2 * pair + 1
    angle = np.multiply.outer(np.asarray(positions, np.float64), table.inv_freq)[:, None, :]
    result = x.astype(np.float64)
    a, b = result[..., first], result[..., second]
    result[..., first] = table.scale * (a * np.cos(angle) - b * np.sin(angle))
    result[..., second] = table.scale * (a * np.sin(angle) + b * np.cos(angle))
    return result


@pytest.mark.parametrize("first_position", [0, 1, 7, 100_000])
@pytest.mark.parametrize(("dim", "num_rotated"), [(64, 64), (10, 10), (64, 32), (6, 2)])
@pytest.mark.parametrize("pairing", RopePairing)
def test_rope(
    ops: CpuOps, pairing: RopePairing, dim: int, num_rotated: int, first_position: int
) -> None:
    table = rope_table(pairing, num_rotated, 1e6)
    positions = np.arange(first_position, first_position + 3, dtype=np.int32)
    x = normal(3, 2, dim)
    expected = rotated(x, positions, table)
    np.testing.assert_allclose(ops.rope(x, positions, table), expected, rtol=0, atol=1e-6)
    in_place = x.copy()
    assert ops.rope(in_place, positions, table, out=in_place) is in_place
    np.testing.assert_allclose(in_place, expected, rtol=0, atol=1e-6)


def test_rope_tables_and_positions_may_alternate(ops: CpuOps) -> None:
    tables = [rope_table(RopePairing.HALF_SPLIT, 16, base) for base in (1e4, 1e6)]
    x = normal(1, 1, 16)
    for position in (3, 4, 3):
        for table in tables:
            positions = np.array([position], np.int32)
            expected = rotated(x, positions, table)
            np.testing.assert_allclose(ops.rope(x, positions, table), expected, atol=1e-6)


# -- attention ------------------------------------------------------------------------------------


def attended(q: F32Array, keys: Any, values: Any, first: int, scale: float) -> F64Array:
    """Shapes: q [T, heads, D]; keys, values [N, kv_heads, D]: everything up to the last token."""
    group = q.shape[1] // keys.shape[1]
    keys, values = np.asarray(keys, np.float64), np.asarray(values, np.float64)
    out = np.empty((*q.shape[:2], values.shape[2]))
    for token in range(q.shape[0]):
        visible = first + token + 1
        for head in range(q.shape[1]):
            scores = keys[:visible, head // group] @ q[token, head].astype(np.float64) * scale
            terms = np.exp(scores - scores.max())
            out[token, head] = terms @ values[:visible, head // group] / terms.sum()
    return out


@pytest.mark.parametrize("kv_type", KvType)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(4, 4, 64, 64), (6, 2, 10, 10), (8, 1, 128, 128), (3, 3, 33, 48), (2, 1, 1, 1)],
)
def test_attention_in_chunks(
    ops: CpuOps, heads: int, kv_heads: int, dim: int, value_dim: int, kv_type: KvType
) -> None:
    num_tokens, scale = 75, dim**-0.5
    q, k = normal(num_tokens, heads, dim), normal(num_tokens, kv_heads, dim, seed=1)
    v = normal(num_tokens, kv_heads, value_dim, seed=2)
    stored = np.float16 if kv_type is KvType.F16 else np.float32
    expected = attended(q, k.astype(stored), v.astype(stored), 0, scale)

    def run(*ends: int) -> F32Array:
        layers = (KvLayer(1, 1, 1), KvLayer(kv_heads, dim, value_dim))
        cache = ops.new_kv_cache(layers, num_tokens, kv_type)
        parts, first = [], 0
        for end in ends:
            part = slice(first, end)
            positions = np.arange(first, end, dtype=np.int32)
            parts.append(ops.attention(q[part], k[part], v[part], cache, 1, positions, scale))
            first = end
        return np.concatenate(parts)

    whole = run(num_tokens)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=3e-6)
    np.testing.assert_array_equal(run(1, 2, 34, 34, 74, 75), whole)


@pytest.mark.parametrize("kv_type", KvType)
def test_kv_type_is_the_only_difference(ops: CpuOps, kv_type: KvType) -> None:
    """Halves round to nearest even, and values that are halves already survive unchanged."""
    dim = 32
    k = normal(4, 1, dim).astype(np.float16).astype(np.float32)
    v = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65504, 2**-24], np.float32)[:, None, None]
    v = np.broadcast_to(v, (4, 1, dim)).copy()
    for token in range(4):
        cache = ops.new_kv_cache((KvLayer(1, dim, dim),), 1, kv_type)
        got = ops.attention(
            k[:1], k[:1], v[token : token + 1], cache, 0, np.zeros(1, np.int32), 1.0
        )
        stored = np.float16 if kv_type is KvType.F16 else np.float32
        np.testing.assert_array_equal(got, v[token : token + 1].astype(stored).astype(np.float32))


@pytest.mark.parametrize("size", [80.0, 1e4])
def test_attention_of_large_scores(ops: CpuOps, size: float) -> None:
    q, k, v = (normal(40, 2, 16, seed=seed) for seed in range(3))
    q *= np.float32(size)
    cache = ops.new_kv_cache((KvLayer(2, 16, 16),), 40, KvType.F32)
    got = ops.attention(q, k, v, cache, 0, np.arange(40, dtype=np.int32), 1.0)
    np.testing.assert_allclose(got, attended(q, k, v, 0, 1.0), atol=2e-6 * size)


def test_rewriting_positions(ops: CpuOps) -> None:
    """A draft that was not accepted is simply overwritten."""
    q, k, v = (normal(6, 2, 16, seed=seed) for seed in range(3))
    cache = ops.new_kv_cache((KvLayer(2, 16, 16),), 8, KvType.F32)
    positions = np.arange(6, dtype=np.int32)
    whole = ops.attention(q, k, v, cache, 0, positions, 0.25)
    ops.attention(-q[:3], k[3:], v[:3], cache, 0, positions[3:], 0.25)
    again = ops.attention(q[3:], k[3:], v[3:], cache, 0, positions[3:], 0.25)
    np.testing.assert_array_equal(again, whole[3:])


# -- routing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("num_experts", "num_used"), [(32, 4), (128, 8), (5, 5), (1, 1)])
def test_route(ops: CpuOps, num_experts: int, num_used: int, normalise: bool) -> None:
    logits = normal(9, num_experts) * np.float32(3)
    rule = RoutingRule(num_used, Gating.SOFTMAX, normalise)
    ids, weights = ops.route(logits, rule)
    wide = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    wide /= wide.sum(axis=1, keepdims=True)
    expected_ids = np.argsort(-wide, axis=1, kind="stable")[:, :num_used]
    expected = np.take_along_axis(wide, expected_ids, axis=1)
    if normalise:
        expected /= expected.sum(axis=1, keepdims=True)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=2e-6)


def test_route_prefers_the_lower_id_of_equals(ops: CpuOps) -> None:
    logits = np.array([[0, 2, 1, 2, 2, 1], [0, 0, 0, 0, 0, 0]], np.float32)
    ids, weights = ops.route(logits, RoutingRule(4, Gating.SOFTMAX, normalise=True))
    np.testing.assert_array_equal(ids, [[1, 3, 4, 2], [0, 1, 2, 3]])
    np.testing.assert_allclose(weights[1], 0.25)


def test_route_of_not_a_number_still_names_experts(ops: CpuOps) -> None:
    logits = np.full((2, 6), np.nan, np.float32)
    logits[1, 3] = 1
    ids, _ = ops.route(logits, RoutingRule(4, Gating.SOFTMAX, normalise=True))
    for row in ids:
        assert len(set(row)) == 4
        assert row.min() >= 0
        assert row.max() < 6


# -- embed ----------------------------------------------------------------------------------------


def test_embed(ops: CpuOps) -> None:
    values = normal(20, 52)
    token_ids = np.array([3, 19, 0, 3], np.int32)
    table = f32_matrix(values)
    np.testing.assert_array_equal(ops.embed(table, token_ids), values[token_ids])
    out = np.empty((4, 52), np.float32)
    assert ops.embed(table, token_ids, out=out) is out
    np.testing.assert_array_equal(out, values[token_ids])
    assert ops.embed(table, token_ids[:0]).shape == (0, 52)


@pytest.mark.parametrize("bad", [-1, 20, 2**31 - 1])
def test_embed_refuses_ids_outside_the_table(ops: CpuOps, bad: int) -> None:
    table = f32_matrix(normal(20, 52))
    with pytest.raises(ValueError, match=f"token id {bad} is not within 0..19"):
        ops.embed(table, np.array([3, bad], np.int32))
    assert ops.embed(table, np.array([3], np.int32)).shape == (1, 52)


# -- threads --------------------------------------------------------------------------------------


def test_threads_do_not_change_bits(ops: CpuOps, threaded_ops: CpuOps) -> None:
    for matrix in (q8_0_matrix(100, 64), f32_matrix(normal(7, 64))):
        for num_tokens in (1, 13):
            x = normal(num_tokens, 64)
            np.testing.assert_array_equal(threaded_ops.linear(x, matrix), ops.linear(x, matrix))
    q, k, v = normal(13, 6, 24), normal(13, 2, 24, seed=1), normal(13, 2, 24, seed=2)
    results = []
    for each in (ops, threaded_ops):
        cache = each.new_kv_cache((KvLayer(2, 24, 24),), 13, KvType.F16)
        parts = [slice(0, 12), slice(12, 13)]
        positions = np.arange(13, dtype=np.int32)
        results.append(
            np.concatenate(
                [each.attention(q[p], k[p], v[p], cache, 0, positions[p], 0.2) for p in parts]
            )
        )
    np.testing.assert_array_equal(results[0], results[1])


# -- guards ---------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_are_refused(ops: CpuOps) -> None:
    matrix, x = q8_0_matrix(8, 64), normal(2, 64)
    table = rope_table(RopePairing.HALF_SPLIT, 16, 1e4)
    positions = np.arange(2, dtype=np.int32)
    with pytest.raises(ValueError, match="64 columns"):
        ops.linear(normal(2, 32), matrix)
    with pytest.raises(ValueError, match="out is"):
        ops.linear(x, matrix, out=np.empty((2, 7), np.float32))
    with pytest.raises(ValueError, match="contiguous"):
        ops.linear(x, matrix, out=np.empty((8, 2), np.float32).T)
    with pytest.raises(ValueError, match="weight is"):
        ops.rms_norm(x, np.ones(63, np.float32), 1e-6)
    with pytest.raises(ValueError, match="positions are"):
        ops.rope(normal(3, 1, 16), positions, table)
    with pytest.raises(ValueError, match="16 rotated of heads of 8"):
        ops.rope(normal(2, 1, 8), positions, table)
    with pytest.raises(ValueError, match="cannot add"):
        ops.add(x, x[:1])
    with pytest.raises(ValueError, match="9 experts used of 8"):
        ops.route(normal(1, 8), RoutingRule(9, Gating.SOFTMAX, normalise=True))
    assert ops.linear(x, matrix).shape == (2, 8)


def test_arrays_of_other_types_or_layouts_are_refused(ops: CpuOps) -> None:
    matrix, x = q8_0_matrix(8, 64), normal(2, 64)
    wrong: Any
    for wrong in (x.astype(np.float64), normal(64, 2).T, normal(2, 128)[:, ::2]):
        with pytest.raises(TypeError):
            ops.linear(wrong, matrix)
    with pytest.raises(TypeError):
        ops.embed(matrix, np.zeros(1, np.int64))
    assert ops.linear(x, matrix).shape == (2, 8)


def test_read_only_inputs_are_accepted(ops: CpuOps) -> None:
    x = normal(2, 64)
    x.setflags(write=False)
    assert ops.linear(x, q8_0_matrix(8, 64)).shape == (2, 8)


def test_attention_guards(ops: CpuOps) -> None:
    cache: KvCache = ops.new_kv_cache((KvLayer(2, 16, 16),), 8, KvType.F32)
    q, k = normal(2, 4, 16), normal(2, 2, 16)

    def attention(first: int, q: F32Array = q, k: F32Array = k, step: int = 1) -> F32Array:
        positions = np.arange(first, first + 2 * step, step, dtype=np.int32)
        return ops.attention(q, k, k, cache, 0, positions, 0.25)

    with pytest.raises(ContextExceeded):
        attention(7)
    with pytest.raises(ContextExceeded):
        attention(2**31 - 3)
    with pytest.raises(ValueError, match="positions"):
        attention(-1)
    with pytest.raises(ValueError, match="ascend by one"):
        attention(0, step=2)
    with pytest.raises(ValueError, match="do not fit"):
        attention(0, k=normal(2, 1, 16))
    with pytest.raises(ValueError, match="do not fit"):
        attention(0, q=normal(2, 5, 16))
    with pytest.raises(ValueError, match="do not fit"):
        attention(0, q=normal(2, 4, 8))
    assert attention(6).shape == (2, 4, 16)
    empty = ops.attention(q[:0], k[:0], k[:0], cache, 0, np.zeros(0, np.int32), 0.25)
    assert empty.shape == (0, 4, 16)
