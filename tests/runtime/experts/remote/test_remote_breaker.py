"""The circuit breaker of a link: a daemon that keeps failing is not asked at every step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest

from dflash_adapters.spec import MoeSpec
from dflash_protocol.endpoint import Endpoint
from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.experts.compute import ExpertCompute, LocalExpertCompute, Ticket
from dflash_runtime.experts.remote import breaker as breaker_module
from dflash_runtime.experts.remote.breaker import CircuitBreaker
from dflash_runtime.experts.remote.session import RemoteSession
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.telemetry import OwnerKind
from dflash_runtime.placement.split import make_placement
from support.remote_rig import PAIRS, TWO_PAIRS, ScriptedRig, ServedRig, deadlines
from support.routed_batches import (
    HIDDEN_SIZE,
    ScalingBank,
    batch_of,
    begin,
    finish,
    moe_layer,
    routed_sums,
)

PAUSE_S = 1000.0
REFUSED = "daemon cpu0: .*breaker"


class Clock:
    """How far the breaker's clock is ahead of ours when it is asked."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def skip(self, seconds: float) -> None:
        self.ahead_s += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """No pause is ever over unless the test says so."""
    clock = Clock()
    monkeypatch.setattr(breaker_module, "_PAUSE_FIRST_S", PAUSE_S)
    monkeypatch.setattr(breaker_module, "_PAUSE_LAST_S", 2 * PAUSE_S)
    for name in ("lets_through", "note_failure"):
        method = getattr(CircuitBreaker, name)

        def later(
            breaker: CircuitBreaker,
            now_s: float,
            *arguments: object,
            method: Callable[..., object] = method,
            **options: object,
        ) -> object:
            return method(breaker, now_s + clock.ahead_s, *arguments, **options)

        monkeypatch.setattr(CircuitBreaker, name, later)
    return clock


def collect(rig: ScriptedRig, ticket: Ticket) -> None:
    finish(rig.remote, ticket, np.zeros((3, HIDDEN_SIZE)))


def fail_one(rig: ScriptedRig, code: str = "internal") -> None:
    ticket = begin(rig.remote, batch_of(3, PAIRS))
    rig.fail(code, "no luck")
    with pytest.raises(DaemonUnavailable, match="no luck"):
        collect(rig, ticket)


def open_breaker(rig: ScriptedRig) -> None:
    for _ in range(3):
        fail_one(rig)
    assert rig.remote.stats.breaker == "open"


