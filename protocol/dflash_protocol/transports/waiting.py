"""How the parent waits for replies in a ring: it polls for a short time, then sleeps."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded
from dflash_protocol.ids import F64Array
from dflash_protocol.ring.compiled import NOTHING
from dflash_protocol.transports.ports import poll_entries

_SPIN_S, _LONG_SPIN_S = 50e-6, 1e-3
_MANY_CORES = 8
_LONGEST_WAIT_S = 1.0


def spin_window_s() -> float:
    """Default time that a waiter polls the ring before it sleeps.

    0 on a single core, which the other side needs; on many cores long enough for a layer of a
    decode step.
    """
    num_cores = len(os.sched_getaffinity(0))
    if num_cores >= _MANY_CORES:
        return _LONG_SPIN_S
    return _SPIN_S if num_cores > 1 else 0.0


class Waiter:
    """Waits for the replies of one link, whose bell is `bell`.

    `lost_fd` becomes readable when the link is lost; `lost_reason` then says why. `before_sleep` is
    called before each sleep.
    """

    __slots__ = ("_before_sleep", "_lost_reason", "_poller", "entries", "spin_ns", "spin_s")

    def __init__(
        self,
        bell: int,
        *,
        lost_fd: int,
        lost_reason: Callable[[], str],
        spin_s: float,
        before_sleep: Callable[[], object],
    ) -> None:
        self.spin_s, self.spin_ns = spin_s, int(spin_s * 1e9)
        self.entries = poll_entries(bell, lost_fd, num_more=1)
        """What compiled code sleeps on: the bell and the descriptor of a lost link."""
        self._lost_reason = lost_reason
        self._before_sleep = before_sleep
        self._poller = select.poll()
        self._poller.register(lost_fd, select.POLLIN)

    def sleep(
        self,
        receive: Callable[..., int],
        head: tuple[int, int],
        place: F64Array | int,
        *,
        deadline_s: float,
    ) -> int:
        """Sleep until ``receive(*head, spin_ns, wait_ns, place)`` finds a reply; its status.

        Raises: DeadlineExceeded; DaemonUnavailable if the link is lost.
        """
        self._before_sleep()
        remaining_s, end_s = deadline_s, time.monotonic() + deadline_s
        while True:
            wait_ns = int(min(max(remaining_s, 0.0), _LONGEST_WAIT_S) * 1e9)
            status = receive(*head, 0, wait_ns, place)
            if status != NOTHING:
                return status
            remaining_s = end_s - time.monotonic()
            self.check(remaining_s, deadline_s, "reply")

    def check(self, remaining_s: float, deadline_s: float, what: str) -> None:
        """Raises: DaemonUnavailable if the link is lost; DeadlineExceeded if no time is left."""
        if self._poller.poll(0):
            raise DaemonUnavailable(self._lost_reason())
        if remaining_s <= 0:
            raise DeadlineExceeded(f"no {what} within {deadline_s * 1e3:.0f} ms")
