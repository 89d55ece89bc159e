"""The vocabulary: what travels by value keeps its value."""

from __future__ import annotations

from dflash_protocol.ids import Phase


def test_phases_travel_by_these_names() -> None:
    assert [phase.value for phase in Phase] == ["prefill", "decode", "verify"]
    assert Phase("decode") is Phase.DECODE
