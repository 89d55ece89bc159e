"""Connections that are held open for nothing are cut; others are left alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from dflash_runtime.serving import connections
from dflash_runtime.serving.access import listening_socket
from dflash_runtime.serving.connections import BoundedProtocol

pytestmark = pytest.mark.asyncio

HEAD_S = 0.3
STALL_S = 0.4
REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


class App:
    """Answers with many bytes, after a while; keeps count of answers whose client was gone."""

    def __init__(self) -> None:
        self.num_bytes = 2
        self.pause_s = 0.0
        self.num_ended = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(self.pause_s)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        part = b"x" * min(self.num_bytes, 1 << 16)
        for _ in range(max(1, self.num_bytes >> 16)):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.num_ended += 1


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> App:
    monkeypatch.setattr(connections, "HEAD_S", HEAD_S)
    monkeypatch.setattr(connections, "STALL_S", STALL_S)
    return App()


@contextlib.asynccontextmanager
async def serving(app: App, keep_alive_s: int = 1) -> AsyncIterator[int]:
    """The port."""
    listener = listening_socket("127.0.0.1", 0, has_keys=False)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            lifespan="off",
            log_config=None,
            timeout_keep_alive=keep_alive_s,
        )
    )
    with listener:
        port = listener.getsockname()[1]
        task = asyncio.create_task(server._serve([listener]))
        try:
            yield port
        finally:
            server.should_exit = True
            await task


@contextlib.asynccontextmanager
async def connected(
    port: int,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def seconds_until_cut(reader: asyncio.StreamReader) -> float:
    clock = asyncio.get_running_loop().time
    started_s = clock()
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 10)
    return clock() - started_s


@pytest.mark.parametrize("start", [b"", b"GET / HT", REQUEST[:-2]])
async def test_a_head_that_does_not_come_is_not_waited_for(app: App, start: bytes) -> None:
    async with serving(app) as port, connected(port) as (reader, writer):
        writer.write(start)
        assert HEAD_S / 2 < await seconds_until_cut(reader) < 3
    assert app.num_ended == 0


async def test_nor_is_that_of_the_next_request(app: App) -> None:
    async with serving(app, keep_alive_s=8) as port, connected(port) as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"GET / HT")
        assert HEAD_S / 2 < await seconds_until_cut(reader) < 6  # not by the idle timer


async def test_an_answer_that_takes_long_is_not_cut(app: App) -> None:
    app.pause_s = 3 * HEAD_S
    async with serving(app) as port, connected(port) as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)


async def test_who_does_not_read_is_cut_off(app: App) -> None:
    app.num_bytes = 64 << 20
    async with serving(app) as port:
        with socket.create_connection(("127.0.0.1", port)) as lazy:
            lazy.sendall(REQUEST)
            async with asyncio.timeout(10):
                while not app.num_ended:  # sending to a closed connection ends at once
                    await asyncio.sleep(0.02)


async def test_who_reads_slowly_but_does_is_not(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s = 1.5  # longer than a busy machine keeps either side waiting
    monkeypatch.setattr(connections, "STALL_S", limit_s)
    app.num_bytes = 32 << 20
    clock = asyncio.get_running_loop().time
    async with serving(app) as port, connected(port) as (reader, writer):
        writer.write(REQUEST)
        num_read, slow_until_s = 0, clock() + 1.5 * limit_s
        while num_read < app.num_bytes:
            part = await asyncio.wait_for(reader.read(1 << 16), 10)
            assert part, num_read
            num_read += len(part)
            if clock() < slow_until_s:
                await asyncio.sleep(0.02)
        assert clock() > slow_until_s
