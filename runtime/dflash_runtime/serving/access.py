"""Access to the server: where it listens, API keys, and the gate that admits each request."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_protocol.errors import SettingsError
from dflash_protocol.process.text_files import file_error
from dflash_runtime.serving.cors import AllowedOrigins
from dflash_runtime.serving.errors import (
    ERROR_FORM,
    HAS_LINE,
    REFUSAL,
    ApiError,
    ErrorForm,
    api_error,
    error_response,
)
from dflash_runtime.serving.metrics import Metrics
from dflash_runtime.serving.refusal_log import RefusalLog
from dflash_runtime.serving.status_page import PAGE_PATHS

_LOG = logging.getLogger(__name__)

OPEN_TO_ALL = frozenset({"/health", "/v1/health", "/ready"})
"""Paths without a key: probes have none, and that the server runs is no secret."""

CLIENT = "dflash.client"
"""Key of the request's scope for the client that takes turns in the queue."""

KEY = "dflash.key"
"""Key of the request's scope for the index of its API key; empty if the server has none."""

_WHAT = "API key file"
_MOST_BYTES = 64 << 10
_FEWEST_CHARACTERS = 16
_NAME = re.compile(rb"#\s*name:\s*([A-Za-z0-9._@-]{1,64})\s*")
_BACKLOG = 512


