"""The supervisor's handshakes with a daemon that follows a script."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from dflash_protocol.errors import (
    DaemonUnavailable,
    HandshakeRefused,
    ProtocolError,
    SettingsError,
)
from dflash_protocol.wire.messages import (
    PROTOCOL_VERSIONS,
    Hello,
    Message,
    Ping,
    Pong,
    Progress,
    Refused,
)
from dflash_runtime.experts.daemons.link_task import Timeouts
from support.hostile_texts import HOSTILE, assert_harmless
from support.scripted_daemon import TIMEOUT_S, ScriptedDaemon, welcome_to
from support.supervised import OWNED, Parent, assert_starts, thread_names


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
    start.result(TIMEOUT_S)
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
    start.result(TIMEOUT_S)
    assert all(link.session is not None for link in parent.links)


def test_a_refusal_is_raised_by_start_with_its_code_and_both_identities(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    start = Parent(undo, address).start()
    hello = daemon.expect(Hello)
    reason = f"this daemon runs model other-9a, asked for is model {hello.model_identity}"
    daemon.say(Refused("model", reason))
    with pytest.raises(HandshakeRefused) as caught:
        start.result(TIMEOUT_S)
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
        start.result(TIMEOUT_S)
    assert "dflash-supervisor" not in thread_names()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_identity": "other-9a"}, r"model other-9a\b.*\bmodel-1f"),
        ({"placement_fingerprint": "f00d"}, "placement f00d"),
        ({"version": 0}, r"version 0\b"),
        ({"version": 99}, r"version 99\b"),
        ({"payload": "bf16"}, "payload"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"pairs_per_second": 0.0}, "pairs_per_second"),
        ({"pairs_per_second": -1.0}, "pairs_per_second"),
    ],
)
def test_a_welcome_that_is_not_what_was_asked_for_is_refused(
    undo: ExitStack, daemon: ScriptedDaemon, address: str, changes: dict[str, Any], reason: str
) -> None:
    parent = Parent(undo, address)
    start = parent.start()
    daemon.say(welcome_to(daemon.expect(Hello), **changes))
    with pytest.raises(HandshakeRefused, match=f"cpu0 .*{reason}"):
        start.result(TIMEOUT_S)
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
        start.result(TIMEOUT_S)
    daemon.close()
    assert_starts(address)


@pytest.mark.parametrize("data_port", [0, 65536, 1 << 40])
def test_a_tcp_data_port_that_cannot_be_is_refused(undo: ExitStack, data_port: int) -> None:
    daemon = undo.enter_context(ScriptedDaemon(f"tcp://127.0.0.1:{free_port()}"))
    start = Parent(undo, daemon.endpoint.address).start()
    daemon.say(welcome_to(daemon.expect(Hello), data_port=data_port))
    with pytest.raises(HandshakeRefused, match="cpu0"):
        start.result(TIMEOUT_S)


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"garbage"], "msgpack"),
        ([b""], "msgpack"),
        ([b"\x81\xa4type\xa3odd"], "type"),
    ],
)
def test_garbage_instead_of_a_welcome_is_a_protocol_error(
    undo: ExitStack, daemon: ScriptedDaemon, address: str, frames: list[bytes], reason: str
) -> None:
    start = Parent(undo, address).start()
    daemon.expect(Hello)
    daemon.say_frames(*frames)
    with pytest.raises(ProtocolError, match=reason):
        start.result(TIMEOUT_S)
    daemon.close()
    assert_starts(address)


def test_another_message_instead_of_a_welcome_is_a_protocol_error(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    start = Parent(undo, address).start()
    daemon.expect(Hello)
    daemon.say(Pong(1, True, 0.0))
    with pytest.raises(ProtocolError, match=r"cpu0\b.*hello\b.*pong"):
        start.result(TIMEOUT_S)


def test_silence_is_unavailability_within_the_patience(undo: ExitStack, address: str) -> None:
    parent = Parent(undo, address, timeouts=Timeouts(0.2, TIMEOUT_S))
    started_s = time.monotonic()
    with pytest.raises(DaemonUnavailable, match=f"answers .*{address}"):
        parent.start().result(TIMEOUT_S)
    assert 0.2 <= time.monotonic() - started_s < TIMEOUT_S / 2
    assert_starts(address)


def test_one_that_is_absent_can_be_tolerated_and_is_used_once_it_comes(
    undo: ExitStack, run_dir: Path
) -> None:
    there = undo.enter_context(ScriptedDaemon(f"ipc://{run_dir}/there"))
    late_address = f"ipc://{run_dir}/late"
    addresses = late_address, there.endpoint.address
    parent = Parent(undo, *addresses, timeouts=Timeouts(0.3, TIMEOUT_S), tolerates_absent=True)
    start = parent.start()
    there.let_in()
    start.result(TIMEOUT_S)
    assert "answers" in parent.next_loss()
    assert parent.link.session is None
    with ScriptedDaemon(late_address) as late:
        late.let_in()
        parent.wait_for_session(1)


def test_a_refusal_is_not_tolerated(undo: ExitStack, daemon: ScriptedDaemon, address: str) -> None:
    start = Parent(undo, address, tolerates_absent=True).start()
    daemon.expect(Hello)
    daemon.say(Refused("model_mismatch", "another model"))
    with pytest.raises(HandshakeRefused, match="another model"):
        start.result(TIMEOUT_S)


def test_a_socket_that_others_could_have_made_is_not_spoken_to(
    undo: ExitStack, daemon: ScriptedDaemon, address: str, run_dir: Path
) -> None:
    """Not even where a daemon may be absent."""
    run_dir.chmod(0o1777)
    undo.callback(run_dir.chmod, 0o700)
    start = Parent(undo, address, tolerates_absent=True).start()
    with pytest.raises(SettingsError, match=f"{address}: .*accounts"):
        start.result(TIMEOUT_S)
    assert daemon.is_silent(0.1)


@pytest.mark.parametrize("mode", [0o777, 0o700])
def test_a_folder_that_comes_later_is_looked_at_before_its_daemon_is_spoken_to(
    undo: ExitStack, run_dir: Path, mode: int
) -> None:
    folder, made = run_dir / "later", run_dir / "made"
    start = Parent(undo, f"ipc://{folder}/cpu0").start()
    made.mkdir()
    made.chmod(mode)
    assert not start.done()
    made.rename(folder)
    undo.callback(folder.rmdir)
    if mode == 0o700:
        with ScriptedDaemon(f"ipc://{folder}/cpu0") as daemon:
            daemon.let_in()
            start.result(TIMEOUT_S)
    else:
        with pytest.raises(SettingsError, match="accounts"):
            start.result(TIMEOUT_S)


def test_what_a_daemon_says_of_itself_is_one_line_everywhere(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    start = Parent(undo, address).start()
    daemon.expect(Hello)
    daemon.say(Progress(HOSTILE, 1, 2))
    daemon.say(Refused(HOSTILE, HOSTILE))
    with pytest.raises(HandshakeRefused) as caught:
        start.result(TIMEOUT_S)
    assert_harmless(str(caught.value))
    assert_harmless(caught.value.code)
    assert "A\\x1b[2J" in caught.value.code


def test_a_hello_of_a_parent_that_gave_up_reaches_no_later_daemon(
    undo: ExitStack, address: str
) -> None:
    """It would load experts for a parent that is gone, and keep them."""
    for timeout_s in (0.01, 0.02, 0.03, 0.04):
        parent = Parent(undo, address, timeouts=Timeouts(timeout_s, TIMEOUT_S))
        with pytest.raises(DaemonUnavailable, match="answers"):
            parent.start().result(TIMEOUT_S)
    with ScriptedDaemon(address) as late:
        assert late.is_silent(0.4)


def test_a_daemon_that_hears_but_does_not_answer_is_unavailable_too(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    start = Parent(undo, address, timeouts=Timeouts(0.2, TIMEOUT_S)).start()
    daemon.expect(Hello)
    with pytest.raises(DaemonUnavailable, match="answers"):
        start.result(TIMEOUT_S)


def test_a_daemon_that_hangs_up_while_loading_is_not_waited_for(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    start = Parent(undo, address).start()
    daemon.expect(Hello)
    daemon.say(Progress("load", 1, 48))
    daemon.close()
    with pytest.raises(DaemonUnavailable, match="hung up"):
        start.result(TIMEOUT_S / 4)


@pytest.mark.parametrize(
    "last_words", [Progress("load", 1, 48), Refused("stopping", "told to stop while loading")]
)
def test_a_daemon_that_ended_while_loading_is_used_when_it_is_there_again(
    undo: ExitStack, address: str, last_words: Message
) -> None:
    """Its service manager starts it again."""
    parent = Parent(undo, address, tries_again=True)
    start = parent.start()
    with ScriptedDaemon(address) as first:
        first.expect(Hello)
        first.say(last_words)
        if isinstance(last_words, Progress):
            parent.progress.get(timeout=TIMEOUT_S)
        else:
            assert "told to stop" in parent.next_loss()
    if isinstance(last_words, Progress):
        assert "hung up" in parent.next_loss()
    with ScriptedDaemon(address) as second:
        second.let_in()
        start.result(TIMEOUT_S)
    assert re.search(r"\b0\.\d+ s", parent.returns.get(timeout=TIMEOUT_S)[1])


def test_a_daemon_that_ended_while_loading_is_waited_for_as_long_as_any(
    undo: ExitStack, address: str
) -> None:
    start = Parent(undo, address, timeouts=Timeouts(0.3, TIMEOUT_S), tries_again=True).start()
    with ScriptedDaemon(address) as daemon:
        daemon.expect(Hello)
        daemon.say(Progress("load", 1, 48))
    with pytest.raises(DaemonUnavailable, match="answers"):
        start.result(TIMEOUT_S)


def test_one_that_hangs_up_without_a_word_is_not_tried_again(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    """As one does that does not know our key."""
    start = Parent(undo, address, tries_again=True).start()
    daemon.expect(Hello)
    daemon.close()
    with pytest.raises(DaemonUnavailable, match="hung up"):
        start.result(TIMEOUT_S / 4)


def test_progress_extends_the_timeout_and_is_passed_on(
    undo: ExitStack, daemon: ScriptedDaemon, address: str
) -> None:
    parent = Parent(undo, address, timeouts=Timeouts(1.5, TIMEOUT_S))
    start = parent.start()
    hello = daemon.expect(Hello)
    assert parent.progress.get(timeout=TIMEOUT_S) == ("cpu0", "connect", 0, 1)
    for num_done in range(4):
        assert daemon.is_silent(0.5)
        daemon.say(Progress("load", num_done, 48))
        assert parent.progress.get(timeout=TIMEOUT_S) == ("cpu0", "load", num_done, 48)
    daemon.say(welcome_to(hello))
    start.result(TIMEOUT_S)
    assert parent.progress.get(timeout=TIMEOUT_S) == ("cpu0", "ready", 1, 1)
    daemon.say(Progress("load", 48, 48))
    daemon.say(Pong(daemon.expect(Ping).sequence, True, 0.0))
    assert parent.progress.empty(), "progress is reported only until the start ends"


def test_an_address_that_cannot_even_be_tried_is_unavailable_not_endless(undo: ExitStack) -> None:
    start = Parent(undo, "tcp://no host:5555").start()
    with pytest.raises(DaemonUnavailable, match="no host"):
        start.result(3.0)
