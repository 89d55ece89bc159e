"""A web page of another origin than the server under test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PAGE = b"<!doctype html><title>A front end</title><link rel=icon href='data:,'>"


class _Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(_PAGE)))
        self.end_headers()
        self.wfile.write(_PAGE)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def page_of_another_origin() -> Iterator[str]:
    """The page's origin, as browsers spell it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as pages:
        serving = threading.Thread(target=pages.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{pages.server_port}"
        finally:
            pages.shutdown()
            serving.join()