class ApiKeys:
    """The API keys, one of which a client must send."""

    def __init__(self, keys: Iterable[bytes], names: Mapping[int, str] | None = None) -> None:
        """`names` are of keys, by their index; others are called ``key 1``, ``key 2``, …"""
        self._keys = tuple(keys)
        given = names or {}
        self.names = tuple(
            given.get(index, f"key {index + 1}") for index, _ in enumerate(self._keys)
        )
        """What logs call each key."""

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Read a file of keys, one on a line; lines that begin with ``#`` are comments. A comment
        ``# name: ALICE`` names the key on the next line.

        Raises: SettingsError if it cannot be read, other accounts can read it, or a key is invalid.
        """
        text = _read_private(path)
        lines = [line.strip() for line in text.splitlines()]
        keys: list[bytes] = []
        names: dict[int, str] = {}
        for line in filter(None, lines):
            if not line.startswith(b"#"):
                keys.append(line)
            elif (named := _NAME.fullmatch(line)) is not None:
                names[len(keys)] = named[1].decode("ascii")
        if not keys:
            raise file_error(_WHAT, path, "holds no key")
        for number, key in enumerate(keys, 1):
            is_sound = key.isascii() and key.decode("ascii").isprintable() and b" " not in key
            if not is_sound or len(key) < _FEWEST_CHARACTERS:
                raise file_error(
                    _WHAT,
                    path,
                    f"key {number} must have {_FEWEST_CHARACTERS} or more printable ASCII "
                    "characters and no space",
                )
        return cls(keys, names)

    def index_of(self, authorization: bytes, x_api_key: bytes = b"") -> int | None:
        """The index of the key in the value of an ``Authorization`` header, or of ``x-api-key`` if
        that has none; None if it is not ours.

        The time taken does not depend on the key.
        """
        scheme, _, given = authorization.partition(b" ")
        given = (given if scheme.lower() == b"bearer" else x_api_key).strip()
        found = None
        for index, key in enumerate(self._keys):
            if hmac.compare_digest(key, given):
                found = index
        return found


def _read_private(path: Path) -> bytes:
    """Raises: SettingsError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            # fstat, not stat: the path may be another file by now.
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise file_error(_WHAT, path, "is no regular file")
            if found.st_uid not in (os.getuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
                # docs: other accounts may read the keys
                raise file_error(_WHAT, path, "is open to other accounts; chmod 600 it")
            text = os.read(descriptor, _MOST_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise file_error(_WHAT, path, error.strerror or str(error)) from error
    except ValueError as error:  # a name with a NUL in it
        raise file_error(_WHAT, path, str(error)) from error
    if len(text) > _MOST_BYTES:
        raise file_error(_WHAT, path, f"larger than {_MOST_BYTES >> 10} KiB")
    return text


def listening_socket(host: str, port: int, *, has_keys: bool) -> socket.socket:
    """A bound, listening socket; the caller closes it.

    Raises: SettingsError if the address cannot be bound, or is not loopback and there are no keys.
    """
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"host {host}: {getattr(error, 'strerror', None) or error}") from error
    if not has_keys and not all(_is_loopback(str(each[4][0])) for each in found):
        raise SettingsError(
            # docs: name an API key file, or listen on 127.0.0.1
            f"host {host} can be reached from other machines: name an API key file, "
            "or listen on 127.0.0.1"
        )
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # now, so that clients wait while the server starts
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        # docs: another program, perhaps another server, has the address
        raise SettingsError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def is_of_another_site(host: str, origin: str | None) -> bool:
    """Whether a request without a key may come from a foreign web page in a browser.

    `host` is the request's ``Host``: a page can have its own host name resolve to us (DNS
    rebinding), but not one of ours. `origin` is its ``Origin``, which browsers send, or None.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name != "localhost" and not _is_loopback(name):
            return True
        return origin is not None and urlsplit(origin).netloc != host
    except ValueError:
        return True


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class RequestGate:
    """The outermost ASGI application: admits each request, and counts its status."""

    app: ASGIApp
    keys: ApiKeys | None
    """None: no client needs a key."""
    metrics: Metrics
    endpoints: frozenset[str]
    """Paths that are counted by name."""
    error_form: Callable[[str], ErrorForm]
    """The form of errors by the request's path."""
    origins: AllowedOrigins
    """Web pages of these may use the server."""
    refusals: RefusalLog = field(default_factory=RefusalLog)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope[ERROR_FORM] = self.error_form(scope["path"])
        status = 500
        is_started = False

        async def counted(message: Message) -> None:
            nonlocal status, is_started
            if message["type"] == "http.response.start":
                status, is_started = message["status"], True
                self.origins.add_headers(scope, message)
            await send(message)

        try:
            application: ASGIApp | None = self.origins.preflight(scope)
            if application is None:
                self._admit(scope)
                application = self.app
            await application(scope, receive, counted)
        except Exception as error:
            refusal = api_error(error)
            if refusal is not error:
                # docs: a bug, with its traceback: report it. The client got status 500
                _LOG.exception("%s %s failed", scope["method"], scope["path"])
            if not is_started:
                await error_response(refusal, scope)(scope, receive, counted)
        finally:
            path = scope["path"] if scope["path"] in self.endpoints else "other"
            self.metrics.http_requests.labels(path, str(status)).inc()
            self._log_refusal(scope, path)

    def _log_refusal(self, scope: Scope, path: str) -> None:
        """Log a request that was refused, unless its line is there already."""
        error: ApiError | None = scope.get(REFUSAL)
        if error is None or error.status == 500 or HAS_LINE in scope:
            return
        index = scope.get(KEY)
        key = self.keys.names[int(index)] if self.keys is not None and index else ""
        self.refusals.refused(error, scope, path=path, key=key)

    def _admit(self, scope: Scope) -> None:
        """Set the scope's client and key. Raises: ApiError if the request is not allowed."""
        headers = Headers(scope=scope)
        host = scope["client"][0] if scope.get("client") else ""
        scope[CLIENT], scope[KEY] = host, ""
        if scope["path"] in OPEN_TO_ALL:
            return
        if self.keys is None:
            origin = headers.get("origin")
            origin = None if self.origins.has(origin) else origin
            if is_of_another_site(headers.get("host", ""), origin):
                raise ApiError(
                    403,
                    "without a key, requests must be addressed to localhost, and not come from "
                    "web pages of other sites",
                    code="forbidden",
                )
            return
        if scope["path"] in PAGE_PATHS:
            return
        key = self.keys.index_of(
            headers.get("authorization", "").encode("latin-1"),
            headers.get("x-api-key", "").encode("latin-1"),
        )
        if key is None:
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope[CLIENT], scope[KEY] = f"{key} {host}", str(key)
