"""What both transports share: when a request is late, and in which order requests may come."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import ProtocolError
from dflash_protocol.wire.messages import ExpertRequest
from dflash_protocol.wire.transport import ArrivalClock, LinkLimits, ReceivedRequest
from support.examples import examples
from support.routed_batches import batch_of

OFFSETS_S = [0.0, -1e6, 12345.678]
"""How much the receiver's clock is ahead of the sender's."""


@pytest.mark.parametrize("offset_s", OFFSETS_S)
def test_what_lies_beyond_the_least_lag_was_waiting(offset_s: float) -> None:
    clock = ArrivalClock()
    waits = []
    for sent_s, waiting_s in ((0.0, 0.0), (1.0, 0.25), (2.0, 0.0), (2.1, 0.5), (3.0, 0.001)):
        waits.append(clock.waited_s(sent_s, sent_s + 0.01 + waiting_s + offset_s))
    assert waits == pytest.approx([0.0, 0.25, 0.0, 0.5, 0.001], abs=1e-6)


@pytest.mark.parametrize("offset_s", OFFSETS_S)
def test_clocks_that_drift_for_hours_make_nothing_late(offset_s: float) -> None:
    """A thousandth, more than any clock that is kept in order."""
    clock = ArrivalClock()
    sent_s = 0.0
    for gap_s in (0.5,) * 200 + (15.0,) * 50 + (3600.0,) * 3 + (0.5,) * 200:
        sent_s += gap_s
        assert clock.waited_s(sent_s, 1.001 * sent_s + offset_s) <= 0.021


@examples(100)
@given(
    st.lists(
        st.tuples(
            st.floats(allow_nan=False, allow_infinity=False),
            st.floats(min_value=0.0, max_value=1e9),
        ),
        max_size=20,
    )
)
def test_no_stamp_makes_it_fail(stamps: list[tuple[float, float]]) -> None:
    clock = ArrivalClock()
    for sent_s, now_s in sorted(stamps, key=lambda stamp: stamp[1]):
        waited_s = clock.waited_s(sent_s, now_s)
        assert waited_s >= 0.0
        assert not math.isnan(waited_s)


@pytest.mark.parametrize(("waited_s", "is_late"), [(0.0, False), (0.249, False), (0.251, True)])
def test_a_request_is_late_once_its_deadline_has_passed(waited_s: float, is_late: bool) -> None:
    header = ExpertRequest(1, 0, 0, "f32", 250.0)
    assert ReceivedRequest("ab", header, batch_of(0, {}), waited_s).is_late == is_late


def test_sequences_must_ascend() -> None:
    limits = LinkLimits(3, 8, 2, local_ids={0: np.zeros(1, dtype=np.int32)})
    for sequence in (1, 2, 7):
        limits.note_sequence(sequence)
    for sequence in (7, 3, 0):
        with pytest.raises(ProtocolError) as caught:
            limits.note_sequence(sequence)
        assert caught.value.code == "stale"
    assert limits.last_sequence == 7
