"""The supervisor against a daemon that follows a script."""

from __future__ import annotations

import errno
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
import zmq.asyncio

from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    HandshakeRefused,
    ProtocolError,
)
from dflash_protocol.messages import (
    PROTOCOL_VERSIONS,
    Bye,
    Hello,
    Ping,
    Pong,
    Progress,
    Refused,
)
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.experts import supervisor as supervisor_module
from dflash_runtime.experts.link import DaemonLink, Launch
from dflash_runtime.experts.supervisor import Greeting, Patience, Supervisor
from support.scripted_daemon import LINK_ID, PATIENCE_S, ScriptedDaemon, welcome_to

GREETING = Greeting("model-1f", "digest-2e", "class-3d", max_tokens=64)
OWNED = OwnedExperts.from_lists({0: [3, 1], 2: [0]})
UNHURRIED = Patience(connect_silence_s=PATIENCE_S, heartbeat_s=PATIENCE_S)
LIVES_ON_ITS_LIFELINE = (
    "import os, sys; os.read(int(sys.argv[sys.argv.index('--lifeline-fd') + 1]), 1)"
)


def launch(code: str) -> Launch:
    """A child of ours that runs these lines."""
    return Launch((sys.executable, "-I", "-S", "-c", code))


class Parent:
    """A supervisor with its links, and everything that it reports."""

    def __init__(
        self,
        undo: ExitStack,
        *addresses: str,
        patience: Patience = UNHURRIED,
        launch: Launch | None = None,
    ) -> None:
        self.losses: queue.Queue[tuple[str, str]] = queue.Queue()
        self.may_report = threading.Event()
        self.may_report.set()
        self.progress: queue.Queue[tuple[str, str, int, int]] = queue.Queue()
        self.links = [
            DaemonLink(
                f"cpu{index}",
                parse_endpoint(address),
                OWNED,
                launch=launch,
                numeric_class=GREETING.numeric_class,
                on_event=self._on_event,
            )
            for index, address in enumerate(addresses)
        ]
        for link in self.links:
            undo.callback(link.close)
        context = undo.enter_context(zmq.Context())
        self.supervisor = Supervisor(
            context, self.links, GREETING, patience, lambda *report: self.progress.put(report)
        )
        undo.callback(self.supervisor.close)
        self._pool = undo.enter_context(ThreadPoolExecutor(1))
        undo.callback(self.supervisor.close)  # before the pool waits for a start that hangs

    def _on_event(self, kind: str, name: str, reason: str) -> None:
        self.losses.put((name, reason))
        assert self.may_report.wait(PATIENCE_S)

    @property
    def link(self) -> DaemonLink:
        return self.links[0]

    def start(self) -> Future[None]:
        """Start, while the test plays the daemon."""
        return self._pool.submit(self.supervisor.start)

    def next_loss(self) -> str:
        """Reason of the next loss of the first link."""
        name, reason = self.losses.get(timeout=PATIENCE_S)
        assert name == "cpu0"
        return reason

    def wait_for_session(self, generation: int) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while (session := self.link.session) is None or session.generation != generation:
            assert time.monotonic() < end_s, f"session {generation} never came"
            time.sleep(0.001)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def address(run_dir: Path) -> str:
    return f"ipc://{run_dir}/cpu0"


@pytest.fixture
def daemon(address: str) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(address) as scripted:
        yield scripted


def started(undo: ExitStack, daemon: ScriptedDaemon, **options: Any) -> Parent:
    """A parent that this daemon has let in."""
    parent = Parent(undo, daemon.endpoint.address, **options)
    start = parent.start()
    daemon.let_in()
    start.result(PATIENCE_S)
    return parent


def assert_starts(address: str) -> None:
    """The good request after a failure: another parent is let in by a good daemon.

    It listens beside the failed one, to which late words of the first parent may still be coming.
    """
    with ExitStack() as undo:
        daemon = undo.enter_context(ScriptedDaemon(f"{address}-good"))
        assert started(undo, daemon).link.session is not None


