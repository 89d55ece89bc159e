"""Decode steps whose experts compiled code asks daemons for: the same tokens and counts as through
the host, also when a daemon is killed or stopped within a step, or the user interrupts a wait."""

from __future__ import annotations

import ctypes
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
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.transports.shared_client import SharedClient
from dflash_runtime import Engine
from dflash_runtime.experts.remote.remote import RemoteExpertCompute
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
    pytest.param({"daemons": ["cpu"], "local_experts": 3}, marks=pytest.mark.slow),
    pytest.param({"daemons": ["cpu", "cpu"]}, marks=pytest.mark.slow),
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
                patch.setattr(MoeExpertComputeRuntime, "ask_routes", lambda self: None)
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
    owners = [
        owner for owner in engine._owners.runtime._owners if isinstance(owner, RemoteExpertCompute)
    ]
    clients = [owner._session._client for owner in owners if owner._session is not None]
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


@pytest.mark.parametrize(
    ("number", "index"),
    [
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.slow),
    ],
)
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


class Ring:
    """The ring's functions for compiled code, one of whose calls ends with another status."""

    def __init__(self) -> None:
        self.status = 0
        self.num_left = 0
        """Calls of `collect` before the one that fails; of `post` if `is_post`."""
        self.is_post = False
        kind = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 3)
        self._post, self._collect = map(kind, ring_native.client_functions())
        self._kept = kind(self.post), kind(self.collect)
        addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._kept]
        self.functions = ring_native.ClientFunctions(*addresses)

    def post(self, port: int, request: int) -> int:
        return self.status if self._fails(is_post=True) else self._post(port, request)

    def collect(self, port: int, request: int) -> int:
        return self.status if self._fails(is_post=False) else self._collect(port, request)

    def _fails(self, *, is_post: bool) -> bool:
        if not self.status or is_post != self.is_post:
            return False
        self.num_left -= 1
        return self.num_left == 0


@pytest.mark.parametrize(
    ("status", "counter", "event"),
    [
        (ring_native.LATE, "deadline_failures", "daemon_lost"),
        (ring_native.LOST, "", "daemon_lost"),
        (ring_native.FAILURE - ring_native.WRONG_CHECKSUM, "checksum_failures", "request_failed"),
        (ring_native.FAILURE - ring_native.WRONG_COUNTS, "", "daemon_lost"),
        (ring_native.NOT_FINITE, "", ""),
        (ring_native.UNSENT, "", ""),
    ],
)
@pytest.mark.parametrize("num_calls", [pytest.param(1, marks=pytest.mark.slow), 50])
def test_a_request_that_fails_is_computed_by_the_host(
    model: Path,
    undisturbed: list[int],
    status: int,
    counter: str,
    event: str,
    num_calls: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = Ring()
    monkeypatch.setattr(ring_native, "client_functions", lambda cache_dir=None: ring.functions)
    settings = settings_with(check_replies=0)
    with Engine.open(model, daemons=["cpu", "cpu"], settings=settings) as engine:
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        ring.status, ring.num_left = status, num_calls
        ring.is_post = status == ring_native.UNSENT
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        assert ring.num_left <= 0
        stats = engine.stats()
        assert [each.kind for each in stats.events][:1] == ([event] if event else [])
        owners = [owner for owner in stats.owners.values() if owner.kind == "daemon"]
        for name in ("deadline_failures", "checksum_failures", "not_finite", "wrong_replies"):
            assert sum(getattr(owner, name) for owner in owners) == (name == counter)
        num_pairs = sum(map(sum, stats.selections.values()))
        assert num_pairs == stats.hits.hot + stats.hits.remote + stats.hits.cold
