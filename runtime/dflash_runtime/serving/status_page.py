"""The status page: the static files of ``page/``, and their security headers.

Their scripts fetch data through the API, as any client does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

_FOLDER = Path(__file__).with_name("page")

_MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_HEADERS: Mapping[str, str] = {
    # Only these files and this server; and text from elsewhere, such as a model's, cannot become
    # markup.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # A newer server has newer files.
    "Cache-Control": "no-cache",
}


_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in _FOLDER.iterdir()
    if path.suffix in _MEDIA_TYPES
}

PAGE_PATHS = frozenset(_FILES)
"""Paths without a key: the files hold no data, and the page asks for a key itself."""


def page_routes() -> list[BaseRoute]:
    """A route for each file; files are read once, here."""
    return [_route(*each) for each in _FILES.items()]


def _route(path: str, source: Path) -> Route:
    headers = {**_HEADERS, "Content-Type": _MEDIA_TYPES[source.suffix]}
    content = source.read_bytes()

    async def file(_request: Request) -> Response:
        return Response(content, headers=headers)

    return Route(path, file, methods=["GET"], include_in_schema=False)
