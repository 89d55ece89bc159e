"""exp and softplus of 32 lanes, and exp of one number by the same formula.

Exactly rounded IEEE operations alone, as in vectors: the same bits on every CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_runtime.compute.cpu.simd.types import (
    I32,
    emit_constant,
    emit_fma,
    f32,
    floats,
    lanes_of,
    primitive,
)
from dflash_runtime.compute.cpu.simd.untyped import ir

_EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000  # 1.5 * 2^23: adding it rounds to an integer


def _exp(builder: Any, x: Any) -> Any:
    """e^x within 2 ulp: 2^n times a polynomial of the remainder. The same formula for 1 and 32
    lanes.

    Source: Moshier's Cephes library, expf.
    """

    def constant(value: float) -> Any:
        return emit_constant(x.type, _as_float32(value))

    integer = lanes_of(I32) if isinstance(x.type, ir.VectorType) else I32

    # Beyond these the result is 0 or infinite anyway. A NaN passes both comparisons unchanged.
    low, high = constant(-104.0), constant(89.0)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    shifted = emit_fma(builder, x, constant(_LOG2_E), constant(_ROUNDER))
    exponent = builder.sub(builder.bitcast(shifted, integer), emit_constant(integer, _ROUNDER_BITS))
    turns = builder.fsub(shifted, constant(_ROUNDER))
    rest = emit_fma(builder, turns, constant(-_LN2_HIGH), x)
    rest = emit_fma(builder, turns, constant(-_LN2_LOW), rest)
    series = constant(_EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        series = emit_fma(builder, series, rest, constant(coefficient))
    value = emit_fma(builder, series, builder.fmul(rest, rest), rest)
    value = builder.fadd(value, constant(1.0))
    # 2^n in two factors, since it need not be a normal float32.
    half = builder.ashr(exponent, emit_constant(integer, 1))
    for part in (half, builder.sub(exponent, half)):
        bits = builder.shl(
            builder.add(part, emit_constant(integer, 127)), emit_constant(integer, 23)
        )
        value = builder.fmul(value, builder.bitcast(bits, x.type))
    return value


def _as_float32(value: float) -> float:
    return float(np.float32(value))


exp_lanes = primitive(floats, floats)(_exp)
exp_scalar = primitive(f32, f32)(_exp)


_LOG_TERMS = 7


def _softplus(builder: Any, x: Any) -> Any:
    """ln(1 + e^x) within 4 ulp: max(x, 0) + ln(1 + u) of u = e^-|x|, which is at most 1.

    ln(1 + u) = 2 artanh(s) = 2 (s + s^3/3 + s^5/5 + …) with s = u / (2 + u), at most 1/3.
    """

    def constant(value: float) -> Any:
        return emit_constant(x.type, _as_float32(value))

    is_positive = builder.fcmp_ordered(">", x, constant(0.0))
    negated = builder.fsub(constant(0.0), x)
    u = _exp(builder, builder.select(is_positive, negated, x))
    s = builder.fdiv(u, builder.fadd(u, constant(2.0)))
    square = builder.fmul(s, s)
    series = constant(1.0 / (2 * _LOG_TERMS + 1))
    for term in range(_LOG_TERMS - 1, -1, -1):
        series = emit_fma(builder, series, square, constant(1.0 / (2 * term + 1)))
    logarithm = builder.fmul(builder.fadd(s, s), series)
    return builder.fadd(builder.select(is_positive, x, constant(0.0)), logarithm)


softplus_lanes = primitive(floats, floats)(_softplus)
