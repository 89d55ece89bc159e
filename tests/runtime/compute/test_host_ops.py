"""Operations of both host backends against plain float64 formulas."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pytest

from dflash_adapters.layers import Gate
from dflash_adapters.rope import RopePairing, rope_table
from dflash_adapters.routing import Gating, RoutingRule
from dflash_adapters.spec import CAUSAL, KvLayer, Mask
from dflash_protocol.errors import CheckpointMissing
from dflash_protocol.ids import F32Array, F64Array
from dflash_runtime.compute import sliding_window
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.reference.ops import ReferenceOps
from support.float64_attention import attended, normalised_and_rotated

HostOps: TypeAlias = CpuOps | ReferenceOps


def normal(*shape: int, seed: int = 0) -> F32Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


# -- gates ----------------------------------------------------------------------------------------

GATES: dict[Gate, Callable[[F64Array], F64Array]] = {
    Gate.SIGMOID: lambda gate: 1 / (1 + np.exp(-gate)),
    Gate.SILU: lambda gate: gate / (1 + np.exp(-gate)),
    Gate.SOFTPLUS: lambda gate: np.log1p(np.exp(gate)),
}


@pytest.mark.wide(2)
@pytest.mark.parametrize("kind", Gate)
@pytest.mark.parametrize(
    ("num_tokens", "columns", "num_gates"),
    [(3, 64, 64), (2, 70, 70), (9, 70, 7), (1, 96, 3), (4, 130, 1), (0, 32, 4)],
)
def test_gated(ops: HostOps, num_tokens: int, columns: int, num_gates: int, kind: Gate) -> None:
    x, gate = normal(num_tokens, columns), 8 * normal(num_tokens, num_gates, seed=1)
    factors = GATES[kind](gate.astype(np.float64))
    expected = x * np.repeat(factors, columns // num_gates, axis=1)
    got = ops.gated(x, gate, kind)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert ops.gated(x, gate, kind, out=x) is x
    np.testing.assert_array_equal(x, got)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Gate.SIGMOID, [0, 1, 0.5]), (Gate.SILU, [0, 1e4, 0]), (Gate.SOFTPLUS, [0, 1e4, np.log(2)])],
)
def test_gates_far_from_zero(ops: HostOps, kind: Gate, expected: list[float]) -> None:
    gate = np.array([[-1e4, 1e4, 0]], np.float32)
    got = ops.gated(np.ones((1, 3), np.float32), gate, kind)
    np.testing.assert_allclose(got, [expected], rtol=1e-6, atol=0)


# -- norms after the rotation ---------------------------------------------------------------------


@pytest.mark.wide(2)
@pytest.mark.parametrize("pairing", RopePairing)
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 64), (37, 10), (0, 8)])
def test_heads_may_be_normed_after_they_are_rotated(
    ops: HostOps, num_tokens: int, dim: int, pairing: RopePairing
) -> None:
    table = rope_table(pairing, dim, 5e5)
    positions = np.arange(9000, 9000 + num_tokens, dtype=np.int32)
    heads = [normal(num_tokens, 6, dim), normal(num_tokens, 2, dim, seed=1)]
    q, k = (x.copy() for x in heads)
    ops.norm_and_rotate(q, k, positions, table, eps=1e-5, norms_after=True)
    for got, x in zip((q, k), heads, strict=True):
        wide = normalised_and_rotated(x, positions, table, None, 0)
        wide /= np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(got, wide, rtol=0, atol=3e-6)


# -- routing --------------------------------------------------------------------------------------

SCORES: dict[Gating, Callable[[F64Array], F64Array]] = {
    Gating.SOFTMAX: lambda x: np.exp(x) / np.exp(x).sum(),
    Gating.SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
    Gating.SOFTMAX_WEIGHT: lambda x: x,
    Gating.SQRT_SOFTPLUS: lambda x: np.sqrt(np.log1p(np.exp(x))),
}


def routed(logits: F32Array, rule: RoutingRule, bias: F32Array) -> tuple[list[int], F64Array]:
    """One token, by the rule's documentation. Shapes: logits, bias [E]."""
    wide = logits.astype(np.float64)
    scores = SCORES[rule.gating](wide)
    worth = (wide if rule.selects_by_logits else scores) + bias
    size = len(wide) // rule.num_groups
    groups = [range(size * group, size * (group + 1)) for group in range(rule.num_groups)]
    groups.sort(key=lambda group: -sum(sorted(worth[group])[-2:]))
    candidates = sorted(expert for group in groups[: rule.num_groups_used] for expert in group)
    ids = sorted(candidates, key=lambda expert: -worth[expert])[: rule.num_experts_used]
    weights = scores[ids]
    if rule.gating is Gating.SOFTMAX_WEIGHT:
        weights = SCORES[Gating.SOFTMAX](weights)
    if rule.normalise:
        weights = weights / max(weights.sum(), 6.103515625e-05)
    return ids, weights * rule.scale


