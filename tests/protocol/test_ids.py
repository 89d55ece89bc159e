"""The vocabulary: what travels by value keeps its value."""

from __future__ import annotations

from dflash_protocol.ids import ExpertKey, Phase


def test_expert_key_is_equal_by_its_numbers_and_orders_by_layer() -> None:
    assert ExpertKey(2, 7) == ExpertKey(layer_id=2, global_expert_id=7)
    assert sorted([ExpertKey(1, 0), ExpertKey(0, 9)]) == [ExpertKey(0, 9), ExpertKey(1, 0)]
    assert len({ExpertKey(1, 2), ExpertKey(1, 2), ExpertKey(2, 1)}) == 2


def test_phases_travel_by_these_names() -> None:
    assert [phase.value for phase in Phase] == ["prefill", "decode", "verify"]
    assert Phase("decode") is Phase.DECODE
