"""How a supervisor ends, and how its children do."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from dflash_protocol.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    HandshakeRefused,
)
from dflash_protocol.settings import child_environment
from dflash_protocol.wire.messages import (
    Bye,
    Hello,
    Ping,
    Pong,
    Refused,
)
from dflash_runtime.experts.daemons import link_task
from dflash_runtime.experts.daemons.link import Launch
from dflash_runtime.experts.daemons.link_task import Timeouts
from support.descriptors import no_descriptor_leak
from support.processes import own_children, wait_until
from support.scripted_daemon import LINK_ID, TIMEOUT_S, ScriptedDaemon, welcome_to
from support.supervised import Parent, assert_starts, started, thread_names

LIVES_ON_ITS_LIFELINE = (
    "import os, sys; os.read(int(sys.argv[sys.argv.index('--lifeline-fd') + 1]), 1)"
)


def launch(code: str) -> Launch:
    """A child of ours that runs these lines."""
    return Launch((sys.executable, "-I", "-S", "-c", code), child_environment(()))


def test_closing_leaves_no_thread_and_no_descriptor(address: str) -> None:
    def start_and_close() -> None:
        with ExitStack() as undo:
            daemon = undo.enter_context(ScriptedDaemon(address))
            parent = started(undo, daemon)
            assert "dflash-supervisor" in thread_names()
            parent.supervisor.close()
            assert "dflash-supervisor" not in thread_names()

    start_and_close()
    with no_descriptor_leak():
        start_and_close()


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
            parent = Parent(parent_undo, daemon.endpoint.address, timeouts=Timeouts(TIMEOUT_S, 0.5))
            start = parent.start()
            daemon.say(welcome_to(daemon.expect(Hello, skipping=(Ping,))))
            start.result(TIMEOUT_S)
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
        start.result(TIMEOUT_S / 2)
    assert "dflash-supervisor" not in thread_names()


# Daemons of our own


def children() -> list[psutil.Process]:
    processes: list[psutil.Process] = own_children()
    return processes


def test_a_child_that_ends_before_it_is_ready_is_reported_with_how_it_ended(
    undo: ExitStack, address: str
) -> None:
    start = Parent(undo, address, launch=launch("raise SystemExit(3)")).start()
    with pytest.raises(DaemonUnavailable, match=r"cpu0\b.* exit code 3\b"):
        start.result(TIMEOUT_S)
    assert children() == []
    assert_starts(address)


def dies_at_first(marker: Path, num_deaths: int, death: str) -> Launch:
    """A child that ends so many times as `death` says, then lives; someone else answers for it."""
    # Nothing but what the shell does itself: a child of it would outlive it.
    script = (
        f"n=0; [ ! -e {marker} ] || read n <{marker}; echo $((n + 1)) >{marker}; "
        f'[ "$n" -ge {num_deaths} ] || {{ {death}; }}; exec sleep 60'
    )
    return Launch(("/bin/sh", "-c", script), child_environment(()))


@pytest.mark.parametrize("death", ["kill -9 $$", "kill -11 $$", "exit 0", "exit 137"])
def test_a_child_that_is_ended_while_another_one_loads_is_replaced(
    undo: ExitStack, run_dir: Path, tmp_path: Path, death: str
) -> None:
    """By a signal, by SIGTERM that it obeys, or behind a script that tells of a signal."""
    loading, address = (
        undo.enter_context(ScriptedDaemon(f"ipc://{run_dir}/a")),
        f"ipc://{run_dir}/b",
    )
    parent = Parent(
        undo, address, loading.endpoint.address, tries_again=True,
        launch=dies_at_first(tmp_path / "deaths", 1, death),
    )  # fmt: skip
    # Only the first link is a child's; the other's daemon takes its time.
    parent.links[1].launch = None
    start = parent.start()
    hello = loading.expect(Hello)
    assert "ended" in parent.next_loss()
    undo.enter_context(ScriptedDaemon(address)).let_in()
    assert not start.done()
    loading.say(welcome_to(hello))
    start.result(TIMEOUT_S)
    assert parent.link.session is not None
    assert parent.losses.empty()
    assert parent.returns.get(timeout=TIMEOUT_S)[0] == "cpu0"


def test_a_child_that_is_ended_again_and_again_ends_the_start(
    undo: ExitStack, address: str, tmp_path: Path
) -> None:
    deaths = tmp_path / "deaths"
    parent = Parent(undo, address, tries_again=True, launch=dies_at_first(deaths, 99, "kill -9 $$"))
    start = parent.start()
    with pytest.raises(DaemonUnavailable, match=r"cpu0\b.* SIGKILL\b.*\b3 times"):
        start.result(TIMEOUT_S)
    assert deaths.read_text() == "3\n"
    assert children() == []


def test_a_child_that_is_required_is_not_tried_again(
    undo: ExitStack, address: str, tmp_path: Path
) -> None:
    deaths = tmp_path / "deaths"
    start = Parent(undo, address, launch=dies_at_first(deaths, 1, "kill -9 $$")).start()
    with pytest.raises(DaemonUnavailable, match=r"cpu0\b.* SIGKILL\b"):
        start.result(TIMEOUT_S)
    assert deaths.read_text() == "1\n"


def test_a_child_that_fails_by_itself_is_not_tried_again(undo: ExitStack, address: str) -> None:
    start = Parent(undo, address, tries_again=True, launch=launch("raise SystemExit(3)")).start()
    with pytest.raises(DaemonUnavailable, match=r"cpu0\b.* exit code 3\b"):
        start.result(TIMEOUT_S)


def test_a_child_that_cannot_be_executed_is_reported_with_the_reason(
    undo: ExitStack, address: str, tmp_path: Path
) -> None:
    start = Parent(undo, address, launch=Launch((str(tmp_path / "nothing"),), {})).start()
    with pytest.raises(DaemonUnavailable, match="nothing: No such file"):
        start.result(TIMEOUT_S)
    assert_starts(address)


def test_a_silent_child_is_ended(
    undo: ExitStack, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_task, "_SPAWN_SILENCE_S", 0.3)
    parent = Parent(
        undo, address, launch=launch(LIVES_ON_ITS_LIFELINE), timeouts=Timeouts(0.1, TIMEOUT_S)
    )
    with pytest.raises(DaemonUnavailable, match="answers"):
        parent.start().result(TIMEOUT_S)
    assert children() == []


def test_a_killed_child_is_lost_replaced_and_ended_at_the_close(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = started(undo, daemon, launch=launch(LIVES_ON_ITS_LIFELINE))
    (first,) = children()
    first.send_signal(signal.SIGKILL)
    assert "SIGKILL" in parent.next_loss()
    daemon.let_in()
    parent.wait_for_session(2)
    (second,) = children()
    assert second.pid != first.pid
    assert parent.link.restarts == 1
    parent.supervisor.close()
    assert children() == []


def test_a_daemon_that_is_given_up_is_not_greeted_again(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    """However well it may be; others would be greeted again within a tenth of a second."""
    parent = started(undo, daemon)
    parent.link.give_up("layer 3: 1 of 96 sums have other bits")
    assert parent.next_loss() == "layer 3: 1 of 96 sums have other bits"
    assert parent.link.session is None
    daemon.expect(Bye, skipping=(Ping,))
    assert daemon.is_silent(0.5)
    parent.link.give_up("and again")
    assert parent.losses.empty()


def test_a_child_that_is_given_up_is_ended(undo: ExitStack, daemon: ScriptedDaemon) -> None:
    parent = started(undo, daemon, launch=launch(LIVES_ON_ITS_LIFELINE))
    (child,) = [each for each in children() if each.status() != psutil.STATUS_ZOMBIE]
    parent.link.give_up("layer 3: 1 of 96 sums have other bits")
    wait_until(lambda: not child.is_running(), "the child to be ended")
    assert daemon.is_silent(0.3)


def test_a_refused_child_is_ended(undo: ExitStack, daemon: ScriptedDaemon) -> None:
    start = Parent(undo, daemon.endpoint.address, launch=launch(LIVES_ON_ITS_LIFELINE)).start()
    daemon.expect(Hello)
    daemon.say(Refused("spec", "different versions of this program?"))
    with pytest.raises(HandshakeRefused, match="different versions") as caught:
        start.result(TIMEOUT_S)
    assert not isinstance(caught.value, DeadlineExceeded)
    assert children() == []
