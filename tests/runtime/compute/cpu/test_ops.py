"""The dense operations as adapters call them; their mathematics is tested separately."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from dflash_adapters.quant import TensorType
from dflash_adapters.rope import RopePairing, RopeTable, rope_table
from dflash_adapters.routing import Gating, RoutingRule
from dflash_adapters.spec import KvLayer
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.kernels.words import Call
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.cpu.weights.matrix import CpuMatrix, as_matrix
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.reference.ops import DenseMatrix, ReferenceOps


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuBackend(num_threads=1).ops


@pytest.fixture
def threaded_ops() -> Iterator[CpuOps]:
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


# -- the reference says the same -----------------------------------------------------------------


def test_a_layer_of_operations_agrees_with_the_reference(ops: CpuOps) -> None:
    reference = ReferenceOps()
    x, norm = normal(5, 64), normal(64, seed=1)
    weights = [normal(rows, 64, seed=rows) * np.float32(0.125) for rows in (96, 48, 48, 7)]
    table = rope_table(RopePairing.HALF_SPLIT, 24, 1e4)
    positions = np.arange(5, dtype=np.int32)
    rule = RoutingRule(3, Gating.SOFTMAX, normalise=True)
    results = []
    for each, matrices in (
        (ops, [f32_matrix(values) for values in weights]),
        (reference, [DenseMatrix(values) for values in weights]),
    ):
        h = each.rms_norm(x, norm, 1e-6)
        q, k, v = (projected.reshape(5, -1, 24) for projected in each.project(h, matrices[:3]))
        each.norm_and_rotate(q, k, positions, table, q_weight=normal(24, seed=2), eps=1e-6)
        cache = each.new_kv_cache((KvLayer(2, 24, 24),), 8, KvType.F32)
        attended = each.attention(q, k, v, cache, 0, positions, scale=0.2)
        ids, topk_weights = each.route(each.linear(h, matrices[3]), rule)
        results.append((attended, ids, topk_weights))
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=3e-6)


# -- linear ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 300])
def test_projecting_is_several_times_linear(ops: CpuOps, num_tokens: int) -> None:
    x = normal(num_tokens, 64)
    matrices = [q8_0_matrix(40, 64), f32_matrix(normal(7, 64)), q8_0_matrix(16, 64)]
    for got, matrix in zip(ops.project(x, matrices), matrices, strict=True):
        np.testing.assert_array_equal(got, ops.linear(x, matrix))


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_linear_may_add(ops: CpuOps, num_tokens: int) -> None:
    matrix, x, addend = q8_0_matrix(37, 64), normal(num_tokens, 64), normal(num_tokens, 37, seed=3)
    expected = addend + ops.linear(x, matrix)
    np.testing.assert_array_equal(ops.linear(x, matrix, add=addend), expected)
    assert ops.linear(x, matrix, out=addend, add=addend) is addend
    np.testing.assert_array_equal(addend, expected)


# -- embed ----------------------------------------------------------------------------------------


def test_embed(ops: CpuOps) -> None:
    values = normal(20, 52)
    token_ids = np.array([3, 19, 0, 3], np.int32)
    table = f32_matrix(values)
    np.testing.assert_array_equal(ops.embed(table, token_ids), values[token_ids])
    assert ops.embed(table, token_ids[:0]).shape == (0, 52)


@pytest.mark.parametrize("bad", [-1, 20, 2**31 - 1])
def test_embed_refuses_ids_outside_the_table(ops: CpuOps, bad: int) -> None:
    table = f32_matrix(normal(20, 52))
    with pytest.raises(ValueError, match=rf"token id {bad}\b.*0\.\.19"):
        ops.embed(table, np.array([3, bad], np.int32))
    assert ops.embed(table, np.array([3], np.int32)).shape == (1, 52)


# -- threads --------------------------------------------------------------------------------------


def test_threads_do_not_change_bits(ops: CpuOps, threaded_ops: CpuOps) -> None:
    for matrix in (q8_0_matrix(1000, 64), f32_matrix(normal(700, 64))):
        for num_tokens in (1, 13, 300):
            x = normal(num_tokens, 64)
            np.testing.assert_array_equal(threaded_ops.linear(x, matrix), ops.linear(x, matrix))


# -- guards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [2, 3, 5, 8])
def test_few_wide_rows_are_shared_among_threads_without_changing_bits(
    ops: CpuOps, num_threads: int
) -> None:
    """As a router's matrix: its items are smaller with more threads."""
    rng = np.random.default_rng(num_threads)
    rows, columns = 113, 1024
    matrix = as_matrix(
        rng.standard_normal((rows, columns)).astype(np.float32).view(np.uint8).reshape(-1),
        TensorType.F32,
        rows,
        columns,
    )
    backend = CpuBackend(num_threads=num_threads)
    for num_tokens in (1, 3):
        x = rng.standard_normal((num_tokens, columns)).astype(np.float32)
        assert np.array_equal(backend.ops.linear(x, matrix), ops.linear(x, matrix))
    backend.close()


def test_shapes_that_do_not_fit_are_refused(ops: CpuOps) -> None:
    matrix, x = q8_0_matrix(8, 64), normal(2, 64)
    with pytest.raises(ValueError, match="64 columns"):
        ops.linear(normal(2, 32), matrix)
    with pytest.raises(ValueError, match=r"\bout\b"):
        ops.linear(x, matrix, out=np.empty((2, 7), np.float32))
    with pytest.raises(ValueError, match="contiguous"):
        ops.linear(x, matrix, out=np.empty((8, 2), np.float32).T)
    with pytest.raises(ValueError, match="cannot add"):
        ops.linear(x, matrix, add=np.empty((1, 8), np.float32))
    with pytest.raises(ValueError, match=r"\b64\b.*\b32\b"):
        ops.project(x, [matrix, q8_0_matrix(8, 32)])
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


def test_angles_live_as_long_as_the_call_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may have other positions' angles kept meanwhile."""
    ops, made = CpuOps(Workers(1), Scratch()), list[weakref.ref[F32Array]]()
    angles = CpuOps.angles

    def fresh(ops: CpuOps, table: RopeTable, positions: I32Array) -> F32Array:
        found = angles(ops, table, positions).copy()
        made.append(weakref.ref(found))
        return found

    def checked(ops: CpuOps, call: Call) -> None:
        assert made[-1]() is not None

    monkeypatch.setattr(CpuOps, "angles", fresh)
    monkeypatch.setattr(CpuOps, "run", checked)
    q, k = np.zeros((2, 4, 8), np.float32), np.zeros((2, 1, 8), np.float32)
    table = RopeTable(RopePairing.INTERLEAVED, 8, np.ones(4), 1.0)
    ops.norm_and_rotate(q, k, np.arange(2, dtype=np.int32), table)
    assert made
