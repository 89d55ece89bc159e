"""Angles and temperatures of recorded steps: right for any positions, computed once."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_adapters.rope import AttentionTemperature, RopePairing, RopeTable
from dflash_runtime.compute.cpu.captured import recorder
from dflash_runtime.compute.cpu.captured.recorder import PositionTables
from dflash_runtime.compute.cpu.ops import turns_of

NUM_POSITIONS = 1300
TABLE = RopeTable(next(iter(RopePairing)), 8, 10_000.0 ** -np.linspace(0, 1, 4), 1.25)
TEMPERATURE = AttentionTemperature(100, 0.1)


def test_values_of_the_positions_of_a_step_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    num_computed = 0

    def counted(table: RopeTable, positions: np.ndarray) -> np.ndarray:
        nonlocal num_computed
        num_computed += positions.size
        return turns_of(table, positions)

    monkeypatch.setattr(recorder, "turns_of", counted)
    tables = PositionTables(NUM_POSITIONS)
    angles, factors = tables.angles(TABLE), tables.temperatures(TEMPERATURE)
    everything = np.arange(NUM_POSITIONS, dtype=np.int32)
    expected_angles, expected = turns_of(TABLE, everything), TEMPERATURE.factors(everything)
    for first, end in [(1100, 1101), (508, 516), (0, 1), (1298, 1300), (3, 700)]:
        tables.extend(first, end)
        np.testing.assert_array_equal(angles[:, first:end], expected_angles[:, first:end])
        np.testing.assert_array_equal(factors[first:end], expected[first:end])
        if first == 1100:
            assert num_computed == NUM_POSITIONS - 1024
    assert num_computed == NUM_POSITIONS