def test_hello_says_who_we_are_and_brings_the_placement(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = Parent(undo, daemon.endpoint.address)
    start = parent.start()
    hello = daemon.expect(Hello)
    assert hello == Hello(
        PROTOCOL_VERSIONS, "model-1f", "digest-2e", OWNED.fingerprint, "class-3d", 64
    )
    assert daemon.frames == [OWNED.canonical_bytes]
    assert not start.done()
    welcome = welcome_to(hello)
    daemon.say(welcome)
    start.result(PATIENCE_S)
    session = parent.link.session
    assert session is not None
    assert session.welcome == welcome
    assert parent.link.restarts == 0
    assert parent.losses.empty()


def test_every_daemon_must_be_ready_before_start_returns(undo: ExitStack, run_dir: Path) -> None:
    daemons = [undo.enter_context(ScriptedDaemon(f"ipc://{run_dir}/{name}")) for name in ("a", "b")]
    parent = Parent(undo, *(daemon.endpoint.address for daemon in daemons))
    start = parent.start()
    daemons[1].let_in()
    assert not start.done()
    daemons[0].let_in()
    start.result(PATIENCE_S)
    assert all(link.session is not None for link in parent.links)


def test_a_refusal_is_raised_by_start_with_its_code_and_both_identities(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    start = Parent(undo, address).start()
    hello = daemon.expect(Hello)
    reason = f"this daemon runs model other-9a, asked for is model {hello.model_identity}"
    daemon.say(Refused("model", reason))
    with pytest.raises(HandshakeRefused) as caught:
        start.result(PATIENCE_S)
    assert caught.value.code == "model"
    message = str(caught.value)
    assert "cpu0" in message
    assert address in message
    assert "other-9a" in message
    assert "model-1f" in message
    daemon.close()
    assert_starts(address)


def test_one_refusal_ends_the_start_of_all(undo: ExitStack, run_dir: Path) -> None:
    daemons = [undo.enter_context(ScriptedDaemon(f"ipc://{run_dir}/{name}")) for name in ("a", "b")]
    start = Parent(undo, *(daemon.endpoint.address for daemon in daemons)).start()
    daemons[0].let_in()
    daemons[1].expect(Hello)
    daemons[1].say(Refused("busy", "64 parents are connected already"))
    with pytest.raises(HandshakeRefused, match="64 parents"):
        start.result(PATIENCE_S)
    assert "dflash-supervisor" not in thread_names()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_identity": "other-9a"}, "has model other-9a, ours is model-1f"),
        ({"placement_fingerprint": "f00d"}, "has placement f00d, ours is "),
        ({"version": 0}, "chose protocol version 0"),
        ({"version": 99}, "chose protocol version 99"),
        ({"payload": "bf16"}, "offers an impossible payload"),
        ({"max_tokens": 0}, "offers an impossible max_tokens"),
        ({"pairs_per_second": 0.0}, "offers an impossible pairs_per_second"),
        ({"pairs_per_second": -1.0}, "offers an impossible pairs_per_second"),
    ],
)
def test_a_welcome_that_is_not_what_was_asked_for_is_refused(
    undo: ExitStack, daemon: ScriptedDaemon, address: str, changes: dict[str, Any], reason: str
) -> None:
    parent = Parent(undo, address)
    start = parent.start()
    daemon.say(welcome_to(daemon.expect(Hello), **changes))
    with pytest.raises(HandshakeRefused, match=f"cpu0 {reason}"):
        start.result(PATIENCE_S)
    assert parent.link.session is None
    daemon.close()
    assert_starts(address)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 65},
        {"max_tokens": (1 << 62) - 1},
        {"link_id": ""},
        {"link_id": "no hexadecimal"},
        {"link_id": "abc"},
        {"link_id": "ab" * 256},
        {"pairs_per_second": 5e-324},
    ],
)
def test_a_welcome_that_no_data_socket_could_use_is_refused(
    undo: ExitStack, daemon: ScriptedDaemon, address: str, changes: dict[str, Any]
) -> None:
    start = Parent(undo, address).start()
    daemon.say(welcome_to(daemon.expect(Hello), **changes))
    with pytest.raises(HandshakeRefused, match="cpu0"):
        start.result(PATIENCE_S)
    daemon.close()
    assert_starts(address)


