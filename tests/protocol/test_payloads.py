"""Payload types: what rounding costs, and that no finite value ever becomes infinite."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import AnyArray
from dflash_protocol.payloads import (
    NEGOTIABLE,
    PayloadType,
    is_widened,
    pack,
    unpack,
)
from support.examples import examples

NARROW = [PayloadType.F16, PayloadType.BF16]
ULP = {PayloadType.F16: 2.0**-11, PayloadType.BF16: 2.0**-8 * (1.0 + 2.0**-15)}
"""Largest relative error of a value that the type holds as a normal number. Sums in bfloat16 are
rounded twice, to float32 first."""
SMALLEST_NORMAL = {PayloadType.F16: 2.0**-14, PayloadType.BF16: 2.0**-126}
LARGEST = {PayloadType.F16: 65504.0, PayloadType.BF16: 255.0 * 2.0**120}

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def there_and_back(values: AnyArray, payload: PayloadType) -> tuple[AnyArray, PayloadType]:
    """Rows [T, H] float32 or sums [T, H] float64 as the other side gets them."""
    packed, sent_as = pack(values, payload)
    frame = memoryview(packed.tobytes())
    assert len(frame) == sent_as.num_bytes * values.size
    received = unpack(frame, sent_as, shape=values.shape, element=values.dtype.type)
    assert (received.dtype, received.shape) == (values.dtype, values.shape)
    return received, sent_as


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_f32_keeps_every_bit_in_both_directions(dtype: type) -> None:
    rows: AnyArray = np.array([[1.0, -0.0, np.pi], [np.inf, 1e-45, 3e38]], dtype=dtype)
    received, sent_as = there_and_back(rows, PayloadType.F32)
    assert received.tobytes() == rows.tobytes()
    assert sent_as is (PayloadType.F32 if dtype is np.float32 else PayloadType.F64)
    assert not is_widened(sent_as, PayloadType.F32)


@pytest.mark.parametrize("payload", NARROW)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@examples(150)
@given(st.data())
def test_rounding_stays_within_half_a_unit_in_the_last_place(
    payload: PayloadType, dtype: type, data: st.DataObject
) -> None:
    largest = LARGEST[payload]
    values = data.draw(
        st.lists(st.floats(-largest, largest, width=32), min_size=1, max_size=20), label="values"
    )
    rows: AnyArray = np.array([values], dtype=dtype)
    received, sent_as = there_and_back(rows, payload)
    assert sent_as is payload
    for value, got in zip(values, received[0].tolist(), strict=True):
        error = abs(Fraction(got) - Fraction(value))
        bound = ULP[payload] * max(abs(value), SMALLEST_NORMAL[payload])
        assert error <= Fraction(bound), (value, got)


@pytest.mark.parametrize("payload", NARROW)
def test_ties_go_to_the_even_neighbour(payload: PayloadType) -> None:
    digits = 10 if payload is PayloadType.F16 else 7
    step = 2.0**-digits
    rows: AnyArray = np.array(
        [[1 + 0.5 * step, 1 + 1.5 * step, -(1 + 0.5 * step)]], dtype=np.float32
    )
    received, _ = there_and_back(rows, payload)
    assert received.tolist() == [[1.0, 1 + 2 * step, -1.0]]


@pytest.mark.parametrize("payload", NARROW)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@examples(100)
@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_what_is_finite_stays_finite_and_nan_and_infinity_survive(
    payload: PayloadType, dtype: type, values: list[float]
) -> None:
    rows: AnyArray = np.array([values], dtype=dtype)
    received, sent_as = there_and_back(rows, payload)
    np.testing.assert_array_equal(np.isnan(received), np.isnan(rows))
    np.testing.assert_array_equal(np.isinf(received), np.isinf(rows))
    np.testing.assert_array_equal(np.sign(received[np.isinf(rows)]), np.sign(rows[np.isinf(rows)]))
    if payload is PayloadType.F16:
        finite = rows[np.isfinite(rows)]
        assert is_widened(sent_as, payload) == bool((np.abs(finite) >= 65520.0).any())


@pytest.mark.parametrize(
    "bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000], ids=hex
)
@pytest.mark.parametrize("payload", NARROW)
def test_no_nan_turns_into_something_else(payload: PayloadType, bits: int) -> None:
    rows: AnyArray = np.array([[bits]], dtype=np.uint32).view(np.float32)
    received, sent_as = there_and_back(rows, payload)
    assert sent_as is payload
    assert np.isnan(received).all()


@pytest.mark.parametrize("payload", NARROW)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_value_that_is_too_large_goes_wide_and_is_exact(
    payload: PayloadType, dtype: type
) -> None:
    too_large = 65521.0 if payload is PayloadType.F16 else 3.4e38
    rows: AnyArray = np.array([[too_large, np.pi, np.nan, -np.inf]], dtype=dtype)
    received, sent_as = there_and_back(rows, payload)
    assert sent_as is (PayloadType.F32 if dtype is np.float32 else PayloadType.F64)
    assert is_widened(sent_as, payload)
    assert received[0, 0] == rows[0, 0]
    assert received[0, 3] == -np.inf


@pytest.mark.parametrize("payload", NARROW)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@examples(60)
@given(st.lists(FLOATS, min_size=2, max_size=12), st.integers(1, 11))
def test_a_value_arrives_the_same_whatever_it_travels_with(
    payload: PayloadType, dtype: type, values: list[float], cut: int
) -> None:
    """Else the way a batch is cut into messages would show in the result."""
    rows: AnyArray = np.array(values, dtype=dtype).reshape(-1, 1)
    whole, _ = there_and_back(rows, payload)
    parts = [there_and_back(part, payload)[0] for part in (rows[:cut], rows[cut:]) if part.size]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("payload", NEGOTIABLE)
def test_no_rows_are_legal(payload: PayloadType) -> None:
    for dtype in (np.float32, np.float64):
        received, sent_as = there_and_back(np.zeros((0, 3), dtype=dtype), payload)
        assert received.shape == (0, 3)
        assert not is_widened(sent_as, payload)


def test_sums_above_float32_go_wide_in_bf16() -> None:
    rows: AnyArray = np.array([[1e300, 1.0]])
    received, sent_as = there_and_back(rows, PayloadType.BF16)
    assert sent_as is PayloadType.F64
    assert received.tolist() == rows.tolist()
