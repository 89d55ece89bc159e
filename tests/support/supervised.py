"""A supervisor with its links and a record of its events, with a scripted daemon."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import zmq

from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.experts.daemons.handshake import Greeting
from dflash_runtime.experts.daemons.link import DaemonLink, Launch
from dflash_runtime.experts.daemons.link_task import LinkOptions, Timeouts
from dflash_runtime.experts.daemons.supervisor import Supervisor
from support.scripted_daemon import TIMEOUT_S, ScriptedDaemon

GREETING = Greeting("model-1f", "digest-2e", "class-3d", max_tokens=64)
OWNED = OwnedExperts.from_lists({0: [3, 1], 2: [0]})
UNHURRIED = Timeouts(connect_silence_s=TIMEOUT_S, heartbeat_s=TIMEOUT_S)


class Parent:
    """A supervisor with its links, and a record of its events. `owned` None: to be given later."""

    def __init__(
        self,
        undo: ExitStack,
        *addresses: str,
        timeouts: Timeouts = UNHURRIED,
        launch: Launch | None = None,
        tolerates_absent: bool = False,
        tries_again: bool = False,
        greeting: Greeting = GREETING,
        owned: OwnedExperts | None = OWNED,
    ) -> None:
        self.losses: queue.Queue[tuple[str, str]] = queue.Queue()
        self.returns: queue.Queue[tuple[str, str]] = queue.Queue()
        self.may_report = threading.Event()
        self.may_report.set()
        self.progress: queue.Queue[tuple[str, str, int, int]] = queue.Queue()
        self.links = [
            DaemonLink(
                f"cpu{index}",
                parse_endpoint(address),
                owned,
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
            context,
            self.links,
            LinkOptions(
                greeting, timeouts, tolerates_absent=tolerates_absent, tries_again=tries_again
            ),
            on_progress=lambda *report: self.progress.put(report),
        )
        undo.callback(self.supervisor.close)
        self._pool = undo.enter_context(ThreadPoolExecutor(1))
        undo.callback(self.supervisor.close)  # before the pool waits for a start that hangs

    def _on_event(self, kind: str, name: str, reason: str) -> None:
        if kind == "daemon_back":
            self.returns.put((name, reason))
            return
        self.losses.put((name, reason))
        assert self.may_report.wait(TIMEOUT_S)

    @property
    def link(self) -> DaemonLink:
        return self.links[0]

    def start(self) -> Future[None]:
        """Start in another thread, while the test plays the daemon."""
        return self._pool.submit(self.supervisor.start)

    def ask(self) -> Future[None]:
        """Start in another thread, until the daemons have said what they offer."""
        return self._pool.submit(self.supervisor.ask)

    def next_loss(self) -> str:
        """The reason of the first link's next loss."""
        name, reason = self.losses.get(timeout=TIMEOUT_S)
        assert name == "cpu0"
        return reason

    def wait_for_session(self, generation: int) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while (session := self.link.session) is None or session.generation != generation:
            assert time.monotonic() < end_s, f"session {generation} never came"
            time.sleep(0.001)


def started(undo: ExitStack, daemon: ScriptedDaemon, **options: Any) -> Parent:
    """A parent that has a session with this daemon."""
    parent = Parent(undo, daemon.endpoint.address, **options)
    start = parent.start()
    daemon.let_in()
    start.result(TIMEOUT_S)
    return parent


def assert_starts(address: str) -> None:
    """Check after a failure that another parent can connect to a correct daemon.

    This daemon has another address, as late messages of the first parent may still arrive.
    """
    with ExitStack() as undo:
        daemon = undo.enter_context(ScriptedDaemon(f"{address}-good"))
        assert started(undo, daemon).link.session is not None


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]
