"""Keys of tcp links: key files, authorized clients, known daemons, and the sockets' options.

A key folder belongs to one user of one machine::

    secret.key           0600  the secret key; never leaves the machine
    public.key           0644  the public key, one line, to be copied to peers
    authorized_clients         public keys of parents that may use daemons of this machine
    known_daemons              daemons of parents of this machine: HOST[:PORT] and their public key

Encryption and authentication are ZeroMQ's CURVE; the daemon's `authentication` answers ZAP
requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from dflash_protocol.endpoint import Endpoint
from dflash_protocol.errors import SettingsError, one_line
from dflash_protocol.process.text_files import file_error

_LOG = logging.getLogger(__name__)

SECRET_FILE = "secret.key"
PUBLIC_FILE = "public.key"
AUTHORIZED_FILE = "authorized_clients"
KNOWN_FILE = "known_daemons"

KEY_BYTES = 32
ZAP_DOMAIN = b"dflash-moe"
HANDSHAKE_MS = 1000
"""A connection that has not completed its handshake by then is closed, so that silent ones cannot
pile up: a thousand a second take a thousand descriptors."""

_FOLDER, _FILE = "key folder", "key file"
_SECRET_WORD = "dflash-secret-key"
_PUBLIC_WORD = "dflash-public-key"
_KEY_FILE_LIMIT_BYTES = 4096
_LIST_LIMIT_BYTES = 1 << 20
_WRAPPING_BYTES = 33
"""CURVE's overhead of a frame: command name, nonce, authenticator and a flag."""
_BACKLOG = 1024
_SETTLED_NS = 100_000_000
"""A file younger than this may change again without a change of its time stamps."""
_KEEPALIVE_S = ((zmq.TCP_KEEPALIVE_IDLE, 60), (zmq.TCP_KEEPALIVE_INTVL, 10))
_HEADERS = {
    AUTHORIZED_FILE: "# Parents that may use the daemons of this machine: "
    "lines of their public.key.\n",
    KNOWN_FILE: "# Daemons that parents of this machine use: "
    f"HOST or HOST:PORT, then a line of their {PUBLIC_FILE}.\n",
}


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair, 32 bytes each. The secret one is never printed."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """Security of a parent's sockets of one link: its keys, and the daemon's public key."""

    keys: CurveKeys
    server_public_key: bytes

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Encrypt a socket, and accept only the daemon.

        Call it before connect, and after MAXMSGSIZE is set.
        """
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        _make_room(socket)


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """Security of a daemon's sockets: its keys, and the clients that may connect."""

    keys: CurveKeys
    clients: AuthorizedClients


def secure_server(
    socket: zmq.Socket[Any], keys: CurveKeys, *, io_threads: Sequence[int] = ()
) -> None:
    """Encrypt a socket, and accept only clients that the context's ZAP handler authorizes.

    Without a handler no client is accepted. With `io_threads`, only these threads of the context
    serve the socket's connections, so that its handshakes do not delay other sockets.
    Call it before bind, and after MAXMSGSIZE is set.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)
    # Keepalive finds parents whose machine is gone.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE_S:
        socket.setsockopt(option, seconds)
    socket.setsockopt(zmq.AFFINITY, sum(1 << thread for thread in io_threads))
    _make_room(socket)


def _make_room(socket: zmq.Socket[Any]) -> None:
    """Raise MAXMSGSIZE, which counts encrypted bytes, by CURVE's overhead."""
    limit_bytes = socket.getsockopt(zmq.MAXMSGSIZE)
    assert isinstance(limit_bytes, int)
    if limit_bytes >= 0:
        socket.setsockopt(zmq.MAXMSGSIZE, limit_bytes + _WRAPPING_BYTES)


def client_security(folder: Path, endpoint: Endpoint) -> ClientSecurity | None:
    """Security of a link to this endpoint; None for ipc, and for loopback addresses that
    `known_daemons` does not name.

    Raises: SettingsError if the endpoint needs keys that are missing, saying what to do, or if a
    key file cannot be used.
    """
    if endpoint.path is not None:
        return None
    server_public_key = _known_daemon(folder, endpoint)
    if server_public_key is None:
        if endpoint.is_loopback:
            return None
        load_keys(folder)  # if there are none, report that first
        raise SettingsError(
            f"{endpoint.address} is not on this machine, so its daemon's key must be known: add "
            f"the line '{endpoint.host} {_PUBLIC_WORD} …' with what that machine's {PUBLIC_FILE} "
            f"holds to {folder / KNOWN_FILE}"
        )
    return ClientSecurity(load_keys(folder), server_public_key)


