"""Other experts for a daemon, prepared beside the session that goes on. The daemon is scripted."""

from __future__ import annotations

import select
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from dflash_protocol.errors import DaemonUnavailable, HandshakeRefused
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import Bye, Hello, Ping, Pong, Progress, Refused
from dflash_runtime.experts.daemons import link_task
from dflash_runtime.experts.daemons.link import DaemonLink, Handover
from dflash_runtime.experts.daemons.link_task import Timeouts
from support.scripted_daemon import LINK_ID, TIMEOUT_S, ScriptedDaemon, welcome_to
from support.supervised import OWNED, Parent, started

OTHERS = OwnedExperts.from_lists({0: [3, 2], 1: [0]})
NEXT_ID = "cd" * 8


def greeted(daemon: ScriptedDaemon, owned: OwnedExperts = OTHERS) -> Hello:
    """The hello with these experts, which is answered with nothing yet."""
    hello = daemon.expect(Hello, skipping=(Ping,))
    assert hello.placement_fingerprint == owned.fingerprint
    assert daemon.frames == [owned.canonical_bytes]
    return hello


def let_in(daemon: ScriptedDaemon, handover: Handover, link_id: str = NEXT_ID) -> None:
    """Answer a hello with other experts, and the first ping of its link."""
    daemon.say(Progress("load", 1, 2), welcome_to(greeted(daemon, handover.owned), link_id=link_id))
    handover.ready.result(TIMEOUT_S)
    while daemon.expect(Ping).link_id != link_id:
        pass
    daemon.say(Pong(1, True, 0.0))


def bye_of(daemon: ScriptedDaemon, link_id: str) -> None:
    while daemon.expect(Bye, skipping=(Ping,)).link_id != link_id:
        pass


def is_lost(link: DaemonLink) -> bool:
    return bool(select.select([link.lost_fd], [], [], 0)[0])


