"""A daemon's end of mailboxes, when several parents have one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_protocol.ring.segment import MailTerms, create_segment, open_segment
from dflash_runtime.compute.gpu.device.device import Graph
from dflash_runtime.compute.gpu.mailbox.mail import TRIAL_LAYOUT, TRIAL_SHAPE, CupyMail
from dflash_runtime.compute.gpu.mailbox.parent import MailLink
from dflash_runtime.compute.gpu.mailbox.peer_memory import MemoryKeeper
from dflash_runtime.compute.gpu.transfers.payload import PayloadMover
from dflash_runtime.compute.mailbox_layout import Ask, MailState, MailWord, MailWords
from support.emulated_device import EmulatedDevice
from support.emulated_device.side_stream import EmulatedSideStream
from support.processes import START_S, wait_until

HOST, HOST_ALONE, PEERS, PEERS_ALONE = range(4)
"""Steps in the order in which they are captured."""


class Captured(EmulatedDevice):
    """Knows its graphs in order, and which of them were asked for by number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.graphs: list[Graph] = []
        self.replayed: list[int] = []
        replay = EmulatedSideStream.replay

        def noted(stream: EmulatedSideStream, graph: Graph) -> None:
            self.replayed.append(self.graphs.index(graph))
            replay(stream, graph)

        monkeypatch.setattr(EmulatedSideStream, "replay", noted)

    def capture(self, record: Callable[[], None]) -> Graph:  # type: ignore[override]
        self.graphs.append(super().capture(record))
        return self.graphs[-1]


class Parent:
    """One that asks a daemon for steps in which nothing is computed."""

    def __init__(self, served: CupyMail, daemon: EmulatedDevice, folder: Path) -> None:
        self._undo = ExitStack()
        segment = create_segment(folder, TRIAL_SHAPE, generation=1)
        self._undo.callback(segment.close)
        theirs = open_segment(folder, segment.name, TRIAL_SHAPE, generation=1)
        self._undo.callback(theirs.close)
        segment.unlink()
        device, lock = EmulatedDevice(), threading.RLock()
        segment.open_window(PayloadMover(device, lock))
        theirs.open_window(PayloadMover(daemon, lock))
        CupyMail(device, lock).begin(segment, MailTerms(1000))
        server = served.serve_trial(theirs)
        theirs.before_close = server.close
        words = MailWords(segment)
        wait_until(lambda: words.read(MailWord.STATE) == MailState.READY, "the mailbox")
        keeper = MemoryKeeper(lock)
        self._undo.callback(keeper.close)
        self.link = MailLink(
            device, TRIAL_LAYOUT, segment, name="a", is_live=lambda: True, keeper=keeper
        )
        self._undo.callback(self.link.close)

    def step(self) -> None:
        self.link.words.ask(Ask.STEP, 1)
        self.link.words.await_answer(START_S, lambda: True)

    def close(self) -> None:
        self._undo.close()


def test_who_is_waited_for_holds_up_no_other_parent(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    """Blocks that all wait leave others no room, and run where there is no other."""
    daemon = Captured(monkeypatch)
    served = CupyMail(daemon, threading.RLock())
    with ExitStack() as undo:
        undo.callback(served.close)
        first = Parent(served, daemon, run_dir)
        undo.callback(first.close)
        first.step()
        first.link.open_peer()
        first.link.use_peers(True)
        first.link.restart(0)
        first.step()
        second = Parent(served, daemon, run_dir)
        undo.callback(second.close)
        first.step()
        second.close()
        first.step()
    assert daemon.replayed == [HOST_ALONE, PEERS_ALONE, PEERS, PEERS_ALONE]
