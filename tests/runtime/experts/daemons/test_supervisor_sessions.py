"""The supervisor while daemons come, stay and go: heartbeats, losses, reconnections."""

from __future__ import annotations

import errno
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
import zmq.asyncio

from dflash_protocol.wire.messages import (
    Bye,
    Hello,
    Ping,
    Pong,
    Refused,
)
from dflash_runtime.experts.daemons.link import DaemonCounters
from dflash_runtime.experts.daemons.link_task import Timeouts
from support.scripted_daemon import LINK_ID, TIMEOUT_S, ScriptedDaemon, welcome_to
from support.supervised import Parent, started


def test_a_daemon_is_pinged_under_the_name_it_gave_the_link(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = Parent(undo, daemon.endpoint.address, timeouts=Timeouts(TIMEOUT_S, 0.01))
    start = parent.start()
    daemon.say(welcome_to(daemon.expect(Hello)))
    sequences = []
    for _ in range(5):
        ping = daemon.expect(Ping)
        assert ping.link_id == LINK_ID
        sequences.append(ping.sequence)
        daemon.say(Pong(ping.sequence, True, 0.5))
    start.result(TIMEOUT_S)
    assert sequences == sorted(set(sequences))


def test_missed_heartbeats_are_one_loss_and_a_new_hello(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = started(undo, daemon, timeouts=Timeouts(TIMEOUT_S, 0.03))
    assert re.search(r"heartbeat\b.*\b0\.1 s", parent.next_loss())  # five of 0.03 s
    assert parent.link.session is None
    parent_hello = daemon.expect(Hello, skipping=(Ping,))
    daemon.say(welcome_to(parent_hello))
    parent.wait_for_session(2)
    assert parent.link.restarts == 1
    assert parent.losses.empty()


def test_a_few_missed_heartbeats_are_forgiven(undo: ExitStack, daemon: ScriptedDaemon) -> None:
    parent = started(undo, daemon, timeouts=Timeouts(TIMEOUT_S, 0.25))
    for _ in range(3):
        daemon.expect(Ping)
        ping = daemon.expect(Ping)
        daemon.say(Pong(ping.sequence, True, 0.0))
    assert parent.losses.empty()
    assert parent.link.restarts == 0


def test_a_daemon_that_forgot_us_is_greeted_again(undo: ExitStack, daemon: ScriptedDaemon) -> None:
    parent = Parent(undo, daemon.endpoint.address)
    start = parent.start()
    daemon.say(welcome_to(daemon.expect(Hello)))
    daemon.say(Pong(daemon.expect(Ping).sequence, False, 0.0))
    start.result(TIMEOUT_S)
    assert "knows" in parent.next_loss()
    daemon.let_in()
    parent.wait_for_session(2)
    assert parent.link.restarts == 1


def test_garbage_instead_of_a_pong_ends_the_session(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = Parent(undo, daemon.endpoint.address)
    start = parent.start()
    daemon.say(welcome_to(daemon.expect(Hello)))
    daemon.expect(Ping)
    daemon.say_frames(b"garbage")
    start.result(TIMEOUT_S)
    assert "msgpack" in parent.next_loss()
    daemon.let_in()
    parent.wait_for_session(2)


def test_a_daemon_that_ended_is_lost_at_once_and_used_again_when_it_is_back(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    parent = started(undo, daemon)
    daemon.close()
    assert "connection" in parent.next_loss()
    assert parent.link.session is None
    with ScriptedDaemon(address) as revived:
        revived.let_in()
        parent.wait_for_session(2)
        assert parent.link.restarts == 1
        assert parent.losses.empty()


def test_a_daemon_that_refuses_when_it_is_back_is_asked_again(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    parent = started(undo, daemon)
    daemon.close()
    parent.next_loss()
    with ScriptedDaemon(address) as revived:
        for _ in range(2):
            revived.expect(Hello)
            revived.say(Refused("busy", "64 parents are connected already"))
        revived.let_in()
        parent.wait_for_session(2)
        assert parent.losses.empty()


def test_a_refusal_after_the_start_is_said_once_for_each_reason(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    parent = started(undo, daemon)
    daemon.close()
    parent.next_loss()
    with ScriptedDaemon(address) as revived:
        for reason in ("another model", "another model", "busy"):
            revived.expect(Hello)
            revived.say(Refused("model", reason))
        revived.let_in()
        parent.wait_for_session(2)
    said = [parent.next_loss() for _ in range(2)]
    assert [line.rpartition(": ")[2] for line in said] == ["another model", "busy"]
    assert all(f"cpu0 at {address}" in line for line in said)


def test_a_reconnection_for_which_there_is_no_socket_is_tried_again(
    undo: ExitStack, daemon: ScriptedDaemon, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = started(undo, daemon)
    real_socket = zmq.asyncio.Context.socket
    failures = [errno.EMFILE] * 2

    def socket(context: zmq.asyncio.Context, *arguments: Any, **options: Any) -> Any:
        if failures:
            raise zmq.ZMQError(failures.pop())
        return real_socket(context, *arguments, **options)

    monkeypatch.setattr(zmq.asyncio.Context, "socket", socket)
    daemon.close()
    parent.next_loss()
    with ScriptedDaemon(address) as revived:
        revived.expect(Hello, within_s=2.0)
        revived.say(Refused("busy", "64 parents are connected already"))
        revived.let_in()
        parent.wait_for_session(2)


def test_a_frame_that_no_control_message_needs_costs_the_daemon_its_session(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = started(undo, daemon)
    daemon.say_frames(bytes(1 << 20))
    assert "connection" in parent.next_loss()
    daemon.let_in()
    parent.wait_for_session(2)


def test_a_lost_session_is_given_back_to_a_daemon_that_may_be_well(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = started(undo, daemon)
    parent.link.mark_lost(1, "no reply within 250 ms")
    assert daemon.expect(Bye).link_id == LINK_ID
    daemon.let_in()
    parent.wait_for_session(2)


def test_a_loss_that_the_data_thread_reports_is_followed_by_a_new_hello(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = started(undo, daemon)
    session = parent.link.session
    assert session is not None
    parent.link.mark_lost(session.generation, "no reply within 250 ms")
    daemon.let_in()
    parent.wait_for_session(2)
    assert parent.next_loss() == "no reply within 250 ms"
    assert parent.losses.empty()


def test_a_late_wake_up_call_does_not_end_the_next_session(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    """The data thread reports a loss, and is held up until the supervisor has dealt with it."""
    parent = Parent(undo, daemon.endpoint.address)
    start = parent.start()
    daemon.say(welcome_to(daemon.expect(Hello)))
    ping = daemon.expect(Ping)
    start.result(TIMEOUT_S)
    parent.may_report.clear()
    with ThreadPoolExecutor(1) as data_thread:
        report = data_thread.submit(parent.link.mark_lost, 1, "no reply within 250 ms")
        parent.next_loss()
        daemon.say(Pong(ping.sequence, False, 0.0))
        daemon.let_in()
        parent.wait_for_session(2)
        parent.may_report.set()
        report.result(TIMEOUT_S)
    assert daemon.is_silent(0.3), "no third hello"
    assert parent.losses.empty()


def test_a_daemon_that_never_keeps_us_is_not_hammered(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    """Each welcome is followed by a pong that says we are unknown: back off all the same."""
    parent = Parent(undo, daemon.endpoint.address)
    start = parent.start()
    started_s = time.monotonic()
    for _ in range(5):
        daemon.say(welcome_to(daemon.expect(Hello)))
        daemon.say(Pong(daemon.expect(Ping).sequence, False, 0.0))
    daemon.expect(Hello)
    assert time.monotonic() - started_s > 0.5  # 0.05 + 0.1 + 0.2 + … less the jitter
    start.result(TIMEOUT_S)


def test_what_a_daemon_says_that_it_dropped_is_on_the_link(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = Parent(undo, daemon.endpoint.address, timeouts=Timeouts(TIMEOUT_S, 0.01))
    start = parent.start()
    daemon.say(welcome_to(daemon.expect(Hello)))
    assert parent.link.daemon_counters == DaemonCounters()
    for number in range(1, 4):
        ping = daemon.expect(Ping)
        if number > 1:
            said = parent.link.daemon_counters
            assert said == DaemonCounters(number - 1, 10 * number - 10, 100 * number - 100, 1)
        daemon.say(Pong(ping.sequence, True, 0.0, number, 10 * number, 100 * number))
    start.result(TIMEOUT_S)
