"""A server with few descriptors, and clients that hold what they can and leave."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from support.faults import soft_limit, spawned_by
from support.processes import wait_until
from support.serving import NO_TLS, RunningServer, running_server, wire_request

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MOST_FILES = 256
NUM_SILENT = 400
PROMPT_S = 3.0
"""For an answer to an honest client, on a machine that does other work too."""
BODY_BYTES = (4 << 20) - 1000


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with contextlib.ExitStack() as stack:
        # The server inherits the limit; this process needs more.
        with soft_limit(resource.RLIMIT_NOFILE, MOST_FILES):
            server = stack.enter_context(
                running_server(None, "--backend", "reference", "--daemon", "cpu")
            )
        yield server


@contextlib.contextmanager
def silent_connections(server: RunningServer, number: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing, of one address; those that are refused are tried no more."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(number):
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", server.port), timeout=2)
                found.append(stack.enter_context(connection))
        yield found


def get(server: RunningServer, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", verify=NO_TLS, timeout=PROMPT_S)


def test_silent_connections_keep_neither_clients_nor_daemons_out(server: RunningServer) -> None:
    process = psutil.Process(server.process.pid)
    num_lines = len(server.lines)
    with silent_connections(server, NUM_SILENT):
        for _ in range(10):
            assert get(server, "/health").status_code == 200
        assert process.num_fds() < 3 * MOST_FILES / 4
        [daemon] = spawned_by(process.pid)
        daemon.kill()
        restarts = 'dflash_moe_owner_restarts_total{kind="daemon",owner="cpu0"}'

        def is_back() -> bool:
            # A daemon that is away is missed, and looked for, by who computes.
            body = {"prompt": "a", "max_tokens": 1}
            httpx.post(
                f"{server.url}/v1/completions", json=body, verify=NO_TLS, timeout=30
            ).raise_for_status()
            return server.metric(restarts) == 1

        wait_until(is_back, "the daemon to be back", within_s=30, pause_s=0.2)
    written = "\n".join(server.lines[num_lines:])
    assert "Traceback" not in written
    assert len(written) < 4000, written


def test_bodies_of_clients_who_left_hold_up_nobody(server: RunningServer) -> None:
    """As many as may be, each as large as may be, of words that are no tokens."""
    process = psutil.Process(server.process.pid)
    large = wire_request("/tokenize", {"content": "zq jx " * (BODY_BYTES // 6)})
    before = process.memory_info().rss
    most = 0
    for _ in range(20):
        # A server that has enough of it closes the connection.
        address = ("127.0.0.1", server.port)
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=10) as leaving:
            leaving.sendall(large)
        most = max(most, process.memory_info().rss)
    started_s = time.monotonic()
    content = "zq jx " * 13_000
    answer = httpx.post(
        f"{server.url}/tokenize", json={"content": content}, verify=NO_TLS, timeout=60
    )
    took_s = time.monotonic() - started_s
    most = max(most, process.memory_info().rss)
    print(f"answered after {took_s:.2f} s, {before >> 20} MiB before, {most >> 20} at most")
    assert answer.status_code == 200
    assert len(answer.json()["tokens"]) > 10_000
    assert took_s < PROMPT_S
    assert most - before < 200 << 20
