"""The thread of an engine goes on whatever happens between two jobs."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime import Engine
from dflash_runtime.engine import engine_thread
from dflash_runtime.engine.engine_thread import EngineThread

WITHIN_S = 20.0


class FailingEngine:
    """An engine whose device has failed."""

    tokenizer = None

    def __enter__(self) -> FailingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def move_experts(self) -> None:
        pass


class Runner:
    """Its rests fail."""

    def __init__(self) -> None:
        self.has_rested, self.has_run = threading.Event(), threading.Event()

    def begin(self, engine: Engine) -> None:
        pass

    def run(self, engine: Engine, job: str) -> None:
        self.has_run.set()

    def rest(self, engine: Engine) -> None:
        self.has_rested.set()
        raise DeviceUnavailable("cuda:0 has failed")


def test_a_rest_that_fails_is_logged_and_jobs_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_thread, "REST_S", 0.01)
    runner, failing = Runner(), cast(Any, FailingEngine())
    thread: EngineThread[str] = EngineThread(lambda report: failing, runner, capacity=2)
    thread.start()
    try:
        assert runner.has_rested.wait(WITHIN_S)
        thread.submit("a client", "a job")
        assert runner.has_run.wait(WITHIN_S)
        assert thread.is_alive
    finally:
        thread.stop()
        thread.join()
    assert "work between two requests has failed" in caplog.text
