"""The daemon's end of a mailbox: it does what the parent asks for, a step most often.

Between two steps the thread sleeps, and what answers does not poll for long.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from dflash_protocol.errors import DaemonUnavailable, DflashError, ProtocolError, one_line
from dflash_protocol.ring.segment import Segment, silence_bell
from dflash_runtime.compute.mailbox_layout import (
    CLOSED,
    LAYOUT_NUMBER,
    MODULUS,
    Ask,
    Asked,
    MailState,
    MailWord,
    MailWords,
)

_LOG = logging.getLogger(__name__)

_POLL_MS = 250
_LONGEST_LIMIT_MS = 60_000
_MOST_STEPS = 64
"""Most steps that can be asked for before any of them is done."""


class MailEnd(Protocol):
    """What answers a mailbox's requests, a device or a processor; used by the mailbox's thread.

    All methods raise DflashError if it cannot go on.
    """

    def prepare(self, limit_ms: int) -> None:
        """Get ready for steps of one token, each of which ends after `limit_ms` at the latest."""

    def step_of(self, num_tokens: int) -> Callable[[], object]:
        """A function that starts a step of so many tokens, without waiting for it.

        Raises: ProtocolError if the parent has not asked for steps of this size before.
        """

    def wait(self) -> None:
        """Wait for all steps that were started, and then for the parent's."""

    def do(self, asked: Asked) -> None:
        """Do another request than a step; no step is running."""

    def close(self) -> None:
        """Wait for the steps, which were aborted, and release everything."""


class MailServer:
    """Serves one parent's mailbox with its own thread.

    States, in MailWord.STATE: PREPARING, READY, SEES_PEER, FAILED (see MailState); the parent may
    ask once it is READY. Owns: the thread, and `end`; not the segment.
    """

    def __init__(self, segment: Segment, end: MailEnd) -> None:
        self._segment, self._end = segment, end
        self._words = MailWords(segment)
        self._words.write(MailWord.DAEMON_LAYOUT, LAYOUT_NUMBER)
        self._num_done = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-mailbox", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether steps may be under way."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait for all steps that were started; any thread may. Raises: DeviceUnavailable."""
        self._end.wait()

    def close(self) -> None:
        """Abort running steps and end the thread. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        with suppress(DaemonUnavailable):
            self._words.write(MailWord.DAEMON_ABORT, CLOSED)
            self._segment.ring_mail()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._prepare()
            self._words.write(MailWord.STATE, MailState.READY)
            self._serve()
        except DflashError as error:
            if not self._stop.is_set():
                # docs (daemon): it could not be made ready; the parent's host asks instead
                _LOG.warning("mailbox unavailable: %s", one_line(str(error)))
        except Exception:
            # docs (daemon): a bug, with its traceback: report it. The parent's host asks
            # instead
            _LOG.exception("mailbox failed")
        finally:
            with suppress(DaemonUnavailable):
                self._words.write(MailWord.STATE, MailState.FAILED)
                self._words.write(MailWord.DAEMON_ABORT, CLOSED)
            self._end.close()

    def _prepare(self) -> None:
        """Raises: DflashError."""
        number = self._words.read(MailWord.PARENT_LAYOUT)
        if number != LAYOUT_NUMBER:
            raise ProtocolError(f"the parent knows layout {number}, this daemon {LAYOUT_NUMBER}")
        limit_ms = min(self._words.read(MailWord.LIMIT_MS), _LONGEST_LIMIT_MS)
        # The parent must time out first: it knows which daemon it waits for.
        self._end.prepare(limit_ms + limit_ms // 2)

    def _serve(self) -> None:
        bell = self._segment.mail_bell
        assert bell is not None
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        while not self._stop.is_set():
            asked = self._words.asked()
            if asked.number != self._num_done % MODULUS:
                self._do(asked)
            elif poll.poll(_POLL_MS):
                silence_bell(bell)

    def _do(self, asked: Asked) -> None:
        if asked.ask is Ask.STEP:
            # Several may have been asked for since the last poll.
            if (asked.number - self._num_done) % MODULUS > _MOST_STEPS:
                raise ProtocolError("a mailbox was asked for more steps than can be under way")
            start = self._end.step_of(asked.argument)
            while self._num_done % MODULUS != asked.number:
                # A parent that has given up may release its memory.
                if not self._words.read(MailWord.PARENT_ABORT):
                    start()
                self._num_done += 1
        else:
            self._end.wait()
            self._end.do(asked)
            self._num_done = asked.number
        self._words.answer(self._num_done)