@pytest.mark.parametrize("data_port", [0, 65536, 1 << 40])
def test_a_tcp_data_port_that_cannot_be_is_refused(undo: ExitStack, data_port: int) -> None:
    daemon = undo.enter_context(ScriptedDaemon(f"tcp://127.0.0.1:{free_port()}"))
    start = Parent(undo, daemon.endpoint.address).start()
    daemon.say(welcome_to(daemon.expect(Hello), data_port=data_port))
    with pytest.raises(HandshakeRefused, match="cpu0"):
        start.result(PATIENCE_S)


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"garbage"], "not msgpack"),
        ([b""], "not msgpack"),
        ([b"\x81\xa4type\xa3odd"], "unknown message type"),
    ],
)
def test_garbage_instead_of_a_welcome_is_a_protocol_error(
    undo: ExitStack, daemon: ScriptedDaemon, address: str, frames: list[bytes], reason: str
) -> None:
    start = Parent(undo, address).start()
    daemon.expect(Hello)
    daemon.say_frames(*frames)
    with pytest.raises(ProtocolError, match=reason):
        start.result(PATIENCE_S)
    daemon.close()
    assert_starts(address)


def test_another_message_instead_of_a_welcome_is_a_protocol_error(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    start = Parent(undo, address).start()
    daemon.expect(Hello)
    daemon.say(Pong(1, True, 0.0))
    with pytest.raises(ProtocolError, match="cpu0 answered hello with pong"):
        start.result(PATIENCE_S)


def test_silence_is_unavailability_within_the_patience(undo: ExitStack, address: str) -> None:
    parent = Parent(undo, address, patience=Patience(0.2, PATIENCE_S))
    started_s = time.monotonic()
    with pytest.raises(DaemonUnavailable, match=f"nothing answers at {address}"):
        parent.start().result(PATIENCE_S)
    assert 0.2 <= time.monotonic() - started_s < PATIENCE_S / 2
    assert_starts(address)


def test_a_hello_of_a_parent_that_gave_up_reaches_no_later_daemon(
    undo: ExitStack, address: str
) -> None:
    """It would load experts for nobody, and keep a place for them."""
    for patience_s in (0.01, 0.02, 0.03, 0.04):
        parent = Parent(undo, address, patience=Patience(patience_s, PATIENCE_S))
        with pytest.raises(DaemonUnavailable, match="nothing answers"):
            parent.start().result(PATIENCE_S)
    with ScriptedDaemon(address) as late:
        assert late.is_silent(0.4)


def test_a_daemon_that_hears_but_does_not_answer_is_unavailable_too(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    start = Parent(undo, address, patience=Patience(0.2, PATIENCE_S)).start()
    daemon.expect(Hello)
    with pytest.raises(DaemonUnavailable, match="nothing answers"):
        start.result(PATIENCE_S)


def test_a_daemon_that_hangs_up_while_loading_is_not_waited_for(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    start = Parent(undo, address).start()
    daemon.expect(Hello)
    daemon.say(Progress("load", 1, 48))
    daemon.close()
    with pytest.raises(DaemonUnavailable, match="hung up before it was ready"):
        start.result(PATIENCE_S / 4)


def test_progress_extends_the_patience_and_is_passed_on(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    parent = Parent(undo, address, patience=Patience(1.5, PATIENCE_S))
    start = parent.start()
    hello = daemon.expect(Hello)
    for num_done in range(4):
        assert daemon.is_silent(0.5)
        daemon.say(Progress("load", num_done, 48))
        assert parent.progress.get(timeout=PATIENCE_S) == ("cpu0", "load", num_done, 48)
    daemon.say(welcome_to(hello))
    start.result(PATIENCE_S)
    daemon.say(Progress("load", 48, 48))
    daemon.say(Pong(daemon.expect(Ping).sequence, True, 0.0))
    assert parent.progress.empty(), "nobody waits for progress any more"


def test_an_address_that_cannot_even_be_tried_is_unavailable_not_endless(undo: ExitStack) -> None:
    start = Parent(undo, "tcp://no host:5555").start()
    with pytest.raises(DaemonUnavailable, match="no host"):
        start.result(3.0)


def test_a_daemon_is_pinged_under_the_name_it_gave_the_link(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = Parent(undo, daemon.endpoint.address, patience=Patience(PATIENCE_S, 0.01))
    start = parent.start()
    daemon.say(welcome_to(daemon.expect(Hello)))
    sequences = []
    for _ in range(5):
        ping = daemon.expect(Ping)
        assert ping.link_id == LINK_ID
        sequences.append(ping.sequence)
        daemon.say(Pong(ping.sequence, True, 0.5))
    start.result(PATIENCE_S)
    assert sequences == sorted(set(sequences))


def test_missed_heartbeats_are_one_loss_and_a_new_hello(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = started(undo, daemon, patience=Patience(PATIENCE_S, 0.03))
    assert "no heartbeat for 0.1 s" in parent.next_loss()  # five of 0.03 s
    assert parent.link.session is None
    parent_hello = daemon.expect(Hello, skipping=(Ping,))
    daemon.say(welcome_to(parent_hello))
    parent.wait_for_session(2)
    assert parent.link.restarts == 1
    assert parent.losses.empty()


def test_a_few_missed_heartbeats_are_forgiven(undo: ExitStack, daemon: ScriptedDaemon) -> None:
    parent = started(undo, daemon, patience=Patience(PATIENCE_S, 0.25))
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
    start.result(PATIENCE_S)
    assert parent.next_loss() == "the daemon no longer knows us"
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
    start.result(PATIENCE_S)
    assert "not msgpack" in parent.next_loss()
    daemon.let_in()
    parent.wait_for_session(2)


def test_a_daemon_that_ended_is_lost_at_once_and_used_again_when_it_is_back(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    parent = started(undo, daemon)
    daemon.close()
    assert parent.next_loss() == "the connection ended"
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
    assert parent.next_loss() == "the connection ended"
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
    start.result(PATIENCE_S)
    parent.may_report.clear()
    with ThreadPoolExecutor(1) as data_thread:
        report = data_thread.submit(parent.link.mark_lost, 1, "no reply within 250 ms")
        parent.next_loss()
        daemon.say(Pong(ping.sequence, False, 0.0))
        daemon.let_in()
        parent.wait_for_session(2)
        parent.may_report.set()
        report.result(PATIENCE_S)
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
    start.result(PATIENCE_S)


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_closing_leaves_no_thread_and_no_descriptor(address: str) -> None:
    counts = []
    for _ in range(3):
        with ExitStack() as undo:
            daemon = undo.enter_context(ScriptedDaemon(address))
            parent = started(undo, daemon)
            assert "dflash-supervisor" in thread_names()
            parent.supervisor.close()
            assert "dflash-supervisor" not in thread_names()
        counts.append(num_descriptors())
    assert counts[1] == counts[2]


def test_closing_says_goodbye(undo: ExitStack, daemon: ScriptedDaemon) -> None:
    for _ in range(10):
        with ExitStack() as parent_undo:
            started(parent_undo, daemon)
        assert daemon.expect(Bye, skipping=(Ping,)).link_id == LINK_ID


def test_closing_twice_and_before_starting_is_harmless(undo: ExitStack, address: str) -> None:
    parent = Parent(undo, address)
    parent.supervisor.close()
    parent.supervisor.close()


def test_closing_does_not_wait_for_heartbeats_when_a_pong_comes_in_that_moment(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    for _ in range(40):
        with ExitStack() as parent_undo:
            parent = Parent(
                parent_undo, daemon.endpoint.address, patience=Patience(PATIENCE_S, 0.5)
            )
            start = parent.start()
            daemon.say(welcome_to(daemon.expect(Hello, skipping=(Ping,))))
            start.result(PATIENCE_S)
            ping = daemon.expect(Ping)
            daemon.say(Pong(ping.sequence, True, 0.0))
            started_s = time.monotonic()
            parent.supervisor.close()
            assert time.monotonic() - started_s < 2.0  # five heartbeats would be 2.5 s


def test_closing_during_a_handshake_does_not_wait_for_the_daemon(
    undo: ExitStack, run_dir: Path
) -> None:
    """One daemon refuses while another one has heard our hello and says nothing."""
    silent, refusing = (
        undo.enter_context(ScriptedDaemon(f"ipc://{run_dir}/{name}")) for name in ("a", "b")
    )
    parent = Parent(undo, refusing.endpoint.address, silent.endpoint.address)
    start = parent.start()
    silent.expect(Hello)
    refusing.expect(Hello)
    refusing.say(Refused("busy", "64 parents are connected already"))
    with pytest.raises(HandshakeRefused, match="64 parents"):
        start.result(PATIENCE_S / 2)
    assert "dflash-supervisor" not in thread_names()


# Daemons of our own


def children() -> list[psutil.Process]:
    processes: list[psutil.Process] = psutil.Process().children()
    return processes


def test_a_child_that_ends_before_it_is_ready_is_reported_with_how_it_ended(
    undo: ExitStack, address: str
) -> None:
    start = Parent(undo, address, launch=launch("raise SystemExit(3)")).start()
    with pytest.raises(DaemonUnavailable, match="cpu0 ended with exit code 3 before it was ready"):
        start.result(PATIENCE_S)
    assert children() == []
    assert_starts(address)


def test_a_child_that_cannot_be_executed_is_reported_with_the_reason(
    undo: ExitStack, address: str, tmp_path: Path
) -> None:
    start = Parent(undo, address, launch=Launch((str(tmp_path / "nothing"),))).start()
    with pytest.raises(DaemonUnavailable, match=r"cannot start .*nothing: No such file"):
        start.result(PATIENCE_S)
    assert_starts(address)


def test_a_silent_child_is_ended(
    undo: ExitStack, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_SPAWN_SILENCE_S", 0.3)
    parent = Parent(
        undo, address, launch=launch(LIVES_ON_ITS_LIFELINE), patience=Patience(0.1, PATIENCE_S)
    )
    with pytest.raises(DaemonUnavailable, match="nothing answers"):
        parent.start().result(PATIENCE_S)
    assert children() == []


def test_a_killed_child_is_lost_replaced_and_ended_at_the_close(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = started(undo, daemon, launch=launch(LIVES_ON_ITS_LIFELINE))
    (first,) = children()
    first.send_signal(signal.SIGKILL)
    assert parent.next_loss() == "was ended by SIGKILL"
    daemon.let_in()
    parent.wait_for_session(2)
    (second,) = children()
    assert second.pid != first.pid
    assert parent.link.restarts == 1
    parent.supervisor.close()
    assert children() == []


def test_a_refused_child_is_ended(undo: ExitStack, daemon: ScriptedDaemon) -> None:
    start = Parent(undo, daemon.endpoint.address, launch=launch(LIVES_ON_ITS_LIFELINE)).start()
    daemon.expect(Hello)
    daemon.say(Refused("spec", "different versions of this program?"))
    with pytest.raises(HandshakeRefused, match="different versions") as caught:
        start.result(PATIENCE_S)
    assert not isinstance(caught.value, DeadlineExceeded)
    assert children() == []
