"""Matrices times the rows of a step: products, residuals, heads and routers, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_protocol.ids import AnyArray, F32Array, F64Array
from dflash_runtime.compute.backend import NOT_FINITE
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows, meta_shape
from dflash_runtime.compute.gpu.launch.decode_linear import (
    DecodeLinear,
    DecodeRouter,
    LinearInput,
    LinearInputs,
    LinearShape,
    LinearTuning,
    RouterShape,
    is_float_router,
)
from dflash_runtime.compute.gpu.launch.decode_tokens import ArgmaxLogits, QuantiseRows, RowChange
from dflash_runtime.compute.step_order import padded_columns
from support.attention_rig import relative_error
from support.device_weights import (
    Int8Rows,
    Weights,
    as_int8_rows,
    as_weights,
    int8_values,
    random_weights,
)
from support.emulated_device import EmulatedDevice

Q4_0, Q5_0, Q8_0 = TensorType.Q4_0, TensorType.Q5_0, TensorType.Q8_0
Q2_K, Q4_K, Q6_K, NVFP4 = TensorType.Q2_K, TensorType.Q4_K, TensorType.Q6_K, TensorType.NVFP4
F32, F16, BF16 = TensorType.F32, TensorType.F16, TensorType.BF16

EPS = 1e-5


def new_sides(device: EmulatedDevice, num_tokens: int, columns: int) -> Any:
    """StepRows, whose arrays are the host's here."""
    return StepRows(
        values=device.empty((num_tokens, columns), np.float32),
        quants=device.empty((num_tokens, padded_columns(columns)), np.int8),
        meta=device.empty(meta_shape(num_tokens, columns), np.float32),
    )


def assert_int8(sides: Any, columns: int) -> Int8Rows:
    """The int8 rows are those of the values; returns them."""
    wanted = as_int8_rows(sides.values)
    used = columns // 16
    np.testing.assert_array_equal(sides.quants[:, :columns], wanted.quants[:, :columns])
    np.testing.assert_array_equal(sides.meta[:, :used], wanted.meta[:, :used])
    return wanted


def normalised(x: F32Array, weight: F32Array) -> F64Array:
    wide = x.astype(np.float64)
    mean_square = np.mean(np.square(wide), axis=1, keepdims=True)
    result: F64Array = wide / np.sqrt(mean_square + EPS) * weight
    return result


def launch(
    device: EmulatedDevice,
    linear: DecodeLinear,
    weights: list[Weights],
    inputs: LinearInputs,
    **outputs: Any,
) -> list[AnyArray]:
    """The products of all matrices, into poisoned arrays."""
    tokens = linear.shape.num_tokens
    out = [device.empty((tokens, rows), np.float32) for _, rows in linear.shape.matrices]
    packed = [device.upload(each.packed) for each in weights]
    linear.launch(packed, out, inputs, **outputs)
    return out


def random_rows(rng: np.random.Generator, rows: int, columns: int) -> F32Array:
    values: F32Array = rng.standard_normal((rows, columns)).astype(np.float32)
    return values * np.float32(2.0) ** rng.integers(-4, 5, (rows, 1)).astype(np.float32)


