"""Payload types: the element types of hidden rows and sums in a message, and conversions.

==========  ========================  ====================================
negotiated  hidden rows of a request  sums of a reply
==========  ========================  ====================================
``f32``     float32                   float64: exact, bits never change
``f16``     float16, else float32     float16, else float64
``bf16``    bfloat16, else float32    bfloat16, else float64
==========  ========================  ====================================

"Else": a message with a finite value that overflows the narrow type is sent in the wide type. Its
other values are rounded to the narrow type all the same: the result of a row must not depend on how
a batch is sliced. NaN and infinity are preserved.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dflash_protocol.ids import AnyArray, F32Array, F64Array

V = TypeVar("V", F32Array, F64Array)
E = TypeVar("E", np.float32, np.float64)

U16Array: TypeAlias = npt.NDArray[np.uint16]


class PayloadType(StrEnum):
    """Element type of an array on the wire; `num_bytes` is the size of an element."""

    F64 = "f64", 8
    F32 = "f32", 4
    F16 = "f16", 2
    BF16 = "bf16", 2

    num_bytes: int

    def __new__(cls, name: str, num_bytes: int = 0) -> PayloadType:
        member = str.__new__(cls, name)
        member._value_ = name
        member.num_bytes = num_bytes
        return member


NEGOTIABLE = (PayloadType.F32, PayloadType.F16, PayloadType.BF16)
"""Types that a parent may request. With float32 rows, sums travel as float64."""


def pack(values: V, negotiated: PayloadType) -> tuple[AnyArray, PayloadType]:
    """Convert rows (float32) or sums (float64) to the negotiated type; also returns the type.

    If that is f32, or a finite value would overflow, the type is theirs: f32 or f64. What need not
    be converted is not copied. Shapes: values and result [T, H].
    """
    wide = PayloadType.F32 if values.dtype == np.float32 else PayloadType.F64
    if negotiated is PayloadType.F32:
        return values, wide
    packed = _to_f16(values) if negotiated is PayloadType.F16 else to_bf16(values)
    rounded = _from_bits(packed, negotiated)
    overflows = np.isinf(rounded)
    if overflows.any():
        overflows &= np.isfinite(values)
        if overflows.any():
            return np.where(overflows, values, rounded.astype(values.dtype)), wide
    return packed, negotiated


def unpack(
    frame: memoryview, payload: PayloadType, *, shape: tuple[int, int], element: type[E]
) -> npt.NDArray[E]:
    """Rows or sums of a frame, whose length the caller has checked, as float32 or float64; a view
    of it if they travelled as that type. Shapes: result [T, H], which is `shape`.
    """
    if payload.num_bytes > 2:
        return np.frombuffer(frame, element).reshape(shape)
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        wide = _from_bits(np.frombuffer(frame, "<u2"), payload).astype(element, copy=False)
    return wide.reshape(shape)


def are_finite(sums: F64Array) -> bool:
    """Whether all are finite. Shapes: any."""
    return bool(np.isfinite(sums).all())


def as_received(values: V, negotiated: PayloadType) -> V:
    """Hidden rows or sums as the peer decodes them, with the wire type's rounding. Shapes: any."""
    if negotiated is PayloadType.F32:
        return values
    packed, sent_as = pack(values, negotiated)
    received: AnyArray = packed if sent_as is not negotiated else _from_bits(packed, negotiated)
    return received.astype(values.dtype)


def is_widened(sent: PayloadType, negotiated: PayloadType) -> bool:
    """Whether a message was sent in the wide type because the negotiated one would overflow."""
    return negotiated is not PayloadType.F32 and sent is not negotiated


def _to_f16(values: npt.NDArray[Any]) -> U16Array:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype("<f2").view("<u2")


def to_bf16(values: npt.NDArray[Any]) -> U16Array:
    """Numbers rounded to bfloat16, the nearest, of two the even one. Shapes: as `values`."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    is_nan = (bits & 0x7FFF_FFFF) > 0x7F80_0000
    upper = bits >> 16
    rounded = (bits + (upper & 1) + 0x7FFF) >> 16
    # A NaN's mantissa bits may all be in the lower half, and rounding may carry into the sign.
    return np.where(is_nan, upper | 0x40, rounded).astype("<u2")


def _from_bits(bits: U16Array, payload: PayloadType) -> F32Array:
    if payload is PayloadType.F16:
        with np.errstate(invalid="ignore"):
            return bits.view("<f2").astype(np.float32)
    return (bits.astype("<u4") << 16).view("<f4")
