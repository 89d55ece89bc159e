"""Bodies of requests: received, and made into tokens, within bounds of memory and in turns.

A body counts from its first byte until its tokens are made. They are made in threads, in parts:
clients take turns, and what a client has asked for who is gone is left at once. Knows nothing of
models. Used in the event loop's thread alone.
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
from dflash_runtime.serving.turns import Turns

BODY_S = 30.0
"""For a body to arrive."""
_DRAINED_BYTES = 64 << 20
"""A body that is too large is received to its end if it is no larger: many clients do not read the
answer before they have sent all."""
_BODIES_AT_ONCE = 8
_LARGE_BYTES = 64 << 10
_SMALL_AT_ONCE = 2
_RENDERED_AT_ONCE = 2
_TURN_S = 0.02
"""So long a turn lasts, and until a part is made: a word of a million letters takes longer."""
_MOST_WAITING = 4096
"""Never reached: a connection has one request at a time, and there are fewer than half as many."""

T = TypeVar("T")


class Bodies:
    """All that are here: together at most eight times `max_bytes`, the most of one body; those of
    one client at most half of that."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Of all bodies that are here."""
        self._bytes_of: Counter[str] = Counter()
        self._small = Turns(_SMALL_AT_ONCE, _MOST_WAITING)
        self._large = Turns(1, _MOST_WAITING)
        self.rendering = Turns(_RENDERED_AT_ONCE, _MOST_WAITING)
        """At having a chat template at work, which may take seconds: other texts do not wait."""

    @contextmanager
    def body_of(self, request: Request, client: str) -> Iterator[Body]:
        """The body of a request, which counts as its client's for as long as this lasts."""
        body = Body(self, request, client)
        try:
            yield body
        finally:
            self.num_bytes -= body.num_bytes
            self._bytes_of[client] -= body.num_bytes
            self._bytes_of += Counter()  # without those that have none any more

    def add(self, client: str, num_bytes: int) -> None:
        """So much more has arrived. Raises: ApiError if it is too much."""
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
        """At making tokens of a body of this size: small ones do not wait for large ones."""
        return self._large if num_bytes > _LARGE_BYTES else self._small


class Body:
    """One of them; made by `Bodies.body_of`."""

    def __init__(self, bodies: Bodies, request: Request, client: str) -> None:
        self.num_bytes = 0
        """That have arrived."""
        self._bodies = bodies
        self._request = request
        self._client = client

    async def receive(self) -> bytes:
        """All of it. Raises: ApiError if it is too large, too late, cut short, or one too many."""
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
        """The parts of what is made of it, each made in a thread when it is this client's turn: of
        `turns`, or of those at making tokens of a body of this size.

        Raises: what `parts` raise; ApiError if the client goes away meanwhile.
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
    """As many parts as a turn has time for, and whether there are no more."""
    end_s = time.perf_counter() + _TURN_S
    made: list[T] = []
    for part in parts:
        made.append(part)
        if time.perf_counter() > end_s:
            return made, False
    return made, True


async def _in_thread(work: Callable[[], T]) -> T:
    """Cancelled, it ends when the thread is done: what it has is not free before."""
    working = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        working.exception()  # which nobody wants to know any more
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
