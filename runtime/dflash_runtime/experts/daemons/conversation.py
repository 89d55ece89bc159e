"""The control socket of one session with a daemon: what is said, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import zmq
import zmq.asyncio

from dflash_protocol.endpoint import is_ipv6
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.wire.messages import (
    HEADER_LIMIT_BYTES,
    Bye,
    Message,
    decode_header,
    encode_header,
)
from dflash_runtime.experts.daemons.child import DaemonProcess
from dflash_runtime.experts.daemons.link import DaemonLink

_END_S = 3.0
"""The longest from a child's disconnecting to its end: a driver has to release a device."""
_GOODBYE_MS = 200
"""How long a Bye may take to be sent."""

_Received: TypeAlias = "asyncio.Future[list[bytes]]"
T = TypeVar("T")


class EndedEarly(DaemonUnavailable):
    """A daemon was there and ended before it was ready: a retry may succeed."""


def unanswered(link: DaemonLink, silence_s: float) -> DaemonUnavailable:
    """The error for a daemon that said nothing for so long."""
    return DaemonUnavailable(
        # docs: no daemon listens there, or it belongs to another user
        f"daemon {link.name}: nothing answers at {link.endpoint.address} "
        f"({silence_s:.0f} s); is it running?"
    )


class Conversation:
    """A control socket that is connected to a daemon; made by `opened`, in the supervisor's loop.

    `process` is the daemon if it is our child. It may be silent for `silence_s` before it counts as
    gone.
    """

    def __init__(
        self,
        link: DaemonLink,
        process: DaemonProcess | None,
        control: zmq.asyncio.Socket,
        *,
        disconnected: _Received,
        silence_s: float,
    ) -> None:
        self._link = link
        self._process = process
        self._control = control
        self._disconnected = disconnected
        self._silence_s = silence_s
        self._was_heard = False
        """Whether the daemon has answered over this connection."""

    @classmethod
    @contextmanager
    def opened(
        cls,
        context: zmq.asyncio.Context,
        link: DaemonLink,
        process: DaemonProcess | None,
        *,
        silence_s: float,
    ) -> Iterator[Conversation]:
        """Connect, and close at the end. Raises: zmq.ZMQError."""
        with context.socket(zmq.DEALER) as control:
            control.setsockopt(zmq.LINGER, 0)
            control.setsockopt(zmq.MAXMSGSIZE, HEADER_LIMIT_BYTES)
            control.setsockopt(zmq.IPV6, is_ipv6(link.endpoint.address))
            if link.secure is not None:
                link.secure(control)
            control.setsockopt(zmq.RECONNECT_IVL, 20)
            control.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            monitor = control.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            # One future for the whole session: a cancelled receive may consume the event.
            disconnected = asyncio.ensure_future(monitor.recv_multipart())
            try:
                control.connect(link.endpoint.address)
                yield cls(link, process, control, disconnected=disconnected, silence_s=silence_s)
            finally:
                disconnected.cancel()
                control.disable_monitor()
                monitor.close(linger=0)

    async def say(self, message: Message, *frames: bytes) -> None:
        """Send a message."""
        await self._control.send_multipart([encode_header(message), *frames])

    async def hear(self) -> bytes:
        """The next message's header, as it is, however long that takes."""
        frames: list[bytes] = await self._control.recv_multipart()
        return frames[0]

    async def expect(self, silence_s: float | None = None) -> Message:
        """The next message. Raises: as `outcome_of`; ProtocolError."""
        silence_s = self._silence_s if silence_s is None else silence_s
        header = await self.outcome_of(self.hear(), silence_s)
        self._was_heard = True
        return decode_header(header)

    async def outcome_of(self, work: Coroutine[Any, Any, T], limit_s: float | None) -> T:
        """Await something while the daemon is there.

        Raises: DaemonUnavailable after `limit_s`, or at once if the child or the connection ended:
        what was sent over it is lost, and a new hello is needed.
        """
        link, process = self._link, self._process
        working = asyncio.ensure_future(work)
        waiting: list[asyncio.Future[Any]] = [working]
        if process is not None:
            waiting.append(asyncio.ensure_future(process.ended.wait()))
        try:
            await asyncio.wait(
                [*waiting, self._disconnected],
                timeout=limit_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if working.done():
                return working.result()
            if self._disconnected.done() and process is not None:
                # A child disconnects while it exits: its exit status says more.
                await asyncio.wait(waiting[1:], timeout=_END_S)
            if process is not None and process.has_ended:
                raise (EndedEarly if process.was_told_to_end else DaemonUnavailable)(
                    # docs: its own message stands above, on stderr
                    f"daemon {link.name} {process.how_it_ended} before it was ready"
                )
            if self._disconnected.done():
                # A daemon that never answered may not know our key: trying again would not help.
                raise (EndedEarly if self._was_heard else DaemonUnavailable)(
                    # docs: it ended, or does not know the parent's key: see its own messages
                    f"daemon {link.name} at {link.endpoint.address} hung up before it was ready"
                )
            raise unanswered(link, limit_s or 0.0)
        finally:
            for future in waiting:
                future.cancel()

    async def disconnected(self) -> None:
        """Wait for the connection's end."""
        await asyncio.wait([self._disconnected])

    async def say_goodbye(self, link_id: str) -> None:
        """Send a Bye, without waiting for room."""
        with contextlib.suppress(zmq.ZMQError):
            self._control.setsockopt(zmq.LINGER, _GOODBYE_MS)
            await self._control.send(encode_header(Bye(link_id)), zmq.NOBLOCK)
