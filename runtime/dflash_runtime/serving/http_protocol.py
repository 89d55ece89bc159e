"""HTTP/1.1 connections that cannot be held open for nothing.

uvicorn bounds how long a connection may idle between requests; here is bounded how long the head of
a request may take to arrive, and how long a client may not read what is sent to it.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0
"""For the head of a request, from its first byte or that of the connection."""
STALL_S = 60.0
"""For a client to read something of what waits for it."""


class BoundedProtocol(H11Protocol):
    """One connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, self._abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # `cycle` is the last request's until the next one's head is whole.
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_timer = _stopped(self._head_timer)
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_S, self._abort)

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
            self._abort()
        else:
            super().timeout_keep_alive_handler()

    def _abort(self) -> None:
        self.transport.abort()


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Stop a timer, if there is one, and give what is left of it: none."""
    if timer is not None:
        timer.cancel()
    return None
