"""Web pages of other origins that may use the server: what browsers have to be told."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Scope

from dflash_protocol.errors import SettingsError

_METHODS = "GET, POST, DELETE"
_ANSWERED_S = 600
"""So long browsers need not ask again."""
_EXPOSED = "Retry-After, WWW-Authenticate"
_NAMES = re.compile(r"[A-Za-z0-9_, -]{0,4000}")


class AllowedOrigins:
    """The origins that may use the server; ``*`` are all."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def has(self, origin: str | None) -> bool:
        """Whether a request with this ``Origin`` comes from one of them."""
        if origin is None:
            return False
        return "*" in self._origins or origin.lower() in self._origins

    def preflight(self, scope: Scope) -> Response | None:
        """The answer to a browser that asks whether it may send a request; None: it is no such
        question, or of an origin that may not."""
        headers = Headers(scope=scope)
        is_asked = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        if not is_asked or not self.has(headers.get("origin")):
            return None
        allowed = {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Max-Age": str(_ANSWERED_S),
        }
        names = headers.get("access-control-request-headers", "")
        if names and _NAMES.fullmatch(names):
            allowed["Access-Control-Allow-Headers"] = names
        if headers.get("access-control-request-private-network") == "true":
            allowed["Access-Control-Allow-Private-Network"] = "true"
        return Response(status_code=204, headers=allowed)

    def add_headers(self, scope: Scope, message: Message) -> None:
        """Let a page of one of the origins read the response that begins with `message`."""
        if not self._origins:
            return
        headers = MutableHeaders(scope=message)
        headers.add_vary_header("Origin")
        origin = Headers(scope=scope).get("origin")
        if origin is not None and self.has(origin):
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = _EXPOSED


def check_origins(origins: Collection[str], *, has_keys: bool) -> None:
    """Raises: SettingsError if all web pages are to use a server with keys."""
    if has_keys and "*" in origins:
        # docs: a page that knows a key has an origin: name it
        raise SettingsError("cors=*: with API keys the origins have to be named")
