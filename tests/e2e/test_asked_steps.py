"""Decode steps whose experts compiled code asks daemons for: the same tokens and counts as through
the host, also when a daemon is killed or stopped within a step, or the user interrupts a wait."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_protocol.ids import Phase
from dflash_protocol.transports.shared_client import SharedClient
from dflash_runtime import Engine
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from support import undisturbed as rig
from support.faults import greedy, spawned_daemons
from support.interrupts import interrupt_main_thread
from support.undisturbed import NUM_TOKENS, PROMPT, settings_with

pytestmark = pytest.mark.e2e

model = rig.model
undisturbed = rig.undisturbed

SPLITS = [
    {"daemons": ["cpu"]},
    {"daemons": ["cpu"], "local_experts": 3},
    {"daemons": ["cpu", "cpu"]},
    {"daemons": ["cpu", "cpu"], "local_experts": 2},
]
COUNTS = "requests", "tokens", "pairs", "bytes_sent", "bytes_received"


def counts_of(engine: Engine) -> tuple[object, ...]:
    """Of decode steps: how prompts are cut depends on time."""
    stats = engine.stats()
    owners = {
        name: [getattr(owner.phases[Phase.DECODE], count) for count in COUNTS]
        for name, owner in stats.owners.items()
        if Phase.DECODE in owner.phases
    }
    return owners, stats.hits, stats.selections


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_tokens_and_counts_are_those_of_steps_through_the_host(
    model: Path, undisturbed: list[int], split: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for is_asked in (True, False):
        with monkeypatch.context() as patch:
            if not is_asked:
                patch.setattr(MoeExpertComputeRuntime, "ask_routes", lambda self: ())
            settings = settings_with(check_replies=0)
            with Engine.open(model, settings=settings, **split) as engine:
                assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
                found.append(counts_of(engine))
                for owner in engine.stats().owners.values():
                    if owner.kind == "daemon":
                        decode = owner.phases[Phase.DECODE]
                        assert (decode.pack_s == 0) == is_asked
                        assert min(decode.compute_s, decode.wait_s, decode.queue_s) > 0
                        assert decode.round_trips.num_samples == decode.requests
    assert found[0] == found[1]


def slots_free(engine: Engine) -> list[int]:
    """Number of free slots of each ring."""
    owners = engine._owners.runtime._owners
    clients = [each._session._client for each in owners if getattr(each, "_session", None)]
    return [len(each._requests.free) for each in clients if isinstance(each, SharedClient)]


@contextmanager
def in_a_while(work: Any, delay_s: float) -> Iterator[None]:
    timer = threading.Timer(delay_s, work)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("index", [0, 1])
def test_a_daemon_lost_within_a_step_costs_no_token(
    model: Path, undisturbed: list[int], number: signal.Signals, index: int
) -> None:
    """Wherever in a step it is: several tries, each in another moment."""
    with Engine.open(model, daemons=["cpu", "cpu"], settings=settings_with()) as engine:
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        for trial in range(3):
            victim = spawned_daemons()[index]
            with in_a_while(partial(victim.send_signal, number), 0.002 + 0.0013 * trial):
                for _ in range(8):
                    assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
            with suppress(psutil.Error):
                victim.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        stats = engine.stats()
        assert stats.owners["fallback"].requests > 0
        assert {event.kind for event in stats.events} >= {"daemon_lost"}


def test_a_wait_for_a_stopped_daemon_can_be_interrupted(
    model: Path, undisturbed: list[int]
) -> None:
    settings = replace(settings_with(deadline_ms=20_000), heartbeat_ms=20_000)
    with Engine.open(model, daemons=["cpu"], settings=settings) as engine:
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        [before] = slots_free(engine)
        (daemon,) = spawned_daemons()
        tokens = engine.generate(PROMPT, NUM_TOKENS)
        for _ in range(5):
            next(tokens)
        daemon.suspend()
        started_s = time.monotonic()
        with in_a_while(interrupt_main_thread, 0.3), pytest.raises(KeyboardInterrupt):
            list(tokens)
        assert time.monotonic() - started_s < 3.0
        assert slots_free(engine) == [before - 1]  # the daemon may still write that slot
        daemon.resume()
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed


def test_a_slow_reply_is_waited_for(model: Path, undisturbed: list[int]) -> None:
    """Longer than a slice: compiled code returns to Python and is entered again."""
    settings = replace(settings_with(deadline_ms=20_000), heartbeat_ms=20_000)
    with Engine.open(model, daemons=["cpu"], local_experts=3, settings=settings) as engine:
        (daemon,) = spawned_daemons()
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        for _ in range(3):
            tokens = engine.generate(PROMPT, NUM_TOKENS)
            first = [next(tokens).token_id for _ in range(7)]
            daemon.suspend()
            with in_a_while(daemon.resume, 0.2):
                rest = [token.token_id for token in tokens]
            assert first + rest == undisturbed
        stats = engine.stats()
        assert stats.events == []
        assert "fallback" not in stats.owners
