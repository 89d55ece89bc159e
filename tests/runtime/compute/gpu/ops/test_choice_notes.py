"""Choices of captured passes: rows by position, which later ones replace."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dflash_adapters.routing import Gating, RoutingRule
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.ops.choice_notes import ChoiceNotes, ChoiceRows, downloaded
from dflash_runtime.compute.gpu.ops.kernels import ExpertChoice
from support.emulated_device import EmulatedDevice

USED = 3, 70, 1
"""Of each layer: more than a block has threads, too."""


@pytest.fixture(params=[(32, False), (64, True)], ids=str)
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    lanes, runs_backward = request.param
    return EmulatedDevice(lanes=lanes, runs_backward=runs_backward)


def rows_of(device: EmulatedDevice, num_positions: int) -> ChoiceRows:
    return ChoiceRows(
        device, num_layers=len(USED), num_columns=sum(USED), num_positions=num_positions
    )


def choices_of(device: EmulatedDevice, ids: I32Array) -> list[ExpertChoice]:
    """Shapes: ids [T, K of all layers]."""
    ends = np.cumsum(USED)
    return [
        ExpertChoice(
            device.upload(np.ascontiguousarray(ids[:, end - used : end])),
            device.empty((len(ids), used), np.float32),
            RoutingRule(used, Gating.SOFTMAX, normalise=True),
        )
        for used, end in zip(USED, ends.tolist(), strict=True)
    ]


def random_ids(seed: int, num_tokens: int) -> I32Array:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 16, (num_tokens, sum(USED)), np.int32)


def test_rows_are_the_choices_of_steps_by_position(device: EmulatedDevice) -> None:
    rows, ids = rows_of(device, 5), random_ids(1, 13)
    choices = choices_of(device, ids[:1])
    table, position = rows.new_table(), device.zeros(1, np.int32)
    for step in range(13):  # as a captured step: the same arrays each time
        ends = np.cumsum([0, *USED]).tolist()
        for choice, (first, end) in zip(choices, pairwise(ends), strict=True):
            device.write(choice.ids, np.ascontiguousarray(ids[step : step + 1, first:end]))
        device.write(position, np.array([step], np.int32))
        rows.append(choices, table, position=position)
        for count in range(1, min(step + 1, 5) + 1):
            first = step + 1 - count
            np.testing.assert_array_equal(rows.of_steps(first, count), ids[first : step + 1])


def test_a_trees_choices_are_rows_of_their_own(device: EmulatedDevice) -> None:
    rows, ids = rows_of(device, 5), random_ids(2, 8)
    rows.last_tree = rows.new_rows(8)
    choices = choices_of(device, ids)
    rows.append(choices, rows.new_table(), rows=rows.last_tree)
    np.testing.assert_array_equal(rows.of_tree(8), ids)
    np.testing.assert_array_equal(rows.of_tree(3), ids[:3])
    assert not rows.of_steps(0, 5).any()
    np.testing.assert_array_equal(downloaded(device, choices), ids)


def test_a_capture_with_other_arrays_than_its_trial_is_refused(device: EmulatedDevice) -> None:
    rows = rows_of(device, 5)
    first, second = (choices_of(device, random_ids(3, 1)) for _ in range(2))
    table, position = rows.new_table(), device.zeros(1, np.int32)
    rows.append(first, table, position=position)
    rows.append(first, table, position=position)
    with pytest.raises(RuntimeError, match="elsewhere than its trial"):
        rows.append(second, table, position=position)


def test_choices_are_noted_between_begin_and_end(device: EmulatedDevice) -> None:
    notes = ChoiceNotes()
    first, second, third = choices_of(device, random_ids(4, 1))
    assert notes.add(first) is first
    assert notes.end() == []
    notes.begin()
    notes.add(second)
    notes.add(third)
    assert notes.end() == [second, third]
    notes.add(first)
    assert notes.end() == []
