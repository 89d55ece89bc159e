"""A hub of models on loopback: what the hub's library and `pull` ask for, and every way to fail.

Files are given from another path than they are asked for at, as the real one redirects.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "some-owner/Some-Model-GGUF"

_PIECE = 1 << 14


def gguf_like(size: int, seed: int = 1) -> bytes:
    """Bytes that begin as a GGUF file does."""
    block = hashlib.sha256(str(seed).encode()).digest()
    return (b"GGUF" + block * (size // len(block) + 1))[:size]


@dataclass
class LoopbackHub:
    """What it has, how it behaves, and what it was asked for.

    `pace_s`: a pause after each piece of 16 KiB. `most_bytes`: an answer is ended after so many.
    `listed`: what the list of files says instead. `token`: what has to be sent.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    pace_s: float = 0.0
    most_bytes: int | None = None
    has_ranges: bool = True
    is_silent: bool = False
    trickles: bool = False
    """Answers begin with a header that never ends, a byte now and then."""
    trickles_bytes: bool = False
    """A file's bytes come one now and then."""
    token: str = ""
    status: int = 0
    sends: dict[str, bytes] = field(default_factory=dict)
    """Other bytes than the list's hashes say."""
    says_length: int | None = None
    listed: dict[str, Any] | bytes | None = None
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""
    url: str = ""
    files_url: str = ""
    """Where files are given from, if that is another hub."""
    tokens: list[str] = field(default_factory=list)
    """What each request had to authorize it."""

    def ranges(self) -> list[str]:
        """The ranges of all requests for files' bytes."""
        return [
            byte_range
            for method, path, byte_range in self.asked
            if method == "GET" and path.startswith("/cdn/")
        ]

    def listing(self) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = [{"rfilename": "README.md", "size": 3, "blobId": "0" * 40}]
        for name, content in self.files.items():
            digest = hashlib.sha256(content).hexdigest()
            siblings.append(
                {
                    "rfilename": name,
                    "size": len(content),
                    "blobId": "1" * 40,
                    "lfs": {"sha256": digest, "size": len(content), "pointerSize": 134},
                }
            )
        return {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}


def repository_folder(folder: Path) -> Path:
    """The repository's folder in the cache that `hub_environment` names."""
    return folder / "hf" / "hub" / f"models--{REPOSITORY.replace('/', '--')}"


def linked(folder: Path, name: str) -> Path:
    """Where a file is found after a pull."""
    return repository_folder(folder) / "snapshots" / COMMIT / name


def partial(folder: Path, content: bytes) -> Path:
    """Where a file is during a pull."""
    name = hashlib.sha256(content).hexdigest() + ".incomplete"
    return repository_folder(folder) / "blobs" / name


def assert_nothing_named(folder: Path) -> None:
    """No file has the name of a complete one."""
    assert not list(repository_folder(folder).glob("snapshots/**/*.gguf"))
    blobs = list(repository_folder(folder).glob("blobs/*"))
    assert [path for path in blobs if path.suffix != ".incomplete"] == []


def assert_refused(
    done: subprocess.CompletedProcess[str], folder: Path, *words: str, code: int = 1
) -> None:
    """Exit code, one line of error with these words, nothing on stdout, and no file by its name."""
    assert done.returncode == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if ": error: " in line]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert [word for word in words if word not in errors[0]] == []
    assert done.stdout == ""
    assert_nothing_named(folder)


@contextmanager
def loopback_hub(**how: Any) -> Iterator[LoopbackHub]:
    """A running hub; its requests are ended with it."""
    hub = LoopbackHub(**how)

    class Handler(_Handler):
        served = hub

    server = _Server(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        hub.is_silent = hub.trickles = hub.trickles_bytes = False
        server.shutdown()
        server.server_close()
        thread.join()


def hub_environment(hub: LoopbackHub, folder: Path, **extra: str) -> dict[str, str]:
    """Variables with which a process uses this hub, and a cache and home below `folder`."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf"),
        "HOME": str(folder / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "2",
        "HF_TOKEN": "",
        "OLLAMA_MODELS": str(folder / "home" / ".ollama" / "models"),
        **extra,
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that goes is no error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    served: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        with suppress(ConnectionError):
            self._answer()

    def _answer(self) -> None:
        hub = self.served
        byte_range = self.headers.get("Range", "")
        hub.asked.append((self.command, self.path, byte_range))
        hub.tokens.append(self.headers.get("Authorization", ""))
        while hub.is_silent:
            time.sleep(0.02)
        if hub.trickles:
            self._trickle()
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._empty(401)
        if hub.status:
            return self._empty(hub.status)
        if self.path.startswith(f"/api/models/{REPOSITORY}/revision/main"):
            listed = hub.listing() if hub.listed is None else hub.listed
            content = listed if isinstance(listed, bytes) else json.dumps(listed).encode()
            return self._content(content, "")
        prefix = f"/{REPOSITORY}/resolve/"
        if self.path.startswith(prefix):
            _, _, name = self.path.removeprefix(prefix).partition("/")
            if name in hub.files:
                return self._redirect(name)
        if self.path.startswith("/cdn/"):
            name = self.path.removeprefix("/cdn/")
            return self._content(hub.sends.get(name, hub.files[name]), byte_range)
        self._empty(404)

    def _trickle(self) -> None:
        """A header that never ends, a byte now and then."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while self.served.trickles:
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.2)

    def _redirect(self, name: str) -> None:
        content = self.served.files[name]
        self.send_response(302)
        self.send_header("Location", f"{self.served.files_url or self.served.url}/cdn/{name}")
        self.send_header("X-Linked-Size", str(len(content)))
        self._send_version(content)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_version(self, content: bytes) -> None:
        digest = hashlib.sha256(content).hexdigest()
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{digest}"')

    def _empty(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _content(self, content: bytes, byte_range: str) -> None:
        hub = self.served
        begin, total = 0, len(content)
        match = re.fullmatch(r"bytes=(\d+)-", byte_range) if hub.has_ranges else None
        if match:
            begin = int(match[1])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{total - 1}/{total}")
        else:
            self.send_response(200)
        is_file = self.path.startswith("/cdn/")
        if is_file:
            self._send_version(content)
        length = hub.says_length if is_file and hub.says_length is not None else total - begin
        if length >= 0:
            self.send_header("Content-Length", str(length))
        else:
            self.close_connection = True
        self.end_headers()
        if self.command == "HEAD":
            return
        while is_file and hub.trickles_bytes and begin < total:
            self.wfile.write(content[begin : begin + 1])
            self.wfile.flush()
            begin += 1
            time.sleep(0.2)
        end = total
        if is_file and hub.most_bytes is not None and begin + hub.most_bytes < total:
            end = begin + hub.most_bytes
            self.close_connection = True
        for place in range(begin, end, _PIECE):
            self.wfile.write(content[place : min(place + _PIECE, end)])
            if is_file and hub.pace_s:
                time.sleep(hub.pace_s)