@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_norm_and_several_matrices(device: EmulatedDevice, num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    matrices = ((Q4_K, 70), (Q4_K, 9), (Q6_K, 33))
    weights = [random_weights(rng, kind, rows, 768) for kind, rows in matrices]
    x, norm_weight = random_rows(rng, num_tokens, 768), rng.random(768, np.float32)
    linear = DecodeLinear(
        device, LinearShape(768, num_tokens, matrices, LinearInput.NORM, has_side=True)
    )
    sides = new_sides(device, num_tokens, 768)
    inputs = LinearInputs(x=device.upload(x), norm_weight=device.upload(norm_weight), eps=EPS)
    out = launch(device, linear, weights, inputs, side=sides)

    assert relative_error(sides.values, normalised(x, norm_weight)) < 3e-7
    wanted = assert_int8(sides, 768)
    for given, of in zip(out, weights, strict=True):
        assert relative_error(given, wanted.values @ of.values.T) < 1e-6


@pytest.mark.parametrize(("kind", "columns"), [(Q4_K, 768), (F32, 96)])
def test_activated_rows_and_a_gate_of_the_product(
    device: EmulatedDevice, kind: TensorType, columns: int
) -> None:
    rng = np.random.default_rng(columns)
    weights = random_weights(rng, kind, 37, columns)
    rows, up = rng.standard_normal((2, 2, columns)).astype(np.float32)
    residual = rng.standard_normal((2, 37)).astype(np.float32)
    gate = rng.standard_normal((2, 1)).astype(np.float32)
    shape = LinearShape(columns, 2, ((kind, 37),), LinearInput.SWIGLU, adds=True, is_gated=True)
    out = device.upload(residual)
    inputs = LinearInputs(x=device.upload(rows), up=device.upload(up), gate=device.upload(gate))
    DecodeLinear(device, shape).launch([device.upload(weights.packed)], [out], inputs)
    wide = rows.astype(np.float64)
    activated = wide / (1 + np.exp(-wide)) * up
    if kind is not F32:
        activated = as_int8_rows(activated.astype(np.float32)).values
    wanted = residual + activated @ weights.values.T / (1 + np.exp(-gate.astype(np.float64)))
    assert relative_error(out, wanted) < 3e-6


@pytest.mark.parametrize(("kind", "columns", "num_tokens"), [(Q5_0, 96, 8), (Q4_K, 1024, 1)])
def test_int8_rows_and_a_residual(
    device: EmulatedDevice, kind: TensorType, columns: int, num_tokens: int
) -> None:
    rng = np.random.default_rng(columns)
    weights = random_weights(rng, kind, 37, columns)
    rows = as_int8_rows(random_rows(rng, num_tokens, columns))
    residual = random_rows(rng, num_tokens, 37)
    linear = DecodeLinear(
        device, LinearShape(columns, num_tokens, ((kind, 37),), LinearInput.QUANTISED, adds=True)
    )
    out = device.upload(residual)
    inputs = LinearInputs(quants=device.upload(rows.quants), meta=device.upload(rows.meta))
    linear.launch([device.upload(weights.packed)], [out], inputs)
    product = rows.values @ weights.values.T
    assert np.abs(out - (residual + product)).max() < 1e-6 * np.abs(product).max()


def test_types_that_are_unpacked_differently(backward_device: EmulatedDevice) -> None:
    device, rng = backward_device, np.random.default_rng(2)
    matrices = ((Q2_K, 5), (Q8_0, 18), (NVFP4, 4), (BF16, 3))
    weights = [random_weights(rng, kind, rows, 256) for kind, rows in matrices]
    x = random_rows(rng, 2, 256)
    linear = DecodeLinear(device, LinearShape(256, 2, matrices, LinearInput.PLAIN))
    out = launch(device, linear, weights, LinearInputs(x=device.upload(x)))
    quantised = as_int8_rows(x).values
    for given, of, (kind, _) in zip(out, weights, matrices, strict=True):
        wanted = (x.astype(np.float64) if kind is BF16 else quantised) @ of.values.T
        assert relative_error(given, wanted) < 1e-6


def test_a_token_has_the_same_bits_however_many_there_are(backward_device: EmulatedDevice) -> None:
    device, rng = backward_device, np.random.default_rng(4)
    matrices = ((Q4_K, 21), (F32, 6))
    weights = [random_weights(rng, kind, rows, 256) for kind, rows in matrices]
    x, norm_weight = random_rows(rng, 3, 256), device.upload(rng.random(256, np.float32))
    results = []
    for tokens in (slice(0, 3), slice(1, 2)):
        few = x[tokens]
        linear = DecodeLinear(device, LinearShape(256, len(few), matrices, LinearInput.NORM))
        inputs = LinearInputs(x=device.upload(few), norm_weight=norm_weight, eps=EPS)
        results.append(launch(device, linear, weights, inputs))
    for several, alone in zip(*results, strict=True):
        np.testing.assert_array_equal(several[1:2], alone)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_token(backward_device: EmulatedDevice, bad: float) -> None:
    device, rng = backward_device, np.random.default_rng(6)
    matrices = ((Q4_K, 21), (F32, 6))
    weights = [random_weights(rng, kind, rows, 256) for kind, rows in matrices]
    x = random_rows(rng, 3, 256)
    x[1, 77] = bad
    linear = DecodeLinear(device, LinearShape(256, 3, matrices, LinearInput.NORM))
    norm_weight = device.upload(np.ones(256, np.float32))
    inputs = LinearInputs(x=device.upload(x), norm_weight=norm_weight, eps=EPS)
    for out in launch(device, linear, weights, inputs):
        assert np.isnan(out[1]).all()
        assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_head_and_the_likeliest_token(device: EmulatedDevice, num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    native = random_weights(rng, Q6_K, 203, 256).native.copy()
    native[150:] = native[20:73]  # whatever is largest is there twice
    native[[3, 200]] = native[50]
    weights = as_weights(native, Q6_K, 256)
    tuning = LinearTuning(
        warps=2, team=4, row_warps=1, team_rows=2, most_deep=1, min_blocks=1, most_blocks=3
    )
    shape = LinearShape(256, num_tokens, ((Q6_K, 203),), LinearInput.PLAIN, has_argmax=True)
    linear = DecodeLinear(device, shape, tuning)
    assert linear.num_blocks == 3
    x = random_rows(rng, num_tokens, 256)
    partials = device.empty((3, num_tokens), np.uint64)
    inputs = LinearInputs(x=device.upload(x))
    (logits,) = launch(device, linear, [weights], inputs, partials=partials)
    assert relative_error(logits, as_int8_rows(x).values @ weights.values.T) < 1e-6

    positions = device.upload(np.arange(7, 7 + num_tokens, dtype=np.int32))
    token_ids = device.empty(num_tokens, np.int32)
    history = device.upload(np.full(9, -7, np.int32))
    sample = ArgmaxLogits(device, num_tokens=num_tokens, advances=True)
    sample.launch(partials, token_ids, positions, history=history)
    argmax = logits.argmax(axis=1)
    np.testing.assert_array_equal(token_ids, argmax)
    np.testing.assert_array_equal(positions, np.arange(8, 8 + num_tokens))
    assert history.tolist() == [-7] * 8 + [argmax[0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_token(bad: float) -> None:
    """Whatever the smallest of its logits is."""
    device, rng = EmulatedDevice(runs_backward=True), np.random.default_rng(8)
    weights = random_weights(rng, F32, 40, 64)
    weights.packed.view(np.float32)[[17, 30], 5] = bad
    shape = LinearShape(64, 1, ((F32, 40),), LinearInput.PLAIN, has_argmax=True)
    linear = DecodeLinear(device, shape)
    partials = device.empty((linear.num_blocks, 1), np.uint64)
    x = device.upload(random_rows(rng, 1, 64))
    (logits,) = launch(device, linear, [weights], LinearInputs(x=x), partials=partials)
    assert np.flatnonzero(~np.isfinite(logits)).tolist() == [17, 30]
    token_ids, positions = device.empty(1, np.int32), device.upload(np.zeros(1, np.int32))
    ArgmaxLogits(device, num_tokens=1, advances=False).launch(partials, token_ids, positions)
    assert token_ids.tolist() == [NOT_FINITE]
    assert positions.tolist() == [0]
    # Where a next step reads it, it is a token.
    history = device.upload(np.full(4, -7, np.int32))
    sample = ArgmaxLogits(device, num_tokens=1, advances=True)
    sample.launch(partials, token_ids, positions, history=history)
    assert 0 <= token_ids[0] < 40
    assert history.tolist() == [-7, NOT_FINITE, -7, -7]


@pytest.mark.parametrize("change", RowChange)
def test_quantising_rows_once(device: EmulatedDevice, change: RowChange) -> None:
    rng = np.random.default_rng(3)
    x = random_rows(rng, 5, 352)
    x[2, 16:32] = 0.0
    x[3] *= np.float32(1e-40)
    sides = new_sides(device, 5, 352)
    norm_weight, factors = rng.random(352, np.float32), rng.random((5, 1), np.float32)
    QuantiseRows(device, columns=352, change=change).launch(
        device.upload(x),
        sides,
        norm_weight=device.upload(norm_weight) if change is RowChange.NORM else None,
        eps=EPS,
        factors=device.upload(factors) if change is RowChange.FACTORS else None,
    )
    if change is RowChange.NORM:
        assert relative_error(sides.values[:3], normalised(x, norm_weight)[:3]) < 3e-7
    else:
        wanted = x * factors if change is RowChange.FACTORS else x
        np.testing.assert_array_equal(sides.values, wanted)
    kept = [0, 1, 2, 4]  # row 3 is too small for a scale, and counts as zero
    rows = as_int8_rows(sides.values[kept])
    np.testing.assert_array_equal(sides.quants[kept, :352], rows.quants[:, :352])
    np.testing.assert_array_equal(sides.meta[kept, :22], rows.meta[:, :22])
    assert not int8_values(sides.quants, sides.meta, 352)[3].any()
    assert not sides.quants[:, 352:].any()
    assert not sides.meta[:, 22:].any()


def test_what_does_not_fit_is_refused() -> None:
    device = EmulatedDevice()
    with pytest.raises(ValueError, match=r"T=9\b.*\b1 .*\b8 tokens"):
        LinearShape(256, 9, ((Q4_K, 8),), LinearInput.NORM)
    with pytest.raises(ValueError, match=r"\b5 matrices\b.*\b4\b"):
        LinearShape(256, 1, ((Q4_K, 8),) * 5, LinearInput.NORM)
    with pytest.raises(ValueError, match=r"layout\b.*IQ1_S"):
        LinearShape(256, 1, ((TensorType.IQ1_S, 8),), LinearInput.NORM)
    with pytest.raises(ValueError, match=r"\b102 columns\b.*\b4\b"):
        LinearShape(102, 1, ((F32, 8),), LinearInput.NORM)
    with pytest.raises(ValueError, match=r"\b8 rows\b.*\b16384\b.*\b196608 bytes"):
        DecodeLinear(device, LinearShape(16384, 8, ((Q4_0, 8),), LinearInput.PLAIN))

    linear = DecodeLinear(device, LinearShape(64, 2, ((Q4_0, 8),), LinearInput.PLAIN))
    weights = device.upload(random_weights(np.random.default_rng(1), Q4_0, 8, 64).packed)
    out, x = device.empty((2, 8), np.float32), device.empty((2, 64), np.float32)
    with pytest.raises(ValueError, match=r"\bx\b.* float32 \[3, 64\].* float32 \[T=2, H=64\]"):
        linear.launch([weights], [out], LinearInputs(x=device.empty((3, 64), np.float32)))
    with pytest.raises(ValueError, match=r"\bx\b.* float64"):
        linear.launch([weights], [out], LinearInputs(x=device.empty((2, 64), np.float64)))
    with pytest.raises(ValueError, match=r"\bx\b.* missing"):
        linear.launch([weights], [out], LinearInputs())
    with pytest.raises(ValueError, match=r"weights\[0\].* uint8 \[7, 48\].*\b384 bytes"):
        linear.launch([weights[:7]], [out], LinearInputs(x=x))
    with pytest.raises(ValueError, match=r"\b1 weights\b.*\b2 outputs\b.* 1\b"):
        linear.launch([weights], [out, out], LinearInputs(x=x))


def router_weights(kind: TensorType, num_experts: int, columns: int = 96) -> Weights:
    """Random, but for two experts whose logits are equal."""
    native = random_weights(np.random.default_rng(1), kind, num_experts, columns).native.copy()
    native[num_experts - 2] = native[2]
    return as_weights(native, kind, columns)


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
        *((F32, 12, 3, 96), (BF16, 33, 8, 2080)),
        pytest.param(F16, 40, 1, 96, marks=pytest.mark.slow),
    ],
)
def test_logits_and_the_rows_beside_them(
    device: EmulatedDevice, kind: TensorType, num_experts: int, num_tokens: int, columns: int
) -> None:
    weights = router_weights(kind, num_experts, columns)
    x = random_rows(np.random.default_rng(num_tokens), num_tokens, columns)
    norm_weight = np.random.default_rng(2).random(columns, np.float32)
    sides = new_sides(device, num_tokens, columns)
    logits = logits_of(device, weights, kind, x, norm_weight, sides)
    wanted = normalised(x, norm_weight)
    assert relative_error(logits, wanted @ weights.values.T) < 1e-6
    np.testing.assert_array_equal(logits[:, 2], logits[:, num_experts - 2])
    assert relative_error(sides.values, wanted) < 3e-7
    assert_int8(sides, columns)


@pytest.mark.parametrize("lanes", [32, 64])
def test_a_token_has_the_same_router_logits_however_many_there_are(lanes: int) -> None:
    device = EmulatedDevice(lanes=lanes, runs_backward=True)
    weights, x, ones = (
        router_weights(F32, 12),
        random_rows(np.random.default_rng(3), 3, 96),
        np.ones(96, np.float32),
    )
    together = logits_of(device, weights, F32, x, ones)
    x[0, 5] = np.nan
    np.testing.assert_array_equal(logits_of(device, weights, F32, x[1:2], ones), together[1:2])
    beside_nan = logits_of(device, weights, F32, x, ones)
    assert np.isnan(beside_nan[0]).all()
    np.testing.assert_array_equal(beside_nan[1:], together[1:])


def test_routers_that_do_not_fit_are_refused() -> None:
    assert not is_float_router(TensorType.Q8_0, 96)
    assert not is_float_router(F32, 100)
    with pytest.raises(ValueError, match=r"router\b.*\b100\b.* F32"):
        RouterShape(1, 8, 100, F32)
    with pytest.raises(ValueError, match=r"T=9\b.*\b1 .*\b8 tokens"):
        RouterShape(9, 8, 96, F32)
    device = EmulatedDevice()
    weights = router_weights(F32, 12)
    with pytest.raises(ValueError, match="norm_weight"):
        logits_of(
            device,
            weights,
            F32,
            random_rows(np.random.default_rng(3), 3, 96),
            np.ones(95, np.float32),
        )