@pytest.mark.parametrize("code", ["checksum", "late", "internal", "stale"])
def test_after_three_failures_in_a_row_nothing_is_sent_although_the_session_lives(
    scripted: ScriptedRig, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = scripted.open_session()
    for number in range(5):
        if number == 2:  # one that succeeds in between
            deadlines(scripted, Phase.DECODE, 0.0)
        assert scripted.remote.stats.breaker == "closed"
        fail_one(scripted, code)
    for _ in range(20):
        with pytest.raises(DaemonUnavailable, match=REFUSED + ".*no luck"):
            begin(scripted.remote, batch_of(3, PAIRS))
    assert not scripted.socket.poll(20)
    [message] = caplog.messages  # not one with every request
    assert re.search(r"\bcpu0\b.*\b3 requests\b.*: no luck\b.*\b1000\.0 s\b", message)
    assert scripted.link.session is session
    assert scripted.kinds == ["request_failed"] * 5 + ["breaker_open"]
    stats = scripted.remote.stats
    assert (stats.breaker, stats.breaker_opened, stats.breaker_refused) == ("open", 1, 20)
    record = json.loads(json.dumps(stats.as_record()))
    assert (record["breaker"], record["breaker_refused"]) == ("open", 20)
    assert re.search(r"breaker open\b.*\b1 time\b", stats.troubles)


def test_after_the_pause_one_request_is_let_through_and_its_success_closes_it(
    scripted: ScriptedRig, clock: Clock
) -> None:
    session = scripted.open_session()
    open_breaker(scripted)
    clock.skip(PAUSE_S)
    probe = begin(scripted.remote, batch_of(1, TWO_PAIRS))
    assert scripted.remote.stats.breaker == "half-open"
    with pytest.raises(DaemonUnavailable, match=REFUSED):
        begin(scripted.remote, batch_of(1, TWO_PAIRS))
    scripted.answer(0.0)
    finish(scripted.remote, probe, np.zeros((1, HIDDEN_SIZE)))
    for _ in range(5):
        deadlines(scripted, Phase.DECODE, 0.0)
    assert scripted.link.session is session
    assert scripted.kinds[3:] == ["breaker_open", "breaker_half_open", "breaker_closed"]
    assert scripted.remote.stats.breaker == "closed"


def test_a_probe_that_fails_costs_the_session_and_a_longer_pause(
    scripted: ScriptedRig, clock: Clock
) -> None:
    """New memory and a new generation may be what is needed."""
    scripted.open_session()
    open_breaker(scripted)
    clock.skip(PAUSE_S)
    fail_one(scripted)
    assert scripted.link.session is None
    assert scripted.kinds[3:] == [
        "breaker_open", "breaker_half_open", "daemon_lost", "breaker_open",
    ]  # fmt: skip
    scripted.open_session()
    clock.skip(PAUSE_S)
    with pytest.raises(DaemonUnavailable, match=REFUSED):
        begin(scripted.remote, batch_of(3, PAIRS))
    clock.skip(PAUSE_S)
    deadlines(scripted, Phase.DECODE, 0.0)
    assert scripted.remote.stats.breaker == "closed"


def test_sessions_that_come_and_are_lost_again_cost_no_further_deadline(
    undo: ExitStack, endpoint: Endpoint, clock: Clock
) -> None:
    rig = ScriptedRig(undo, endpoint, min_deadline_s=0.05)
    for _ in range(3):
        rig.open_session()
        ticket = begin(rig.remote, batch_of(3, PAIRS))
        with pytest.raises(DeadlineExceeded):
            collect(rig, ticket)
        assert rig.link.session is None
    rig.open_session()
    with pytest.raises(DaemonUnavailable, match=REFUSED + r".*\b50 ms"):
        begin(rig.remote, batch_of(3, PAIRS))
    assert rig.link.session is not None, "it is the requests that fail"
    assert rig.remote.stats.deadline_failures == 3
    for _ in range(3):
        rig.receive()
    clock.skip(PAUSE_S)
    deadlines(rig, Phase.DECODE, 0.0)


def test_a_session_that_is_lost_under_several_requests_is_one_failure(served: ServedRig) -> None:
    session = served.open_session()
    served.bank.gate.clear()
    tickets = [begin(served.remote, batch_of(3, PAIRS)) for _ in range(4)]
    served.link.mark_lost(session.generation, "was ended by SIGKILL")
    for ticket in tickets:
        with pytest.raises(DaemonUnavailable, match="SIGKILL"):
            finish(served.remote, ticket, np.zeros((3, HIDDEN_SIZE)))
    served.bank.gate.set()
    served.open_session()
    served.assert_right()
    assert served.remote.stats.breaker_opened == 0


def test_a_probe_that_is_given_up_is_followed_by_another(
    scripted: ScriptedRig, clock: Clock
) -> None:
    scripted.open_session()
    open_breaker(scripted)
    clock.skip(PAUSE_S)
    scripted.remote.abandon(begin(scripted.remote, batch_of(1, TWO_PAIRS)))
    assert scripted.remote.stats.breaker == "open"
    scripted.receive()
    deadlines(scripted, Phase.DECODE, 0.0)
    assert scripted.remote.stats.breaker == "closed"


def test_a_probe_whose_session_is_lost_has_failed(scripted: ScriptedRig, clock: Clock) -> None:
    session = scripted.open_session()
    open_breaker(scripted)
    clock.skip(PAUSE_S)
    probe = begin(scripted.remote, batch_of(1, TWO_PAIRS))
    scripted.receive()
    scripted.link.mark_lost(session.generation, "the connection ended")
    with pytest.raises(DaemonUnavailable, match="the connection ended"):
        finish(scripted.remote, probe, np.zeros((1, HIDDEN_SIZE)))
    scripted.open_session()
    with pytest.raises(DaemonUnavailable, match=REFUSED):
        begin(scripted.remote, batch_of(3, PAIRS))
    clock.skip(2 * PAUSE_S)
    deadlines(scripted, Phase.DECODE, 0.0)


def test_an_interrupt_while_the_probe_is_sent_does_not_leave_the_breaker_open_for_ever(
    scripted: ScriptedRig, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    scripted.open_session()
    open_breaker(scripted)
    clock.skip(PAUSE_S)
    with monkeypatch.context() as patched:

        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patched.setattr(RemoteSession, "send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            begin(scripted.remote, batch_of(1, TWO_PAIRS))
    deadlines(scripted, Phase.DECODE, 0.0)
    assert scripted.remote.stats.breaker == "closed"


def test_while_nothing_fails_the_breaker_is_not_even_asked(
    served: ServedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its price, at each layer of each token, is the test of one attribute."""

    def used(*_: object, **__: object) -> None:
        raise AssertionError("the breaker was used")

    for method in ("lets_through", "is_calm", "note_success", "note_failure"):
        monkeypatch.setattr(CircuitBreaker, method, used)
    served.open_session()
    for _ in range(3):
        served.assert_right()


def test_when_ten_seconds_went_well_the_breaker_is_forgotten(
    scripted: ScriptedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.open_session()
    fail_one(scripted)
    monkeypatch.setattr(breaker_module, "_LATELY_S", 0.0)
    deadlines(scripted, Phase.DECODE, 0.0)
    monkeypatch.setattr(CircuitBreaker, "lets_through", None)
    deadlines(scripted, Phase.DECODE, 0.0)


SPEC = MoeSpec((moe_layer(),))


class Runtime:
    """Experts 0 and 1 here, the others with the daemon of a rig."""

    def __init__(self, rig: ScriptedRig, *, is_required: bool) -> None:
        experts = {"local": [0, 1], "cpu0": [2, 3, 4]}
        self.fallback = LocalExpertCompute(OwnerKind.FALLBACK, {0: ScalingBank(SPEC.layers[0])})
        placement = make_placement(
            SPEC, {name: OwnedExperts.from_lists({0: ids}) for name, ids in experts.items()}
        )
        local = LocalExpertCompute(OwnerKind.LOCAL, {0: ScalingBank(SPEC.layers[0], [0, 1])})
        owners: dict[str, ExpertCompute] = {"local": local, "cpu0": rig.remote}
        self.runtime = MoeExpertComputeRuntime(
            placement,
            [owners[name] for name in placement.owner_names],
            fallback=None if is_required else self.fallback,
        )

    def compute(self, phase: Phase) -> F32Array:
        num_tokens = 1 if phase is Phase.DECODE else 4
        ids: I32Array = np.array([[0, 3]] * num_tokens, np.int32)
        weights = np.full(ids.shape, 0.5, np.float32)
        hidden = np.ones((num_tokens, HIDDEN_SIZE), np.float32)
        return routed_sums(self.runtime, 0, hidden, (ids, weights), phase)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_an_open_breaker_is_an_error_where_daemons_are_required(
    scripted: ScriptedRig, phase: Phase
) -> None:
    scripted.open_session()
    open_breaker(scripted)
    runtime = Runtime(scripted, is_required=True)
    with pytest.raises(DaemonUnavailable, match=REFUSED + ".*required"):
        runtime.compute(phase)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_an_open_breaker_sends_every_batch_to_the_fallback_and_to_it_alone(
    scripted: ScriptedRig, phase: Phase
) -> None:
    scripted.open_session()
    open_breaker(scripted)
    runtime = Runtime(scripted, is_required=False)
    for number in range(1, 4):
        sums = runtime.compute(phase)
        np.testing.assert_array_equal(sums, np.full_like(sums, 0.5 * (1.0 + 1.75)))
        assert runtime.fallback.stats.requests == number
    stats = runtime.runtime.stats()["cpu0"]
    assert (stats.breaker_refused, stats.fallbacks, stats.requests) == (3, 3, 3)
