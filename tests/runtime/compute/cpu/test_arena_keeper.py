"""What looks after an arena: memory for other programs, pins, the hottest experts at first."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import pytest

from dflash_runtime.compute.cpu import arena_keeper
from dflash_runtime.compute.cpu.arena_keeper import ArenaKeeper
from dflash_runtime.compute.expert_arena import ArenaOptions, PinStats
from support.processes import wait_until

MIB = 1 << 20
MOST, SPARE = 1000 * MIB, 100 * MIB


@dataclass
class Arena:
    """An arena's sizes, without experts."""

    num_bytes: int = MOST
    most_bytes: int = MOST
    empty_bytes: int = 0
    num_tokens: int = 0
    pins: PinStats = field(default_factory=PinStats)
    calls: list[str] = field(default_factory=list)

    def resize(self, num_bytes: int) -> None:
        self.num_bytes = max(50 * MIB, min(self.most_bytes, num_bytes))

    def pin_hottest(self, num_experts: int) -> None:
        self.pins = PinStats({0: [*range(num_experts)]})

    def read_hottest(self):  # type: ignore[no-untyped-def]
        for index in range(1000):
            self.calls.append(f"read {index}")
            yield


def keeper_of(
    arena: Arena, free_bytes: list[int], *, pins: int = 0, spare_bytes: int = SPARE
) -> ArenaKeeper:
    """`free_bytes`: of the last turn, then of those before, backwards."""
    options = ArenaOptions(MOST, spare_bytes=spare_bytes, pins=pins, pins_after=500)
    return ArenaKeeper(arena, options, free_bytes=free_bytes.pop)  # type: ignore[arg-type]


def test_experts_leave_memory_that_others_need() -> None:
    arena = Arena()
    keeper = keeper_of(arena, [0, 10 * MIB, 60 * MIB])
    keeper.look()
    assert arena.num_bytes == MOST  # half of what is spare is still there
    keeper.look()
    assert arena.num_bytes == MOST - 90 * MIB
    keeper.look()  # not known
    assert arena.num_bytes == MOST - 90 * MIB


def test_memory_that_experts_will_take_is_not_free() -> None:
    arena = Arena(empty_bytes=300 * MIB)
    keeper_of(arena, [200 * MIB]).look()
    assert arena.num_bytes == MOST - 200 * MIB


def test_memory_that_stays_free_is_taken_again(caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(num_bytes=400 * MIB)
    free = [300 * MIB] * 10 + [110 * MIB] + [300 * MIB] * 9
    keeper = keeper_of(arena, free)
    with caplog.at_level(logging.INFO):
        for _ in range(19):
            keeper.look()
            assert arena.num_bytes == 400 * MIB
        keeper.look()
    assert arena.num_bytes == 600 * MIB
    assert caplog.messages == ["experts have 600 MiB of memory, before 400"]


def test_never_more_than_at_first() -> None:
    arena = Arena(num_bytes=MOST - 50 * MIB)
    keeper = keeper_of(arena, [900 * MIB] * 30)
    for _ in range(30):
        keeper.look()
    assert arena.num_bytes == MOST


def test_memory_that_was_asked_for_stays() -> None:
    arena = Arena()
    keeper_of(arena, [], spare_bytes=0).look()
    assert arena.num_bytes == MOST


def test_the_hottest_are_pinned_once_enough_is_known() -> None:
    arena = Arena(num_tokens=499)
    keeper = keeper_of(arena, [200 * MIB] * 3, pins=4)
    keeper.look()
    assert not arena.pins.experts
    arena.num_tokens = 500
    keeper.look()
    assert len(arena.pins.experts[0]) == 4
    arena.pins = PinStats({0: [1]})  # fewer had room
    keeper.look()
    assert len(arena.pins.experts[0]) == 1


def test_pins_are_chosen_anew_where_there_is_less_memory() -> None:
    arena = Arena(num_tokens=500, pins=PinStats({0: [1]}))
    keeper = keeper_of(arena, [10 * MIB, 200 * MIB], pins=4)
    keeper.look()
    assert len(arena.pins.experts[0]) == 1
    keeper.look()
    assert len(arena.pins.experts[0]) == 4


def test_closing_ends_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_keeper, "_BETWEEN_READS_S", 10.0)
    arena = Arena()
    keeper = keeper_of(arena, [])
    keeper.close()  # not started
    keeper = keeper_of(arena, [])
    keeper.start()
    wait_until(lambda: bool(arena.calls), "the first read")
    started_s = time.monotonic()
    keeper.close()
    keeper.close()
    assert time.monotonic() - started_s < 5.0
    assert arena.calls == ["read 0"]


def test_a_thread_looks_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_keeper, "_BETWEEN_READS_S", 0.0)
    monkeypatch.setattr(arena_keeper, "_TURN_S", 0.001)
    arena = Arena(num_tokens=500)
    keeper = keeper_of(arena, [], pins=2, spare_bytes=0)
    keeper.start()
    wait_until(lambda: arena.pins == PinStats({0: [0, 1]}), "pins")
    keeper.close()
    assert len(arena.calls) == 1000