def server_security(
    folder: Path, endpoint: Endpoint, *, is_configured: bool
) -> ServerSecurity | None:
    """Security for listening on this endpoint; None for ipc, and for loopback addresses unless
    `is_configured`: the key folder was set explicitly.

    Raises: SettingsError if the endpoint needs keys that are missing, saying what to do, or if a
    key file cannot be used.
    """
    if endpoint.path is not None or (endpoint.is_loopback and not is_configured):
        return None
    try:
        return ServerSecurity(load_keys(folder), AuthorizedClients(folder / AUTHORIZED_FILE))
    except SettingsError as error:
        if endpoint.is_loopback:
            raise
        raise SettingsError(f"{endpoint.address} is not a loopback address: {error}") from error


def generate_keys(folder: Path, *, comment: str, force: bool = False) -> CurveKeys:
    """Make a key pair in `folder`, which is created with mode 0700 if missing.

    `comment` follows the public key. Empty lists of clients and daemons are created as well.
    Raises: SettingsError if a key exists and `force` is not set, or the folder cannot be used.
    """
    comment = one_line(" ".join(comment.split()))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise file_error(_FOLDER, folder, str(error.strerror)) from error
    _check_folder(folder)
    existing = [name for name in (SECRET_FILE, PUBLIC_FILE) if os.path.lexists(folder / name)]
    if existing and not force:
        reason = "exists; --force replaces it, and then all who know the old key need the new one"
        raise file_error(_FILE, folder / existing[0], reason)
    public, secret = (z85.decode(text) for text in zmq.curve_keypair())
    keys = CurveKeys(public, secret)
    secret_text = f"{_SECRET_WORD} {secret.hex()}\n"
    public_text = f"{public_line(public)} {comment}\n"
    files = [(SECRET_FILE, secret_text, 0o600), (PUBLIC_FILE, public_text, 0o644)]
    for name, header in _HEADERS.items():
        if not os.path.lexists(folder / name):
            files.append((name, header, 0o600))
    with contextlib.ExitStack() as undo:
        # Write all files before renaming any, so that a full disk changes nothing.
        staged = [_staged(folder / name, text, mode, undo) for name, text, mode in files]
        for (name, _, _), beside in zip(files, staged, strict=True):
            _put(beside, folder / name, replace=force and name not in _HEADERS)
    return keys


def load_keys(folder: Path) -> CurveKeys:
    """The key pair in `folder`; the public key is computed from the secret one.

    Raises: SettingsError if there is none, or another user could read, replace or have made it.
    """
    _check_folder(folder)
    path = folder / SECRET_FILE
    words = _read(path, _KEY_FILE_LIMIT_BYTES, forbidden_mode=0o077).split()
    if len(words) < 2 or words[0] != _SECRET_WORD:
        raise file_error(_FILE, path, "not a secret key of dflash-moe keygen")
    secret = _key(words[1], path, 1)
    return CurveKeys(z85.decode(zmq.curve_public(z85.encode(secret))), secret)


def public_line(public_key: bytes) -> str:
    """The line of a public key, as in ``public.key`` and the lists."""
    return f"{_PUBLIC_WORD} {public_key.hex()}"


class AuthorizedClients:
    """The clients that may connect: public keys in a file, which is reread when it changes.

    While the file cannot be used, no client is accepted. Used by one thread.
    Raises: SettingsError from the constructor if the file is missing or cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature: tuple[int, ...] | None = None
        self._keys = self._read()

    def allows(self, public_key: bytes) -> bool:
        """Whether a client with this key may connect now."""
        if self._signature is None or self._signature != _signature(self._path):
            try:
                self._keys = self._read()
            except SettingsError as error:
                if self._keys:
                    # docs (daemon): `authorized_clients` cannot be used; connections that exist go
                    # on
                    _LOG.warning("no client can connect until this is fixed: %s", error)
                self._keys = frozenset()
        return public_key in self._keys

    def _read(self) -> frozenset[bytes]:
        # Taken before reading, so that a change in between is noticed the next time.
        self._signature = None
        signature = _signature(self._path)
        _check_folder(self._path.parent)
        text = _read(self._path, _LIST_LIMIT_BYTES, forbidden_mode=0o022)
        keys = frozenset(_public_key(words, self._path, number) for number, words in _lines(text))
        self._signature = signature
        return keys


def _known_daemon(folder: Path, endpoint: Endpoint) -> bytes | None:
    """The key of the daemon at this endpoint; a line with its port takes precedence."""
    path = folder / KNOWN_FILE
    if not os.path.lexists(path):
        return None
    _check_folder(folder)
    known: dict[str, bytes] = {}
    for number, words in _lines(_read(path, _LIST_LIMIT_BYTES, forbidden_mode=0o022)):
        key = _public_key(words[1:], path, number)
        if known.setdefault(words[0].lower(), key) != key:
            raise file_error(
                _FILE, path, f"line {number}: another key of {words[0]!a} stands above"
            )
    host = str(endpoint.host).lower()
    return known.get(f"{host}:{endpoint.port}", known.get(host))


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Number and words of each line that is neither blank nor a comment."""
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if words and not words[0].startswith("#"):
            yield number, words


