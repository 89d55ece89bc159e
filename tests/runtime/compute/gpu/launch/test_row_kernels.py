"""Gates, SwiGLU, biases, factors, columns and sums on a device, against float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from dflash_adapters.layers import Gate
from dflash_protocol.ids import F32Array, F64Array
from dflash_runtime.compute.gpu.launch.row_kernels import ColumnsOf, Elementwise
from support.emulated_device import EmulatedDevice

TOKENS, HEADS, DIM = 3, 4, 70
"""More elements than a block has threads, and no multiple of them."""


@pytest.fixture(params=[(32, False), (64, True)], ids=str)
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    lanes, runs_backward = request.param
    return EmulatedDevice(lanes=lanes, runs_backward=runs_backward)


def rows(seed: int, *shape: int) -> F32Array:
    return (4 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


FUNCTIONS: dict[Gate, Callable[[F64Array], F64Array]] = {
    Gate.SIGMOID: lambda g: 1 / (1 + np.exp(-g)),
    Gate.SILU: lambda g: g / (1 + np.exp(-g)),
    Gate.SOFTPLUS: lambda g: np.logaddexp(0, g),
}


def assert_close(found: npt.NDArray[np.float32], wanted: F64Array) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.wide(2)
@pytest.mark.parametrize("kind", Gate)
@pytest.mark.parametrize("num_gates", [1, HEADS, HEADS * DIM])
def test_rows_are_gated_as_wholes_by_head_or_element(
    device: EmulatedDevice, kind: Gate, num_gates: int
) -> None:
    x, gate = rows(1, TOKENS, HEADS * DIM), rows(2, TOKENS, num_gates)
    gate[0, 0], gate[1, 0] = 90.0, -90.0  # overflow nothing
    out = device.upload(x)
    Elementwise(device).gated(out, ColumnsOf.whole(device.upload(gate)), kind, out)
    factors = FUNCTIONS[kind](gate.astype(np.float64))
    assert_close(out, x * factors.repeat(HEADS * DIM // num_gates, axis=1))


def test_a_gate_may_lie_between_other_columns(device: EmulatedDevice) -> None:
    x, both = rows(1, TOKENS, HEADS * DIM), rows(2, TOKENS, HEADS * 2 * DIM)
    out = device.empty(x.shape, np.float32)
    of = ColumnsOf(device.upload(both), HEADS, DIM, 2 * DIM)
    elementwise = Elementwise(device)
    elementwise.gated(device.upload(x), of, Gate.SIGMOID, out)
    gate = both.reshape(TOKENS, HEADS, 2 * DIM)[:, :, DIM:].reshape(x.shape)
    assert_close(out, x * FUNCTIONS[Gate.SIGMOID](gate.astype(np.float64)))
    elementwise.take_columns(of, out)
    np.testing.assert_array_equal(out, gate)


def test_swiglu_biases_and_factors(device: EmulatedDevice) -> None:
    x, y = rows(1, TOKENS, DIM), rows(2, TOKENS, DIM)
    bias, factors = rows(3, DIM), rows(4, TOKENS, 1)
    elementwise = Elementwise(device)
    ours, out = device.upload(x), device.empty(x.shape, np.float32)
    elementwise.swiglu(ours, device.upload(y), out)
    assert_close(out, FUNCTIONS[Gate.SILU](x.astype(np.float64)) * y)
    elementwise.add_bias(ours, device.upload(bias), out)
    np.testing.assert_array_equal(out, x + bias)
    elementwise.scale_rows(ours, device.upload(factors), ours)
    np.testing.assert_array_equal(ours, x * factors)
    elementwise.scale_rows(ours, 0.1, out)
    np.testing.assert_array_equal(out, x * factors * np.float32(0.1))


def test_what_does_not_fit_is_refused(device: EmulatedDevice) -> None:
    elementwise = Elementwise(device)
    x = device.upload(rows(1, TOKENS, HEADS * DIM))
    gate = ColumnsOf.whole(device.upload(rows(2, TOKENS, 3)))
    with pytest.raises(ValueError, match=r"gate\b.*\[3, 3\].*\(3, 280\)"):
        elementwise.gated(x, gate, Gate.SILU, x)
    with pytest.raises(ValueError, match=r"columns 3\b.*\b90\b.*\b4 heads\b.*\b280\b"):
        elementwise.take_columns(ColumnsOf(x, HEADS, 3, 90), x)
    with pytest.raises(ValueError, match=r"\bup\b.* float32"):
        elementwise.swiglu(x, x[:2], x)


@pytest.mark.parametrize("has_more", [False, True])
def test_sums_are_rounded_once_and_added_to_the_residual(
    device: EmulatedDevice, has_more: bool
) -> None:
    rng = np.random.default_rng(1)
    residual = rng.standard_normal((TOKENS, 100)).astype(np.float32)
    sums, more = rng.standard_normal((TOKENS, 100)), rng.standard_normal((TOKENS, 100))
    out = device.upload(residual)
    Elementwise(device).add_sums(
        out, device.upload(sums), device.upload(more) if has_more else None
    )
    wanted = residual + (sums + more if has_more else sums).astype(np.float32)
    np.testing.assert_array_equal(out, wanted)


def test_rows_are_added_in_place_or_elsewhere(device: EmulatedDevice) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((2, TOKENS, 100)).astype(np.float32)
    add = Elementwise(device).add_rows
    ours, theirs, out = device.upload(x), device.upload(y), device.empty((TOKENS, 100), np.float32)
    add(ours, theirs, out)
    np.testing.assert_array_equal(out, x + y)
    add(ours, theirs, ours)
    np.testing.assert_array_equal(ours, x + y)
    with pytest.raises(ValueError, match=r"\by\b.* float32"):
        add(ours, theirs[:2], out)
