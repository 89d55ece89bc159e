"""Choosing an execution mode: the faster one is found, kept, and never costs much to doubt."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dflash_runtime.experts.remote.pieces import ExecutionMode, ModeChooser

BATCHED, STREAM = ExecutionMode.BATCHED, ExecutionMode.STREAM
PAIRS = 1000


class World:
    """Batches that take as long as `cost_s` says, with some noise."""

    def __init__(self, cost_s: Callable[[ExecutionMode], float], *, noise: float = 0.02) -> None:
        self.chooser = ModeChooser()
        self.cost_s = cost_s
        self.spent_s = 0.0
        self.modes: list[ExecutionMode] = []
        self._noise = noise
        self._random = random.Random(7)

    def run(self, num_batches: int) -> None:
        for _ in range(num_batches):
            mode = self.chooser.next_mode()
            elapsed_s = self.cost_s(mode) * (1 + self._noise * self._random.random())
            self.chooser.note(mode, elapsed_s=elapsed_s, num_pairs=PAIRS)
            self.modes.append(mode)
            self.spent_s += elapsed_s


def test_both_are_tried_in_turn_before_one_is_kept() -> None:
    world = World({BATCHED: 0.01, STREAM: 0.02}.__getitem__)
    world.run(12)
    assert world.modes == [BATCHED, STREAM] * 2 + [BATCHED] * 8


@pytest.mark.parametrize("slower", [BATCHED, STREAM])
@pytest.mark.parametrize("factor", [1.2, 3.0, 30.0])
def test_doubts_cost_less_than_three_percent(slower: ExecutionMode, factor: float) -> None:
    world = World(lambda mode: 0.01 * (factor if mode is slower else 1.0))
    world.run(4)
    world.spent_s = 0.0
    world.run(2000)
    assert world.spent_s < 0.01 * 2000 * 1.03 * 1.02
    assert world.modes.count(slower) >= 3, "it is tried again now and then"


def test_a_change_is_noticed() -> None:
    costs = {BATCHED: 0.01, STREAM: 0.02}
    world = World(costs.__getitem__)
    world.run(200)
    assert world.chooser.favourite is BATCHED
    costs[BATCHED] = 0.05
    world.run(200)
    assert world.chooser.favourite is STREAM
    assert world.modes[-20:].count(STREAM) >= 19


def test_equal_modes_stay_near_either() -> None:
    world = World(lambda mode: 0.01, noise=0.2)
    world.run(500)
    assert world.spent_s < 0.01 * 500 * 1.2


def test_streaming_is_given_up_only_once_it_can_be_compared() -> None:
    chooser = ModeChooser()
    assert chooser.stream_limit_s() is None
    chooser.note(BATCHED, elapsed_s=0.01, num_pairs=PAIRS)
    limit_s = chooser.stream_limit_s()
    assert limit_s is not None
    assert 1.2e-5 < limit_s < 2e-5