@pytest.mark.wide(2)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("selects_by_logits", [False, True])
@pytest.mark.parametrize("gating", Gating)
@pytest.mark.parametrize(
    ("num_experts", "num_used", "groups", "normalise", "scale"),
    [
        (32, 4, (1, 1), True, 1.0),
        (7, 3, (1, 1), False, 2.5),
        (1, 1, (1, 1), False, 1.0),
        (96, 6, (8, 3), True, 0.5),
        (35, 5, (5, 1), False, 1.0),
        (40, 7, (40, 9), True, 1.0),
    ],
)
def test_route(
    ops: HostOps,
    num_experts: int,
    num_used: int,
    groups: tuple[int, int],
    normalise: bool,
    scale: float,
    gating: Gating,
    selects_by_logits: bool,
    has_bias: bool,
) -> None:
    rule = RoutingRule(num_used, gating, normalise, scale, selects_by_logits, *groups)
    logits = 2 * normal(45, num_experts)
    bias = normal(num_experts, seed=1) if has_bias else None
    ids, weights = ops.route(logits, rule, bias=bias)
    assert ids.dtype == np.int32
    for token, row in enumerate(logits):
        expected = routed(row, rule, np.zeros(num_experts, np.float32) if bias is None else bias)
        assert ids[token].tolist() == expected[0]
        np.testing.assert_allclose(weights[token], expected[1], rtol=3e-6, atol=1e-7)


def test_of_equal_experts_and_groups_the_lower_are_chosen(ops: HostOps) -> None:
    rule = RoutingRule(4, Gating.SIGMOID, False, num_groups=4, num_groups_used=2)
    bias = np.zeros(12, np.float32)
    ids, weights = ops.route(np.zeros((1, 12), np.float32), rule, bias=bias)
    assert ids.tolist() == [[0, 1, 2, 3]]
    bias[[6, 10]] = 1
    assert ops.route(np.zeros((1, 12), np.float32), rule, bias=bias)[0].tolist() == [[6, 10, 7, 8]]
    np.testing.assert_array_equal(weights, 0.5)


@pytest.mark.parametrize("gating", Gating)
def test_ids_are_experts_whatever_the_logits_are(ops: HostOps, gating: Gating) -> None:
    logits = np.array([[np.nan] * 8, [np.inf, -np.inf] * 4, [-np.inf] * 8], np.float32)
    with np.errstate(invalid="ignore"):
        ids, _ = ops.route(logits, RoutingRule(5, gating, True, num_groups=2, num_groups_used=2))
    assert all(len({*row} & {*range(8)}) == 5 for row in ids.tolist())


def test_routing_that_cannot_be_is_refused(ops: HostOps) -> None:
    logits = np.zeros((1, 8), np.float32)
    for rule in (
        RoutingRule(9, Gating.SIGMOID, False),
        RoutingRule(1, Gating.SIGMOID, False, num_groups=3, num_groups_used=1),
        RoutingRule(5, Gating.SIGMOID, False, num_groups=2, num_groups_used=1),
    ):
        with pytest.raises(ValueError, match=r"experts\b.*\b8\b"):
            ops.route(logits, rule)


