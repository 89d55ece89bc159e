"""The service manager's end of the sd_notify socket."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from support.processes import START_S


class ServiceManager:
    """Receives the messages of services, each as a dict of its lines, in order."""

    def __init__(self, listening: socket.socket, address: str) -> None:
        self._socket = listening
        self.address = address
        self.told: list[dict[str, str]] = []

    def environment(self, *, watchdog_s: float = 0.0) -> dict[str, str]:
        """The environment of a service of type notify."""
        given = {"NOTIFY_SOCKET": self.address}
        return {**given, "WATCHDOG_USEC": f"{watchdog_s * 1e6:.0f}"} if watchdog_s else given

    def hear(self, within_s: float) -> dict[str, str] | None:
        """The next message, or None after `within_s`."""
        self._socket.settimeout(max(within_s, 1e-3))
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return None
        message = dict(line.split("=", 1) for line in data.decode().split("\n"))
        self.told.append(message)
        return message

    def wait_for(self, name: str, *, within_s: float = START_S) -> dict[str, str]:
        """The next message that assigns `name`. Fails the test if none comes."""
        end_s = time.monotonic() + within_s
        while (left_s := end_s - time.monotonic()) > 0:
            message = self.hear(left_s)
            if message is not None and name in message:
                return message
        raise AssertionError(f"no message with {name} within {within_s:.0f} s, only {self.told}")

    def hear_all(self, during_s: float) -> list[dict[str, str]]:
        """All messages that arrive within `during_s`."""
        end_s = time.monotonic() + during_s
        heard = []
        while (left_s := end_s - time.monotonic()) > 0:
            message = self.hear(left_s)
            if message is not None:
                heard.append(message)
        return heard


@contextlib.contextmanager
def service_manager(folder: Path | None) -> Iterator[ServiceManager]:
    """Listening on a path in `folder`, or on an abstract name if that is None."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        if folder is None:
            name = f"dflash-test-{secrets.token_hex(8)}"
            listening.bind(f"\0{name}")
            yield ServiceManager(listening, f"@{name}")
            return
        path = folder / "notify"
        listening.bind(str(path))
        try:
            yield ServiceManager(listening, str(path))
        finally:
            path.unlink()
