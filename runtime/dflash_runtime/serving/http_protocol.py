"""HTTP/1.1 connections with timeouts.

uvicorn bounds how long a connection may idle between requests; this adds how long the head of a
request may take to arrive, and how long a client may leave the answer unread. ``connections``
bounds their number.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""For the head of a request, from its first byte or the connection's start."""
STALL_S = 60.0
"""For a client to read some of the answer."""


class BoundedProtocol(H11Protocol):
    """One connection; used by the event loop."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _waits_since_s: float | None = None

    @property
    def silent_since_s(self) -> float | None:
        """Loop time since when the client owes the head of a request, or more of its body. None
        with a whole request, or while either side has unread data."""
        is_ours = self.flow.read_paused or self.transport.get_write_buffer_size()
        return None if is_ours or self.transport.is_closing() else self._waits_since_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since_s = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_S, self.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # `cycle` is the last request's until the head of the next is complete.
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
        """Abort if the client has not read its answer by now."""
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            super().timeout_keep_alive_handler()

    def abort(self) -> None:
        """Close at once, dropping unsent data."""
        self.transport.abort()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer, if there is one; returns None."""
    if timer is not None:
        timer.cancel()
    return None
