"""Bodies of requests: received, and made into tokens, with bounded memory and fair turns.

A body counts from its first byte until its tokens are made. They are made in threads, part by part:
clients take turns, and the work stops when its client disconnects. Used in the event loop's thread
alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from starlette.requests import Request

from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.fair_queue import Turns

BODY_S = 30.0
"""Within this a body must arrive."""
_DRAINED_BYTES = 64 << 20
"""A body that is too large, but not larger than this, is received to its end: many clients read no
answer before they have sent everything."""
_BODIES_AT_ONCE = 8
_LARGE_BYTES = 64 << 10
_SMALL_AT_ONCE = 2
_RENDERED_AT_ONCE = 2
_TURN_S = 0.02
"""A turn lasts until the first part that ends after this; a very long word takes longer."""
_MOST_WAITING = 4096
"""Never reached: a connection has one request at a time, and there are fewer than half of this."""

T = TypeVar("T")


class Bodies:
    """All bodies held: together at most eight times `max_bytes`, the limit of one body; those of
    one client at most half of that."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes of all bodies held."""
        self._bytes_of: Counter[str] = Counter()
        self._small = Turns(_SMALL_AT_ONCE, _MOST_WAITING)
        self._large = Turns(1, _MOST_WAITING)
        self.rendering = Turns(_RENDERED_AT_ONCE, _MOST_WAITING)
        """Turns at rendering chat templates, which may take seconds: other texts do not wait."""
        self.compiling = Turns(1, _MOST_WAITING)
        """Turns at compiling grammars, likewise."""

    @contextmanager
    def body_of(self, request: Request, client: str) -> Iterator[Body]:
        """The body of a request; it counts towards the bounds until the context is left."""
        body = Body(self, request, client)
        try:
            yield body
        finally:
            self.num_bytes -= body.num_bytes
            self._bytes_of[client] -= body.num_bytes
            self._bytes_of += Counter()  # drops clients with 0 bytes

    def add(self, client: str, num_bytes: int) -> None:
        """Count bytes that arrived. Raises: ApiError if a bound is exceeded."""
        self.num_bytes += num_bytes
        self._bytes_of[client] += num_bytes
        most = _BODIES_AT_ONCE * self.max_bytes
        if self.num_bytes > most or self._bytes_of[client] > most // 2:
            raise ApiError(
                429,
                "too much is being received at once; try again later",
                kind="rate_limit_error",
                code="bodies_full",
                headers={"Retry-After": "1", "Connection": "close"},
            )

    def turns(self, num_bytes: int) -> Turns:
        """Turns at tokenising a body of this size: small ones do not wait for large ones."""
        return self._large if num_bytes > _LARGE_BYTES else self._small


class Body:
    """The body of one request; made by `Bodies.body_of`."""

    def __init__(self, bodies: Bodies, request: Request, client: str) -> None:
        self.num_bytes = 0
        """Bytes received so far."""
        self._bodies = bodies
        self._request = request
        self._client = client

    async def receive(self) -> bytes:
        """Receive all of it. Raises: ApiError if it is too large, late, cut short, or exceeds the
        bounds of all bodies."""
        limit = self._bodies.max_bytes
        declared = self._request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit, is_drained=int(declared) <= _DRAINED_BYTES)
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await self._request.receive()
                    if message["type"] == "http.disconnect":
                        raise _gone()
                    part = message.get("body", b"")
                    parts.append(part)
                    self.num_bytes += len(part)
                    self._bodies.add(self._client, len(part))
                    if self.num_bytes > limit:
                        raise _too_large(limit, is_drained=False)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {BODY_S:.0f} s",
                headers={"Connection": "close"},
            ) from None

    async def made(self, parts: Iterator[T], *, turns: Turns | None = None) -> list[T]:
        """Consume `parts`, an iterator over what is made from this body, in threads, when it is
        this client's turn: by `turns`, or by those for tokenising a body of this size.

        Raises: what `parts` raise; ApiError if the client disconnects meanwhile.
        """
        turns = turns or self._bodies.turns(self.num_bytes)
        making = asyncio.ensure_future(self._in_turns(parts, turns))
        watching = asyncio.create_task(self._until_gone())
        watching.add_done_callback(lambda _: making.cancel())
        try:
            return await making
        except asyncio.CancelledError:
            if watching.done() and not watching.cancelled():
                raise _gone() from None
            raise
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _in_turns(self, parts: Iterator[T], turns: Turns) -> list[T]:
        made: list[T] = []
        while True:
            async with turns.turn(self._client):
                some, is_all = await _in_thread(lambda: _some(parts))
            made += some
            if is_all:
                return made

    async def _until_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


def _some(parts: Iterator[T]) -> tuple[list[T], bool]:
    """The parts made within one turn, and whether they were the last."""
    end_s = time.perf_counter() + _TURN_S
    made: list[T] = []
    for part in parts:
        made.append(part)
        if time.perf_counter() > end_s:
            return made, False
    return made, True


async def _in_thread(work: Callable[[], T]) -> T:
    """Run in a thread. If cancelled, still waits for the thread, which holds the memory."""
    working = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        working.exception()  # marks it as retrieved
        raise


def _gone() -> ApiError:
    return ApiError(400, "the client went away")


def _too_large(limit: int, *, is_drained: bool) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {limit} bytes",
        code="body_too_large",
        headers={} if is_drained else {"Connection": "close"},
    )
