"""The words of a mailbox that the hosts read and write, for either side. See `layout`."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ring.segment import Segment
from dflash_runtime.compute.gpu.mailbox.layout import (
    ANSWERS_AT,
    ARGUMENT_AT,
    ASKED_AT,
    DOORBELL_AT,
    Ask,
)

_WORD = struct.Struct("<I")
_KNOWN = frozenset(int(ask) for ask in Ask)
_MODULUS = 1 << 32
_POLL_S = 100e-6


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to the daemon's host."""

    number: int
    """How many requests there were, this one included."""
    ask: Ask
    argument: int


class MailWords:
    """Used by one thread a side."""

    def __init__(self, segment: Segment) -> None:
        """Raises: DaemonUnavailable if the memory is closed."""
        self._segment = segment
        # The daemon may have served requests of an earlier parent.
        self._num_asked = self.read(DOORBELL_AT)

    def read(self, offset: int) -> int:
        """Raises: DaemonUnavailable if the memory is closed."""
        word: int = _WORD.unpack(self._segment.read_mail(offset, _WORD.size))[0]
        return word

    def write(self, offset: int, word: int) -> None:
        """Raises: DaemonUnavailable if the memory is closed."""
        self._segment.write_mail(offset, _WORD.pack(word))

    # The parent's side

    def ask(self, ask: Ask, argument: int = 0) -> None:
        """Send a request to the daemon's host. All but STEP must be answered before the next."""
        self.write(ASKED_AT, ask)
        self.write(ARGUMENT_AT, argument)
        self._num_asked += 1
        self.write(DOORBELL_AT, self._num_asked % _MODULUS)
        self._segment.ring_mail()

    def await_answer(self, timeout_s: float, is_live: Callable[[], bool]) -> None:
        """Wait until all requests are done. Raises: DaemonUnavailable after `timeout_s`, or when
        the session is over."""
        end_s = time.monotonic() + timeout_s
        while self.read(ANSWERS_AT) != self._num_asked % _MODULUS:
            if not is_live() or time.monotonic() > end_s:
                raise DaemonUnavailable(f"the mailbox has not answered for {timeout_s:.1f} s")
            time.sleep(_POLL_S)

    # The daemon's side

    def asked(self) -> Asked:
        """The parent's last request; if its number is the last one's there is no new one."""
        number = self.read(DOORBELL_AT)
        word = self.read(ASKED_AT)
        ask = Ask(word) if word in _KNOWN else Ask.STEP
        return Asked(number, ask, self.read(ARGUMENT_AT))

    def answer(self, number: int) -> None:
        """Report all requests up to this number as done."""
        self.write(ANSWERS_AT, number % _MODULUS)
