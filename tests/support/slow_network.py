"""A network between a daemon and a parent of this machine: late, narrow, or dead at first."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

NEAR, FAR = "127.0.0.1", "127.0.0.2"
_PIECE = 16 << 10


@contextlib.contextmanager
def slow_network(
    *ports: int, delay_s: float = 0.0, bytes_per_s: float = 1e12, num_dead: int = 0
) -> Iterator[None]:
    """What listens on these ports of NEAR can be reached at those of FAR, too.

    Each way takes `delay_s` longer, and each connection carries `bytes_per_s` there. The first
    `num_dead` connections to the last port are accepted, and nothing ever comes out of them.
    """
    started: Future[asyncio.AbstractEventLoop] = Future()
    ended = asyncio.Event()

    async def run() -> None:
        dead = [num_dead]
        async with contextlib.AsyncExitStack() as undo:
            for port in ports:
                network = _Way(port, delay_s, bytes_per_s, dead if port == ports[-1] else [0])
                server = await asyncio.start_server(network.serve, FAR, port)
                undo.callback(server.close)
            started.set_result(asyncio.get_running_loop())
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="slow network")
    thread.start()
    loop = started.result(20)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


class _Way:
    def __init__(self, port: int, delay_s: float, bytes_per_s: float, dead: list[int]) -> None:
        self._port, self._delay_s, self._bytes_per_s = port, delay_s, bytes_per_s
        self._dead = dead

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            if self._dead[0]:
                self._dead[0] -= 1
                while await reader.read(_PIECE):
                    pass
                return
            inner_reader, inner_writer = await asyncio.open_connection(NEAR, self._port)
            with contextlib.closing(inner_writer):
                await asyncio.gather(
                    self._carry(reader, inner_writer, self._bytes_per_s),
                    self._carry(inner_reader, writer, 1e12),
                    return_exceptions=True,
                )

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: float
    ) -> None:
        loop, under_way = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

        async def deliver() -> None:
            data = b"-"
            while data:
                due_s, data = await under_way.get()
                await asyncio.sleep(due_s - loop.time() + len(data) / bytes_per_s)
                writer.write(data)
            writer.close()

        delivering = asyncio.create_task(deliver())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_PIECE):
                under_way.put_nowait((loop.time() + self._delay_s, data))
        under_way.put_nowait((0.0, b""))
        await delivering
