"""A model larger than memory is opened: with what was counted before, and with settings that it
cannot follow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.cpu.kernels import arena_words as w
from support.arena_rig import check_whole
from support.disk_engines import MANY_LAYERS, arena_of, opened, stats_of
from support.faults import greedy
from support.processes import wait_until
from support.random_models import write_qwen3moe

E, LAYERS = MANY_LAYERS.num_experts, MANY_LAYERS.num_layers
NUM_SLOTS = 3 * E
PROMPT = [5, 9, 2, 40, 7]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_qwen3moe(tmp_path / "m.gguf", MANY_LAYERS, seed=3)


def test_the_hottest_experts_of_before_are_there_soon(path: Path) -> None:
    with opened(path, NUM_SLOTS, heat="auto") as engine:
        expected = greedy(engine, PROMPT, 200)
        counts = np.array([engine.stats().selections[layer] for layer in range(LAYERS)])
    with opened(path, NUM_SLOTS, heat="auto") as engine:
        arena = arena_of(engine)
        # The last ones have their places before they arrive.
        wait_until(
            lambda: arena.empty_bytes == 0 and not arena._words[w.LOCK], "the hottest experts"
        )
        check_whole(arena)
        there = np.array([layer.slot_of >= 0 for layer in arena._layers])
        assert counts[there].sum() > 1.5 * NUM_SLOTS / counts.size * counts.sum()
        assert greedy(engine, PROMPT, 200) == expected
        assert stats_of(engine).failed == 0


def test_without_heat_nothing_is_read_ahead(path: Path) -> None:
    with opened(path, NUM_SLOTS) as engine:
        assert arena_of(engine)._hottest == []


def test_more_pins_than_experts_are_refused(path: Path) -> None:
    with (
        pytest.raises(SettingsError, match=rf"--moe-warmpin {E + 1}: layers have {E} experts"),
        opened(path, NUM_SLOTS, moe_warmpin=E + 1),
    ):
        pass


def test_pins_are_told(path: Path) -> None:
    with opened(path, NUM_SLOTS, moe_warmpin=2, moe_warmpin_after=20) as engine:
        greedy(engine, PROMPT, 40)
        wait_until(lambda: bool(arena_of(engine).pins.experts), "pins")
        pins = stats_of(engine).pins
    assert sum(map(len, pins.experts.values())) == NUM_SLOTS // 2
    assert all(len(each) <= 2 for each in pins.experts.values())
    assert pins.found_before + pins.missed_before > 20 * LAYERS
