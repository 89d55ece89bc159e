"""What was measured, and what service says of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_runtime.placement.box import AskedSpeed, Curve

BEYOND = Curve(((1e6, 50e-6), (8e6, 260e-6)))
COMPUTING = Curve(((1.5e6, 40e-6), (8e6, 240e-6)))


def test_asked_experts_take_what_they_took_in_service() -> None:
    served = AskedSpeed(BEYOND, COMPUTING).as_served(8e6, 300e-6)
    assert served.computing.at(8e6) == pytest.approx(300e-6)
    assert served.computing.at(1.5e6) == pytest.approx(50e-6)
    assert served.beyond.at(8e6) == pytest.approx(260e-6 + 60e-6)
    assert served.beyond.at(1e6) == pytest.approx(50e-6 + COMPUTING.at(1e6) / 4)
    again = served.as_served(8e6, 300e-6)
    assert again.beyond.at(4e6) == pytest.approx(served.beyond.at(4e6))


@given(st.floats(1e5, 1e8), st.floats(0.0, 1.0))
def test_service_is_believed_up_to_a_factor(num_bytes: float, seconds: float) -> None:
    served = AskedSpeed(BEYOND, COMPUTING).as_served(num_bytes, seconds)
    for (amount, before_s), (_, now_s) in zip(BEYOND.points, served.beyond.points, strict=True):
        computing_s = COMPUTING.at(amount)
        assert before_s - computing_s / 2 - 1e-12 <= now_s <= before_s + computing_s + 1e-12
        assert now_s >= 0.0


def test_nothing_is_learnt_where_no_computing_was_counted() -> None:
    speed = AskedSpeed(BEYOND, Curve(((1e6, 0.0),)))
    assert speed.as_served(1e6, 1.0) == speed
