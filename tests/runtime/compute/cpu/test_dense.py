"""RMS norm, rotary embedding and routing against plain float64 formulas, and their guards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_adapters.rope import RopePairing, RopeTable, rope_table
from dflash_adapters.routing import Gating, RoutingRule
from dflash_protocol.ids import F32Array, F64Array
from dflash_runtime.compute.cpu.kernels import words
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers


@pytest.fixture(scope="module")
def alone() -> CpuOps:
    return CpuOps(Workers(1), Scratch())


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuOps]:
    """Three threads, used for work of any size."""
    monkeypatch.setattr(words, "PARALLEL_WORK", 0)
    workers = Workers(3)
    yield CpuOps(workers, Scratch())
    workers.close()


def normal(*shape: int, seed: int = 0) -> F32Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def normed(x: F32Array, weight: F32Array, eps: float) -> F64Array:
    wide = x.astype(np.float64)
    mean_square = np.mean(wide**2, axis=-1, keepdims=True) if x.size else wide
    result: F64Array = weight * wide / np.sqrt(mean_square + eps)
    return result


def rotated(x: F64Array, positions: Any, table: RopeTable) -> F64Array:
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


# -- RMS norm -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1, 192), (3, 52), (2, 4, 64), (2, 3, 10), (0, 32), (5, 1), (70, 96)]
)
def test_rms_norm(alone: CpuOps, shared: CpuOps, shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), normal(shape[-1], seed=1)
    got = alone.rms_norm(x, weight, 1e-6)
    np.testing.assert_allclose(got, normed(x, weight, 1e-6), rtol=5e-7)
    np.testing.assert_array_equal(shared.rms_norm(x, weight, 1e-6), got)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_rms_norm_of_extreme_rows(alone: CpuOps, scale: float) -> None:
    x, ones = normal(2, 96) * np.float32(scale), np.ones(96, np.float32)
    np.testing.assert_allclose(alone.rms_norm(x, ones, 1e-6), normed(x, ones, 1e-6), rtol=1e-6)


# -- rotary embedding -----------------------------------------------------------------------------


@pytest.mark.wide(2)
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize(
    ("dim", "num_rotated"), [(128, 128), (64, 64), (10, 10), (64, 32), (6, 2), (100, 80)]
)
@pytest.mark.parametrize("pairing", RopePairing)
@pytest.mark.parametrize("weights", ["", "q", "k", "qk"])
def test_norm_and_rotate(
    alone: CpuOps,
    shared: CpuOps,
    weights: str,
    pairing: RopePairing,
    dim: int,
    num_rotated: int,
    num_tokens: int,
) -> None:
    table = rope_table(pairing, num_rotated, 1e6)
    positions = np.arange(100_000, 100_000 + num_tokens, dtype=np.int32)
    heads = [normal(num_tokens, 6, dim), normal(num_tokens, 2, dim, seed=1)]
    norms = [normal(dim, seed=2) if "q" in weights else None, None]
    norms[1] = normal(dim, seed=3) if "k" in weights else None
    for dense in (alone, shared):
        q, k = (x.copy() for x in heads)
        q_weight, k_weight = norms
        dense.norm_and_rotate(
            q, k, positions, table, q_weight=q_weight, k_weight=k_weight, eps=1e-5
        )
        for got, x, weight in zip((q, k), heads, norms, strict=True):
            wide = x.astype(np.float64) if weight is None else normed(x, weight, 1e-5)
            np.testing.assert_allclose(got, rotated(wide, positions, table), rtol=0, atol=3e-6)
        if dense is alone:
            first = q, k
    np.testing.assert_array_equal(q, first[0])
    np.testing.assert_array_equal(k, first[1])


def test_rope_tables_and_positions_may_alternate(alone: CpuOps) -> None:
    tables = [rope_table(RopePairing.HALF_SPLIT, 16, base) for base in (1e4, 1e6)]
    for position in (3, 4, 3):
        for table in tables:
            x, positions = normal(1, 1, 16), np.array([position], np.int32)
            expected = rotated(x.astype(np.float64), positions, table)
            alone.norm_and_rotate(x, x.copy(), positions, table)
            np.testing.assert_allclose(x, expected, atol=1e-6)


# -- routing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "num_used"), [(32, 4), (128, 8), (5, 5), (1, 1), (33, 33), (200, 6)]
)
def test_route(
    alone: CpuOps, shared: CpuOps, num_experts: int, num_used: int, normalise: bool
) -> None:
    logits = normal(45, num_experts) * np.float32(3)
    rule = RoutingRule(num_used, Gating.SOFTMAX, normalise)
    ids, weights = alone.route(logits, rule)
    wide = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    wide /= wide.sum(axis=1, keepdims=True)
    expected_ids = np.argsort(-wide, axis=1, kind="stable")[:, :num_used]
    expected = np.take_along_axis(wide, expected_ids, axis=1)
    if normalise:
        expected /= expected.sum(axis=1, keepdims=True)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=2e-6)
    for one, other in zip(shared.route(logits, rule), (ids, weights), strict=True):
        np.testing.assert_array_equal(one, other)


def test_route_prefers_the_lower_id_of_equals(alone: CpuOps) -> None:
    logits = np.array([[0, 2, 1, 2, 2, 1], [0, 0, 0, 0, 0, 0]], np.float32)
    ids, weights = alone.route(logits, RoutingRule(4, Gating.SOFTMAX, normalise=True))
    np.testing.assert_array_equal(ids, [[1, 3, 4, 2], [0, 1, 2, 3]])
    np.testing.assert_allclose(weights[1], 0.25)
    ids, _ = alone.route(np.zeros((1, 100), np.float32), RoutingRule(70, Gating.SOFTMAX, True))
    np.testing.assert_array_equal(ids, [np.arange(70)])


def test_route_of_not_a_number_still_names_experts(alone: CpuOps) -> None:
    logits = np.full((4, 6), np.nan, np.float32)
    logits[1, 3], logits[2, :5], logits[3] = 1, 1, np.inf
    ids, _ = alone.route(logits, RoutingRule(4, Gating.SOFTMAX, normalise=True))
    for row in ids:
        assert len(set(row)) == 4
        assert row.min() >= 0
        assert row.max() < 6


# -- guards ---------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_are_refused(alone: CpuOps) -> None:
    x, q = normal(2, 64), normal(2, 4, 16)
    table = rope_table(RopePairing.HALF_SPLIT, 16, 1e4)
    positions = np.arange(2, dtype=np.int32)
    with pytest.raises(ValueError, match=r"\bweight\b"):
        alone.rms_norm(x, np.ones(63, np.float32), 1e-6)
    with pytest.raises(ValueError, match=r"\bpositions\b"):
        alone.norm_and_rotate(q, q, positions[:1], table)
    with pytest.raises(ValueError, match=r"\b16\b.*\b8\b"):
        alone.norm_and_rotate(normal(2, 1, 8), normal(2, 1, 8), positions, table)
    with pytest.raises(ValueError, match="q is"):
        alone.norm_and_rotate(q, normal(1, 4, 16), positions, table)
    with pytest.raises(ValueError, match=r"\bweight\b"):
        alone.norm_and_rotate(q, q, positions, table, k_weight=np.ones(8, np.float32))
    with pytest.raises(ValueError, match=r"\b9 experts\b.*\b8\b"):
        alone.route(normal(1, 8), RoutingRule(9, Gating.SOFTMAX, normalise=True))
    heads = normal(3, 64, 2).transpose(0, 2, 1)
    for wrong in (x.astype(np.float64), normal(64, 2).T, normal(2, 128)[:, ::2], heads):
        with pytest.raises(TypeError):
            alone.rms_norm(wrong, np.ones(64, np.float32), 1e-6)  # type: ignore[arg-type]
    assert alone.rms_norm(x, np.ones(64, np.float32), 1e-6).shape == (2, 64)
