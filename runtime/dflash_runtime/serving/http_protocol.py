"""HTTP/1.1 connections that cannot be held open for nothing.

uvicorn bounds how long a connection may idle between requests; here is bounded how long the head of
a request may take to arrive, and how long a client may not read what is sent to it. How many there
may be is said in ``connections``.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""For the head of a request, from its first byte or that of the connection."""
STALL_S = 60.0
"""For a client to read something of what waits for it."""


class BoundedProtocol(H11Protocol):
    """One connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _waits_since_s: float | None = None

    @property
    def silent_since_s(self) -> float | None:
        """Since when, by the loop's clock, this client is waited for: for the head of a request, or
        for more of its body. None while there is a whole one, or what was sent is not yet read, by
        either side."""
        is_ours = self.flow.read_paused or self.transport.get_write_buffer_size()
        return None if is_ours or self.transport.is_closing() else self._waits_since_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since_s = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_S, self.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # `cycle` is the last request's until the next one's head is whole.
        if self._has_request():
            self._head_timer = _stopped(self._head_timer)
            is_whole = self.conn.their_state is not h11.SEND_BODY
            self._waits_since_s = None if is_whole else self.loop.time()
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.abort)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which may begin the next request
        self._waits_since_s = None if self._has_request() else self.loop.time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_S, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer = _stopped(self._stall_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _stopped(self._head_timer)
        self._stall_timer = _stopped(self._stall_timer)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def timeout_keep_alive_handler(self) -> None:
        """A client that has not read its answer by now will not."""
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            super().timeout_keep_alive_handler()

    def abort(self) -> None:
        """Close it at once, whatever was still to be sent."""
        self.transport.abort()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Stop a timer, if there is one, and give what is left of it: none."""
    if timer is not None:
        timer.cancel()
    return None
