"""Vector primitives: the same bits in one lane as in 32, and nothing read or written too much."""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import F32Array
from dflash_runtime.compute.cpu.compile.compiling import compile_kernel
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.exponentials import exp_lanes, exp_scalar
from dflash_runtime.compute.cpu.simd.types import f32, i64


def _exp(x: F32Array, by_lanes: F32Array, one_by_one: F32Array) -> None:
    for place in range(0, x.size, 32):
        lanes = exp_lanes(v.load_floats(v.address_of(x) + 4 * place))
        v.store_floats(v.address_of(by_lanes) + 4 * place, lanes)
    for place in range(x.size):
        one_by_one[place] = exp_scalar(x[place])


def _copy(source: F32Array, target: F32Array, count: int) -> None:
    v.store_partial(v.address_of(target), v.load_padded(v.address_of(source), count), 32)


def _copy_part(source: F32Array, target: F32Array, count: int) -> None:
    v.store_partial(v.address_of(target), v.load_floats(v.address_of(source)), count)


def _copy_bytes(source: int, target: int, count: int) -> None:
    v.copy_bytes(target, source, count)


def test_exp_is_accurate_and_the_same_for_one_lane_and_many() -> None:
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 88.72, 88.73, -87.4, -103.9, -200.0]
    x = np.concatenate([np.linspace(-110, 95, 100_000), np.linspace(-1e-3, 1e-3, 988), special])
    x = np.append(x, np.zeros(-x.size % 32)).astype(np.float32)
    by_lanes, one_by_one = np.empty_like(x), np.empty_like(x)
    compile_kernel(_exp, *[f32[::1]] * 3)(x, by_lanes, one_by_one)
    np.testing.assert_array_equal(by_lanes.view(np.uint32), one_by_one.view(np.uint32))
    with np.errstate(over="ignore", under="ignore"):
        exact = np.exp(x.astype(np.float64))
        expected = exact.astype(np.float32)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(by_lanes[~finite], expected[~finite])
    ulps = np.abs(by_lanes[finite].astype(np.float64) - exact[finite])
    assert (ulps <= 2 * np.spacing(expected[finite]).astype(np.float64)).all()


def test_partial_vectors_touch_only_their_lanes() -> None:
    copy, copy_part = (
        compile_kernel(function, f32[::1], f32[::1], i64) for function in (_copy, _copy_part)
    )
    source = np.arange(1, 33, dtype=np.float32)
    for count in (0, 1, 5, 31, 32):
        target = np.full(32, -1, np.float32)
        copy(source, target, count)
        np.testing.assert_array_equal(target, np.where(np.arange(32) < count, source, 0))
        target = np.full(32, -1, np.float32)
        copy_part(source, target, count)
        np.testing.assert_array_equal(target, np.where(np.arange(32) < count, source, -1))


def test_copied_bytes_are_those_and_no_others() -> None:
    copy = compile_kernel(_copy_bytes, i64, i64, i64)
    source = np.random.default_rng(0).integers(0, 255, 300, dtype=np.uint8)
    for count in (*range(131), 256, 257, 290):
        target = np.full(300, 255, np.uint8)
        copy(source[3:].ctypes.data, target[5:].ctypes.data, count)
        expected = np.full(300, 255, np.uint8)
        expected[5 : 5 + count] = source[3 : 3 + count]
        np.testing.assert_array_equal(target, expected)
