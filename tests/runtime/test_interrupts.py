"""Ctrl-C is held back where it must be, and comes once where that is enough."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from dflash_runtime import interrupts
from dflash_runtime.interrupts import interrupt_once, uninterrupted


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_waits_for_the_end() -> None:
    steps: list[str] = []

    def do_something() -> None:
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                steps.append("went on")
            steps.append("and on")
        steps.append("never")

    with pytest.raises(KeyboardInterrupt):
        do_something()
    assert steps == ["went on", "and on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_fails_within_is_told_beside_the_interrupt() -> None:
    def fail() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise KeyError("a layer")

    with pytest.raises(KeyboardInterrupt) as raised:
        fail()
    assert isinstance(raised.value.__context__, KeyError)


def test_other_threads_change_nothing() -> None:
    handlers: list[object] = []

    def look() -> None:
        with uninterrupted():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_once_is_enough_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_once()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(interrupts, "_REPEAT_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_where_it_is_ignored_it_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt_once()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