def _public_key(words: list[str], path: Path, number: int) -> bytes:
    if words and words[0] == _SECRET_WORD:
        reason = "this is a secret key, which belongs nowhere but its machine"
        raise file_error(_FILE, path, f"line {number}: {reason}")
    if len(words) < 2 or words[0] != _PUBLIC_WORD:
        reason = f"expected '{_PUBLIC_WORD} …', a line of {PUBLIC_FILE}"
        raise file_error(_FILE, path, f"line {number}: {reason}")
    return _key(words[1], path, number)


def _key(text: str, path: Path, number: int) -> bytes:
    if len(text) == 2 * KEY_BYTES and text.isascii() and text.isalnum():
        with contextlib.suppress(ValueError):
            return bytes.fromhex(text)
    raise file_error(_FILE, path, f"line {number}: a key is {2 * KEY_BYTES} hexadecimal digits")


def _signature(path: Path) -> tuple[int, ...] | None:
    """A value that changes when the file does; None if missing or too recently changed to tell."""
    try:
        found = path.lstat()
    except OSError:
        return None
    if time.time_ns() - found.st_ctime_ns < _SETTLED_NS:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _check_folder(folder: Path) -> None:
    """Check that no other user can write to the folder, and so replace its keys.

    Raises: SettingsError.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        reason = f"{error.strerror}; make keys with: dflash-moe keygen {folder}"
        raise file_error(_FOLDER, folder, reason) from error
    if not stat.S_ISDIR(found.st_mode):
        raise file_error(_FOLDER, folder, "is a link or no folder")
    _check_owner(_FOLDER, folder, found, 0o022)


def _check_owner(kind: str, path: Path, found: os.stat_result, forbidden_mode: int) -> None:
    if found.st_uid not in (os.getuid(), 0):
        raise file_error(kind, path, "belongs to another user")
    if stat.S_IMODE(found.st_mode) & forbidden_mode:
        allowed = "go-rwx" if forbidden_mode & 0o044 else "go-w"
        raise file_error(kind, path, f"is open to others; chmod {allowed} it")


def _read(path: Path, limit_bytes: int, *, forbidden_mode: int) -> str:
    """Text of a file that no other user can have written. Raises: SettingsError."""
    try:
        # O_NONBLOCK: do not wait if it is a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        reason = f"does not exist; make keys with: dflash-moe keygen {path.parent}"
        raise file_error(_FILE, path, reason) from None
    except OSError as error:
        reason = "is a link" if path.is_symlink() else str(error.strerror)
        raise file_error(_FILE, path, reason) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise file_error(_FILE, path, "no regular file")
        _check_owner(_FILE, path, found, forbidden_mode)
        with os.fdopen(fd, "rb", closefd=False) as stream:
            data = stream.read(limit_bytes + 1)
    except OSError as error:
        raise file_error(_FILE, path, str(error.strerror)) from error
    finally:
        os.close(fd)
    if len(data) > limit_bytes:
        raise file_error(_FILE, path, f"longer than {limit_bytes} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise file_error(_FILE, path, "is not text") from None


def _staged(path: Path, text: str, mode: int, undo: contextlib.ExitStack) -> Path:
    """A new file of exactly this mode beside the path; `undo` removes it if it was not renamed.

    Raises: SettingsError.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    undo.callback(beside.unlink, missing_ok=True)
    try:
        with os.fdopen(os.open(beside, flags, 0o600), "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), mode)
    except OSError as error:
        raise file_error(_FILE, path, str(error.strerror)) from error
    return beside


def _put(staged: Path, path: Path, *, replace: bool) -> None:
    """Move a staged file into place. Raises: SettingsError, also if the path exists and `replace`
    is not set."""
    try:
        if replace:
            os.replace(staged, path)
        else:
            os.link(staged, path)
    except OSError as error:
        raise file_error(_FILE, path, str(error.strerror)) from error
