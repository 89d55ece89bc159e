"""Grammars of clients are compiled in a process that can be killed, before ours does it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from dflash_adapters.text.grammar import GrammarKind, GrammarSource
from dflash_protocol.errors import GrammarError, RenderingUnavailable
from dflash_runtime.engine import chat_renderer, grammar_trials
from dflash_runtime.engine.grammar_trials import GrammarTrials

GOOD = GrammarSource(GrammarKind.JSON_SCHEMA, '{"type": "object", "not": {"required": ["a"]}}')
HOSTILE = GrammarSource(GrammarKind.REGEX, "a?" * 120_000)
"""Compiling it takes minutes, though the compiler counts its work."""


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    trials = GrammarTrials()
    yield trials
    trials.close()


@pytest.fixture
def children() -> Callable[[], set[int]]:
    """Processes that were started since the test began."""

    def now() -> set[int]:
        return {each.pid for each in psutil.Process().children()}

    before = now()
    return lambda: now() - before


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (GOOD, None),
        (GrammarSource(GrammarKind.REGEX, "a\ud800"), "surrogates"),
        (GrammarSource(GrammarKind.REGEX, "(a"), "regex parse error"),
        (GrammarSource(GrammarKind.GBNF, "root ::= other"), "other"),
        (GrammarSource(GrammarKind.JSON_SCHEMA, '{"$ref": "#/a"}'), "/a"),
        (GrammarSource(GrammarKind.CHOICE, json.dumps(["yes", "ü"])), None),
        (GrammarSource(GrammarKind.JSON_SCHEMA, "{}", space="("), "regex parse error"),
    ],
    ids=repr,
)
def test_a_grammar_is_refused_as_in_our_own_process(
    trials: GrammarTrials, source: GrammarSource, reason: str | None
) -> None:
    if reason is None:
        trials.check(source)
        return
    with pytest.raises(GrammarError, match=reason):
        trials.check(source)


def test_one_that_takes_minutes_is_ended_and_the_next_is_served(
    trials: GrammarTrials, children: Callable[[], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trials, "LONGEST_S", 0.5)
    monkeypatch.setattr(chat_renderer, "LATE_S", 0.1)
    trials.start()
    [pid] = children()
    with pytest.raises(GrammarError, match=r"more than 0\.5 s"):
        trials.check(HOSTILE)
    assert not psutil.pid_exists(pid)
    started_s = time.process_time()
    with pytest.raises(GrammarError, match=r"more than 0\.5 s"):
        trials.check(HOSTILE)
    assert not children()  # as what was found is kept
    assert time.process_time() - started_s < 0.5
    monkeypatch.undo()
    trials.check(GOOD)


def test_the_kernel_ends_one_that_takes_the_processors_time(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trials, "LONGEST_S", 600.0)  # ours; the process has its own
    with pytest.raises(GrammarError, match="too much of the processor's time"):
        trials.check(HOSTILE)


def test_one_that_was_killed_while_idle_is_replaced(
    trials: GrammarTrials, children: Callable[[], set[int]]
) -> None:
    trials.start()
    [pid] = children()
    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).wait()
    trials.check(GOOD)
    assert pid not in children()


def test_closing_ends_a_trial(trials: GrammarTrials, children: Callable[[], set[int]]) -> None:
    raised = list[BaseException]()

    def check() -> None:
        try:
            trials.check(HOSTILE)
        except BaseException as error:
            raised.append(error)

    trials.start()
    thread = threading.Thread(target=check)
    thread.start()
    time.sleep(0.3)
    trials.close()
    thread.join()
    assert [type(each) for each in raised] == [RenderingUnavailable]
    assert not children()
    with pytest.raises(RenderingUnavailable):
        trials.check(GOOD)
    trials.close()


@pytest.mark.parametrize("command", [["/nowhere"], ["/bin/false"]], ids=str)
def test_one_that_cannot_be_started_is_no_fault_of_the_grammar(command: list[str]) -> None:
    trials = GrammarTrials(command)
    with pytest.raises(RenderingUnavailable, match="grammars"):
        trials.check(GOOD)
    trials.close()
