"""What a daemon tells its parents of its device's memory."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_daemon import expert_memory
from dflash_daemon.expert_memory import ExpertMemoryWatch
from dflash_protocol.errors import DeviceUnavailable

STAYS_FREE = 1000


class Host:
    """With memory of which nobody needs `unused`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes, self.unused_bytes, self.now_s = STAYS_FREE, 0, 1000.0
        self.fails, self.is_shared = False, False
        self.backend = SimpleNamespace(device_memory=self._memory)
        self.store = SimpleNamespace(is_kept=False)
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(expert_memory, "time", clock)

    def give_back(self) -> None:
        self.free_bytes += self.unused_bytes
        self.unused_bytes = 0

    def _memory(self) -> tuple[int, int] | None:
        if self.fails:
            raise DeviceUnavailable("it has fallen off the bus")
        return None if self.is_shared else (self.free_bytes, STAYS_FREE)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


@pytest.fixture
def watch(host: Any) -> ExpertMemoryWatch:
    return ExpertMemoryWatch(host)


def test_parents_are_told_what_is_missing_and_what_is_spare(
    host: Host, watch: ExpertMemoryWatch
) -> None:
    assert watch.said_to(1) == (0, 0)
    host.free_bytes = 1750
    watch.look()
    assert watch.said_to(1) == (0, 1000)
    assert watch.said_to(3) == (0, 333)
    host.free_bytes = 500
    watch.look()
    assert watch.said_to(1) == (0, 0)
    host.free_bytes = 499
    for factor in (1, 2, 4, 8, 16, 32, 32):  # as long as others take what is given back
        watch.look()
        assert watch.said_to(1) == (factor * 501, 0)
        assert watch.said_to(0) == watch.said_to(1)
    assert watch.said_to(2) == (16 * 501, 0)
    assert watch.said_to(5) == (-(-32 * 501 // 5), 0)
    watch.forget()
    assert watch.said_to(1) == (0, 0)
    host.free_bytes = 900
    watch.look()
    assert watch.said_to(1) == (0, 150)


def test_what_nobody_needs_goes_first_and_for_a_while_after(
    host: Host, watch: ExpertMemoryWatch
) -> None:
    host.unused_bytes = 700
    watch.look()
    assert host.unused_bytes == 700
    host.free_bytes = 100
    watch.look()
    assert (host.unused_bytes, host.free_bytes) == (0, 800)
    assert watch.said_to(1)[0] == 0
    host.unused_bytes, host.now_s = 10, host.now_s + 59  # a parent has left some meanwhile
    watch.look()
    assert host.free_bytes == 810
    host.unused_bytes, host.now_s = 10, host.now_s + 2
    watch.look()
    assert host.free_bytes == 810


def test_nobody_is_asked_for_experts_that_never_leave(host: Host, watch: ExpertMemoryWatch) -> None:
    host.store.is_kept = True
    host.free_bytes = 0
    watch.look()
    assert watch.said_to(1) == (0, 0)
    host.store.is_kept = False
    host.is_shared = True
    watch.look()
    assert watch.said_to(1) == (0, 0)


def test_a_device_that_fails_and_parents_that_do_not_answer_are_said_once(
    host: Host, watch: ExpertMemoryWatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=expert_memory.__name__)
    host.free_bytes = 0
    watch.look()
    host.fails = True
    watch.look()
    watch.look()
    assert watch.said_to(1) == (0, 0)
    host.fails = False
    for _ in range(30):
        host.now_s += 1
        watch.look()
    assert [each.levelname for each in caplog.records] == ["INFO", "WARNING", "WARNING"]
    host.free_bytes = STAYS_FREE
    watch.look()
    host.free_bytes = 0
    watch.look()
    assert [each.levelname for each in caplog.records[3:]] == ["INFO"]