# -- masks ----------------------------------------------------------------------------------------


@pytest.mark.wide(2)
@pytest.mark.parametrize("mask", [CAUSAL, Mask(window=7), Mask(chunk=16), Mask(20, 32)], ids=repr)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_sees_what_the_mask_lets_it(
    ops: HostOps, monkeypatch: pytest.MonkeyPatch, mask: Mask, has_sinks: bool
) -> None:
    monkeypatch.setattr(sliding_window, "WINDOW_CHUNK", 30)
    num_tokens = 150
    q, k, v = normal(num_tokens, 4, 12), normal(num_tokens, 2, 12, seed=1), normal(num_tokens, 2, 9)
    sinks = normal(4, seed=2) if has_sinks else None
    cache = ops.new_kv_cache((KvLayer(1, 4, 4), KvLayer(2, 12, 9, mask)), 400, KvType.F32)
    ends = [0, 1, 70, 133, *range(134, num_tokens + 1)]
    parts = []
    for first, last in pairwise(ends):
        part, positions = slice(first, last), np.arange(first, last, dtype=np.int32)
        parts.append(
            ops.attention(q[part], k[part], v[part], cache, 1, positions, scale=0.3, sinks=sinks)
        )
    expected = attended(
        q.astype(np.float64) * 0.3,
        k.transpose(1, 0, 2),
        v.transpose(1, 0, 2),
        np.arange(num_tokens, dtype=np.int32),
        mask=mask,
        sinks=sinks,
    )
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=2e-6)


def test_a_ring_can_be_taken_up_only_where_its_rows_are(ops: HostOps) -> None:
    mask = Mask(window=10)
    layers = KvLayer(1, 32, 32, mask), KvLayer(1, 32, 32)
    cache = ops.new_kv_cache(layers, 2000, KvType.F32)
    num_kept = sliding_window.num_rows(mask, 2000)
    assert 9 + sliding_window.WINDOW_CHUNK <= num_kept < 2000
    assert 0 <= cache.nbytes - (num_kept + 2000) * 2 * 32 * 4 < 64 * 2 * 32 * 4

    def go_on(first: int, num_tokens: int) -> None:
        rows = normal(num_tokens, 1, 32)
        positions = np.arange(first, first + num_tokens, dtype=np.int32)
        ops.attention(rows, rows, rows, cache, 0, positions, scale=0.5)

    go_on(0, 1500)
    first_kept = 1500 - num_kept
    for first in (first_kept + 9, 1499):
        go_on(first, 1)
    with pytest.raises(CheckpointMissing):
        go_on(first_kept + 8, 1)
    go_on(0, 3)
    go_on(1, 1)


@pytest.mark.parametrize("kv_type", KvType)
def test_a_ring_goes_on_from_a_snapshot_with_the_same_bits(
    ops: HostOps, monkeypatch: pytest.MonkeyPatch, kv_type: KvType
) -> None:
    monkeypatch.setattr(sliding_window, "WINDOW_CHUNK", 40)
    layers = KvLayer(2, 16, 16, Mask(window=10)), KvLayer(2, 16, 16, Mask(chunk=50))
    cache = ops.new_kv_cache(layers, 1000, kv_type)

    def go_on(first: int, num_tokens: int) -> list[F32Array]:
        q = normal(first + num_tokens, 4, 16, seed=7)[first:]
        rows = q[:, :2].copy()
        positions = np.arange(first, first + num_tokens, dtype=np.int32)
        return [
            ops.attention(q, rows, rows, cache, layer, positions, scale=0.25) for layer in range(2)
        ]

    go_on(0, 130)
    older = cache.snapshot(130)
    assert older.nbytes > 0
    go_on(130, 7)
    snapshot = cache.snapshot(137, older)
    assert (snapshot.num_positions, snapshot.nbytes) == (137, older.nbytes)
    expected = go_on(137, 200)
    with pytest.raises(CheckpointMissing):
        cache.snapshot(137)
    for _ in range(2):
        cache.restore(snapshot)
        for got, wanted in zip(go_on(137, 200), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
