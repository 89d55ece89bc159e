"""Endpoints: the grammar of addresses, and claiming an ``ipc://`` path.

A link has two sockets. For ``ipc:///path`` they are ``/path`` (control) and ``/path.data``; for
``tcp://host:port`` the handshake tells the data port. An IPv6 host stands in brackets, as in
``tcp://[::1]:5555``, and needs a ZeroMQ option: see `is_ipv6`. ZeroMQ silently takes over an ipc
path that is in use, so a lock file beside it marks its owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from dflash_protocol.errors import DaemonUnavailable, SettingsError, one_line
from dflash_protocol.process.private_path import exists_privately

_PATH_LIMIT_BYTES = 100
"""Longest path of an ``ipc://`` endpoint: sun_path holds 108 bytes, our suffixes need a few."""

_LOOPBACK = {4: ipaddress.ip_network("127.0.0.0/8"), 6: ipaddress.ip_network("::1/128")}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A checked control address. Exactly one of `path` and `host` is set."""

    address: str
    path: Path | None
    host: str | None
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether a tcp endpoint can be reached from this machine only: 127.0.0.0/8, ::1,
        localhost. Any other name counts as remote, whatever it resolves to."""
        if self.host is None or self.host == "localhost":
            return self.host is not None
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(self.host.removeprefix("[").removesuffix("]"))
            return address in _LOOPBACK[address.version]
        return False

    def is_folder_there(self) -> bool:
        """Whether the folder of the sockets exists; always true for tcp.

        Raises: SettingsError if another account has a socket there, or could create one.
        """
        what = f"endpoint {self.address}"
        return all([exists_privately(path, what) for path in self.socket_paths])

    @property
    def socket_paths(self) -> tuple[Path, ...]:
        """The socket files of an ipc endpoint; empty for tcp."""
        return () if self.path is None else (self.path, Path(f"{self.path}.data"))

    def data_address(self, data_port: int) -> str:
        """Address of the data socket; tcp port 0 means any free port, to bind to."""
        if self.path is not None:
            return f"ipc://{self.path}.data"
        return f"tcp://{self.host}:{data_port or '*'}"


def is_ipv6(address: str) -> bool:
    """Whether a socket that connects or binds to this address needs ZeroMQ's option IPV6.

    Other sockets do not set it: with it, IPv4 peers would have IPv6-mapped addresses.
    """
    return address.startswith("tcp://[")


def parse_endpoint(text: str) -> Endpoint:
    """Raises: SettingsError if it is malformed, or its path too long."""
    kind, _, rest = text.partition("://")
    if kind == "ipc" and rest.startswith("/") and "\0" not in rest:
        if (length := len(os.fsencode(rest))) > _PATH_LIMIT_BYTES:
            raise SettingsError(
                f"endpoint path of {length} bytes is longer than {_PATH_LIMIT_BYTES}, "
                f"which is all a socket address holds; use a shorter one: {rest}"
            )
        return Endpoint(text, Path(rest), None, 0)
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        is_number = port.isascii() and port.isdigit() and len(port) <= 5
        if _is_host(host) and is_number and 0 < int(port) < 65536:
            return Endpoint(text, None, host, int(port))
    raise SettingsError(
        f"endpoint {one_line(repr(text), 200)} is neither ipc:///absolute/path nor "
        "tcp://host:port, where an IPv6 host stands in brackets"
    )


def _is_host(text: str) -> bool:
    """A name, an IPv4 address, ``*``, or an IPv6 address in brackets."""
    if not text.startswith("["):
        return bool(text) and not any(sign in text for sign in ":[]")
    if not text.endswith("]"):
        return False
    with contextlib.suppress(ValueError):
        return bool(ipaddress.IPv6Address(text[1:-1]).packed)
    return False


class IpcClaim:
    """Claims an ipc path for this process until closed; removes sockets of ended processes.

    Creates the path's folder, with mode 0700, if it is missing; its parent must exist.
    Owns: the lock file, and the two socket files that ZeroMQ creates.
    Raises: SettingsError if the folder cannot be used or is not private; DaemonUnavailable if the
    path is in use.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        assert endpoint.path is not None
        _make_folder(endpoint, endpoint.path.parent)
        self._socket_paths = endpoint.socket_paths
        self._lock_path = Path(f"{endpoint.path}.lock")
        self._lock_fd = _locked_file(self._lock_path, endpoint.address)
        try:
            self._sweep(endpoint)
        except BaseException:
            self._let_go()
            raise

    def _sweep(self, endpoint: Endpoint) -> None:
        """Remove sockets that are not in use; any other file there is an error."""
        for path in self._socket_paths:
            if not path.exists() and not path.is_symlink():
                continue
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise SettingsError(f"endpoint {endpoint.address}: {path} exists and is no socket")
            if _answers(path):
                raise DaemonUnavailable(f"endpoint {endpoint.address} is in use by another program")
            path.unlink()

    def close(self) -> None:
        """Remove the sockets and the lock file."""
        for path in self._socket_paths:
            path.unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock_fd)


def _make_folder(endpoint: Endpoint, folder: Path) -> None:
    """Raises: SettingsError if it cannot be made or is not private; a folder made here is removed
    then."""
    is_made = False
    try:
        folder.mkdir(mode=0o700)
        is_made = True
    except FileExistsError:
        pass
    except OSError as error:
        reason = f"the folder {folder} cannot be made: {error.strerror}"
        raise SettingsError(f"endpoint {endpoint.address}: {reason}") from error
    try:
        endpoint.is_folder_there()
    except SettingsError:
        if is_made:
            folder.rmdir()
        raise


def _locked_file(path: Path, address: str) -> int:
    """Descriptor of the lock file, locked. Raises: SettingsError; DaemonUnavailable."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise SettingsError(f"endpoint {address}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last owner may have removed it after it was opened; the lock is void then.
            if os.path.samestat(os.fstat(fd), path.lstat()):
                return fd
        except FileNotFoundError:
            pass
        except OSError:
            os.close(fd)
            # docs: a daemon runs there already; connect to it or choose another path
            raise DaemonUnavailable(f"endpoint {address} is in use by another daemon") from None
        os.close(fd)


def _answers(path: Path) -> bool:
    """Whether a process listens there; errors other than refusal and absence count as yes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
