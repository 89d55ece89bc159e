"""What compiled code is told before it asks."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from dflash_runtime.compute.cpu.captured.ask_table import AskTable
from dflash_runtime.compute.cpu.kernels import asked_tasks
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.engine.measuring.no_owners import AskedProcessor


class Beside(AskedProcessor):
    """The processor's experts beside daemons'."""

    asks_daemons = True

    def __init__(self, num_threads: int | None) -> None:
        """`num_threads`: of the daemon; None: it did not say it."""
        super().__init__({}, {})
        self._num_threads = num_threads

    def daemon_threads(self, unknown: int) -> int:
        return unknown if self._num_threads is None else self._num_threads


@pytest.mark.parametrize(
    ("num_daemon_threads", "num_cores", "frees"),
    [(1, 3, False), (1, 2, True), (4, 5, True), (4, 6, False), (None, 3, True), (None, 4, False)],
)
def test_threads_leave_cores_to_daemons_that_need_them(
    num_daemon_threads: int | None, num_cores: int, frees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    with closing(Workers(2)) as workers:
        owners = Beside(num_daemon_threads)
        table = AskTable(owners, hidden_size=64, num_experts_used=2, workers=workers)
        assert bool(table._words[asked_tasks.FREES_CORES]) is frees
        table.close()
