"""There are so many connections and no more; those that say nothing make room for others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from dflash_runtime.serving import connections
from dflash_runtime.serving.access import listening_socket
from dflash_runtime.serving.server import BoundedServer
from support.faults import no_more_descriptors

pytestmark = pytest.mark.asyncio

MOST = 8
REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


class App:
    """Answers once it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_asked = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_asked += 1
        while (await receive()).get("more_body"):
            pass
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"well", "more_body": False})


class Served:
    """A server of so many connections, and clients of it by their addresses."""

    def __init__(self, app: App, server: BoundedServer, port: int) -> None:
        self.app = app
        self.server = server
        self.port = port
        self._clients: list[asyncio.StreamWriter] = []

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    async def connect(self, host: str = "127.0.0.1", text: bytes = b"") -> asyncio.StreamReader:
        """A client that says this much, once the server has had time to take it or not."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(host, 0))
        self._clients.append(writer)
        writer.write(text)
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return reader

    async def ask(self, host: str = "127.0.0.1") -> asyncio.StreamReader:
        """A client with a request that is not yet answered."""
        num_asked = self.app.num_asked
        reader = await self.connect(host, REQUEST)
        async with asyncio.timeout(5):
            while self.app.num_asked == num_asked:
                await asyncio.sleep(0.001)
        return reader

    async def close(self) -> None:
        for writer in self._clients:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@pytest.fixture(autouse=True)
def few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", MOST)
    monkeypatch.setattr(connections, "_PAUSE_S", 0.1)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    listener = listening_socket("127.0.0.1", 0, has_keys=False)
    app = App()
    config = uvicorn.Config(
        app, lifespan="off", ws="none", log_config=None, timeout_graceful_shutdown=1
    )
    server = BoundedServer(config)
    with listener:
        served = Served(app, server, listener.getsockname()[1])
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield served
        finally:
            app.may_answer.set()
            await served.close()
            server.should_exit = True
            await task


async def answer(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(5):
        try:
            return await reader.readuntil(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""  # it was closed


async def test_silent_ones_make_room_the_longest_first() -> None:
    async with serving() as served:
        silent = [await served.connect() for _ in range(3 * MOST)]
        assert served.num_connections <= MOST // 2
        asked = await served.ask()
        served.app.may_answer.set()
        assert b"200 OK" in await answer(asked)
        assert not await answer(silent[0])
        assert not silent[-1].at_eof()
        # The same of many addresses, none of which has too many.
        for index in range(2 * MOST):
            await served.connect(f"127.0.0.{2 + index}")
            assert served.num_connections <= MOST
        assert b"200 OK" in await answer(await served.connect("127.0.0.1", REQUEST))


async def test_bodies_that_do_not_go_on_make_room() -> None:
    async with serving() as served:
        head = REQUEST.replace(b"GET", b"POST")[:-2] + b"content-length: 9\r\n\r\n"
        stuck = [await served.connect("127.0.0.1", head + b"x") for _ in range(MOST // 2)]
        whole = await served.connect("127.0.0.1", head + b"x" * 9)
        served.app.may_answer.set()
        assert b"200 OK" in await answer(whole)
        assert not await answer(stuck[0])
        assert not stuck[1].at_eof()


async def test_where_all_have_requests_a_new_one_is_closed_at_once() -> None:
    async with serving() as served:
        asked = [await served.ask() for _ in range(MOST // 2)]
        assert not await answer(await served.connect())
        # Other addresses have their own half.
        asked += [await served.ask("127.0.0.2") for _ in range(MOST // 2)]
        assert not await answer(await served.connect("127.0.0.3", REQUEST))
        assert served.num_connections == MOST
        served.app.may_answer.set()
        assert all([b"200 OK" in await answer(each) for each in asked])
        # Answered, they wait for another request, and make room.
        assert b"200 OK" in await answer(await served.connect("127.0.0.3", REQUEST))


async def test_the_last_files_are_not_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        # Client and server are one process here: each connection takes two.
        lowest = [os.dup(0) for _ in range(4)]
        for each in lowest:
            os.close(each)
        monkeypatch.setattr(connections, "first_reserved_file", lambda: lowest[-1] + 1)
        for _ in range(3):
            await served.connect()
        assert served.num_connections == 2
        asked = await served.ask()
        served.app.may_answer.set()
        assert b"200 OK" in await answer(asked)


async def test_a_process_without_files_says_so_once_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as served:
        served.app.may_answer.set()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.socket()) for _ in range(20)]
            with caplog.at_level(logging.WARNING), no_more_descriptors():
                for client in clients:
                    client.setblocking(False)
                    client.connect_ex(("127.0.0.1", served.port))
                await asyncio.sleep(0.35)  # several attempts
            clients[-1].sendall(REQUEST)
            async with asyncio.timeout(5):
                loop = asyncio.get_running_loop()
                assert b"200 OK" in await loop.sock_recv(clients[-1], 1000)
        [line] = caplog.messages
        assert "Too many open files" in line


async def test_a_head_that_never_ends_makes_room_and_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as served:
        monkeypatch.setattr(connections, "HEAD_S", 0.3)
        slow = [await served.connect("127.0.0.1", REQUEST[:-2]) for _ in range(MOST)]
        assert served.num_connections <= MOST // 2
        async with asyncio.timeout(5):
            assert not any([await answer(each) for each in slow])
        assert served.app.num_asked == 0
