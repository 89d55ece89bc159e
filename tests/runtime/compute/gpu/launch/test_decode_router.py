"""Router logits of a step, the rows that go to experts beside them, and the choice."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_adapters.routing import Gating, RoutingRule
from dflash_protocol.ids import AnyArray, F32Array, F64Array
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows, meta_shape, padded_columns
from dflash_runtime.compute.gpu.launch.decode_linear import (
    DecodeRouter,
    LinearInputs,
    RouterShape,
    is_float_router,
)
from dflash_runtime.compute.gpu.launch.row_kernels import ChooseExperts
from dflash_runtime.compute.reference.ops import ReferenceOps
from support.attention_rig import relative_error
from support.device_weights import Weights, as_int8_rows, as_weights, random_weights
from support.emulated_device import EmulatedDevice

F32, F16, BF16 = TensorType.F32, TensorType.F16, TensorType.BF16
COLUMNS, EPS = 96, 1e-5


@pytest.fixture(params=[(32, False), (32, True), (64, True)], ids=str)
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    lanes, runs_backward = request.param
    return EmulatedDevice(lanes=lanes, runs_backward=runs_backward)


def router_weights(kind: TensorType, num_experts: int, columns: int = COLUMNS) -> Weights:
    """Random, but for two experts whose logits are equal."""
    native = random_weights(np.random.default_rng(1), kind, num_experts, columns).native.copy()
    native[num_experts - 2] = native[2]
    return as_weights(native, kind, columns)


def random_rows(rows: int, columns: int = COLUMNS) -> F32Array:
    rng = np.random.default_rng(rows)
    values: F32Array = rng.standard_normal((rows, columns)).astype(np.float32)
    return values * np.float32(2.0) ** rng.integers(-4, 5, (rows, 1)).astype(np.float32)


def normalised(x: F32Array, weight: F32Array) -> F64Array:
    wide = x.astype(np.float64)
    result: F64Array = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + EPS) * weight
    return result


def logits_of(
    device: EmulatedDevice,
    weights: Weights,
    kind: TensorType,
    x: F32Array,
    norm_weight: F32Array,
    side: StepRows | None = None,
) -> AnyArray:
    """Of one launch. Shapes: x [T, columns]; result [T, E]."""
    num_experts, columns = weights.values.shape
    router = DecodeRouter(device, RouterShape(len(x), num_experts, columns, kind))
    logits = device.empty((len(x), num_experts), np.float32)
    inputs = LinearInputs(x=device.upload(x), norm_weight=device.upload(norm_weight), eps=EPS)
    router.launch(device.upload(weights.packed), logits, inputs, side=side)
    return logits


@pytest.mark.parametrize(
    ("kind", "num_experts", "num_tokens", "columns"),
    [
        *((F32, 12, 3, COLUMNS), (BF16, 33, 8, 2080)),
        pytest.param(F16, 40, 1, COLUMNS, marks=pytest.mark.slow),
    ],
)
def test_logits_and_the_rows_beside_them(
    device: EmulatedDevice, kind: TensorType, num_experts: int, num_tokens: int, columns: int
) -> None:
    weights = router_weights(kind, num_experts, columns)
    x = random_rows(num_tokens, columns)
    norm_weight = np.random.default_rng(2).random(columns, np.float32)
    values = device.empty((num_tokens, columns), np.float32)
    quants = device.empty((num_tokens, padded_columns(columns)), np.int8)
    meta = device.empty(meta_shape(num_tokens, columns), np.float32)
    sides = StepRows(quants, meta, values)
    logits = logits_of(device, weights, kind, x, norm_weight, sides)
    wanted = normalised(x, norm_weight)
    assert relative_error(logits, wanted @ weights.values.T) < 1e-6
    np.testing.assert_array_equal(logits[:, 2], logits[:, num_experts - 2])
    assert relative_error(values, wanted) < 3e-7
    rows = as_int8_rows(values)
    np.testing.assert_array_equal(quants[:, :columns], rows.quants[:, :columns])
    used = columns // 16
    np.testing.assert_array_equal(meta[:, :used], rows.meta[:, :used])


@pytest.mark.parametrize("lanes", [32, 64])
def test_a_token_has_the_same_logits_however_many_there_are(lanes: int) -> None:
    device = EmulatedDevice(lanes=lanes, runs_backward=True)
    weights, x, ones = router_weights(F32, 12), random_rows(3), np.ones(COLUMNS, np.float32)
    together = logits_of(device, weights, F32, x, ones)
    x[0, 5] = np.nan
    np.testing.assert_array_equal(logits_of(device, weights, F32, x[1:2], ones), together[1:2])
    beside_nan = logits_of(device, weights, F32, x, ones)
    assert np.isnan(beside_nan[0]).all()
    np.testing.assert_array_equal(beside_nan[1:], together[1:])


@pytest.mark.parametrize(
    ("num_experts", "num_used", "normalise"),
    [(12, 4, True), (40, 8, False), pytest.param(33, 1, True, marks=pytest.mark.slow)],
)
def test_experts_are_chosen_as_by_the_reference(
    device: EmulatedDevice, num_experts: int, num_used: int, normalise: bool
) -> None:
    logits = np.random.default_rng(3).standard_normal((5, num_experts)).astype(np.float32)
    logits[:, num_experts - 2] = logits[:, 2] = 3  # the first of equals
    logits[3] = np.nan
    rule = RoutingRule(num_used, Gating.SOFTMAX, normalise)
    ids, weights = device.empty((5, num_used), np.int32), device.empty((5, num_used), np.float32)
    ChooseExperts(device).launch(rule, device.upload(logits), bias=None, ids=ids, weights=weights)
    assert ids[3].tolist() == list(range(num_used))
    assert np.isnan(weights[3]).all()
    kept = [0, 1, 2, 4]
    wanted_ids, wanted_weights = ReferenceOps().route(logits[kept], rule)
    np.testing.assert_array_equal(ids[kept], wanted_ids)
    np.testing.assert_allclose(weights[kept], wanted_weights, rtol=2e-6)


def test_what_does_not_fit_is_refused() -> None:
    assert not is_float_router(TensorType.Q8_0, COLUMNS)
    assert not is_float_router(F32, 100)
    with pytest.raises(ValueError, match=r"router\b.*\b100\b.* F32"):
        RouterShape(1, 8, 100, F32)
    with pytest.raises(ValueError, match=r"T=9\b.*\b1 .*\b8 tokens"):
        RouterShape(9, 8, COLUMNS, F32)
    device = EmulatedDevice()
    weights = router_weights(F32, 12)
    with pytest.raises(ValueError, match="norm_weight"):
        logits_of(device, weights, F32, random_rows(3), np.ones(COLUMNS - 1, np.float32))
