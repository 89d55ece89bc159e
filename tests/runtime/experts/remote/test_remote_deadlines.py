"""How long a daemon is given: what was measured, and what becomes of it."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from dflash_protocol.endpoint import Endpoint
from dflash_protocol.errors import DeadlineExceeded
from dflash_protocol.ids import Phase
from dflash_runtime.experts.remote import breaker as breaker_module
from support.remote_rig import (
    TWO_PAIRS,
    ScriptedRig,
    deadlines,
)
from support.routed_batches import HIDDEN_SIZE, batch_of, begin, finish


def test_a_deadline_is_four_times_the_predicted_time_of_all_pairs_in_flight(
    scripted: ScriptedRig,
) -> None:
    scripted.open_session(pairs_per_second=10.0)
    tickets = [begin(scripted.remote, batch_of(1, TWO_PAIRS)) for _ in range(3)]
    requests = [scripted.answer(0.2) for _ in tickets]
    assert [round(request.deadline_ms) for request in requests] == [800, 1600, 2400]
    for ticket in tickets:
        finish(scripted.remote, ticket, np.zeros((1, HIDDEN_SIZE)))
    assert round(deadlines(scripted, Phase.PREFILL, 0.2)) == 800, "nothing is in flight any more"


def test_rates_are_measured_for_each_phase(scripted: ScriptedRig) -> None:
    scripted.open_session(pairs_per_second=10.0)
    assert round(deadlines(scripted, Phase.PREFILL, 0.6)) == 800
    # A fifth of the way from 0.1 s a pair to the measured 0.3 s.
    assert round(deadlines(scripted, Phase.PREFILL, 0.6)) == 1120
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 800
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 640


def test_a_fast_daemon_still_gets_the_shortest_deadline(scripted: ScriptedRig) -> None:
    scripted.open_session(pairs_per_second=1e9)
    assert round(deadlines(scripted, Phase.DECODE, 1e-9)) == 250


def test_no_deadline_is_longer_than_ten_minutes(scripted: ScriptedRig) -> None:
    scripted.open_session(pairs_per_second=0.01)
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 600_000


def test_what_was_measured_outlives_a_session(scripted: ScriptedRig) -> None:
    session = scripted.open_session(pairs_per_second=10.0)
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 800
    scripted.link.mark_lost(session.generation, "the connection ended")
    scripted.open_session(pairs_per_second=20.0)
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 640
    assert round(deadlines(scripted, Phase.PREFILL, 0.0)) == 400, "never measured"


def test_a_daemon_that_was_too_slow_is_given_twice_the_time_in_its_next_session(
    scripted: ScriptedRig,
) -> None:
    scripted.open_session(pairs_per_second=25.0)
    ticket = begin(scripted.remote, batch_of(1, TWO_PAIRS))
    assert round(scripted.receive().deadline_ms) == 320
    with pytest.raises(DeadlineExceeded, match=r"reply\b.*\b320 ms"):
        finish(scripted.remote, ticket, np.zeros((1, HIDDEN_SIZE)))
    scripted.open_session(pairs_per_second=25.0)
    assert round(deadlines(scripted, Phase.PREFILL, 0.0)) == 640


def test_a_daemon_that_never_answers_is_not_given_ever_more_time(
    undo: ExitStack, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MOST_IN_A_ROW", "_MOST_LATELY"):
        monkeypatch.setattr(breaker_module, name, 1000)
    rig = ScriptedRig(undo, endpoint, min_deadline_s=0.001)

    def failed_ms() -> float:
        rig.open_session(pairs_per_second=2e3)
        ticket = begin(rig.remote, batch_of(1, TWO_PAIRS))
        deadline_ms = rig.receive().deadline_ms
        with pytest.raises(DeadlineExceeded):
            finish(rig.remote, ticket, np.zeros((1, HIDDEN_SIZE)))
        return deadline_ms

    assert [round(failed_ms()) for _ in range(8)] == [4, 8, 16, 32, 64, 64, 64, 64]
    rig.open_session(pairs_per_second=0.01)
    deadlines(rig, Phase.DECODE, 0.0)
    assert deadlines(rig, Phase.PREFILL, 0.0) < 65
    assert failed_ms() < failed_ms(), "an answer, and timeouts grows again"


def test_an_abandoned_ticket_is_no_longer_in_flight_and_its_reply_is_dropped(
    scripted: ScriptedRig,
) -> None:
    scripted.open_session(pairs_per_second=10.0)
    late, early = (begin(scripted.remote, batch_of(1, TWO_PAIRS)) for _ in range(2))
    scripted.answer(0.0)
    scripted.answer(0.0)
    scripted.remote.abandon(late)
    out = np.zeros((1, HIDDEN_SIZE))
    finish(scripted.remote, early, out)
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 800
    assert scripted.losses == []


def test_abandoning_a_ticket_of_an_older_session_is_nothing(scripted: ScriptedRig) -> None:
    session = scripted.open_session(pairs_per_second=10.0)
    ticket = begin(scripted.remote, batch_of(1, TWO_PAIRS))
    scripted.receive()
    scripted.link.mark_lost(session.generation, "the connection ended")
    scripted.remote.abandon(ticket)
    scripted.open_session(pairs_per_second=10.0)
    assert round(deadlines(scripted, Phase.DECODE, 0.0)) == 800
    scripted.remote.abandon(ticket)
    assert round(deadlines(scripted, Phase.PREFILL, 0.0)) == 800


def test_restarts_are_counted_although_nothing_was_sent_since(scripted: ScriptedRig) -> None:
    for _ in range(3):
        session = scripted.open_session()
        scripted.link.mark_lost(session.generation, "the connection ended")
    assert scripted.remote.stats.restarts == 2


def test_a_new_session_starts_from_its_own_rate_and_an_empty_queue(scripted: ScriptedRig) -> None:
    session = scripted.open_session(pairs_per_second=10.0)
    begin(scripted.remote, batch_of(1, TWO_PAIRS))
    scripted.receive()
    scripted.link.mark_lost(session.generation, "the connection ended")
    scripted.open_session(pairs_per_second=20.0)
    assert round(deadlines(scripted, Phase.PREFILL, 0.1)) == 400


@pytest.mark.parametrize(
    "compute_s",
    [
        1e300,
        -1e300,
        -0.0,
    ],
)
def test_an_absurd_compute_time_neither_breaks_nor_freezes_the_parent(
    scripted: ScriptedRig, compute_s: float
) -> None:
    scripted.open_session()
    deadlines(scripted, Phase.DECODE, compute_s)
    for _ in range(3):
        deadline_ms = deadlines(scripted, Phase.DECODE, 0.001)
        assert 250.0 <= deadline_ms <= 3_600_000.0
    assert scripted.losses == []
