"""Notifications to the service manager: ready, alive, stopping, and a line of status.

The protocol is sd_notify's: datagrams of ``NAME=value`` lines to the socket that ``NOTIFY_SOCKET``
names, an absolute path or, after ``@``, an abstract name.
Source: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Self

from dflash_protocol.errors import SettingsError, one_line
from dflash_protocol.settings import supervision

_LOG = logging.getLogger(__name__)

_SEND_S = 0.5
"""Timeout of one message: a manager that does not read must not block the program."""
_ADDRESS_LIMIT_BYTES = 107
"""sun_path holds 108 bytes; a path ends with a zero byte, an abstract name begins with one."""
_STATUS_LIMIT = 400
_STARTING_S = 120.0
"""Extension of the start-up timeout requested with each sign of progress."""
_STATUS_S = 5.0
"""Interval of status updates without a watchdog."""


class Notifier:
    """Sends messages to a service manager; an empty address means there is none.

    `watchdog_s` is the manager's watchdog timeout, 0 = no watchdog. Thread-safe. The first message
    that cannot be sent is logged; the program goes on.

    Raises: SettingsError if the address is malformed.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self.watchdog_s = watchdog_s if address else 0.0
        self._address = _socket_address(address) if address else b""
        self._has_failed = False
        self._status = ""

    @classmethod
    def of_environment(cls) -> Self:
        """The notifier that the environment asks for.

        Raises: SettingsError naming the variable.
        """
        address, watchdog_s = supervision()
        try:
            return cls(address, watchdog_s)
        except SettingsError as error:
            raise SettingsError(f"NOTIFY_SOCKET={address!r}: {error}") from error

    @property
    def is_asked_for(self) -> bool:
        """Whether there is a service manager."""
        return bool(self._address)

    @property
    def beat_s(self) -> float:
        """Interval of `report`: half of the watchdog's, as sd_watchdog_enabled(3) recommends."""
        return self.watchdog_s / 2 if self.watchdog_s else _STATUS_S

    def starting(self, status: str) -> None:
        """Report progress of start-up and extend its timeout."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(_STARTING_S * 1e6)}", status)

    def ready(self, status: str) -> None:
        """Report that start-up is complete."""
        self._send("READY=1", status)

    def alive(self) -> None:
        """Restart the watchdog's timeout."""
        self._send("WATCHDOG=1", None)

    def status(self, status: str) -> None:
        """Send the status line if it has changed."""
        if status != self._status:
            self._send("", status)

    def stopping(self) -> None:
        """Report that the program is shutting down."""
        self._send("STOPPING=1", "stopping")

    async def report(self, *, is_healthy: Callable[[], bool], status: Callable[[], str]) -> None:
        """Feed the watchdog while `is_healthy`, and update the status, until cancelled."""
        if not self.is_asked_for:
            await asyncio.Event().wait()
        while True:
            if self.watchdog_s and is_healthy():
                self.alive()
            self.status(status())
            await asyncio.sleep(self.beat_s)

    def _send(self, assignment: str, status: str | None) -> None:
        if not self._address:
            return
        lines = [assignment] if assignment else []
        if status is not None:
            self._status = status
            # A line break would begin another assignment.
            lines.append(f"STATUS={one_line(' '.join(status.split()), _STATUS_LIMIT)}")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(_SEND_S)
                sender.sendto("\n".join(lines).encode(errors="replace"), self._address)
        except OSError as error:  # a timeout is one too
            if not self._has_failed:
                # docs: NOTIFY_SOCKET cannot be reached; the program goes on, the manager may end it
                _LOG.warning("cannot notify the service manager: %s", error.strerror or error)
            self._has_failed = True


def _socket_address(text: str) -> bytes:
    """Raises: SettingsError."""
    address = os.fsencode(text)
    if not text.startswith(("/", "@")) or len(address) < 2 or b"\0" in address:
        raise SettingsError("must be an absolute path or an abstract name after @")
    if len(address) > _ADDRESS_LIMIT_BYTES:
        raise SettingsError(f"must be at most {_ADDRESS_LIMIT_BYTES} bytes long")
    return b"\0" + address[1:] if text.startswith("@") else address
