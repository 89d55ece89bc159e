"""DaemonLink: one loss is counted once, and its eventfd says whether the link is lost."""

from __future__ import annotations

import re
import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import Welcome
from dflash_runtime.experts.daemons import link as link_module
from dflash_runtime.experts.daemons.link import DaemonLink
from dflash_runtime.experts.events import EventKind

WELCOME = Welcome(2, "00ff", "model", "placement", "class", "cpu", 40001, 16, 1 << 30, 1e3)


class Losses:
    """Records what a link reports."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def __call__(self, kind: str, name: str, reason: str) -> None:
        assert name == "cpu0"
        if kind == "daemon_lost":
            self.reasons.append(reason)
        else:
            assert kind == "daemon_back"


def link_to(
    name: str, on_event: Callable[[str, str, str], None], address: str = "ipc:///run/cpu0"
) -> DaemonLink:
    return DaemonLink(
        name,
        parse_endpoint(address),
        OwnedExperts({}),
        launch=None,
        numeric_class=WELCOME.numeric_class,
        on_event=on_event,
    )


@pytest.fixture
def losses() -> Losses:
    return Losses()


@pytest.fixture
def link(losses: Losses) -> Iterator[DaemonLink]:
    link = link_to("cpu0", losses)
    yield link
    link.close()


def is_readable(link: DaemonLink) -> bool:
    return bool(select.select([link.lost_fd], [], [], 0)[0])


def test_a_new_link_is_not_connected_and_nothing_is_lost(link: DaemonLink, losses: Losses) -> None:
    assert link.session is None
    assert re.match("daemon cpu0: .*connected", link.lost_reason())
    assert not is_readable(link)
    assert link.restarts == 0
    link.mark_lost(0, "what")
    link.mark_lost(1, "what")
    assert losses.reasons == []
    assert not is_readable(link)


def test_eventfd_is_readable_exactly_while_the_last_session_is_known_to_be_lost(
    link: DaemonLink,
) -> None:
    for _ in range(3):
        session = link.mark_ready(WELCOME)
        assert link.session is session
        assert not is_readable(link)
        link.mark_lost(session.generation, "it was ended")
        assert link.session is None
        assert is_readable(link)
        assert link.lost_reason() == "daemon cpu0: it was ended"
    link.mark_ready(WELCOME)
    assert not is_readable(link)


def test_generations_are_never_used_twice_and_restarts_are_counted(link: DaemonLink) -> None:
    generations = []
    for number in range(4):
        generations.append(link.mark_ready(WELCOME).generation)
        assert link.restarts == number
        link.mark_lost(generations[-1], "again")
    assert len(set(generations)) == 4


def test_a_loss_of_an_older_session_does_not_touch_the_new_one(
    link: DaemonLink, losses: Losses
) -> None:
    old = link.mark_ready(WELCOME)
    link.mark_lost(old.generation, "first")
    new = link.mark_ready(WELCOME)
    link.mark_lost(old.generation, "late news")
    assert link.session is new
    assert not is_readable(link)
    assert losses.reasons == ["first"]


def test_a_loss_that_several_report_is_counted_once(link: DaemonLink, losses: Losses) -> None:
    session = link.mark_ready(WELCOME)
    start = threading.Barrier(8)

    def report(number: int) -> None:
        start.wait()
        link.mark_lost(session.generation, f"reporter {number}")

    reporters = [threading.Thread(target=report, args=(number,)) for number in range(8)]
    for reporter in reporters:
        reporter.start()
    for reporter in reporters:
        reporter.join()
    assert len(losses.reasons) == 1
    assert link.lost_reason() == f"daemon cpu0: {losses.reasons[0]}"


def test_the_supervisor_is_woken_by_a_loss_and_only_then(link: DaemonLink) -> None:
    woken: list[tuple[int, object]] = []
    link.set_supervisor_wake(lambda generation: woken.append((generation, link.session)))
    session = link.mark_ready(WELCOME)
    assert woken == []
    link.mark_lost(session.generation, "late")
    link.mark_lost(session.generation, "late")
    assert woken == [(session.generation, None)]


def test_a_loss_may_be_handled_by_looking_at_the_link(losses: Losses) -> None:
    """The callbacks run without the link's lock."""

    def look(kind: str, name: str, reason: str) -> None:
        losses(kind, name, looked_at.lost_reason())

    looked_at = link_to("cpu0", look)
    looked_at.mark_lost(looked_at.mark_ready(WELCOME).generation, "late")
    looked_at.close()
    assert losses.reasons == ["daemon cpu0: late"]


def test_a_daemon_that_is_used_again_is_reported_once_with_how_long_it_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(link_module, "monotonic", lambda: now_s)
    events: list[tuple[str, str, str]] = []
    link = link_to("cpu0", lambda *event: events.append(event))
    session = link.mark_ready(WELCOME)
    assert events == [], "it was never away"
    now_s = 200.0
    link.mark_lost(session.generation, "late")
    now_s = 203.25
    link.mark_absent(EventKind.DAEMON_ABSENT, "nothing answers")
    now_s = 265.5
    link.mark_ready(WELCOME)
    assert "65.5 s" in events[-1][2]
    assert events == [
        ("daemon_lost", "cpu0", "late"),
        ("daemon_absent", "cpu0", "nothing answers"),
        ("daemon_back", "cpu0", events[-1][2]),
    ]
    link.mark_ready(WELCOME)
    link.close()
    assert len(events) == 3


def test_one_that_was_not_there_at_first_is_reported_when_it_comes() -> None:
    events: list[tuple[str, str, str]] = []
    link = link_to("cpu0", lambda *event: events.append(event))
    link.mark_absent(EventKind.DAEMON_ABSENT, "nothing answers")
    link.mark_ready(WELCOME)
    link.close()
    assert [event[0] for event in events] == ["daemon_absent", "daemon_back"]


def test_data_goes_beside_an_ipc_endpoint_or_to_the_port_that_was_told() -> None:
    for address, data_address in (
        ("ipc:///run/cpu0", "ipc:///run/cpu0.data"),
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:40001"),
    ):
        link = link_to("cpu0", Losses(), address)
        assert link.mark_ready(WELCOME).data_address == data_address
        link.close()


def test_a_session_of_another_numeric_class_is_reported_each_time() -> None:
    events: list[tuple[str, str, str]] = []
    link = link_to("cpu0", lambda *event: events.append(event))
    other = replace(WELCOME, numeric_class="other-1")
    for welcome in (WELCOME, other, other):
        link.mark_ready(welcome)
    link.close()
    reason = f"daemon other-1, parent {WELCOME.numeric_class}"
    assert events == [("numeric_class_differs", "cpu0", reason)] * 2
