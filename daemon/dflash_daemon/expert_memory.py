"""Whether another program needs the memory of this daemon's device: then experts that nobody uses
go, and parents are told to have fewer here."""

from __future__ import annotations

import logging
import math
import time

from dflash_daemon.host import ExpertHost
from dflash_protocol.errors import DeviceUnavailable, one_line
from dflash_runtime.compute.memory_watch import Shortage, is_short, spare_bytes

_LOG = logging.getLogger(__name__)

_PATIENCE_S = 10.0
"""For so long parents may take to give memory back before a line says that they don't."""
_RECENT_S = 60.0
"""For so long after a shortage what nobody needs is not kept: parents have been told to leave
experts here, and may not have done so yet."""


class ExpertMemoryWatch:
    """What parents are to be told, as of the last look. `look` is called by one thread at a time;
    any thread may call the rest.

    A parent that does not do as it is told keeps its experts: nothing is taken from it.
    """

    def __init__(self, host: ExpertHost) -> None:
        self._host = host
        self._shortage = Shortage()
        self._missing_bytes = self._spare_bytes = 0
        self._short_since_s: float | None = None
        self._last_short_s = -math.inf
        self._has_warned = False
        self._failure = ""

    def look(self) -> None:
        """Look at the device's free memory, and give back what nobody needs if it is short."""
        try:
            self._look(time.monotonic())
        except DeviceUnavailable as error:
            self.forget()
            if self._failure != str(error):
                # docs (daemon): its device has failed to tell or to free memory; parents keep
                # their experts
                _LOG.warning("device memory of parents' experts: %s", one_line(str(error)))
            self._failure = str(error)

    def forget(self) -> None:
        """Links have changed: what was found before says nothing of the present ones."""
        self._missing_bytes = self._spare_bytes = 0

    def said_to(self, num_links: int) -> tuple[int, int]:
        """What each of so many parents is told: how much less memory its experts should take, and
        how much more they may."""
        return -(-self._missing_bytes // max(1, num_links)), self._spare_bytes // max(1, num_links)

    def _look(self, now_s: float) -> None:
        host = self._host
        memory = host.backend.device_memory()
        if memory is None:
            return
        if is_short(*memory):
            self._last_short_s = now_s
        if now_s < self._last_short_s + _RECENT_S:
            host.give_back()
            memory = host.backend.device_memory()
        if memory is None or host.store.is_kept:
            return
        missing_bytes = self._shortage.missing_bytes(*memory)
        self._missing_bytes = missing_bytes
        self._spare_bytes = 0 if missing_bytes else spare_bytes(*memory)
        if not missing_bytes:
            self._short_since_s, self._has_warned = None, False
            return
        if self._short_since_s is None:
            self._short_since_s = now_s
            # docs (daemon): another program has taken memory of its device; the parents' processors
            # are to compute as many experts instead
            _LOG.info(
                "another program needs memory: parents are to give back %.0f MiB",
                missing_bytes / 2**20,
            )
        elif now_s - self._short_since_s >= _PATIENCE_S and not self._has_warned:
            self._has_warned = True
            # docs (daemon): its parents cannot give more back, or do not answer: an older version,
            # one without experts on its processor, one that is computing a prompt. They keep what
            # they have
            _LOG.warning("another program needs memory, and parents have not given it back")