def test_a_handover_is_prepared_beside_the_session_and_takes_over(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = started(undo, daemon)
    link, before = parent.link, parent.link.session
    assert before is not None
    handover = link.prepare(OTHERS)
    let_in(daemon, handover)
    assert link.session is before
    assert link.owned is OWNED
    link.take_over(handover)
    session = link.session
    assert session is not None
    assert (session.welcome.link_id, link.owned) == (NEXT_ID, OTHERS)
    assert session.generation > before.generation
    bye_of(daemon, LINK_ID)
    link.mark_lost(before.generation, "late news")
    assert link.session is session
    assert not is_lost(link)
    assert link.restarts == 0
    assert parent.losses.empty()
    assert parent.returns.empty()


def test_handovers_follow_one_another_and_the_last_one_is_what_a_daemon_gets_that_comes_back(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = started(undo, daemon)
    for number, owned in enumerate((OTHERS, OWNED, OTHERS)):
        handover = parent.link.prepare(owned)
        let_in(daemon, handover, f"{number:02}")
        parent.link.take_over(handover)
    bye_of(daemon, "01")
    session = parent.link.session
    assert session is not None
    parent.link.mark_lost(session.generation, "it was late")
    daemon.say(welcome_to(greeted(daemon)))
    parent.wait_for_session(session.generation + 1)
    assert parent.link.restarts == 1


@pytest.mark.parametrize("code", ["memory", "busy", "weights", "stopping"])
def test_a_refused_handover_leaves_the_session_as_it_is(
    undo: ExitStack, daemon: ScriptedDaemon, code: str
) -> None:
    parent = started(undo, daemon)
    link, before = parent.link, parent.link.session
    handover = link.prepare(OTHERS)
    greeted(daemon)
    daemon.say(Refused(code, "no room"))
    kind = DaemonUnavailable if code == "stopping" else HandshakeRefused
    with pytest.raises(kind, match="no room"):
        handover.ready.result(TIMEOUT_S)
    assert (link.session, link.owned, link.handover) == (before, OWNED, None)
    assert parent.losses.empty()
    again = link.prepare(OTHERS)
    let_in(daemon, again)
    link.take_over(again)
    bye_of(daemon, LINK_ID)


def test_a_handover_that_is_withdrawn_is_forgotten_by_the_daemon(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    """While it is loaded, and once it is ready."""
    parent = started(undo, daemon)
    link, before = parent.link, parent.link.session
    handover = link.prepare(OTHERS)
    hello = greeted(daemon)
    link.end_handover(handover, DaemonUnavailable("not wanted"))
    daemon.say(welcome_to(hello, link_id=NEXT_ID))
    bye_of(daemon, NEXT_ID)
    with pytest.raises(DaemonUnavailable, match="not wanted"):
        handover.ready.result(TIMEOUT_S)
    handover = link.prepare(OTHERS)
    let_in(daemon, handover, "ef")
    link.end_handover(handover, DaemonUnavailable("not wanted"))
    bye_of(daemon, "ef")
    assert handover.error is not None
    assert (link.session, link.owned, link.handover) == (before, OWNED, None)


def lose_connection(daemon: ScriptedDaemon, link: DaemonLink) -> None:
    daemon.close()


def lose_session(daemon: ScriptedDaemon, link: DaemonLink) -> None:
    assert link.session is not None
    link.mark_lost(link.session.generation, "late")


def give_up(daemon: ScriptedDaemon, link: DaemonLink) -> None:
    link.give_up("wrong")


@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("lose", [lose_connection, lose_session, give_up])
def test_a_loss_ends_the_handover_too(
    undo: ExitStack,
    daemon: ScriptedDaemon,
    lose: Callable[[ScriptedDaemon, DaemonLink], None],
    is_ready: bool,
) -> None:
    parent = started(undo, daemon)
    handover = parent.link.prepare(OTHERS)
    if is_ready:
        let_in(daemon, handover)
    else:
        greeted(daemon)
    lose(daemon, parent.link)
    parent.next_loss()
    if not is_ready:
        with pytest.raises(DaemonUnavailable):
            handover.ready.result(TIMEOUT_S)
    with pytest.raises(DaemonUnavailable, match="cpu0"):
        parent.link.prepare(OTHERS)
    assert parent.link.owned is OWNED


def test_what_takes_over_after_a_loss_is_greeted_before_it_is_used(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    """Never the experts before with the ids of these."""
    parent = started(undo, daemon)
    link, before = parent.link, parent.link.session
    assert before is not None
    handover = link.prepare(OTHERS)
    let_in(daemon, handover)
    parent.may_report.clear()  # the loss is known, and the supervisor does not hear of it yet
    undo.callback(parent.may_report.set)
    undo.enter_context(ThreadPoolExecutor(1)).submit(link.mark_lost, before.generation, "late")
    assert parent.losses.get(timeout=TIMEOUT_S)[1] == "late"
    link.take_over(handover)
    assert link.session is None
    assert link.owned is OTHERS
    assert is_lost(link)
    parent.may_report.set()
    daemon.say(welcome_to(greeted(daemon), link_id="ef"))
    parent.wait_for_session(before.generation + 2)  # the handover's has one, too
    assert link.session is not None
    assert link.session.welcome.link_id == "ef"


def test_a_welcome_to_the_experts_before_is_not_used(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    """They were changed while the daemon, which was lost, was greeted again."""
    parent = started(undo, daemon)
    link, before = parent.link, parent.link.session
    assert before is not None
    handover = link.prepare(OTHERS)
    greeted(daemon)
    link.mark_lost(before.generation, "late")
    hello = greeted(daemon, OWNED)
    link.take_over(handover)
    daemon.say(welcome_to(hello, link_id="01"))
    daemon.say(welcome_to(greeted(daemon), link_id="02"))
    parent.wait_for_session(before.generation + 1)
    assert link.session is not None
    assert link.session.welcome.link_id == "02"


def test_a_daemon_that_says_nothing_is_given_up_after_a_while(
    undo: ExitStack, daemon: ScriptedDaemon
) -> None:
    parent = started(undo, daemon, timeouts=Timeouts(0.1, TIMEOUT_S))
    before = parent.link.session
    handover = parent.link.prepare(OTHERS)
    greeted(daemon)
    with pytest.raises(DaemonUnavailable, match=r"0 s"):
        handover.ready.result(TIMEOUT_S)
    assert parent.link.session is before


def test_a_daemon_that_loads_for_ever_is_given_up_too(
    undo: ExitStack, daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_task, "_HANDOVER_S", 0.2)
    parent = started(undo, daemon)
    handover = parent.link.prepare(OTHERS)
    greeted(daemon)
    for number in range(10):
        daemon.say(Progress("load", number, 10))
    with pytest.raises(DaemonUnavailable, match="loaded"):
        handover.ready.result(TIMEOUT_S)


def test_a_prepared_link_is_watched(undo: ExitStack, daemon: ScriptedDaemon) -> None:
    """A daemon that forgets it, while the session before goes on, ends the handover."""
    parent = started(undo, daemon)
    before = parent.link.session
    handover = parent.link.prepare(OTHERS)
    daemon.say(welcome_to(greeted(daemon), link_id=NEXT_ID))
    handover.ready.result(TIMEOUT_S)
    while daemon.expect(Ping).link_id != NEXT_ID:
        pass
    daemon.say(Pong(1, False, 0.0))
    bye_of(daemon, NEXT_ID)
    assert handover.error is not None
    assert parent.link.session is before
    assert parent.link.handover is None


@pytest.mark.parametrize("is_ready", [False, True])
def test_the_end_of_the_parent_ends_a_handover(
    undo: ExitStack, daemon: ScriptedDaemon, is_ready: bool
) -> None:
    parent = started(undo, daemon)
    handover = parent.link.prepare(OTHERS)
    if is_ready:
        let_in(daemon, handover)
    else:
        greeted(daemon)
    parent.supervisor.close()
    if not is_ready:
        with pytest.raises(DaemonUnavailable):
            handover.ready.result(0)
    assert handover.error is not None


def test_one_handover_at_a_time(undo: ExitStack, daemon: ScriptedDaemon) -> None:
    parent: Parent = started(undo, daemon)
    parent.link.prepare(OTHERS)
    with pytest.raises(AssertionError):
        parent.link.prepare(OTHERS)
